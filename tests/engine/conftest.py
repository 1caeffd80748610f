from functools import partial

import pytest

from support.models import engine_for, plain_llama
from support.params import slow_but


@pytest.fixture(params=slow_but([False], [False, True]), ids={False: "step by step", True: "a step ahead"}.get)
def engine_of(request):
    return partial(engine_for, ahead=request.param)


@pytest.fixture(scope="module")
def model():
    return plain_llama()
