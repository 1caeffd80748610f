"""How many CPU threads an engine uses. No torch."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores() -> int:
    """Returns the number of cores that this process may use, by its affinity and the quota of its cgroup."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, cpu_quota() or allowed)


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Returns the CPU time that this process's cgroup may use, in cores, rounded up; None without a limit or a cgroup.

    `--cpus` of Docker and the CPU limits of Kubernetes and systemd are such quotas. They do not change how many cores a process sees.
    """
    quotas = [*_version_2(root), *_version_1(root)]
    return min((max(1, math.ceil(quota)) for quota in quotas), default=None)


def _version_2(root: Path) -> list[float]:
    """Returns the limits of the process's group and of the groups above it, in cores (cgroup v2)."""
    mounted = root / "sys/fs/cgroup"
    own = next((line[3:] for line in _file_text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    group = mounted / own.strip("/")
    quotas = []
    while True:
        words = _file_text(group / "cpu.max").split()  # "max 100000", or microseconds of each period
        if len(words) == 2 and words[0].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
        if group == mounted or mounted not in group.parents:
            return quotas
        group = group.parent


def _version_1(root: Path) -> list[float]:
    folder = root / "sys/fs/cgroup/cpu"
    quota, period = (_file_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return [int(quota) / int(period)] if quota.isdigit() and period.isdigit() else []


def _file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
