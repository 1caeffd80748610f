"""Checks an architecture that nobody has verified: a small random model of its class (`shrink.py`) is compared with transformers.

transformers completes some texts, one at a time, with `generate`. Then batchgen's attention runs the same tokens, packed and paged:
shared prefixes, slices of prompts and decode steps across blocks, all in the same steps. If a logit differs, or anything raises, the
model is refused: that is better than a wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
)

from batchgen.attention.kv_cache import KVCache
from batchgen.attention.plan import plan_attention
from batchgen.attention.torch_backend import StepAttention
from batchgen.errors import ModelError
from batchgen.model.adapter import prepare
from batchgen.model.loaded_model import LoadedModel, logits_at
from batchgen.model.multimodal import is_multimodal, model_class
from batchgen.model.shrink import UNKNOWN, VOCAB, Unshrinkable, shrink
from batchgen.prompts.tokenizer import language_config, quiet

BLOCK = 8
POOL = 100
"""Blocks in the pool: more than all texts need."""
SLICE = 43
"""Largest number of prompt tokens of a span in a step."""
COMPLETION = 12
TOLERANCE = 5e-4
"""Largest allowed difference of logits, relative to the largest logit; float32 rounding stays far below."""
VISIBLE = 10 * TOLERANCE
"""Another token a few positions back must change a logit by more than this, or the comparison would prove nothing."""
SEEDS = (0, 1, 2)


def self_check(config: Any, *, trust_remote_code: bool = False, revision: str | None = None) -> None:
    """Raises `ModelError`, in one line, unless a small model of this kind gives transformers' logits. Takes about a second on the CPU."""
    name = getattr(config, "model_type", "unknown")
    kind = type(language_config(config))
    generates = kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind in MODEL_FOR_MULTIMODAL_LM_MAPPING
    if not trust_remote_code and kind in MODEL_MAPPING and not generates:
        raise _refused(name, "transformers has no class for them that generates text")
    try:
        small = shrink(language_config(config))
        with torch.random.fork_rng(devices=[]), torch.inference_mode(), quiet():
            first, *others = (partial(_disagreement, small, seed, trust_remote_code, revision) for seed in SEEDS)
            # One model may differ by chance (a near tie between two experts): then all others must agree.
            reason = first() and next((why for other in others if (why := other())), "")
    except Unshrinkable as e:
        reason = f"no small model of this type can be made to check: {e}"
    except Exception as e:
        what = " ".join((e.message if isinstance(e, ModelError) else f"{type(e).__name__}: {e}").split())
        raise _refused(name, f"a small model of this type does not run: {what[:200]}") from e
    if reason:
        raise _refused(name, reason)


def _refused(name: str, reason: str) -> ModelError:
    return ModelError(
        f"models of type {name!r} are not supported: they are not on the verified list, and {reason}",
        "docs/models.md lists what is verified; transformers itself runs this model",
    )


def _disagreement(config: Any, seed: int, trust_remote_code: bool, revision: str | None) -> str:
    """Returns in words how a random model of this configuration differs when it runs packed; empty if it does not."""
    module = _random_model(config, seed, trust_remote_code, revision)
    spans = _span_tree(seed)
    for span in spans:
        if span.completes:
            _complete(module, span)
    if not _sees_context(module, spans[-1].tokens[: 2 * BLOCK]):
        return "a small model of this type hardly depends on what it has read, so that it cannot be checked"
    worst = _packed_difference(prepare(module), spans)
    if not worst <= TOLERANCE:  # NaN too
        return (
            f"a small model of this type gives other logits here than in transformers (by {worst:.1g} of the largest)"
        )
    return ""


