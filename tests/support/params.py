"""Parameters of tests of which only some run in `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """`values` as parameters; tuples are several parameters each. Those that are not in `quick` are marked slow: `make test-slow` runs them."""
    chosen = list(quick)
    return [
        value
        if value in chosen
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
