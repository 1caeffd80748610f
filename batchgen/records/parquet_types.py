"""The Parquet type of a column that comes from JSON, found value by value over any number of rows, in constant memory.

A column of nulls is a string column. Whole numbers with fractions among them are doubles. Lists and objects have nested types; an object
has all the fields that any of its values has, null where a value lacks one. If the values of a place do not fit one type (a string here
and a list there, a whole number beyond 64 bits, or beyond 53 among fractions, objects without fields or with more than `MAX_FIELDS`,
nesting deeper than `MAX_NESTING`), the place is a string that holds each value as JSON text.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from batchgen.json_values import plain
from batchgen.parsers.json_schemas import referenced
from batchgen.records.jsonl import to_json

MAX_FIELDS = 200
MAX_NESTING = 16
_SIMPLE = {
    "null": pa.string(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "long": pa.int64(),
    "float": pa.float64(),
    "string": pa.string(),
    "json": pa.string(),
}
_WIDER = {frozenset(("int", "long")): "long", frozenset(("int", "float")): "float"}
"""The kinds of numbers that one type holds without a change."""
_DIGITS = {16: 11, 32: 24, 64: 53}
"""Binary digits of the numbers that floating-point types of so many bits hold."""


class ColumnType:
    """The narrowest type that fits all values seen so far."""

    __slots__ = ("_depth", "fields", "items", "name")

    def __init__(self, depth: int = 0) -> None:
        self.name = "null"
        """null, bool, int, long (whole numbers that a double may not hold among them), float, string, list, object or json"""
        self.items: ColumnType | None = None
        self.fields: dict[str, ColumnType] = {}
        self._depth = depth

    def see(self, value: Any) -> None:
        """Widens the type to fit `value`, which is made of JSON's types."""
        if value is None or self.name == "json":
            return
        name = _kind_name(value)
        if self.name == "null":
            self.name = name
        elif name != self.name:
            self.name = _WIDER.get(frozenset((name, self.name)), "json")
        if self.name == "list":
            self.items = self.items or ColumnType(self._depth + 1)
            for item in value:
                self.items.see(item)
        elif self.name == "object":
            for key, inner in value.items():
                if key not in self.fields:
                    self.fields[key] = ColumnType(self._depth + 1)
                self.fields[key].see(inner)
        if self._depth > MAX_NESTING or len(self.fields) > MAX_FIELDS:
            self.name = "json"
        if self.name == "json":
            self.items, self.fields = None, {}

    def mixed(self, name: str) -> list[str]:
        """The places below the column `name` (`meta.tags[]`) whose values are written as JSON text because they fit no one type."""
        if self.name == "json":
            return [name]
        if self.items is not None:
            return self.items.mixed(f"{name}[]")
        return [place for key, t in self.fields.items() for place in t.mixed(f"{name}.{key}")]

    def arrow(self) -> pa.DataType:
        """The Arrow type."""
        if self.name == "list" and self.items is not None:
            return pa.list_(self.items.arrow())
        if self.name == "object" and self.fields:
            return pa.struct([pa.field(clean(k), t.arrow()) for k, t in self.fields.items()])
        return _SIMPLE.get(self.name, pa.string())

    def convert(self, value: Any) -> Any:
        """Returns `value` as `pa.array` takes it for `arrow()`."""
        if value is None or self.name in ("bool", "int", "long"):
            return value
        if self.name == "string":
            return clean(value)
        if self.name == "float":
            return float(value)
        if self.name == "list" and self.items is not None:
            return [self.items.convert(item) for item in value]
        if self.name == "object" and self.fields:
            return {clean(k): t.convert(value.get(k)) for k, t in self.fields.items()}
        return clean(to_json(value).decode())


def schema_type(schema: Any) -> pa.DataType:
    """Returns the Arrow type of the values that a JSON schema allows. A value of several kinds, or with keys that the schema does not name, is JSON text."""
    return _schema_type(schema, schema, 0)


