"""`batchgen status` as its users see it."""

import datetime as dt
import json
import re
from pathlib import Path
from typing import Any

import pytest

from batchgen_cli.status import status_lines

pytestmark = pytest.mark.usefixtures("loaded_once")

NOW = dt.datetime(2026, 3, 4, 5, 6, 10, tzinfo=dt.UTC)
WHO = {"pid": 12, "host": "here", "started": "2026-03-04T05:00:00+00:00", "alive": True}
FIGURES = """
    process phase rows_total rows_done rows_failed rows_kept rows_passed results finish_reasons prompt_tokens
    completion_tokens completion_tokens_per_s rows_per_s seconds eta_seconds updated shards workers job
"""
NOTHING = dict.fromkeys(FIGURES.split())
RUNNING: dict[str, Any] = NOTHING | {
    "output": "o.jsonl", "state": "running", "process": WHO, "phase": "generating", "rows_total": 5000, "rows_done": 1234,
    "rows_failed": 3, "rows_kept": 1000, "finish_reasons": {"error": 3, "length": 31, "stop": 1200, "timeout": 0},
    "prompt_tokens": 23_400, "completion_tokens": 12_345,
    "completion_tokens_per_s": 240.4, "rows_per_s": 4.6, "seconds": 51.2, "eta_seconds": 815.0, "results": 1234,
    "updated": "2026-03-04T05:06:08.500+00:00",
}  # fmt: skip


def lines(found: dict[str, Any]) -> list[str]:
    return [f"{name}: {text}" for name, text in status_lines(found, NOW)]


AT_FIRST = RUNNING | {"rows_total": None, "rows_done": 0, "rows_failed": 0, "rows_kept": 0, "finish_reasons": {}}
AT_FIRST |= {"prompt_tokens": 0, "eta_seconds": None, "results": 0}
READING = AT_FIRST | {"completion_tokens": 0, "completion_tokens_per_s": 0.0, "rows_per_s": 7000.0}
WAS = "process 12 on here, since 2026-03-04T05:00:00+00:00"


@pytest.mark.parametrize(
    ("found", "start", "told"),
    [
        (RUNNING, 0, [
            "output: o.jsonl",
            f"state: running: {WAS}",
            "phase: generating",
            "rows: 1,234 of 5,000 done (24%), 3 failed, 1,000 kept from earlier runs",
            "ended: 3 error, 31 length, 1,200 stop",
            "tokens: 23,400 of prompts, 12,345 of completions, 240 tokens/s",
            "time: 51 s",
            "left: about 14 min",
            "updated: 2 s ago",
        ]),
        (READING | {"phase": "planning", "rows_passed": 70_000, "results": 900}, 2,
         ["phase: planning, 70,000 rows read", "rows: 0 done, 900 results stored", "speed: 7,000 rows/s"]),
        (RUNNING | {"phase": "writing", "rows_passed": 1}, 2, ["phase: writing, 1 row written"]),
        (RUNNING | {"phase": "joining the shards", "rows_passed": 1}, 2, ["phase: joining the shards, 1 row written"]),
        (AT_FIRST, 3, ["rows: 0 done", "tokens: 12,345 of completions, 240 tokens/s"]),
        (READING, 3, ["rows: 0 done", "speed: 7,000 rows/s", "time: 51 s"]),
        (READING | {"rows_per_s": 0.0}, 3, ["rows: 0 done", "time: 51 s"]),
        (NOTHING | {"output": "o.jsonl", "state": "running", "process": WHO | {"alive": None}}, 1,
         [f"state: running: {WAS}; this host cannot tell whether it still runs"]),
        (RUNNING | {"state": "dead", "process": WHO | {"alive": False}, "eta_seconds": None}, 1,
         [f"state: dead: {WAS}, no longer exists; the same command continues the job", "phase: was generating"]),
        (NOTHING | {"output": "o\x1b[2J.jsonl", "state": "stopped", "rows_done": 7, "results": 7}, 1,
         ["state: stopped; the same command continues the job", "rows: 7 done"]),
    ],
)  # fmt: skip
def test_a_job_is_told_by_its_state(found, start, told):
    assert lines(found)[start : start + len(told)] == told


def worker(device: str, state: str, **figures: Any) -> dict[str, Any]:
    nothing = {"rows_done": 0, "completion_tokens": 0, "completion_tokens_per_s": 0.0, "rows_per_s": 0.0}
    return {"device": device, "state": state, "seconds_silent": None} | nothing | figures


