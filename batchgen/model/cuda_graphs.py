"""Forwards of fixed shapes, captured once and replayed: which shapes there are, when a capture pays, and how CUDA does it.

Knows nothing about models and plans: a forward is a function without arguments that reads and writes static buffers. Tests on
the CPU run this code with a stand-in for a capture.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch

from batchgen.errors import in_one_line, is_out_of_memory

CAPTURE_AFTER = 4
"""Steps of a shape that run without a graph before one is captured. A capture costs about as much as a graph would have saved in these
steps (a wait for the device, a forward to warm up, one to capture, and building the graph). So however many steps of the shape follow,
the cost is at most twice the smallest possible one."""
MAX_TOKENS = 2048
"""Steps of most models that are larger keep a device busy for longer than the host needs to launch them."""
SMALL_LAYER = 2 * 10**11
"""Tokens of a step times parameters of a layer, up to which the host takes longer. On an H200, launching a layer takes a millisecond."""
MAX_GRAPHS = 64
"""Each takes some megabytes of the device's memory, whatever its shape."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Captures what a forward does on the device, and runs it at least once. Returns a function that does the same again."""


class Shape(NamedTuple):
    """What a forward's inputs are padded to."""

    tokens: int
    logits: int
    """Tokens after which logits are wanted."""


def full_steps_pay(num_parameters: int, num_layers: int, tokens: int) -> bool:
    """Whether the largest steps, of so many tokens, run faster as a graph than they are launched."""
    return tokens * num_parameters <= SMALL_LAYER * num_layers


def sizes_up_to(largest: int) -> list[int]:
    """Returns 1, 2, 4, 8, then sizes in steps of 8 or of an eighth of the power of two below, whichever is larger; `largest` is the last."""
    sizes = []
    size = 1
    while size < largest:
        sizes.append(size)
        size += size if size < 8 else max(8, (1 << size.bit_length()) // 16)
    return [*sizes, largest]


class Graphs:
    """The graphs of one engine's steps. All share their memory: one is replayed at a time, and its results are read before the next."""

    def __init__(
        self,
        new_capture: Callable[[], Capture],
        max_tokens: int,
        max_logits: int,
        notes: list[str],
        after: int = CAPTURE_AFTER,
        full_steps: bool = False,
    ) -> None:
        """`new_capture` makes a `Capture` with memory of its own. Messages for the user are added to `notes`. `full_steps`: steps of exactly
        `max_tokens` run as graphs even if there are more than `MAX_TOKENS`; other steps are not padded to so many.
        """
        self._new_capture = new_capture
        self._capture = new_capture()
        self._full = max_tokens if full_steps else None
        max_tokens = min(max_tokens, max(MAX_TOKENS, max_logits))
        self._tokens = sorted({*sizes_up_to(max_tokens), max_logits})
        self._logits = sizes_up_to(max_logits)
        self._after = after
        self._notes = notes
        self._met: Counter[Shape] = Counter()
        self._graphs: dict[Shape, Replay] = {}
        self._given_up = False

    @property
    def largest(self) -> Shape:
        """The shape of a full batch's decode step."""
        return Shape(self._logits[-1], self._logits[-1])

    @property
    def captured(self) -> tuple[Shape, ...]:
        """The captured shapes, in the order of their capture."""
        return tuple(self._graphs)

    def shape_of(self, tokens: int, logits: int) -> Shape | None:
        """Returns the smallest shape that holds such a step if it should run as a graph, else None. Counts how often a shape was asked for."""
        if tokens == self._full and logits <= self._logits[-1]:
            shape = Shape(tokens, self._logits[-1])
        elif not logits or tokens > self._tokens[-1] or logits > self._logits[-1]:
            return None
        else:
            shape = Shape(
                self._tokens[bisect_left(self._tokens, tokens)], self._logits[bisect_left(self._logits, logits)]
            )
        if shape in self._graphs:
            return shape
        if self._given_up or len(self._graphs) == MAX_GRAPHS:
            return None
        self._met[shape] += 1
        return shape if self._met[shape] > self._after else None

    def run(self, shape: Shape, forward: Callable[[], None]) -> None:
        """Runs the forward of that shape as a graph, which is captured first if there is none."""
        replay = self._graphs.get(shape)
        if replay is not None:
            replay()
        elif not self.capture(shape, forward):
            forward()

    def capture(self, shape: Shape, forward: Callable[[], None]) -> bool:
        """Captures a graph of the shape if there is none. Returns whether there is one. After a failed capture no other is tried."""
        if shape in self._graphs:
            return True
        if self._given_up:
            return False
        try:
            self._graphs[shape] = self._capture(forward)
        except (MemoryError, RuntimeError) as e:
            self._given_up = True
            self._notes.append(
                "no memory for more CUDA graphs; steps of other sizes run without, which is slower (a smaller --kv-memory leaves more)"
                if is_out_of_memory(e)
                # torch's own error says only that the capture failed; the one before it says why
                else f"the model cannot be captured as a CUDA graph and runs without, which is slower: {in_one_line(e.__context__ or e)}"
            )
            return False
        return True

    def void(self) -> None:
        """Drops all graphs because the buffers that they read have been replaced. Shapes are counted again from 0."""
        self._capture = self._new_capture()
        self._graphs.clear()
        self._met.clear()


class CudaCapture:
    """Captures on one CUDA device; the graphs share memory, so a forward must not keep a tensor that it makes."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # graphs that this one replaces may still run
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._tried = False

    def __call__(self, forward: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    # Here libraries allocate workspaces and kernels are compiled, which cannot be captured.
                    forward()
                    if not self._tried:  # a forward that waits for the device cannot be captured either
                        with _waiting_fails():
                            forward()
                        self._tried = True
            finally:
                current.wait_stream(self._stream)
            try:
                # Other threads may allocate meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    forward()
            except BaseException:
                # torch 2.11's allocator acts as if the capture continued, and frees no memory any more (pytorch#180395).
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
                raise
        finally:
            torch.cuda.set_stream(current)  # after a failed capture, torch leaves the other stream current
        return graph.replay


@contextmanager
def _waiting_fails() -> Iterator[None]:
    """Within the block, anything that waits for a CUDA device raises `RuntimeError`."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
