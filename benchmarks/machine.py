"""The machine on which a result was measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchgen.kernels.isa import processor
from batchgen.stats import versions

ISA = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")
"""Instruction sets that decide how fast matrix products are."""


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_of(device: str) -> int:
    """Returns the memory of "cpu" or "cuda"."""
    if device == "cpu":
        return memory_bytes()
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)


def machine_facts() -> dict[str, Any]:
    flags: set[str] = set()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            break
    return {
        "cpu": processor(),
        "architecture": platform.machine(),
        "cores": cores(),
        "instruction_sets": [name for name in ISA if name in flags],
        "memory_bytes": memory_bytes(),
        "system": platform.system(),
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }


def in_words(machine: Mapping[str, Any]) -> str:
    """Returns a machine's processor and the largest of its instruction sets: many processors are called "AMD EPYC"."""
    largest = machine["instruction_sets"][-1:]
    return " with ".join([machine["cpu"], *(name.upper() for name in largest)])


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
