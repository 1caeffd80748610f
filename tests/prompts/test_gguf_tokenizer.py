"""The tokenizer of a GGUF file: texts have the tokens that the model was trained with, and come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.prompts import LoadedTokenizer, load_tokenizer
from batchgen.prompts.encoding import Encoder
from support.gguf import write_vocabulary

pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of each other
UNKNOWN, CONTROL, WRITTEN, BYTE = 2, 3, 4, 6
LETTERS = list(bytes_to_unicode().values())
"""The letters that stand for bytes."""
BYTES = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
WORDS = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *BYTES, "▁", "▁▁", "▁a", "a", "b", "ab"]
"""A vocabulary of sentencepiece's kind. Tokens are likelier than those before them."""


def by_scores(file: Path, *more: Any, **keys: Any) -> LoadedTokenizer:
    tokens = [*WORDS, *more]
    scores = [float(i) for i in range(len(tokens))]
    write_vocabulary(file, tokens, model="llama", pre="default", scores=scores, **keys)
    return load_tokenizer(ModelConfig(model=file))


def by_merges(file: Path, *more: Any, merges: tuple[str, ...] = (), **keys: Any) -> LoadedTokenizer:
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*LETTERS, *merged, *more]
    write_vocabulary(file, tokens, model="gpt2", merges=list(merges) or ["a a"], **keys)
    return load_tokenizer(ModelConfig(model=file))


def tokens_of(tokenizer: LoadedTokenizer, text: str, *, special: bool = False) -> list[str]:
    (ids,) = Encoder(tokenizer.hf_tokenizer).encode([text], special=special)
    found: list[str] = tokenizer.hf_tokenizer.convert_ids_to_tokens(ids.tolist())
    return found


