"""How an option is declared: once, with the field of the configuration that it sets.

    batch_size: int | None = option(None, "Maximum number of sequences that decode at once.", group="Engine",
                                    rules=[at_least(1)], parse=whole_number_or_auto, metavar="auto|N", shown="auto")

The annotation is the type, the default is the default, `rules` are what `check` refuses, and the command line and the documentation
are made from the rest. A field without `option` is no option of the command.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError

GROUPS = ("Model", "Prompts", "Sampling", "Constraints", "Engine", "Job")
"""The groups of `batchgen run --help`, in this order."""

Rule = tuple[Callable[[Any], bool], str]
"""A test of a value, and what the value must be, in words that follow "must be"."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the command: everything but its type and its default, which are the field's own."""

    help: str
    """One or two short sentences."""
    group: str
    flags: tuple[str, ...]
    """Its names, such as `--model` and `-m`."""
    metavar: str
    """What stands for the value in the help; empty for a switch."""
    values: tuple[str, ...]
    """The only texts that it takes; empty where there are too many to list."""
    rules: tuple[Rule, ...]
    parse: Callable[[str, str], Any] | None
    """Makes the value of the option's name and text; None where the annotation says how. Raises `UsageError`."""
    shown: str
    """The default in the help; empty where the default itself can be shown."""


def option(
    default: Any,
    help: str,
    *,
    group: str,
    flags: Sequence[str] = (),
    metavar: str = "",
    values: Sequence[str] = (),
    rules: Iterable[Rule] = (),
    parse: Callable[[str, str], Any] | None = None,
    shown: str = "",
) -> Any:
    """A dataclass field that is also an option of the command. `default` may be MISSING (required) or a factory.

    `flags` are needed only where the option is not called as the field is. A field of type bool is a switch.
    """
    rules = tuple(rules)
    if values:
        rules = (one_of(values), *rules)
        metavar = metavar or "|".join(values)
    meta = {"option": Option(help, group, tuple(flags), metavar, tuple(values), rules, parse, shown)}
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


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


_KINDS: dict[str, Rule] = {
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a number"),
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "str": (lambda v: isinstance(v, str), "text"),
    "tuple[str, ...]": (_is_texts, "a tuple of texts"),
    "tuple[int, ...]": (lambda v: isinstance(v, tuple) and all(map(_is_whole, v)), "a tuple of whole numbers"),
}


_RULES: dict[type, tuple[tuple[str, bool, tuple[Rule, ...]], ...]] = {}


def _rules(config: type) -> tuple[tuple[str, bool, tuple[Rule, ...]], ...]:
    """Of each option of a dataclass: the field's name, whether it may be None, and its rules, the one of its type first."""
    if config not in _RULES:  # worked out once: parameters are checked for every row
        found = []
        for f in (f for f in fields(config) if "option" in f.metadata):
            kinds = [part.strip() for part in str(f.type).split("|")]
            of_type = [_KINDS[kind] for kind in kinds if kind in _KINDS] if len(set(kinds) - {"None"}) == 1 else []
            found.append((f.name, "None" in kinds, (*of_type, *f.metadata["option"].rules)))
        _RULES[config] = tuple(found)
    return _RULES[config]


def first_problem(config: Any) -> tuple[str, str] | None:
    """The first field of a dataclass that breaks a rule: its name, and "must be …, not …". None if all values are allowed."""
    for name, optional, rules in _rules(type(config)):
        value = getattr(config, name)
        if value is None and optional:
            continue
        for allowed, what in rules:
            if not allowed(value):
                return name, f"must be {what}, not {value!r}"
    return None


def check(config: Any) -> None:
    """Checks every option of a dataclass by its rules. Raises `UsageError` naming the option."""
    problem = first_problem(config)
    if problem is not None:
        name, what = problem
        raise UsageError(f"{flag_of(type(config), name)} {what}")


def flag_of(config: type, name: str) -> str:
    """The option that sets a field, as users write it: `--stop-token-id` of `stop_token_ids`."""
    for f in fields(config):
        if f.name == name and "option" in f.metadata and f.metadata["option"].flags:
            return str(next(flag for flag in f.metadata["option"].flags if flag.startswith("--")))
    return "--" + name.replace("_", "-")


# How the text of an option becomes its value: for `parse`.


def whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} must be a whole number, not {text!r}") from None


def number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name} must be a number, not {text!r}") from None


def whole_number_or_auto(name: str, text: str) -> int | None:
    """None for `auto`."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} must be a whole number or auto, not {text!r}") from None


def comma_list(name: str, text: str) -> tuple[str, ...]:
    """The parts between commas, without the empty ones."""
    return tuple(part for part in text.split(",") if part)


def file_text(name: str, path: str) -> str:
    """The text of a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise UsageError(f"{name} {path} cannot be read: {e.strerror}", "check the path") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"{name} {path} is not UTF-8 text", "save it as UTF-8") from e


def text_or_file(name: str, text: str) -> str:
    """The text itself, or that of the file whose path follows an @."""
    return file_text(name, text[1:]) if text.startswith("@") else text


def json_object(name: str, text: str) -> dict[str, object]:
    hint = """give an object such as '{"enable_thinking": false}'"""
    try:
        value = json.loads(text)
    except ValueError as e:
        raise UsageError(f"{name} is not JSON: {e}", hint) from None
    if not isinstance(value, dict):
        raise UsageError(f"{name} must be a JSON object, not {text}", hint)
    return value


def json_schema_file(name: str, path: str) -> str:
    """The JSON schema of a file, on one line; the order of its keys is kept."""
    try:
        value = json.loads(file_text(name, path))
    except ValueError as e:
        raise UsageError(f"{name} {path} is not JSON: {e}", "correct the file") from None
    if not isinstance(value, dict):
        raise UsageError(f"{name} {path} must hold a JSON object", """such as {"type": "object"}""")
    return json.dumps(value)
