"""A job that runs in shards: one first reading, a store of results for each shard, one output at the end.

In addition to the files that `job_folder` describes, the job's folder contains

    shards/plan.json   the shares of the prefix order, written after the first reading (`ShardPlan`)
    shards/ID/         the files of the plan with this id:
      requests/        all requests that had no result, in prefix order
      1/, 2/, …        for each shard: its claims, results.sqlite (`results`), stats.json and report.json

A process works on the whole job (first reading, merge, a run without shards) or on one shard, never on both at the same time. A process for
the whole job takes the lease on `claims` and then checks that no shard is running. A shard takes its own lease and then checks that nobody
works on the whole job. If both start at the same moment, at least one of them sees the other and gives up.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchgen.config import RETRY_REASONS, JobConfig
from batchgen.errors import OutputError, OutputLocked, UsageError
from batchgen.jobs.base import FinishedJob, HeldResults, JobSpec
from batchgen.jobs.files.disk import check_parent, sync_folder, write_json, writing
from batchgen.jobs.files.lease import Lease, check_free_here, check_shared_folder, holder_of_lease, last_claim
from batchgen.jobs.files.manifest import differences
from batchgen.jobs.files.results import RESULTS_FILE, read_facts, read_keyed_results
from batchgen.jobs.identity import with_defaults
from batchgen.jobs.order.shares import PrefixCosts, Share
from batchgen.jobs.order.sorted_requests import read_requests, write_requests
from batchgen.progress import Snapshot
from batchgen.recording import JobRecord
from batchgen.records.inputs import Input
from batchgen.records.output import job_path
from batchgen.records.remote import is_url
from batchgen.request import Request
from batchgen.stats import sum_of_jobs

CLAIMS = "claims"
SHARDS_FOLDER = "shards"
_PLAN = "plan.json"
_WAIT_SECONDS = 0.5
_RETRY = "--retry is for rows that no shard has, because they ended before the shards began"


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The result of the first reading, for all shards and for the merge."""

    asked: dict[str, Any]
    """Input, limit, settings and versions of the reading. A shard that was started with other values cannot use this plan."""
    rows: int
    """Rows of the output."""
    output: dict[str, Any]
    """What the merge must know of the input's files (`input_facts`)."""
    earlier: dict[str, Any] | None = None
    """`job` of the figures of the runs before the shards."""
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    pieces: list[tuple[str, int]] = field(default_factory=list)
    """Files of requests, in prefix order: name and number of requests."""
    shares: list[Share] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.shares)


def load_plan(folder: Path) -> ShardPlan | None:
    """Returns the plan in a job's folder; None if there is none. Raises `UsageError` if it is damaged."""
    try:
        value = json.loads((folder / SHARDS_FOLDER / _PLAN).read_bytes())
        shares = [Share(**share) for share in value.pop("shares")]
        pieces = [(name, count) for name, count in value.pop("pieces")]
        return ShardPlan(id=value.pop("id"), shares=shares, pieces=pieces, **value)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise UsageError(
            f"{folder / SHARDS_FOLDER / _PLAN} is damaged",
            f"delete it and run the shards again: results are kept ({e})",
        ) from e


def shard_folder(folder: Path, plan: ShardPlan, number: int) -> Path:
    """The folder of shard `number`, from 1."""
    return folder / SHARDS_FOLDER / plan.id / str(number)


def write_plan(folder: Path, plan: ShardPlan, windows: Iterator[list[Request]], config: JobConfig) -> None:
    """Writes the requests of `windows`, which are in prefix order, and then the plan with their pieces and shares."""
    _, count = config.shard_of or (1, 1)
    place = folder / SHARDS_FOLDER / plan.id
    with writing(folder):
        shutil.rmtree(folder / SHARDS_FOLDER, ignore_errors=True)  # of a first reader that died
        (place / "requests").mkdir(parents=True)
    costs = PrefixCosts(place)
    pieces = []
    for number, window in enumerate(windows):
        costs.add(window)
        name = f"{number:06d}"
        write_requests(place / "requests" / name, window, config.limits)
        pieces.append((name, len(window)))
    plan = replace(plan, pieces=pieces, shares=costs.shares(count, config.engine.chunk_size))
    with writing(folder):
        for number in range(1, count + 1):
            shard_folder(folder, plan, number).mkdir()
        for made in (place / "requests", place, folder / SHARDS_FOLDER):
            sync_folder(made)
        write_json(folder / SHARDS_FOLDER / _PLAN, asdict(plan))