def _schema_type(schema: Any, root: Any, depth: int) -> pa.DataType:
    if not isinstance(schema, dict) or depth > MAX_NESTING:
        return pa.string()
    beside = [name for name in ("allOf", "anyOf", "oneOf", "$ref") if name in schema]
    if "const" in schema or "enum" in schema:
        column = ColumnType(depth)
        for value in schema.get("enum", [schema.get("const")]):
            column.see(value)
        return column.arrow()
    if "$ref" in beside and "properties" not in schema:
        return _schema_type(referenced(schema, root), root, depth + 1)
    if beside:
        parts = [part for name in beside if name != "$ref" for part in schema[name]]
        types = {_schema_type(part, root, depth + 1) for part in parts if part != {"type": "null"}}
        if types == {pa.int64(), pa.float64()}:
            return pa.float64()
        return types.pop() if len(types) == 1 and "properties" not in schema else pa.string()
    given = schema.get("type")
    kinds = {given} if isinstance(given, str) else set(given or ())
    kinds -= {"null"}
    if kinds == {"array"} and "prefixItems" not in schema:
        return pa.list_(_schema_type(schema.get("items"), root, depth + 1))
    properties = schema.get("properties")
    if (
        kinds == {"object"}
        and properties
        and schema.get("additionalProperties") is False
        and not schema.get("patternProperties")
        and len(properties) <= MAX_FIELDS
    ):
        return pa.struct([pa.field(clean(n), _schema_type(part, root, depth + 1)) for n, part in properties.items()])
    if kinds == {"integer"} and not any(abs(schema.get(name, 0)) >= 2**63 for name in ("minimum", "maximum")):
        return pa.int64()
    return {("number",): pa.float64(), ("integer", "number"): pa.float64(), ("boolean",): pa.bool_()}.get(
        tuple(sorted(kinds)), pa.string()
    )


def fitted(value: Any, type: pa.DataType) -> Any:
    """Returns a value of JSON as `pa.array` takes it for a `schema_type`. None for a value that has another type, or keys that the type has not."""
    try:
        return _as_type(value, type)
    except (TypeError, ValueError, OverflowError):
        return None


def _as_type(value: Any, type: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_string(type):
        return clean(value if isinstance(value, str) else to_json(value).decode())
    if pa.types.is_struct(type):
        names = [field.name for field in type]
        if not isinstance(value, dict) or not {clean(name) for name in value} <= set(names):
            raise TypeError
        return {field.name: _as_type(value.get(field.name), field.type) for field in type}
    if pa.types.is_list(type):
        if not isinstance(value, list):
            raise TypeError
        return [_as_type(item, type.value_type) for item in value]
    if isinstance(value, bool) != pa.types.is_boolean(type) or not isinstance(value, int | float):
        raise TypeError
    if pa.types.is_integer(type) and (int(value) != value or not -(2**63) <= value < 2**63):
        raise TypeError
    return int(value) if pa.types.is_integer(type) else float(value) if pa.types.is_floating(type) else value


def id_text(value: Any) -> str:
    """Returns an id as text, for columns whose ids are not all whole numbers."""
    value = plain(value)
    return clean(value if isinstance(value, str) else to_json(value).decode())


def clean(text: str) -> str:
    """Returns `text` in a form that UTF-8 can hold: a lone surrogate becomes its escape of six characters."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _kind_name(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if abs(value) <= 2**53 else "long" if -(2**63) <= value < 2**63 else "json"
    if isinstance(value, float):
        return "float"
    return "list" if isinstance(value, list | tuple) else "object"  # an entry of Arrow's maps is a tuple


def safe_limit(type: pa.DataType, wider: pa.DataType) -> int | None:
    """Returns the largest absolute value up to which numbers of `type` stay the same in the type that Arrow unifies it with others to; None if all do."""
    if type == wider:
        return None
    if pa.types.is_dictionary(type) and pa.types.is_dictionary(wider):
        return safe_limit(type.value_type, wider.value_type)
    if type.num_fields:
        parts = [type.field(i) for i in range(type.num_fields)]
        others = [wider.field(p.name if pa.types.is_struct(wider) else i) for i, p in enumerate(parts)]
        limits = [safe_limit(part.type, other.type) for part, other in zip(parts, others, strict=True)]
        return min((limit for limit in limits if limit is not None), default=None)
    if pa.types.is_decimal(type) and pa.types.is_floating(wider):
        return 0
    if not pa.types.is_integer(type):
        return None
    if pa.types.is_decimal(wider):
        limit = 10 ** (wider.precision - wider.scale) - 1
    elif pa.types.is_floating(wider):
        limit = 2 ** _DIGITS[wider.bit_width]
    else:
        limit = 2 ** (wider.bit_width - pa.types.is_signed_integer(wider)) - 1
    return int(limit) if limit < 2**type.bit_width - 1 else None


def without_maps(type: pa.DataType) -> pa.DataType:
    """Returns a type in which every map is a list of structs (`key`, `value`), for programs that know no maps."""
    if pa.types.is_map(type):
        entry = [pa.field("key", without_maps(type.key_type)), pa.field("value", without_maps(type.item_type))]
        return pa.list_(pa.struct(entry))
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(without_maps(field.type)) for field in type])
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(without_maps(type.value_type)))
    if pa.types.is_large_list(type):
        return pa.large_list(type.value_field.with_type(without_maps(type.value_type)))
    if pa.types.is_fixed_size_list(type):
        return pa.list_(type.value_field.with_type(without_maps(type.value_type)), type.list_size)
    return type
