"""Cuts in a text, for tokenizers as models have them: their parts tokenized alone are the tokens of the whole, whatever the text."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from batchgen.prompts.cuts import Cuts

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CORPUS = (
    "The film is good, and the film's end isn't. Label: positive\n\nText: it was 1234 pages\n  of  <b>code</b>\r\n\tfor x in y:\n",
    "Das ist ein Satz; и ещё один. 例子：这个 电影 很好。\n标签: 好\n e\u0301tude na\u00efve \u00a0 x\u2003y ...  ''' ---",
    "user assistant system You are a helpful assistant. Answer in one word:\n" * 3,
)
CHAT = ("<|im_start|>", "<|im_end|>", "<|im_end|>x", "<s>", "[INST]", "\n\n")
PIECES = [
    *CHAT, "<|im_", "end|>", "<", "|>", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003", "\x85", "\x1c", "\u200b", "a", "Text", ":",
    " film", "'s", "'S", "12", "1", ".", "...", "é", "e\u0301", "\u0301", "中", "文 ", "。", "я", " ю", "\u212a", "ﬁ", "¨", "½", "▁", "Ġ", "😀", "_",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)


def bpe(pre_tokenizer: Any, normalizer: Any = None, *, byte_level: bool = True, **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
    alphabet, special = (pre_tokenizers.ByteLevel.alphabet(), []) if byte_level else ([], ["<unk>"])
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False, special_tokens=special
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def sentencepiece(normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    """A BPE over whole texts: spaces are ▁, and begin most tokens."""
    pieces = ["<unk>", "▁", *"abilmfTextW:.,1", "▁f", "il", "▁film", "fi", "▁▁", "a▁", "xt"]
    merges = [("▁", "f"), ("i", "l"), ("▁f", "il"), ("f", "i"), ("▁", "▁"), ("a", "▁"), ("x", "t")]
    merges.insert(3, ("▁fil", "m"))
    pieces.insert(-5, "▁fil")
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always"),
    ])  # fmt: skip
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
    )
    return tokenizer


def metaspace(scheme: str, *, split: bool = True) -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


KINDS = {
    "gpt2": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2, a space before": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": lambda: bpe(split(LLAMA3), ignore_merges=True),
    "qwen": lambda: bpe(split(LLAMA3), normalizers.NFC()),
    "nfkc": lambda: bpe(split(LLAMA3), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "deepseek": lambda: bpe(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
                pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
                pre_tokenizers.Split(Regex(DEEPSEEK), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "tiktoken": lambda: bpe(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3), "removed", invert=True),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "llama2": lambda: sentencepiece(None, metaspace("first", split=False)),
    "gemma": lambda: sentencepiece(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
    "metaspace first": lambda: bpe(metaspace("first"), byte_level=False, unk_token="<unk>"),
    "metaspace always": lambda: bpe(metaspace("always"), byte_level=False, unk_token="<unk>"),
    "bert": wordpiece,
    "unigram": unigram,
}
ADDED = {
    "none": [],
    "plain": [AddedToken(t, special=True, normalized=False) for t in CHAT],
    "greedy": [AddedToken(t, special=True, normalized=False, lstrip=i % 2 == 0, rstrip=i % 3 == 0) for i, t in enumerate(CHAT)],
    "normalized": [AddedToken("<|im_start|>", normalized=True), AddedToken("film", normalized=True), AddedToken("xt", normalized=True)],
    "normalized, with blanks": [AddedToken("Text film", normalized=True), AddedToken(": ", normalized=True)],
    "rstrip": [AddedToken(t, normalized=True, rstrip=True) for t in (":", "a")],
    "across": [AddedToken(t, normalized=False) for t in ("a film", ":\n", "1 1", "|> ")],
}  # fmt: skip


@cache
def tokenizer_of(kind: str, added: str) -> tuple[Tokenizer, Cuts]:
    tokenizer = KINDS[kind]()
    tokenizer.add_tokens(ADDED[added])
    return tokenizer, Cuts(tokenizer)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("kind", KINDS)
@given(known=TEXTS, more=TEXTS)
@example("Text: a film", " is good")
@example("a\nfilm 1", "1")
@example("<s>a<|im_end|>", "x<|im_end|>")
def test_the_parts_have_the_tokens_of_the_whole(kind, added, known, more):
    tokenizer, cuts = tokenizer_of(kind, added)
    text, place = known + more, cuts.last(known, len(known))
    assert place == cuts.last(text, len(known))
    while place is not None:
        assert ids(tokenizer, text[:place]) + ids(tokenizer, text[place:]) == ids(tokenizer, text)
        place = cuts.last(known, place)


@pytest.mark.parametrize(
    ("kind", "added", "text", "place"),
    [
        ("gpt2", "none", "Text: film", 5),
        ("gpt2", "none", "Text:\nfilm", 5),
        ("gpt2", "none", "Text:  film", 5),
        ("gpt2, a space before", "none", "Text\nfilm", None),
        ("gpt2, a space before", "none", "Text: film", 5),
        ("llama3", "none", "Text: film", 5),
        ("llama3", "none", "Text:\nfilm", None),
        ("llama3", "none", "Text\nfilm", 4),
        ("llama3", "plain", "Text\n<|im_start|>user", 5),
        ("llama3", "plain", "Text<|im_end|>", 4),
        ("llama3", "plain", "<s><|im_end|>", 3),
        ("llama3", "across", "a film", None),
        ("qwen", "none", "电影\n好", 2),
        ("qwen", "none", "e\u0301 x", None),
        ("deepseek", "none", "12 x", 2),
        ("tiktoken", "none", "12 x", 2),
        ("llama2", "none", "Text: film", 5),
        ("llama2", "none", "Texta film", None),
        ("llama2", "none", "Text\nfilm", None),
        ("gemma", "plain", "Text:\n\nfilm", 5),
        ("gemma", "greedy", "Text:<|im_end|>", None),
        ("gemma", "plain", "Text\n\n\nfilm", 4),
        ("bert", "none", "Text: film", 5),
        ("unigram", "none", "Text: film", 5),
        ("metaspace first", "none", "Text: film", 5),
        ("metaspace first", "none", "Text\nfilm", None),
        ("gpt2", "rstrip", "Text: film", None),
        ("gpt2", "normalized, with blanks", "Text: film", None),
    ],
)
def test_where_a_cut_is(kind, added, text, place):
    assert tokenizer_of(kind, added)[1].last(text, len(text)) == place


def changed(change: Any) -> Cuts:
    tokenizer = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    change(tokenizer)
    return Cuts(tokenizer)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "normalizer", normalizers.Strip()),
        lambda t: setattr(t, "normalizer", normalizers.Prepend("▁")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split(Regex(r"(?<=a)b|\s+"), "isolated")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\S+ \S+"), "isolated")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\S+"), "contiguous")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split(Regex(r"a+$|\s+"), "isolated")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.UnicodeScripts()),
        lambda t: setattr(t, "pre_tokenizer", None),
        lambda t: setattr(t.model, "dropout", 0.1),
        lambda t: t.add_tokens([AddedToken("film", single_word=True)]),
    ],
)
def test_what_is_not_understood_gives_no_cuts(change):
    cuts = changed(change)
    assert not cuts.any
    assert cuts.last("Text: a film\nb film", 19) is None


def test_a_tokenizer_with_something_to_cut_at_says_so():
    assert tokenizer_of("gpt2", "none")[1].any
    assert tokenizer_of("gpt2", "normalized, with blanks")[1].any is False
    assert tokenizer_of("llama2", "none")[1].any
