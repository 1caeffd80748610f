"""Compiles the kernels for this processor, with the machine's C++ compiler, and loads them.

The library is stored in the user's cache folder, by a digest of what it was made from: the sources, the compiler's version, and the flags,
which name the instruction set (`isa`). It does not depend on torch: its functions take pointers and sizes, so any version of torch can use it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from batchgen.errors import BatchgenError
from batchgen.kernels.isa import NONE, flags, instruction_set, sets_below
from batchgen.process.user_cache import cache_folder, locked, replaced

SOURCES = Path(__file__).parent / "src"
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi",
    # codes.h needs x * y + z rounded once; newer versions of GCC round twice in some loops, so a row's bits depended on its loop
    "-ffp-contract=fast", "--param=avoid-fma-max-bits=0",
)  # fmt: skip
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The types that the kernels compute in, with their names in functions of the library."""
TIMEOUT = 300.0
"""Longest time for the compiler, in seconds."""
PROBE_TIMEOUT = 30.0
"""The same to say which flags it knows."""


class NoKernels(BatchgenError):
    """The kernels cannot be compiled or loaded on this machine."""


_logger = logging.getLogger("batchgen")


_running: list[subprocess.Popen[str]] = []
"""The compilers."""
_starting, _compiling = threading.Lock(), threading.Lock()
_given_up = threading.Event()


@contextmanager
def compiling() -> Iterator[None]:
    """A context in which another thread may compile the kernels. An error that ends it ends the compilers too."""
    try:
        yield
    except BaseException:
        with _starting:
            _given_up.set()
            for run in _running:
                _kill(run)
        try:
            with _compiling:
                pass  # the other thread has seen it
        finally:
            _given_up.clear()
        raise


@cache
def library() -> ctypes.CDLL:
    """Returns the compiled kernels, which are compiled first if they are not in the cache. Raises `NoKernels` with the reason."""
    if instruction_set() == NONE:
        raise NoKernels(_why_none())
    try:
        return _kept_library()
    except OSError as e:
        return _library_for_now(e)


def _kept_library() -> ctypes.CDLL:
    """Returns the library of the cache. Raises `NoKernels`, and `OSError` if it cannot be kept there."""
    target = _compiled()
    try:
        if _is_whole(target):
            return _load(target)
    except NoKernels:  # it was made on a machine with other libraries
        pass
    try:
        target.unlink(missing_ok=True)
    except OSError:
        if _digest_file(target).exists():  # it is damaged
            raise
        return _load(target)  # an earlier version has made them, in a cache that is only read
    return _load(_compiled())


def _is_whole(library: Path) -> bool:
    """Whether the file is as it was made: a power cut may leave parts of it empty, and the process would die in them."""
    try:
        return _digest_file(library).read_text() == _digest_of(library)
    except (OSError, UnicodeDecodeError):
        return False


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _compiled() -> Path:
    """Compiles the kernels if they are not in the cache, in one process at a time. Returns the path of the library. Raises `NoKernels` and `OSError`."""
    target = _target()
    if target.exists():
        return target
    with locked(target.parent / "lock"):
        for left in target.parent.glob("unfinished-*"):  # of a killed process: only the lock's holder compiles
            shutil.rmtree(left, ignore_errors=True)
        if not target.exists():  # another process may have been first
            with _compiling, replaced(target) as made:
                _logger.info("compiling kernels for this processor, once on this machine ...")
                seconds = _compile(made)
                _digest_file(target).write_text(_digest_of(made))
            _logger.info("kernels compiled in %.0f s, kept in %s", seconds, target.parent)
    return target


def _library_for_now(why: OSError) -> ctypes.CDLL:
    """Compiles the kernels for this process alone. `why`: why the cache cannot keep them. Raises `NoKernels`."""
    said = f"{why.filename}: {why.strerror}" if why.filename else str(why)
    reason = f"compiled kernels cannot be kept ({said})"
    try:
        with _compiling, tempfile.TemporaryDirectory(prefix="batchgen-") as folder:
            _logger.info("%s, so this run compiles its own; set XDG_CACHE_HOME", reason)
            made = Path(folder) / "kernels.so"
            _compile(made)
            return _load(made)  # which needs no file from then on
    except OSError as e:
        raise NoKernels(f"{reason}; set XDG_CACHE_HOME") from e


@cache
def kernel(name: str, dtype: torch.dtype, more: str = "") -> Any:
    """Returns the library's function `name` for one of `DTYPES`; the function returns nothing. Raises `NoKernels`."""
    function = library()[f"batchgen_{name}_{DTYPES[dtype]}{more}"]
    function.restype = None
    return function


