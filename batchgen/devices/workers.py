"""Several workers as one engine: hands them shares of the requests, and takes in their results, figures and notes."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any

from batchgen.config import EngineConfig, ModelConfig
from batchgen.devices.partition import WaitingPieces
from batchgen.devices.transport import (
    Cancel,
    Gone,
    Link,
    Ready,
    Stop,
    Transport,
    Work,
    WorkerFailed,
    WorkerReport,
    WorkerSetup,
)
from batchgen.errors import BatchgenError, DevicesLost, OutOfMemory
from batchgen.prefix import PrefixPlan
from batchgen.request import Leaf, Request, TokenArray
from batchgen.result import Completion, OnResult, OnToken
from batchgen.stats import EngineStats, side_by_side

LISTEN_SECONDS = 0.05
"""Longest wait for a message, because `stop` is called between two waits."""
SILENT_SECONDS = 30.0
"""A worker that has work and has sent nothing for so long is called silent."""
MAX_FAILURES = 3
"""A worker that was lost this often without finishing a row in between is not started again."""


@dataclass(slots=True, eq=False)
class _WorkerHandle:
    """A process or an actor, as seen from here."""

    setup: WorkerSetup
    device: str
    failures: int
    """How many workers before it were lost in a row without finishing a row of the input."""
    link: Link = None  # type: ignore[assignment]  # set when it was started
    done: int = 0
    """Rows that it has finished."""
    lost: bool = False
    ready: Ready | None = None
    """None while it loads its model."""
    ready_at: float = 0.0
    heard_at: float = field(default_factory=time.monotonic)
    """When its last message came."""
    idle_since: float | None = None
    """Since when it has been ready and without work; None while it has some."""
    idle_seconds: float = 0.0
    rows: dict[int, _UnfinishedRow] = field(default_factory=dict)
    """The unfinished rows that it has been given."""
    leaves: int = 0
    """The leaves of these rows."""
    sent: int = 0
    heard: int = 0
    """Messages sent after the first, and how many of them it has taken in."""
    idle: bool = False
    wish: str | None = None
    """The last wish to stop that was sent to it."""
    stats: EngineStats = field(default_factory=EngineStats)
    under_way: dict[int, dict[int, Completion]] = field(default_factory=dict)

    @property
    def quiet(self) -> bool:
        """Whether it has no work and has reported everything, or is still loading its model."""
        return self.ready is None or (self.idle and self.heard == self.sent)

    @property
    def place(self) -> int:
        return self.setup.place

    def state(self, silent_after: float) -> str:
        """`lost`, `loading`, `idle` (has nothing to do), `silent` (has sent nothing for more than `silent_after` seconds) or `running`."""
        if self.lost:
            return "lost"
        if self.ready is None:
            return "loading"
        if self.quiet:
            return "idle"
        return "silent" if time.monotonic() - self.heard_at > silent_after else "running"

    def progress(self, silent_after: float) -> dict[str, Any]:
        """How far it is, in the form that docs/status.md describes. Speeds are averages since it was ready; a lost worker has none."""
        seconds = self.heard_at - self.ready_at if self.ready and not self.lost else 0.0
        tokens = self.stats.completion_tokens
        state = self.state(silent_after)
        return {
            "device": self.device,
            "state": state,
            "rows_done": self.done,
            "completion_tokens": tokens,
            "completion_tokens_per_s": round(tokens / seconds, 3) if seconds else 0.0,
            "rows_per_s": round(self.done / seconds, 3) if seconds else 0.0,
            "seconds_silent": round(time.monotonic() - self.heard_at, 1) if state in ("running", "silent") else None,
        }

    def count_idle(self) -> None:
        """Adds the idle time up to now."""
        if self.idle_since is not None:
            now = time.monotonic()
            self.idle_seconds += now - self.idle_since
            self.idle_since = now

    def send(self, message: Work | Stop | Cancel) -> None:
        if isinstance(message, Work):
            self.count_idle()
            self.idle_since = None
        self.link.send(message)
        self.sent += 1

    def forget_rows(self) -> None:
        self.rows.clear()
        self.leaves = 0


@dataclass(slots=True, eq=False)
class _UnfinishedRow:
    request: Request
    on_result: OnResult
    on_token: OnToken | None
    worker: _WorkerHandle | None = None
    """None while it waits here."""
    cancelled: bool = False


class Workers:
    """Several workers as one engine (`AnyEngine`). Raises `BatchgenError` if one of them cannot load the model.

    A worker that is lost while it runs leaves its rows to the others, and is started again if its transport can do that. Raises
    `DevicesLost`, or the worker's own error, when the last one is lost.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        transport: Transport,
        texts: Sequence[TokenArray] = (),
        *,
        silent_after: float = SILENT_SECONDS,
    ) -> None:
        """`texts`: prompts on which `--quantize` is measured. `silent_after`: how long a run that stops waits for a worker that sends nothing."""
        self.device = transport.name
        self._silent_after = silent_after
        self.notes: list[str] = []
        """Messages for the user, each once; grows."""
        self._noted: set[str] = set()
        self._arrival = config.policy == "fifo"
        self._inbox: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._transport = transport
        self._workers: list[_WorkerHandle] = []
        self._alive: dict[int, _WorkerHandle] = {}
        self._waiting_pieces = WaitingPieces()
        self._rows: dict[int, _UnfinishedRow] = {}
        self._to_cancel: deque[int] = deque()
        self._links: list[Link] = []
        self._end = weakref.finalize(self, _end_all, self._links, transport)
        try:
            for setup in transport.setups(model, config):
                self._start(replace(setup, texts=tuple(texts)))
            enough = any if transport.replaces else all
            while not enough(worker.ready for worker in self._alive.values()):
                self._listen()
            for worker in self._alive.values():
                if worker.ready and not transport.replaces:  # otherwise they have joined when they were ready
                    self._waiting_pieces.join(worker.place)
        except BaseException:
            self.close()
            raise

    @property
    def stats(self) -> EngineStats:
        return side_by_side([worker.stats for worker in self._workers])

    @property
    def dtype(self) -> str:
        return next((worker.ready.dtype for worker in self._workers if worker.ready), "")

    @property
    def attention(self) -> str:
        return next((worker.ready.attention for worker in self._workers if worker.ready), "")

    @property
    def by_worker(self) -> list[dict[str, Any]]:
        """A line for each worker: where it runs, what it has done, how long it had nothing to do, whether it was lost."""
        return [
            {
                "device": worker.device,
                "rows": worker.done,
                "completion_tokens": worker.stats.completion_tokens,
                "prefill_tokens": worker.stats.prefill_tokens,
                "steps": worker.stats.steps,
                "forward_seconds": round(worker.stats.forward_seconds, 4),
                "idle_seconds": round(worker.idle_seconds, 4),
                "memory_bytes_peak": worker.stats.process_bytes_peak,
                "lost": worker.lost,
            }
            for worker in self._workers
        ]

    def progress(self, silent_after: float = SILENT_SECONDS) -> list[dict[str, Any]]:
        """How far each worker is, for `batchgen status`. One that has work and has sent nothing for so many seconds is called silent."""
        return [worker.progress(silent_after) for worker in self._workers]

    @property
    def unfinished(self) -> int:
        """Rows that have no result yet."""
        return len(self._rows)

    @property
    def prices(self) -> None:
        """What steps cost is known in the processes only."""

    @property
    def waiting(self) -> int:
        """Leaves that no process has been given."""
        return self._waiting_pieces.waiting

    def add(
        self, leaves: Sequence[Leaf], plan: PrefixPlan, on_result: OnResult, on_token: OnToken | None = None
    ) -> None:
        """Takes requests in, before or during a run; no two that are not done have the same `row`.

        `on_token` is called for several tokens at a time, some hundredths of a second after they were sampled.
        """
        self._rows.update((leaf.request.row, _UnfinishedRow(leaf.request, on_result, on_token)) for leaf in leaves)
        self._waiting_pieces.add(leaves, plan, arrival=self._arrival)

    def run(self, stop: Callable[[], str | None] | None = None) -> None:
        """Runs until all requests are done. Calls `stop()` several times a second; see `Engine.run` for what it returns."""
        if not self._alive:
            raise DevicesLost(f"the processes of {self.device} have ended")
        wish, asked = None, math.inf
        try:
            while True:
                wish = stop() if stop else None
                if wish == "pause":
                    break
                if wish is None:
                    self._hand_out()
                else:
                    self._pass_on(wish)
                self._cancel()
                if wish == "now":
                    asked = min(asked, time.monotonic())
                still = [worker for worker in self._alive.values() if not (worker.quiet or self._hangs(worker, asked))]
                if not still and (wish is not None or not self._rows):
                    break
                self._listen()
        finally:
            for worker in self._alive.values():
                worker.count_idle()
            if self._rows and wish != "pause":
                self._abandon()

    def under_way(self) -> dict[int, dict[int, Completion]]:
        """Returns the unfinished completions, by row and number, as the processes reported them last."""
        return {row: begun for worker in self._workers for row, begun in worker.under_way.items() if row in self._rows}

    def cancel(self, request: Request) -> None:
        """Ends a request with the tokens that it has, if it is not done. Any thread may call this."""
        self._to_cancel.append(request.row)

    def close(self) -> None:
        """Ends the workers, which have nothing that is not here."""
        self._end()
        self._alive.clear()

    # -- work goes out

    def _hand_out(self) -> None:
        """Gives each worker enough that its batch stays full until the next call. Near the end of the work it gets no more than a batch, so that the worker that is done first gets the rest."""
        for worker in sorted(self._alive.values(), key=lambda worker: worker.leaves):
            if worker.ready is None:
                continue
            spare = min(worker.ready.batch_size, self._waiting_pieces.waiting // len(self._alive))
            room = worker.ready.batch_size + spare - worker.leaves
            if room > 0 and 2 * room >= spare:
                pieces = self._waiting_pieces.take(worker.place, room)
                for _, alike in groupby((r for piece in pieces for r in piece.requests), key=lambda r: r.long):
                    self._give(worker, list(alike))

    def _give(self, worker: _WorkerHandle, requests: list[Request]) -> None:
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

    def _hangs(self, worker: _WorkerHandle, asked: float) -> bool:
        """Whether a worker has sent nothing for long since it was asked to stop: its process is suspended, or stuck in a driver."""
        hangs = time.monotonic() - max(worker.heard_at, asked) > self._silent_after
        if hangs:
            self._note(
                f"{worker.device} has sent nothing for {self._silent_after:.0f} seconds: the run stops without it"
            )
        return hangs

    def _cancel(self) -> None:
        while self._to_cancel:
            number = self._to_cancel.popleft()
            row = self._rows.get(number)
            if row is not None:
                row.cancelled = True
                if row.worker is not None:
                    row.worker.send(Cancel(number))

    def _abandon(self) -> None:
        """Drops all unfinished rows, here and in the workers."""
        self._pass_on("now")
        self._rows.clear()
        self._waiting_pieces.clear()
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
            if place in self._alive:  # messages of lost workers are dropped
                self._hear(self._alive[place], message)

    def _hear(self, worker: _WorkerHandle, message: Ready | WorkerReport | WorkerFailed | Gone) -> None:
        worker.heard_at = time.monotonic()
        if isinstance(message, Ready):
            worker.ready = message
            worker.ready_at = worker.idle_since = worker.heard_at
            if self._transport.replaces:
                worker.device = f"{worker.device} on {message.host}"
                self._waiting_pieces.join(worker.place)
        elif isinstance(message, WorkerReport):
            worker.heard, worker.idle, worker.stats = message.heard, message.idle, message.stats
            if worker.quiet and worker.idle_since is None:
                worker.idle_since = worker.heard_at
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
                if row is not None:  # else it was dropped in the meantime
                    del self._rows[result.row]
                    worker.leaves -= row.request.leaves
                    worker.done += 1
                    row.on_result(result)
        elif isinstance(message, WorkerFailed):
            self._ended(worker, message.error)
        else:
            how = worker.link.end()
            self._ended(worker, DevicesLost(f"the process of {worker.device} ended ({how})"))

    def _note(self, text: str) -> None:
        """Adds a note, once: several workers may say the same."""
        if text not in self._noted:
            self._noted.add(text)
            self.notes.append(text)

    # -- workers come and go

    def _start(self, setup: WorkerSetup, failures: int = 0) -> None:
        worker = _WorkerHandle(setup, setup.model.device, failures)
        inbox = self._inbox  # the threads of the link must not keep this object

        def receive(message: Any) -> None:
            inbox.put((setup.place, message))

        worker.link = self._transport.start(setup, receive)
        self._links.append(worker.link)
        self._workers.append(worker)
        self._alive[setup.place] = worker

    def _ended(self, worker: _WorkerHandle, error: BatchgenError) -> None:
        """Handles the loss of a worker: starts it again if that may help, or leaves its rows to the others; else raises `error`.

        These rows come after all others, because one of them may end every process that runs it. They continue the completions that the worker has
        reported.
        """
        del self._alive[worker.place]
        worker.link.kill()
        worker.lost = True
        failures = 0 if worker.done else worker.failures + 1
        again = self._transport.replaces and failures < MAX_FAILURES and isinstance(error, DevicesLost)
        others = ", ".join(other.device for other in self._alive.values() if other.ready)
        # A model that one device has no room for is an error, a process that ends while it loads is not.
        losses = DevicesLost | OutOfMemory if worker.ready or self._transport.replaces else DevicesLost
        others_continue = self._alive and isinstance(error, losses)
        if not (others_continue or again):
            raise error
        restart = "it is started again, and " if again else ""
        to = others or ("the first worker that is ready" if again else "the others")
        work = f"its {len(worker.rows):,} unfinished rows go to {to}"
        self._note(f"{error.message}; {restart}{work if worker.ready or again else 'the others do its work'}")
        for number, row in worker.rows.items():
            row.worker = None
            if row.on_token is None:  # else the tokens that were told already must come again, from the first on
                row.request = replace(row.request, begun={**row.request.begun, **worker.under_way.get(number, {})})
        if worker.ready:
            self._waiting_pieces.lost(worker.place, [row.request for row in worker.rows.values()])
        worker.forget_rows()
        worker.under_way = {}
        if again:
            self._start(replace(worker.setup, place=len(self._workers)), failures)


def _end_all(links: Sequence[Link], transport: Transport) -> None:
    for link in links:
        link.kill()
    for link in links:
        link.end()
    transport.close()
