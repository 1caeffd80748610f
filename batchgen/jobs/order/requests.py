"""Turns rows into requests and leaves out rows that have a result, window by window or for the whole input in prefix order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

from batchgen.config import JobConfig
from batchgen.errors import InputCorrupt
from batchgen.jobs.files.row_memory import KnownRequest
from batchgen.jobs.job_folder import Job, JobFolder
from batchgen.jobs.order.sorted_requests import SortedRequests
from batchgen.jobs.outcomes import Outcomes
from batchgen.process.templates import template_process
from batchgen.prompts import PromptBuilder
from batchgen.records import Input, Row, RowStream
from batchgen.records.output import id_digest, own_id
from batchgen.records.parquet_types import id_text
from batchgen.request import Request
from batchgen.result import Result
from batchgen.stats import RowCounts
from batchgen.version import versions

_STOP_SECONDS = 5.0
_READING_FORM = 7
"""Changes with the form of what a first reading stores: a reading of another form is made again."""
_SHOWN_ID = 60  # characters of an id in a message


Built = Request | Result | KnownRequest


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Some rows of the output."""

    rows: list[Row]
    keys: dict[int, bytes]
    """Keys by row number. Rows that never became requests have none."""
    results: dict[int, Result]
    """Results by row number (their own `row` may be another), of rows that never became requests and of rows that have a result from an earlier run."""
    requests: list[Request]
    """Requests of the other rows; of equal rows with one key, only that of the first."""

    def answered(self, results: dict[int, Result], order: str) -> list[Row]:
        """Returns the rows that have a result, in the order in which to write them: `done` is that of `results`, which are by row number.

        Adds to `results` those of rows that are equal to another of these rows.
        """
        first = {request.key: request.row for request in self.requests}
        for number, key in self.keys.items():
            if number not in results and first.get(key) in results:
                results[number] = results[first[key]]
        if order == "done":
            rows = {row.number: row for row in self.rows}
            return [rows[number] for number in results]
        return [row for row in self.rows if row.number in results]