def test_the_workers_of_a_running_job():
    speeds = {"rows_done": 1200, "completion_tokens_per_s": 81.6, "rows_per_s": 2.0}
    workers = [
        worker("cuda on n1", "running", **speeds),
        worker("cuda on n2", "silent", **speeds, seconds_silent=44.2),
        worker("cuda", "loading"),
        worker("cuda on n3", "lost", rows_done=7),
    ]
    assert lines(RUNNING | {"workers": workers})[8:-1] == [
        "worker: cuda on n1, running, 1,200 rows, 82 tokens/s",
        "worker: cuda on n2, silent for 44 s, 1,200 rows, 82 tokens/s",
        "worker: cuda, loading",
        "worker: cuda on n3, lost, 7 rows",
    ]


def test_of_many_workers_those_that_do_not_run_are_shown():
    workers = [worker(f"cuda on n{i}", "lost" if i < 18 else "running") for i in range(300)]
    told = lines(RUNNING | {"workers": workers})[8:-1]
    assert told[:2] == ["workers: 300: 282 running, 18 lost", "worker: cuda on n0, lost"]
    assert (len(told), told[-1]) == (18, ": and 2 more that do not run")


def test_a_finished_job_is_told_in_lines_and_as_json(cli, write_jsonl, tiny_model_dir):
    source = write_jsonl([{"prompt": "a"}, {"prompt": "b"}, {"prompt": 7}])
    assert cli("run", source, "-m", tiny_model_dir, "--max-tokens", "3", "--ignore-eos", "-q").code == 3
    output = source.with_suffix(".out.jsonl")
    told = cli("status", output)
    assert (told.code, told.err) == (0, "")
    assert re.sub(r"[\d.,]+ (tokens/s|s\b)", r"N \1", told.out).splitlines() == [
        f"output   {output}",
        "state    finished",
        "rows     3 of 3 done (100%), 1 failed",
        "ended    2 length, 1 error",
        "tokens   4 of prompts, 6 of completions, N tokens/s",
        "time     N s",
    ]
    as_json = cli("status", output, "--json")
    assert (as_json.code, as_json.err, as_json.out.count("\n")) == (0, "", 1)
    found = json.loads(as_json.out)
    assert (found["schema"], found["state"], found["rows_done"], found["job"]["rows"]) == (
        "batchgen.status/1",
        "finished",
        3,
        3,
    )
    assert sorted(found) == sorted((*NOTHING, "schema", "output", "folder", "state"))


def test_the_documentation_names_every_field_and_every_event():
    text = (Path(__file__).parents[2] / "docs" / "status.md").read_text("utf-8")
    for name in (
        *NOTHING,
        *["schema", "output", "folder", "state", "alive", "note", "log", "progress", "summary", "error"],
    ):
        assert f"`{name}`" in text, name


def shard(number: int, state: str, **figures: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("rows_done", "rows_failed", "completion_tokens_per_s", "rows_per_s", "seconds_silent"))
    return {"shard": f"{number}/4", "state": state, "pid": 12, "host": "far", "rows_total": 50, **empty, **figures}


def test_a_job_in_shards_names_each_and_who_is_silent():
    shards = [
        shard(1, "done", rows_done=50, rows_failed=2, rows_per_s=2.5),
        shard(2, "running", rows_done=20, completion_tokens_per_s=240.0),
        shard(3, "silent", rows_done=10, seconds_silent=90.0),
        shard(4, "not begun"),
    ]
    found = NOTHING | {"output": "o.jsonl", "state": "running", "rows_done": 81, "rows_total": 201, "shards": shards}
    assert lines(found) == [
        "output: o.jsonl",
        "state: running, in 4 shards: 1 done, 1 running, 1 silent, 1 not begun",
        "rows: 81 of 201 done (40%)",
        "1/4: done, 50 of 50 rows (100%), 2 failed, 2.5 rows/s",
        "2/4: running (process 12 on far), 20 of 50 rows (40%), 240 tokens/s",
        "3/4: silent for 90 s (process 12 on far), 10 of 50 rows (20%); if that machine is gone, the same command continues it on any other",
        "4/4: not begun, 0 of 50 rows (0%)",
    ]
    done = [shard(number, "done", rows_done=50) for number in range(1, 5)]
    assert "all 4 shards are done; batchgen merge writes the output" in lines(found | {"shards": done})[1]
