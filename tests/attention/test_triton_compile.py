"""The kernels compile for an H100 or H200 on a machine without one."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED_MEMORY = 227 << 10
"""Maximum of a program on an H100 or H200, in bytes."""
STACK = {"bfloat16": 256, "float16": 256, "float32": 2048}
"""Bytes of a thread's registers that may be spilled to memory: a few numbers, beside loops over thousands of keys. Float32 is for exactness."""


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(["--kinds", "all options", "--dtypes", "bfloat16"], marks=pytest.mark.slow, id="all options"),
        pytest.param([], marks=pytest.mark.nightly, id="all"),
    ],
)
def test_what_the_operator_launches_compiles_for_a_hopper_gpu_and_fits_its_multiprocessors(
    command_environment, tmp_path, chosen
):
    environment = command_environment | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.gpu.compiled", "--json", *chosen]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    kinds, dtypes = (1, 1) if chosen else (9, 3)
    of_attention, of_parts = (
        ["write", "attend wide", "attend narrow", "merge"],
        ["norm"] * 3 + ["rotary"] * 3 + ["gate"],
    )
    assert [f["kernel"] for f in found] == (of_attention * kinds + of_parts) * dtypes
    for kernel in found:
        wanted = kernel.get("wanted_per_sm", 1)
        assert wanted * kernel["shared_bytes"] <= SHARED_MEMORY, kernel
        assert wanted <= kernel["registers_for"], kernel
        assert kernel["stack_bytes"] <= STACK[kernel["dtype"]], kernel
        rows = int(kernel.get("tile", "0").split()[0])
        wgmma = rows >= 64 and kernel["dtype"] != "float32"  # which takes 64 rows at a time
        assert (kernel["tensor_cores"] == "wgmma") == wgmma, kernel
