"""How a prompt becomes tokens, raw or through a chat template, without repeating special tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.config import PromptConfig
from batchgen.errors import BatchgenError
from batchgen.prompts import PromptBuilder
from batchgen.prompts.encoding import Encoder, _rust_encoder
from batchgen.request import Request
from batchgen.sampling_params import SamplingParams
from support.params import examples
from support.tokenizers_by_hand import OPEN, turn


def test_the_users_chat_template_wins_over_the_models(tools):
    for own in (None, tools.CHATML):
        b = PromptBuilder(
            tools.loaded(tools.byte_tokenizer(chat_template=own)),
            PromptConfig(chat_template="[{{ messages[0].content }}|{{ style }}]", chat_template_kwargs={"style": "x"}),
            SamplingParams(),
        )
        assert b.chat
        assert tools.text_of(b.build(tools.rows({"prompt": "a"}))[0]) == "[a|x]"


def test_a_prompt_of_token_ids_bypasses_the_chat_template_with_a_note(tools):
    b = tools.builder(chat_template=tools.CHATML)
    (chat,) = b.build(tools.rows({"prompt": [5, 0, 9]}))
    assert chat.tokens.tolist() == [5, 0, 9]
    assert b.notes == ["prompts that are token ids do not go through the chat template"]


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
        whole = turn("user", text) + OPEN if chat else text
        ids = tools.byte_ids(whole)
        assert out[i].tokens.tolist() == (ids if chat or ids[:1] == [0] else [0, *ids])


# -- texts and tokens


def test_truncation_and_padding_of_the_tokenizer_file_are_ignored(tools):
    tokenizer = tools.byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=5)
    assert Encoder(tokenizer).encode(["abc"], special=False)[0].tolist() == [101, 102, 103]


def test_a_tokenizer_with_its_own_python_code_is_called_through_that_code(tools):
    plain = tools.byte_tokenizer()

    class Reversed(type(plain)):
        def _encode_plus(self, text, *args, **kwargs):
            return super()._encode_plus([t[::-1] for t in text], *args, **kwargs)

    tokenizer = Reversed(tokenizer_object=plain.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    out = Encoder(tokenizer).encode(["abc", "x\ud800"], special=True)
    assert out[0].tolist() == [0, 103, 102, 101]
    assert out[1].message == "the prompt cannot be tokenized: character 1 is half of a surrogate pair (U+D800)"


def test_a_panic_in_the_tokenizer_fails_only_the_text_that_caused_it(tools, monkeypatch):
    class PanicException(BaseException):
        pass

    encoder = Encoder(tools.byte_tokenizer())
    good = encoder._encode

    def panicking(texts, special):
        if any("boom" in text for text in texts):
            raise PanicException("index out of bounds\nmore")
        return good(texts, special)

    monkeypatch.setattr(encoder, "_encode", panicking)
    out = encoder.encode(["a", "boom", "b"], special=False)
    assert [out[0].tolist(), out[1].message, out[2].tolist()] == [
        [101], "the prompt cannot be tokenized: index out of bounds", [102],
    ]  # fmt: skip


def test_a_tokenizer_that_can_start_no_threads_ends_the_job_and_fails_no_row(tools, monkeypatch):
    class PanicException(BaseException):
        pass

    class Backend:
        def __getattr__(self, name):
            return lambda *_: None

        def encode_batch_fast(self, texts, add_special_tokens):
            raise PanicException("The global thread pool has not been initialized.: ThreadPoolBuildError { … }")

    tokenizer = tools.byte_tokenizer()
    encoder = Encoder(tokenizer)
    monkeypatch.setattr(type(tokenizer), "backend_tokenizer", Backend())
    with pytest.raises(BatchgenError, match=r"cannot start its threads.*; raise the limit"):
        Encoder(tokenizer)
    monkeypatch.setattr(encoder, "_encode", _rust_encoder(tokenizer))
    with pytest.raises(BatchgenError, match="cannot start its threads"):
        encoder.encode(["a", "b"], special=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_that_no_text_caused_is_raised_and_fails_no_row(tools, monkeypatch, error):
    encoder = Encoder(tools.byte_tokenizer())

    def broken(texts, special):
        raise error

    monkeypatch.setattr(encoder, "_encode", broken)
    with pytest.raises(error):
        encoder.encode(["a"], special=False)
