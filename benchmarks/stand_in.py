"""A processor with AMX stands in for one without it, or without AVX-512: newer instructions are hidden from every process of a comparison.

`ONEDNN_MAX_CPU_ISA` and its like restrict one library each. OpenVINO, for one, then looks for bfloat16 products that its oneDNN no
longer has, and fails; its attention asks the processor itself. `stand_in.c` changes what the processor says.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from batchgen.kernels.isa import has_bfloat16

AVX2, AVX512_BF16 = "avx2", "avx512_bf16"
STAND_INS = (AVX2, AVX512_BF16)


def without_bfloat16(kind: str | None) -> bool:
    """Whether the processes of a comparison see a processor without products of bfloat16. `kind` is the stand-in, None for this processor."""
    return kind == AVX2 or not has_bfloat16()


def environment(kind: str, folder: Path) -> dict[str, str]:
    """Returns the environment variables that make a process see a smaller processor; the library that they name is compiled into `folder`.

    Raises `subprocess.CalledProcessError` if there is no compiler or this processor cannot stand in for another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{kind}.so"
    source = Path(__file__).with_name("stand_in.c")
    keep = [] if kind == AVX2 else ["-DKEEP_AVX512"]
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *keep, str(source), "-o", str(library)], check=True)
    found = {
        "LD_PRELOAD": str(library),
        "BATCHGEN_ISA": kind,  # batchgen reads /proc/cpuinfo
    }
    if kind == AVX2:
        # The C library chooses its functions before anything is preloaded.
        found["GLIBC_TUNABLES"] = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ"
    subprocess.run(["true"], env=os.environ | found, check=True)
    return found
