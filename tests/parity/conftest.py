"""What tests of parity share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A test may set the number of torch's threads; the next one has its own again."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
