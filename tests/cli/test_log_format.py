"""`--log-format json`: every line of standard error is an event."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen_cli.stderr import wants_json


def events(err: str) -> list[dict[str, Any]]:
    assert err.isascii()
    told = [json.loads(line) for line in err.splitlines()]
    for one in told:
        assert list(one)[:2] == ["time", "event"]
    return told


@pytest.fixture
def source(write_jsonl: Callable[..., Path]) -> Path:
    return write_jsonl([{"prompt": "a"}, {"prompt": 7, "id": "\x1b[31m"}, '{"prompt": \x1b'])


def test_a_run_tells_its_phases_and_ends_with_its_figures(cli, source, tiny_model_dir):
    run = ("run", source, "-m", tiny_model_dir, "--max-tokens", "3", "--log-format", "json")
    outcome = cli(*run)
    told = events(outcome.err)
    assert (outcome.code, outcome.out) == (3, "")
    phases = [one["phase"] for one in told if one["event"] == "phase"]
    assert [name for name in phases if name in ("planning", "loading model", "generating", "writing")] == [
        "planning",
        "loading model",
        "generating",
        "writing",
    ]
    summary = told[-1]
    assert (summary["event"], summary["exit_code"], summary["already_finished"]) == ("summary", 3, False)
    assert (summary["stats"]["rows"], summary["stats"]["rows_failed"], len(summary["failures"])) == (3, 2, 2)
    assert {one["event"] for one in told[:-1]} <= {"phase", "note"}

    again = events(cli(*run).err)[-1]
    assert (again["event"], again["already_finished"], again["stats"]) == ("summary", True, summary["stats"])


def test_with_v_the_traceback_is_in_the_event_and_its_lines_are_escaped_without(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a similar name beside it would be suggested
    as_event = events(cli("run", "no\x1b.jsonl", "-m", "x", "-v", "--log-format=json").err)[-1]
    assert as_event["traceback"].startswith("Traceback (most recent call last):\n")
    as_text = cli("run", "no\x1b.jsonl", "-m", "x", "-v").err
    assert "Traceback (most recent call last):\n" in as_text
    assert as_text.endswith("batchgen: error: no such file: no\\x1b.jsonl; check the path\n")
    assert "\x1b" not in as_text


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], False),
        (["run", "--log-format", "json"], True),
        (["run", "--log-format=json", "x"], True),
        (["run", "--log-format=json", "--log-format", "text"], False),
        (["run", "json", "--log-format"], False),
    ],
)
def test_the_format_is_known_before_the_command_line_is_understood(arguments, wanted):
    assert wants_json(arguments) is wanted
