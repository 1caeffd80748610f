"""Kernels of a GPU fail in the middle of a job: it continues in plain torch from the tokens it has, and no row is lost."""

import json
import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from batchgen.config import EngineConfig
from batchgen.engine import engine as engine_module
from batchgen.errors import DevicesLost
from batchgen.llm import LLM
from batchgen.model.checks.device_check import Verdict
from support.fake_device import FakeAttention, use_fake_device
from support.models import engine_for, make_requests, mixed_requests, plain_llama, rounded, run
from support.params import slow_but

GROUP = list(range(40))
PROMPTS = [[*GROUP, i] for i in range(6)] + [[50 + i] * (3 + i) for i in range(3)] + [GROUP, [7]]


def mixed():
    return mixed_requests(random.Random(1), 11)


@pytest.fixture(scope="module")
def want(model):
    return rounded(run(engine_for(model), mixed()))


def failing_from(step, fault):
    """Attention whose outputs go through `fault` from that step on."""

    class Failing(FakeAttention):
        def __call__(self, *arguments):
            out = super().__call__(*arguments)
            return fault(out) if len(self.sizes) > step else out

    return Failing


def raises(out):
    raise ValueError("out of resource: shared memory")


@pytest.mark.parametrize(
    ("step", "ahead"),
    slow_but([(7, 0), (1, 1)], product([0, 1, 7, 12], [0, 1])),
)
def test_a_job_goes_on_in_plain_torch_and_the_switch_off_is_said_once_and_kept(
    model, want, monkeypatch, tmp_path, step, ahead
):
    use_fake_device(monkeypatch, attention=failing_from(step, raises))
    kept = Verdict("cuda:0 (Fake)", file=tmp_path / "kept.json")
    engine = engine_for(replace(model, verdict=kept), batch_size=6, ahead=ahead)
    assert engine.attention == "triton"
    assert rounded(run(engine, mixed())) == want
    assert engine.attention == "cascade"
    why = "a step ended with ValueError: out of resource: shared memory"
    assert engine.notes == [
        f"cuda:0 (Fake): batchgen's attention kernels: switched off, plain torch attends, which is slower, because {why}; "
        f"please report this line with {kept.file}, where it is stored (remove the file to try again)"
    ]
    assert json.loads(kept.file.read_text()) == {"key": {}, "failed": "triton", "why": why}
    assert rounded(run(engine, mixed())) == want  # the next window, on what is resident now
    assert len(engine.notes) == 1
    engine.block_manager.evict_all()
    assert engine.block_manager.pool.num_used == 0
    assert not engine.sampler.used


def test_logits_that_are_no_numbers_fail_their_rows_and_the_kernels_go_on(monkeypatch):
    poisoned = plain_llama(poison=96)
    prompts = [*PROMPTS, [1, 96, 2], [3, 96]]
    requests = make_requests(prompts, [12] * len(prompts))
    expected = rounded(run(engine_for(poisoned), requests))
    use_fake_device(monkeypatch)
    engine = engine_for(poisoned)
    assert rounded(run(engine, requests)) == expected
    assert [expected[row][3] for row in (10, 11, 12)] == [None, "numerical_error", "numerical_error"]
    assert (engine.attention, engine.notes) == ("triton", [])


def test_where_the_device_is_lost_the_job_ends_with_what_to_do_and_the_next_start_avoids_the_kernels(
    model, monkeypatch, tmp_path
):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    use_fake_device(monkeypatch, attention=failing_from(5, raises))
    kept = Verdict("cuda:0 (Fake)", file=tmp_path / "kept.json")
    engine = engine_for(replace(model, verdict=kept))
    monkeypatch.setattr(engine.runner, "drop_kernels", lost)
    with pytest.raises(DevicesLost) as end:
        run(engine, mixed())
    assert str(end.value) == (
        "cpu: a step ended with ValueError: out of resource: shared memory; the device runs nothing more in this process; "
        f"run the same command again: it continues in plain torch, as {kept.file} says"
    )
    assert json.loads(kept.file.read_text())["failed"] == "triton"


def test_memory_that_runs_out_is_no_fault_of_the_kernels(model, want, monkeypatch):
    def full(out):
        if len(out) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out

    use_fake_device(monkeypatch, attention=failing_from(3, full))
    engine = engine_for(replace(model, compile="off"))
    assert rounded(run(engine, mixed())) == want
    assert engine.attention == "triton"


def test_kernels_that_fail_in_the_largest_step_are_off_before_the_job_begins(model, monkeypatch, tmp_path):
    def size_engine(model, config, context_length):
        if model.verdict.uses("triton"):
            raise ValueError("out of resource: shared memory")
        return "sizes"

    monkeypatch.setattr(engine_module, "size_engine", size_engine)
    on_gpu = replace(model, device=torch.device("cuda", 0), verdict=Verdict("Fake GPU", file=tmp_path / "kept.json"))
    found, sizes = engine_module.sized(on_gpu, EngineConfig(), 100)
    why = "the largest step ended with ValueError: out of resource: shared memory"
    assert (found.verdict.failed, found.verdict.why, sizes) == ("triton", why, "sizes")
    assert json.loads((tmp_path / "kept.json").read_text())["why"] == why
    with pytest.raises(ValueError, match="shared memory"):
        engine_module.sized(replace(on_gpu, attention="torch"), EngineConfig(), 100)


def test_rows_under_a_grammar_go_on(tiny_model_dir, monkeypatch):
    pytest.importorskip("llguidance")
    kinds = [{"regex": "[ab]{3,12}"}, {"temperature": 1.0, "regex": "[0-9]{9,40}", "n": 2}, {"temperature": 1.0}]
    outcomes = []
    for fault in (None, raises):
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                use_fake_device(patch, attention=failing_from(5, fault))
            with LLM(str(tiny_model_dir), device="cpu", compile="off") as llm:
                results = llm.generate(["prompt"] * 3, [{"max_tokens": 20} | kind for kind in kinds])
                outcomes.append([(r.text, r.finish_reason, r.completions) for r in results])
                assert llm.engine.attention == "cascade"
    assert outcomes[0] == outcomes[1]
