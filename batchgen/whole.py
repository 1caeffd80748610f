"""A job in the prefix order of its whole input: read once to be planned and sorted, generated in depth-first order whatever window a
row is in, and read a second time to be written in input order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

from batchgen.ahead import Ahead
from batchgen.errors import InputCorrupt, OutputError
from batchgen.generation import Generation, Planned
from batchgen.jobs.sorted_requests import SortedRequests
from batchgen.records import Input, JobFolder, Row
from batchgen.records.inputs import READ_ROWS
from batchgen.records.listing import Listing
from batchgen.records.passes import Pass
from batchgen.records.take_back import NO_KEY
from batchgen.request import Request
from batchgen.result import Result
from batchgen.stats import versions


class Whole:
    """The two readings of the input, and what is between them."""

    def __init__(self, work: Generation, job: JobFolder, source: Input) -> None:
        self._work, self._job, self._source = work, job, source
        self._inputs = source.fingerprint()
        self._broken: InputCorrupt | None = None
        """Where the input breaks off."""

    def run(self) -> None:
        """Raises `InputCorrupt` when all that could be read is generated."""
        work = self._work
        with work.signals.interruptible(), work.run.timed("plan"):
            work.progress.phase("planning")
            there = self._job.passes.earlier(self._asked())
            waiting = self._first_reading() if there is None else self._take_up(there)
        with closing(_Windows(work, waiting, looked=there is None)) as windows:
            while (window := windows.next()) is not None:
                work.generate(window, windows.more, forget=True)
                work.signals.check()
        if self._broken is not None:
            raise self._broken
        self._write()

    def keep(self) -> None:
        """The job ends before its end: all there is to keep is in the journal, and on disk where the first reading came to its end."""

    def _asked(self) -> dict[str, Any]:
        """What an earlier first reading must have been of, beside the job's settings, to be good for this run."""
        prompts = self._work.config.prompts
        return {
            "inputs": self._inputs,
            "limit": self._work.config.limit,
            "priority_column": prompts.priority_column,
            "versions": versions(),
        }

    def _first_reading(self) -> SortedRequests:
        """Every row becomes a request, or fails; the requests that have no result yet are sorted."""
        work, passes = self._work, self._job.passes
        listing = passes.begin()
        waiting = SortedRequests(passes.folder)
        try:
            rows_read = self._read_rows(waiting, listing)
            digests = listing.close()
        except BaseException:
            listing.abandon()
            raise
        waiting.close()
        work.total = rows_read
        work.show()
        if waiting.on_disk and self._broken is None:
            passes.end(
                Pass(self._asked(), rows_read, work.run.resumed, digests | waiting.digests, list(waiting.digests))
            )
        return waiting

    def _read_rows(self, waiting: SortedRequests, listing: Listing) -> int:
        work = self._work
        count = 0
        blocks = self._blocks()
        with ThreadPoolExecutor(1, "reading") as ahead:  # tokenizing leaves Python's lock to the rest
            reading = ahead.submit(self._read, blocks)
            while True:
                rows, built = reading.result()
                if not rows:
                    return count
                reading = ahead.submit(self._read, blocks)
                for request in work.requests(rows, built):
                    waiting.add(request)
                listing.add([row.number for row in rows], work.keys, work.results)
                work.forget()
                count += len(rows)
                work.progress.passed(count)

    def _read(self, blocks: Iterator[list[Row]]) -> tuple[list[Row], list[Request | Result]]:
        """The next rows, and what they are; none at the end, or where the input breaks off."""
        try:
            rows = next(blocks, [])
        except InputCorrupt as e:
            self._broken = e
            rows = []
        return rows, self._work.built(rows)

    def _blocks(self) -> Iterator[list[Row]]:
        return self._source.windows(READ_ROWS, self._work.config.limit)

    def _take_up(self, there: Pass) -> SortedRequests:
        """The first reading of an earlier run serves this one."""
        work = self._work
        work.total = there.rows
        work.run.resumed = there.resumed
        for result in self._job.passes.failed():
            work.done(result)
        work.forget()
        work.show()
        return SortedRequests.of(self._job.passes.folder, {name: there.digests[name] for name in there.runs})

    def _write(self) -> None:
        """The second reading: the rows in input order, each with its result."""
        work, passes = self._work, self._job.passes
        work.progress.phase("writing")
        with work.signals.interruptible(), work.run.timed("write"):
            self._check_input()
            failed, keys = passes.failed(), passes.keys()
            written = 0
            for rows in self._blocks():
                key_of = dict(zip((row.number for row in rows), islice(keys, len(rows)), strict=False))
                ours = {number: key for number, key in key_of.items() if key != NO_KEY}
                found = self._found(ours)
                without = len(key_of) - len(ours)
                found.update((result.row, result) for result in islice(failed, without))
                if len(found) != len(rows):
                    raise _changed(self._source)
                self._job.write(rows, found, ours)
                written += len(rows)
                work.progress.passed(written)
            self._check_input()

    def _found(self, keys: Mapping[int, bytes]) -> dict[int, Result]:
        """The results of the rows with these keys, by number."""
        stored = self._job.stored(list(keys.values()))
        lost = sum(1 for key in keys.values() if key not in stored)
        if lost:
            self._job.passes.forget()  # the next run is to look at every row
            raise OutputError(
                f"the journal of {self._job.output} is damaged: {lost:,} results cannot be read",
                "run the same command again: they are generated again",
            )
        return {number: replace(stored[key], row=number) for number, key in keys.items()}

    def _check_input(self) -> None:
        """That the input is still the one that was read first."""
        if self._source.fingerprint() != self._inputs:
            self._job.passes.forget()
            raise _changed(self._source)


class _Windows:
    """The windows of sorted requests, planned one ahead while another runs. `looked`: no request has a result yet, it has just been looked."""

    def __init__(self, work: Generation, waiting: SortedRequests, *, looked: bool) -> None:
        self._work, self._looked = work, looked
        self._windows = waiting.windows()
        self._follow_on = False
        self._ahead: Ahead[Planned | None] | None = None
        self._size = 0
        """Leaves of the window that was taken last."""

    def next(self) -> Planned | None:
        """The next window, waited for; None where there are no more."""
        with self._work.signals.interruptible():
            return self._take()

    def more(self, waiting: int) -> Planned | None:
        """The next window once nothing of the last one waits, if it is planned by then: while the last one's second half waits."""
        if not self._size or waiting > self._size // 2:
            return None
        if self._looked and self._ahead is None:  # the journal is for one thread
            self._ahead = Ahead(self._plan)
        if waiting or (self._ahead is not None and not self._ahead.ready):
            return None
        return self._take()

    def _take(self) -> Planned | None:
        window = self._plan() if self._ahead is None else self._ahead.result()
        self._ahead = None
        self._size = 0 if window is None else len(window.leaves)
        return window

    def _plan(self) -> Planned | None:
        """Those of the next window that lack a result, planned; None at the end."""
        work = self._work
        with work.run.timed("plan"):
            for requests in self._windows:
                lacking = requests if self._looked else work.lacking(requests)
                follow_on, self._follow_on = self._follow_on, work.config.prompts.priority_column is None
                if lacking:
                    return work.planned(lacking, follow_on=follow_on)
        return None

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()


def _changed(source: Input) -> InputCorrupt:
    names = ", ".join(file.shown for file in source.files[:3])
    return InputCorrupt(
        f"{names} changed while it was worked on",
        "run the same command again: the results of rows that are still there are kept",
    )
