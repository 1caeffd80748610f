"""Real processes of devices: how they start, and messages about how they ended."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest
import torch

from batchgen.config import EngineConfig, ModelConfig
from batchgen.devices.transport import Processes, start_process
from batchgen.devices.worker import take_device
from batchgen.devices.workers import Workers
from batchgen.errors import ModelError
from batchgen.process.child_process import exit_code, how_it_ended
from support.python_process import are_gone, run_python


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit(7)", "exit code 7"),
        ("print('one'); print('two  '); print(); raise SystemExit(3)", "exit code 3: two"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; os.write(2, b'x' * 50_000 + b'\\nlast \\xff words'); os.abort()", "SIGABRT: last \ufffd words"),
        ("import os; os.write(1, b'x' * 5000); os._exit(1)", "exit code 1: " + "x" * 300),
    ],
)
def test_a_signal_or_an_exit_code_and_the_last_line_that_it_printed(program, words):
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=said, stderr=said)
        assert how_it_ended(exit_code(process), said) == words


def test_one_that_does_not_end_is_not_waited_for_for_ever():
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        assert how_it_ended(exit_code(process, seconds=0.01), said) == "it hangs"
        process.kill()
        process.wait()


def test_processes_start_from_wherever_the_job_was_started_and_tell_what_is_wrong(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the present folder')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as e:
        model = ModelConfig(model="./nowhere", device="cpu:0,1")
        Workers(model, EngineConfig(), Processes(model.devices, model.device, start_process))
    assert e.value.message == "model folder './nowhere' does not exist"


JOB = """
import os, subprocess
from multiprocessing import Pipe
from batchgen.devices.transport import start_process
ours, theirs = Pipe()
with open(os.devnull, "wb") as said:
    worker = start_process(theirs, said)
    other = subprocess.Popen(["sleep", "100"], pass_fds=[ours.fileno()], stdout=said, stderr=said)
print(worker.pid, other.pid, flush=True)
os._exit(1)
"""


@pytest.mark.slow
def test_a_process_ends_with_its_job_although_another_one_holds_their_connection():
    worker, other = map(int, run_python(JOB).stdout.split())
    try:
        assert are_gone([worker])
    finally:
        os.kill(other, signal.SIGKILL)


def test_a_device_that_is_not_there_is_told_before_anything_is_loaded():
    with pytest.raises(ModelError, match=r"^--device cuda:99: this machine has (no|\d+) CUDA devices?; use"):
        take_device("cuda:99")


@pytest.mark.gpu
def test_a_process_works_on_its_own_gpu():
    last = torch.cuda.device_count() - 1
    take_device(f"cuda:{last}")
    assert torch.cuda.current_device() == last
