"""What the tests of the command share."""

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from support.python_process import run_python


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Returns a function that runs code with arguments in a process of its own, in the test's folder."""
    return partial(run_python, cwd=tmp_path)
