"""The kernels, compiled for this processor and for smaller instruction sets."""

import pytest
import torch

from batchgen.kernels import build, isa
from batchgen.kernels.build import NoKernels
from batchgen.kernels.isa import instruction_set
from support.params import slow_but


def forget():
    for cached in (instruction_set, build.library, build.kernel):
        cached.cache_clear()


def smaller():
    """Returns the instruction sets below the one that this processor uses."""
    sets, has = isa._sets(), isa.features()
    return [name for name in sets[1 : sets.index(instruction_set())] if isa.allowed(name, sets, has) == name]


@pytest.fixture(scope="module", params=["", *slow_but((), smaller())])
def kernels(request):
    """The library for this processor, and (in `make test-slow`) for each smaller instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setenv("BATCHGEN_ISA", request.param)
            forget()
        try:
            yield build.library()
        except NoKernels as e:
            pytest.skip(e.message)
    forget()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
