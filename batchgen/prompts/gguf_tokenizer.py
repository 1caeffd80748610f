"""Makes the tokenizer that a GGUF file describes: its tokens, their types, merges or scores, and the name of its pre-tokenizer.

A file does not hold how texts are split before they are merged, only the name that llama.cpp gives to a way of splitting
(`tokenizer.ggml.pre`). The expressions here are those of the `tokenizer.json` of the models that have these names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from batchgen.errors import ModelError
from batchgen.prompts.gguf_file import OTHER_FORMAT, GgufFile

_BLANK = "▁"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_OTHERS}"
_QWEN2 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_OTHERS}"
_QWEN35 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENGLISH}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENGLISH}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_EXAONE_MOE = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
_BLANKS = "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_JAIS2 = (
    rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+{_BLANKS}|\s"
)
_BLOOM = r" ?[^(\s|[.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C}])]+"
_CASED = (
    "B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 "
    "13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF "
    "FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
"""The letters that DeepSeek's first tokenizers take for those of words, in hexadecimal."""
_DEEPSEEK_LETTERS = r"\s?[A-Za-z{}]+".format(re.sub("[0-9A-F]+", r"\\x{\g<0>}", _CASED).replace(" ", ""))
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_AFMOE_DIGITS = (
    r"\p{Nd}{1,510}(?=(?>\p{Nd}{510})*(?:\P{Nd}|$))|\G\p{Nd}{510}", r"\A\p{Nd}{1,2}(?=\p{Nd}{3}+\z)", r"\A\p{Nd}{3}|\G\p{Nd}{3}",
)  # fmt: skip
"""Groups of three digits from the right, in numbers of any length."""
_AFMOE_SCRIPTS = (
    r"[\x{4E00}-\x{9FFF}\x{3040}-\x{30FF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}]+|[\x{E00}-\x{E7F}]+|[\x{E80}-\x{EFF}]+"
    r"|[\x{1780}-\x{17FF}]+|[\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}]+|[\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)


class _Split(NamedTuple):
    """How a text is split into words before tokens are merged."""

    patterns: tuple[str, ...]
    """Each splits what the ones before it leave."""
    ignore_merges: bool = False
    """Whether a word that is a token is that token, whatever the merges are."""
    add_bos: bool = False
    """Whether a text begins with the beginning-of-text token if the file does not say."""
    nfc: bool = False
    """Whether letters and their accents are composed first."""


_SPLITS: Mapping[str, _Split] = {
    **dict.fromkeys(("gpt-2", "a.x-4.0", "exaone4", "mellum", "mpt", "olmo", "phi-2", "trillion"), _Split((_GPT2,))),
    **dict.fromkeys(("starcoder", "refact", "smollm", "minerva-7b", "exaone"), _Split((r"\p{N}", _GPT2))),
    "command-r": _Split((r"\p{N}", _GPT2), nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"), _Split((_LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _Split((_LLAMA3_SPLIT,))),
    "qwen2": _Split((_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "f2llmv2", "hunyuan", "kormo", "megrez", "solar-open", "stablelm2"), _Split((_QWEN2,))),
    "qwen35": _Split((_QWEN35,), nfc=True),
    "tekken": _Split((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _Split((_GPT4O,), ignore_merges=True)),
    "deepseek-llm": _Split((r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+", r"\s+$", r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+", r"\p{N}")),
    "deepseek-coder": _Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+", r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _Split((r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", _DEEPSEEK3))),
    "falcon": _Split((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _Split((_BLOOM,))),
    "viking": _Split((_BLOOM, r"\p{N}")),
    "afmoe": _Split((r"\p{N}+", *_AFMOE_DIGITS, _AFMOE_SCRIPTS, _DEEPSEEK3)),
    "seed-coder": _Split((_SEED,)),
    "exaone-moe": _Split((_EXAONE_MOE,)),
    "jais-2": _Split((_JAIS2,)),
}  # fmt: skip
_OF_ARCHITECTURES = {"gpt2": "gpt-2", "falcon": "falcon", "starcoder2": "starcoder", "bloom": "bloom", "mamba": "mpt", "qwen2": "qwen2", "qwen2moe": "qwen2"}  # fmt: skip
"""The pre-tokenizers of files that do not name theirs, by their architectures: files from before April 2024 do not."""
_ENDS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "<|EOT|>", "[EOT]", "[EOS]", "</s>", "<eos>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<|observation|>", "<|eot|>", "<|eom|>", "<|assistant_end|>", "<｜end▁of▁sentence｜>",
})  # fmt: skip
"""Control tokens that end a turn or a text in every vocabulary that has them. A file names at most one of each kind."""


