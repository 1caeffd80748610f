"""The CUDA runner on the CPU: whole generations through padded shapes and graphs."""

from dataclasses import replace

import pytest
import torch

from batchgen.model import cuda_runner as module
from batchgen.model.adapter import prepare
from batchgen.model.cuda_graphs import CAPTURE_AFTER, Shape
from support.fake_device import Recording, use_fake_device
from support.models import build, engine_for, make_requests, plain_llama, run, token_ids
from support.params import slow_but

GROUP = list(range(40))
PROMPTS = [[*GROUP, i] for i in range(7)] + [[50 + i] * (3 + i) for i in range(4)] + [GROUP, GROUP, [7]]
LENGTHS = [25, 1, 9, 14, 40, 23, 18, 20, 36, 30, 27, 15, 14, 33]


@pytest.fixture(scope="module")
def model():
    return plain_llama()


@pytest.fixture(scope="module")
def want(model):
    return token_ids(run(engine_for(model), make_requests(PROMPTS, LENGTHS)))


def recorded_inputs(model, monkeypatch):
    """Returns a list to which every later call of the module adds its shape and the addresses of its inputs."""
    seen = []
    forward = model.module.forward

    def watched(**inputs):
        ids, places = inputs["input_ids"], inputs["logits_to_keep"]
        tensors = (ids, inputs["position_ids"], places)
        assert inputs["position_ids"].shape == ids.shape
        seen.append((Shape(ids.shape[1], len(places)), tuple(t.data_ptr() for t in tensors)))
        return forward(**inputs)

    monkeypatch.setattr(model.module, "forward", watched)
    return seen


@pytest.mark.parametrize("ahead", [False, True])
def test_without_graphs_the_output_is_that_of_the_cpu(model, want, monkeypatch, ahead):
    steps = use_fake_device(monkeypatch)
    seen = recorded_inputs(model, monkeypatch)
    engine = engine_for(replace(model, compile="off"), batch_size=12, ahead=ahead)
    assert token_ids(run(engine, make_requests(PROMPTS, LENGTHS))) == want
    assert (steps[0]._graphs, engine.notes, engine.runner.attention) == (None, [], "triton")
    assert len(seen) == engine.stats.steps


@pytest.mark.slow
def test_graphs_that_only_replay_recorded_operators_give_the_same_output(model, want, monkeypatch):
    """A step's inputs, with tokens that the host does not know yet, are all in the buffers that its graph was captured with."""
    steps = use_fake_device(monkeypatch, Recording)
    engine = engine_for(model, batch_size=12, ahead=True)
    assert token_ids(run(engine, make_requests(PROMPTS, LENGTHS))) == want
    graphs = steps[0]._graphs
    assert engine.notes == []
    assert graphs.captured[0] == (12, 12)
    assert len(graphs.captured) > 2
    assert graphs._capture.replays > engine.stats.steps // 3


@pytest.mark.parametrize(
    "options",
    slow_but(
        [{"blocks": 8}, {"share": False}],
        [{"blocks": 8}, {"max_batch_tokens": 9}, {"policy": "prefill-first"}, {"share": False}],
    ),
)
def test_graphs_give_the_same_output_under_any_schedule(model, want, monkeypatch, options):
    steps = use_fake_device(monkeypatch)
    engine = engine_for(model, **options, ahead=True)
    assert token_ids(run(engine, make_requests(PROMPTS, LENGTHS))) == want
    assert steps[-1]._graphs._capture.replays > 10


def test_a_captured_step_always_reads_the_same_buffers(model, monkeypatch):
    """The inputs of all steps of a shape lie at the addresses that its graph was captured with."""
    steps = use_fake_device(monkeypatch, Recording)
    seen = recorded_inputs(model, monkeypatch)
    engine = engine_for(model, batch_size=8)
    run(engine, make_requests([[i] for i in range(8)], [30] * 8))
    captured = steps[0]._graphs.captured
    assert captured == ((8, 8),)
    assert [shape for shape, _ in seen[-2:]] == [(8, 8)] * 2  # to warm up, and to capture
    assert len(seen) == CAPTURE_AFTER + 2
    assert steps[0]._graphs._capture.replays == 30 - CAPTURE_AFTER - 1
    assert len({addresses for shape, addresses in seen if shape == (8, 8)}) == 1


