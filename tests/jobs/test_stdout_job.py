"""Rows on standard output, and readers that close the pipe."""

import json
import os
import subprocess
import sys

import pytest

from batchgen.errors import OutputError
from batchgen.jobs.stdout_job import StdoutJob
from batchgen.records import Row, RowForm
from batchgen.result import Result
from support.python_process import environment


def job():
    return StdoutJob(RowForm())


def window(n):
    rows = [Row(i, {"prompt": f"p{i}"}, None, f"<stdin>:{i + 1}") for i in range(n)]
    results = {i: Result(row=i, text=f"t{i}", finish_reason="stop") for i in range(n)}
    return rows, results


PIPE = """
import sys
sys.path[:0] = sys.argv[1:]
from batchgen.errors import ClosedPipe
from test_stdout_job import job, window
rows, results = window(20_000)
try:
    with job() as out:
        out.write(rows[:1], results, {})
        sys.stdin.readline()
        out.write(rows, results, {})
except ClosedPipe as e:
    print(e, file=sys.stderr)
    sys.exit(e.exit_code)
"""


def test_a_closed_pipe_ends_the_job_quietly_with_its_own_exit_code():
    command = [sys.executable, "-c", PIPE, os.path.dirname(__file__)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment()) as process:
        written = {"id": 0, "prompt": "p0", "text": "t0", "finish_reason": "stop"}
        written |= {"usage": {"prompt_tokens": 0, "completion_tokens": 0}, "error": None}
        assert process.stdout.readline().decode() == json.dumps(written) + "\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read().decode() == "standard output was closed\n"
        assert process.wait() == 141


def test_what_libraries_print_does_not_come_among_the_rows(capsys):
    rows, results = window(2)
    with job() as out:
        print("(raylet) A worker died")
        out.write(rows, results, {})
    print("afterwards")
    said = capsys.readouterr()
    assert [json.loads(line)["text"] for line in said.out.splitlines()[:-1]] == ["t0", "t1"]
    assert (said.out.splitlines()[-1], said.err) == ("afterwards", "(raylet) A worker died\n")


def test_a_standard_output_that_was_closed_before_is_a_one_line_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with job() as out, pytest.raises(OutputError) as caught:
        out.flush()
    assert (
        str(caught.value)
        == "standard output is closed; nothing is kept of a job without an output file: name one with -o"
    )
