"""`batchgen status`: shows from another shell how far a running, stopped, dead or finished job is."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from batchgen.config import JobConfig
from batchgen.progress import percentage, rounded_duration, speed
from batchgen.stats import counted
from batchgen_cli.options import AsJson, JobOutput, option_of
from batchgen_cli.stderr import printable, write_answer

SHOWN_WORKERS = 16


def status(
    *,
    output: JobOutput,
    work_dir: Annotated[str | None, option_of(JobConfig, "work_dir")] = None,
    as_json: AsJson = False,
) -> int:
    """Show how far the job of OUTPUT is, and whether it is running, stopped, dead or finished. Changes nothing."""
    from batchgen.jobs.status import job_status

    found = job_status(output, work_dir)
    if as_json:
        write_answer(json.dumps(found))
    else:
        lines = status_lines(found, dt.datetime.now(dt.UTC))
        write_answer("\n".join(printable(f"{name:<9}{text}") for name, text in lines))
    return 0


def status_lines(found: dict[str, Any], now: dt.datetime) -> list[tuple[str, str]]:
    """Returns the status as names and texts. Unknown figures are left out."""
    lines = [("output", found["output"]), ("state", _state(found))]
    running = found["state"] == "running"
    if found["phase"]:
        how = "read" if found["phase"] in ("reading", "planning") else "written"
        passed = "" if found["rows_passed"] is None else f", {counted(found['rows_passed'], 'row')} {how}"
        lines.append(("phase", f"{'' if running else 'was '}{found['phase']}{passed}"))
    if found["rows_done"] is not None:
        lines.append(("rows", _rows(found)))
    if reasons := {name: n for name, n in (found["finish_reasons"] or {}).items() if n}:
        lines.append(("ended", ", ".join(f"{n:,} {name}" for name, n in reasons.items())))
    lines += _tokens(found)
    if found["seconds"] is not None:
        lines.append(("time", rounded_duration(found["seconds"]) + _over_runs(found)))
    if found["eta_seconds"] is not None:
        lines.append(("left", f"about {rounded_duration(found['eta_seconds'])}"))
    for shard in found["shards"] or ():
        lines.append((shard["shard"], _shard(shard)))
    lines += _workers(found["workers"] or ())
    if found["updated"]:
        age = (now - dt.datetime.fromisoformat(found["updated"])).total_seconds()
        lines.append(("updated", f"{rounded_duration(max(0.0, age))} ago"))
    return lines


def _tokens(found: dict[str, Any]) -> list[tuple[str, str]]:
    """A line of tokens and speed. Prompts are counted when their rows are done, so at first there may be nothing to show, or only a speed."""
    kinds = (("prompt_tokens", "of prompts"), ("completion_tokens", "of completions"))
    parts = [f"{found[name]:,} {what}" for name, what in kinds if found[name]]
    name = "tokens" if parts else "speed"
    parts += _speed(found)
    return [(name, ", ".join(parts))] if parts else []


def _speed(found: dict[str, Any]) -> list[str]:
    """Returns the speed of a job, a shard or a worker; nothing if it has none yet."""
    tokens, rows = found["completion_tokens_per_s"] or 0.0, found["rows_per_s"] or 0.0
    return [speed(tokens, rows)] if tokens or rows else []


_ADVICE = {
    "dead": "; the same command continues it",
    "stopped": "; the same command continues it",
    "silent": "; if that machine is gone, the same command continues it on any other",
}


def _shard(shard: dict[str, Any]) -> str:
    """A shard on one line."""
    done, total = shard["rows_done"] or 0, shard["rows_total"]
    parts = [shard["state"]]
    if shard["state"] == "silent":
        silent = shard["seconds_silent"]
        parts[0] += f" for {rounded_duration(silent)}" if silent is not None else ""
    if shard["state"] not in ("done", "not begun"):
        parts[0] += f" (process {shard['pid']} on {shard['host']})"
    parts.append(f"{done:,} of {counted(total, 'row')} ({percentage(done, total)}%)")
    if shard["rows_failed"]:
        parts.append(f"{shard['rows_failed']:,} failed")
    return ", ".join(parts + _speed(shard)) + _ADVICE.get(shard["state"], "")


def _workers(workers: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """A line for each worker; of many, their number, and lines for those that do not run."""
    if len(workers) <= SHOWN_WORKERS:
        return [("worker", _worker(worker)) for worker in workers]
    counts = Counter(worker["state"] for worker in workers)
    others = [worker for worker in workers if worker["state"] != "running"]
    more = len(others) - SHOWN_WORKERS
    return [
        ("workers", f"{len(workers):,}: {', '.join(f'{n:,} {name}' for name, n in counts.most_common())}"),
        *(("worker", _worker(worker)) for worker in others[:SHOWN_WORKERS]),
        *([("", f"and {more:,} more that do not run")] if more > 0 else []),
    ]


def _worker(worker: dict[str, Any]) -> str:
    """A worker on one line."""
    state = worker["state"]
    if state == "silent":
        state += f" for {rounded_duration(worker['seconds_silent'])}"
    parts = [worker["device"], state]
    if worker["rows_done"] or state not in ("loading", "lost"):
        parts.append(counted(worker["rows_done"], "row"))
    return ", ".join(parts + _speed(worker))


def _state(found: dict[str, Any]) -> str:
    who, shards = found["process"], found["shards"]
    if shards and who is None:
        counts = Counter(shard["state"] for shard in shards)
        if counts["done"] == len(shards):
            return f"all {len(shards)} shards are done; batchgen merge writes the output"
        return f"{found['state']}, in {len(shards)} shards: {', '.join(f'{n} {name}' for name, n in counts.items())}"
    named = who and f"process {who['pid']} on {who['host']}, since {who['started']}"
    match found["state"]:
        case "running" if who["alive"] is None:
            return f"running: {named}; this host cannot tell whether it still runs"
        case "running":
            return f"running: {named}"
        case "dead":
            return f"dead: {named}, no longer exists; the same command continues the job"
        case "stopped":
            return "stopped; the same command continues the job"
        case _:
            return "finished"


def _rows(found: dict[str, Any]) -> str:
    done, total = found["rows_done"], found["rows_total"]
    parts = [f"{done:,} done" if total is None else f"{done:,} of {total:,} done ({percentage(done, total)}%)"]
    if found["rows_failed"]:
        parts.append(f"{found['rows_failed']:,} failed")
    if found["rows_kept"]:
        parts.append(f"{found['rows_kept']:,} kept from earlier runs")
    if (found["results"] or 0) > done:
        parts.append(f"{counted(found['results'], 'result')} stored")
    return ", ".join(parts)


def _over_runs(found: dict[str, Any]) -> str:
    runs = (found["job"] or {}).get("runs", 1) if found["state"] == "finished" else 1
    return f" over {runs} runs" if runs > 1 else ""
