"""What generates: an engine in this process, or one in a process for each of several devices.

A caller need not know which. With several devices neither torch nor a model is in this process.
"""

from __future__ import annotations

import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Protocol

from batchgen.config import EngineConfig, ModelConfig
from batchgen.devices.partition import Shares
from batchgen.devices.threads import cpu_quota, share_of_threads
from batchgen.devices.transport import (
    Cancel,
    Channel,
    Process,
    Ready,
    Report,
    Stop,
    Work,
    WorkerFailed,
    WorkerSetup,
    how_it_ended,
    kill,
)
from batchgen.errors import BatchgenError, DevicesLost, OutOfMemory
from batchgen.prefix import PrefixPlan
from batchgen.prompts import LoadedTokenizer
from batchgen.prompts.tokenizer import quiet
from batchgen.request import Leaf, Request, TokenArray
from batchgen.result import Completion, Result
from batchgen.stats import EngineStats, side_by_side

if TYPE_CHECKING:
    from batchgen.engine.engine import Engine


OnResult = Callable[[Result], None]
OnToken = Callable[[int, int, int], None]


class AnyEngine(Protocol):
    """Requests and their plan in, results out as the rows finish (`Engine`)."""

    notes: list[str]
    """What the user should hear; grows."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def attention(self) -> str: ...
    @property
    def waiting(self) -> int:
        """Leaves that are not done and do not run."""
        ...

    @property
    def unfinished(self) -> int:
        """Rows that have no result yet."""
        ...

    def add(
        self, leaves: Sequence[Leaf], plan: PrefixPlan, on_result: OnResult, on_token: OnToken | None = None
    ) -> None: ...
    def run(self, stop: Callable[[], str | None] | None = None) -> None: ...
    def under_way(self) -> dict[int, dict[int, Completion]]:
        """What there is of completions of rows that are not done, by row and number; of devices in processes of their own as of a moment ago."""
        ...

    def cancel(self, request: Request) -> None: ...
    def close(self) -> None:
        """Gives processes back, if it has any; it cannot be used any more."""
        ...


def open_engine(
    model: ModelConfig, tokenizer: LoadedTokenizer, config: EngineConfig, texts: Sequence[TokenArray] = ()
) -> AnyEngine:
    """Loads the model on its devices. `texts`: prompts on which `--quantize` is measured. Raises `BatchgenError`."""
    if len(model.devices) == 1:
        use_threads(config)
        return engine_here(model, tokenizer, config, texts)
    from batchgen.devices.transport import start_process

    return Workers(model, config, start_process, texts)


def use_threads(config: EngineConfig, place: int = 0, processes: int = 1) -> None:
    """Gives torch and our kernels, for all of this process, its part of the threads: `--threads`, or the cores that it may use."""
    with quiet():  # torchao, where it is installed, has much to say
        import torch

    total = config.threads
    if total is None:  # torch knows affinity and OMP_NUM_THREADS, but no quota
        total = min(torch.get_num_threads(), cpu_quota() or torch.get_num_threads())
    torch.set_num_threads(share_of_threads(total, place, processes))


def engine_here(
    model: ModelConfig, tokenizer: LoadedTokenizer, config: EngineConfig, texts: Sequence[TokenArray] = ()
) -> Engine:
    """The engine of one device, in this process."""
    with quiet():  # torchao, where it is installed, has much to say
        from batchgen.engine.engine import Engine  # imports torch
        from batchgen.model.device_check import check_device
        from batchgen.model.loader import load_model, pick_device

    verdict = check_device(model, pick_device(model.device), tokenizer.hf_config, config.block_size)
    loaded = load_model(model, tokenizer, config.processes, texts)
    return Engine(replace(loaded, verdict=verdict), tokenizer, config)


LISTEN_SECONDS = 0.05
"""Longest wait for a message: `stop` is asked in between."""

Start = Callable[["Connection[Any, Any]", IO[bytes]], Process]


class _Gone:
    """Comes after the last message of a process."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A process, as seen from here."""

    place: int
    device: str
    process: Process
    channel: Channel
    said: IO[bytes]
    """What it and its libraries print."""
    dtype: str = ""
    attention: str = ""
    batch_size: int = 0
    """Known once it is ready."""
    rows: dict[int, _Row] = field(default_factory=dict)
    """That it has been given and that are not done."""
    leaves: int = 0
    """Of these."""
    sent: int = 0
    heard: int = 0
    """Messages sent after the first, and how many of them it has taken in."""
    idle: bool = False
    wish: str | None = None
    """The last it was told."""
    stats: EngineStats = field(default_factory=EngineStats)
    under_way: dict[int, dict[int, Completion]] = field(default_factory=dict)

    @property
    def quiet(self) -> bool:
        """Whether it has nothing to do, and has told of all that it did."""
        return self.idle and self.heard == self.sent

    def send(self, message: Work | Stop | Cancel) -> None:
        self.channel.send(message)
        self.sent += 1

    def forget_rows(self) -> None:
        self.rows.clear()
        self.leaves = 0


