"""Texts that are scored after a prompt (labels and completions), and a row's priority."""

from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.config import PromptConfig
from batchgen.errors import UsageError
from batchgen.prompts import PromptBuilder
from batchgen.records.output import parts_asked
from batchgen.request import row_digest
from batchgen.result import Score
from batchgen.sampling_params import SamplingParams
from support.params import examples


def plain(tools, text):
    return tools.builder()._encoder.encode([text], special=False)[0].tolist()


def test_a_completion_is_tokenized_separately_from_the_prompt(tools):
    drafts = tools.builder(score=True).build(
        tools.rows({"prompt": "a", "completion": " b c"}, {"prompt": "a", "completion": "d"})
    )
    assert [[t.tolist() for t in d.texts] for d in drafts] == [[plain(tools, " b c")], [plain(tools, "d")]]
    assert drafts[0].key == row_digest(drafts[0].tokens, drafts[0].params, drafts[0].texts) != drafts[1].key


def test_an_empty_completion_is_certain(tools):
    result = tools.one({"prompt": "abc", "completion": ""}, score=True)
    assert (result.text, result.finish_reason, result.score) == (None, None, Score(0.0, 0, True))
    assert result.prompt_tokens == len("abc") + 1


def test_a_prompt_that_leaves_no_room_for_the_text_is_too_long(tools):
    b = tools.builder(score=True, bos=False, context=8)
    fits, too_long, empty = b.build(
        tools.rows(
            {"prompt": "abcdef", "completion": "xyz"},  # the last token of a text is never run
            {"prompt": "abcdefg", "completion": "xyz"},
            {"prompt": "abcdefgh", "completion": ""},
        )
    )
    assert (len(fits.tokens), len(fits.texts[0]), fits.max_tokens) == (6, 3, 0)
    assert tools.error_of(too_long) == (
        "prompt_too_long",
        "the prompt has 7 tokens, and the model's context of 8 tokens must hold it and the text to score, of 3 tokens, without its last one",
    )
    assert empty.score == Score(0.0, 0, True)


def test_a_prompt_that_leaves_no_room_for_the_longest_label_is_refused_or_shortened(tools):
    sampling = SamplingParams(choices=("x", "xyz"), max_tokens=1)  # with the end token: 2 and 4 tokens
    row = {"prompt": "abcdef"}
    assert tools.error_of(tools.one(row, bos=False, context=8, sampling=sampling)) == (
        "prompt_too_long",
        "the prompt has 6 tokens, and the model's context of 8 tokens must hold it and the longest choice, of 4 tokens",
    )
    for way, left in (("truncate-left", "cdef"), ("truncate-right", "abcd")):
        draft = tools.one(row, bos=False, context=8, sampling=sampling, on_long_prompt=way)
        assert (tools.text_of(draft), draft.truncated) == (left, True)
        assert (
            tools.one(row, bos=False, context=4, sampling=sampling, on_long_prompt=way).error_type == "prompt_too_long"
        )


@pytest.mark.parametrize(("value", "priority"), [(3, 3.0), (-1.5, -1.5), (None, 0.0), ("", 0.0), ("2", 2.0)])
def test_a_priority_is_a_number_and_0_by_default(tools, value, priority):
    assert tools.one({"prompt": "a", "p": value}, priority_column="p").priority == priority


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (("hi", " hi"), "the choices 'hi' and ' hi' have the same tokens"),
        (
            ("a", "\ud800"),
            "the choice '\\ud800': it cannot be tokenized: character 0 is half of a surrogate pair (U+D800)",
        ),
    ],
)
def test_labels_with_equal_or_no_tokens_are_a_usage_error_or_fail_their_row(tools, choices, message):
    def stripping():
        from tokenizers import normalizers

        tokenizer = tools.byte_tokenizer()
        tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
        return tools.loaded(tokenizer)

    row = {"prompt": "p", "sampling_params": {"choices": list(choices)}}
    (failed,) = PromptBuilder(stripping(), PromptConfig(), SamplingParams()).build(tools.rows(row))
    assert (failed.error_type, failed.error_message) == ("unsupported_parameter", message)
    with pytest.raises(UsageError) as e:
        PromptBuilder(stripping(), PromptConfig(), SamplingParams(choices=choices))
    assert str(e.value) == f"--choices: {message}"
    (blank,) = PromptBuilder(stripping(), PromptConfig(), SamplingParams()).build(
        tools.rows({"prompt": "p", "sampling_params": {"choices": ["a", " "]}})
    )
    assert tools.error_of(blank) == ("unsupported_parameter", "the choice ' ' has no tokens")


