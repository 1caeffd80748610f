"""Compiles batchgen's GPU kernels for a GPU that this machine need not have. Shows whether Triton and ptxas accept them, and how much of a multiprocessor they need.

    python -m benchmarks.gpu.compiled                          for an H100 or H200, for the heads of the families of `check.py`
    python -m benchmarks.gpu.compiled --arch 80 --kinds phi-3  for an A100, one family

Needs Triton, whose wheel has NVIDIA's assembler, and no GPU. Exits with 1 if a multiprocessor does not have the shared memory or the registers for as many programs
as a launch has for each multiprocessor.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from batchgen.attention.kv_cache import KVCache, LayerShape
from batchgen.scheduling.batch import ScheduledSpan
from benchmarks.gpu import check

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that a program may have at most, by compute capability: of an A100, A10, L4, H100 and H200, B200."""
REGISTERS = 1 << 16
"""Registers of a multiprocessor of all these GPUs."""
DTYPES = ("bfloat16", "float16", "float32")
BLOCK = 32
KINDS: dict[str, dict[str, Any]] = {
    **check.KINDS,
    "gemma-4": {"heads": 2, "group": 4, "k_size": 512, "v_size": 512},
    "falcon": {"heads": 1, "group": 71, "k_size": 64, "v_size": 64},
    "all options": {
        "heads": 2, "group": 4, "k_size": 128, "v_size": 128, "sliding_window": 20, "softcap": 30.0, "sinks": torch.float32
    },
}  # fmt: skip
NAMES = ("write", "attend wide", "attend narrow", "merge")
PARTS = {"norm": (128, 4096, 16_384), "rotary": (64, 96, 128), "gate": (14_336,)}
"""Kernels of `device_parts.py`, and sizes of what they run on."""


def compile_for(arch: int) -> list[tuple[Any, int]]:
    """Makes Triton compile for this compute capability in this process. Returns a list of (kernel, its programs), which grows."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
    )
    driver.set_active(target)
    from batchgen.attention import triton_kernels as kernels
    from batchgen.kernels import triton_parts as parts

    if kernels.INTERPRETED:
        raise SystemExit("TRITON_INTERPRET is set: the kernels would not be compiled")
    compiled: list[tuple[Any, int]] = []
    of_parts = (parts.norm_kernel, parts.rotary_kernel, parts.gate_kernel)
    for kernel in (kernels.write_kernel, kernels.attend_kernel, kernels.merge_kernel, *of_parts):
        kernel.run = _only_compiles(kernel.run, compiled)
    of_an_h200 = kernels.tiles

    def tiles(k_size: int, v_size: int, dtype: Any, *others: Any) -> tuple[Any, ...]:
        size, bytes_ = max(k_size, v_size), dtype.itemsize
        wanted = of_an_h200(k_size, v_size, dtype, *others)
        return tuple(kernels._fitting(tile, size, bytes_, SHARED_MEMORY[arch]) for tile in wanted)

    kernels.tiles = tiles
    return compiled


def _only_compiles(run: Any, compiled: list[Any]) -> Any:
    return lambda *arguments, **options: compiled.append(run(*arguments, **options | {"warmup": True}))


def launches(arch: int, kinds: Sequence[str], dtypes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Compiles the kernels of one layer's attention for each of these heads and types, and those of a model's parts for each type. Yields the needs
    of one kernel at a time."""
    compiled = compile_for(arch)
    from batchgen.attention import triton_kernels as kernels
    from batchgen.attention.triton_backend import DeviceAttention

    span: Any = SimpleNamespace(table=[0], path=(), start=0, dropped=0, images=())
    for dtype in (getattr(torch, name) for name in dtypes):
        for name in kinds:
            kind = check.kind_of(dtype, **KINDS[name])
            cpu = torch.device("cpu")
            attention = DeviceAttention(
                KVCache({0: LayerShape(kind.heads, kind.k_size, kind.v_size)}, 2, BLOCK, dtype), 64, cpu, kind.group
            )
            attention.plan([ScheduledSpan(span, 20, 25, 25)])
            q, k, v = (
                torch.zeros(heads, 5, size, dtype=dtype)
                for heads, size in (
                    (kind.heads * kind.group, kind.k_size),
                    (kind.heads, kind.k_size),
                    (kind.heads, kind.v_size),
                )
            )
            sinks = None if kind.sinks is None else torch.zeros(kind.heads * kind.group, dtype=kind.sinks)
            attention(0, q, k, v, kind.options(sinks))
            wide, narrow = kernels.tiles(kind.k_size, kind.v_size, dtype, kind.group, cpu)
            for what, tile, kernel in zip(NAMES, (None, wide, narrow, None), compiled, strict=True):
                yield {"dtype": str(dtype).removeprefix("torch."), "heads": name, "kernel": what} | _needs(kernel, tile)
            compiled.clear()
        for name, size in ((name, size) for name, sizes in PARTS.items() for size in sizes):
            _launch(name, size, dtype)
            yield {"dtype": str(dtype).removeprefix("torch."), "heads": f"{size}", "kernel": name} | _needs(
                compiled.pop(), None
            )


