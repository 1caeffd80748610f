"""Texts are tokenized in batches."""

from __future__ import annotations

import pytest

from batchgen.prompts import encoding
from batchgen.prompts.encoding import Encoder, EncoderLimits


def test_texts_go_to_the_tokenizer_in_large_batches(tools):
    limits = EncoderLimits(batch_texts=3, batch_characters=10)
    texts = ["a", "b", "c", "d", "0123456789012", "e", "012345678", "f", "g"]
    assert [list(batch) for batch in encoding._text_batches(texts, limits)] == [
        ["a", "b", "c"], ["d"], ["0123456789012"], ["e", "012345678"], ["f", "g"],
    ]  # fmt: skip
    out = Encoder(tools.byte_tokenizer(), limits=limits).encode(texts, special=False)
    assert [a.tolist() for a in out] == [tools.byte_ids(text) for text in texts]
    assert Encoder(tools.byte_tokenizer()).encode([], special=True) == []


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_that_no_text_caused_is_raised_and_fails_no_row(tools, monkeypatch, error):
    encoder = Encoder(tools.byte_tokenizer())

    def broken(texts, special):
        raise error

    monkeypatch.setattr(encoder, "_encode", broken)
    with pytest.raises(error):
        encoder.encode(["a"], special=False)
