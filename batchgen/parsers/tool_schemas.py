"""Which types the arguments of tools have. The parser of transformers reads `type`, `anyOf` and `oneOf` of a tool's schema; schemas say it in other ways too."""

from __future__ import annotations

from typing import Any

from batchgen.parsers.json_schemas import referenced

_NAMES = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def with_types(tools: Any, *, texts: bool) -> list[Any]:
    """Returns the tools with the types of their arguments in `type`; without `texts` none of the arguments that may be texts."""
    return [_with_types(tool, texts) for tool in tools] if isinstance(tools, list) else []


def _with_types(tool: Any, texts: bool) -> Any:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    parameters = function.get("parameters") if isinstance(function, dict) else None
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(function, dict) or not isinstance(properties, dict):
        return tool
    types = {name: _type_names(schema, parameters, set()) for name, schema in properties.items()}
    known = {name: {"type": found} for name, found in types.items() if found and (texts or "string" not in found)}
    return {"name": function.get("name"), "parameters": {"properties": known}}


def _type_names(schema: Any, root: Any, seen: set[str]) -> list[str]:
    """Returns the names of the types that a schema allows, in its order; those of all its parts, and of what it refers to in `root` and that was not `seen` before."""
    if not isinstance(schema, dict):
        return []
    named = schema.get("type")
    types = [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
    for union in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            types += _type_names(choice, root, seen)
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref not in seen:
        seen.add(ref)
        types += _type_names(referenced(schema, root), root, seen)
    if not types:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        types = [_NAMES[type(value)] for value in values] if isinstance(values, list) else []
    if schema.get("nullable"):  # transformers' mark of an optional argument
        types.append("null")
    return list(dict.fromkeys(types))
