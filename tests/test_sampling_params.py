"""The sampling parameters of a row are checked, merged and digested."""

import math
from dataclasses import fields
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from batchgen.errors import RowError
from batchgen.sampling_params import MAX_LOGPROBS, SamplingParams

OTHERS: dict[str, Any] = {
    "max_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "stop": ("x",), "stop_token_ids": (3,), "ignore_eos": True,
    "seed": 1, "n": 2, "logprobs": 0, "choices": ("a", "b"), "regex": "a+", "json_schema": "{}", "json_whitespace": True, "reasoning": "off", "reasoning_budget": 5, "max_repeats": 3, "top_choices": 1,
}  # fmt: skip


def refused(values: dict[str, Any]) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        SamplingParams(**values)
    return str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 1}, {"temperature": 0}, {"temperature": 5.0}, {"top_p": 1}, {"top_k": 0}, {"min_p": 1.0},
        {"presence_penalty": -2.0}, {"frequency_penalty": 2.0}, {"seed": -(2**63)}, {"seed": 2**63 - 1},
        {"n": 1024}, {"logprobs": 0}, {"logprobs": MAX_LOGPROBS}, {"choices": ("a", "b")}, {"regex": "a"},
        {"json_schema": "{}"}, {"n": 2, "logprobs": 3}, {"regex": "a", "n": 2, "logprobs": 0},
        {"json_schema": "{}", "stop_token_ids": (1,)}, {"choices": ("a", "b"), "temperature": 1.0},
    ],
)  # fmt: skip
def test_values_at_their_limits_and_allowed_combinations_are_accepted(values):
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5"),
        ({"temperature": -0.1}, "temperature must be at least 0, not -0.1"),
        ({"temperature": math.nan}, "temperature must be a number, not nan"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, not 1.1"),
        ({"top_k": -2}, "top_k must be at least 0, not -2"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1, not 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, not 0.0"),
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2, not 2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be between -2 and 2, not -2.5"),
        ({"stop": ("",)}, "stop must be texts that are not empty, not ''"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must be token ids, not -1"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, not 1"),
        ({"seed": 2**63}, "seed must be a 64-bit number, not 9223372036854775808"),
        ({"n": 0}, "n must be between 1 and 1024, not 0"),
        ({"logprobs": -1}, "logprobs must be between 0 and 1000, not -1"),
        ({"logprobs": 1001}, "logprobs must be between 0 and 1000, not 1001"),
        ({"choices": ("a",)}, "choices must be two or more different texts, not 'a'"),
        ({"choices": ("a", "b", "b")}, "choices must be two or more different texts, and 'b' is there twice"),
        ({"choices": ("a" * 1000,)}, f"choices must be two or more different texts, not '{'a' * 199}…"),
        ({"choices": ("a", "")}, "choices must be texts that are not empty, not 'a', ''"),
        ({"regex": ""}, "regex must be text that is not empty, not ''"),
        ({"json_schema": ""}, "json_schema must be text that is not empty, not ''"),
        ({"json_schema": [1]}, "json_schema must be an object, or its JSON as text, not [1]"),
        ({"json_schema": {"const": {1}}}, "json_schema is not JSON: Object of type set is not JSON serializable"),
        ({"stop": 5.5}, "stop must be text or a list of texts, not 5.5"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a whole number or a list of them, not ['a']"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(values, message):
    assert refused(values) == message


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"stop": ["0"]}, {"stop": ("0",)}),
        ({"stop": "0"}, {"stop": ("0",)}),
        ({"stop": None, "stop_token_ids": None, "choices": None}, {"stop": (), "stop_token_ids": (), "choices": ()}),
        ({"stop_token_ids": 22}, {"stop_token_ids": (22,)}),
        ({"stop_token_ids": np.array([22, 23])}, {"stop_token_ids": (22, 23)}),
        ({"choices": ["yes", "no"]}, {"choices": ("yes", "no")}),
        ({"json_schema": {"b": 1, "a": 2}}, {"json_schema": '{"b": 1, "a": 2}'}),
        ({"json_schema": {}}, {"json_schema": "{}"}),
        ({"max_tokens": np.int64(3), "temperature": np.float32(0.5)}, {"max_tokens": 3, "temperature": 0.5}),
        ({"max_tokens": 3.0, "temperature": 1}, {"max_tokens": 3, "temperature": 1.0}),
        ({"max_tokens": Decimal(3), "temperature": Decimal("0.50")}, {"max_tokens": 3, "temperature": 0.5}),
        ({"top_k": -1}, {"top_k": 0}),
    ],
)  # fmt: skip
def test_values_of_natural_types_are_converted_and_have_the_same_digest(values, kept):
    params, same = SamplingParams(**values), SamplingParams(**kept)
    assert {name: (type(getattr(params, name)), getattr(params, name)) for name in kept} == {
        name: (type(value), value) for name, value in kept.items()
    }
    assert (params, hash(params), params.digest()) == (same, hash(same), same.digest())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("choices", "regex"), "choices cannot be combined with regex"),
        (("choices", "json_schema"), "choices cannot be combined with json_schema"),
        (("regex", "json_schema"), "regex cannot be combined with json_schema"),
        (("choices", "n"), "choices cannot be combined with n"),
        (("regex", "stop"), "regex cannot be combined with stop"),
        (("json_schema", "stop"), "json_schema cannot be combined with stop"),
        (("regex", "ignore_eos"), "regex cannot be combined with ignore_eos"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(names, message):
    assert refused({name: OTHERS[name] for name in names}) == message


def test_only_a_regex_and_a_schema_are_constraints():
    constrained = {name for name, value in OTHERS.items() if SamplingParams(**{name: value}).constrained}
    assert constrained == {"regex", "json_schema"}


def test_a_rows_values_replace_the_commands_except_nulls():
    command = SamplingParams(max_tokens=9, temperature=0.5, n=2, logprobs=1)
    merged = command.merged({"max_tokens": 3, "temperature": None, "n": 4.0, "logprobs": 0, "top_p": 1, "stop": "x"})
    assert merged == SamplingParams(max_tokens=3, temperature=0.5, n=4, logprobs=0, top_p=1.0, stop=("x",))
    assert isinstance(merged.n, int)
    assert isinstance(merged.top_p, float)
    assert command.merged({}) == command


@pytest.mark.parametrize("command", [{"choices": ("a", "b")}, {"regex": "a+"}, {"json_schema": "{}"}])
@pytest.mark.parametrize("row", [{"choices": ["x", "y"]}, {"regex": "x"}, {"json_schema": '{"type": "null"}'}])
def test_a_rows_constraint_replaces_the_commands(command, row):
    expected = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    assert SamplingParams(**command).merged(row) == SamplingParams(**expected)


@pytest.mark.parametrize(
    ("command", "row", "message"),
    [
        ({}, {"top_q": 1}, "unknown parameter 'top_q'"),
        ({}, {"n": 0}, "n must be between 1 and 1024, not 0"),
        ({}, {"choices": "yes"}, "choices must be two or more different texts, not 'yes'"),
        ({}, {"regex": "a", "choices": ["a", "b"]}, "choices cannot be combined with regex"),
        ({"n": 2}, {"choices": ["a", "b"]}, "choices cannot be combined with n"),
        ({"stop": ("x",)}, {"regex": "a"}, "regex cannot be combined with stop"),
    ],
)
def test_an_unsupported_parameter_fails_its_row(command, row, message):
    with pytest.raises(RowError) as caught:
        SamplingParams(**command).merged(row)
    assert (caught.value.type, caught.value.message) == ("unsupported_parameter", message)


def test_the_digest_differs_with_every_parameter_and_with_nothing_else():
    assert OTHERS.keys() == {f.name for f in fields(SamplingParams)} - {"given"}
    digests = {SamplingParams(**{name: value}).digest() for name, value in OTHERS.items()}
    assert len(digests | {SamplingParams().digest()}) == len(OTHERS) + 1
    assert SamplingParams(n=2, stop=("a",)).digest() == SamplingParams(stop=("a",), n=2).digest()
    assert SamplingParams(choices=("a", "b")).digest() != SamplingParams(choices=("b", "a")).digest()
    assert len(SamplingParams().digest()) == 16


def test_given_values_take_precedence_over_the_models_defaults():
    model = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 16_384}
    assert SamplingParams().completed(model) == SamplingParams(**model)
    assert SamplingParams(temperature=0.0).completed(model) == SamplingParams(**model | {"temperature": 0.0})
    assert SamplingParams(max_tokens=None).completed(model).max_tokens == 16_384
    row = SamplingParams(top_p=1.0).merged({"temperature": 0})
    assert row.given == ("temperature", "top_p")
    assert row.completed(model) == SamplingParams(max_tokens=16_384)
    assert SamplingParams().completed(model).given == ()
    assert SamplingParams(seed=0) == SamplingParams()
    assert SamplingParams(seed=0).digest() == SamplingParams().digest()