def forget_plan(folder: Path) -> None:
    """Removes the plan and the folders of all shards. Does nothing if there is no plan."""
    with writing(folder):
        (folder / SHARDS_FOLDER / _PLAN).unlink(missing_ok=True)
        shutil.rmtree(folder / SHARDS_FOLDER, ignore_errors=True)


def stores(folder: Path) -> list[Path]:
    """Returns the folders of all shards that have a store of results. Finds them also if the plan was deleted."""
    return [store.parent for store in sorted((folder / SHARDS_FOLDER).glob(f"*/*/{RESULTS_FILE}"))]


def take_runs(folder: Path, record: JobRecord) -> None:
    """Adds the runs of all shards to the record of the job."""
    for place in stores(folder):
        for run in JobRecord.load(place).runs:
            record.keep(run, None)


def running_shards(folder: Path, plan: ShardPlan) -> list[tuple[int, dict[str, Any]]]:
    """Returns the numbers and holders of all shards that are held. A holder on another machine may be dead."""
    held = ((n, holder_of_lease(shard_folder(folder, plan, n))) for n in range(1, plan.count + 1))
    return [(number, holder) for number, holder in held if holder is not None]


def check_no_shard_runs(folder: Path, output: str, tell: Callable[[str], None]) -> None:
    """Raises `OutputLocked` if a shard of the job is running. Waits up to a minute for a sign of life of a shard on another machine."""
    plan = load_plan(folder)
    if plan is None:
        return
    for number, _ in running_shards(folder, plan):
        Lease(shard_folder(folder, plan, number), f"shard {number}/{plan.count} of {output}", tell).release()


def unfinished_shards(folder: Path, plan: ShardPlan) -> list[int]:
    """The numbers of the shards that are not done."""
    return [n for n in range(1, plan.count + 1) if not _is_done(shard_folder(folder, plan, n))]


def _is_done(place: Path) -> bool:
    claim = last_claim(place)[1]
    return claim is not None and claim.get("state") == "done" and read_stats(place) is not None


def shard_figures(folder: Path, plan: ShardPlan) -> list[dict[str, Any]]:
    """Returns name, host and figures of each shard that has finished a run: those of its last run."""
    found = []
    for number in range(1, plan.count + 1):
        place = shard_folder(folder, plan, number)
        stats = read_stats(place)
        if stats is not None:
            claim = last_claim(place)[1] or {}
            found.append({"shard": f"{number}/{plan.count}", "host": claim.get("host"), "stats": stats})
    return found


def figures_so_far(folder: Path, plan: ShardPlan) -> dict[str, Any] | None:
    """Returns the sums over all runs of the shards and the runs before them, for the next run's figures; None if no run has ended."""
    jobs = [shard["stats"]["job"] for shard in shard_figures(folder, plan)] + ([plan.earlier] if plan.earlier else [])
    return {"job": sum_of_jobs(jobs)} if jobs else None


