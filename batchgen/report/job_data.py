"""What the report of a job shows, gathered from the job's folder: its record, its figures, and the results of a job that is under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from batchgen.errors import BatchgenError, UsageError
from batchgen.jobs.files.results import read_results
from batchgen.jobs.files.target import open_target
from batchgen.jobs.reuse_output import result_of_row
from batchgen.jobs.shards import read_stats, stores, take_runs
from batchgen.jobs.status import job_status, no_job
from batchgen.recording import JobRecord, RowFigures
from batchgen.records.files import DELIMITERS, InputFile, split_name
from batchgen.records.inputs import Input
from batchgen.records.output import RowForm, job_path, output_format, output_row
from batchgen.records.remote import is_url
from batchgen.records.rows import Row
from batchgen.report.page import ReportPage
from batchgen.result import Result

MAX_INTERVALS = 120
"""Intervals of a run in the charts over time."""
_FOLDER_PARTS = "no prefix tree, no figures over time, no memory"


def default_report_file(output: str) -> str:
    """Returns `answers.report.html` for `answers.jsonl.gz`, in the same folder; in this folder for an output in a store."""
    path = Path(output.rpartition("/")[2] if is_url(output) else output)
    if not path.name:
        raise UsageError(f"{output!r} is not the name of an output", "name the output of a run")
    return str(path.with_name(f"{split_name(path.name)[0]}.report.html"))


def report_job(output: str, work_dir: str | None = None) -> ReportPage:
    """Returns the report of the job of an output, whether it is finished or not, or of an output whose job's folder is gone.

    Reads the job's folder; reads the output itself only if the folder is gone. Changes nothing, takes no lock, loads no model.
    Raises `UsageError` if there is neither a job nor an output.
    """
    output = str(output)
    if output == "-":
        raise UsageError("a job that writes to standard output has no report", "name an output file")
    folder = job_path(output, work_dir)
    if not (folder / "manifest.json").exists():
        return _of_output_alone(output, folder)
    status = job_status(output, work_dir)
    record = JobRecord.load(folder)
    take_runs(folder, record)
    finished = status["state"] == "finished"
    rows = record.rows if finished else None
    missing = [] if record.tree else ["no prefix tree (sharing was off, or no prompt has run yet)"]
    if not record.runs:
        missing.append("no figures over time (no prompt has run yet)")
    if rows is None:
        try:
            rows = _rows_of_output(output) if finished else _rows_of_results([folder, *stores(folder)])
        except BatchgenError as e:
            missing.append(f"no lengths and reasons of rows ({e.message})")
    return _page(output, status, "; ".join(missing), rows, record, read_stats(folder))


def _of_output_alone(output: str, folder: Path) -> ReportPage:
    """Returns the report that the rows of an output give, if its job's folder is gone."""
    if not open_target(output).exists():
        raise no_job(output, folder)
    rows = _rows_of_output(output)
    count = rows["rows"]
    if not count:
        raise UsageError(f"{output} has no rows of batchgen's, and no job's folder", "name the output of a run")
    failed = sum(rows["errors"].values())
    status = {"state": "finished", "rows_total": count, "rows_done": count, "rows_failed": failed, "shards": None}
    missing = f"{folder} does not exist (a run with --work-dir has it there): {_FOLDER_PARTS}"
    return _page(output, status, missing, rows, JobRecord(), None)


def _page(
    output: str,
    status: Mapping[str, Any],
    missing: str,
    rows: Mapping[str, Any] | None,
    record: JobRecord,
    stats: Mapping[str, Any] | None,
) -> ReportPage:
    return ReportPage(
        {
            "kind": "job",
            "title": Path(output).name,
            "state": status["state"],
            "missing": missing,
            "status": {name: status[name] for name in ("rows_total", "rows_done", "rows_failed", "shards")},
            "stats": stats,
            "tree": record.tree,
            "runs": [run_over_time(run) for run in record.runs],
            "rows": rows,
            "time": time_bars(stats["job"]["seconds"] if stats else {}),
        }
    )


def _rows_of_output(output: str) -> dict[str, Any]:
    """Sums over the rows of a finished output. Rows that are not those of batchgen are left out. Raises `UsageError` for CSV."""
    kind, compression = output_format(output)
    if kind in DELIMITERS:
        raise UsageError(
            f"a report cannot be made from {output} alone: the values of CSV have no types",
            "keep the job's folder beside it",
        )
    figures = RowFigures()
    for row in Input((InputFile(output, kind, compression),), []).rows():
        result = None if row.error is not None else result_of_row(row.columns)
        if result is not None:
            figures.add(result, lambda columns=row.columns: columns)  # type: ignore[misc]
    return figures.as_dict()


def _rows_of_results(folders: Iterable[Path]) -> dict[str, Any]:
    """Sums over the results that a job has so far. Their rows are not known, so samples have no columns."""
    figures = RowFigures()
    for folder in folders:
        for result in read_results(folder):
            figures.add(result, lambda result=result: _bare_row(result))  # type: ignore[misc]
    return figures.as_dict()


def _bare_row(result: Result) -> Mapping[str, Any]:
    row = output_row(Row(result.row, {}, None, ""), result, RowForm(keep=()))
    return row if result.row >= 0 else {name: value for name, value in row.items() if name != "id"}


def run_over_time(run: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns a run's speed and memory over at most `MAX_INTERVALS` intervals; seconds count from its first step."""
    seconds = run["seconds"]
    last = len(seconds) - 1
    places = sorted({round(i * last / MAX_INTERVALS) for i in range(MAX_INTERVALS + 1)}) if seconds else []
    rates: dict[str, list[float]] = {"completion_tokens": [], "prefill_tokens": [], "scored_tokens": []}
    for a, b in pairwise(places):
        for name, values in rates.items():
            values.append(round((run[name][b] - run[name][a]) / max(1e-3, seconds[b] - seconds[a]), 1))
    return {
        "label": run["label"],
        "seconds": [round(seconds[i] - seconds[0], 3) for i in places],
        "memory_bytes": [run["memory_bytes"][i] for i in places],
        "kv_bytes": [run["kv_bytes"][i] for i in places],
        **{f"{name}_per_s": values for name, values in rates.items()},
    }


def time_bars(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns where the time of all runs went, in seconds. Reading and planning overlap with the others."""
    if not seconds:
        return []
    forward = seconds["forward"]
    return [
        ("load the model", seconds["load"]),
        ("read and plan", seconds["plan"]),
        ("generate: in the model", forward),
        ("generate: the rest", round(max(0.0, seconds["generate"] - forward), 4)),
        ("write", seconds["write"]),
    ]
