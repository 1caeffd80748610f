"""A processor that stands in for a smaller one, as programs see it."""

import os
import subprocess
import sys

import pytest

from batchgen.kernels.isa import features
from benchmarks.stand_in import environment

ASKS = """
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
static void handler(int number) { (void)number; _exit(write(1, "its own handler\\n", 16) != 16); }
int main() {
    signal(SIGSEGV, handler);  // as some libraries do
    __builtin_cpu_init();
    unsigned a, b, c, d;
    __cpuid_count(7, 0, a, b, c, d);
    printf("%d %d %d\\n", !!__builtin_cpu_supports("avx2"), !!__builtin_cpu_supports("avx512bf16"), d >> 24 & 1);
    fflush(stdout);
    *(volatile int *)0 = 1;
}
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
@pytest.mark.parametrize(("kind", "sees"), [("avx2", "1 0 0"), ("avx512_bf16", "1 1 0")])
def test_a_program_that_asks_sees_the_smaller_processor_and_keeps_its_own_handler_of_faults(kind, sees, tmp_path):
    if kind not in features():
        pytest.skip(f"this processor has no {kind}")
    try:
        smaller = environment(kind, tmp_path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler, or a processor or kernel that does not let CPUID fault")
    program = tmp_path / "asks"
    subprocess.run(["cc", "-O0", "-x", "c", "-", "-o", str(program)], input=ASKS, text=True, check=True)
    said = subprocess.run([str(program)], env=os.environ | smaller, capture_output=True, text=True, timeout=300)
    assert said.stdout == f"{sees}\nits own handler\n"
