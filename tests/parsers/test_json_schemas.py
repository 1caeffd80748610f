"""What of a JSON schema is enforced, and whether a text is valid against it."""

import json
from typing import Any

import pytest

from batchgen.parsers.json_schemas import closes, enforceable, is_valid

A: dict[str, Any] = {"properties": {"a": {"type": "null"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "null"}}}
OPEN = {"additionalProperties": True}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, True),
        ({"type": "object", **A, "required": ["a"]}, True),
        ({"type": "array", "items": A}, True),
        ({"anyOf": [A, B]}, True),
        ({"oneOf": [A, B], "discriminator": {"propertyName": "a"}, "title": "t"}, True),
        ({"anyOf": [A, {"type": "integer"}], "minimum": 0, "example": 1}, True),
        ({"anyOf": [A, {"type": "integer"}], "required": ["b"]}, False),
        ({"allOf": [A]}, True),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, True),
        ({**A, "anyOf": [{"required": ["a"]}, {"minProperties": 1}]}, True),
        ({"type": "object"}, False),
        ({**A, **OPEN}, False),
        ({**A, "patternProperties": {"^x": {}}}, False),
        ({**A, "required": ["a", "b"]}, False),
        ({"allOf": [A, B]}, False),
        ({**A, "anyOf": [B, {"type": "object"}]}, False),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x", **B}, False),
        ({"$defs": {"x": {"anyOf": [A]}}, "allOf": [{"$ref": "#/$defs/x"}, B]}, False),
        ({"not": A}, False),
        ({"enum": [A]}, False),
        ({"type": "strin", "properties": []}, False),
    ],
)
def test_an_object_is_closed_unless_its_schema_opens_it_or_describes_it_in_several_places(schema, closed):
    assert closes(json.dumps(schema)) == closed
    assert ("false" in json.dumps(enforceable(schema))) == closed


def test_a_schema_that_refers_to_itself_is_closed_everywhere():
    tree = {"$defs": {"t": {"properties": {"t": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"}
    assert enforceable(tree)["$defs"]["t"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("schema", "added"),
    [
        ({"type": "number"}, {"minimum": -(10**15), "maximum": 10**15, "multipleOf": 1e-10}),
        ({"type": ["integer", "null"]}, {"minimum": 1 - 2**53, "maximum": 2**53 - 1}),
        ({"type": "integer", "minimum": 0}, {"maximum": 2**53 - 1}),
        ({"type": "integer", "exclusiveMinimum": 1e18}, {"maximum": 2**63 - 1024}),
        ({"type": "integer", "minimum": 0, "maximum": 2**64}, {"maximum": 2**63 - 1024}),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            {"minimum": 1024 - 2**63, "maximum": 2**63 - 1024},
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "type": "integer",
                "minimum": 0,
                "exclusiveMinimum": True,
            },
            {"maximum": 2**53 - 1},
        ),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, {"multipleOf": 1e-10}),
        ({"type": "number", "minimum": 1e-11, "maximum": 1}, {}),
        ({"type": "number", "minimum": 0, "maximum": 1e20}, {"maximum": 2**63 - 1024}),
        ({"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5}, {}),
        ({"type": "number", "enum": [1e30]}, {}),
        ({"type": "string"}, {}),
        ({"type": "number", "minimum": "0", "maximum": 1}, {"multipleOf": 1e-10}),  # llguidance has the message
    ],
)
def test_a_number_gets_the_bounds_and_decimals_that_it_lacks(schema, added):
    assert enforceable(schema) == schema | added


@pytest.mark.parametrize(
    ("schema", "lists"),
    [
        ({"items": {"enum": ["a", "b"]}}, [[], ["a"], ["b"], ["a", "b"], ["b", "a"]]),
        ({"items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 1}, None),
        ({"items": {"enum": [1, 1, "1"]}, "minItems": 2, "maxItems": 9}, [[1, "1"], ["1", 1]]),
        ({"items": {"const": 1}}, [[], [1]]),
    ],
)
def test_lists_of_different_items_are_enumerated(schema, lists):
    given = {"type": "array", "uniqueItems": True, "title": "t", **schema}
    expected = {"type": "array", "title": "t", **schema} if lists is None else {"title": "t", "enum": lists}
    assert enforceable(given) == expected
    by_name = {"$defs": {"e": schema["items"]}, **given, "items": {"$ref": "#/$defs/e"}}
    if lists is not None:
        assert enforceable(by_name)["enum"] == lists


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"minimum": 2**53 + 1}, {"minimum": 2**53 + 2}),
        ({"maximum": 2**53 + 3}, {"maximum": 2**53 + 2}),
        ({"exclusiveMaximum": 10**18 - 1}, {"exclusiveMaximum": 10**18 - 128}),
        ({"minimum": -(10**18) + 1, "maximum": 10**18}, {"minimum": -(10**18) + 128, "maximum": 10**18}),
    ],
)
def test_a_bound_that_no_float_holds_is_rounded_inward(given, held):
    """llguidance would round it, and allow numbers beyond it."""
    narrowed = enforceable({"type": "integer", **given})
    assert {name: narrowed[name] for name in held} == held


def node(**properties: Any) -> dict[str, Any]:
    """A schema of objects that refer to themselves as `#/$defs/n`."""
    return {
        "$defs": {"n": {"type": "object", "properties": {"const": {"type": "null"}, **properties}, "required": ["const", *properties]}},
        "$ref": "#/$defs/n",
    }  # fmt: skip


AGAIN = {"$ref": "#/$defs/n"}


DIFFERENT = {"type": "array", "uniqueItems": True}
TOO_MANY = "^uniqueItems can be enforced .*{}$"
ENDLESS = "^no text of it ends, because '{}' never does: let what must contain"
BEYOND = "^{}.* cannot be enforced$"


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (DIFFERENT, TOO_MANY.format("at most 2,000 different lists; leave it out")),
        (DIFFERENT | {"items": {"enum": list(range(9))}}, TOO_MANY.format("not 986,410: set a smaller maxItems, or leave it out")),
        (DIFFERENT | {"items": {"enum": "abc"}}, TOO_MANY.format("at most 2,000 different lists; leave it out")),
        (DIFFERENT | {"items": {"enum": [1]}, "minItems": 2}, TOO_MANY.format("at most 2,000 different lists; leave it out")),
        (DIFFERENT | {"items": {"enum": [1]}, "minItems": "q"}, "^minItems and maxItems must be whole numbers$"),
        (node(next=AGAIN), ENDLESS.format("next")),
        (node(next={"anyOf": [AGAIN, {"allOf": [AGAIN]}]}), ENDLESS.format("next")),
        (node(all={"type": "array", "items": AGAIN, "minItems": 1}), ENDLESS.format("all")),
        ({"properties": {"maybe": {"type": "array", "items": {"$ref": "#/properties/maybe"}, "minItems": 1}}}, ENDLESS.format("items")),
        ({"type": "integer", "exclusiveMinimum": 1e20}, BEYOND.format(r"its exclusiveMinimum 1e\+20 is beyond 64 bits")),
        ({"type": ["string", "integer"], "minimum": 2**64}, BEYOND.format("its minimum 18446744073709551616 is beyond 64 bits")),
        ({"allOf": [{"type": "integer"}, {"minimum": -(2**64), "maximum": -(2**63)}]}, BEYOND.format("its maximum -9223372036854775808 is")),
        ({"const": 2**63}, BEYOND.format("it has the number 9223372036854775808, which is beyond 64 bits")),
        ({"const": -(2**63)}, BEYOND.format("it has the number -9223372036854775808")),
        ({"const": -(2.0**63)}, BEYOND.format(r"it has the number -9.223372036854776e\+18")),
        ({"items": {"enum": [{"a": [1 - 2**63]}]}}, BEYOND.format("it has the number -9223372036854775807")),
    ],
)  # fmt: skip
def test_a_schema_that_no_grammar_can_keep_to_is_refused_with_the_reason(schema, why):
    """Too many lists of different items, values that contain their own kind without end, whole numbers beyond 64 bits."""
    with pytest.raises(ValueError, match=why):
        enforceable(schema)


