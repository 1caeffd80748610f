"""Texts that are scored after a prompt: labels, completions, and how urgent a row is."""

import pytest

from batchgen.errors import UsageError
from batchgen.request import row_digest
from batchgen.result import Score
from batchgen.sampling_params import SamplingParams


def one(tools, columns, **options):
    (out,) = tools.builder(**options).build(tools.rows(columns))
    return out


def plain(tools, text):
    return tools.builder()._encoder.encode([text], special=False)[0].tolist()


def test_labels_have_the_tokens_of_their_text_alone(tools):
    draft = one(tools, {"prompt": "a"}, sampling=SamplingParams(choices=("yes", "no")))
    assert [t.tolist() for t in draft.texts] == [plain(tools, "yes"), plain(tools, "no")]


def test_labels_one_of_which_begins_another_end_with_the_end_token(tools):
    b = tools.builder(sampling=SamplingParams(choices=("no", "yes", "nothing", "n")))
    (draft,) = b.build(tools.rows({"prompt": "a"}))
    end = b._text.eos_token_ids[0]
    want = [[*plain(tools, text), end] for text in ("no", "yes", "nothing", "n")]
    assert [t.tolist() for t in draft.texts] == want


def test_a_row_s_own_labels_replace_those_of_the_command(tools):
    draft = one(
        tools, {"prompt": "a", "sampling_params": {"choices": ["x", "y"]}}, sampling=SamplingParams(regex="[0-9]")
    )
    assert (draft.params.choices, draft.params.regex, len(draft.texts)) == (("x", "y"), None, 2)


def test_the_digest_of_a_labelled_row_is_that_of_its_tokens_and_parameters(tools):
    draft = one(tools, {"prompt": "a"}, sampling=SamplingParams(choices=("yes", "no")))
    assert draft.digest == row_digest(draft.tokens, draft.params)


def test_a_completion_is_scored_as_its_text_alone(tools):
    drafts = tools.builder(score=True).build(
        tools.rows({"prompt": "a", "completion": " b c"}, {"prompt": "a", "completion": "d"})
    )
    assert [[t.tolist() for t in d.texts] for d in drafts] == [[plain(tools, " b c")], [plain(tools, "d")]]
    assert drafts[0].digest == row_digest(drafts[0].tokens, drafts[0].params, drafts[0].texts) != drafts[1].digest


def test_an_empty_completion_is_certain(tools):
    result = one(tools, {"prompt": "abc", "completion": ""}, score=True)
    assert (result.text, result.finish_reason, result.score) == (None, None, Score(0.0, 0, True))
    assert result.prompt_tokens == len("abc") + 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "a"}, "column 'answer' is missing"),
        ({"prompt": "a", "answer": None}, "column 'answer' must be text, not null"),
        ({"prompt": "a", "answer": 5}, "column 'answer' must be text, not a number"),
    ],
)
def test_a_row_without_a_text_to_score_fails_alone(tools, columns, message):
    result = one(tools, columns, score=True, completion_column="answer")
    assert (result.error_type, result.error_message) == ("invalid_row", message)


def test_a_column_that_no_row_has_is_wrong_use(tools):
    for options, option, name in (
        ({"score": True}, "--score", "completion"),
        ({"priority_column": "urgency"}, "--priority-column", "urgency"),
    ):
        with pytest.raises(UsageError) as e:
            tools.builder(**options).check_columns(tools.rows({"prompt": "a"}))
        assert str(e.value) == f"no row has the column {name!r} of {option}; the input has 'prompt'"


@pytest.mark.parametrize(
    ("params", "option"),
    [
        ({"choices": ("a", "b")}, "choices"), ({"regex": "a"}, "regex"), ({"json_schema": "{}"}, "json-schema"),
        ({"n": 2}, "n"), ({"logprobs": 0}, "logprobs"),
    ],
)  # fmt: skip
def test_scores_go_with_nothing_that_is_generated(tools, params, option):
    with pytest.raises(UsageError) as e:
        tools.builder(score=True, sampling=SamplingParams(**params))
    assert str(e.value) == f"--score cannot be combined with --{option}; leave one of them out"
    own = {name: list(v) if isinstance(v, tuple) else v for name, v in params.items()}
    result = one(tools, {"prompt": "a", "completion": "b", "sampling_params": own}, score=True)
    name = option.replace("-", "_")
    assert (result.error_type, result.error_message) == (
        "unsupported_parameter", f"{name} cannot be combined with --score",
    )  # fmt: skip


def test_a_prompt_that_leaves_no_room_for_the_text_is_too_long(tools):
    b = tools.builder(score=True, bos=False, context=8)
    fits, too_long, empty = b.build(
        tools.rows(
            {"prompt": "abcde", "completion": "xyz"},
            {"prompt": "abcdef", "completion": "xyz"},
            {"prompt": "abcdefgh", "completion": ""},
        )
    )
    assert (len(fits.tokens), len(fits.texts[0]), fits.max_tokens) == (5, 3, 0)
    assert tools.error_of(too_long) == (
        "prompt_too_long",
        "the prompt has 6 tokens, and the model's context of 8 tokens must hold it and the text to score, of 3 tokens",
    )
    assert empty.score == Score(0.0, 0, True)


def test_a_prompt_that_leaves_no_room_for_the_longest_label_is_too_long_or_cut(tools):
    sampling = SamplingParams(choices=("x", "xyz"), max_tokens=1)  # with the end token: 2 and 4 tokens
    row = {"prompt": "abcdef"}
    assert tools.error_of(one(tools, row, bos=False, context=8, sampling=sampling)) == (
        "prompt_too_long",
        "the prompt has 6 tokens, and the model's context of 8 tokens must hold it and the longest choice, of 4 tokens",
    )
    for way, left in (("truncate-left", "cdef"), ("truncate-right", "abcd")):
        draft = one(tools, row, bos=False, context=8, sampling=sampling, on_long_prompt=way)
        assert (tools.text_of(draft), draft.truncated) == (left, True)
        assert (
            one(tools, row, bos=False, context=4, sampling=sampling, on_long_prompt=way).error_type == "prompt_too_long"
        )


def test_a_prompt_is_cut_to_leave_room_for_the_text(tools):
    b = tools.builder(score=True, on_long_prompt="truncate-left")
    context = b._text.context_length
    (draft,) = b.build(tools.rows({"prompt": "a" * 5 * context, "completion": "bcd"}))
    assert draft.truncated
    assert len(draft.tokens) + len(draft.texts[0]) == context


@pytest.mark.parametrize(("value", "priority"), [(3, 3.0), (-1.5, -1.5), (None, 0.0), ("", 0.0), ("2", 2.0)])
def test_a_priority_is_a_number_and_0_where_there_is_none(tools, value, priority):
    assert one(tools, {"prompt": "a", "p": value}, priority_column="p").priority == priority


@pytest.mark.parametrize("value", ["soon", True, float("nan"), [1]])
def test_a_priority_that_is_no_number_fails_its_row(tools, value):
    result = one(tools, {"prompt": "a", "p": value}, priority_column="p")
    assert (result.error_type, result.error_message) == ("invalid_row", "column 'p' must be a number")