def eager_graphs(graphs):
    """Captures every shape at its first step. Replays run the module again, so that its inputs can be recorded."""
    return lambda new_capture, *args, **options: graphs(lambda: plain_capture, *args, **options | {"after": 0})


def plain_capture(forward):
    forward()
    return forward


def test_graphs_are_captured_again_after_one_of_their_buffers_was_replaced(model, want, monkeypatch):
    steps = use_fake_device(monkeypatch)
    engine = engine_for(model, batch_size=12)
    pools, old = [], module.Graphs.void

    def void(graphs):
        pools.append(graphs._capture)
        old(graphs)

    monkeypatch.setattr(module.Graphs, "void", void)
    schedule = engine.scheduler.schedule

    def replaced(*args):
        if engine.stats.steps == 20:
            attention = steps[0].attention
            attention.positions.fill_(10**9)
            attention.positions = attention.positions.clone()
            attention.generation += 1
        return schedule(*args)

    monkeypatch.setattr(engine.scheduler, "schedule", replaced)
    assert token_ids(run(engine, make_requests(PROMPTS, LENGTHS))) == want
    assert len(pools) == 1
    assert pools[0].replays > 0
    assert steps[0]._graphs._capture.replays > 0


def test_padding_writes_no_kv(model, monkeypatch):
    use_fake_device(monkeypatch)
    engine = engine_for(model, batch_size=64)
    run(engine, make_requests([[1], [2]], [20, 20]))
    pools = [*engine.runner.cache.keys.values(), *engine.runner.cache.values.values()]
    assert all(int(pool.abs().sum((0, 2)).count_nonzero()) == 2 * 20 for pool in pools)


def test_a_model_that_waits_for_the_device_runs_without_graphs(want, monkeypatch):
    model = plain_llama()
    norm = model.module.model.norm
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda x: forward(x) if float(x.sum()) < 1e9 else x)
    steps = use_fake_device(monkeypatch, Recording)
    engine = engine_for(model)
    assert token_ids(run(engine, make_requests(PROMPTS, LENGTHS))) == want
    assert steps[0]._graphs.captured == ()
    assert len(engine.notes) == 1
    assert engine.notes[0].startswith(
        "the model cannot be captured as a CUDA graph and runs without, which is slower: "
    )


def test_a_step_halved_for_lack_of_memory_keeps_the_logits_of_both_halves(model, want, monkeypatch):
    """The graphs of both halves write to the same buffer, one after the other."""
    steps = use_fake_device(monkeypatch)
    monkeypatch.setattr(module, "Graphs", eager_graphs(module.Graphs))
    engine = engine_for(model, batch_size=14)
    engine.runner.max_forward_tokens = 5
    monkeypatch.setattr(engine, "_shrink", lambda: None)  # so that steps go on to be cut
    assert token_ids(run(engine, make_requests(PROMPTS, LENGTHS))) == want
    assert len(steps[0].attention.sizes) > 2 * engine.stats.steps


def test_the_largest_steps_of_a_model_with_small_layers_are_one_graph_and_those_below_it_none(model, monkeypatch):
    monkeypatch.setattr("batchgen.model.cuda_graphs.MAX_TOKENS", 8)
    requests = make_requests([list(range(i, i + 30)) for i in range(6)], [10] * 6)
    expected = token_ids(run(engine_for(model), requests))
    steps = use_fake_device(monkeypatch)
    monkeypatch.setattr(module, "Graphs", eager_graphs(module.Graphs))
    engine = engine_for(model, batch_size=4, max_batch_tokens=24)
    assert token_ids(run(engine, requests)) == expected
    captured = [shape.tokens for shape in steps[0]._graphs.captured]
    assert captured.count(24) == 1
    assert max(size for size in captured if size != 24) <= 8


