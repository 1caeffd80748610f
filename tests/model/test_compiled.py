"""Models under `torch.compile`, traced but not compiled: no graph breaks, and one graph for steps of all sizes."""

from dataclasses import replace

import pytest
import torch

from batchgen.model.adapter import prepare
from support.fake_device import use_fake_device
from support.models import build, engine_for, make_requests, plain_llama, run, token_ids

PROMPTS = [[*range(40), i] for i in range(5)] + [[50 + i] * (3 + i) for i in range(3)] + [[7]]
LENGTHS = [9, 1, 7, 12, 5, 3, 8, 2, 14]


@pytest.fixture
def traced(monkeypatch):
    """A list with one entry for each traced graph: the sizes it ran with. A graph break is an error."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append([])
        shapes = graphs[-1]

        def ran(*args):
            shapes.append(next(int(a.shape[1]) for a in args if isinstance(a, torch.Tensor) and a.dtype == torch.int64))
            return graph(*args)

        return ran

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **options: compiler(module, backend=backend, **options))
    yield graphs
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2"])
def test_a_model_is_traced_whole_and_once_for_steps_of_all_sizes(model_type, traced, monkeypatch):
    model = prepare(build(model_type))
    requests = make_requests(PROMPTS, LENGTHS)
    want = token_ids(run(engine_for(model), requests))
    steps = use_fake_device(monkeypatch)
    engine = engine_for(replace(model, compile="on"), batch_size=8, ahead=True)
    run(engine, make_requests([[1], [2]], [3, 3]))  # the trace must not assume as many tokens as logits
    assert token_ids(run(engine, requests)) == want
    assert engine.notes == []
    assert len(traced) == 1
    assert {2, 4, 8} < set(traced[0])
    assert 1 not in traced[0]
    assert {(8, 8), (4, 4), (2, 2)} < set(steps[0]._graphs.captured)


def test_a_model_that_cannot_be_compiled_runs_uncompiled(monkeypatch):
    def failing(**inputs):
        raise RuntimeError("data-dependent branching")

    monkeypatch.setattr(torch, "compile", lambda module, **options: failing)
    model, requests = plain_llama(), make_requests(PROMPTS, LENGTHS)
    want = token_ids(run(engine_for(model), requests))
    use_fake_device(monkeypatch)
    engine = engine_for(replace(model, compile="on"))
    assert token_ids(run(engine, requests)) == want
    assert len(engine.notes) == 1
    assert engine.notes[0].startswith("--compile on: torch.compile fails on this model, which runs without: ")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside the compiler
def test_compiled_code_gives_the_same_tokens_and_does_not_copy_the_block_pool(monkeypatch):
    from torch._inductor.utils import run_and_get_code

    model = plain_llama()
    requests = make_requests(PROMPTS, LENGTHS)
    want = token_ids(run(engine_for(model), requests))
    use_fake_device(monkeypatch)
    torch._dynamo.reset()
    engine = engine_for(replace(model, compile="on"))
    got, code = run_and_get_code(run, engine, requests)
    assert token_ids(got) == want
    assert engine.notes == []
    pool_tokens = engine.runner.cache.keys[0].shape[1]
    made = [line for line in code[0].splitlines() if "empty_strided" in line and str(pool_tokens) in line]
    assert "batchgen_tests.attend" in code[0]
    assert made == []
