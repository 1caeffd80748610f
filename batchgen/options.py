"""Declares options: each once, together with the field of the configuration that it sets.

    batch_size: int | None = option(None, "Maximum number of sequences that decode at once.",
                                    rules=[at_least(1)], parse=whole_number_or_auto, metavar="auto|N", shown="auto")

The annotation and the default are those of the option, which is in the group of its class (`GROUP`) unless it names another. A value of a similar type is converted (a list to a tuple, a `Path` to text). `check`
refuses values that break a rule in `rules`. The command line and the documentation are made from the rest. A field without `option` is not
an option of the command.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from decimal import Decimal
from functools import cache
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError

GROUPS = ("Model", "Prompts", "Sampling", "Constraints", "Tasks", "Engine", "Machines", "Job")
"""The groups of `batchgen run --help`, in this order."""

_SHOWN = 200
"""Number of characters of a wrong value in a message: labels may come from a large file."""

Rule = tuple[Callable[[Any], bool], str]
"""A test of a value, and a text that follows "must be" in messages."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the command: everything except its type and default, which the field has."""

    help: str
    """One or two short sentences."""
    group: str
    """One of `GROUPS`; empty for the `GROUP` of its class."""
    flags: tuple[str, ...]
    """Its names, such as `--model` and `-m`."""
    metavar: str
    """The placeholder for the value in the help. Empty: N for a whole number, X for another number, none for a switch."""
    values: tuple[str, ...]
    """The texts that the option takes; empty if they cannot be listed."""
    rules: tuple[Rule, ...]
    parse: Callable[[str, str], Any] | None
    """Makes the value from the option's name and text; None if the annotation is enough. Raises `UsageError`."""
    shown: str
    """The default as the help shows it; empty if the default itself can be shown."""
    after: str
    """The field, often of another dataclass, behind which the help has this one; empty if it stands where the field does."""


def option(
    default: Any,
    help: str,
    *,
    group: str = "",
    flags: Sequence[str] = (),
    metavar: str = "",
    values: Sequence[str] = (),
    rules: Iterable[Rule] = (),
    parse: Callable[[str, str], Any] | None = None,
    shown: str = "",
    after: str = "",
) -> Any:
    """Returns a dataclass field that is also an option of the command. `default` may be MISSING (required) or a factory.

    `flags` are needed only if the option's name differs from the field's. A field of type bool is a switch.
    """
    rules = tuple(rules)
    if values:
        rules = (one_of(values), *rules)
        metavar = metavar or "|".join(values)
    meta = {"option": Option(help, group, tuple(flags), metavar, tuple(values), rules, parse, shown, after)}
    if callable(default):
        return field(default_factory=default, metadata=meta)
    return field(metadata=meta) if default is MISSING else field(default=default, metadata=meta)


# Rules.


def at_least(least: float) -> Rule:
    return (lambda v: v >= least), f"at least {least}"


def above(bound: float) -> Rule:
    return (lambda v: v > bound), f"above {bound}"


def between(low: float, high: float) -> Rule:
    return (lambda v: low <= v <= high), f"between {low} and {high}"


def one_of(values: Sequence[str]) -> Rule:
    return (lambda v: v in values), " or ".join(filter(None, [", ".join(values[:-1]), values[-1]]))


# Types. A value of another type is converted to its field's type if there is only one way to do so.

PathText = str | Any
"""Text; a path is converted."""
JsonText = str | Any
"""JSON as text; an object is converted, and so is a class of pydantic to its schema."""

_UNFIT = object()


def _whole_number(value: Any) -> Any:
    if isinstance(value, bool):
        return _UNFIT
    if isinstance(value, Integral):
        return int(value)
    # pandas makes floats of a column with nulls, and a database may export all numbers as decimals.
    whole = isinstance(value, float | Decimal) and math.isfinite(value) and int(value) == value
    return int(value) if whole else _UNFIT


def _number(value: Any) -> Any:
    return _UNFIT if isinstance(value, bool) or not isinstance(value, Real | Decimal) else float(value)


def _text(value: Any) -> Any:
    return value if isinstance(value, str) else _UNFIT


def _path_text(value: Any) -> Any:
    return _text(fspath(value)) if isinstance(value, str | PathLike) else _UNFIT


def _json_text(value: Any) -> Any:
    schema = getattr(value, "model_json_schema", None)
    if isinstance(value, type) and callable(schema):
        value = schema()
    return json.dumps(value) if isinstance(value, Mapping) else _text(value)  # the order of its keys is kept