@pytest.mark.parametrize(
    ("capability", "why"), [((7, 5), "the kernels need a GPU like the A100 or newer"), ((9, 0), "it has no compiler")]
)
def test_a_gpu_that_the_kernels_do_not_support_runs_plain_torch_with_a_note(model, capability, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("batchgen.attention.triton_backend.obstacle", lambda cache, device: "it has no compiler")
    notes = []
    assert module.device_step(replace(model, device=torch.device("cuda", 0)), None, None, notes) is None
    assert notes == [f"cuda:0 runs plain torch, which is slower: {why}"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_on_a_gpu_give_the_output_of_steps_without_them(dtype):
    """Both run in the same shapes, since the last bits of a row depend on the size of the batch."""
    module = build("llama").to("cuda", dtype)
    outcomes = []
    for graphs_are in ("off", "auto"):
        model = prepare(module, compile=graphs_are)
        engine = engine_for(model, batch_size=8, ahead=True)
        requests = make_requests([[i, i + 1] for i in range(8)], [40] * 8)
        outcomes.append(token_ids(run(engine, requests)))
        graphs = engine.runner._device_step._graphs
        assert engine.notes == []
        assert (graphs.captured if graphs else ()) == (((8, 8),) if graphs_are == "auto" else ())
    assert outcomes[0] == outcomes[1]


@pytest.mark.gpu
def test_a_model_that_waits_for_a_gpu_runs_without_graphs_and_torch_still_frees_memory():
    model = prepare(build("llama").to("cuda"))
    inner = model.module.model.layers[0].mlp
    inner.register_forward_hook(lambda module, inputs, output: output * (1.0 if output.sum().item() else 0.5))
    engine = engine_for(model, batch_size=8)
    results = run(engine, make_requests([[i, i + 1] for i in range(8)], [40] * 8))
    assert [len(r.token_ids) for r in results] == [40] * 8
    assert engine.runner._device_step._graphs.captured == ()
    assert [note.split(":")[0] for note in engine.notes] == [
        "the model cannot be captured as a CUDA graph and runs without, which is slower"
    ]
    assert "synchroniz" in engine.notes[0]
    before = torch.cuda.memory_reserved()
    torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() > before
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.gpu
def test_ragged_generations_on_a_gpu_equal_those_of_the_cpu(model, want):
    on_gpu = prepare(build("llama").to("cuda"))
    engine = engine_for(on_gpu, batch_size=12)
    assert token_ids(run(engine, make_requests(PROMPTS, LENGTHS))) == want
    assert len(engine.runner._device_step._graphs.captured) > 2
    assert engine.notes == []


@pytest.mark.slow
def test_graphs_over_the_real_kernels_give_the_same_output(model, monkeypatch):
    """On Triton's interpreter. A graph captured for one step serves the plans of all steps of its shape."""
    pytest.importorskip("triton")
    from batchgen.attention.triton_backend import DeviceAttention
    from support.triton_interpreter import skip_unless_interpreted

    skip_unless_interpreted()

    requests = make_requests([[*range(33), 5], [*range(33), 6], [50, 51]], [6, 5, 4])
    want = token_ids(run(engine_for(model), requests))
    steps = use_fake_device(
        monkeypatch, Recording, lambda cache, tokens: DeviceAttention(cache, tokens, model.device, model.group)
    )
    eager = module.Graphs
    monkeypatch.setattr(module, "Graphs", lambda *args, **options: eager(*args, **options | {"after": 0}))
    engine = engine_for(model, batch_size=4, max_batch_tokens=64, ahead=True)
    assert token_ids(run(engine, requests)) == want
    graphs = steps[0]._graphs
    assert engine.notes == []
    assert {(40, 1), (4, 4), (2, 2)} <= set(graphs.captured)
    assert graphs._capture.replays >= 2
