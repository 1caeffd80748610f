"""The end of a job: the input is read a second time, and every row is written with its result, in input order.

`merge_job` does this for a job that ran in shards, after it has joined their results.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from batchgen.config import INPUT_LIMITS
from batchgen.errors import BatchgenError, InputCorrupt, OutputError, OutputLocked, UsageError, memory_errors
from batchgen.jobs.base import FinishedJob, JobSpec
from batchgen.jobs.files.disk import check_file, write_stats
from batchgen.jobs.files.lease import Lease, holder_of_lease
from batchgen.jobs.files.manifest import Manifest, file_digest, load_manifest
from batchgen.jobs.files.target import known_as, open_target
from batchgen.jobs.job_folder import JobFolder, open_job
from batchgen.jobs.opening import WORK_FILES
from batchgen.jobs.outcomes import Outcomes, agreement_with
from batchgen.jobs.shards import (
    CLAIMS,
    ShardPlan,
    figures_so_far,
    load_plan,
    read_stats,
    shard_figures,
    unfinished_shards,
)
from batchgen.jobs.status import no_job, shard_states
from batchgen.process.signals import Signals
from batchgen.progress import Progress, Silent, Tracker
from batchgen.records import Input, RowForm, RowStream, job_path
from batchgen.records.files import InputFile
from batchgen.records.openai_batch import OpenAIForm
from batchgen.report import ReportPage, report_job
from batchgen.stats import EngineStats, Setting, counted, figures


@dataclass(frozen=True, slots=True, repr=False)
class JobReport:
    """The report of a finished job."""

    stats: dict[str, Any]
    output: str
    """For a shard: the output of the whole job."""
    already_finished: bool
    """Whether an earlier run had finished the job, so that this one did nothing."""
    chat: bool = False
    """Whether prompts went through a chat template."""
    failures: tuple[str, ...] = ()
    """The first few failed rows of this run: where, and why."""
    shard: str = ""
    """`I/N` of a shard, whose output is written by the merge; empty for a whole job."""
    pushed: str = ""
    """Address of the dataset on the Hub that has the output; empty without `--push`."""
    work_dir: str | None = None
    """The folder that holds the job's folder; None if that is beside the output."""

    @property
    def exit_code(self) -> int:
        """0, or 3 if some rows of the output failed."""
        return 3 if self.stats["job"]["rows_failed"] else 0

    def page(self) -> ReportPage:
        """Returns the job as a page for a browser. Raises `UsageError` if rows went to standard output."""
        return report_job(self.output, self.work_dir)

    def _repr_html_(self) -> str | None:
        """What a notebook displays: the page, if there can be one."""
        with suppress(BatchgenError):
            return self.page()._repr_html_()
        return None

    def __repr__(self) -> str:
        job = self.stats["job"]
        seconds = job["seconds"].get("generate", 0.0)
        rate = job["completion_tokens"] / seconds if seconds else 0.0
        speed = f" at {rate:,.0f} tokens/s" if rate else ""
        shard = f", shard {self.shard}" if self.shard else ""
        return (
            f"<JobReport {self.output}{shard}: {counted(job['rows'], 'row')}, {job['rows_failed']:,} failed; "
            f"{counted(job['prompt_tokens'], 'prompt token')}, {job['prefill_tokens']:,} of them run; "
            f"{counted(job['completion_tokens'], 'completion token')}{speed}>"
        )


def write_output(
    source: Input, job: JobFolder, fingerprint: list[dict[str, Any]], outcomes: Outcomes, *, read_rows: int
) -> None:
    """Writes the rows in input order, each with its result, so many at a time. Those of shards count as those of earlier runs.

    `fingerprint`: that of the input when it was read first.
    Raises `InputCorrupt` if the input has changed since then or breaks off, `OutputError`.
    """
    _check_unchanged(source, job, fingerprint)
    stream, left, passed = RowStream(source.rows()), job.row_count, 0
    while left:
        rows = stream.take(read_rows, job.end_of_rows)
        if stream.broken is not None:
            raise stream.broken
        if not rows:
            raise _input_changed(source, job)
        keys, results = job.rows(rows[0].number, rows[-1].number)
        lost = sum(1 for number in keys if number not in results)
        if lost:
            job.forget_first_reading()  # the next run must look at every row
            raise OutputError(
                f"the results of {job.output} are damaged: {lost:,} of them cannot be read",
                f"{'run all shards' if job.merging else 'run the same command'} again: only these rows are generated again",
            )
        if job.merging:
            seen = dict(zip(keys, job.row_keys.occurrences(list(keys.values())), strict=True))
            for number, result in results.items():
                outcomes.resumed(result, equal=int(seen.get(number, 0) > 0))
            outcomes.tracker.changed()
        there = [row for row in rows if row.number in results]
        job.write(there, results, keys)
        outcomes.written(there, results)
        left -= len(results)
        passed += len(rows)
        outcomes.tracker.passed(passed)
    _check_unchanged(source, job, fingerprint)