class RequestReader:
    """Makes requests of rows, counts the rows that need none, and applies `--limit`.

    A row after the limit stays in the output if an earlier run has left a result for it. With `--retry`, it runs again. Of equal rows no more
    stay than the output has. So rows after the limit are read as long as there are such results that no row has asked for yet.
    """

    def __init__(
        self,
        config: JobConfig,
        prompts: PromptBuilder,
        check: Callable[[Request], Request | Result],
        job: Job,
        outcomes: Outcomes,
        *,
        ahead: bool,
    ) -> None:
        """`check` returns the request, or the result of a row whose grammar cannot be used. `ahead`: all rows are read before any is generated."""
        self._config, self.prompts, self._check = config, prompts, check
        self._job, self._outcomes, self._ahead = job, outcomes, ahead
        self._met = 0
        """Rows that have a result of an earlier run, as `results_at_hand` counts them."""
        self._same_ids = 0
        """Rows whose id an earlier row has."""
        self._first_same_id = ""
        """The first of these ids and its place."""
        self._digests: dict[int, bytes] = {}
        """Digests of rows that are being built, by number."""

    def take(self, stream: RowStream, size: int) -> list[Row]:
        """Returns the next rows to look at; empty if there are no more."""
        limit, number = self._config.limit, stream.next_number
        if limit is None or number < limit:
            return stream.take(size, limit)
        if number < self._job.kept_rows or self._met < self._job.results_at_hand:
            return stream.take(size)
        return []

    def known(self, rows: Sequence[Row]) -> list[KnownRequest | None]:
        """Returns what earlier runs have made of rows. They need not be built if they have a result."""
        memory = self._job.row_memory
        if memory is None:
            return [None] * len(rows)
        digests = [None if row.error is not None else memory.digest(row.columns, typed=row.typed) for row in rows]
        known = memory.find([digest for digest in digests if digest is not None])
        new = ((row, digest) for row, digest in zip(rows, digests, strict=True) if digest not in known)
        self._digests.update((row.number, digest) for row, digest in new if digest is not None)
        return [None if digest is None else known.get(digest) for digest in digests]

    def build(self, rows: Sequence[Row], known: Sequence[KnownRequest | None]) -> list[Built]:
        """Returns a request for each row, or the result of a row that failed, or what is `known` of it.

        May run in another thread, ahead of `requests`.
        """
        built = iter(self._built([row for row, one in zip(rows, known, strict=True) if one is None]))
        return [next(built) if one is None else one for one in known]

    def _built(self, rows: Sequence[Row]) -> list[Request | Result]:
        return [self._check(b) if isinstance(b, Request) else b for b in self.prompts.build(rows)] if rows else []

    def requests(self, rows: Sequence[Row], built: Sequence[Built]) -> ReadRows:
        """Returns the rows that are in the output. Must be called for all rows in order. Raises `TooManyErrors`."""
        self._outcomes.tracker.show_notes(self.prompts.notes)
        self._remember(rows, built)
        ids = self._id_digests(rows)
        found = [
            (row.number, b, own) for row, b, own in zip(rows, built, ids, strict=True) if not isinstance(b, Result)
        ]
        given = self._job.row_keys.keys(
            [b.key for _, b, _ in found], [own for *_, own in found], [b.is_sampled for _, b, _ in found]
        )
        keys = {number: key for (number, *_), (key, _) in zip(found, given, strict=True)}
        before = {number: count for (number, *_), (_, count) in zip(found, given, strict=True)}
        equal = {number for number, count in before.items() if count}
        stored = self._job.stored(list({*keys.values()}))
        of_this_run = self._job.of_this_run([keys[number] for number in equal if keys[number] in stored])
        limited = list({*keys.values()}) if self._config.limit is not None else []
        earlier, shown = stored.keys() | self._job.forgotten(limited), self._job.rows_of_output(limited)
        stays = {n for n, key in keys.items() if key in earlier and before[n] < max(1, shown.get(key, 0))}
        self._met += len(stays)
        read, asked, waiting = ReadRows([], {}, {}, []), dict[bytes, tuple[Row, Built]](), Counter[bytes]()
        for row, one in zip(rows, built, strict=True):
            if isinstance(one, Result):
                self._failed(read, row, one)
                continue
            key, is_equal = keys[row.number], row.number in equal
            result = stored.get(key)
            if row.number not in stays and not self._is_wanted(row.number, 0):
                continue
            read.rows.append(row)
            read.keys[row.number] = key
            if result is not None:
                read.results[row.number] = result
                if key in of_this_run:
                    self._outcomes.done(result, row.source, equal=1)
                else:
                    self._outcomes.resumed(result, equal=int(is_equal))
            elif is_equal and (self._ahead or key in asked):
                waiting[key] += 1
            else:
                asked[key] = row, one
        self._outcomes.tracker.changed()
        self._job.add_equal(waiting)
        self._ask(read, asked, waiting)
        return read

    def _id_digests(self, rows: Sequence[Row]) -> list[bytes | None]:
        """Counts the next rows of the input that have the id of an earlier one. Returns the digests of their ids; None for a row without one."""
        openai = self._config.output_format == "openai"
        ids = [own_id(row, self._config.id_column, openai=openai) for row in rows]
        digests = [id_digest(own) for own in ids]
        named = [(row, own) for row, own in zip(rows, ids, strict=True) if own is not None]
        occurrences = self._job.row_keys.occurrences([digest for digest in digests if digest is not None])
        for (row, own), seen in zip(named, occurrences, strict=True):
            if seen:
                self._same_ids += 1
                self._first_same_id = self._first_same_id or f"{id_text(own)[:_SHOWN_ID]!r}, {row.source}"
        return digests

    def _remember(self, rows: Sequence[Row], built: Sequence[Built]) -> None:
        """Remembers rows that have become requests. Not those with images, whose files may change while the row stays the same."""
        if self._job.row_memory is None:
            return
        found = [(self._digests.pop(row.number, None), one) for row, one in zip(rows, built, strict=True)]
        self._job.row_memory.add(
            (digest, KnownRequest(one.key, one.is_sampled))
            for digest, one in found
            if digest is not None and isinstance(one, Request) and not one.images
        )

    def _failed(self, read: ReadRows, row: Row, result: Result) -> None:
        if self._is_wanted(row.number, self._job.kept_rows):
            read.rows.append(row)
            read.results[row.number] = result
            self._outcomes.done(result, row.source)

    def _ask(self, read: ReadRows, asked: Mapping[bytes, tuple[Row, Built]], equal: Mapping[bytes, int]) -> None:
        """Adds the requests of rows that lack a result, by key. Builds those of which only the key was known. `equal` rows wait for a key's result."""
        late = [row for row, one in asked.values() if isinstance(one, KnownRequest)]
        built = dict(zip((row.number for row in late), self._built(late), strict=True))
        for key, (row, one) in asked.items():
            request = built.get(row.number, one)
            if isinstance(request, Request):
                read.requests.append(request if request.key == key else replace(request, key=key))
            elif isinstance(request, Result):  # the machine was too slow for its template this time
                self._job.append(key, request)
                self._job.commit()
                own = [number for number, other in read.keys.items() if other == key]
                read.results.update(dict.fromkeys(own, request))
                self._outcomes.done(request, row.source, rows=1 + equal[key], equal=equal[key])

    def note_same_ids(self) -> None:
        """Notes how many rows had the id of an earlier row. Called after the last row."""
        if self._same_ids:
            has = "row has" if self._same_ids == 1 else "rows have"
            self._outcomes.tracker.note(
                f"{self._same_ids:,} {has} the id of an earlier row (the first: {self._first_same_id}): "
                "every row runs, but the id does not tell them apart"
            )

    def _is_wanted(self, number: int, kept: int) -> bool:
        return self._config.limit is None or number < max(self._config.limit, kept)


