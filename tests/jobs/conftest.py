"""Jobs, opened in the test's process or run by the harness in separate processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.harness import CASES, Job, Runs
from support.runs import runs

__all__ = ["runs"]


@pytest.fixture(scope="session")
def harness(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The process that starts all runs of the harness (`support/harness.py`)."""
    root, scratch = Path(__file__).parents[2], tmp_path_factory.mktemp("runs")
    paths = [str(root), str(root / "cli"), str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    env = os.environ | one_thread
    env |= {"PYTHONPATH": os.pathsep.join(paths), "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    with (
        (scratch / "zygote.err").open("w") as err,
        subprocess.Popen(
            [sys.executable, str(root / "tests" / "support" / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env=env,
        ) as zygote,
    ):
        assert zygote.stdout is not None
        threads = zygote.stdout.readline()
        assert threads == "1\n", f"{threads} threads; {(scratch / 'zygote.err').read_text()}"
        yield Runs(zygote, tiny_model_dir, scratch)
        assert zygote.stdin is not None
        zygote.stdin.close()


@pytest.fixture
def job(harness: Runs, request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """The job of the case that the test names in its (indirect) parameter."""
    return Job(harness, CASES[request.param], tmp_path / "job")
