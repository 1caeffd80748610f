"""The cores and the memory that this process may use (the machine's, within the limits of its cgroup), and the memory that it takes."""

from __future__ import annotations

import math
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

_LOOK_SECONDS = 0.05
"""Time between two looks at the memory of this process: the system keeps no maximum of it without pages of files."""
_most_bytes = 0
"""The most that was seen."""


def usable_cores() -> int:
    """Returns the number of cores that this process may use, by its affinity and the quota of its cgroup."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, cpu_quota() or allowed)


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Returns the CPU time that this process's cgroup may use, in cores, rounded up; None without a limit or a cgroup.

    `--cpus` of Docker and the CPU limits of Kubernetes and systemd are such quotas. They do not change how many cores a process sees.
    """
    quotas = []
    for group in _cgroups("cpu", root):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # ValueError: "max", which is no limit
                quota, period = (int(word) for name in names for word in (group / name).read_text("ascii").split())
                quotas += [max(1, math.ceil(quota / period))] if quota > 0 else []
    return min(quotas, default=None)


def host_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of memory of this machine, or of the process's cgroup if that has less. They do not depend on what other programs use."""
    return min([_physical(), *(limit for limit, _, _ in _memory_limits(root))])


def free_host_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that can still be allocated, by this machine and by the limits of the process and its cgroup."""
    free = [_physical() // 2]
    with suppress(OSError):  # not Linux
        lines = (root / "proc/meminfo").read_text("ascii").splitlines()
        free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")] or free
    return min(
        free + _address_space(root) + [max(0, limit - used + files) for limit, used, files in _memory_limits(root)]
    )


def _address_space(root: Path) -> list[int]:
    """Returns the bytes of address space that the process may still use; nothing without a limit (`ulimit -v`, `h_vmem` of a cluster)."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):
            pages = int((root / "proc/self/statm").read_text("ascii").split()[0])
            return [max(0, limit - pages * resource.getpagesize())]
    return []


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_limits(root: Path) -> Iterator[tuple[int, int, int]]:
    """Yields the limit of each cgroup of the process that has one, the memory in use, and that of it which files have that are not mapped: the system
    takes it back when it needs memory, however often they were read."""
    for group in _cgroups("memory", root):
        for limit, used, files, mapped in (
            ("memory.max", "memory.current", ("inactive_file", "active_file"), "file_mapped"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"), "total_mapped_file"),
        ):  # fmt: skip
            with suppress(OSError, ValueError):
                stat = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
                cached = sum(int(stat.get(name, 0)) for name in files)
                yield (
                    int((group / limit).read_text("ascii")),
                    int((group / used).read_text("ascii")),
                    max(0, cached - int(stat.get(mapped, 0))),
                )


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders of the process's cgroup and of the groups above it. In version 1 each controller has groups of its own.

    Inside a container the folder of the process's own group may be missing; the container's group is the first one then.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        first = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = first / path.strip("/")
        yield from (group for group in (own, *own.parents) if group.is_relative_to(first))


@cache
def watch_memory() -> None:
    """Makes `memory_bytes_peak` know the maximum from now on."""
    if _private_bytes() is not None:
        threading.Thread(target=_watch, name="memory", daemon=True).start()


def _watch() -> None:
    while True:
        memory_bytes_peak()
        time.sleep(_LOOK_SECONDS)


def _private_bytes() -> int | None:
    """Returns the memory of this process without pages of files, which the system may drop; None where it does not tell."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return (int(resident) - int(shared)) * resource.getpagesize()


def memory_bytes_peak() -> int:
    """Returns the maximum of the memory that belongs to this process so far, in bytes: pages of files, which the system may drop, do not count."""
    global _most_bytes
    now = _private_bytes()
    if now is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    _most_bytes = max(_most_bytes, now)
    return _most_bytes


def memory_bytes() -> int:
    """Returns the memory that belongs to this process now, in bytes; where the system does not tell, its maximum so far."""
    found = _private_bytes()
    return memory_bytes_peak() if found is None else found
