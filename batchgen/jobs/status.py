"""Reads from a job's folder how far the job is. Takes no lease and writes nothing."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError
from batchgen.jobs.files.lease import SILENT_SECONDS, is_alive_here, last_claim, seconds_since
from batchgen.jobs.files.manifest import load_manifest
from batchgen.jobs.files.results import read_facts
from batchgen.jobs.shards import CLAIMS, ShardPlan, load_plan, read_stats, shard_folder
from batchgen.records.output import job_path
from batchgen.records.remote import is_url

SCHEMA = "batchgen.status/1"

_SPEED = ("completion_tokens_per_s", "rows_per_s", "eta_seconds")
_OF_ONE_RUN = ("phase", "rows_passed", "seconds", "workers", *_SPEED)
_OF_THE_JOB = (
    "rows_total", "rows_done", "rows_failed", "rows_kept", "prompt_tokens", "completion_tokens",
    "finish_reasons", "updated",
)  # fmt: skip
_OF_A_SHARD = ("phase", "rows_done", "rows_failed", "completion_tokens", "completion_tokens_per_s", "rows_per_s")
_FIGURES = dict.fromkeys((*_OF_ONE_RUN, *_OF_THE_JOB, "results"))


def job_status(output: str | os.PathLike[str], work_dir: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Returns how far the job of an output is, read from its folder (schema `batchgen.status/1`, docs/status.md). Changes nothing and never waits.

    Raises `UsageError` if there is no job, or its folder cannot be read.
    """
    output = os.fspath(output)
    if output == "-":
        raise UsageError("a job that writes to standard output stores no progress", "name an output file")
    folder = job_path(output, work_dir)
    try:
        return _read(output, folder)
    except NotADirectoryError:
        raise no_job(output, folder) from None
    except OSError as e:
        raise UsageError(f"{folder} cannot be read: {e.strerror}", "check its permissions") from e


def _read(output: str, folder: Path) -> dict[str, Any]:
    process, manifest = _process(folder), load_manifest(folder / "manifest.json")
    if manifest is None and process is None:
        raise no_job(output, folder)
    stats = read_stats(folder)
    sums = None if stats is None else stats["job"]  # of all runs that were not killed
    if process is not None and process["alive"] is not False:
        state = "running"
    elif manifest is not None and manifest.state == "finished":
        state, process = "finished", None
    else:
        state = "stopped" if process is None else "dead"
    started = process["started"] if process else None
    figures = _of_finished(sums) if state == "finished" else _under_way(folder, state, started)
    plan = None if state == "finished" else load_plan(folder)
    shards = None if plan is None else shard_states(folder, plan)
    if plan is not None and shards is not None and process is None:
        state = "running" if any(shard["state"] in ("running", "silent") for shard in shards) else "stopped"
        figures = _of_shards(plan, shards)
    return {
        "schema": SCHEMA,
        "output": output,
        "folder": str(folder),
        "state": state,
        "process": process,
        **_FIGURES,
        **figures,
        "shards": shards,
        "job": sums,
    }


def _process(folder: Path) -> dict[str, Any] | None:
    """Returns the process that works on the whole job, or was doing so when it died; None if there is none."""
    _, claim = last_claim(folder / CLAIMS)
    if not claim or claim.get("state") != "running":
        return None
    alive = is_alive_here(folder / CLAIMS, claim)
    return {name: claim[name] for name in ("pid", "host", "started")} | {"alive": alive}


def shard_states(folder: Path, plan: ShardPlan) -> list[dict[str, Any]]:
    """Returns how far each shard is, as `job_status` does."""
    return [_shard_state(folder, plan, number) for number in range(1, plan.count + 1)]


