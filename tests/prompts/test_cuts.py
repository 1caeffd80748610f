"""A text can be cut where `Cuts` says: its two parts, tokenized alone, give the tokens of the whole text."""

from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from batchgen.prompts.shared_text import Cuts
from support.params import examples, slow_but

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
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)


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
    """A BPE over whole texts. Spaces are written ▁ and begin most tokens."""
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
ODD = {
    "nothing": lambda: bpe(None),
    "dropout": lambda: bpe(pre_tokenizers.ByteLevel(), dropout=0.1),
    "strip": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Strip()),
    "prepend": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Prepend("▁")),
    "strip accents": lambda: bpe(pre_tokenizers.ByteLevel(), normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "nmt": lambda: bpe(pre_tokenizers.WhitespaceSplit(), normalizers.Nmt(), byte_level=False, unk_token="<unk>"),
    "replace a run": lambda: bpe(pre_tokenizers.ByteLevel(), normalizers.Replace(Regex(" {2,}"), "▁")),
    "scripts": lambda: bpe(pre_tokenizers.UnicodeScripts(), byte_level=False, unk_token="<unk>"),
    "punctuation": lambda: bpe(pre_tokenizers.Punctuation("merged_with_next"), byte_level=False, unk_token="<unk>"),
    "whitespace": lambda: bpe(pre_tokenizers.Whitespace(), byte_level=False, unk_token="<unk>"),
    "one character": lambda: bpe(pre_tokenizers.CharDelimiterSplit("i"), byte_level=False, unk_token="<unk>"),
    "digits": lambda: bpe(pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(use_regex=False)])),
    "fixed length": lambda: bpe(pre_tokenizers.FixedLength(5), byte_level=False, unk_token="<unk>"),
    **{
        behavior: lambda behavior=behavior: bpe(pre_tokenizers.Split(Regex(r"\S+"), behavior), byte_level=False, unk_token="<unk>")
        for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous")
    },
    "a look behind": lambda: bpe(split(r"(?<=a)b|\s+")),
    "a look behind a space": lambda: bpe(split(r"(?<=m )[ai]|\s+|\w+")),
    "pairs of words": lambda: bpe(split(r"\S+ \S+")),
    "the end of the text": lambda: bpe(split(r"[a.]+$|\s+")),
}  # fmt: skip
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
    tokenizer = {**KINDS, **ODD}[kind]()
    tokenizer.add_tokens(ADDED[added])
    return tokenizer, Cuts(tokenizer)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


QUICK = [*product(KINDS, ("plain",)), *product(ODD, ("none",))]


@pytest.mark.parametrize(("kind", "added"), slow_but(QUICK, product({**KINDS, **ODD}, ADDED)))
@given(known=TEXTS, more=TEXTS)
@example("Text: a film is not so good. ", " is good")
@example("a\nfilm 1 is 2, 3 ", "1")
@example("<s>a<|im_end|> film film ", "x<|im_end|>")
@settings(max_examples=examples(10, 200))
def test_tokens_of_the_parts_are_those_of_the_whole_text(kind, added, known, more):
    tokenizer, cuts = tokenizer_of(kind, added)
    text, place = known + more, cuts.last(known, 0, len(known))
    assert place == cuts.last(text, 0, len(known))
    while place is not None:
        assert ids(tokenizer, text[:place]) + ids(tokenizer, text[place:]) == ids(tokenizer, text)
        place = cuts.last(known, 0, place)


KNOWN = "film.film,film.film"
"""Text after the expected cut: a cut needs two pieces behind it, and as many characters as the longest added token."""


@pytest.mark.parametrize(
    ("kind", "added", "text", "place"),
    [
        ("gpt2", "none", "Text: ", 5),
        ("gpt2", "none", "Text:\n", 5),
        ("gpt2", "none", "Text:  ", 5),
        ("gpt2, a space before", "none", "Text\n", None),
        ("gpt2, a space before", "none", "Text: ", 5),
        ("llama3", "none", "Text: ", 5),
        ("llama3", "none", "Text:\n", None),
        ("llama3", "none", "Text\n", 4),
        ("llama3", "plain", "Text\n<|im_start|>user", 5),
        ("llama3", "plain", "Text<|im_end|>", 4),
        ("llama3", "plain", "<s><|im_end|>", 3),
        ("llama3", "across", "a ", None),
        ("qwen", "none", "电影\n好", 2),
        ("qwen", "none", "e\u0301 x", None),
        ("deepseek", "none", "12 x", 2),
        ("tiktoken", "none", "12 x", 2),
        ("llama2", "none", "Text: ", 5),
        ("llama2", "none", "Texta ", None),
        ("llama2", "none", "Text\n", None),
        ("gemma", "plain", "Text:\n\n", 5),
        ("gemma", "greedy", "Text:<|im_end|>", 5),
        ("gemma", "plain", "Text\n\n\n", 4),
        ("bert", "none", "Text: ", 5),
        ("unigram", "none", "Text: x ", 5),
        ("metaspace first", "none", "Text: x ", 5),
        ("metaspace first", "none", "Text\n", None),
        ("gpt2", "rstrip", "Text: ", None),
        ("gpt2", "normalized, with blanks", "Text: ", None),
        ("strip", "none", "Text: ", None),
        ("prepend", "none", "Text: ", None),
        ("dropout", "none", "Text: ", None),
        ("nothing", "none", "Text: ", None),
    ],
)
def test_the_last_cut_is_at_the_expected_place(kind, added, text, place):
    known = text + KNOWN
    assert tokenizer_of(kind, added)[1].last(known, 0, len(known)) == place


def test_a_cut_lies_after_the_start_and_before_text_that_may_still_change():
    cuts = tokenizer_of("gpt2", "none")[1]
    known = "Text: a film, a film"
    assert cuts.last(known, 0, len(known)) == 13
    assert cuts.last(known, 13, len(known)) is None
    assert cuts.last(known, 0, 7) is None


def test_cuts_are_known_to_be_impossible_for_some_tokenizers():
    assert tokenizer_of("gpt2", "none")[1].any
    assert tokenizer_of("llama2", "none")[1].any
    assert not tokenizer_of("gpt2", "normalized, with blanks")[1].any
    assert not tokenizer_of("dropout", "none")[1].any
