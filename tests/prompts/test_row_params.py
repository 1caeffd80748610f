"""A row's own sampling parameters: where they may stand, which value wins, and what is refused."""

from __future__ import annotations

from datetime import date

import pytest

from batchgen.errors import UsageError
from batchgen.sampling_params import SamplingParams


def params(tools, *columns, sampling=None, **options):
    out = tools.builder(sampling=sampling, **options).build(tools.rows(*({"prompt": "a"} | c for c in columns)))
    return [d.params if hasattr(d, "params") else tools.error_of(d) for d in out]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (5, ("invalid_row", "column 'sampling_params' must be an object, not a number")),
        ([1], ("invalid_row", "column 'sampling_params' must be an object, not a list")),
        ("{x", ("invalid_row", "column 'sampling_params' is text that is not JSON")),
        ("[1]", ("invalid_row", "column 'sampling_params' must be an object, not a list")),
        ({"max_tokens": 0}, ("unsupported_parameter", "max_tokens must be at least 1, not 0")),
        ({"max_tokens": -3}, ("unsupported_parameter", "max_tokens must be at least 1, not -3")),
        ({"temperature": "hot"}, ("unsupported_parameter", "temperature must be a number, not 'hot'")),
        ({"temprature": 1}, ("unsupported_parameter", "unknown parameter 'temprature'")),
        ({"n": 0}, ("unsupported_parameter", "n must be between 1 and 1024, not 0")),
        ({"logprobs": 2000}, ("unsupported_parameter", "logprobs must be between 0 and 1000, not 2000")),
        ({"choices": []}, ("unsupported_parameter", "choices must be two or more different texts, not an empty list")),
        ({"choices": ["a"]}, ("unsupported_parameter", "choices must be two or more different texts, not 'a'")),
        ({"choices": ["a", "b"], "n": 2}, ("unsupported_parameter", "choices cannot be combined with n")),
        ({"regex": "a", "json_schema": {}}, ("unsupported_parameter", "regex cannot be combined with json_schema")),
        ({"regex": "a", "stop": "b"}, ("unsupported_parameter", "regex cannot be combined with stop")),
        ({"top_p": 10**400}, ("unsupported_parameter", f'a number is too large: {{"top_p": 1{"0" * 69}…')),
        (
            {"json_schema": {"const": date(2026, 1, 2)}},
            ("unsupported_parameter", "json_schema is not JSON: Object of type date is not JSON serializable"),
        ),
        ({"n": True}, ("unsupported_parameter", "n must be a whole number, not True")),
        ({"top_logprobs": 3}, ("unsupported_parameter", "top_logprobs needs logprobs: true")),
        ({"logit_bias": {"5": 1}}, ("unsupported_parameter", 'logit_bias is not supported: {"5": 1}')),
    ],
)
def test_parameters_that_cannot_be_met_fail_only_their_row(tools, value, error):
    assert params(tools, {"sampling_params": value}, {}) == [error, SamplingParams()]


DEEP = "[" * 100_000  # deep enough for a JSON parser to give up


@pytest.mark.parametrize(
    "columns",
    [
        {"sampling_params": DEEP},
        {"seed": DEEP},
        {"choices": DEEP},
        {"messages": DEEP},
        {"url": "/v1/completions", "body": DEEP},
    ],
)
def test_json_text_that_is_nested_too_deeply_fails_only_its_row(tools, columns):
    options = {"row_params": ("seed", "choices"), "chat_template": tools.CHATML}
    rows = tools.rows({"prompt": "a"} | columns if "messages" not in columns else columns, {"prompt": "a"})
    failed, other = tools.builder(**options).build(rows)
    assert tools.error_of(failed) == ("invalid_row", "the row has a value that is nested too deeply")
    assert other.params == SamplingParams()


def test_a_column_that_is_not_a_parameter_is_refused(tools):
    with pytest.raises(UsageError) as e:
        tools.builder(row_params=("temprature",))
    assert str(e.value) == (
        "--row-params 'temprature' is not a sampling parameter; use choices, frequency_penalty, ignore_eos, json_schema, "
        "json_whitespace, logprobs, max_repeats, max_tokens, min_p, n, presence_penalty, reasoning, reasoning_budget, regex, repetition_penalty, seed, stop, stop_token_id, "
        "stop_token_ids, temperature, top_choices, top_k, top_p"
    )


def test_unnamed_columns_called_like_parameters_are_only_carried_along_with_one_note(tools):
    b = tools.builder(row_params=("seed",))
    for _ in range(2):
        drafts = b.build(
            tools.rows({"prompt": "a", "top_p": 0.5, "seed": 1}, {"prompt": "a", "temperature": 1.0, "n": 3})
        )
        assert [d.params for d in drafts] == [SamplingParams(seed=1), SamplingParams()]
    assert b.notes == [
        "columns 'n', 'temperature', 'top_p' are copied to the output and not used as sampling parameters; "
        "name them in --row-params to use them"
    ]
    b = tools.builder(prompt_column="stop")
    b.build(tools.rows({"stop": "a", "seed": 1}))
    assert b.notes == [
        "column 'seed' is copied to the output and not used as sampling parameter; name it in --row-params to use it"
    ]


def test_equal_prompts_with_equal_parameters_have_equal_digests(tools):
    a, b, c = tools.builder(row_params=("seed",)).build(
        tools.rows(
            {"prompt": "a", "seed": 1}, {"prompt": "a", "sampling_params": {"seed": 1}}, {"prompt": "a", "seed": 2}
        )
    )
    assert a.key == b.key != c.key
