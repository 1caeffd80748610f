"""Only the wanted logits are computed, and those have the same bits."""

import numpy as np
import pytest
import torch

from batchgen.kernels.codes import IN_16_BITS, PackedTensor
from batchgen.kernels.ops import PackedLinear
from batchgen.model.wanted_logits import only_wanted
from support.codings import SIZE, weight_of
from support.numbers import BFLOAT16, FLOAT32, numbers
from support.wanted import bits, watch_columns

pytestmark = pytest.mark.usefixtures("kernels")

COLUMNS = 1001
WEIGHTS = {
    "float32": lambda: (numbers(COLUMNS, SIZE), FLOAT32),
    "bfloat16": lambda: (numbers(COLUMNS, SIZE, dtype=BFLOAT16), BFLOAT16),
    "float32, held in 16 bits": lambda: (
        PackedTensor(IN_16_BITS, {"plane16": numbers(COLUMNS, SIZE, dtype=torch.float16)}),
        FLOAT32,
    ),
    "codes": lambda: (weight_of("Q5_K", FLOAT32), FLOAT32),
    "codes in bfloat16": lambda: (weight_of("Q5_K", BFLOAT16), BFLOAT16),
}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    return watch_columns(monkeypatch)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", WEIGHTS)
def test_wanted_logits_have_the_bits_of_the_whole_product(name, bias, computed, threads):
    weight, dtype = WEIGHTS[name]()
    head = PackedLinear([weight], [numbers(len(weight), dtype=dtype, seed=3) if bias else None])
    rng = np.random.default_rng(0)
    for rows, many in ((0, 0), (1, 0), (2, 1), (4, 0), (5, 2), (7, 5), (33, 20), (300, 100)):
        x = numbers(1, rows, SIZE, dtype=dtype, seed=rows)
        wanted = np.zeros((rows, len(weight)), dtype=bool)
        wanted[np.arange(rows), rng.choice([0, len(weight) - 1], rows)] = True
        wanted[rng.permutation(rows)[:many]] = True
        with only_wanted(head, lambda wanted=wanted: bits(wanted)):
            got = head(x)
        want = head(x)
        assert got.shape == want.shape
        assert torch.equal(got[0, wanted], want[0, wanted])
    assert len(computed) == 7
    assert all(panels <= 2 for _, panels in computed)


def test_rows_that_want_most_logits_are_computed_whole(computed):
    head = PackedLinear([numbers(COLUMNS, 8)], [None])
    x = numbers(4, 8, seed=1)
    every, few = np.ones((4, COLUMNS), dtype=bool), np.zeros((5, COLUMNS), dtype=bool)
    want = head(x)
    for wanted in (None, bits(every), bits(few)):  # the last ones are not those of these rows
        with only_wanted(head, lambda wanted=wanted: wanted):
            assert torch.equal(head(x), want)
    assert not computed
