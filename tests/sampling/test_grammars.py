import copy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.errors import UsageError
from batchgen.sampling import grammars
from batchgen.sampling.constraints import Constraints
from batchgen.sampling.grammars import Vocabulary, token_bytes
from batchgen.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    """Each of its tokens is one byte."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


vocabulary_of = cache(Vocabulary)


def check(tokenizer: Any, params: SamplingParams, size: int | None = None) -> None:
    """Raises `ValueError` for a grammar that cannot be used."""
    fault = vocabulary_of(tokenizer, len(tokenizer) if size is None else size).grammar(params).fault
    if fault:
        raise ValueError(fault)


def takes(tokenizer: Any, params: SamplingParams, text: str) -> bool:
    """Whether the grammar allows `text` as a complete text."""
    check(tokenizer, params)
    constraints = Constraints(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    constraints.add(0, params)
    ids = {piece: i for i, piece in enumerate(token_bytes(tokenizer, len(tokenizer)))}
    for token in [*(ids[bytes([b])] for b in text.encode()), tokenizer.eos_token_id]:
        mask = constraints.mask([0])
        if not np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[token]:
            return False
        constraints.accept(0, token)
    return True


@pytest.mark.parametrize(
    ("pattern", "whole", "other"),
    [
        ("^a|b$", "b", "ab"),
        ("a??", "a", "aa"),
        ("a/b", "a/b", "a"),
        (r"a\/[/]b", "a//b", r"a\//b"),
        (r"a\\", "a\\", "a"),
        ("a\nb\tc", "a\nb\tc", "a"),
        ("(?x) a\n b # c\n c", "abc", "a\n b"),
        ("(?i)straße", "STRAßE", "STRASSE"),
        (".", "é", "\n"),
        (r"\d", "٣", "a"),
        ("[0-9]", "3", "٣"),
        ('"#//%', '"#//%', "#"),
        (r"<\|end\|>", "<|end|>", "<"),
    ],
)
def test_a_regex_matches_the_whole_text(tokenizer, pattern, whole, other):
    assert takes(tokenizer, SamplingParams(regex=pattern), whole)
    assert not takes(tokenizer, SamplingParams(regex=pattern), other)


@pytest.mark.parametrize(
    ("schema", "valid", "other"),
    [
        ('{"enum": [1, "a"]}', ['"a"', "1"], ["2", " 1", "1 "]),
        (
            '{"properties": {"b": {"type": "null"}, "a": {}}, "required": ["a"], "additionalProperties": false, "type": "object"}',
            ['{"b":null,"a":3}', '{ "b" : null,\n\t"a" : [ ] }', '{"a":"\\u0001é\\n"}'],
            ['{"a":3,"b":null}', '{"b":null}', '{"a":3,"a":3}', '{"a":3,"c":3}', '{"a":3} '],
        ),
        (
            '{"x-guidance": {"whitespace_flexible": false}, "type": "array", "items": {"type": "integer"}}',
            ["[1,-2]", "[]"],
            ["[1, 2]", "[1.0]", "[01]"],
        ),
        ('{"type": "string", "pattern": "^[a-c]+$"}', ['"abc"'], ['"abd"', '""']),
        ('{"type": "string", "pattern": "^[^\\"]{2}$"}', ['"ab"', '"\\\\\\n"'], ['"a\\""', '"a"']),
        (
            r'{"type": "string", "pattern": "^[^]\\\\-]\\[x$"}',
            ['"a[x"', r'"\"[x"'],
            [r'"\\[x"', '"-[x"', '"][x"'],
        ),
        (
            '{"properties": {"enum": {"pattern": "^[^-\\"]$"}}, "type": "object"}',
            ['{"enum":"a"}'],
            ['{"enum":"\\""}', '{"enum":"-"}'],
        ),
        (
            '{"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}',
            ["[[],[[]]]"],
            ["[1]"],
        ),
        ("true", ["{}", "null", '{"a": {"a": 1.5e3}}'], ["", "{", "nul"]),
        ('{"properties": {"a": {}}, "type": "object"}', ["{}", '{"a":[{"b":1}]}'], ['{"b":1}', '{"a":1,"b":1}']),
        (
            '{"properties": {"a": {}}, "type": "object", "additionalProperties": true}',
            ['{"b":1}', '{"a":1,"b":1}'],
            ["[]"],
        ),
        (
            '{"allOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"type": "null"}}}], "type": "object"}',
            ['{"a":null,"b":null}'],
            ['{"a":1}'],
        ),
        (
            '{"type": "number"}',
            ["0", "-1.5", "999999999999999.9999999999"],
            ["0.12345678901", "1000000000000001", "1e5"],
        ),
        ('{"type": "number", "minimum": 0, "exclusiveMaximum": 1}', ["0.5", "0.0000000001"], ["1", "0.00000000001"]),
        ('{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}', ["0.5", "0.0000000001"], ["0", "-0", "0.0"]),
        ('{"exclusiveMinimum": 9, "exclusiveMaximum": 9.99}', ["9.5", "9.0000000001", "null"], ["9", "9.0", "9.99"]),
        ('{"type": "number", "minimum": -9.5, "exclusiveMaximum": -9}', ["-9.5", "-9.0000000001"], ["-9", "-9.0"]),
        (
            '{"type": "number", "exclusiveMinimum": 0, "minimum": 0.2, "exclusiveMaximum": 0.5, "multipleOf": 0.1}',
            ["0.2", "0.4"],
            ["0", "0.1", "0.5"],
        ),
        ('{"type": "number", "exclusiveMinimum": 1000000, "maximum": 1000000.5}', ["1000000.00000001"], ["1000000"]),
        ('{"exclusiveMinimum": 0, "maximum": 0.5, "exclusiveMaximum": 0.25}', ["0.1", "0.0000000001"], ["0", "0.25"]),
        ('{"exclusiveMaximum": 0, "minimum": -0.5, "exclusiveMinimum": -0.25}', ["-0.1"], ["0", "-0.25"]),
        (
            '{"type": "number", "exclusiveMinimum": 0, "allOf": [{"exclusiveMaximum": 0.25}, {"maximum": 2}]}',
            ["0.1", "0.0000000001"],
            ["0", "0.0", "0.25"],
        ),
        (
            '{"$defs": {"N": {"type": "number", "exclusiveMinimum": 1}}, "$ref": "#/$defs/N", "maximum": 1.5}',
            ["1.0000000001", "1.5"],
            ["1", "1.0", "1.6"],
        ),
        (
            '{"$defs": {"N": {"type": "number", "minimum": 0}}, "$ref": "#/$defs/N", "multipleOf": 0.5}',
            ["0", "0.5", "3"],
            ["0.1", "3.25", "-0.5"],
        ),
        (
            '{"allOf": [{"type": "number", "maximum": 9}, {"type": "number", "multipleOf": 2}]}',
            ["0", "8", "-2"],
            ["1", "3.0453397504", "10"],
        ),
        ('{"type": "integer"}', ["9007199254740991"], ["9007199254740992", "-9007199254740992"]),
        (
            '{"type": "string", "format": "date"}',
            ['"2404-02-29"', '"2000-02-29"', '"1999-12-31"', '"0001-01-01"'],
            ['"2405-02-29"', '"1900-02-29"', '"0000-02-29"', '"0000-01-01"', '"1999-04-31"', '"1999-13-01"'],
        ),
        (
            '{"type": "string", "format": "date-time"}',
            ['"2024-02-29T23:59:59.123Z"', '"2024-02-28T00:00:00+05:30"'],
            ['"2023-02-29T00:00:00Z"', '"2024-02-28T23:59:60Z"', '"2024-02-28T24:00:00Z"', '"2024-02-28T00:00:00"'],
        ),
        ('{"type": "string", "format": "time"}', ['"23:59:59Z"'], ['"23:59:60Z"', '"23:59:59.1234567Z"']),
        ('{"type": "string", "format": "date", "pattern": "^2"}', ['"2024-02-29"'], ['"1024-02-29"', '"2023-02-29"']),
        (
            '{"type": "array", "uniqueItems": true, "items": {"enum": ["a", "b"]}}',
            ["[]", '["b","a"]', '[ "a" , "b" ]'],
            ['["a","a"]', '["a","b","a"]'],
        ),
        ('{"type": "string", "format": "binary"}', ['"a"'], ["1"]),  # of bytes in a class of pydantic
        ('{"type": "string", "format": "uuid"}', ['"12345678-1234-5678-1234-567812345678"'], ['"a"']),
        (
            '{"$defs": {"E": {"enum": ["a", "b"], "type": "string"}}, "type": "object", "propertyNames": {"$ref": "#/$defs/E"}, "additionalProperties": {"type": "null"}}',
            ["{}", '{"b":null}', '{"a":null,"b":null}'],
            ['{"c":null}', '{"a":1}', '{"a":null,"a":null}'],
        ),
        (
            '{"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "null"}, "additionalItems": false}',
            ["[]", "[true]", "[true,null]"],
            ["[null]", "[1]"],
        ),
        (
            '{"type": "array", "prefixItems": [{"type": "boolean"}], "additionalItems": {"type": "null"}}',
            ["[]", "[true]", "[true,null]"],
            ["[null]", "[true,1]"],
        ),
        (
            '{"type": "array", "items": [{"type": "boolean"}], "additionalItems": false}',
            ["[true]"],
            ["[null]", "[true,1]"],
        ),
        ('{"oneOf": [{"type": "integer"}, {"minimum": 5, "type": "number"}]}', ["1", "5.5", "6"], ["4.5"]),
    ],
)
def test_a_json_schema_allows_valid_values_only(tokenizer, schema, valid, other):
    params = SamplingParams(json_schema=schema, json_whitespace=True)
    assert [text for text in valid if not takes(tokenizer, params, text)] == []
    assert [text for text in other if takes(tokenizer, params, text)] == []


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a", "unclosed group"),
        ("[a", "unclosed character class"),
        ("*a", "repetition operator missing expression"),
        ("a{2,1}", "invalid repetition count range, the start must be <= the end"),
        ("(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        (r"a\b", r"^ and $ can only stand at its ends, and \b nowhere"),
        ("a^b", r"^ and $ can only stand at its ends, and \b nowhere"),
        ("a\\", "it ends inside an escape"),
        ("[a&&b]", "it allows no text (no token may follow)"),
        ("\ud800", "it is not Unicode"),
    ],
)
def test_the_fault_of_a_regex_is_named(tokenizer, pattern, why):
    vocabulary = vocabulary_of(tokenizer, len(tokenizer))
    for _ in range(2):  # the second time from the cache
        assert vocabulary.grammar(SamplingParams(regex=pattern)).fault == f"regex cannot be used: {why}"


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("{", "it is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ('{"maximum": NaN}', "it is not JSON (NaN is not a number)"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"items":' * 200 + "{}" + "}" * 200, "recursion limit exceeded"),
        ("[]", "schema must be an object or boolean"),
        ('{"type": "strin"}', "Invalid type: strin"),
        ('{"type": "object", "propertyNames": {}}', 'Unimplemented keys: ["propertyNames"]'),
        ('{"type": "string", "pattern": "("}', "unclosed group"),
        ('{"$ref": "#/$defs/x"}', "Pointer '/$defs/x' does not exist"),
        ('{"$ref": "#"}', "it allows no text (no token may follow)"),
        (
            '{"type": "integer", "minimum": 3, "maximum": 1}',
            "Unsatisfiable schema: minimum (3) is greater than maximum (1)",
        ),
        (
            '{"items": [{"minProperties": 2, "required": ["a"]}]}',
            "minProperties 2 cannot be enforced with 1 required properties, as other keys may repeat",
        ),
    ],
)
def test_the_fault_of_a_json_schema_is_named(tokenizer, schema, why):
    with pytest.raises(ValueError) as failure:
        check(tokenizer, SamplingParams(json_schema=schema))
    assert str(failure.value) == f"json_schema cannot be used: {why}"


def test_min_properties_up_to_the_required_ones_can_be_enforced(tokenizer):
    for schema in (
        '{"type": "object", "required": ["a", "b"], "minProperties": 2}',
        '{"properties": {"minProperties": {"type": "integer"}}, "enum": [{"minProperties": 7}]}',
    ):
        check(tokenizer, SamplingParams(json_schema=schema))


def test_without_llguidance_the_extra_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for params in (SamplingParams(regex="a"), SamplingParams(json_schema="{")):
        with pytest.raises(UsageError) as failure:
            Vocabulary(tokenizer, len(tokenizer)).grammar(params)
        assert str(failure.value) == (
            "a regex or JSON schema needs the packages llguidance and jsonschema; pip install 'batchgen-llm[structured]'"
        )


def test_the_tokens_of_a_tokenizer_are_read_once_for_the_reader_and_the_engine(tokenizer, monkeypatch):
    sizes = []
    monkeypatch.setattr(grammars, "token_bytes", lambda of, size: sizes.append(size) or token_bytes(of, size))
    other = copy.deepcopy(tokenizer)
    for of, size in ((other, 300), (other, 300), (other, 320), (copy.deepcopy(tokenizer), 300)):
        assert Vocabulary(of, size).grammar(SamplingParams(regex="a")).fault == ""
    assert sizes == [300, 320, 300]


@pytest.mark.parametrize("kind", ["WordPiece", "CTC", "BPEDecoder", "Strip", None])
def test_a_tokenizer_whose_tokens_are_not_the_bytes_of_its_text_is_refused(kind):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    if kind is not None:
        tokenizer.decoder = getattr(decoders, kind)()
    for other in (PreTrainedTokenizerFast(tokenizer_object=tokenizer), type("Slow", (), {})()):
        with pytest.raises(UsageError) as failure:
            check(other, SamplingParams(regex="a"), 4)
        assert str(failure.value) == (
            f"a regex or JSON schema cannot be enforced with the tokenizer of this model ({type(other).__name__}); "
            "byte-level and sentencepiece tokenizers of the tokenizers library can be used"
        )


def test_the_token_bytes_of_a_metaspace_tokenizer_are_those_of_its_decoder(tokenizer):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "▁b": 1, "c▁▁d": 2, "<s>": 3}, "a"))
    words.decoder = decoders.Metaspace()
    words.add_special_tokens(["<s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=words)
    assert token_bytes(fast, 5) == [b"a", b" b", b"c  d", b"", b""]
    assert fast.decode([0, 1, 2]) == "a bc  d"


_ONE = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'


def test_json_may_have_a_space_after_colons_and_commas_as_most_models_have_learned_it(tokenizer):
    params = SamplingParams(json_schema='{"type": "array", "items": {"enum": [1, {"a": 1, "b": [1, 2]}]}}')
    texts = ['[1,{"a":1,"b":[1,2]}]', '[1, {"a": 1, "b": [1, 2]}]', '[1, {"a":1, "b": [1,2]}]']
    assert [text for text in texts if not takes(tokenizer, params, text)] == []
    more = ["[1,  1]", "[1 ,1]", "[1,\n1]", '[{"a":  1,"b":[1,2]}]']
    assert [text for text in more if takes(tokenizer, params, text)] == []


def test_other_white_space_in_json_is_allowed_on_request_alone_and_up_to_a_limit(tokenizer):
    """Without the limit, a weak model may write nothing but white space."""
    plain = SamplingParams(json_schema=_ONE)
    texts = ('{"a":1}', '{"a": 1}', '{"a":  1}', '{ "a":1}', '{"a":1 }', '{\n"a":1}')
    assert [text for text in texts if takes(tokenizer, plain, text)] == ['{"a":1}', '{"a": 1}']
    params = SamplingParams(json_schema=_ONE, json_whitespace=True)
    assert takes(tokenizer, params, '{\n    "a": 1\n}')
    assert takes(tokenizer, params, "{" + " " * 20 + '"a":1}')
    assert not takes(tokenizer, params, "{" + " " * 21 + '"a":1}')
    own = '{"x-guidance": {"whitespace_flexible": true}, ' + _ONE[1:]
    assert takes(tokenizer, SamplingParams(json_schema=own), '{"a": 1}')