@pytest.mark.parametrize(
    "schema",
    [
        node(next={"anyOf": [AGAIN, {"type": "null"}]}),
        node(all={"type": "array", "items": AGAIN}),
        node(next={"type": ["object", "null"], "properties": {"n": AGAIN}, "required": ["n"]}),
        {"type": "object", "properties": {"n": {"$ref": "#"}}},
        {"enum": [node(next=AGAIN)]},
    ],
)
def test_a_schema_that_refers_to_itself_and_can_end_is_taken(schema):
    enforceable(schema)


def test_a_bound_of_draft_4_is_refused_in_a_schema_of_another_draft():
    """The grammar would keep to it, and every result would be called not valid."""
    schema = {"items": {"type": "integer", "maximum": 9, "exclusiveMaximum": True}}
    draft = {"$schema": "http://json-schema.org/draft-04/schema#"}
    assert enforceable(draft | schema)["items"]["exclusiveMaximum"] is True
    for other in ({}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}):
        with pytest.raises(
            ValueError, match=r"^its exclusiveMaximum is true, as in draft 4 of JSON Schema: give the bound itself"
        ):
            enforceable(other | schema)


@pytest.mark.parametrize("values", [[2**53 + 1], ["a", {"id": -(2**53) - 1}], [1234567890123456789]])
def test_a_whole_number_that_llguidance_rounds_is_refused(values):
    with pytest.raises(
        ValueError, match=r"^it has the number -?\d+, which would be written as -?\d+[28]: make it a text$"
    ):
        enforceable({"type": "object", "properties": {"id": {"enum": values}}})


def test_whole_numbers_that_llguidance_writes_as_they_are_stay():
    schema = {"enum": [2**53, -(2**53), 10**18, 2**63 - 1, True]}
    assert enforceable(schema) == schema


@pytest.mark.parametrize(
    ("text", "schema", "valid"),
    [
        ('{"a": 1}', {"properties": {"a": {"type": "integer"}}}, True),
        ('{"a": "1"}', {"properties": {"a": {"type": "integer"}}}, False),
        ('{"a": 1', {}, False),
        (None, {}, False),
        ("NaN", {}, False),
        ("[" * 100_000, {}, False),
        ("0.3", {"multipleOf": 0.1}, True),
        ("0.35", {"multipleOf": 0.1}, False),
        ("1", {"oneOf": [{"type": "integer"}, {"minimum": 0}]}, False),
        ("[1, 1]", {"uniqueItems": True}, False),
        ('"é"', {"pattern": "^\\p{L}$"}, True),  # not of Python's syntax: the grammar has enforced it
        ("[1e99999999999999999999]", {"items": {}}, True),
        ("1e99999999999999999999", {"maximum": 5}, False),
        ("1", {"$ref": "https://example.com/schema.json"}, True),  # is not fetched
    ],
)
def test_a_text_is_valid_against_the_schema_as_it_was_given(text, schema, valid):
    assert is_valid(text, json.dumps(schema)) == valid
