"""What the tests of the command share."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def python(command_environment: dict[str, str], tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Returns a function that runs code with arguments in a process of its own, in the test's folder."""

    def run(
        code: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=command_environment | (environment or {}), cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    return run
