"""Fixtures that every test may use: a tiny random Llama on disk, with and without a chat template."""

import os

# Set before torch is imported: these models are so small that threads only cost time.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command does: threads that wait need no processor
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import gc
import io
import json
import logging
import random
import shutil
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

from support.params import FULL, examples
from support.python_process import environment
from support.tiny_model import save_tiny_llama

# No test measures time, and `make test` tries the same examples each time.
hypothesis.settings.register_profile(
    "batchgen",
    deadline=None,
    derandomize=not FULL,
    max_examples=examples(10, 100),
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.differing_executors,
    ],
)
hypothesis.settings.load_profile("batchgen")

# Triton's kernels run on its interpreter, on the CPU. This is decided when triton is imported, which the conftest of a folder may do.
os.environ["TRITON_INTERPRET"] = "1"

# nohup, or a shell's background, ignores these signals, and every run that a test starts would ignore them too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Under `-m gpu` Triton's kernels are compiled."""
    if "gpu" in config.option.markexpr.replace("not gpu", ""):
        del os.environ["TRITON_INTERPRET"]
    gc.disable()  # while modules are imported and tests collected
    _write_to_memory()


def _write_to_memory() -> None:
    """Puts `tmp_path` in memory if there is room. Every job syncs its files, and on a slow disk tests would wait for it longer than they compute.

    `make test-slow` writes to the disk. `TMPDIR` or pytest's `--basetemp` name another place.
    """
    memory = Path("/dev/shm")
    if FULL or "TMPDIR" in os.environ or not os.access(memory, os.W_OK):
        return
    there = os.statvfs(memory)
    programs = (
        not there.f_flag & os.ST_NOEXEC
    )  # tests compile kernels, and a container may mount it without permission to run them
    if programs and there.f_bavail * there.f_frsize >= 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))  # read when the first test asks for a folder


_frozen_modules = 0
"""Number of modules when the garbage collector was last told to leave everything alone."""
MANY_OBJECTS = 100_000
"""So many make a collection slow, and each model that is closed asks for one."""


def pytest_collection_finish() -> None:
    """Imported modules stay, so the garbage collector need not look at them again and again."""
    # Imported here, because the process that only hands out tests needs none of it.
    from batchgen.prompts.tokenizer import TALKATIVE

    # `quiet` leaves loggers alone that say nothing. It would change the level of each again and again, which is slow among thousands.
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    _freeze()
    gc.set_threshold(5_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random numbers do not depend on the tests that ran before in the same process."""
    random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # `torch.manual_seed` also keeps a traceback for each kind of device that is not there.
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for modules that a test has imported (transformers, datasets, the clients of stores), and for all that the tests of a file have left."""
    file_ends = nextitem is not None and nextitem.path != item.path
    if len(sys.modules) > _frozen_modules + 100 or (file_ends and len(gc.get_objects()) > MANY_OBJECTS):
        gc.collect()
        _freeze()


def _freeze() -> None:
    global _frozen_modules
    _frozen_modules = len(sys.modules)
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama in float32 with a byte tokenizer and no chat template (context: 512 tokens)."""
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_chat_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-chat", chat=True)


@pytest.fixture
def loaded_once(tiny_model_dir: Path, tiny_chat_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models are loaded once for each of their options. For tests of what becomes of rows, whatever computes them."""
    from support.models import load_once

    load_once(monkeypatch, tiny_model_dir, tiny_chat_model_dir)


@pytest.fixture(autouse=True, scope="session")
def lasting_template_process() -> Iterator[None]:
    """The process that renders templates serves all tests. A job ends it when its prompts are made, and its start takes longer than most jobs."""
    with pytest.MonkeyPatch.context() as patch:
        process = SimpleNamespace(close=lambda: None)
        patch.setattr("batchgen.jobs.order.requests.template_process", lambda: process)
        yield


@pytest.fixture(autouse=True)
def step_costs_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test begins without costs of steps, and leaves none to the user's cache."""
    folder = tmp_path_factory.getbasetemp() / "step-costs-of-a-test"
    shutil.rmtree(folder, ignore_errors=True)
    monkeypatch.setattr("batchgen.devices.opening.cache_folder", lambda: folder)
    return folder


@pytest.fixture(autouse=True)
def no_drafts_by_the_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are admitted by the time that steps take, so their number varies. Here a run has none, except with `EveryDraft`."""
    if "drafting" not in request.path.parts:
        monkeypatch.setattr("batchgen.drafting.payoff.Payoff.rests", lambda payoff, rows, alone: True)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (or raw lines) as JSON lines to a file in the test's folder."""

    def write(rows: Iterable[Mapping[str, Any] | str], name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def compiled() -> None:
    """Skips the test where our CPU kernels cannot be compiled."""
    from support.models import kernels

    if kernels() is None:
        pytest.skip("the kernels cannot be compiled here")


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Returns a function that runs the command `batchgen` in this process and returns its exit code and both streams."""
    from batchgen_cli.app import run_command

    def run(*arguments: str | Path, stdin: str | None = None) -> Outcome:
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_command([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, out, err)

    return run


@pytest.fixture
def command() -> list[str]:
    """The command `batchgen` as a process of its own, for `subprocess`."""
    return [sys.executable, "-m", "batchgen_cli"]


@pytest.fixture
def command_environment() -> dict[str, str]:
    """The environment of such a process."""
    return environment()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a server that speaks S3, in a thread of this process."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An S3 store with an empty bucket called `bucket`: its fsspec file system. Child processes reach it too."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-aws-config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    urllib.request.urlopen(urllib.request.Request(f"{s3_server}/moto-api/reset", method="POST")).close()
    fs = s3fs.S3FileSystem()  # one for all tests, because making it takes a second
    fs.invalidate_cache()
    fs.mkdir("bucket")
    return fs