def read_stats(place: Path) -> dict[str, Any] | None:
    """Returns the figures in a folder; None if there are none, or if they are damaged."""
    try:
        stats = json.loads((place / "stats.json").read_bytes())
        known = stats["job"]["finish_reasons"], stats["job"]["seconds"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return stats if all(isinstance(part, dict) for part in known) else None


def input_facts(source: Input) -> dict[str, Any]:
    """Returns what the merge needs to know about the input, as JSON."""
    names = ("name", "format", "compression", "encoding")
    files = [{name: getattr(file, name) for name in names} for file in source.files]
    return {"files": files, "folder": os.getcwd()}  # noqa: PTH109


def open_shard(
    number: int,
    count: int,
    spec: JobSpec,
    *,
    asked: Mapping[str, Any],
    read: Callable[[Lease], FinishedJob | None],
    tell: Callable[[str], None],
) -> ShardFolder | FinishedJob:
    """Returns shard `number` of `count`, held by this process, unless it or the whole job is finished. `tell` is called with a sentence before each wait.

    The first to come calls `read`, which does the first reading and leaves a plan, or returns the job if it is finished; all others wait for it.
    Raises `UsageError` (other settings, shards of another number), `OutputLocked`, `OutputError`, and what `read` raises.
    """
    output, folder = spec.output, job_path(spec.output, spec.work_dir)
    if is_url(output) and spec.work_dir is None:
        raise UsageError(f"the shards of {output} need a folder that all of them see", "name it with --work-dir")
    check_parent(folder)
    check_shared_folder(folder)
    with writing(folder):
        folder.mkdir(exist_ok=True)
    said: set[str] = set()

    def tell_once(text: str) -> None:
        if text not in said:
            said.add(text)
            tell(text)

    while True:
        plan = load_plan(folder)
        if plan is not None:
            _check_count(plan, number, count, output)
        if plan is not None and not _is_for(plan, asked, folder, spec):
            _check_not_running(folder, plan, asked, output)
        elif plan is not None:
            shard = _join(folder, plan, number, spec, tell_once)
            if shard is not None:
                return shard
        finished = _lead_reading(folder, spec, asked, read, tell_once)
        if finished is not None:
            return finished


def check_shard_free(folder: Path, number: int, count: int, output: str) -> None:
    """Raises `UsageError` if the job is under way in another number of shards, `OutputLocked` if a process of this machine has this one."""
    plan = load_plan(folder)
    if plan is not None:
        _check_count(plan, number, count, output)
        check_free_here(shard_folder(folder, plan, number), f"shard {number}/{count} of {output}")


def _check_count(plan: ShardPlan, number: int, count: int, output: str) -> None:
    if plan.count != count:
        raise UsageError(
            f"{output} is under way in {plan.count} shards, not in {count}",
            f"use --shard {min(number, plan.count)}/{plan.count}, or leave --shard out: what the shards have done is taken over",
        )


def _join(
    folder: Path, plan: ShardPlan, number: int, spec: JobSpec, tell: Callable[[str], None]
) -> ShardFolder | FinishedJob | None:
    """Returns the shard of a plan; None if another process works on the whole job, or the job has another plan by now."""
    place, output = shard_folder(folder, plan, number), spec.output
    stats = read_stats(place) if _is_done(place) else None
    if stats is not None:
        reasons = stats["job"]["finish_reasons"]
        if not any(reasons.get(RETRY_REASONS[name]) for name in spec.manifest.request["retry"]):
            return FinishedJob(stats, bool(spec.manifest.settings.get("chat")), is_shard=True)
    try:
        lease = Lease(place, f"shard {number}/{plan.count} of {output}", tell)
    except (OutputLocked, OutputError):  # the folder of a plan that is gone cannot be written
        if load_plan(folder) == plan:
            raise
        return None
    try:
        if holder_of_lease(folder / CLAIMS) is not None or load_plan(folder) != plan:
            lease.release("done" if lease.before == "done" else "released")
            return None
        return ShardFolder(folder, plan, number, spec, lease)
    except BaseException:
        lease.release()
        raise


def _check_not_running(folder: Path, plan: ShardPlan, asked: Mapping[str, Any], output: str) -> None:
    """Raises an error that says what differs, if the plan was made with other settings or if its shards are running."""
    said = differences(with_defaults(plan.asked["settings"], asked["settings"]), asked["settings"])
    if said:
        raise UsageError(
            f"{output} was made with other settings: {said}",
            f"delete {folder} (and {output}, if it exists) to start again, or use another -o",  # --overwrite is not for shards
        )
    running = running_shards(folder, plan)
    if running:
        names = [name for name in asked if name != "settings"]
        said = differences({n: plan.asked.get(n) for n in names}, {n: asked[n] for n in names})
        raise OutputLocked(
            f"shard {running[0][0]}/{plan.count} of {output} is running with other input or options: {said or _RETRY}",
            "give all shards the same input and options, or wait for it to end",
        )


def _is_for(plan: ShardPlan, asked: Mapping[str, Any], folder: Path, spec: JobSpec) -> bool:
    """Whether a plan is that of `asked`, and `--retry` asks for no rows that none of its shards has, because they ended in a run before it."""
    if plan.asked != asked:
        return False
    retry = spec.manifest.request["retry"]
    if not retry or read_facts(folder, ("retry",))[0].get("retry") == retry:
        return True
    reasons = {RETRY_REASONS[name] for name in retry}
    return not any(result.reason in reasons for _, result in read_keyed_results(folder))


def _lead_reading(
    folder: Path,
    spec: JobSpec,
    asked: Mapping[str, Any],
    read: Callable[[Lease], FinishedJob | None],
    tell: Callable[[str], None],
) -> FinishedJob | None:
    """Does the first reading, or waits half a second if another process is doing it. Returns the job if it is finished."""
    try:
        lease = Lease(folder / CLAIMS, f"the first reading of {spec.output}", tell)
    except OutputLocked as e:
        holder = holder_of_lease(folder / CLAIMS)
        if holder and holder["unsharded"]:  # it takes over the shards' results and removes their plan
            who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
            raise OutputLocked(f"a run without --shard holds {spec.output} ({who})", "wait for it to end") from None
        tell(f"waiting: {e.message}")
        time.sleep(_WAIT_SECONDS)
        return None
    try:
        plan = load_plan(folder)
        return None if plan is not None and _is_for(plan, asked, folder, spec) else read(lease)
    finally:
        lease.release()


class ShardFolder(HeldResults):
    """One shard of a job, from its first window to its last result (`job_folder.Store`)."""

    def __init__(self, folder: Path, plan: ShardPlan, number: int, spec: JobSpec, lease: Lease) -> None:
        """Opens the results of earlier runs. Forgets the results of rows to retry, unless an interrupted run has forgotten them already."""
        place, retry = shard_folder(folder, plan, number), spec.manifest.request["retry"]
        with writing(place):
            super().__init__(place, spec.flush_every, lease)
            self.note_damaged()
            if retry and (lease.before == "done" or self.fact("retry") != retry):
                self.forget([RETRY_REASONS[name] for name in retry])
            self.set_fact("retry", retry)
            self.results_at_hand = self.count
        self.output, self.number = spec.output, number
        self._job_folder, self._plan = folder, plan
        self._share = plan.shares[number - 1]
        self._is_open = True
        self.previous = read_stats(place)
        if lease.taken_over is not None:
            self.notes.append(
                f"the last run (process {lease.taken_over.get('pid')} on {lease.taken_over.get('host')}) ended without finishing; "
                "this one continues it"
            )

    @property
    def request_count(self) -> int:
        return self._share.last - self._share.first

    def what_is_left(self, *, merges: bool) -> str:
        """Returns a sentence that says what to do about the other shards. `merges`: this run merges them if it can."""
        left = len(unfinished_shards(self._job_folder, self._plan))
        if left:
            return f"shard {self.number}/{self._plan.count} is done; {left} of {self._plan.count} are not"
        return f"all {self._plan.count} shards are done{'' if merges else f': batchgen merge {self.output} writes the output'}"

    def windows(self) -> Iterator[list[Request]]:
        """The requests of this shard, in prefix order."""
        at = 0
        for name, count in self._plan.pieces:
            first, last = max(self._share.first - at, 0), min(self._share.last - at, count)
            at += count
            if first < last:
                yield read_requests(self.folder.parent / "requests" / name)[first:last]

    def tell(self, progress: Snapshot) -> None:
        self._lease.tell(progress.figures())

    def end_output(self) -> None:
        self.flush()

    def finish(self, stats: dict[str, Any]) -> None:
        """Every request has a result. The shard is closed then."""
        self.flush()
        self.save_stats(stats)
        super().close()
        self._lease.release("done")
        self._is_open = False

    def close(self) -> None:
        if not self._is_open:
            return
        with ExitStack() as ending:
            ending.callback(self._lease.release)
            ending.callback(super().close)
            self.flush()