class _TokenKind(IntEnum):
    """The types of tokens, as the package gguf has them."""

    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class GgufVocabulary:
    """The tokens of a file, with what it says of them."""

    def __init__(self, file: GgufFile) -> None:
        """Raises `ModelError` if the file has no tokens."""
        self.file, self._values = file.path, file.values
        self.architecture = file.architecture
        self.model = str(self.value("tokenizer.ggml.model"))
        """How tokens are found: `llama` by their scores, `gemma4` by merges, `gpt2` by merges of bytes."""
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self.value("tokenizer.ggml.tokens") or ())]
        if not self.tokens:
            raise ModelError(f"{self.file} holds no tokens (tokenizer.ggml.tokens)", "give a file with its tokenizer")
        kinds = self.value("tokenizer.ggml.token_type") or [_TokenKind.NORMAL] * len(self.tokens)
        self.kinds = list(kinds)

    def value(self, key: str) -> Any:
        """The value of a key of the file; None if it has none."""
        return self._values.get(key)

    def special(self, name: str, default: int | None = None) -> int | None:
        """The id of the token that `tokenizer.ggml.NAME_token_id` names, if it is one of the tokens."""
        found = self.value(f"tokenizer.ggml.{name}_token_id")
        number = default if found is None else int(found)
        return number if number is not None and number < len(self.tokens) else None

    def end_tokens(self) -> list[int]:
        """The ids of the tokens that end a completion. The first is the one that the file calls `eos`, if it has one."""
        named = [self.special(name) for name in ("eos", "eot", "eom")]
        known = [i for i, token in enumerate(self.tokens) if token in _ENDS and self._may_end(i)]
        harmony = {"<|return|>", "<|call|>"} <= set(self.tokens)  # where <|end|> ends a message of several
        return [
            i
            for i in dict.fromkeys([*named, *known])
            if i is not None and not (harmony and self.tokens[i] == "<|end|>")
        ]

    def _may_end(self, token: int) -> bool:
        kind = self.kinds[token]
        return kind == _TokenKind.CONTROL or (kind == _TokenKind.USER_DEFINED and self.tokens[token] != "</s>")


def gguf_tokenizer(vocabulary: GgufVocabulary) -> Any:
    """Returns the tokenizer of transformers for a vocabulary of the models `llama`, `gpt2` and `gemma4`.

    Raises `ModelError` for another one, and if it is not known how its texts are split.
    """
    from transformers import PreTrainedTokenizerFast

    makers = {"llama": _of_words_with_spaces, "gemma4": _of_words_with_spaces, "gpt2": _by_merges}
    if vocabulary.model not in makers:
        raise ModelError(
            f"the tokenizer of {vocabulary.file} is of the kind {vocabulary.model!r} (tokenizer.ggml.model), which batchgen does not know",
            OTHER_FORMAT,
        )
    backend, adds_bos = makers[vocabulary.model](vocabulary)
    _add_tokens(backend, vocabulary)
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if vocabulary.model == "llama" else {}
    ids = {name: vocabulary.special(name, defaults.get(name)) for name in ("bos", "eos", "unknown", "padding")}
    _put_around(backend, vocabulary, ids, adds_bos)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = {names[name]: None if i is None else vocabulary.tokens[i] for name, i in ids.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=_chat_template(vocabulary), clean_up_tokenization_spaces=False, **tokens
    )


def _of_words_with_spaces(vocabulary: GgufVocabulary) -> tuple[Any, bool]:
    """Returns a tokenizer of sentencepiece's kind, and whether it puts a beginning-of-text token before texts by default."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = vocabulary.tokens
    by_scores = vocabulary.model == "llama"
    scores = vocabulary.value("tokenizer.ggml.scores") or [0.0] * len(tokens)
    unknown = vocabulary.special("unknown", 0 if by_scores else None)
    backend = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            _merges_of_scores(vocabulary, scores) if by_scores else _merges(vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    blanks = normalizers.Replace(" ", _BLANK)
    after = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.value("tokenizer.ggml.add_space_prefix") is False:
        backend.normalizer = blanks
    else:  # also before a text that begins with a space, and after each special token
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), blanks])
        after.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(after)
    return backend, True


def _merges_of_scores(vocabulary: GgufVocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that make a token, that of the highest score first."""
    mergeable = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (_TokenKind.NORMAL, _TokenKind.UNUSED)
    }
    merges: list[tuple[str, str]] = []
    for token in sorted(mergeable, key=lambda token: -scores[mergeable[token]]):
        pairs = [
            (token[:at], token[at:])
            for at in range(1, len(token))
            if token[:at] in mergeable and token[at:] in mergeable
        ]
        merges += sorted(pairs, key=lambda pair: (mergeable[pair[0]], mergeable[pair[1]]))
    return merges