def _random_model(config: Any, seed: int, trust_remote_code: bool, revision: str | None) -> Any:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if trust_remote_code and revision is not None:
        options["code_revision"] = revision
    exact = {"dtype": torch.float32, "attn_implementation": "eager"}
    kind = model_class(config)
    if is_multimodal(config):  # in this way, parts that are left out take no memory
        module = kind.from_pretrained(None, config=config, state_dict={}, **exact)
    elif kind is AutoModelForCausalLM:
        module = kind.from_config(config, **options, **exact)
    else:
        module = kind._from_config(config, **exact)
    module.float().eval()
    for parameter in module.parameters():  # also those that start as zeros or ones, such as gates
        noise = torch.randn(parameter.shape) * 0.1
        parameter.copy_(noise if parameter.dim() > 1 else parameter.nan_to_num() + noise)
    for name, buffer in module.named_buffers():
        if "bias" in name and buffer.is_floating_point():
            buffer.add_(torch.randn(buffer.shape) * 0.1)
    module.generation_config = GenerationConfig()
    return module


@dataclass(slots=True, eq=False)
class _TreeSpan:
    """A node or a text of the tree, with the attributes of a sequence that an attention plan reads."""

    tokens: list[int]
    """From position 0: those of the path, its own, and at the end its completion."""
    path: tuple[_TreeSpan, ...]
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
class _Part:
    """Tokens `start` to `stop` of a span, which run in one step."""

    span: _TreeSpan
    start: int
    stop: int


def _span_tree(seed: int) -> list[_TreeSpan]:
    """Returns a prefix of six blocks, one of three below it, and texts below and beside them; in depth-first order."""
    rng = np.random.default_rng(seed)
    free = iter(rng.permutation(POOL).tolist())

    def span(count: int, *path: _TreeSpan, completes: bool = True) -> _TreeSpan:
        above = path[-1] if path else None
        tokens = [*(above.tokens if above else ()), *rng.integers(0, VOCAB, count).tolist()]
        table = list(above.table) if above else []  # nodes end with a block
        blocks = -(-(len(tokens) + COMPLETION * completes) // BLOCK) - len(table)
        return _TreeSpan(tokens, path, table + [next(free) for _ in range(blocks)], completes)

    upper = span(6 * BLOCK, completes=False)
    lower = span(3 * BLOCK, upper, completes=False)
    below = [span(5, upper, lower), span(19, upper, lower), span(3, upper)]
    return [upper, lower, *below, span(2), span(2 * UNKNOWN + 35)]


def _complete(module: Any, text: _TreeSpan) -> None:
    """Adds the completion of transformers' `generate`, and the logits after every token but the last."""
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


def _packed_difference(model: LoadedModel, spans: list[_TreeSpan]) -> float:
    """Runs everything through batchgen's attention. Returns the largest difference of a logit, relative to the largest logit."""
    cache = KVCache(model.layers, POOL, BLOCK, model.dtype)
    differences: list[torch.Tensor] = []
    for parts in _mixed_steps(spans):
        plan = plan_attention(cast(Any, parts), BLOCK, shared_reads=1)
        output = model.module(
            input_ids=torch.tensor([[token for part in parts for token in part.span.tokens[part.start : part.stop]]]),
            position_ids=torch.from_numpy(plan.positions)[None],
            use_cache=False,
            step_attention=StepAttention(plan, cache),
            logits_to_keep=logits_at(np.arange(plan.num_tokens), model.device, model.spread),
        )
        want = torch.cat([_expected(part, spans) for part in parts])
        differences.append((output.logits[0] - want).abs().max() / want.abs().max())
    return float(torch.stack(differences).max())


def _expected(part: _Part, spans: list[_TreeSpan]) -> torch.Tensor:
    """Returns transformers' logits: those of the text, or for a node those of a text below it."""
    text = part.span if part.span.completes else next(s for s in spans if s.completes and part.span in s.path)
    return text.logits[part.start : part.stop]


def _mixed_steps(spans: list[_TreeSpan]) -> Iterator[list[_Part]]:
    """Yields steps of slices of prompts and single tokens, mixed, in depth-first order. A span starts when those above it are done."""
    while any(span.computed < span.end for span in spans):
        parts: list[_Part] = []
        for span in spans:
            if span.computed < span.end and all(node.computed == node.end for node in span.path):
                count = min(SLICE, span.prompt - span.computed) if span.computed < span.prompt else 1
                parts.append(_Part(span, span.computed, span.computed + count))
        yield parts
        for part in parts:
            part.span.computed = part.stop
