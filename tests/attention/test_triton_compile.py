"""The kernels compile for an H200 where there is none."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED_MEMORY = 227 << 10
"""Most that a program may have on an H100 or H200, in bytes."""

COMPILE = """
import json, sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class H200:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

driver.set_active(H200())
from batchgen.attention import triton_kernels as kernels
from batchgen.attention.base import LayerOptions
from batchgen.attention.triton_backend import DeviceAttention
from batchgen.attention.kv_cache import KVCache, LayerShape
from batchgen.scheduling.batch import ScheduledSpan

compiled = []
def compile_only(kernel):
    run = kernel.run
    kernel.run = lambda *args, **options: compiled.append(run(*args, **options | {"warmup": True}))

for kernel in (kernels.write_kernel, kernels.attend_kernel, kernels.merge_kernel):
    compile_only(kernel)

found = []
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for size in (64, 128, 256, 512):
        attention = DeviceAttention(KVCache({0: LayerShape(2, size, size)}, 2, 32, dtype), 64, torch.device("cpu"), 4)
        attention.plan([ScheduledSpan(SimpleNamespace(table=[0], path=(), start=0, dropped=0), 20, 25, 25)])
        q, k = torch.zeros(8, 5, size, dtype=dtype), torch.zeros(2, 5, size, dtype=dtype)
        attention(0, q, k, k, LayerOptions(0.1, 20, 30.0, torch.zeros(8)))
        for kernel, tile in zip(compiled[1:3], kernels.TILES[dtype.itemsize, size], strict=True):
            found.append([str(dtype), size, kernel.metadata.shared * tile.per_sm, "warp_group_dot" in kernel.asm["ttgir"]])
        assert len(compiled) == 4
        compiled.clear()
json.dump(found, sys.stdout)
"""


@pytest.mark.nightly
def test_what_the_operator_launches_compiles_for_an_h200_and_fits_its_multiprocessors(command_environment, tmp_path):
    environment = command_environment | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 24
    for i, (dtype, size, shared, tensor_cores) in enumerate(found):
        assert shared <= SHARED_MEMORY, (dtype, size, i % 2)
        assert tensor_cores == (dtype != "torch.float32" and i % 2 == 0), (dtype, size, i % 2)
