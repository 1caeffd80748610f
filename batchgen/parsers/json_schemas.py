"""JSON schemas of `--json-schema`: what of a schema is enforced, and whether a text is valid against it.

A schema allows more than people mean by it: keys that it does not name, numbers of any length, 2405-02-29 as a date. A model that may
write such things sometimes never ends. So `enforceable` narrows a schema before it becomes a grammar:

- An object with `properties` has no other keys, unless `additionalProperties`, `patternProperties` or the like say so. An object that is
  described in several places which hold together (`allOf`, `$ref` beside `properties`, …) stays as it is.
- A number without bounds is between -10^15 and 10^15 and has at most 10 decimals; a whole number is within ±(2^53 - 1). Bounds of the
  schema take their place.
- `date`, `time` and `date-time` exist: no year 0000, no 29 February in other years than leap years, no second 60.
- `uniqueItems` is enforced for items with an `enum`, as far as there are few different lists, and `propertyNames` if it has an `enum`.
- A `format` that llguidance does not know restricts nothing, as JSON Schema says of unknown ones.

`is_valid` asks the schema as it was given.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from itertools import permutations
from typing import Any

_VALUES = ("const", "enum", "default", "examples")  # keywords of a schema that hold values, not schemas
_MAPS = ("properties", "$defs", "definitions", "dependentSchemas")  # those that hold schemas by name
_BESIDE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref")
"""Keywords whose schemas apply to the same value as the schema that they are in."""
_NOTES = {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
          "deprecated", "readOnly", "writeOnly", "x-guidance"}  # fmt: skip
"""Keywords that restrict no value."""
_OPENING = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
_OF_OBJECTS = {*_BESIDE, *_OPENING, "properties", "required", "dependentRequired", "dependencies", "minProperties", "maxProperties",
               "enum", "const", "$dynamicRef", "$recursiveRef"}  # fmt: skip
"""Keywords that say something about the keys of an object. Others, such as pydantic's `discriminator`, do not."""
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_DRAFT_4 = 'give the bound itself there, or name the draft ("$schema": "http://json-schema.org/draft-04/schema#")'
MAX_NUMBER = 10**15
MAX_INTEGER = 2**53 - 1
LARGEST_INTEGER = 2**63 - 1
"""llguidance writes a larger whole number as another one."""
LARGEST_BOUND = 2**63 - 1024
"""The largest number below 2^63 that a float holds. llguidance rounds what lies beyond it to 2^63, and the process dies of -2^63."""
MAX_DECIMALS = 10
MAX_LISTS = 2000
"""Lists of different items that are enumerated."""

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_KNOWN_FORMATS = {"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}  # to llguidance
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def loaded(text: str) -> Any:
    """Returns the schema of a JSON text. Raises `ValueError`."""
    try:
        return json.loads(text, parse_constant=_not_json)
    except ValueError as e:
        raise ValueError(f"it is not JSON ({e})") from None


def enforceable(schema: Any) -> Any:
    """Returns the schema in the narrower form that is enforced. Raises `ValueError` if it cannot be."""
    narrowing = _Narrowing(schema)
    narrowing.check_ends()
    return narrowing.of(schema)


def closes(text: str) -> bool:
    """Whether `enforceable` closes an object that JSON Schema leaves open. False for a schema that is not valid."""
    try:
        narrowing = _Narrowing(schema := loaded(text))
        narrowing.of(schema)
    except (ValueError, RecursionError):
        return False
    return narrowing.closed


def is_valid(text: str | None, schema: str) -> bool:
    """Whether a text is JSON and valid against a schema. What the validator does not know (a regular expression in Rust's syntax) counts as met."""
    try:
        value = json.loads(text or "", parse_float=_decimal, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return False
    try:
        return bool(_validator(schema).is_valid(value))
    except Exception:  # noqa: BLE001 - of Python's regular expressions, of references; the grammar has enforced these
        return True


@lru_cache(256)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

    # Decimals, as binary fractions are no exact multiples. An empty registry, as nothing is fetched.
    given = json.loads(schema, parse_float=Decimal)
    return validator_for(given, default=Draft202012Validator)(given, registry=Registry())


def _decimal(number: str) -> Decimal | float:
    try:
        return Decimal(number)
    except ArithmeticError:  # an exponent of more than 18 digits
        return float(number)


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def referenced(schema: Mapping[str, Any], root: Any) -> Any:
    """Returns the schema that the `$ref` of a schema names; None if it is not within the document `root`."""
    ref, found = schema.get("$ref"), root
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return None
    for part in ref[2:].split("/") if ref != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


class _Narrowing:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._is_draft_4 = isinstance(root, dict) and "draft-04" in str(root.get("$schema"))
        self.closed = False
        """Whether an object was closed."""
        self._joined: set[int] = set()
        """Ids of schemas that apply to a value beside others."""
        self._seen: set[tuple[int, bool]] = set()
        self._find_joined(root, False)
        self._together: dict[int, list[Mapping[str, Any]]] = {}
        """The schemas that apply to the same value as a schema, by its id: itself, and those beside it."""
        self._find_together()

    def check_ends(self) -> None:
        """Raises `ValueError` if an object or list must contain another one of its kind, and so on without end."""
        endless = {id(schema): schema for schema in _schemas_in(self._root)}
        while ended := [key for key, schema in endless.items() if self._can_end(schema, endless)]:
            for key in ended:
                del endless[key]
        for schema in endless.values():
            for name, part in _needed(schema):
                if id(part) in endless:
                    raise ValueError(
                        f"no text of it ends, because {name!r} never does: let what must contain its own kind be missing, null or empty"
                    )

    def _can_end(self, schema: Mapping[str, Any], endless: Container[int]) -> bool:
        beside = list(self._beside(schema))
        needed = [part for _, part in _needed(schema)]
        needed += [part for keyword, part in beside if keyword in ("allOf", "$ref")]
        either = [[part for keyword, part in beside if keyword == name] for name in ("anyOf", "oneOf")]
        return not any(id(part) in endless for part in needed) and all(
            not parts or any(id(part) not in endless for part in parts) for parts in either
        )

    def _beside(self, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the schemas that apply to the same value, each with its keyword."""
        for keyword in _BESIDE:
            part = referenced(schema, self._root) if keyword == "$ref" else schema.get(keyword)
            if isinstance(part, list):
                yield from ((keyword, one) for one in part)
            elif keyword == "dependentSchemas" and isinstance(part, dict):
                yield from ((keyword, one) for one in part.values())
            elif isinstance(part, dict):
                yield keyword, part

    def _find_joined(self, schema: Any, joined: bool) -> None:
        if isinstance(schema, list):
            for part in schema:
                self._find_joined(part, False)
        if not isinstance(schema, dict) or (id(schema), joined) in self._seen:
            return
        self._seen.add((id(schema), joined))
        if joined:
            self._joined.add(id(schema))
        said = schema.keys() & _OF_OBJECTS
        for keyword, part in self._beside(schema):
            either = keyword in ("anyOf", "oneOf", "$ref") or (keyword == "allOf" and len(schema[keyword]) == 1)
            alone = either and len(said) == 1
            self._find_joined(part, joined or not alone)
        for keyword, part in schema.items():
            if keyword in _MAPS and isinstance(part, dict):
                for one in part.values():
                    self._find_joined(one, False)
            elif keyword not in _VALUES and keyword not in _BESIDE:
                self._find_joined(part, False)

    def _find_together(self) -> None:
        for schema in _schemas_in(self._root):
            group = list(self._closure(schema, {}).values())
            for one in group if len(group) > 1 else ():
                self._together.setdefault(id(one), []).extend(group)

    def _closure(self, schema: Any, found: dict[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """Adds a schema, and those beside it at any distance, to `found`, by their ids."""
        if isinstance(schema, dict) and id(schema) not in found:
            found[id(schema)] = schema
            for _, part in self._beside(schema):
                self._closure(part, found)
        return found

    def of(self, schema: Any) -> Any:
        """Returns a schema narrowed.

        llguidance counts keys that `properties` does not name each time they repeat. A character class that contains all control
        characters also lets quotes and backslashes in (derivre 0.3), so one control character is removed from negated classes.
        """
        if not isinstance(schema, dict):
            return [self.of(part) for part in schema] if isinstance(schema, list) else schema
        kept: dict[str, Any] = {}
        for keyword, part in schema.items():
            if keyword in _VALUES:
                if keyword in ("const", "enum"):
                    _check_numbers(part)
                kept[keyword] = part
            elif (
                keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(part, bool) and not self._is_draft_4
            ):
                # llguidance reads it as draft 4 does, and the validator does not.
                raise ValueError(f"its {keyword} is {json.dumps(part)}, as in draft 4 of JSON Schema: {_DRAFT_4}")
            elif keyword == "pattern" and isinstance(part, str):
                kept[keyword] = _without_control(part)
            elif keyword == "patternProperties" and isinstance(part, dict):
                kept[keyword] = {_without_control(name): self.of(value) for name, value in part.items()}
            elif keyword in _MAPS and isinstance(part, dict):
                kept[keyword] = {name: self.of(value) for name, value in part.items()}
            else:
                kept[keyword] = self.of(part)
        if "prefixItems" in kept and "additionalItems" in kept:
            # Of two drafts: llguidance would not look at `prefixItems`.
            kept.setdefault("items", kept.pop("additionalItems"))
        self._name_keys(kept)
        if self._is_closed(schema):
            kept["additionalProperties"] = False
            self.closed = True
        _check_min_properties(kept)
        _bound_numbers(kept, self._together.get(id(schema), (schema,)))
        _narrow_format(kept)
        return self._with_different_items(kept)

    def _name_keys(self, schema: dict[str, Any]) -> None:
        """Makes properties of the keys that `propertyNames` enumerates, as in pydantic's `dict[Literal["a", "b"], int]`."""
        keys = self._enumerated(schema.get("propertyNames"))
        if keys and schema.keys().isdisjoint(("properties", "patternProperties")):
            del schema["propertyNames"]
            value = schema.get("additionalProperties", {})
            schema["properties"] = {key: value for key in keys if isinstance(key, str)}
            schema["additionalProperties"] = False

    def _enumerated(self, schema: Any) -> list[Any]:
        """Returns the values of a schema with `enum` or `const`, or of the schema that it refers to; empty for others."""
        if isinstance(schema, dict) and "$ref" in schema:
            schema = referenced(schema, self._root)
        if not isinstance(schema, dict):
            return []
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        return values if isinstance(values, list) else []

    def _is_closed(self, schema: Mapping[str, Any]) -> bool:
        properties, required = schema.get("properties"), schema.get("required", [])
        if not isinstance(properties, dict) or schema.keys() & _OPENING or id(schema) in self._joined:
            return False
        if not isinstance(required, list) or not properties.keys() >= {
            name for name in required if isinstance(name, str)
        }:
            return False
        parts = (part for _, part in self._beside(schema))
        return not any("properties" in one for part in parts for one in self._closure(part, {}).values())

    def _with_different_items(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns a schema of lists of different items as the enumeration of these lists. Raises `ValueError` if they are too many."""
        if "uniqueItems" not in schema:
            return schema
        unique = schema.pop("uniqueItems")
        if unique is not True or schema.get("maxItems", 2) in (0, 1):
            return schema
        values = list({json.dumps(value): value for value in self._enumerated(schema.get("items"))}.values())
        min_items, max_items = schema.get("minItems", 0), schema.get("maxItems", len(values))
        if not isinstance(min_items, int) or not isinstance(max_items, int):
            raise ValueError("minItems and maxItems must be whole numbers")
        sizes = range(min_items, min(max_items, len(values)) + 1)
        count = sum(math.perm(len(values), size) for size in sizes)
        others = {"prefixItems", "contains"} & schema.keys()
        if not values or others or not 0 < count <= MAX_LISTS:
            but = f", not {count:,}: set a smaller maxItems, or" if values and count else ";"
            raise ValueError(
                f"uniqueItems can be enforced for items with an enum, and for at most {MAX_LISTS:,} different lists{but} leave it out"
            )
        kept = {name: part for name, part in schema.items() if name in _NOTES}
        return kept | {"enum": [list(found) for size in sizes for found in permutations(values, size)]}


def _schemas_in(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and all schemas in it."""
    if isinstance(schema, list):
        for part in schema:
            yield from _schemas_in(part)
    elif isinstance(schema, dict):
        yield schema
        for keyword, part in schema.items():
            if keyword not in _VALUES:
                yield from _schemas_in(list(part.values()) if keyword in _MAPS and isinstance(part, dict) else part)


def _needed(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns schemas of which each object or list of a schema contains a value: the names of required properties, or `items`, and the schemas."""
    types, properties, required = _types(schema), schema.get("properties"), schema.get("required")
    if types == {"object"} and isinstance(properties, dict) and isinstance(required, list):
        return [(name, properties[name]) for name in properties if name in required]
    if types == {"array"} and schema.get("minItems") and "prefixItems" not in schema:
        return [("items", schema.get("items"))]
    return []


def _types(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type")
    return {types} if isinstance(types, str) else set(types) if isinstance(types, list) else set()


def _check_min_properties(schema: Mapping[str, Any]) -> None:
    if schema.get("additionalProperties") is False:
        return
    min_properties, required = schema.get("minProperties"), schema.get("required")
    named = len(required) if isinstance(required, list) else 0
    if isinstance(min_properties, int | float) and min_properties > max(1, named):
        raise ValueError(
            f"minProperties {min_properties} cannot be enforced with {named} required properties, as other keys may repeat"
        )


def _bounds(schema: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: bound
        for name in (*_LOWER, *_UPPER)
        if isinstance(bound := schema.get(name), int | float) and not isinstance(bound, bool)
    }


def _bound_numbers(schema: dict[str, Any], together: Iterable[Mapping[str, Any]]) -> None:
    """Gives a number the bounds and the decimals that it lacks. Raises `ValueError` for bounds that llguidance does not know, and may die of.

    `together`: all schemas that apply to the same value. llguidance is wrong about a multiple of both 2 and 10^-10.
    """
    given = _bounds(schema)
    for name, bound in given.items():
        if (name in _LOWER and bound > LARGEST_BOUND) or (name in _UPPER and bound < -LARGEST_BOUND):
            raise ValueError(f"its {name} {bound} is beyond 64 bits, and cannot be enforced")
        schema[name] = given[name] = _held(max(-LARGEST_BOUND, min(bound, LARGEST_BOUND)), 1 if name in _LOWER else -1)
    types = _types(schema)
    if types != {"integer"}:
        _exclude_bound(schema, given, [bound for one in together for bound in _bounds(one).items()])
    if not types & {"number", "integer"} or schema.keys() & {"enum", "const", *_BESIDE}:
        return
    limit = MAX_NUMBER if "number" in types else MAX_INTEGER
    if schema.keys().isdisjoint(_LOWER):
        schema["minimum"] = -limit if all(bound >= -limit for bound in given.values()) else -LARGEST_BOUND
    if schema.keys().isdisjoint(_UPPER):
        schema["maximum"] = limit if all(bound <= limit for bound in given.values()) else LARGEST_BOUND
    fine = [bound for bound in given.values() if abs(bound) > limit or -_exponent(bound) > MAX_DECIMALS]
    if "number" in types and not fine and not any("multipleOf" in one for one in together):
        schema["multipleOf"] = 10.0**-MAX_DECIMALS


def _held(bound: float, inward: int) -> float:
    """Returns the next number in the direction `inward` that a float holds. llguidance rounds a bound, also outward."""
    near = float(bound)
    if near == bound:
        return bound
    return int(near if (near - bound) * inward > 0 else math.nextafter(near, inward * math.inf))


def _exclude_bound(schema: dict[str, Any], given: Mapping[str, float], beside: Iterable[tuple[str, float]]) -> None:
    """Moves an excluded whole bound by one of the last decimals into the range, if the other bound has the same digits before the point.

    llguidance lets such a bound itself in: 0 is no number above 0 and below 0.5. `beside`: the bounds of the same value, `given` among them.
    """
    for name, others, sign in (("exclusiveMinimum", _UPPER, 1), ("exclusiveMaximum", _LOWER, -1)):
        bound = given.get(name)
        if bound is None or bound != int(bound):
            continue
        beyond = [other for key, other in beside if key in others and sign * other > sign * bound]
        other = sign * min((sign * other for other in beyond), default=math.inf)
        if not math.isfinite(other) or int(other) != bound:
            continue
        # A float has 15 decimal digits.
        decimals = min(max(MAX_DECIMALS, 1 - _exponent(other)), 15 - len(str(abs(int(bound)))))
        moved = float(Decimal(int(bound)) + sign * Decimal(1).scaleb(-decimals))
        if sign * moved < sign * other:
            del schema[name]
            inclusive, tighter = ("minimum", max) if sign > 0 else ("maximum", min)
            schema[inclusive] = tighter(moved, given.get(inclusive, moved))


def _check_numbers(value: Any) -> None:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_numbers(part)
    elif (isinstance(value, int) and (value > LARGEST_INTEGER or value < -LARGEST_BOUND)) or value == -(2.0**63):
        raise ValueError(f"it has the number {value}, which is beyond 64 bits and cannot be enforced")
    elif isinstance(value, int) and value != LARGEST_INTEGER and int(float(value)) != value:
        # llguidance makes a float of it.
        raise ValueError(f"it has the number {value}, which would be written as {int(float(value))}: make it a text")


def _exponent(number: float) -> int:
    return int(Decimal(repr(number)).normalize().as_tuple().exponent)


def _narrow_format(schema: dict[str, Any]) -> None:
    """Replaces the format of a date or time by a pattern, and removes unknown ones."""
    if not isinstance(schema.get("format"), str) or schema["format"] in _KNOWN_FORMATS:
        return
    pattern = _FORMATS.get(schema.pop("format"))
    if pattern is not None:
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", []), {"pattern": pattern}]
        else:
            schema["pattern"] = pattern


def _without_control(pattern: str) -> str:
    return re.sub(r"\\.|\[\^-*\]?", lambda m: m[0] if m[0][0] == "\\" else m[0] + r"[\x01]", pattern, flags=re.DOTALL)