def integers(*names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    """Returns the fields of a structure of C++ that are integers of 64 bits."""
    return [(name, ctypes.c_int64) for name in names]


def pointers(*names: str) -> list[tuple[str, type[ctypes.c_void_p]]]:
    """Returns the fields of a structure of C++ that are addresses."""
    return [(name, ctypes.c_void_p) for name in names]


def _compile(to: Path) -> float:
    """Returns the seconds that it has taken. Raises `NoKernels` and `OSError`."""
    compiler, sources = _compiler(), _sources()
    began = time.monotonic()
    objects = [to.parent / f"{source.stem}.o" for source in sources]
    try:
        options = _options(compiler)
        runs = [
            _started([compiler, *options, "-c", str(source), "-o", str(made)])
            for source, made in zip(sources, objects, strict=True)
        ]
        for done, run in enumerate(reversed(runs), 1):  # the first file takes longest
            _finish(run)
            if done < len(runs):
                _logger.info("compiling kernels: %d of %d files done", done, len(runs))
        _finish(_started([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(to)]))
    finally:
        while _running:
            run = _running.pop()
            _kill(run)
            run.communicate()  # waits for its end
    return time.monotonic() - began


def _started(command: list[str]) -> subprocess.Popen[str]:
    """Starts the compiler in a process group of its own: it has children, which `_kill` must reach."""
    with _starting:
        if _given_up.is_set():
            raise NoKernels("the compilation was interrupted")
        english = os.environ | {"LC_ALL": "C"}  # `_finish` reads what it says
        run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0, env=english)
        _running.append(run)
    return run


def _kill(run: subprocess.Popen[str]) -> None:
    """Kills a compiler that still runs, and its children."""
    if run.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def _finish(run: subprocess.Popen[str]) -> None:
    """Waits for a compiler's end. Raises `NoKernels` if it fails, and `OSError` if there was no space for what it writes."""
    errors = _errors(run, TIMEOUT)
    if run.returncode != 0:
        first = next((line for line in errors.splitlines() if "error" in line), errors[:300])
        failed = f"the C++ compiler failed: {first.strip()}"
        if any(os.strerror(number) in errors for number in (errno.ENOSPC, errno.EDQUOT)):
            raise OSError(failed)  # the cache is full: another folder may have room
        raise NoKernels(failed)


def _errors(run: subprocess.Popen[str], seconds: float) -> str:
    """Waits for a compiler's end. Returns what it has written. Raises `NoKernels` if that takes too long."""
    try:
        return run.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired as e:
        raise NoKernels(f"the C++ compiler was not done after {seconds:.0f} s") from e


def _load(path: Path) -> ctypes.CDLL:
    """Raises `NoKernels`, and `OSError` if the folder is on a disk from which no code may run: another folder may do."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        if os.statvfs(path.parent).f_flag & getattr(os, "ST_NOEXEC", 0):  # Linux's
            raise OSError(f"{path.parent} is on a disk that is mounted with noexec") from e
        raise NoKernels(f"the compiled kernels cannot be loaded: {e}") from e


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _target() -> Path:
    """Returns the path of the library, which need not exist."""
    compiler = _compiler()
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise NoKernels(f"the C++ compiler {compiler} does not run: {e}") from e
    digest = hashlib.sha256()
    for text in (version, " ".join([*FLAGS, *flags()]), platform.machine()):
        digest.update(text.encode() + b"\0")
    for source in sorted([*SOURCES.glob("*.h"), *_sources()]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return cache_folder() / f"kernels-{digest.hexdigest()[:20]}" / "kernels.so"


def _compiler() -> str:
    """Returns the C++ compiler. Raises `NoKernels` if there is none."""
    if not sys.platform.startswith("linux"):
        raise NoKernels("the kernels are for Linux")
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else ["g++", "c++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    raise NoKernels(f"no C++ compiler ({f'CXX={chosen}' if chosen else 'g++'}) was found")


def _options(compiler: str) -> list[str]:
    """Returns the flags of the largest set that this compiler knows: GCC 10 has no AVX-VNNI, GCC 9 no bfloat16 of ARM. Kernels for larger sets are then left out."""
    for name in [instruction_set(), *sets_below()]:
        run = _started([compiler, *FLAGS, *flags(name), "-x", "c++", "-fsyntax-only", os.devnull])
        _errors(run, PROBE_TIMEOUT)
        if run.returncode == 0:
            return [*FLAGS, *flags(name)]
    return [*FLAGS, *flags()]  # compiling the sources will show what else is wrong


def _why_none() -> str:
    if os.environ.get("BATCHGEN_ISA") == NONE:
        return "BATCHGEN_ISA=none switches the CPU kernels off"
    return f"there are no CPU kernels for this processor ({platform.machine()} without AVX2 and FMA, or NEON)"
