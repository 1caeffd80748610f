"""Runs a function of transformers in which some names mean something else (docs/decisions/0017)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


def names_in(function: Any) -> frozenset[str]:
    """Returns the global names and the attributes in a function's code; empty for what is not written in Python."""
    return frozenset(getattr(getattr(function, "__code__", None), "co_names", ()))


def with_names(function: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a copy of a function in whose code the global `names` have other values.

    Neither the function nor its module changes, so that other models in the process run as before.
    """
    copy = FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