def _check_unchanged(source: Input, job: JobFolder, fingerprint: list[dict[str, Any]]) -> None:
    """Raises `InputCorrupt` if the input has changed since its first reading, or if its store cannot be reached any more."""
    try:
        now = source.fingerprint()
    except UsageError as e:
        again = "check the connection and run the same command again: finished rows are kept"
        raise InputCorrupt(e.message, again) from e
    if now != fingerprint:
        raise _input_changed(source, job)


def _input_changed(source: Input, job: JobFolder) -> InputCorrupt:
    """Makes sure that no later run uses the first reading. Returns the error for an input that has changed since then."""
    job.forget_first_reading()
    names = ", ".join(file.shown for file in source.files[:3])
    return InputCorrupt(
        f"{names} changed while the job was running",
        "run the same command again: the results of rows that still exist are kept",
    )


def is_last_shard(output: str, work_dir: str | None) -> bool:
    """Whether all shards of a job are done, and nobody is merging them."""
    folder = job_path(output, work_dir)
    plan = load_plan(folder)
    return plan is not None and not unfinished_shards(folder, plan) and holder_of_lease(folder / CLAIMS) is None


def merge_job(
    output: str | os.PathLike[str],
    *,
    work_dir: str | os.PathLike[str] | None = None,
    stats: str | None = None,
    progress: Progress | None = None,
) -> JobReport:
    """Writes the output of a job that ran in shards, all of which must be done. Loads no model.

    Raises `UsageError` (no such job, shards that are not done), `OutputLocked` (a shard or another merge runs), `OutputError`.
    """
    output = os.fspath(output)
    check_file("--stats", stats, (output,))
    tracker = Tracker(progress or Silent())
    with Signals(grace=0) as signals, memory_errors(), signals.interruptible():
        report = _merged_job(output, None if work_dir is None else os.fspath(work_dir), tracker)
        write_stats(stats, report.stats)
    return report


def _merged_job(output: str, work_dir: str | None, tracker: Tracker) -> JobReport:
    folder = job_path(output, work_dir)
    manifest, plan = load_manifest(folder / "manifest.json"), load_plan(folder)
    if manifest is None:
        raise no_job(output, folder)
    if plan is not None:
        lease = Lease(folder / CLAIMS, f"the merge of {output}", tracker.note)
        try:
            manifest, plan = load_manifest(folder / "manifest.json"), load_plan(folder)
            if plan is not None and manifest is not None:
                _check_done(folder, plan, output)
                source = Input(tuple(InputFile(**f, folder=plan.output["folder"]) for f in plan.output["files"]), [])
                return _merge_shards(_spec(output, work_dir, manifest, source), lease, plan, tracker)
        finally:
            lease.release()
    if manifest is None or manifest.state != "finished":
        raise UsageError(f"{output} has not run in shards", "run the same command again to continue")
    target, stats = open_target(output), read_stats(folder)
    if stats is None or not target.exists() or known_as(target, manifest.outputs) is None:
        raise UsageError(
            f"{output} or its figures are missing or were changed since batchgen wrote them",
            "run the job's command again",
        )
    if any((folder / name).exists() for name in WORK_FILES) and file_digest(folder / "stats.json") == manifest.stats:
        # A merge was killed while it removed them, or does so now.
        with suppress(OutputLocked):
            opened = open_job(_spec(output, work_dir, manifest, Input((), [])), merging=True)  # which removes them
            if isinstance(opened, JobFolder):
                opened.close()
    chat = bool(manifest.settings.get("chat"))
    return JobReport(stats, output, already_finished=True, chat=chat, work_dir=work_dir)