def _shard_state(folder: Path, plan: ShardPlan, number: int) -> dict[str, Any]:
    """Returns how far one shard is, from its claim or, if it is done, from its figures."""
    place, share = shard_folder(folder, plan, number), plan.shares[number - 1]
    _, claim = last_claim(place)
    claim = claim or {}
    told, stats = claim.get("told") or {}, read_stats(place)
    silent_for = seconds_since(claim.get("seen"))
    state = {"done": "done", "released": "stopped", "": "not begun"}.get(claim.get("state", ""), "running")
    if state == "running":
        alive = is_alive_here(place, claim)
        if alive is False:
            state = "dead"
        elif alive is None and (silent_for is None or silent_for > SILENT_SECONDS):
            state = "silent"
    figures = {name: told.get(name) for name in _OF_A_SHARD}
    if state == "done" and stats is None:
        state = "stopped"  # the figures are damaged, and the shard must run again
    elif state == "done" and stats is not None:
        figures = {name: stats.get(name) for name in _OF_A_SHARD} | {
            "rows_done": share.last - share.first,
            "rows_failed": stats["job"]["rows_failed"],
            "phase": None,
        }
    return {
        "shard": f"{number}/{plan.count}",
        "state": state,
        "pid": claim.get("pid"),
        "host": claim.get("host"),
        "seen": claim.get("seen"),
        "seconds_silent": silent_for if state in ("running", "silent") else None,
        "rows_total": share.last - share.first,
        **figures,
    }


def _of_shards(plan: ShardPlan, shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the rows of the whole job and the speed of the running shards."""
    without = plan.rows - sum(shard["rows_total"] for shard in shards)
    running = [shard for shard in shards if shard["state"] == "running"]
    return {
        "rows_total": plan.rows,
        "rows_done": without + sum(shard["rows_done"] or 0 for shard in shards),
        "rows_failed": sum(shard["rows_failed"] or 0 for shard in shards),
        "completion_tokens_per_s": sum(shard["completion_tokens_per_s"] or 0.0 for shard in running),
        "rows_per_s": sum(shard["rows_per_s"] or 0.0 for shard in running),
    }


def no_job(output: str, folder: Path) -> UsageError:
    """Returns the error for an output that has no job in `folder`. It names the output that may be meant."""
    if folder.exists():
        why = f"{folder} is not a job's folder"
    elif Path(output).is_dir():
        why = f"{output} is a folder"
    elif is_url(output) or Path(output).exists():
        why = f"{folder} does not exist"
    else:
        why = f"neither {output} nor {folder} exists"
    meant = "" if is_url(output) else _meant(Path(output), folder)
    return UsageError(
        f"there is no job of {output}: {why}", meant or "name the output of a run, with the --work-dir of that run"
    )


def _meant(output: Path, folder: Path) -> str:
    """Returns a question that names another output with a job in the same place, if its name is similar or its folder was named; else empty."""
    jobs = [m.parent.name.removesuffix(".job") for m in folder.parent.glob("*.job/manifest.json")]
    own = output.name.removesuffix(".job")
    near = [own] if own in jobs else difflib.get_close_matches(output.name, jobs, 1)
    return f"did you mean {output.with_name(near[0])}, or has the run a --work-dir?" if near else ""


def _under_way(folder: Path, state: str, started: str | None) -> dict[str, Any]:
    """Returns the figures that the job's last run stored, with the results that have been added since."""
    facts, results = read_facts(folder, ("progress",))
    told = facts.get("progress") or {}
    figures: dict[str, Any] = {name: told.get(name) for name in _FIGURES} | {"results": results}
    if results is not None and told:
        done = told["rows_done"] + max(0, results - told["results"])
        figures["rows_done"] = done if told["rows_total"] is None else min(done, told["rows_total"])
    age, run_age = seconds_since(figures["updated"]), seconds_since(started)
    if state == "running" and (age is None or (run_age is not None and age > run_age)):
        figures |= dict.fromkeys(_OF_ONE_RUN) | {"phase": "starting"}  # the stored figures are an earlier run's
    elif state == "running" and figures["eta_seconds"] is not None:
        figures["eta_seconds"] = round(max(0.0, figures["eta_seconds"] - (age or 0.0)), 1)
    else:
        figures["eta_seconds"] = None
    if state != "running":
        figures["workers"] = None
    return figures


def _of_finished(sums: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the figures of all runs together."""
    if sums is None:
        return {}
    try:
        generate = sums["seconds"]["generate"]
        return {
            "rows_total": sums["rows"],
            "rows_done": sums["rows"],
            "rows_failed": sums["rows_failed"],
            "finish_reasons": sums.get("finish_reasons"),
            "prompt_tokens": sums["prompt_tokens"],
            "completion_tokens": sums["completion_tokens"],
            "completion_tokens_per_s": round(sums["completion_tokens"] / generate, 3) if generate else 0.0,
            "rows_per_s": round(sums["rows"] / generate, 3) if generate else 0.0,
            "seconds": sums["seconds"]["total"],
        }
    except (KeyError, TypeError):
        return {}
