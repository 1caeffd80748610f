"""Jobs, opened in the test's process or run by the harness in separate processes."""

import os
from pathlib import Path

import pytest

from support.harness import CASES, Harness, Job
from support.python_process import ROOT, environment
from support.runs import runs

__all__ = ["runs"]


@pytest.fixture(scope="session")
def harness(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    """Starts the process from which all runs of the harness are forked. It has one thread, because a fork copies only the calling thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), environment()["PYTHONPATH"]]))
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        patch.setenv("JE_ARROW_MALLOC_CONF", "background_thread:false")
        return Harness(tiny_model_dir, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def job(harness: Harness, request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """The job of the case that the test names in its (indirect) parameter."""
    return Job(harness, CASES[request.param], tmp_path / "job")
