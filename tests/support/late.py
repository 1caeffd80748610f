"""Imports packages that only a few tests need when a test first uses them, not in every process that collects tests."""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class _Late:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":  # pytest asks for these when it collects
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def late(name: str) -> Any:
    """Returns an object that imports the module when it is first used. Skips the calling test module if the package is not installed."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return _Late(name)
