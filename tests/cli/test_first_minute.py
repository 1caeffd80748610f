"""The first things that a user tries: device files as outputs, a dry run, no colours."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("loaded_once")


def test_a_dry_run_prints_what_plan_prints(cli, write_jsonl, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "batchgen.model.weights.weight_size.free_host_memory", lambda: 8 << 20
    )  # it is printed, and changes
    rows, output = write_jsonl([{"prompt": f"The same beginning {i}"} for i in range(3)]), tmp_path / "o.jsonl"
    dry = cli("run", rows, "-m", tiny_model_dir, "-o", output, "--dry-run", "--max-tokens", "3")
    planned = cli("plan", rows, "-m", tiny_model_dir, "--max-tokens", "3")
    assert (dry.code, dry.out) == (0, planned.out)
    assert list(tmp_path.glob("o.jsonl*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("output", "lines"), [("/dev/stdout", 2), ("/dev/null", 0)])
def test_device_files_are_outputs(output, lines, command, command_environment, write_jsonl, tiny_model_dir):
    rows = write_jsonl([{"prompt": "a"}, {"prompt": "b"}])
    done = subprocess.run(
        [*command, "run", str(rows), "-m", str(tiny_model_dir), "-o", output, "--max-tokens", "2", "-q"],
        env=command_environment, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", lines)


@pytest.mark.parametrize(
    ("output", "named"), [("/dev/null", "/dev/null"), ("/dev/stdout", "standard output"), ("o.jsonl", "o.jsonl")]
)
def test_the_summary_says_where_the_rows_are(output, named, cli, write_jsonl, tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = write_jsonl([{"prompt": "a"}])
    done = cli("run", rows, "-m", tiny_model_dir, "-o", output, "--max-tokens", "2")
    assert done.code == 0
    assert [line.split(maxsplit=1) for line in done.err.splitlines() if line.startswith(" output")] == [
        ["output", named]
    ]


@pytest.mark.parametrize("form", ["text", "json"])
def test_ctrl_c_while_a_failure_is_being_told_adds_no_second_line(form, python):
    code = (
        "import sys\n"
        "from batchgen_cli.__main__ import _end\n"
        "from batchgen_cli.stderr import say\n"
        "say('interrupted by SIGTERM', 143, as_json=sys.argv[2] == 'json')\n"
        "_end(2, None)\n"
    )
    done = python(code, "--log-format", form)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (143, "", 1)
    assert "interrupted by SIGTERM" in done.stderr


def test_at_its_end_the_command_waits_for_threads_and_runs_exit_handlers(python):
    code = (
        "import atexit, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from batchgen_cli.__main__ import main\n"
        "atexit.register(lambda: print('a handler'))\n"
        "first = threading.Event()\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('a thread'), first.set())).start()\n"
        "ThreadPoolExecutor(1).submit(lambda: (first.wait(), time.sleep(0.1), print('a task')))\n"
        "main()\n"
    )
    done = python(code, "run")
    assert (done.returncode, done.stderr) == (
        2, "batchgen: error: missing argument 'INPUT...'; see batchgen run --help\n",
    )  # fmt: skip
    assert done.stdout == "a thread\na task\na handler\n"


# -- interrupts


# `tests/jobs` has the same claims of a process that is forked.
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
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_any_moment_of_the_start_is_one_line(
    signum, seconds, command_environment, slow_job, tiny_model_dir
):
    words = ["run", str(slow_job), "-m", str(tiny_model_dir), *SLOWLY, "--no-progress", "--grace", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, *words],
        env=command_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "begun\n"
    time.sleep(seconds)
    process.send_signal(signum)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (128 + signum, "")
    *notes, last = err.splitlines()
    assert last.startswith(f"batchgen: error: interrupted by {signum.name}")
    assert all(line.startswith("batchgen: ") for line in notes), notes


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_whose_template_does_not_end(
    signum, command_environment, slow_job, tiny_model_dir, tmp_path
):
    template = tmp_path / "endless.jinja"
    template.write_text("{{ range(10 ** 12) | sum }}")  # one step of C code
    words = ["run", str(slow_job), "-m", str(tiny_model_dir), "--template", str(template)]
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN, *words],
        env=command_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert any("planning" in line for line in process.stderr)
            process.send_signal(signum)
            _, err = process.communicate(timeout=60)  # all of its rows would take more than an hour
        finally:
            process.kill()
    assert process.returncode == 128 + signum
    assert err.splitlines()[-1].startswith(f"batchgen: error: interrupted by {signum.name}")


# -- several processes


@pytest.mark.slow
def test_rows_go_out_by_one_pipe_whatever_the_processes_say(cli, tiny_model_dir, write_jsonl, tmp_path):
    source = write_jsonl({"prompt": f"Rows with a beginning that is the same, and then number {i}"} for i in range(24))
    stats = tmp_path / "stats.json"
    options = ("-m", tiny_model_dir, "-o", "-", "--max-tokens", "5", "--stats", stats)
    one = cli("run", source, *options)
    two = cli("run", source, *options, "--device", "cpu:0,1", "--no-progress", "-q")
    assert (two.code, two.err) == (0, "")
    assert two.rows == one.rows
    figures = json.loads(stats.read_text())
    assert (figures["rows_ok"], figures["device"]) == (24, "cpu:0,1")
