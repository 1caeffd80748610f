"""Signals, pipes and locks of the command as a separate process: exit codes as a shell sees them, and the results that are kept."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # `tests/jobs` has the same claims of a process that is forked
ROWS = 400
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def slow_job(write_jsonl: Callable[..., Path]) -> Path:
    """Writes so many rows that the signal comes in the middle of them."""
    return write_jsonl({"prompt": f"Rows with a beginning that is the same, and then number {i}"} for i in range(ROWS))


@pytest.fixture
def start(command: list[str], command_environment: dict[str, str], tiny_model_dir: Path) -> Start:
    def run(source: Path | str, *options: str | Path, **popen: Any) -> subprocess.Popen[str]:
        popen = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen}
        arguments = [str(a) for a in ("run", source, "-m", tiny_model_dir, *options)]
        return subprocess.Popen([*command, *arguments], env=command_environment, **popen)

    return run


# One row at a time, stored at once: slow enough for a signal to come in the middle.
SLOWLY = ("--batch-size", "1", "--max-tokens", "100", "--ignore-eos", "--flush-every", "0")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"])
def test_a_signal_ends_a_run_whose_template_does_not_end(signum, code, start, slow_job, cli, tiny_model_dir, tmp_path):
    template = tmp_path / "loop.jinja"
    template.write_text("{{ range(10 ** 12) | sum }}")  # a step of C code
    process = start(slow_job, "--template", template)
    assert process.stderr is not None
    assert any("planning" in line for line in process.stderr)
    time.sleep(1)
    process.send_signal(signum)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1].startswith(f"batchgen: error: interrupted by {signal.Signals(signum).name}; ")
    template.write_text("{{ prompt }}")
    outcome = cli("run", slow_job, "-m", tiny_model_dir, "--template", template, "--max-tokens", "2", "--limit", "3")
    assert outcome.code == 0, outcome.err


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
