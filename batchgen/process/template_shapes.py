"""Finds the text that a template writes around texts which it only copies, so that rows need no render of their own.

The template is rendered once with stand-ins for the texts. They can be written, joined with others and stripped, and are not empty. A
template may ask whether one begins with, ends with or contains some text: the answer is no, and the shape holds for texts of which this is
true. Whatever else a template does with a stand-in raises an exception that nothing in a template catches: then there is no shape.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import Environment, nodes
from jinja2.filters import do_trim

from batchgen.process.templates import Gap, Question, TemplateShape


class _LookedAtError(BaseException):  # no `Exception`, which Jinja's tests and filters may catch
    pass


def _refused(*_: Any) -> NoReturn:
    raise _LookedAtError


class StandIn:
    """Stands for texts one after the other, some of which a template is not given."""

    def __init__(self, parts: tuple[str | Gap, ...], asked: list[Question]) -> None:
        self._parts, self._asked = parts, asked

    def __add__(self, other: Any) -> StandIn:
        return StandIn(self._parts + _parts_of(other), self._asked)

    def __radd__(self, other: Any) -> StandIn:
        return StandIn(_parts_of(other) + self._parts, self._asked)

    def __bool__(self) -> bool:
        return True

    def strip(self, chars: str | None = None) -> StandIn:
        return StandIn((Gap(self._only().number, True),), self._asked) if chars is None else _refused()

    def startswith(self, text: Any) -> bool:
        return self._asks("startswith", text)

    def endswith(self, text: Any) -> bool:
        return self._asks("endswith", text)

    def __contains__(self, text: Any) -> bool:
        return self._asks("__contains__", text)

    def marked(self, mark: str) -> str:
        """Returns the texts, with marks for those that are not given."""
        return "".join(p if isinstance(p, str) else f"{mark}{p.number}{'s' * p.stripped}{mark}" for p in self._parts)

    def _only(self) -> Gap:
        first, *more = self._parts
        return first if isinstance(first, Gap) and not more else _refused()

    def _asks(self, method: str, text: Any) -> bool:
        self._asked.append((self._only(), method, text) if isinstance(text, str) else _refused())
        return False

    __str__ = __repr__ = __iter__ = __len__ = __getitem__ = __getattr__ = _refused
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refused


def _parts_of(value: Any) -> tuple[str | Gap, ...]:
    return value._parts if isinstance(value, StandIn) else (value,) if isinstance(value, str) else _refused()


def stand_ins(count: int) -> list[StandIn]:
    """Returns stand-ins for so many texts."""
    asked: list[Question] = []
    return [StandIn((Gap(number, False),), asked) for number in range(count)]


def shape_of(
    environment: Environment, source: str, variables: Mapping[str, Any], texts: list[StandIn]
) -> TemplateShape | None:
    """Returns the shape of what a template writes. `variables` have `texts` in them. None if there is no shape that is sure; raises what the template raises."""
    if any(next(environment.parse(source).find_all(kind), None) for kind in (nodes.AssignBlock, nodes.FilterBlock)):
        return None  # what they hold is written, and may be looked at then
    mark = f"\0{secrets.token_hex(8)}\0"

    def written(value: Any) -> Any:
        if isinstance(value, StandIn):
            # In the function of a macro or a block, which may be looked at too.
            return value.marked(mark) if sys._getframe(1).f_code.co_name == "root" else _refused()
        return value if environment.finalize is None else environment.finalize(value)

    own = environment.overlay(finalize=written)
    trim = {
        "trim": lambda value, chars=None: value.strip(chars) if isinstance(value, StandIn) else do_trim(value, chars)
    }
    own.filters = {name: used for name, used in environment.filters.items() if name != "random"} | trim
    own.tests = environment.tests | {"string": lambda value: isinstance(value, str | StandIn)}
    own.globals = {name: value for name, value in environment.globals.items() if name != "lipsum"}
    try:
        text = own.from_string(source).render(variables)
    except _LookedAtError:
        return None
    first, *rest = re.split(f"{mark}([0-9]+)(s?){mark}", text)
    gaps = [Gap(int(number), bool(stripped)) for number, stripped in zip(rest[::3], rest[1::3], strict=True)]
    if len({gap.number for gap in gaps}) < len(gaps):
        return None  # a template that writes a text often may grow
    return TemplateShape(first, tuple(zip(gaps, rest[2::3], strict=True)), tuple(texts[0]._asked))
