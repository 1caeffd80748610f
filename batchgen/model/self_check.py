"""Tries an architecture nobody has verified: a small random model of its kind, packed and paged, against transformers itself.

The small model has the class, the kinds of layers and, in small, the length thresholds of the real one. Its completions by
`generate`, one prompt at a time, are run once more through our attention: shared prefixes, slices, decode steps across blocks,
all in the same steps. Every logit must agree; anything else, an exception too, is a refusal. A wrong answer is worse.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
)

from batchgen.attention.base import StepAttention
from batchgen.attention.kv_cache import KVCache
from batchgen.attention.plan import plan_attention
from batchgen.attention.torch_backend import Cascade
from batchgen.errors import ModelError
from batchgen.model.adapter import LoadedModel, logits_at, prepare
from batchgen.model.multimodal import is_multimodal, model_class
from batchgen.prompts.tokenizer import OTHER_PARTS, language_config, quiet

CONTEXT = 512
"""Positions that the small model has."""
LENGTH = 20
"""Windows, chunks and the like, from which on attention behaves otherwise, are this or less."""
ORIGINAL = 32
"""Positions that scaled rotary embeddings are said to have been trained with."""
SOFTCAP = 2.0
"""Scores of a small model are small: a higher cap would hardly change them."""
VOCAB = 128
HEADS = 4
WIDTH = 64
UNKNOWN = 128
"""Up to this, numbers that nothing is known of stay as they are: sequences must be longer to pass them."""
LAYERS = 8
"""Most layers that follow one another; where these have not all kinds, one of each kind is kept."""


class Unshrinkable(Exception):
    """The configuration has something that cannot be made small; the message says what."""


def shrink(config: Any) -> Any:
    """A small copy of a transformers configuration. Raises `Unshrinkable`."""
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
    # These change with the longest sequence of a batch: contexts are capped to where they do not.
    capped = bool({"dynamic", "longrope"} & set(_rotary_kinds(vars(small))))
    _shrink(small, _Rules(_divisor(small, width // heads), heads, width, capped))
    return small


# Names of settings.
_LAYER_COUNTS = r"num_hidden_layers|n_layers?|num_layers"
_BOUNDARY = r"first_k_dense_replace|max_window_layers|(num|n)_dense_layers|moe_layer_(start|end)_index"
_PERIOD = r".*(interval|period|every_n_layers|layer_freq|sparse_step|layer_step|window_pattern)"
_LEFT = (  # of no consequence, or no number to shrink
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
    """How single numbers are made small, by their names."""

    def __init__(self, divisor: int, heads: int, width: int, capped: bool) -> None:
        self.divisor = divisor
        """Of the sizes of heads, which depend on one another."""
        self._rules: list[tuple[str, Callable[[int], int]]] = [  # the first that fits counts
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
        """A number of layers from the first, or the index of a layer, among the kept."""
        return bisect_left(self.kept, value) if value < self.total else len(self.kept) + value - self.total


def _shrink(config: Any, rules: _Rules) -> None:
    """In place, past the checks that configurations make of each setting by itself; those that it is made of too."""
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
    """The value of one setting in small."""
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
        if name in ("short_factor", "long_factor"):  # one for each two numbers of a head
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
    """Parts of a head, each about `divisor` times smaller; together they are so exactly, as far as that goes."""
    small = [size // divisor for size in sizes]
    for i in range(sum(sizes) // divisor - sum(small)):
        small[i % len(small)] += 1
    return small


def _choose_layers(settings: Mapping[str, Any]) -> _Layers | None:
    """The layers to keep: the first few where all kinds are among them, else one or two of each kind."""
    total = next((v for n, v in settings.items() if _matches(_LAYER_COUNTS, n) and isinstance(v, int)), None)
    if total is None:
        return None
    # What may make a layer another kind of layer, a list over the layers each.
    marks: list[list[Any]] = [[_overrides(settings).get(i) for i in range(total)]]
    least = 2
    for name, value in settings.items():
        if isinstance(value, list | tuple) and _is_indices(name, value):
            marks.append([i in value for i in range(total)])
        elif isinstance(value, list | tuple) and len(value) == total:
            marks.append(list(value))
        elif isinstance(value, list | tuple) and len(value) < total and all(isinstance(v, str) for v in value):
            least = max(least, len(value) + 1)  # repeated over the layers, it may be
        elif isinstance(value, int) and not isinstance(value, bool) and _matches(_BOUNDARY, name):
            marks.append([i >= value for i in range(total)])
        elif isinstance(value, int) and name == "num_kv_shared_layers" and value > 0:
            marks.append([i >= total - value for i in range(total)])
        elif isinstance(value, int) and value > 1 and _matches(_PERIOD, name):
            least = max(least, value + 1)
    kinds = [repr([mark[i] for mark in marks]) for i in range(total)]
    count = max(least, max(kinds.index(kind) for kind in kinds) + 1)
    if count <= LAYERS:
        return _Layers(total, tuple(range(min(total, count))))
    if least > 2:
        raise Unshrinkable(f"its kinds of layers come back only after {count - 1} of them")
    return _Layers(total, tuple(i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < 2))


def _overrides(settings: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Settings of single layers that are not those of the others, as transformers keeps them."""
    found = (v.per_layer_overrides for v in settings.values() if hasattr(v, "per_layer_overrides"))
    return next(found, {})


