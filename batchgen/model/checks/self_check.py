"""Checks an architecture that nobody has verified: a small random model of its class (`shrink.py`) is compared with transformers.

transformers completes some texts, one at a time, with `generate`. Then batchgen's attention runs the same tokens, packed and paged:
shared prefixes, slices of prompts and decode steps across blocks, all in the same steps. If a logit differs, or anything raises, the
model is refused: that is better than a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

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
from batchgen.model.architectures import is_multimodal
from batchgen.model.checks.shrink import UNKNOWN, VOCAB, Unshrinkable, shrink
from batchgen.model.loaded_model import LoadedModel, logits_at
from batchgen.model.multimodal import model_class
from batchgen.prompts.tokenizer import language_config, quiet
from batchgen.request import TokenArray
from batchgen.scheduling.batch import ScheduledBatch
from batchgen.scheduling.rehearsal import row_of, run_steps, scheduler_of

BLOCK = 8
SLICE = 43
"""Largest number of prompt tokens in a step."""
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
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if trust_remote_code and revision is not None:
        options["code_revision"] = revision
    generates = kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind in MODEL_FOR_MULTIMODAL_LM_MAPPING
    if not trust_remote_code and kind in MODEL_MAPPING and not generates:
        raise _refused(name, "transformers has no class for them that generates text")
    try:
        small = shrink(language_config(config))
        with torch.random.fork_rng(devices=[]), torch.inference_mode(), quiet():
            first, *others = (partial(_disagreement, small, seed, options) for seed in SEEDS)
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


def _disagreement(config: Any, seed: int, options: Mapping[str, Any]) -> str:
    """Returns in words how a random model of this configuration differs when it runs packed; empty if it does not."""
    module = _random_model(config, seed, options)
    prompts = _prompts(seed)
    wanted = [_completion(module, prompt) for prompt in prompts]
    if not _sees_context(module, prompts[-1][: 2 * BLOCK]):
        return "a small model of this type hardly depends on what it has read, so that it cannot be checked"
    worst = _packed_difference(prepare(module), prompts, wanted)
    if not worst <= TOLERANCE:  # NaN too
        return (
            f"a small model of this type gives other logits here than in transformers (by {worst:.1g} of the largest)"
        )
    return ""


def _random_model(config: Any, seed: int, options: Mapping[str, Any]) -> Any:
    """`options`: those of the model's own code."""
    torch.manual_seed(seed)
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


def _prompts(seed: int) -> list[TokenArray]:
    """Returns five texts. Three have a common beginning, and two of these share some tokens more; the others share nothing.

    What texts share ends inside a block, so that blocks are copied.
    """
    rng = np.random.default_rng(seed)

    def text(size: int) -> TokenArray:
        return rng.integers(0, VOCAB, size, dtype=np.int32)

    upper, lower = text(6 * BLOCK - 3), text(3 * BLOCK - 2)
    tree = [(upper, lower, text(5)), (upper, lower, text(19)), (upper, text(3)), (text(2),), (text(2 * UNKNOWN + 35),)]
    return [np.concatenate(parts) for parts in tree]


def _completion(module: Any, prompt: TokenArray) -> tuple[list[int], torch.Tensor]:
    """Returns the tokens of transformers' `generate`, and the logits [tokens, vocabulary] after every token of prompt and completion but the last."""
    ids = torch.from_numpy(prompt).long()[None]
    out = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COMPLETION, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    before = module(input_ids=ids, use_cache=False).logits[0, :-1]
    return out.sequences[0, len(prompt) :].tolist(), torch.cat([before, *out.logits]).float()


def _sees_context(module: Any, prompt: TokenArray) -> bool:
    """Whether the logits after a short text depend on a token in its middle."""
    ids = torch.from_numpy(prompt).long()[None]
    other = ids.clone()
    other[0, BLOCK] = (other[0, BLOCK] + 1) % VOCAB
    logits, moved = (module(input_ids=i, use_cache=False).logits[0, -1] for i in (ids, other))
    return bool((logits - moved).abs().max() > VISIBLE * logits.abs().max())


def _packed_difference(
    model: LoadedModel, prompts: Sequence[TokenArray], wanted: Sequence[tuple[list[int], torch.Tensor]]
) -> float:
    """Runs the prompts and their completions (`_completion`) in steps, as a job does, through batchgen's attention.

    Returns the largest difference of a logit, relative to the largest logit.
    """
    scheduler = scheduler_of(prompts, COMPLETION, BLOCK, SLICE)
    cache = KVCache(model.layers, scheduler.block_manager.pool.num_blocks, BLOCK, model.dtype)
    differences: list[torch.Tensor] = []

    def launch(batch: ScheduledBatch) -> Callable[[], Sequence[int]]:
        cache.copy(batch.copies)
        plan = plan_attention(batch.spans, BLOCK, shared_reads=1)
        output = model.module(
            input_ids=torch.from_numpy(batch.packed.tokens)[None],
            position_ids=torch.from_numpy(plan.positions)[None],
            use_cache=False,
            step_attention=StepAttention(plan, cache),
            logits_to_keep=logits_at(np.arange(plan.num_tokens), model.device, model.spread),
        )
        want = torch.cat([wanted[row_of(scheduler, one.span)][1][one.start : one.stop] for one in batch.spans])
        differences.append((output.logits[0] - want).abs().max() / want.abs().max())
        return lambda: [wanted[sample.sequence.request.row][0][sample.position] for sample in batch.samples]

    run_steps(scheduler, launch)
    return float(torch.stack(differences).max())
