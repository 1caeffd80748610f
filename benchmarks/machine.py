"""The machine on which a result was measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from batchgen.kernels.isa import features, processor
from batchgen.process.machine import host_memory, usable_cores
from batchgen.stats import versions

ISA = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")
"""Instruction sets that decide how fast matrix products are."""


def memory_of(device: str) -> int:
    """Returns the memory of "cpu" or "cuda"."""
    if device == "cpu":
        return host_memory()
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": processor(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "instruction_sets": [name for name in ISA if name in features()],
        "memory_bytes": host_memory(),
        "system": platform.system(),
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }


def in_words(machine: Mapping[str, Any]) -> str:
    """Returns a machine's processor and the largest of its instruction sets: many processors are called "AMD EPYC"."""
    largest = machine["instruction_sets"][-1:]
    return " with ".join([machine["cpu"], *(name.upper() for name in largest)])