def test_rows_of_the_same_labels_hold_their_tokens_once(tools):
    """So the memory of waiting rows does not grow with the number of labels."""
    builder = tools.builder(sampling=SamplingParams(choices=("a", "b", "c")))
    rows = [{"prompt": f"{i}", "sampling_params": {"seed": i} if i % 2 else {"choices": ["x", "y"]}} for i in range(6)]
    requests = [request for part in (rows[:3], rows[3:]) for request in builder.build(tools.rows(*part))]
    assert len({id(request.texts) for request in requests}) == 2


def test_labels_of_which_one_begins_another_need_an_end_token(tools):
    tokenizer = replace(tools.loaded(tools.byte_tokenizer()), eos_token_ids=())
    sampling = SamplingParams(choices=("no", "none", "yes"))
    with pytest.raises(UsageError) as e:
        PromptBuilder(tokenizer, PromptConfig(), sampling)
    assert str(e.value) == (
        "--choices: the tokens of the choice 'no' begin those of 'none', and the model has no end token that would tell them apart"
    )
    assert len(PromptBuilder(tokenizer, PromptConfig(), SamplingParams(choices=("no", "yes"))).build([])) == 0


def test_labels_end_with_the_tokenizers_end_token_if_the_model_has_several(tools):
    plain = tools.byte_tokenizer()
    for ends, end in (((2, 1), 1), ((2, 3), 2)):
        tokenizer = replace(tools.loaded(plain), eos_token_ids=ends)
        builder = PromptBuilder(tokenizer, PromptConfig(), SamplingParams(choices=("a", "ab")))
        (draft,) = builder.build(tools.rows({"prompt": "p"}))
        assert [t.tolist() for t in draft.texts] == [[*tools.byte_ids("a"), end], [*tools.byte_ids("ab"), end]]


def test_a_scored_text_with_a_token_beyond_the_vocabulary_fails_its_row(tools):
    tokenizer = tools.loaded(tools.byte_tokenizer(), vocab_size=100)
    row = {"prompt": "P", "completion": "z"}
    (failed,) = PromptBuilder(tokenizer, PromptConfig(score=True), SamplingParams()).build(tools.rows(row))
    assert tools.error_of(failed) == (
        "invalid_row", "column 'completion': it has token 126, and the model knows 100 tokens",
    )  # fmt: skip


letters = st.text("ab", min_size=1, max_size=4)


@settings(max_examples=examples(15, 60))
@given(st.lists(letters, min_size=2, max_size=5, unique=True))
def test_no_labels_tokens_are_a_prefix_of_anothers(tools, choices):
    (draft,) = tools.builder(sampling=SamplingParams(choices=tuple(choices))).build(tools.rows({"prompt": "p"}))
    begins = any(a != b and b.startswith(a) for a in choices for b in choices)
    assert [t.tolist() for t in draft.texts] == [tools.byte_ids(c) + [1] * begins for c in choices]


def test_the_columns_tell_which_parts_results_may_have(tools):
    def parts(types=None, sampling=None, **options):
        asked = parts_asked(PromptConfig(**options), sampling or SamplingParams(), None)
        return {*asked, *tools.builder(sampling=sampling, **options).optional_results(types or {})}

    assert parts() == set()
    assert parts(score=True) == {"score"}
    assert parts(sampling=SamplingParams(n=2)) == parts(sampling=SamplingParams(logprobs=0)) == {"choices"}
    assert parts(sampling=SamplingParams(choices=("a", "b"))) == {"choice_probs"}
    assert parts(row_params=("n",)) == parts(row_params=("logprobs", "seed")) == {"choices"}
    assert parts(row_params=("choices",)) == {"choice_probs"}
    assert parts(row_params=("json_schema",)) == {"valid"}  # asked of every row
    assert parts({"sampling_params": pa.string()}) == {"choices", "choice_probs", "valid"}
    assert parts({"sampling_params": pa.string(), "valid": pa.string()}) == {"choices", "choice_probs"}
    assert parts({"body": pa.struct([("response_format", pa.string())])}) == {"valid"}
    assert parts({"sampling_params": pa.struct([("seed", pa.int64())]), "other": pa.string()}) == set()
    assert parts({"body": pa.struct([("n", pa.int64()), ("guided_choice", pa.list_(pa.string()))])}) == {
        "choices", "choice_probs",
    }  # fmt: skip
