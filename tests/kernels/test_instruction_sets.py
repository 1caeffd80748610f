"""The kernels' tests for every instruction set of x86 processors, alone and under sanitizers. Sets that this processor lacks are emulated.

One of them, by hand: `pytest -m nightly tests/kernels/test_instruction_sets.py -k "amx and alone"`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.kernels import build, isa
from support.emulated_processor import HEADER, PROCESSORS
from support.python_process import environment

BEGIN = """
import sys
from pathlib import Path
from batchgen.kernels import build
from support.emulated_processor import emulate
_, emulated, *arguments = sys.argv
if emulated:
    emulate(emulated)
"""
COMPILE = BEGIN + "build.TIMEOUT = 3600.0  # the sanitizers make it many times as long\nprint(build._compiled())"
RUN = f"""{BEGIN}
library, *tests = arguments
build._compiled = lambda: Path(library)  # a compiler does not run under the sanitizers
import pytest
sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *tests]))
"""
TESTS = ("tests/kernels/test_ops.py", "tests/kernels/test_pool.py", "tests/kernels/test_int8.py", "tests/kernels/test_recurrent.py",
         "tests/kernels/test_dense_layer.py", "tests/kernels/test_experts.py", "tests/kernels/test_coded.py", "tests/kernels/test_wanted_logits.py",
         "tests/attention/test_cpu_backend.py", "tests/attention/test_encoder.py", "tests/attention/test_encoder_layers.py")  # fmt: skip
SANITIZERS = {
    "alone": ([], "", {}),
    "thread": (["-g", "-fsanitize=thread"], "libtsan.so", {"TSAN_OPTIONS": "die_after_fork=0:exitcode=0"}),
    "address": (
        ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
        "libasan.so",
        {"ASAN_OPTIONS": "detect_leaks=0:halt_on_error=0:exitcode=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    ),
}
"""Flags of the compiler, the library that is loaded before all others, and options of the sanitizers."""


def own():
    """The instruction sets of this processor that have kernels."""
    return [name for name in isa._sets()[1:] if isa.allowed(name, isa._sets(), isa.features()) == name]


def cases():
    """Sets with sanitizers. This processor's own sets are tested alone by the tests themselves."""
    emulated = [name for name in PROCESSORS if name not in own()] if "avx2" in own() else []
    return [
        *((name, name, sanitizer) for name in emulated for sanitizer in SANITIZERS),
        *((name, "", sanitizer) for name in own() for sanitizer in SANITIZERS if sanitizer != "alone"),
    ]


def _place_of(compiler, library):
    """Returns the path of one of the compiler's libraries; its name alone if there is none."""
    find = [compiler, f"-print-file-name={library}"]
    return subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()


def test_exactly_the_operations_that_the_kernels_use_are_emulated():
    larger = re.compile(r"_mm512_\w+|_mm256_dpbusd\w+")
    used = {name for source in build.SOURCES.iterdir() for name in larger.findall(source.read_text("utf-8"))}
    assert set(larger.findall(HEADER.read_text("utf-8"))) == used


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "emulated", "sanitizer"), cases())
def test_the_kernels_pass_their_tests_have_no_races_and_stay_inside_their_memory(name, emulated, sanitizer, tmp_path):
    flags, runtime, options = SANITIZERS[sanitizer]
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("setarch") is None:
        pytest.skip("no g++, or no setarch")
    wrapper = tmp_path / "compiler"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} {" ".join(flags)} "$@"\n')
    wrapper.chmod(0o755)
    env = environment() | {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(wrapper)}
    # Emulated operations take long, so `make test-nightly` tries as many random cases of them as `make test`.
    env |= {"BATCHGEN_TESTS": ""} if emulated else {"BATCHGEN_ISA": name}
    compile_ = [sys.executable, "-c", COMPILE, emulated]
    library = subprocess.run(compile_, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if runtime:
        # With the library of exceptions, which torch throws: the address sanitizer looks for its functions when the process starts.
        preload = [_place_of(compiler, name) for name in (runtime, "libstdc++.so.6")]
        if not all(map(os.path.isabs, preload)):
            pytest.skip(f"no {runtime}")
        env |= {"LD_PRELOAD": " ".join(preload)} | {
            key: f"{value}:log_path={tmp_path}/report" for key, value in options.items()
        }
    # Without random addresses, which the thread sanitizer of older compilers does not support.
    run = ["setarch", "-R", sys.executable, "-c", RUN, emulated, library, *TESTS]
    done = subprocess.run(run, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    reports = [part for path in tmp_path.glob("report.*") for part in path.read_text().split("==================")]
    # Python, torch and OpenMP are not compiled for the sanitizers: reports about them alone say nothing, nor do those
    # about OpenMP's threads, whose waiting for one another the thread sanitizer does not see.
    assert [part for part in reports if "kernels.so" in part and "_omp_fn" not in part] == []
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
