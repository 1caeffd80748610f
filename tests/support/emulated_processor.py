"""Pretends that this processor has a larger instruction set: the kernels for it are compiled for AVX2, and its operations are emulated.

    PYTHONPATH=tests python -m support.emulated_processor amx pytest tests/kernels/test_coded.py

runs a module, here pytest, with the kernels for AMX. Compilation takes minutes. It shows whether their numbers are right, not how fast they are.
"""

import hashlib
import runpy
import sys
from pathlib import Path

from batchgen.kernels import build, isa

HEADER = Path(__file__).parents[1] / "kernels/emulated_instructions.h"
PROCESSORS = {
    **{name: (name, ()) for name in isa.X86[2:]},
    "avx512_bf16_widens": ("avx512_bf16", ("GenuineIntel", "avx512_fp16")),  # multiplies pairs slowly
}
"""Names for `emulate`: the largest instruction set, and features that no set needs."""


def emulate(name: str) -> None:
    """Makes this process see one of `PROCESSORS`, which must be done before anything asks for the instruction set. Needs a processor with AVX2, and GCC."""
    instruction_set, more = PROCESSORS[name]
    has = set(more)
    while instruction_set != isa.NONE:
        has.update(isa._NEEDS[instruction_set])
        instruction_set = isa._below(instruction_set, isa.X86)
    isa.features = lambda: frozenset(has)
    # The compiler may use AVX2 alone, and the sources see the names of the other instruction sets.
    for larger in isa.X86[2:]:
        isa._FLAGS[larger] = tuple(
            f"-D__{flag[2:].upper()}__" if flag.startswith("-mavx") else flag for flag in isa._FLAGS[larger]
        )
    digest = hashlib.sha256(HEADER.read_bytes()).hexdigest()[:16]  # another header makes another library
    # -O3 would take the compiler too long. The other flag is needed for x * y + z to be rounded once.
    isa._FLAGS["avx2"] += ("-O1", "-fexpensive-optimizations", "-include", str(HEADER), f"-DHEADER_{digest}")
    build.TIMEOUT = 3600


if __name__ == "__main__":
    _, processor, module, *sys.argv[1:] = sys.argv
    emulate(processor)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
