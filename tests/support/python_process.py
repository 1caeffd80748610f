"""A second Python process, which finds the modules that this one finds."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
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


def runs(pid: int | str) -> bool:
    """Whether a process runs. One that has ended and whose parent has not asked for its code does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def are_gone(pids: Iterable[int | str]) -> bool:
    """Waits up to a minute for these processes to end. Returns whether all have."""
    end = time.monotonic() + 60
    while alive := [pid for pid in pids if runs(pid)]:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return not alive


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
