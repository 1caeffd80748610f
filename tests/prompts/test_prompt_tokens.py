"""How a prompt becomes tokens, raw or through a chat template, without repeating special tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.config import PromptConfig
from batchgen.errors import RowError, UsageError
from batchgen.prompts import PromptBuilder
from batchgen.records.rows import Row
from batchgen.request import Request, row_digest
from batchgen.sampling_params import SamplingParams
from support.params import examples


def test_a_raw_prompt_gets_the_tokenizers_special_tokens(tools):
    (draft,) = tools.builder().build(tools.rows({"prompt": "ab"}))
    assert draft.tokens.tolist() == [0, 4 + 97, 4 + 98]
    assert draft.tokens.dtype == np.int32
    assert (draft.row, draft.max_tokens, draft.truncated, draft.params) == (
        0,
        999 - len(draft.tokens) + 1,
        False,
        SamplingParams(),
    )
    assert draft.key == row_digest(draft.tokens, draft.params)


def test_a_sentencepiece_tokenizer_adds_one_bos_too(tools):
    text = tools.loaded(tools.metaspace_tokenizer())
    drafts = PromptBuilder(text, PromptConfig(), SamplingParams()).build(
        tools.rows({"prompt": "hi hi"}, {"prompt": "<s>hi"}, {"prompt": "é"})
    )
    assert [d.tokens.tolist() for d in drafts] == [[1, 263, 263], [1, 263], [1, 259, 3 + 0xC3, 3 + 0xA9]]


def test_an_eos_that_the_tokenizer_appends_is_kept(tools):
    text = tools.loaded(tools.byte_tokenizer(eos=True))
    (draft,) = PromptBuilder(text, PromptConfig(), SamplingParams()).build(tools.rows({"prompt": "<s>a"}))
    assert draft.tokens.tolist() == [0, 101, 1]


def test_a_prompt_without_tokens_is_an_error_row(tools):
    none, some = tools.builder(bos=False).build(tools.rows({"prompt": ""}, {"prompt": "a"}))
    assert tools.error_of(none) == ("empty_prompt", "the prompt has no tokens")
    assert some.tokens.tolist() == [101]


def test_the_users_chat_template_wins_over_the_models(tools):
    for own in (None, tools.CHATML):
        b = PromptBuilder(
            tools.loaded(tools.byte_tokenizer(chat_template=own)),
            PromptConfig(chat_template="[{{ messages[0].content }}|{{ style }}]", chat_template_kwargs={"style": "x"}),
            SamplingParams(),
        )
        assert b.chat
        assert tools.text_of(b.build(tools.rows({"prompt": "a"}))[0]) == "[a|x]"


@pytest.mark.parametrize(
    ("own", "options", "message"),
    [
        (None, {"system": "S"}, "--system needs a chat template, and the model has none; use --chat-template FILE, or --no-chat for raw prompts"),
        (None, {"chat": True}, "--chat needs a chat template, and the model has none; use --chat-template FILE, or --no-chat for raw prompts"),
        (None, {"chat_template_kwargs": {"a": 1}}, "--chat-template-kwargs needs a chat template, and the model has none; use --chat-template FILE, or --no-chat for raw prompts"),
        ({"a": "x", "b": "y"}, {}, "the model has no default among its chat templates (a, b); use --chat-template FILE, or --no-chat for raw prompts"),
        ("x", {"system": "S", "chat": False}, "--system cannot be combined with --no-chat; leave one of them out"),
        ("x", {"chat_template_kwargs": {"messages": []}}, "--chat-template-kwargs cannot set 'messages'; leave it out"),
        ("{% if %}", {}, "the model's chat template is not valid Jinja (line 1): Expected an expression, got 'end of statement block'; correct it, or give another"),
        ("x", {"template": "a\n{{ b"}, "--template is not valid Jinja (line 2): unexpected end of template, expected 'end of print statement'; correct the template"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_met_are_refused_with_the_reason(tools, own, options, message):
    with pytest.raises(UsageError) as e:
        tools.builder(chat_template=own, **options)
    assert str(e.value) == message


def test_a_chat_template_that_is_not_jinja_is_refused(tools):
    with pytest.raises(UsageError) as e:
        PromptBuilder(tools.loaded(tools.byte_tokenizer()), PromptConfig(chat_template="{{ x"), SamplingParams())
    assert str(e.value).startswith("--chat-template is not valid Jinja (line 1): unexpected end of template")


def test_a_raw_prompt_of_token_ids_is_used_unchanged(tools):
    good, large, mixed, negative = tools.builder().build(
        tools.rows({"prompt": [5, 0, 9]}, {"prompt": [5, 260]}, {"prompt": [5, "a"]}, {"prompt": [-1]})
    )
    assert good.tokens.tolist() == [5, 0, 9]
    assert tools.error_of(large) == ("invalid_row", "column 'prompt' must be token ids from 0 to 259; one is 260")
    assert tools.error_of(mixed) == ("invalid_row", "column 'prompt' must be token ids from 0 to 259; one is text")
    assert tools.error_of(negative) == ("invalid_row", "column 'prompt' must be token ids from 0 to 259; one is -1")


def test_a_prompt_of_token_ids_bypasses_the_chat_template_with_a_note(tools):
    b = tools.builder(chat_template=tools.CHATML)
    (chat,) = b.build(tools.rows({"prompt": [5, 0, 9]}))
    assert chat.tokens.tolist() == [5, 0, 9]
    assert b.notes == ["prompts that are token ids do not go through the chat template"]
    (row,) = tools.builder(chat_template=tools.CHATML, system="Be.").build(tools.rows({"prompt": [5, 0, 9]}))
    assert tools.error_of(row) == (
        "invalid_row",
        "column 'prompt' is a list of token ids, which cannot be combined with --system",
    )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": 5}, "column 'prompt' must be text, not a number"),
        ({"prompt": True}, "column 'prompt' must be text, not true or false"),
        ({"prompt": {"a": 1}}, "column 'prompt' must be text, not an object"),
        ({"prompt": ["a"]}, "column 'prompt' must be text, not a list"),
        ({"prompt": [{"role": "user"}]}, "column 'prompt' must be text, not a list (--messages-column prompt takes a list of messages)"),
        ({"prompt": None}, "column 'prompt' is null"),
        ({"prompt": None, "messages": None}, "column 'prompt' is null and column 'messages' is null"),
        ({"prompt": None, "messages": ""}, "column 'prompt' is null and column 'messages' is empty"),
        ({"other": "a"}, "the row has no column 'prompt'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "column 'messages' needs a chat template: the model has none"),
    ],
)  # fmt: skip
def test_a_missing_prompt_or_one_of_the_wrong_type_fails_only_its_row(tools, columns, message):
    bad, good = tools.builder().build(tools.rows(columns, {"prompt": "a"}))
    assert tools.error_of(bad) == ("invalid_row", message)
    assert good.tokens.tolist() == [0, 101]


def test_a_malformed_row_keeps_its_error(tools):
    row = Row(number=7, columns={}, error=RowError("invalid_row", "in.jsonl:8: not JSON"), source="in.jsonl:8")
    (result,) = tools.builder().build([row])
    assert (result.row, tools.error_of(result)) == (7, ("invalid_row", "in.jsonl:8: not JSON"))


def test_a_lone_surrogate_fails_its_own_row_and_no_other(tools):
    columns = [{"prompt": f"row {i}"} for i in range(20)]
    columns[7] = {"prompt": "ab\ud800"}
    out = tools.builder().build(tools.rows(*columns))
    assert tools.error_of(out[7]) == (
        "invalid_row",
        "the prompt cannot be tokenized: character 2 is half of a surrogate pair (U+D800)",
    )
    assert [tools.text_of(d) for i, d in enumerate(out) if i != 7] == [f"<s>row {i}" for i in range(20) if i != 7]


def test_a_token_id_beyond_the_vocabulary_fails_its_row(tools):
    text = tools.loaded(tools.byte_tokenizer(), vocab_size=4 + 98)
    good, bad = PromptBuilder(text, PromptConfig(), SamplingParams()).build(
        tools.rows({"prompt": "a"}, {"prompt": "ab"})
    )
    assert good.tokens.tolist() == [0, 101]
    assert tools.error_of(bad) == ("invalid_row", "the prompt has token 102, and the model knows 102 tokens")


PLAIN = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


@settings(max_examples=examples(15, 60))
@given(st.lists(st.one_of(PLAIN, st.sampled_from(["<s>", "<s>x", "a</s>b", "\ud800"])), max_size=12), st.booleans())
def test_a_row_gets_the_same_tokens_alone_and_among_others(tools, texts, chat):
    b = tools.builder(chat_template=tools.CHATML if chat else None)
    out = b.build(tools.rows(*({"prompt": text} for text in texts)))
    assert len(out) == len(texts)
    for i, text in enumerate(texts):
        if "\ud800" in text:
            assert out[i].error_type == "invalid_row"
            continue
        assert isinstance(out[i], Request)
        whole = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" if chat else text
        ids = tools.byte_ids(whole)
        assert out[i].tokens.tolist() == (ids if chat or ids[:1] == [0] else [0, *ids])
