"""Jinja's sandbox, that also refuses to build a huge value in a single step, which no time limit could cut short.

Covers operators, `~`, what `str` can pad, and the filters that pad. What takes many steps is left to the limits of time and size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.prompts.limits import CHARACTERS, LimitError

_MOST_POWER = 1000
_SIZED = (str, list, tuple)
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_FILTERS = (
    "center",
    "indent",
    "batch",
    "slice",
    "tojson",
)  # their first argument is the value, the others may be widths
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{8,}|\*)|\{[^{}:]*:[^{}]*(\d{8,}|\{)")
"""A width of eight digits in a format, or one that comes from a value."""


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which a template finds the usual, and `LimitError` where that would be huge."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """What the pieces of a template, a macro or a block are put together with."""
        kept, length = [], 0
        for piece in pieces:
            kept.append(piece)
            length += len(piece)
            if length > CHARACTERS:
                raise LimitError.size()
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            too_long = isinstance(left, _SIZED) and isinstance(right, _SIZED) and len(left) + len(right) > CHARACTERS
        elif operator == "*":
            too_long = _times(left, right) or _times(right, left)
        elif operator == "**":
            too_long = isinstance(right, int | float) and abs(right) > _MOST_POWER
        else:
            too_long = isinstance(left, str) and _WIDE.search(left) is not None
        if too_long:
            raise LimitError.size()
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        of = getattr(obj, "__self__", None)
        if isinstance(of, str):
            name = obj.__name__
            if name in _PADDING and _has_width(args, kwargs):
                raise LimitError.size()
            if name == "replace" and len(args) > 1 and _replaced(of, args[0], args[1]) > CHARACTERS:
                raise LimitError.size()
        elif getattr(obj, "__name__", "") in ("format", "format_map"):  # as the sandbox has wrapped them
            text = getattr(getattr(obj, "__wrapped__", None), "__self__", "")
            if isinstance(text, str) and _WIDE.search(text):
                raise LimitError.size()
        return super().call(context, obj, *args, **kwargs)

    def from_string(self, *args: Any, **kwargs: Any) -> Template:
        """For one template: its filters are guarded here, when all are there."""
        for name in _FILTERS:
            self.filters[name] = _narrow(self.filters[name])
        self.filters["format"] = _checked_format(self.filters["format"])
        self.filters["replace"] = _checked_replace(self.filters["replace"])
        template = super().from_string(*args, **kwargs)
        # `~` is compiled to this function, by name.
        template.root_render_func.__globals__["str_join"] = _join
        return template


def compile_guarded(source: str) -> None:
    """Has transformers compile a chat template in a guarded sandbox; it keeps what it has compiled.

    A transformers that compiles elsewhere is left as it is: only the limits of time and size hold then, and a test of ours fails.
    """
    from transformers.utils import chat_template_utils as theirs

    sandbox: Any = getattr(theirs, "ImmutableSandboxedEnvironment", None)
    compiled: Any = getattr(theirs, "_compile_jinja_template", None)
    if sandbox is None or not hasattr(compiled, "cache_clear"):
        return
    theirs.ImmutableSandboxedEnvironment = GuardedEnvironment
    try:
        if not isinstance(compiled(source).environment, GuardedEnvironment):  # compiled by someone else, before
            compiled.cache_clear()
            compiled(source)
    finally:
        theirs.ImmutableSandboxedEnvironment = sandbox


def _times(value: Any, count: Any) -> bool:
    return isinstance(value, _SIZED) and isinstance(count, int) and len(value) * count > CHARACTERS


def _join(values: Iterable[Any]) -> str:
    return GuardedEnvironment.concat(map(str, values))


def _has_width(args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    return any(isinstance(value, int) and value > CHARACTERS for value in (*args, *kwargs.values()))


def _replaced(text: str, old: Any, new: Any) -> int:
    return len(text) + text.count(old) * len(new) if isinstance(old, str) and isinstance(new, str) else 0


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    skipped = 2 if hasattr(function, "jinja_pass_arg") else 1

    @wraps(function)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        if _has_width(args[skipped:], kwargs):
            raise LimitError.size()
        return function(*args, **kwargs)

    return narrow


def _checked_format(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        if _WIDE.search(str(value)):
            raise LimitError.size()
        return function(value, *args, **kwargs)

    return checked


def _checked_replace(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(context: Any, value: Any, old: Any, new: Any, *args: Any, **kwargs: Any) -> Any:
        if _replaced(str(value), str(old), str(new)) > CHARACTERS:
            raise LimitError.size()
        return function(context, value, old, new, *args, **kwargs)

    return checked