@dataclass(slots=True, eq=False)
class _Row:
    request: Request
    on_result: OnResult
    on_token: OnToken | None
    worker: _Worker | None = None
    """None: it waits here."""
    cancelled: bool = False


class Workers:
    """Several devices as one engine (`AnyEngine`). Raises `BatchgenError` where one of them cannot load the model.

    A process that ends while it runs leaves its rows to the others; `DevicesLost`, or its own error, when it was the last.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, start: Start, texts: Sequence[TokenArray] = ()
    ) -> None:
        self._texts = tuple(texts)
        self.device = model.device
        self.notes: list[str] = []
        """What the user should hear, each once; grows."""
        self._noted: set[str] = set()
        self._arrival = config.policy == "fifo"
        self._inbox: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._alive: dict[int, _Worker] = {}
        self._shares = Shares(len(model.devices))
        self._rows: dict[int, _Row] = {}
        self._to_cancel: deque[int] = deque()
        self._processes: list[tuple[Process, IO[bytes]]] = []
        self._end = weakref.finalize(self, kill, self._processes)
        try:
            for place, device in enumerate(model.devices):
                self._start(start, place, device, model, config)
            while not all(worker.batch_size for worker in self._workers):
                self._listen()
        except BaseException:
            self.close()
            raise

    @property
    def stats(self) -> EngineStats:
        return side_by_side([worker.stats for worker in self._workers])

    @property
    def dtype(self) -> str:
        return self._workers[0].dtype

    @property
    def attention(self) -> str:
        return self._workers[0].attention

    @property
    def unfinished(self) -> int:
        """Rows that have no result yet."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Leaves that no process has been given."""
        return self._shares.waiting

    def add(
        self, leaves: Sequence[Leaf], plan: PrefixPlan, on_result: OnResult, on_token: OnToken | None = None
    ) -> None:
        """Takes requests in, before or during a run; no two that are not done have the same `row`.

        `on_token` is called for several tokens at a time, some hundredths of a second after they were drawn.
        """
        self._rows.update((leaf.request.row, _Row(leaf.request, on_result, on_token)) for leaf in leaves)
        self._shares.add(leaves, plan, arrival=self._arrival)

    def run(self, stop: Callable[[], str | None] | None = None) -> None:
        """Until all requests are done. `stop()` is asked several times a second (`Engine.run`)."""
        if not self._alive:
            raise DevicesLost(f"the processes of {self.device} have ended")
        try:
            while True:
                wish = stop() if stop else None
                if wish is None:
                    self._hand_out()
                else:
                    self._pass_on(wish)
                self._cancel()
                if all(worker.quiet for worker in self._alive.values()):
                    assert wish is not None or not self._rows, "rows without a result"
                    break
                self._listen()
        finally:
            if self._rows:
                self._abandon()

    def under_way(self) -> dict[int, dict[int, Completion]]:
        """What there is of completions of rows that are not done, as the processes told it last."""
        return {row: begun for worker in self._workers for row, begun in worker.under_way.items() if row in self._rows}

    def cancel(self, request: Request) -> None:
        """Ends a request where it stands, if it is not done. Any thread may call this."""
        self._to_cancel.append(request.row)

    def close(self) -> None:
        """Ends the processes: they hold nothing that is not here."""
        self._end()
        self._alive.clear()

    # -- work goes out

    def _hand_out(self) -> None:
        """Enough that a batch stays full until the next time; near the end no more than a batch, so that whoever is done first has the rest."""
        for worker in sorted(self._alive.values(), key=lambda worker: worker.leaves):
            spare = min(worker.batch_size, self._shares.waiting // len(self._alive))
            room = worker.batch_size + spare - worker.leaves
            if room > 0 and 2 * room >= spare:
                pieces = self._shares.take(worker.place, room)
                self._give(worker, [request for piece in pieces for request in piece.requests])

    def _give(self, worker: _Worker, requests: list[Request]) -> None:
        if not requests:
            return
        watched = False
        for request in requests:
            row = self._rows[request.row]
            row.worker = worker
            worker.rows[request.row] = row
            worker.leaves += request.leaves
            watched |= row.on_token is not None
        worker.wish = None
        worker.send(Work(tuple(requests), watched))
        for request in requests:
            if self._rows[request.row].cancelled:
                worker.send(Cancel(request.row))

    def _pass_on(self, wish: str) -> None:
        for worker in self._alive.values():
            if worker.wish != wish and not worker.quiet:
                worker.wish = wish
                worker.send(Stop(wish))

    def _cancel(self) -> None:
        while self._to_cancel:
            number = self._to_cancel.popleft()
            row = self._rows.get(number)
            if row is not None:
                row.cancelled = True
                if row.worker is not None:
                    row.worker.send(Cancel(number))

    def _abandon(self) -> None:
        """What is not done is dropped, here and there."""
        self._pass_on("now")
        self._rows.clear()
        self._shares.clear()
        for worker in self._workers:
            worker.forget_rows()

    # -- results come in

    def _listen(self) -> None:
        """Takes in what has come, or waits a little for something to come."""
        for _ in range(max(1, self._inbox.qsize())):
            try:
                place, message = self._inbox.get(timeout=LISTEN_SECONDS)
            except Empty:
                return
            if place in self._alive:  # else there is nothing more that it could say
                self._hear(self._alive[place], message)

    def _hear(self, worker: _Worker, message: Ready | Report | WorkerFailed | _Gone) -> None:
        if isinstance(message, Ready):
            worker.dtype, worker.attention = message.dtype, message.attention
            worker.batch_size = message.batch_size
        elif isinstance(message, Report):
            worker.heard, worker.idle, worker.stats = message.heard, message.idle, message.stats
            if message.under_way is not None:
                worker.under_way = message.under_way
            for note in message.notes:
                self._note(note)
            for number, completion, token in message.tokens:
                row = worker.rows.get(number)
                if row is not None and row.on_token is not None:
                    row.on_token(number, completion, token)
            for result in message.results:
                row = worker.rows.pop(result.row, None)
                if row is not None:  # else it was dropped meanwhile
                    del self._rows[result.row]
                    worker.leaves -= row.request.leaves
                    row.on_result(result)
        elif isinstance(message, WorkerFailed):
            self._ended(worker, message.error)
        else:
            how = how_it_ended(worker.process, worker.said)
            self._ended(worker, DevicesLost(f"the process of {worker.device} ended ({how})"))

    def _note(self, text: str) -> None:
        """All of them may say the same."""
        if text not in self._noted:
            self._noted.add(text)
            self.notes.append(text)

    # -- processes come and go

    def _start(self, start: Start, place: int, device: str, model: ModelConfig, config: EngineConfig) -> None:
        ours, theirs = Pipe()
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        try:
            process = start(theirs, said)
        except BaseException:
            ours.close()
            said.close()
            raise
        finally:
            theirs.close()
        self._processes.append((process, said))
        inbox = self._inbox  # the channel's threads must not keep this object

        def receive(message: Any) -> None:
            inbox.put((place, message))

        worker = _Worker(place, device, process, Channel(ours, receive, partial(receive, _Gone())), said)
        self._workers.append(worker)
        self._alive[place] = worker
        processes = len(model.devices)
        worker.channel.send(
            WorkerSetup(
                replace(model, device=device), replace(config, processes=processes), place, processes, self._texts
            )
        )

    def _ended(self, worker: _Worker, error: BatchgenError) -> None:
        """A process is no more. Its rows are begun again elsewhere, after all others: should it be one of them that ends processes, the others
        are done by then."""
        del self._alive[worker.place]
        worker.process.kill()
        goes_on = self._alive and worker.batch_size and isinstance(error, DevicesLost | OutOfMemory)
        if not goes_on:
            raise error
        rows, others = len(worker.rows), ", ".join(other.device for other in self._alive.values())
        self._note(f"{error.message}; going on with {others}, which {rows:,} unfinished rows of {worker.device} go to")
        for row in worker.rows.values():
            row.worker = None
        self._shares.lost(worker.place, [row.request for row in worker.rows.values()])
        worker.forget_rows()
