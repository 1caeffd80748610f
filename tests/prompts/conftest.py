from __future__ import annotations

from types import ModuleType

import pytest

from support import tokenizers_by_hand


@pytest.fixture
def tools() -> ModuleType:
    """Tiny tokenizers and what is built with them, as the tests of this folder use them."""
    return tokenizers_by_hand