def _tuple_of(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that converts a list, a tuple, an array or a single value to a tuple."""

    def convert(value: Any) -> Any:
        if type(value).__name__ == "ndarray":
            value = value.tolist()
        items = tuple(map(item, value if isinstance(value, list | tuple) else (value,)))
        return _UNFIT if _UNFIT in items else items

    return convert


_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int": (_whole_number, "a whole number"),
    "float": (_number, "a number"),
    "bool": (lambda v: v if isinstance(v, bool) else _UNFIT, "true or false"),
    "str": (_text, "text"),
    "PathText": (_path_text, "text or a path"),
    "JsonText": (_json_text, "an object, or its JSON as text"),
    "tuple[str, ...]": (_tuple_of(_text), "text or a list of texts"),
    "tuple[PathText, ...]": (_tuple_of(_path_text), "a file name, a path or a list of them"),
    "tuple[int, ...]": (_tuple_of(_whole_number), "a whole number or a list of them"),
    "dict[str, object]": (lambda v: v if isinstance(v, dict) else _UNFIT, "a dict"),
}


@dataclass(frozen=True, slots=True)
class _Checks:
    name: str
    optional: bool
    default: Any
    convert: Callable[[Any], Any] | None
    """Converts a value to the field's type; None if the annotation allows several."""
    type: str
    rules: tuple[Rule, ...]


@cache  # parameters are checked for every row
def _checks(config: type) -> tuple[_Checks, ...]:
    """Returns the checks of each field of a dataclass, options and others."""
    found = []
    for f in fields(config):
        kinds = {part.strip() for part in str(f.type).split("|")}
        known = [_KINDS[kind] for kind in kinds if kind in _KINDS] if len(kinds - {"None", "Any"}) == 1 else []
        convert, what = known[0] if known else (None, "")
        rules = f.metadata["option"].rules if "option" in f.metadata else ()
        found.append(_Checks(f.name, "None" in kinds, f.default, convert, what, rules))
    return tuple(found)


def settle(config: Any) -> None:
    """Converts the fields of a new dataclass object to their types. Raises `TypeError` for a value that cannot be converted."""
    for field_ in _checks(config.__class__):
        value = getattr(config, field_.name)
        if field_.convert is None or (value is None and field_.optional):
            continue
        try:
            settled = () if value is None and field_.default == () else field_.convert(value)
        except TypeError as e:
            raise TypeError(f"{field_.name} is not JSON: {e}") from None
        if settled is _UNFIT:
            raise TypeError(f"{field_.name} must be {field_.type}, not {value!r}")
        if settled is not value:
            object.__setattr__(config, field_.name, settled)


def first_problem(config: Any) -> tuple[str, str] | None:
    """Returns the first field that breaks a rule: its name, and "must be …, not …". None if all values are allowed."""
    for field_ in _checks(config.__class__):
        value = getattr(config, field_.name)
        if value is None and field_.optional:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            return field_.name, f"must be a number, not {value!r}"
        for allowed, what in field_.rules:
            if not allowed(value):
                return field_.name, f"must be {what}, not {_shown(value)}"
    return None


def _shown(value: Any) -> str:
    """The value as it was given, or its beginning if it is long. Several values stand one after the other."""
    several = isinstance(value, tuple) and value
    text = ", ".join(map(repr, value)) if several else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def check(config: Any) -> None:
    """Converts the fields of a dataclass object to their types and checks their rules.

    Raises `TypeError`, which names the field, and `UsageError`, which names the option.
    """
    settle(config)
    problem = first_problem(config)
    if problem is not None:
        name, what = problem
        raise UsageError(f"{flag_of(type(config), name)} {what}")


def flag_of(config: type, name: str) -> str:
    """Returns the option that sets a field, as users write it: `--stop-token-id` for `stop_token_ids`."""
    for f in fields(config):
        if f.name == name and "option" in f.metadata and f.metadata["option"].flags:
            return str(next(flag for flag in f.metadata["option"].flags if flag.startswith("--")))
    return "--" + name.replace("_", "-")


# Functions for `parse`: they turn the text of an option into its value.


def whole_number(name: str, text: str, what: str = "a whole number") -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} must be {what}, not {text!r}") from None


def number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name} must be a number, not {text!r}") from None


def whole_number_or_auto(name: str, text: str) -> int | None:
    """Returns a whole number, or None for `auto`."""
    return None if text == "auto" else whole_number(name, text, "a whole number or auto")


def comma_list(name: str, text: str) -> tuple[str, ...]:
    """Returns the parts between commas, without empty ones."""
    return tuple(part for part in text.split(",") if part)


def file_text(name: str, path: str) -> str:
    """Returns the text of a file."""
    if not str(path).strip():
        raise UsageError(f"{name} must name a file, not {path!r}")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as e:
        if "{{" in str(path) or "{%" in str(path):
            raise UsageError(f"{name} takes a file, not the template itself", f"write it to a file: {name} FILE") from e
        raise UsageError(f"{name} {path} cannot be read: {e.strerror}", "check the path") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"{name} {path} is not UTF-8 text", "save it as UTF-8") from e


def text_or_file(name: str, text: str) -> str:
    """Returns the text itself or, after an @, the text of the file. Refuses the name of a file without the @."""
    if text.startswith("@"):
        return file_text(name, text[1:])
    with suppress(OSError, ValueError):  # a text may be too long for a name
        if Path(text).suffix and Path(text).is_file():
            raise UsageError(f"{name} {text} is the name of a file", f"write {name} @{text} for the text in it")
    return text


def json_object(name: str, text: str) -> dict[str, object]:
    hint = """use an object such as '{"enable_thinking": false}'"""
    try:
        value = json.loads(text)
    except ValueError as e:
        raise UsageError(f"{name} is not JSON: {e}", hint) from None
    if not isinstance(value, dict):
        raise UsageError(f"{name} must be a JSON object, not {text}", hint)
    return value


def json_schema_file(name: str, path: str) -> str:
    """Returns the JSON schema of a file as one line. The order of its keys is kept."""
    if str(path).lstrip().startswith("{"):
        raise UsageError(f"{name} takes a file, not the schema itself", f"write it to a file: {name} schema.json")
    try:
        value = json.loads(file_text(name, path))
    except ValueError as e:
        raise UsageError(f"{name} {path} is not JSON: {e}", "correct the file") from None
    if not isinstance(value, dict):
        raise UsageError(f"{name} {path} must hold a JSON object", """give one such as {"type": "object"}""")
    return json.dumps(value)
