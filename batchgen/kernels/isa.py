"""The vector instructions that the kernels are compiled for. `BATCHGEN_ISA` restricts them. No torch.

The instruction sets of a processor are ordered, the largest last. Each contains the set that it builds on.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
from functools import cache
from pathlib import Path

from batchgen.errors import UsageError

NONE = "none"
X86 = (NONE, "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
ARM = (NONE, "neon", "neon_dot", "neon_bf16")
_BUILDS_ON = {"avx512": "avx2"}
"""The set that a set builds on, if that is not the one before it: desktops have AVX-VNNI without AVX-512, servers AVX-512 without AVX-VNNI."""

_NEEDS = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx2_vnni": ("avx_vnni",),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
    "amx": ("amx_tile", "amx_bf16", "amx_int8"),
    "neon": ("asimd",),
    "neon_dot": ("asimddp",),
    "neon_bf16": ("bf16",),
}
"""The features in /proc/cpuinfo that a set needs in addition to those of the set that it builds on."""
_FLAGS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "avx2_vnni": ("-mavxvnni",),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "avx512_vnni": ("-mavx512vnni",),
    "avx512_bf16": ("-mavx512bf16",),
    "amx": ("-DBATCHGEN_AMX",),
    "neon": ("-march=armv8-a+simd",),
    "neon_dot": ("-march=armv8.2-a+simd+dotprod",),
    "neon_bf16": ("-march=armv8.2-a+simd+dotprod+bf16",),
}


@cache
def instruction_set() -> str:
    """Returns the largest set, of `X86` or `ARM`, that this processor has and `BATCHGEN_ISA` allows.

    `BATCHGEN_ISA=avx2` lets a processor with AVX-512 stand in for one without. Raises `UsageError` for an unknown name.
    """
    return allowed(os.environ.get("BATCHGEN_ISA"), _sets(), features())


def allowed(wish: str | None, sets: tuple[str, ...], has: frozenset[str]) -> str:
    """Returns the largest of `sets`, up to `wish`, that a processor with the features `has` supports together with the sets that it builds on."""
    if wish and wish not in {*X86, *ARM}:
        raise UsageError(f"BATCHGEN_ISA {wish!r} is unknown", f"use one of {', '.join(sets)}, or leave it out")
    within = sets[1 : sets.index(wish) + 1] if wish in sets else sets[1:]
    found = [NONE]
    for name in within:
        if _below(name, sets) in found and has.issuperset(_NEEDS[name]):
            found.append(name)
    return found[-1]


def _below(name: str, sets: tuple[str, ...]) -> str:
    """Returns the set that a set builds on."""
    return _BUILDS_ON.get(name) or sets[sets.index(name) - 1]


def flags(name: str = "") -> list[str]:
    """Returns the compiler's options for a set (by default `instruction_set`) and for the sets that it builds on."""
    sets, name = _sets(), name or instruction_set()
    if sets is ARM:
        return list(_FLAGS.get(name, ()))  # only the last -march counts
    names: list[str] = []
    widens = name == "avx512_bf16" and _multiplies_pairs_slowly()
    while name != NONE:
        names.insert(0, name)
        name = _below(name, sets)
    return [flag for name in names for flag in _FLAGS.get(name, ())] + ["-DBATCHGEN_WIDENS"] * widens


def _multiplies_pairs_slowly() -> bool:
    """Whether `vdpbf16ps` takes longer than the two multiplications in float32 that it replaces.

    Intel's processors with matrix units begin one of these instructions in two cycles, and four in float32. The system may hide the matrix
    units, so the processor is recognised by `avx512_fp16`, which came with them.
    """
    return features().issuperset(("GenuineIntel", "avx512_fp16"))


def least_coded_group() -> float:
    """Returns of how many inputs the groups of codes of 4 bits must be, for `--quantize int8` to multiply the codes as they are.

    Below, this is slower than in 16 bits, and weights become 8 bits. Without sums of four products of bytes, groups cost more. Matrix units always
    multiply weights of 8 bits faster.
    """
    return {"amx": math.inf, "avx512": 128, "avx2": 128}.get(instruction_set(), 0)


def sets_below() -> list[str]:
    """Returns the sets that `instruction_set` builds on, the largest first."""
    sets, name, found = _sets(), instruction_set(), []
    while name != NONE and (name := _below(name, sets)) != NONE:
        found.append(name)
    return found


def has_bfloat16() -> bool:
    """Whether computing in bfloat16, which takes half the memory, is about as fast as in float32 or faster, as far as `BATCHGEN_ISA` allows."""
    wish = os.environ.get("BATCHGEN_ISA")
    found = (
        allowed(None, _sets(), features()) if wish == NONE else instruction_set()
    )  # plain torch uses all instructions
    return found in ("avx512_bf16", "amx", "neon_bf16")


def has_float16() -> bool:
    """Whether this processor multiplies float16 faster than float32, as far as `BATCHGEN_ISA` allows."""
    return has_bfloat16() and not features().isdisjoint(("avx512_fp16", "amx_fp16", "asimdhp"))


@cache
def features() -> frozenset[str]:
    """Returns the processor's features that this process may use and its maker, as /proc/cpuinfo names them; empty without such a file."""
    found = {
        word
        for line in _cpuinfo()
        if line.startswith(("vendor_id", "flags", "Features"))
        for word in line.partition(":")[2].split()
    }
    if "amx_tile" in found and not _may_use_tiles():
        found.discard("amx_tile")
    return frozenset(found)


def processor() -> str:
    """Returns the name of this machine's processor, as far as it is known."""
    named = (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _may_use_tiles() -> bool:
    """Asks the system to let this process use AMX, without which its first instruction would end the process."""
    arch_prctl, request, tiles = map(ctypes.c_long, (158, 0x1023, 18))  # ARCH_REQ_XCOMP_PERM, XTILEDATA
    refused: int = ctypes.CDLL(None).syscall(arch_prctl, request, tiles)
    return refused == 0


def _sets() -> tuple[str, ...]:
    machine = platform.machine().lower()
    return X86 if machine in ("x86_64", "amd64") else ARM if machine in ("aarch64", "arm64") else (NONE,)