def _launch(name: str, size: int, dtype: torch.dtype) -> None:
    """Launches a kernel of a model's part, for this size."""
    from batchgen.kernels.device_parts import gated, norm, rotated, running
    from batchgen.kernels.ops import Activation

    if name == "norm":
        norm(torch.zeros(1, 5, size, dtype=dtype), torch.zeros(size), 1e-6, rounds_first=True)
    elif name == "rotary":
        q, k = (torch.zeros(1, heads, 5, size, dtype=dtype) for heads in (8, 2))
        angles = torch.zeros(1, 5, size, dtype=dtype)
        with running():
            rotated(q, k, angles, angles)
    else:
        gated(*torch.zeros(1, 5, 2 * size, dtype=dtype).chunk(2, -1), Activation.SILU)


def _needs(kernel: Any, tile: Any) -> dict[str, Any]:
    """Returns registers and bytes of stack of a thread, bytes of shared memory of a program, and how many programs a multiprocessor has room for."""
    registers, stack = _resources(kernel.asm["cubin"])
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    found = {
        "warps": warps,
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": shared,
        "registers_for": REGISTERS // (registers * 32 * warps),
        "tensor_cores": next((name for name in ("wgmma", "mma.sync") if name in kernel.asm["ptx"]), ""),
    }
    if tile is not None:
        found |= {"tile": f"{tile.rows} x {tile.keys}", "wanted_per_sm": tile.per_sm}
    return found


def _resources(cubin: bytes) -> tuple[int, int]:
    import triton

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needs = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return needs["REG"], needs["STACK"] + needs["LOCAL"]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--arch", type=int, default=90, choices=list(SHARED_MEMORY), help="compute capability, without the dot"
    )
    p.add_argument(
        "--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="FAMILY", help=", ".join(KINDS)
    )
    p.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    p.add_argument("--json", action="store_true", help="a line of JSON for each kernel")
    args = p.parse_args()
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="batchgen-triton-"))
    wrong = 0
    if not args.json:
        print(
            "| heads, or size | type | kernel | tile | warps | registers | stack | shared memory | programs: wanted, registers for |"
        )
        print("| --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |")
    for found in launches(args.arch, args.kinds, args.dtypes):
        wanted = found.get("wanted_per_sm", 1)
        wrong += found["shared_bytes"] * wanted > SHARED_MEMORY[args.arch] or found["registers_for"] < wanted
        if args.json:
            print(json.dumps(found), flush=True)
            continue
        programs = f"{found['wanted_per_sm']}, {found['registers_for']}" if "tile" in found else ""
        cells = (
            found["heads"], found["dtype"], found["kernel"], found.get("tile", ""), found["warps"], found["registers"],
            found["stack_bytes"], found["shared_bytes"], programs,
        )  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
