"""Signals, pipes and locks of the command as a separate process: exit codes as a shell sees them, and the results that are kept."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # `tests/jobs` has the same claims of a process that is forked
ROWS = 400


@pytest.fixture
def slow_job(write_jsonl: Callable[..., Path]) -> Path:
    """Writes so many rows that the signal comes in the middle of them."""
    return write_jsonl({"prompt": f"Rows with a beginning that is the same, and then number {i}"} for i in range(ROWS))


# One row at a time, stored at once: slow enough for a signal to come in the middle.
SLOWLY = ("--batch-size", "1", "--max-tokens", "100", "--ignore-eos", "--flush-every", "0")


BEGIN = """
import sys
import batchgen_cli.__main__ as command
sys.stdout.write("begun\\n")
sys.stdout.flush()
command.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 5.0])
def test_ctrl_c_at_any_moment_of_the_start_is_one_line(seconds, command_environment, slow_job, tiny_model_dir):
    words = ["run", str(slow_job), "-m", str(tiny_model_dir), *SLOWLY, "--no-progress"]
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, *words],
        env=command_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "")
    *notes, last = err.splitlines()
    assert last.startswith("batchgen: error: interrupted by SIGINT")
    assert all(line.startswith("batchgen: ") for line in notes), notes