def _is_indices(name: str, value: Sequence[Any]) -> bool:
    """Whether this lists layers by their index, not one entry a layer."""
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
    """The kinds of rotary embeddings, wherever they are named."""
    for value in settings.values():
        if isinstance(value, Mapping) or hasattr(value, "model_type"):
            nested = value if isinstance(value, Mapping) else vars(value)
            yield nested.get("rope_type", nested.get("type"))
            yield from _rotary_kinds(nested)


def _divisor(config: Any, size: int) -> int:
    """What all sizes of heads are divided by: they depend on one another. Where none is named, theirs is `size`."""
    sizes = {v for n, v in _numbers(config) if _matches(_HEAD_SIZE, n)}
    if not sizes:
        return max(1, size // (WIDTH // HEADS))
    limit = WIDTH // HEADS if len(sizes) == 1 else 2 * WIDTH // HEADS
    divisor = 1
    while max(sizes) // divisor > limit and all(size % (4 * divisor) == 0 for size in sizes):
        divisor *= 2
    return divisor


BLOCK = 8
POOL = 100
"""Blocks: more than all texts take."""
SLICE = 43
"""Most prompt tokens of a span in a step."""
COMPLETION = 12
TOLERANCE = 5e-4
"""Largest difference of logits, relative to the largest logit: float32 noise stays far below."""
VISIBLE = 10 * TOLERANCE
"""What one token a few positions back must at least change, or the comparison would prove nothing."""
SEEDS = (0, 1, 2)


def self_check(config: Any, *, trust_remote_code: bool = False, revision: str | None = None) -> None:
    """Raises `ModelError`, in one line, unless a small model of this kind runs as in transformers. Takes about a second, on the CPU."""
    name = getattr(config, "model_type", "unknown")
    kind = type(language_config(config))
    if not trust_remote_code and kind in MODEL_MAPPING and not _generates(kind):
        raise _refused(name, "transformers has no class of them that generates text")
    try:
        small = shrink(language_config(config))
        with torch.random.fork_rng(devices=[]), torch.inference_mode(), quiet():
            first, *others = (partial(_disagreement, small, seed, trust_remote_code, revision) for seed in SEEDS)
            # A near tie between experts, say, is float noise: then other models must agree, all of them.
            reason = first() and next((why for other in others if (why := other())), "")
    except Unshrinkable as e:
        reason = f"no small one can be made of it to check: {e}"
    except Exception as e:
        what = " ".join((e.message if isinstance(e, ModelError) else f"{type(e).__name__}: {e}").split())
        raise _refused(name, f"a small one of the kind does not run: {what[:200]}") from e
    if reason:
        raise _refused(name, reason)


def _generates(kind: type) -> bool:
    """Whether transformers has a class for models with this kind of configuration that writes text."""
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind in MODEL_FOR_MULTIMODAL_LM_MAPPING


def _refused(name: str, reason: str) -> ModelError:
    return ModelError(
        f"models of type {name!r} are not supported: they are not on the verified list, and {reason}",
        "docs/models.md lists what is verified; transformers itself runs this model",
    )


def _disagreement(config: Any, seed: int, trust_remote_code: bool, revision: str | None) -> str:
    """What a random model of this configuration does otherwise when packed; empty when nothing."""
    module = _random_model(config, seed, trust_remote_code, revision)
    spans = _span_tree(seed)
    for span in spans:
        if span.completes:
            _complete(module, span)
    if not _sees_context(module, spans[-1].tokens[: 2 * BLOCK]):
        return "a small one of the kind hardly depends on what it has read, so that it cannot be checked"
    worst = _packed_difference(prepare(module), spans)
    if not worst <= TOLERANCE:  # NaN too
        return f"a small one of the kind gives other logits here than in transformers (by {worst:.1g} of the largest)"
    return ""


def _random_model(config: Any, seed: int, trust_remote_code: bool, revision: str | None) -> Any:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if trust_remote_code and revision is not None:
        options["code_revision"] = revision
    exact = {"dtype": torch.float32, "attn_implementation": "eager"}
    kind = model_class(config)
    if is_multimodal(config):  # parts that are left out take no memory on this way
        module = kind.from_pretrained(None, config=config, state_dict={}, **exact)
    elif kind is AutoModelForCausalLM:
        module = kind.from_config(config, **options, **exact)
    else:
        module = kind._from_config(config, **exact)
    module.float().eval()
    for parameter in module.parameters():  # also what begins as zeros or ones, gates say
        noise = torch.randn(parameter.shape) * 0.1
        parameter.copy_(noise if parameter.dim() > 1 else parameter.nan_to_num() + noise)
    for name, buffer in module.named_buffers():
        if "bias" in name and buffer.is_floating_point():
            buffer.add_(torch.randn(buffer.shape) * 0.1)
    module.generation_config = GenerationConfig()
    return module


@dataclass(slots=True, eq=False)
class _Span:
    """A run of tokens behind those of its path, as the plan of a step's attention asks of a span, and no more."""

    tokens: list[int]
    """From position 0: those of the path, its own, and in the end its completion."""
    path: tuple[_Span, ...]
    table: list[int]
    completes: bool
    """Whether it is a text, not a node that texts share."""
    prompt: int = field(init=False)
    """Tokens before the completion."""
    computed: int = field(init=False)
    dropped: int = 0
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[positions that are run, vocabulary] of a text, as transformers has them."""

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.computed = self.start

    @property
    def start(self) -> int:
        return self.path[-1].prompt if self.path else 0

    @property
    def end(self) -> int:
        """The last token of a completion is never run."""
        return len(self.tokens) - self.completes


@dataclass(frozen=True, slots=True)
class _Work:
    span: _Span
    start: int
    stop: int


def _span_tree(seed: int) -> list[_Span]:
    """A prefix of six blocks, one of three under it, texts below and beside them; in depth-first order."""
    rng = np.random.default_rng(seed)
    free = iter(rng.permutation(POOL).tolist())

    def span(count: int, *path: _Span, completes: bool = True) -> _Span:
        above = path[-1] if path else None
        tokens = [*(above.tokens if above else ()), *rng.integers(0, VOCAB, count).tolist()]
        table = list(above.table) if above else []  # nodes end with a block
        blocks = -(-(len(tokens) + COMPLETION * completes) // BLOCK) - len(table)
        return _Span(tokens, path, table + [next(free) for _ in range(blocks)], completes)

    upper = span(6 * BLOCK, completes=False)
    lower = span(3 * BLOCK, upper, completes=False)
    below = [span(5, upper, lower), span(19, upper, lower), span(3, upper)]
    return [upper, lower, *below, span(2), span(2 * UNKNOWN + 35)]


def _complete(module: Any, text: _Span) -> None:
    """Adds the completion that transformers' `generate` gives, and the logits of every token."""
    ids = torch.tensor([text.tokens])
    out = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COMPLETION, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    prompt = module(input_ids=ids, use_cache=False).logits[0, :-1]
    text.logits = torch.cat([prompt, *out.logits]).float()
    text.tokens = out.sequences[0].tolist()


def _sees_context(module: Any, prompt: list[int]) -> bool:
    """Whether the logits after a short text depend on a token in its middle."""
    ids = torch.tensor([prompt])
    other = ids.clone()
    other[0, BLOCK] = (other[0, BLOCK] + 1) % VOCAB
    logits, moved = (module(input_ids=i, use_cache=False).logits[0, -1] for i in (ids, other))
    return bool((logits - moved).abs().max() > VISIBLE * logits.abs().max())


def _packed_difference(model: LoadedModel, spans: list[_Span]) -> float:
    """Runs everything through our attention; the largest difference of a logit, relative to the largest logit."""
    cache = KVCache(model.layers, POOL, BLOCK, model.dtype)
    differences: list[torch.Tensor] = []
    for works in _mixed_steps(spans):
        plan = plan_attention(cast(Any, works), BLOCK, shared_reads=1)
        output = model.module(
            input_ids=torch.tensor([[token for w in works for token in w.span.tokens[w.start : w.stop]]]),
            position_ids=torch.from_numpy(plan.positions)[None],
            use_cache=False,
            step_attention=StepAttention(plan, {on: Cascade(plan, on) for on in cache.devices}, cache),
            logits_to_keep=logits_at(np.arange(plan.num_tokens), model.device, model.spread),
        )
        want = torch.cat([_expected(w, spans) for w in works])
        differences.append((output.logits[0] - want).abs().max() / want.abs().max())
    return float(torch.stack(differences).max())


def _expected(work: _Work, spans: list[_Span]) -> torch.Tensor:
    """Those of the text itself, for a node those of a text below."""
    text = work.span if work.span.completes else next(s for s in spans if s.completes and work.span in s.path)
    return text.logits[work.start : work.stop]


def _mixed_steps(spans: list[_Span]) -> Iterator[list[_Work]]:
    """Slices of prompts and single tokens, mixed, in depth-first order; a span starts when those above it are done."""
    while any(span.computed < span.end for span in spans):
        works: list[_Work] = []
        for span in spans:
            if span.computed < span.end and all(node.computed == node.end for node in span.path):
                count = min(SLICE, span.prompt - span.computed) if span.computed < span.prompt else 1
                works.append(_Work(span, span.computed, span.computed + count))
        yield works
        for work in works:
            work.span.computed = work.stop
