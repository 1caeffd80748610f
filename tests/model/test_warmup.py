import pytest
import torch

from batchgen.attention.kv_cache import KVCache
from batchgen.model.adapter import prepare
from batchgen.model.memory_budget import largest_spans, step_bytes
from batchgen.model.runner import Runner
from batchgen.scheduling.batch import Limits, ScheduledBatch
from support.models import packed_model
from support.tiny import build, engine_of, requests_of, run


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 70), (4, 70), (5, 5), (3, 100)])
def test_the_largest_step_has_all_tokens_and_all_logits_that_a_step_may_have(rows, tokens):
    spans = largest_spans(Limits(rows, tokens, tokens), 32)
    assert [len(spans), ScheduledBatch.of(spans).num_tokens] == [rows, tokens]
    assert all(scheduled.stop - scheduled.logits == 1 for scheduled in spans)
    assert max(w.stop for w in spans) - min(w.stop for w in spans) <= 1
    blocks = [block for scheduled in spans for block in scheduled.span.table]
    assert blocks == list(range(len(blocks)))
    assert all(len(scheduled.span.table) == -(-scheduled.stop // 32) for scheduled in spans)


def test_the_largest_step_runs_on_the_smallest_pool_that_holds_it():
    model = build()
    limits = Limits(4, 150, 150)
    spans = largest_spans(limits, 32)
    cache = KVCache(model.layers, 8, 32, torch.float32)
    logits = Runner(model, cache, limits, []).run(ScheduledBatch.of(spans))
    assert logits.shape == (4, 97)
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_the_bytes_of_a_step_are_its_peak_memory_and_one_that_does_not_fit_has_no_figure(name, monkeypatch):
    counts = {"held": 1000, "peak": 0}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: counts["held"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: counts.update(peak=counts["held"]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: counts["peak"])

    def forward(self, packed, last):
        counts["peak"] += 7 * len(packed.tokens)
        if len(packed.tokens) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return []

    monkeypatch.setattr(Runner, "_forward", forward)
    model = packed_model(name, compiled=False)
    assert step_bytes(model, Limits(4, 8, 8), 32) == {model.device: 56}
    assert step_bytes(model, Limits(4, 16, 16), 32) is None
    monkeypatch.setattr(Runner, "_forward", lambda *_: {}["a mistake"])
    with pytest.raises(KeyError, match="a mistake"):
        step_bytes(model, Limits(4, 8, 8), 32)


@pytest.mark.gpu
def test_on_a_gpu_the_pool_and_the_largest_step_fit_together():
    model = prepare(build().module.to("cuda"))
    engine = engine_of(model, kv_memory="auto", max_batch_tokens=4096)
    assert engine.notes == []
    assert engine.sizes.limits.max_batch_tokens == 4096
    assert (
        engine.sizes.num_blocks == 2 * 256 * 64
    )  # twice a full batch of the longest sequences, which is little for a tiny model
    assert len(run(engine, requests_of([[i] * 500 for i in range(40)], [3] * 40))) == 40
    assert engine.runner.max_forward_tokens is None