def test_every_space_of_a_text_is_a_token_beside_the_one_that_begins_it(tmp_path):
    tokenizer = by_scores(tmp_path / "m.gguf")
    for text, expected in (
        ("ab", ["▁", "ab"]), (" ab", ["▁▁", "ab"]), ("  a", ["▁▁", "▁a"]), (" ", ["▁▁"]), ("a<s>b", ["▁a", "<s>", "▁", "b"]), ("é", ["▁", "<0xC3>", "<0xA9>"]),
    ):  # fmt: skip
        assert tokens_of(tokenizer, text) == expected
    for text in ("ab", " ab", "   ", "é \n🙂"):
        assert tokenizer.decode(tokenizer.hf_tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    plain = by_scores(tmp_path / "plain.gguf", add_space_prefix=False)
    assert [tokens_of(plain, text) for text in ("ab", " a")] == [["ab"], ["▁a"]]
    assert plain.decode(plain.hf_tokenizer(" a", add_special_tokens=False)["input_ids"]) == " a"


def test_gemma_4_merges_over_spaces_and_falls_back_to_bytes(tmp_path):
    tokens = [*WORDS, "\n", "\n\n", ("<|tool_call>", WRITTEN)]
    merges = ["a b", "▁ ▁", "▁ a", "\n \n"]
    keys = {
        "merges": merges,
        "scores": [-1000.0] * len(tokens),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "add_space_prefix": False,
    }
    write_vocabulary(tmp_path / "m.gguf", tokens, architecture="llama", model="gemma4", add_bos_token=True, **keys)
    tokenizer = load_tokenizer(ModelConfig(model=tmp_path / "m.gguf"))
    for text, expected in (
        ("ab", ["ab"]), ("  ab", ["▁▁", "ab"]), (" a\n\nb", ["▁a", "\n\n", "b"]), ("é<|tool_call>b", ["<0xC3>", "<0xA9>", "<|tool_call>", "b"]),
    ):  # fmt: skip
        assert tokens_of(tokenizer, text) == expected
        assert tokenizer.decode(tokenizer.hf_tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokens_of(tokenizer, "b", special=True) == ["<s>", "b"]


def test_a_text_begins_with_the_token_that_the_file_or_the_kind_of_its_tokenizer_asks_for(tmp_path):
    begin = ("<｜begin▁of▁sentence｜>", CONTROL)  # letters that stand for no byte
    cases = (
        (by_scores(tmp_path / "1.gguf"), "<s>"),
        (by_scores(tmp_path / "2.gguf", add_bos_token=False), None),
        (by_merges(tmp_path / "3.gguf", begin, pre="deepseek-llm", bos_token_id=256, add_bos_token=True), begin[0]),
        (by_merges(tmp_path / "4.gguf", begin, pre="llama-bpe", bos_token_id=256), begin[0]),
        (by_merges(tmp_path / "5.gguf", begin, pre="llama-bpe", bos_token_id=256, add_bos_token=False), None),
        (by_merges(tmp_path / "6.gguf", begin, pre="qwen2", bos_token_id=256), None),
    )
    for tokenizer, first in cases:
        begun = tokens_of(tokenizer, "", special=True)
        assert begun == ([] if first is None else [first])
        assert len(tokenizer.hf_tokenizer) == tokenizer.vocab_size
        if first is not None:
            assert tokens_of(tokenizer, f"{first}a", special=True) == tokens_of(tokenizer, "a", special=True)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a 123", ["a", "Ġ", "123"]),
        ("starcoder", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("smollm", "a½", ["a", "Â½"]),
        ("falcon", "1231", ["123", "1"]),
        ("llama-bpe", "1231", ["123", "1"]),
        ("qwen2", "12", ["1", "2"]),
        ("qwen2", "e\u0301", ["Ã©"]),  # composed first
        ("deepseek-llm", "12", ["1", "2"]),
        ("deepseek-coder", "12", ["1", "2"]),
        ("tekken", "xyXY", ["xy", "XY"]),
        ("gpt-4o", "xy's", ["xy's"]),
        ("glm4", "1231", ["123", "1"]),
        ("command-r", "12e\u0301", ["1", "2", "Ã©"]),
        ("llama-bpe", "xy's", ["xy", "'s"]),
        ("afmoe", "1231", ["1", "2", "3", "1"]),
        ("afmoe", "x123123½", ["x", "123", "123", "Â½"]),
    ],
)
def test_texts_are_split_as_the_name_in_the_file_says(tmp_path, pre, text, expected):
    merges = ("1 2", "12 3", "x y", "X Y", "xy XY", "Â ½", "a Â½", "Ã ©", "' s", "xy 's")
    tokenizer = by_merges(tmp_path / "m.gguf", merges=merges, pre=pre)
    assert tokens_of(tokenizer, text) == expected


def test_a_word_that_is_a_token_is_that_token_where_merges_are_ignored(tmp_path):
    for pre, expected in (("llama-bpe", ["Việt".encode().decode("latin-1")]), ("gpt-2", None)):
        word = "".join(bytes_to_unicode()[byte] for byte in "Việt".encode())
        found = tokens_of(by_merges(tmp_path / f"{pre}.gguf", word, pre=pre), "Việt")
        assert len(found) == (1 if expected else len(word))


def test_a_letter_that_the_file_has_as_it_is_written_comes_back(tmp_path):
    tokenizer = by_merges(tmp_path / "m.gguf", ("öß", WRITTEN), merges=("Ã ¼",), pre="deepseek-llm")
    text = "Föß Führer ö"
    assert tokens_of(tokenizer, text)[:2] == ["F", "öß"]
    assert tokenizer.decode(tokenizer.hf_tokenizer(text)["input_ids"]) == text


def test_blanks_after_the_special_tokens_of_phi_3_belong_to_them(tmp_path):
    more = (("<|user|>", CONTROL), ("<|endoftext|>", CONTROL))
    for architecture, expected in (
        ("phi3", ["<|user|>", "▁a", "<|endoftext|>", "▁▁"]),
        ("llama", ["<|user|>", "▁", "<0x0A>", "a", "<|endoftext|>", "▁▁"]),
    ):
        tokenizer = by_scores(tmp_path / f"{architecture}.gguf", *more, architecture=architecture)
        assert tokens_of(tokenizer, "<|user|>\na<|endoftext|> ") == expected


def test_a_completion_ends_at_every_token_that_ends_a_turn(tmp_path):
    names = ("<|im_end|>", "<|end|>", "<end_of_turn>", "<|call|>", "<|return|>", "mine")
    first = len(LETTERS)
    ids = {name: first + i for i, name in enumerate(names)}

    def ends(file: str, *kept: str, **keys: Any) -> list[str]:
        more = [(name, CONTROL) if name in kept else (f"unused {name}", CONTROL) for name in names]
        tokenizer = by_merges(tmp_path / file, *more, pre="qwen2", **keys)
        return [names[i - first] for i in tokenizer.eos_token_ids]

    assert ends("a.gguf", *names[:3], eos_token_id=ids["mine"]) == ["mine", "<|im_end|>", "<|end|>", "<end_of_turn>"]
    assert ends("b.gguf", eos_token_id=ids["<|end|>"], eot_token_id=ids["mine"]) == ["<|end|>", "mine"]
    assert ends("c.gguf", *names, eos_token_id=ids["<|return|>"]) == ["<|return|>", "<|im_end|>", "<end_of_turn>", "<|call|>"]  # fmt: skip
    assert ends("d.gguf", "<|im_end|>") == ["<|im_end|>"]
    text = by_merges(tmp_path / "e.gguf", "<|im_end|>", "<|end|>", pre="qwen2", eos_token_id=257)
    assert text.eos_token_ids == (257,)  # the other is no control token


def test_the_templates_of_a_file_are_known_by_their_names(tmp_path):
    one = by_merges(tmp_path / "1.gguf", pre="qwen2", chat_template="one")
    assert one.hf_tokenizer.chat_template == "one"
    templates = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    two = by_merges(tmp_path / "2.gguf", pre="qwen2", chat_template=templates)
    assert two.hf_tokenizer.chat_template == {"default": "one", "tool_use": "two"}


@pytest.mark.parametrize(
    ("architecture", "pre", "message"),
    [
        ("llama", "new-split", "the tokenizer of {} splits texts in the way 'new-split' (tokenizer.ggml.pre), which batchgen does not know; give the model in the format of transformers"),
        ("llama", None, "{} does not say how its tokenizer splits texts (tokenizer.ggml.pre), like files from before May 2024; give a newer file of the model"),
        ("llama", "default", "{} does not say how its tokenizer splits texts (tokenizer.ggml.pre), like files from before May 2024; give a newer file of the model"),
        ("starcoder2", None, None),
    ],
)  # fmt: skip
def test_a_file_whose_way_of_splitting_is_not_known_is_refused(tmp_path, architecture, pre, message):
    file, keys = tmp_path / "m.gguf", {} if pre is None else {"pre": pre}
    if message is None:
        tokenizer = by_merges(file, merges=("1 2",), architecture=architecture, **keys)
        assert tokens_of(tokenizer, "12") == ["1", "2"]
        return
    with pytest.raises(ModelError) as e:
        by_merges(file, architecture=architecture, **keys)
    assert str(e.value) == message.format(file)


def test_a_kind_of_tokenizer_that_is_not_known_is_refused(tmp_path):
    file = tmp_path / "m.gguf"
    write_vocabulary(file, ["a", "b"], model="t5")
    with pytest.raises(ModelError) as e:
        load_tokenizer(ModelConfig(model=file))
    assert str(e.value) == (
        f"the tokenizer of {file} is of the kind 't5' (tokenizer.ggml.model), which batchgen does not know; give the model in the format of transformers"
    )
