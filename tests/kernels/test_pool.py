"""The kernels' thread pool does every task once, for callers in any thread and in forked processes."""

import os
import threading

import pytest
import torch

from batchgen.kernels.build import NoKernels, library
from batchgen.kernels.ops import PackedLinear
from support.python_process import run_python


@pytest.fixture(autouse=True)
def threads():
    """Sets more threads than most machines have cores."""
    try:
        library()
    except NoKernels as e:
        pytest.skip(e.message)
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


def layer_and_input():
    numbers = torch.Generator().manual_seed(0)
    return PackedLinear([torch.randn(300, 256, generator=numbers)], [None]), torch.randn(100, 256, generator=numbers)


def alone(layer, x):
    torch.set_num_threads(1)
    y = layer(x)
    torch.set_num_threads(6)
    return y


def test_many_threads_always_give_the_result_of_one():
    layer, x = layer_and_input()
    want = alone(layer, x)
    assert all(torch.equal(layer(x), want) for _ in range(300))


def test_callers_in_several_threads_do_not_disturb_each_other():
    layer, x = layer_and_input()
    want = alone(layer, x)
    wrong = []

    def call():
        wrong.extend(i for i in range(100) if not torch.equal(layer(x), want))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


NO_MORE_THREADS = """
import resource, torch
from batchgen.kernels.ops import PackedLinear
layer, x = PackedLinear([torch.randn(300, 256)], [None]), torch.randn(100, 256)
torch.set_num_threads(1)
want = layer(x)
torch.set_num_threads(6)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))  # a thread's stack takes more
assert torch.equal(layer(x), want)
"""


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="sanitizers take memory of their own")
def test_a_process_that_can_start_no_more_threads_computes_with_those_that_it_has():
    done = run_python(NO_MORE_THREADS)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_starts_its_own_threads():
    layer, x = layer_and_input()
    want = layer(x)
    child = os.fork()
    if child == 0:
        same = all(torch.equal(layer(x), want) for _ in range(20))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(layer(x), want)
