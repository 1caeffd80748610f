"""A processor that stands in for one without AVX-512, as programs see it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.stand_in import environment

ASKS = """
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
static void handler(int number) { (void)number; _exit(write(1, "its own handler\\n", 16) != 16); }
int main() {
    signal(SIGSEGV, handler);  // as some libraries do
    __builtin_cpu_init();
    printf("%d %d\\n", !!__builtin_cpu_supports("avx2"), !!__builtin_cpu_supports("avx512f"));
    fflush(stdout);
    *(volatile int *)0 = 1;
}
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_a_program_that_asks_sees_avx2_alone_and_keeps_its_own_handler_of_faults(tmp_path: Path) -> None:
    try:
        smaller = environment("avx2", tmp_path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler, or a processor or kernel that does not let CPUID fault")
    program = tmp_path / "asks"
    subprocess.run(["cc", "-O0", "-x", "c", "-", "-o", str(program)], input=ASKS, text=True, check=True)
    said = subprocess.run([str(program)], env=os.environ | smaller, capture_output=True, text=True, timeout=60)
    assert said.stdout == "1 0\nits own handler\n"
