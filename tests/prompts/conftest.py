from types import ModuleType

import pytest

from support import tokenizers_by_hand


@pytest.fixture
def tools() -> ModuleType:
    """Tiny tokenizers, and helpers that build prompts with them."""
    return tokenizers_by_hand
