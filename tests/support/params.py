"""How much of a test runs: `make test` is quick, and `make test-slow` runs every parameter and many more random cases."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import pytest

K = TypeVar("K")
V = TypeVar("V")

FULL = os.environ.get("BATCHGEN_TESTS") == "full"
"""Set by `make test-slow` and `make test-nightly`."""


def examples(quick: int, full: int) -> int:
    """How many random cases a property test tries: `quick` of them in `make test`, `full` in `make test-slow`."""
    return full if FULL else quick


def some_of(quick: Iterable[K], values: Mapping[K, V]) -> Mapping[K, V]:
    """What a test loops over: `values` in `make test-slow`, those called `quick` in `make test`."""
    return values if FULL else {name: values[name] for name in quick}


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """`values` as parameters; tuples are several parameters each. Those that are not in `quick` are marked slow: `make test-slow` runs them."""
    chosen = list(quick)
    return [
        value
        if value in chosen
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