def _by_merges(vocabulary: GgufVocabulary) -> tuple[Any, bool]:
    """Returns a tokenizer of bytes that are merged, and whether it puts a beginning-of-text token before texts by default."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    split = _split_of(vocabulary)
    tokens = {token: i for i, token in enumerate(vocabulary.tokens)}
    backend = Tokenizer(models.BPE(tokens, _merges(vocabulary), ignore_merges=split.ignore_merges))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = _byte_decoder(vocabulary)
    return backend, split.add_bos


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that the file merges, the first ones first."""
    tokens = set(vocabulary.tokens)
    pairs = (merge.split(" ", 1) for merge in vocabulary.value("tokenizer.ggml.merges") or ())
    return [(a, b) for a, b in pairs if a in tokens and b in tokens and a + b in tokens]


def _byte_decoder(vocabulary: GgufVocabulary) -> Any:
    """Returns a decoder of the letters that stand for bytes. A token that a file has as it is written (`ü`) is not taken for such letters."""
    from tokenizers import Regex, decoders
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    written = [
        token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind == _TokenKind.USER_DEFINED and not token.isascii() and set(token) <= set(letters.values())
    ]
    spelled = {token: "".join(letters[byte] for byte in token.encode()) for token in written}
    parts = [decoders.Replace(Regex(f"^{token}$"), to) for token, to in spelled.items()]
    return decoders.Sequence([*parts, decoders.ByteLevel()]) if parts else decoders.ByteLevel()


def _split_of(vocabulary: GgufVocabulary) -> _Split:
    """Returns how the texts of a vocabulary of bytes are split. Raises `ModelError` if that is not known."""
    name = vocabulary.value("tokenizer.ggml.pre")
    if name in (None, "default"):
        name = _OF_ARCHITECTURES.get(vocabulary.architecture)
        if name is None:
            raise ModelError(
                f"{vocabulary.file} does not say how its tokenizer splits texts (tokenizer.ggml.pre), like files from before May 2024",
                "give a newer file of the model",
            )
    if name not in _SPLITS:
        raise ModelError(
            f"the tokenizer of {vocabulary.file} splits texts in the way {name!r} (tokenizer.ggml.pre), which batchgen does not know",
            OTHER_FORMAT,
        )
    return _SPLITS[name]


def _add_tokens(backend: Any, vocabulary: GgufVocabulary) -> None:
    """Adds the tokens that are found in texts before everything else: special ones, which completions do not show, and written ones."""
    from tokenizers import AddedToken

    # In Phi 3, blanks after most special tokens belong to these. Files do not say so.
    phi = vocabulary.architecture == "phi3" and vocabulary.model == "llama"
    for kinds, special in (((_TokenKind.CONTROL, _TokenKind.UNKNOWN), True), ((_TokenKind.USER_DEFINED,), False)):
        found = [t for t, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind in kinds]
        stripping = {t for t in found if phi and t not in ("<unk>", "<s>", "<|endoftext|>")}
        added = [AddedToken(t, rstrip=t in stripping, normalized=False, special=special) for t in found]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _put_around(backend: Any, vocabulary: GgufVocabulary, ids: Mapping[str, int | None], adds_bos: bool) -> None:
    """Lets a tokenizer put the special tokens around texts that the file asks for."""
    from tokenizers import processors

    wanted = {"bos": adds_bos, "eos": False}
    for name in wanted:
        asked = vocabulary.value(f"tokenizer.ggml.add_{name}_token")
        wanted[name] = (wanted[name] if asked is None else bool(asked)) and ids[name] is not None
    around = [*(["bos"] if wanted["bos"] else []), "$A", *(["eos"] if wanted["eos"] else [])]
    tokens: Iterable[Any] = [
        {"id": name, "ids": [ids[name]], "tokens": [vocabulary.tokens[ids[name] or 0]]}
        for name in wanted
        if wanted[name]
    ]
    backend.post_processor = processors.TemplateProcessing(single=around, pair=None, special_tokens=list(tokens))


def _chat_template(vocabulary: GgufVocabulary) -> str | dict[str, str] | None:
    """Returns the chat template, or the templates by their names if the file has several."""
    default = vocabulary.value("tokenizer.chat_template")
    names = vocabulary.value("tokenizer.chat_templates") or ()
    others = {name: vocabulary.value(f"tokenizer.chat_template.{name}") for name in names}
    found = {"default": default} | others
    return {name: text for name, text in found.items() if text} if any(others.values()) else default
