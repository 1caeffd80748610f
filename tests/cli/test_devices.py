"""`--device` with several devices as users run it: real processes, from the command to the output."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from batchgen.jobs.files.results import read_facts

SAMPLE = Path(__file__).parents[2] / "sample_data"


def workers_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if stat.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(stat.parent.name))
        except OSError:
            pass
    return found


@pytest.mark.slow
def test_rows_go_out_by_one_pipe_whatever_the_processes_say(cli, tiny_model_dir, write_jsonl, tmp_path):
    source = write_jsonl({"prompt": f"Rows with a beginning that is the same, and then number {i}"} for i in range(24))
    stats = tmp_path / "stats.json"
    options = ("-m", tiny_model_dir, "-o", "-", "--max-tokens", "5", "--stats", stats)
    one = cli("run", source, *options)
    before = workers_of(os.getpid())
    two = cli("run", source, *options, "--device", "cpu:0,1", "--no-progress", "-q")
    assert (two.code, two.err) == (0, "")
    assert two.rows == one.rows
    figures = json.loads(stats.read_text())
    assert (figures["rows_ok"], figures["device"]) == (24, "cpu:0,1")
    assert workers_of(os.getpid()) == before


@pytest.mark.slow
def test_the_sample_is_answered_as_by_one_process_and_no_process_outlives_a_killed_job(
    command, command_environment, tmp_path
):
    def start(name: str, *options: str) -> "subprocess.Popen[bytes]":
        arguments = [
            "run",
            str(SAMPLE / "prompts.jsonl"),
            "-m",
            str(SAMPLE / "model"),
            "-o",
            str(tmp_path / name),
            *options,
        ]
        return subprocess.Popen([*command, *arguments, "-q"], env=command_environment)

    two = ("--device", "cpu:0,1", "--batch-size", "4", "--flush-every", "0")
    assert start("one.jsonl").wait(300) == 0
    process = start("two.jsonl", *two)
    while (read_facts(tmp_path / "two.jsonl.job", ())[1] or 0) < 4:
        assert process.poll() is None
        time.sleep(0.01)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.01)
    assert start("two.jsonl", *two).wait(300) == 0
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
