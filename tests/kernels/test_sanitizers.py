"""The kernels' tests under the thread and the address sanitizer, for every instruction set of this processor."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.kernels import isa
from support.python_process import environment

RUN = """
import sys
from pathlib import Path
from batchgen.kernels import build
library = Path(sys.argv[1])
build._compiled = lambda: library  # compiled before: a compiler does not run under the sanitizers
import pytest
sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
TESTS = ("tests/kernels/test_ops.py", "tests/kernels/test_pool.py", "tests/kernels/test_int8.py", "tests/kernels/test_recurrent.py",
         "tests/kernels/test_dense_layer.py", "tests/kernels/test_coded.py", "tests/attention/test_cpu_backend.py")  # fmt: skip
OPTIONS = {"thread": ("libtsan.so", "die_after_fork=0"), "address": ("libasan.so", "detect_leaks=0:halt_on_error=0")}


def sets():
    """The instruction sets of this processor that have kernels."""
    return [name for name in isa._sets()[1:] if isa.allowed(name, isa._sets(), isa.features()) == name]


@pytest.mark.nightly
@pytest.mark.parametrize("name", sets())
@pytest.mark.parametrize("sanitizer", OPTIONS)
def test_the_kernels_have_no_races_and_stay_inside_their_memory(sanitizer, name, tmp_path):
    runtime, options = OPTIONS[sanitizer]
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("setarch") is None:
        pytest.skip("no g++, or no setarch")
    preload = subprocess.run([compiler, f"-print-file-name={runtime}"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(preload):
        pytest.skip(f"no {runtime}")
    wrapper = tmp_path / "compiler"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} -fsanitize={sanitizer} -g "$@"\n')
    wrapper.chmod(0o755)
    env = environment() | {"BATCHGEN_ISA": name, "XDG_CACHE_HOME": str(tmp_path), "CXX": str(wrapper)}
    compile_ = [sys.executable, "-c", "from batchgen.kernels import build; print(build._compiled())"]
    library = subprocess.run(compile_, env=env, capture_output=True, text=True, check=True).stdout.strip()
    env |= {
        "LD_PRELOAD": preload,
        f"{sanitizer[0].upper()}SAN_OPTIONS": f"{options}:exitcode=0:log_path={tmp_path}/report",
    }
    root = Path(__file__).parents[2]
    # Without random addresses, which the thread sanitizer of older compilers does not support.
    run = ["setarch", "-R", sys.executable, "-c", RUN, library, *TESTS]
    done = subprocess.run(run, env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    # Python, torch and OpenMP are not compiled for the sanitizers: reports about them alone say nothing, nor do those
    # about OpenMP's threads, whose waiting for one another the thread sanitizer does not see.
    reports = [part for path in tmp_path.glob("report.*") for part in path.read_text().split("==================")]
    assert [part for part in reports if "kernels.so" in part and "_omp_fn" not in part] == []
