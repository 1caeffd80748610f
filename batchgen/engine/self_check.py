"""Tries an architecture nobody has verified: a small random model of its kind, packed and paged, against transformers itself.

The small model has the class, the kinds of layers and, in small, the length thresholds of the real one. Its completions by
`generate`, one prompt at a time, are run once more through our attention: shared prefixes, slices, decode steps across pages,
all in the same steps. Every logit must agree; anything else, an exception too, is a refusal. A wrong answer is worse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from batchgen.engine.attention.base import StepAttention
from batchgen.engine.attention.cascade import Cascade
from batchgen.engine.attention.plan import plan_attention
from batchgen.engine.kv_cache import KVCache
from batchgen.engine.prepared import LoadedModel, logits_at, prepare
from batchgen.engine.shrink import UNKNOWN, VOCAB, Unshrinkable, shrink
from batchgen.errors import ModelError
from batchgen.model.multimodal import is_multimodal, model_class
from batchgen.prompts.tokenizer import language_config, quiet

PAGE = 8
POOL = 100
"""Pages: more than all texts take."""
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


def _refused(name: str, reason: str) -> ModelError:
    return ModelError(
        f"models of type {name!r} are not supported: they are not on the verified list, and {reason}",
        "docs/models.md lists what is verified; transformers itself runs this model",
    )


def _disagreement(config: Any, seed: int, trust_remote_code: bool, revision: str | None) -> str:
    """What a random model of this configuration does otherwise when packed; empty when nothing."""
    module = _random_model(config, seed, trust_remote_code, revision)
    spans = _tree(seed)
    for span in spans:
        if span.completes:
            _complete(module, span)
    if not _sees_context(module, spans[-1].tokens[: 2 * PAGE]):
        return "a small one of the kind hardly depends on what it has read, so that it cannot be checked"
    worst = _packed(prepare(module), spans)
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


def _tree(seed: int) -> list[_Span]:
    """A prefix of six pages, one of three under it, texts below and beside them; in depth-first order."""
    rng = np.random.default_rng(seed)
    free = iter(rng.permutation(POOL).tolist())

    def span(count: int, *path: _Span, completes: bool = True) -> _Span:
        above = path[-1] if path else None
        tokens = [*(above.tokens if above else ()), *rng.integers(0, VOCAB, count).tolist()]
        table = list(above.table) if above else []  # nodes end with a page
        pages = -(-(len(tokens) + COMPLETION * completes) // PAGE) - len(table)
        return _Span(tokens, path, table + [next(free) for _ in range(pages)], completes)

    upper = span(6 * PAGE, completes=False)
    lower = span(3 * PAGE, upper, completes=False)
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
    other[0, PAGE] = (other[0, PAGE] + 1) % VOCAB
    logits, moved = (module(input_ids=i, use_cache=False).logits[0, -1] for i in (ids, other))
    return bool((logits - moved).abs().max() > VISIBLE * logits.abs().max())


def _packed(model: LoadedModel, spans: list[_Span]) -> float:
    """Runs everything through our attention; the largest difference of a logit, relative to the largest logit."""
    cache = KVCache(model.layers, POOL, PAGE, model.dtype)
    differences: list[torch.Tensor] = []
    for works in _steps(spans):
        plan = plan_attention(cast(Any, works), PAGE, shared_reads=1)
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


def _steps(spans: list[_Span]) -> Iterator[list[_Work]]:
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
