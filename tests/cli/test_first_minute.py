"""The first things that a user tries: device files as outputs, a dry run, no colours."""

import os
import re
import subprocess

import pytest


def test_a_dry_run_prints_what_plan_prints(cli, write_jsonl, tiny_model_dir, tmp_path):
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


@pytest.mark.slow
def test_no_color_is_obeyed_on_a_terminal(command, command_environment, write_jsonl, tiny_model_dir, tmp_path):
    import pty

    rows = write_jsonl([{"prompt": "a"}])
    main, terminal = pty.openpty()
    arguments = ["run", str(rows), "-m", str(tiny_model_dir), "-o", str(tmp_path / "o.jsonl"), "--max-tokens", "2"]
    done = subprocess.Popen(
        [*command, *arguments], env=command_environment | {"NO_COLOR": "1", "TERM": "xterm-256color"}, stderr=terminal
    )
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(main, 1 << 16):
            shown += part
    except OSError:  # the terminal's other end is closed
        pass
    os.close(main)
    assert done.wait() == 0
    assert b"rows" in shown
    assert not re.search(rb"\x1b\[[0-9;]*3[0-7]", shown)


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
