from itertools import pairwise

import pytest
import torch

from batchgen.model.cuda_graphs import (
    CAPTURE_AFTER,
    MAX_GRAPHS,
    MAX_TOKENS,
    Graphs,
    Shape,
    full_steps_pay,
    sizes_up_to,
)


class Captures:
    """Records which forwards were captured and replayed."""

    def __init__(self):
        self.pools = 0
        self.captured = []
        self.replayed = []
        self.error = None

    def new(self):
        self.pools += 1

        def capture(forward):
            if self.error is not None:
                raise self.error
            forward()
            self.captured.append(forward)
            return lambda: self.replayed.append(forward)

        return capture


@pytest.fixture
def captures():
    return Captures()


def graphs_of(captures, tokens=2048, logits=256, notes=None, **options):
    return Graphs(captures.new, tokens, logits, [] if notes is None else notes, **options)


def shape_when_frequent(graphs, tokens, logits):
    """Returns the shape for such a step once it was asked for often enough to be captured."""
    for _ in range(CAPTURE_AFTER):
        assert graphs.shape_of(tokens, logits) is None
    return graphs.shape_of(tokens, logits)


def test_graph_sizes_grow_by_8_or_an_eighth():
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(8) == [1, 2, 4, 8]
    assert sizes_up_to(50) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 50]
    assert sizes_up_to(256) == [
        *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128),
        *(144, 160, 176, 192, 208, 224, 240, 256),
    ]
    for most in range(1, 600):
        sizes = sizes_up_to(most)
        assert sizes[-1] == most
        assert all(a < b <= max(a + 8, a * 9 / 8) for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        ((1, 1), (1, 1)),
        ((2, 1), (2, 1)),
        ((3, 3), (4, 4)),
        ((9, 9), (16, 16)),
        ((129, 129), (144, 144)),
        ((255, 255), (256, 256)),
        ((257, 250), (288, 256)),
        ((100, 3), (104, 4)),
        ((2048, 1), (2048, 1)),
    ],
)
def test_a_step_is_padded_to_the_smallest_shape_that_holds_it(captures, step, shape):
    assert shape_when_frequent(graphs_of(captures), *step) == Shape(*shape)


@pytest.mark.parametrize("step", [(MAX_TOKENS + 1, 1), (300, 257), (20, 0)])
def test_large_steps_and_steps_without_logits_run_without_graphs(captures, step):
    graphs = graphs_of(captures, tokens=8192)
    for _ in range(2 * CAPTURE_AFTER):
        assert graphs.shape_of(*step) is None


@pytest.mark.parametrize("logits", [0, 3, 256])
def test_the_largest_step_can_be_a_graph_of_its_own_and_no_step_is_padded_to_it(captures, logits):
    graphs = graphs_of(captures, tokens=8192, full_steps=True)
    assert shape_when_frequent(graphs, 8192, logits) == Shape(8192, 256)
    for _ in range(2 * CAPTURE_AFTER):
        assert graphs.shape_of(8191, 3) is None


@pytest.mark.parametrize(("parameters", "layers", "pays"), [(494_000_000, 24, True), (8_000_000_000, 32, False)])
def test_full_steps_of_small_layers_pay_as_graphs(parameters, layers, pays):
    assert full_steps_pay(parameters, layers, 8192) is pays


def test_a_frequent_shape_is_captured_and_replayed_from_then_on(captures):
    graphs, forward = graphs_of(captures), [].copy
    shape = shape_when_frequent(graphs, 7, 7)
    graphs.run(shape, forward)
    assert (captures.captured, captures.replayed, graphs.captured) == ([forward], [], ((8, 8),))
    assert graphs.shape_of(5, 6) == shape
    graphs.run(shape, forward)
    graphs.run(shape, forward)
    assert (captures.captured, captures.replayed) == ([forward], [forward, forward])


def test_the_number_of_graphs_is_limited(captures):
    graphs = graphs_of(captures, logits=2048, after=0)
    shapes = [shape for shape in (graphs.shape_of(size, size) for size in range(1, 2048)) if shape]
    for shape in dict.fromkeys(shapes):
        if graphs.shape_of(*shape):
            graphs.run(shape, lambda: None)
    assert len(graphs.captured) == min(MAX_GRAPHS, len(sizes_up_to(2048)))
    for size in range(1, 2048):  # mixed steps, each with another shape
        shape = graphs.shape_of(size, 1)
        if shape:
            graphs.run(shape, lambda: None)
    assert len(graphs.captured) == MAX_GRAPHS


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            "no memory for more CUDA graphs; steps of other sizes run without, which is slower "
            "(a smaller --kv-memory leaves more)",
        ),
        (
            RuntimeError("operation not permitted\nwhen stream is capturing"),
            "the model cannot be captured as a CUDA graph and runs without, which is slower: "
            "operation not permitted when stream is capturing",
        ),
    ],
)
def test_after_a_failed_capture_steps_run_without_graphs(captures, error, note):
    notes, ran = [], []
    graphs = graphs_of(captures, notes=notes)
    graphs.run(shape_when_frequent(graphs, 4, 4), lambda: ran.append("captured"))
    shape = shape_when_frequent(graphs, 8, 8)
    captures.error = error
    graphs.run(shape, lambda: ran.append("plain"))
    assert ran == ["captured", "plain"]
    assert notes == [note]
    captures.error = None
    assert graphs.shape_of(4, 4) == (4, 4)  # what was captured stays in use
    for _ in range(2 * CAPTURE_AFTER):
        assert graphs.shape_of(8, 8) is None
        assert graphs.shape_of(16, 16) is None
    assert notes == [note]