def _spec(output: str, work_dir: str | None, manifest: Manifest, source: Input) -> JobSpec:
    """The `JobSpec` of a merge: that of the job's last run. It generates nothing, so it has nothing to run again."""
    request = manifest.request | {"retry": []}
    begun = Manifest(settings=manifest.settings, mentions=manifest.mentions, request=request)
    return JobSpec(output=output, input=source, form=_form(request), manifest=begun, work_dir=work_dir)


def _merge_shards(spec: JobSpec, lease: Lease, plan: ShardPlan, tracker: Tracker) -> JobReport:
    output, work_dir, source, request = spec.output, spec.work_dir, spec.input, spec.manifest.request
    outcomes = Outcomes(tracker, None, agreement_with(request.get("expect"), source))
    shards = shard_figures(job_path(output, work_dir), plan)
    outcomes.tracker.phase("joining the shards")
    opened = open_job(spec, lease, merging=True)
    if isinstance(opened, FinishedJob):  # a merge that was killed when all was done but the cleaning up
        return JobReport(opened.figures, output, already_finished=True, chat=opened.chat, work_dir=work_dir)
    assert isinstance(opened, JobFolder), "standard output has no shards"
    with opened as job:
        outcomes.tracker.total = job.row_count
        outcomes.tracker.phase("writing")
        with outcomes.run.timed("write"):
            write_output(source, job, request["inputs"], outcomes, read_rows=INPUT_LIMITS.read_rows)
            job.end_output()
        # Not `job.previous`: it contains the shards already if a merge was stopped before its end.
        before = figures_so_far(job.folder, plan)
        assert before is not None, "all shards are done"
        setting = Setting(
            **{name: shards[0]["stats"][name] for name in ("model", "dtype", "device", "attention", "sampling")}
        )
        engine = EngineStats(quantization=shards[0]["stats"]["quantization"])
        stats = figures(outcomes.run, engine, setting, earlier=before)
        stats["job"]["runs"] = before["job"]["runs"]  # a merge is no run: it generates nothing
        stats |= outcomes.figures()
        stats["shards"] = [  # the figures of each one's last run
            {"shard": shard["shard"], "host": shard["host"], **{name: shard["stats"][name] for name in _OF_A_SHARD}}
            for shard in shards
        ]
        job.finish(stats)
        outcomes.tracker.show_notes(job.notes)
    chat = bool(spec.manifest.settings.get("chat"))
    return JobReport(stats, output, already_finished=False, chat=chat, work_dir=work_dir)


def _check_done(folder: Path, plan: ShardPlan, output: str) -> None:
    shards = shard_states(folder, plan)
    for shard in shards:
        name, process = f"shard {shard['shard']} of {output}", f"process {shard['pid']} on {shard['host']}"
        if shard["state"] == "running":
            raise OutputLocked(f"{name} runs ({process})", "merge when it is done, or give the shards --merge")
        if shard["state"] == "silent":
            raise OutputLocked(
                f"{name} is not done, and its holder, {process}, has been silent since {shard['seen'] or 'its start'}",
                "if that machine is gone, run the shard again with the command it had: it takes over after a minute",
            )
    undone = [shard["shard"] for shard in shards if shard["state"] != "done"]
    if undone:
        names = ", ".join(undone[:8])
        more = f" and {len(undone) - 8} more" if len(undone) > 8 else ""
        raise UsageError(
            f"shards of {output} are not done: {names}{more}", "run each of them again with its own command"
        )


def _form(request: Mapping[str, Any]) -> RowForm:
    """The `RowForm` of a manifest's request."""
    openai, form = request["openai"], {f.name: request[f.name] for f in fields(RowForm) if f.name in request}
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in form.items()}
    return RowForm(**values | {"openai": None if openai is None else OpenAIForm(**openai)})


_OF_A_SHARD = (
    "rows", "rows_failed", "rows_resumed", "prompt_tokens", "prefill_tokens", "prefill_tokens_min", "completion_tokens",
    "completion_tokens_per_s", "rows_per_s", "seconds", "device", "memory_bytes_peak",
)  # fmt: skip
