"""A second Python process, which finds the modules that this one finds."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """The environment of such a process: it finds the packages of this checkout, installed or not."""
    paths = [str(ROOT), str(ROOT / "cli"), *filter(None, sys.path)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run_python(
    code: str, *arguments: object, cwd: Path | None = None, check: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs code with arguments in a process of its own, with these variables in its environment."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment() | variables, cwd=cwd, check=check,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@contextmanager
def holding(kind: type, path: Path, what: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds `kind(path, what)`, a `Lease`, until it is killed."""
    code = (
        f"import time\nfrom pathlib import Path\nfrom {kind.__module__} import {kind.__name__}\n"
        f"held = {kind.__name__}(Path({str(path)!r}), {what!r})\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment()) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()
