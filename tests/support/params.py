"""Decides how much of a test runs: `make test` is quick, and `make test-slow` runs every parameter and many more random cases."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

K = TypeVar("K")
V = TypeVar("V")

FULL = os.environ.get("BATCHGEN_TESTS") == "full"
"""Set by `make test-slow` and `make test-nightly`."""


def examples(quick: int, full: int) -> int:
    """The number of random cases that a property test tries: `quick` in `make test`, `full` in `make test-slow`."""
    return full if FULL else quick


def some_of(quick: Iterable[K], values: Mapping[K, V]) -> Mapping[K, V]:
    """The values that a test loops over: all in `make test-slow`, those named in `quick` in `make test`."""
    return values if FULL else {name: values[name] for name in quick}


def in_turn(values: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Returns each value with one of the others, which take turns."""
    return [(value, others[place % len(others)]) for place, value in enumerate(values)]


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Returns `values` as parameters of a test: in `make test` those in `quick`, else all, where the others are marked slow.

    Every process of `make test` collects every case, so it does not get thousands that it would leave out. A tuple has several parameters.
    """
    chosen, values = list(quick), list(values)
    assert all(value in values for value in chosen), "a quick value is not among the values"
    if chosen and not FULL:  # without a parameter, a test would be reported as skipped
        return [value for value in values if value in chosen]
    return [
        value
        if value in chosen
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
