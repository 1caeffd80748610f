"""Figures name the parts of a model, so that two runs can be compared."""

import pytest

from batchgen import LLM, EngineConfig, SamplingParams
from batchgen.kernels.isa import instruction_set

PROMPTS = ["The common beginning of all of these prompts is long enough for a block, " + end for end in ("a", "b", "c")]


def found(folder, compile="auto", **options):
    with LLM(str(folder), device="cpu", compile=compile, engine=EngineConfig(**options)) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=2))
        return llm._engine.stats.parts


def test_two_runs_have_the_same_parts_whatever_the_batch(tiny_model_dir):
    assert found(tiny_model_dir, batch_size=1) == found(tiny_model_dir)


def test_parts_say_which_are_kernels(tiny_model_dir):
    plain, own = found(tiny_model_dir, compile="off"), found(tiny_model_dir)
    assert plain["instruction_set"] is None
    assert plain["modules"]["Linear float32"] == 14 + 1
    if own["instruction_set"] is None:
        pytest.skip("no kernels on this machine")
    assert own["instruction_set"] == instruction_set()
    assert own["modules"] != plain["modules"]
    assert {kind for kind in own["modules"] if "LlamaRMSNorm" in kind} == set()
