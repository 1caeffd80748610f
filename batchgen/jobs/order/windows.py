"""Turns requests into planned windows: a prefix tree for each, and how many of its tokens earlier windows have run already."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

from batchgen.jobs.job_folder import Store
from batchgen.jobs.outcomes import Outcomes
from batchgen.prefix import Outline, PrefixNode, PrefixOutline, PrefixPlan, carried_tokens, plan_prefixes
from batchgen.process.signals import Signals
from batchgen.request import Leaf, Request, TokenArray, leaves_of
from batchgen.result import Completion


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A window of requests with its plan."""

    requests: list[Request]
    leaves: list[Leaf]
    plan: PrefixPlan
    """Of the leaves."""
    row_plan: PrefixPlan
    """Of the rows' prompts, without texts to score; the same object if each row is a leaf."""
    prefill_tokens_min: int
    """Size of the prompts' token trie, minus the tokens that earlier windows have run."""

    @property
    def tokens_to_run(self) -> int:
        """The same with the texts to score."""
        return self.prefill_tokens_min + self.plan.prefill_tokens_min - self.row_plan.prefill_tokens_min


class Planner:
    """Plans windows one after the other. For the figures, it remembers which prefixes an engine probably still holds."""

    def __init__(
        self, chunk_size: int, *, share: bool, consecutive: bool, under_way: Mapping[bytes, Mapping[int, Completion]]
    ) -> None:
        """`consecutive`: windows follow each other in prefix order. `under_way`: completions that earlier runs began, by row key and number;
        their requests continue them."""
        self._chunk_size, self._share, self._consecutive, self._under_way = chunk_size, share, consecutive, under_way
        self._kept, self._long = KeptPrefixes(), False
        self._outline = Outline()
        self.tree: PrefixOutline | None = None
        """The prefix tree of the windows so far, in outline; of the first one alone if they do not follow each other. None without sharing."""

    def plan(self, requests: Sequence[Request]) -> Planned:
        """Plans requests of which all or none are `long`."""
        begun = self._under_way
        requests = [replace(r, begun=begun[r.key]) if r.key in begun else r for r in requests]
        leaves, prompts = leaves_of(requests), [r.tokens for r in requests]
        row_plan = plan = self._planned([leaf.tokens for leaf in leaves])
        if len(leaves) > len(requests) or any(r.texts for r in requests):
            row_plan = self._planned(prompts)
        if requests[0].long != self._long:  # the engine has forgotten all prefixes
            self._kept, self._long = KeptPrefixes(), requests[0].long
        carried = self._kept.carried(row_plan, prompts, and_last=self._consecutive)
        if self._share and (self._consecutive or self.tree is None):
            for i in row_plan.order.tolist():
                self._outline.add(prompts[i], long=requests[i].long)
            self.tree = self._outline.tree()
        return Planned(requests, leaves, plan, row_plan, max(0, row_plan.prefill_tokens_min - carried))

    def _planned(self, prompts: Sequence[TokenArray]) -> PrefixPlan:
        return plan_prefixes(prompts, self._chunk_size, share=self._share)


class PlannedWindows:
    """The windows of sorted requests. Each is planned in another thread while the one before it runs. A context manager."""

    def __init__(
        self,
        windows: Iterator[list[Request]],
        planner: Planner,
        job: Store,
        outcomes: Outcomes,
        signals: Signals,
        *,
        fresh: bool,
    ) -> None:
        """`fresh`: requests that already have results were filtered out in this run."""
        self._windows, self._planner, self._job, self._outcomes = windows, planner, job, outcomes
        self._signals, self._fresh = signals, fresh
        self._pool = ThreadPoolExecutor(1, "batchgen-planning")
        self._ahead: Future[Planned | None] | None = None
        self._size = 0
        """Number of leaves of the window that was taken last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[Planned]:
        """Waits for each window, and yields it. A signal interrupts the wait."""
        while True:
            with self._signals.interruptible():
                window = self._next()
            if window is None:
                return
            yield window

    def _next(self) -> Planned | None:
        window = self._plan() if self._ahead is None else self._ahead.result()
        self._ahead = None
        self._size = 0 if window is None else len(window.leaves)
        return window

    def next_if_ready(self, waiting: int) -> Planned | None:
        """The next window once no leaf of the previous one is waiting and planning is done, else None.

        `waiting` is the number of waiting leaves. Planning starts in the background when half of the previous window has started.
        """
        if not self._size or waiting > self._size // 2:
            return None
        if self._fresh and self._ahead is None:  # otherwise results are looked up, which only one thread may do
            self._ahead = self._pool.submit(self._plan)
        if waiting or (self._ahead is not None and (not self._ahead.done() or self._ahead.exception())):
            return None  # the iteration raises an error of the planning, when this window is done
        return self._next()

    def _plan(self) -> Planned | None:
        """Plans the requests of the next window that have no result. Returns None at the end."""
        with self._outcomes.run.timed("plan"):
            for requests in self._windows:
                lacking = requests if self._fresh else self._without_results(requests)
                if lacking:
                    return self._planner.plan(lacking)
        return None

    def _without_results(self, requests: list[Request]) -> list[Request]:
        stored = self._job.stored([r.key for r in requests])
        for request in requests:
            if request.key in stored:
                equal = self._job.equal_rows(request.key)
                self._outcomes.resumed(stored[request.key], rows=1 + equal, equal=equal)
        self._outcomes.tracker.changed()
        return [r for r in requests if r.key not in stored]


class KeptPrefixes:
    """The most shared prefixes of the windows so far, the newest last. Its size is bounded."""

    def __init__(self, max_paths: int = 2048, paths_of_a_window: int = 256) -> None:
        """Keeps at most `max_paths`, and of each window the `paths_of_a_window` that save the most."""
        self._max_paths, self._paths_of_a_window = max_paths, paths_of_a_window
        self._paths: dict[bytes, TokenArray] = {}
        self._last: TokenArray | None = None

    def carried(self, plan: PrefixPlan, prompts: Sequence[TokenArray], *, and_last: bool = False) -> int:
        """Returns the number of tokens of the window's tree that earlier windows had, and remembers this window's prefixes.

        With `and_last` the last prompt of the window before counts too: windows that follow each other in depth-first order share only
        its tokens.
        """
        paths = list(self._paths.values())
        if and_last and self._last is not None:
            paths.append(self._last)
        carried = carried_tokens(plan, prompts, paths)
        self._last = prompts[plan.order[-1]].copy()
        for node in heapq.nlargest(self._paths_of_a_window, plan.nodes, key=_saved_tokens):
            path = prompts[plan.order[node.first]][: node.end].copy()
            key = path.tobytes()
            self._paths.pop(key, None)
            self._paths[key] = path
        while len(self._paths) > self._max_paths:
            self._paths.pop(next(iter(self._paths)))
        return carried


def _saved_tokens(node: PrefixNode) -> int:
    return (node.last - node.first - 1) * node.end
