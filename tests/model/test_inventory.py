"""Figures name the parts of a model, and with --debug have digests of what it computes with, so that two runs can be compared."""

import pytest
import torch

from batchgen import LLM, EngineConfig, SamplingParams
from batchgen.kernels.isa import instruction_set

PROMPTS = ["The common beginning of all of these prompts is long enough for a block, " + end for end in ("a", "b", "c")]


def found(folder, change=None, compile="auto", **options):
    with LLM(str(folder), device="cpu", compile=compile, engine=EngineConfig(debug=True, **options)) as llm:
        model = llm._engine.runner.model
        if change is not None:
            change(model.module)
        llm.generate(PROMPTS, SamplingParams(max_tokens=2))
        return llm._engine.stats.parts


def test_two_runs_have_the_same_parts_and_digests_whatever_the_batch(tiny_model_dir):
    first = found(tiny_model_dir)
    assert first["digests"].keys() == {"weights", "tables", "kv"}
    assert found(tiny_model_dir, batch_size=1) == first


def test_parts_say_which_are_kernels(tiny_model_dir):
    plain, own = found(tiny_model_dir, compile="off"), found(tiny_model_dir)
    assert plain["instruction_set"] is None
    assert plain["modules"]["Linear float32"] == 14 + 1
    if own["instruction_set"] is None:
        pytest.skip("no kernels on this machine")
    assert own["instruction_set"] == instruction_set()
    assert own["modules"] != plain["modules"]
    assert {kind for kind in own["modules"] if "LlamaRMSNorm" in kind} == set()


@pytest.mark.parametrize(("which", "of"), [("weights", "mlp"), ("tables", "rotary_emb")])
def test_one_changed_number_changes_one_digest_and_the_kv(tiny_model_dir, which, of):
    def change(module):
        part = next(part for name, part in module.named_modules() if name.endswith(of))
        tensors = [t for p in part.modules() for t in (*p.parameters(), *p.buffers(), *vars(p).values()) if isinstance(t, torch.Tensor)]  # fmt: skip
        with torch.inference_mode():
            for tensor in tensors:
                tensor.view(-1).view(torch.uint8)[-1] ^= 1

    right, wrong = found(tiny_model_dir)["digests"], found(tiny_model_dir, change)["digests"]
    assert wrong[which] != right[which]
    assert {name for name in right if right[name] != wrong[name]} <= {which, "kv"}
