"""A model on several devices in a Python program. The processes are threads here, with engines and models of their own."""

from collections.abc import Iterator

import pytest

from batchgen import LLM, EngineConfig, SamplingParams
from support.fakes import ThreadProcess, threads_as_processes

SHARED = "A shared prefix that is long enough for several chunks of sixteen tokens. "
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def started() -> Iterator[list[ThreadProcess]]:
    with threads_as_processes() as started:
        yield started


def test_results_are_those_of_one_device(started, tiny_model_dir):
    prompts = [f"{SHARED}{'abc'[i % 3]} and its own {i}" for i in range(40)]
    params = SamplingParams(max_tokens=8, temperature=0.8, n=2, seed=3)
    one = LLM(str(tiny_model_dir), device="cpu").generate(prompts, params)
    two = LLM(str(tiny_model_dir), device="cpu:0,1", engine=EngineConfig(batch_size=4, debug=True))
    assert two.generate(prompts, params) == one
    assert len(started) == 2
    assert (two.engine.device, two.unfinished) == ("cpu:0,1", 0)
    assert two.stats.completion_tokens == sum(r.completion_tokens for r in one)
    two.close()


def test_each_device_runs_a_prefix_of_all_prompts_once(started, tiny_model_dir):
    llm = LLM(str(tiny_model_dir), device="cpu:0,1", engine=EngineConfig(batch_size=2))
    llm.generate([f"{SHARED}{i:02d}" for i in range(40)], PARAMS)
    tree = len(SHARED) + 1 + 4 + 40
    # A piece of one row has no node that its device could keep, nor has one that was cut inside of a digit's rows.
    assert tree + len(SHARED) <= llm.stats.prefill_tokens <= tree + len(SHARED) + 20
    before = llm.stats.prefill_tokens
    llm.generate([f"{SHARED}x{i:02d}" for i in range(40)], PARAMS)
    assert llm.stats.prefill_tokens - before < len(SHARED)
    llm.close()


def test_a_prompt_that_cannot_be_run_fails_alone(started, tiny_model_dir):
    llm = LLM(str(tiny_model_dir), device="cpu:0,1", engine=EngineConfig(kv_memory="100KiB"))
    long, short, longer = llm.generate(["x" * 400, "x", "y" * 600], PARAMS)
    assert (long.error_type, short.error_type, longer.error_type) == ("does_not_fit", None, "prompt_too_long")
    (alone,) = llm.generate(["x" * 400], PARAMS)
    assert alone.error_type == "does_not_fit"
    llm.close()
    with pytest.raises(RuntimeError, match=r"^this model is closed: create a new LLM$"):
        llm.generate(["x"], PARAMS)


@pytest.mark.gpu
def test_two_gpus_write_what_one_writes(tiny_model_dir):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    prompts = [f"{SHARED}{'abc'[i % 3]} and its own {i}" for i in range(40)]
    one = LLM(str(tiny_model_dir), device="cuda:0").generate(prompts, PARAMS)
    two = LLM(str(tiny_model_dir), device="cuda:0,1")
    assert two.generate(prompts, PARAMS) == one
    two.close()
