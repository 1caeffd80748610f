"""Makes a small copy of a transformers configuration. It keeps the kinds of layers, and the length thresholds become small too."""

from __future__ import annotations

import copy
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from batchgen.prompts.tokenizer import OTHER_PARTS

CONTEXT = 512
"""Positions of the small model."""
LENGTH = 20
"""Largest value of lengths at which attention changes: sliding windows, chunks."""
ORIGINAL = 32
"""Positions that scaled rotary embeddings were trained with, as the configuration says."""
SOFTCAP = 2.0
"""Largest cap of attention scores: those of a small model are small, and a higher cap would hardly change them."""
VOCAB = 128
HEADS = 4
WIDTH = 64
UNKNOWN = 128
"""A number of unknown meaning stays as it is up to this, and is refused above: sequences are longer than this, in case it is a length."""
LAYERS = 8
"""The first layers are kept, at most so many; if they do not have all kinds, one or two layers of each kind are kept."""


class Unshrinkable(Exception):
    """The configuration has something that cannot be made small; the message says what."""


def shrink(config: Any) -> Any:
    """Returns a small copy of a transformers configuration. Raises `Unshrinkable`."""
    small = copy.deepcopy(config)
    if getattr(small, "quantization_config", None) is not None:
        del small.quantization_config
    if getattr(small, "text_config", None) is not None:  # the other parts are not run
        small.text_config = shrink(small.text_config)
        return small
    heads = next(
        (v for n, v in _numbers(small) if _matches(r"(num|decoder)_attention_heads|n_heads?|num_heads", n)), HEADS
    )
    width = next((v for n, v in _numbers(small) if _matches(r"hidden_size|d_model|n_embd|dim", n)), WIDTH)
    # These change only beyond the length at which batchgen ends the context (`prompts/tokenizer.py`).
    capped = bool({"dynamic", "longrope"} & set(_rotary_kinds(vars(small))))
    _shrink(small, _Rules(_divisor(small, width // heads), heads, width, capped))
    return small


# Names of settings.
_LAYER_COUNTS = r"num_hidden_layers|n_layers?|num_layers"
_BOUNDARY = r"first_k_dense_replace|max_window_layers|(num|n)_dense_layers|moe_layer_(start|end)_index"
_PERIOD = r".*(interval|period|every_n_layers|layer_freq|sparse_step|layer_step|window_pattern)"
_LEFT = (  # stay as they are: without effect on the check, or not sizes
    r".*token_(id|index)|.*label.*|.*dtype|pretraining_tp|chunk_size_feed_forward|num_(nextn_predict|mtp)_layers"
    r"|transformers_version|num_image_tokens|.*theta|.*factor|auto_map|architectures"
)
_CONTEXT = r"max_position_embeddings|n_positions|max_seq(uence)?_len(gth)?|seq_len(gth)?|n_ctx|model_max_length"
_EXPERTS_CHOSEN = (
    r".*experts?_per_tok(en)?|moe_top_?k|moe_k|.*expert.*top_?k|top_?k_experts?|top_?k|num_selected_experts"
)
_KV_HEADS = r".*(key_value|kv|query_group|multi_query_group).*(heads?|groups|num).*"
_HEADS = r".*(attention_heads?|n_heads?|num_heads|query_heads).*"
_HEAD_SIZE = r".*(head_dim|head_size|kv_channels|d_kv|d_head|rotary_dim|query_pre_attn_scalar)"
_WIDTH = r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|proj_dim|dim_model|model_dim|lru_width).*|dim"


class _Rules:
    """Makes single numbers small, by their names."""

    def __init__(self, divisor: int, heads: int, width: int, capped: bool) -> None:
        self.divisor = divisor
        """All sizes of heads are divided by this, because they depend on one another."""
        self._rules: list[tuple[str, Callable[[int], int]]] = [  # the first pattern that matches a name counts
            (_CONTEXT, lambda v: CONTEXT),
            (
                r"original_max_position_embeddings|original_seq_len(gth)?",
                lambda v: CONTEXT if capped else min(v, ORIGINAL),
            ),
            (r".*vocab_size.*", lambda v: min(v, VOCAB)),
            (_EXPERTS_CHOSEN, lambda v: min(v, 2)),
            (r"n_groups?|num_expert_groups?", lambda v: min(v, 2)),
            (r"topk_groups?", lambda v: 1),
            (r".*shared_experts?", lambda v: min(v, 2)),
            (r".*(num|n)_(routed_|local_)?experts?|zero_expert_num", lambda v: min(v, 8)),
            (r".*top_?k_blocks", lambda v: min(v, 2)),
            (r".*(block_size|multiple_of)", lambda v: min(v, 8)),
            (r".*(window|chunk_size|local_attention|top_?k|floor_scale).*", lambda v: min(v, LENGTH)),
            (_KV_HEADS, lambda v: HEADS if v == heads else min(v, 2)),
            (_HEADS, lambda v: 2 * HEADS if v > heads else HEADS),
            (_HEAD_SIZE, lambda v: max(1, v // divisor)),
            (r".*(intermediate|ffn|feed_forward|mlp|dff|n_inner|inner_dim|expert).*", lambda v: min(v, 96)),
            (r".*rank", lambda v: min(v, 16)),
            (_WIDTH, lambda v: WIDTH if v == width else WIDTH // 2 if v < width else 2 * WIDTH),
        ]

    def small(self, name: str, value: int) -> int:
        """Raises `Unshrinkable` for a large number of unknown meaning."""
        for pattern, rule in self._rules:
            if _matches(pattern, name):
                return rule(value)
        if value > UNKNOWN:
            raise Unshrinkable(f"its setting {name}={value} is of an unknown kind")
        return value


@dataclass(frozen=True, slots=True)
class _Layers:
    """Which of the layers are kept, in order."""

    total: int
    kept: tuple[int, ...]

    def boundary(self, value: int) -> int:
        """Returns how many of the first `value` layers are kept. A `value` beyond the last layer stays as far beyond it."""
        return bisect_left(self.kept, value) if value < self.total else len(self.kept) + value - self.total


def _shrink(config: Any, rules: _Rules) -> None:
    """Makes a configuration and those inside it small, in place. Writes past their setters, which check each setting by itself."""
    settings = vars(config)
    layers = _choose_layers(settings)
    for name, value in settings.items():
        if name in OTHER_PARTS:
            continue
        if hasattr(value, "model_type"):
            _shrink(value, rules)
        elif hasattr(value, "per_layer_overrides"):
            value.per_layer_overrides = {
                layer: {n: _small(n, v, None, rules) for n, v in _overrides(settings).get(old, {}).items()}
                for layer, old in enumerate(layers.kept if layers else ())
                if old in _overrides(settings)
            }
        elif name in ("bos_token_id", "eos_token_id", "decoder_start_token_id"):
            settings[name] = None
        elif name == "pad_token_id" and isinstance(value, int):
            settings[name] = min(value, VOCAB - 1)
        elif name in ("initializer_range", "init_std", "initializer_std"):
            settings[name] = 0.1
        elif not _matches(_LEFT, name):
            settings[name] = _small(name, value, layers, rules)


def _small(name: str, value: Any, layers: _Layers | None, rules: _Rules) -> Any:
    """Returns the small value of one setting."""
    if isinstance(value, Mapping):
        if any(str(key).isdigit() for key in value):
            raise Unshrinkable(f"its setting {name} is of an unknown kind")
        return {
            key: v if type(v) is int and _matches(_LEFT, key) else _small(key, v, None, rules)
            for key, v in value.items()
        }
    if isinstance(value, list | tuple):
        if layers is not None and _is_indices(name, value):
            return type(value)(layers.kept.index(i) for i in value if i in layers.kept)
        if layers is not None and len(value) == layers.total:
            value = type(value)(value[i] for i in layers.kept)
        if _matches(r".*section", name):
            return type(value)(_sections(value, rules.divisor))
        if name in ("short_factor", "long_factor"):  # a factor for each two numbers of a head
            return value[: len(value) // rules.divisor]
        return type(value)(_small(name, v, None, rules) for v in value)
    if isinstance(value, float) and _matches(r"att.*softcap.*", name):
        return min(value, SOFTCAP)
    if (
        value is None
        or isinstance(value, bool | float | str | set | frozenset)
        or (isinstance(value, int) and value <= 0)
    ):
        return value
    if not isinstance(value, int):
        raise Unshrinkable(f"its setting {name} is of an unknown kind")
    if layers is not None and _matches(_LAYER_COUNTS, name):
        return len(layers.kept)
    if layers is not None and _matches(_BOUNDARY, name):
        return layers.boundary(value)
    if layers is not None and name == "num_kv_shared_layers":
        return len(layers.kept) - layers.boundary(layers.total - value)
    return rules.small(name, value)


def _sections(sizes: Sequence[int], divisor: int) -> list[int]:
    """Returns the parts of a head, each about `divisor` times smaller; so is their sum, rounded down."""
    small = [size // divisor for size in sizes]
    for i in range(sum(sizes) // divisor - sum(small)):
        small[i % len(small)] += 1
    return small


def _choose_layers(settings: Mapping[str, Any]) -> _Layers | None:
    """Returns the layers to keep: the first few if all kinds are among them, else one or two of each kind. None without a number of layers."""
    total = next((v for n, v in settings.items() if _matches(_LAYER_COUNTS, n) and isinstance(v, int)), None)
    if total is None:
        return None
    # Lists over the layers; layers with the same entries are of one kind.
    marks: list[list[Any]] = [[_overrides(settings).get(i) for i in range(total)]]
    period = 2  # layers after which a pattern repeats, and one more
    for name, value in settings.items():
        if isinstance(value, list | tuple) and _is_indices(name, value):
            marks.append([i in value for i in range(total)])
        elif isinstance(value, list | tuple) and len(value) == total:
            marks.append(list(value))
        elif isinstance(value, list | tuple) and len(value) < total and all(isinstance(v, str) for v in value):
            period = max(period, len(value) + 1)  # perhaps repeated over the layers
        elif isinstance(value, int) and not isinstance(value, bool) and _matches(_BOUNDARY, name):
            marks.append([i >= value for i in range(total)])
        elif isinstance(value, int) and name == "num_kv_shared_layers" and value > 0:
            marks.append([i >= total - value for i in range(total)])
        elif isinstance(value, int) and value > 1 and _matches(_PERIOD, name):
            period = max(period, value + 1)
    kinds = [repr([mark[i] for mark in marks]) for i in range(total)]
    count = max(period, max(kinds.index(kind) for kind in kinds) + 1)
    if count <= LAYERS:
        return _Layers(total, tuple(range(min(total, count))))
    if period > 2:
        raise Unshrinkable(f"the pattern of its layers repeats only after {count - 1} layers")
    return _Layers(total, tuple(i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < 2))


def _overrides(settings: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns the settings of single layers that differ from those of the others, by layer."""
    found = (v.per_layer_overrides for v in settings.values() if hasattr(v, "per_layer_overrides"))
    return next(found, {})


def _is_indices(name: str, value: Sequence[Any]) -> bool:
    """Whether this list names layers by their index, instead of having an entry for each layer."""
    named = _matches(r".*(layers|idxs|indexes|indices)", name) and all(isinstance(i, int) for i in value)
    return named and all(a < b for a, b in pairwise(value))


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern, name) is not None


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    for name, value in vars(config).items():
        if hasattr(value, "model_type"):
            yield from _numbers(value)
        elif hasattr(value, "per_layer_overrides"):
            yield from ((n, v) for one in value.per_layer_overrides.values() for n, v in one.items() if type(v) is int)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield name, value


def _rotary_kinds(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the types of rotary embeddings that the settings name, at any depth."""
    for value in settings.values():
        if isinstance(value, Mapping) or hasattr(value, "model_type"):
            nested = value if isinstance(value, Mapping) else vars(value)
            yield nested.get("rope_type", nested.get("type"))
            yield from _rotary_kinds(nested)


def _divisor(config: Any, size: int) -> int:
    """Returns the number by which all sizes of heads are divided. If no setting names one, heads have `size` numbers."""
    sizes = {v for n, v in _numbers(config) if _matches(_HEAD_SIZE, n)}
    if not sizes:
        return max(1, size // (WIDTH // HEADS))
    limit = WIDTH // HEADS if len(sizes) == 1 else 2 * WIDTH // HEADS
    divisor = 1
    while max(sizes) // divisor > limit and all(size % (4 * divisor) == 0 for size in sizes):
        divisor *= 2
    return divisor