def asked_of(config: JobConfig, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what must be equal, in addition to the job's settings, for a run to use an earlier first reading."""
    return {
        "form": _READING_FORM,
        "inputs": inputs,
        "input_format": config.input_format,
        "limit": config.limit,
        "id_column": config.id_column,
        "output_format": config.output_format,
        "priority_column": config.prompts.priority_column,
        "versions": versions(),
    }


class FirstReading:
    """Reads the whole input once, in its own thread: every row becomes a request or fails, and the requests without a result are sorted.

    A context manager; leaving it ends the reading after the current rows.
    """

    def __init__(
        self, config: JobConfig, source: Input, reader: RequestReader, job: JobFolder, outcomes: Outcomes
    ) -> None:
        self._config, self._source, self._reader, self._job = config, source, reader, job
        self._outcomes = outcomes
        self._stream = RowStream(source.rows())
        self.fingerprint = source.fingerprint()
        """Of the input that is read."""
        # The sorted requests name images in the job's folder, which may have been moved.
        self._asked = asked_of(config, self.fingerprint) | {"folder": str(job.folder.absolute())}
        self.fresh = True
        """Whether requests that already have results were filtered out in this run."""
        self._sorted: Future[SortedRequests] = Future()
        self._stopped = False
        self._has_requests: Future[bool] = Future()
        """Whether there is a request to run, once that is known."""
        self._lock = threading.Lock()
        self._next_phase: str | None = None
        self._thread = threading.Thread(target=self._run, name="batchgen-reading", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped = True
        if not self._sorted.done():  # else the thread is ending, and the prompts may be needed again
            self._reader.prompts.stop()
        self._thread.join(_STOP_SECONDS)

    def needs_a_model(self) -> bool:
        """Waits until a request to run is found or the reading has ended. Returns whether there is one.

        Also returns False if an earlier run's reading is used: its requests are compared with the results later, window by window.
        """
        return self._has_requests.result()

    def announce(self, phase: str | None) -> None:
        """Sets the phase to show when the reading ends; None shows none."""
        with self._lock:
            self._next_phase = phase
            if phase is not None and self._sorted.done():
                self._outcomes.tracker.phase(phase)

    def result(self) -> SortedRequests:
        """Waits for the end and returns the sorted requests. Raises what the reading raised."""
        return self._sorted.result()

    @property
    def broken(self) -> InputCorrupt | None:
        """The error of an input that breaks off, else None."""
        return self._stream.broken

    # -- in the thread

    def _run(self) -> None:
        try:
            earlier = self._job.earlier_reading(self._asked)
            self._sorted.set_result(self._read_all() if earlier is None else self._take_up(earlier))
        except BaseException as e:  # noqa: BLE001 - raised by `result`
            self._sorted.set_exception(e)
        finally:
            template_process().close()  # frees its memory; it is started again if more is built
            if not self._has_requests.done():
                self._has_requests.set_result(False)
            with self._lock:
                if self._next_phase is not None and self._sorted.exception() is None:
                    self._outcomes.tracker.phase(self._next_phase)

    def _read_all(self) -> SortedRequests:
        self._job.begin_reading()
        waiting = SortedRequests(self._job.sorted_folder, self._config.limits)
        self._read_rows(waiting)
        if self._stopped:
            return waiting
        self._reader.note_same_ids()
        waiting.close()
        tracker = self._outcomes.tracker
        tracker.total = self._job.row_count
        tracker.changed()
        self._job.check_dropped(self._outcomes.failures)
        if waiting.on_disk and self.broken is None:
            reading = {
                "rows": tracker.total,
                "resumed": vars(self._outcomes.run.resumed),
                "digests": waiting.digests,
            }
            self._job.keep_reading(self._asked, reading)
        return waiting

    def _read_rows(self, waiting: SortedRequests) -> None:
        count = 0
        with ThreadPoolExecutor(1, "batchgen-building") as pool:  # the tokenizer releases Python's lock
            rows, ahead = self._build(pool)
            while True:
                built = ahead.result()
                if not rows or self._stopped:
                    return
                present, (rows, ahead) = rows, self._build(pool)
                read = self._reader.requests(present, built)
                for request in read.requests:
                    waiting.add(request)
                self._job.add_rows([row.number for row in read.rows], read.keys, read.results)
                if read.requests and not self._has_requests.done():
                    self._has_requests.set_result(True)
                count += len(present)
                self._outcomes.tracker.passed(count)

    def _build(self, pool: ThreadPoolExecutor) -> tuple[list[Row], Future[list[Built]]]:
        """Takes the next rows and builds them in another thread."""
        rows = self._reader.take(self._stream, self._config.limits.read_rows)
        return rows, pool.submit(self._reader.build, rows, self._reader.known(rows))

    def _take_up(self, earlier: dict[str, Any]) -> SortedRequests:
        """Uses the reading of an earlier run."""
        self.fresh = False
        tracker, run = self._outcomes.tracker, self._outcomes.run
        tracker.total = earlier["rows"]
        run.resumed = RowCounts(**earlier["resumed"])
        for result in filter(None, self._job.failed_rows()):
            self._outcomes.done(result)
        tracker.changed()
        self._job.check_dropped(self._outcomes.failures)
        return SortedRequests.of(self._job.sorted_folder, earlier["digests"], self._config.limits)
