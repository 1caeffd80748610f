from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from batchgen.sampling import stopping
from batchgen.sampling.stopping import Detokenizer, Stopper
from batchgen.sampling_params import SamplingParams
from support.marked import complete, make
from support.params import examples

CORPUS = [
    "the quick brown fox jumps over the lazy dog. END of the story, the END.",
    "Question: what is it?\n\nAnswer: the café — naïve, déjà vu!\n\nQuestion: where?",
    "你好世界 你好 こんにちは 👋🏽 👨‍👩‍👧 e\u0301 \ufffd",
]
SPECIALS = ["<unk>", "<s>", "</s>"]


def finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    """Like the tokenizers of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return finished(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Like those of Llama 2, Mistral and Gemma: a space belongs to the word after it, the first is dropped, and rare characters are spelled in bytes."""
    pieces = ["▁", "▁the", "the", "▁END", "EN", "D", "▁fox", "你", "\n", ".", "\ufffd", *"abcdefghijklmnopqrstuvwxyzQA"]
    names = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return finished(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """Like those of T5: the decoder drops the space of the first token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return finished(tokenizer)


TOKENIZERS = {make.__name__: make() for make in (byte_level, byte_fallback, metaspace)}
DETOKENIZERS = {name: Detokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}
BOS, EOS = 1, 2
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def encode(name: str, text: str) -> list[int]:
    return TOKENIZERS[name].encode(text, add_special_tokens=False)


def raw_bytes(name: str, data: bytes) -> list[int]:
    """One token for each byte; the bytes need not be valid UTF-8."""
    if name == "byte_fallback":
        return TOKENIZERS[name].convert_tokens_to_ids([f"<0x{b:02X}>" for b in data])
    characters = bytes_to_unicode()
    return TOKENIZERS[name].convert_tokens_to_ids([characters[b] for b in data])


def stopper(
    name: str, prompt: list[int] = (), max_tokens: int = 1000, eos: tuple[int, ...] = (EOS,), **params
) -> Stopper:
    return Stopper(
        SamplingParams(max_tokens=max_tokens, **params),
        max_tokens,
        frozenset(eos),
        DETOKENIZERS[name],
        np.array(prompt, dtype=np.int32),
    )


def run(stop: Stopper, tokens: list[int]) -> tuple[str | None, int, str]:
    """Feeds tokens until the completion ends. Returns the reason, the number of tokens and the text."""
    for n, token in enumerate(tokens, 1):
        reason = stop.append(token)
        if reason:
            return reason, n, stop.text
    return None, len(tokens), stop.text


def expected(name: str, prompt: list[int], tokens: list[int], max_tokens: int, strings: tuple[str, ...], ends=(EOS,)):
    """What `run` must return, found by decoding everything again at every token."""

    def decode(ids):
        return TOKENIZERS[name].decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def text(n):
        before, after = decode(prompt), decode([*prompt, *tokens[:n]])
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        return after[same:]

    def cut(whole):
        places = [whole.find(s) for s in strings if s in whole]
        return whole[: min(places)] if places else None

    for n in range(1, len(tokens) + 1):
        ended = tokens[n - 1] in ends
        whole = text(n - 1 if ended else n)
        last = ended or n == max_tokens
        found = cut(whole if last else whole.rstrip("\ufffd"))
        if found is not None:
            return "stop", n, found
        if last:
            return "stop" if ended else "length", n, whole
    return None, len(tokens), text(len(tokens))


# End tokens and length


def ids(name: str, parts: list[int | bytes | str]) -> list[int]:
    """Token ids, from ids, from bytes (a token each) and from text without spaces (a token for each character)."""
    found: list[int] = []
    for part in parts:
        if isinstance(part, str):
            found += [encode(name, "x" + character)[-1] for character in part]
        else:
            found += raw_bytes(name, part) if isinstance(part, bytes) else [part]
    return found


THE = TOKENIZERS["byte_fallback"].convert_tokens_to_ids("▁the")
DOT = raw_bytes("byte_level", b".")[0]
LONG, WORD, FOUR = ("ሰላም" * 45).encode(), "ዓለም".encode(), ("你" * 4).encode()
HALF = {"stop": ("\ufffd",)}
LEVEL, FALLBACK = ("byte_level",), ("byte_fallback",)


@pytest.mark.parametrize(
    ("names", "prompt", "params", "tokens", "result"),
    [
        (FALLBACK, [], {"max_tokens": 2}, [b"aba"], ("length", 2, "ab")),
        (FALLBACK, [], {"max_tokens": 2}, [b"a", EOS, b"a"], ("stop", 2, "a")),
        (LEVEL, [], {"ignore_eos": True, "max_tokens": 6}, [EOS, b"t", EOS, b"he fo"], ("length", 6, "the ")),
        (LEVEL, [], {"ignore_eos": True, "stop_token_ids": (DOT,)}, [b"END", EOS, b".END"], ("stop", 5, "END")),
        # The space of the first word is dropped only where the text begins with it.
        (FALLBACK, [THE], {}, [THE, EOS], ("stop", 2, " the")),
        (FALLBACK, [EOS], {}, [THE, EOS], ("stop", 2, "the")),
        (FALLBACK, [], {"ignore_eos": True, "stop": (" the",)}, [THE, *[EOS] * 500, THE], ("stop", 502, "the")),
        # A special token has no text, and ends the completion as a stop string all the same.
        (LEVEL + FALLBACK, [BOS], {"stop": ("fox", "<s>")}, [b"END", BOS, b"a fox"], ("stop", 4, "END")),
        (LEVEL, [], {"stop": ("</s>",), "ignore_eos": True}, [b"a\xe4", EOS, b"\xbd\xa0"], ("stop", 3, "a\ufffd")),
        (LEVEL, [], {"stop": ("<s>a", "s>")}, [b"END", BOS, b"a", EOS], ("stop", 6, "ENDa")),
        # A stop string in the prompt or across its end does not count.
        (LEVEL, [b"the END"], {"stop": ("ENDE", "the")}, [b"END fox", EOS], ("stop", 8, "END fox")),
        # Half a character may become one, or stay a replacement character.
        (LEVEL, [], {"stop": ("END",)}, [b"END\xe4\xbd\xa0"], ("stop", 3, "")),
        (LEVEL, [], {"stop": ("D",)}, [b"\xe4EN\xe4D"], ("stop", 5, "\ufffdEN\ufffd")),
        (LEVEL, [], HALF, [b"a\xe4\xbd\xa0b"], (None, 5, "a你b")),
        (LEVEL, [], HALF, [b"a\xe4a\xe4"], ("stop", 3, "a")),
        (LEVEL, [], HALF | {"max_tokens": 2}, [b"a\xe4"], ("stop", 2, "a")),
        (LEVEL, [], HALF, [b"a\xe4", EOS], ("stop", 3, "a")),
        # Very long runs of bytes.
        (FALLBACK, [LONG], {}, ["ዓ".encode(), EOS], ("stop", 4, "ዓ")),
        (LEVEL + FALLBACK, [], {"stop": ("ዓለም",)}, [LONG, WORD], ("stop", 414, LONG.decode())),
        (LEVEL + FALLBACK, [], {"stop": ("aEND",)}, [LONG, "aEND"], ("stop", 409, LONG.decode())),
        (LEVEL + FALLBACK, [], {"stop": ("fox",)}, [b"\x9f" * 400, "fox"], ("stop", 403, "\ufffd" * 400)),
        # A run of bytes that turns out invalid is invalid from its beginning.
        (FALLBACK, [], {"ignore_eos": True, "stop": ("\ufffd" * 30 + "a",)}, [FOUR, EOS, FOUR, EOS, FOUR, b"\xff", "a"], ("stop", 40, "\ufffd" * 7)),
    ],
)  # fmt: skip
def test_a_completion_ends_with_this_reason_token_and_text(names, prompt, params, tokens, result):
    for name in names:
        assert run(stopper(name, ids(name, prompt), **params), ids(name, tokens)) == result


def test_the_tokens_are_kept_as_sampled_with_the_end_token():
    stop = stopper("byte_level")
    run(stop, [50, EOS])
    assert stop.tokens == [50, EOS]
    assert stop.finish_reason == "stop"


def test_without_stop_strings_nothing_is_decoded_until_the_text_is_read(monkeypatch):
    stop = stopper("byte_level", max_tokens=50)
    monkeypatch.setattr(stop._detokenizer, "decode", lambda tokens: pytest.fail("decoded"))
    assert [stop.append(50) for _ in range(50)] == [None] * 49 + ["length"]


# Text


@each_tokenizer
@pytest.mark.parametrize("text", ["the fox the END", "the  fox", " the", "fox.\n\nQ", "the 你 é 👨‍👩‍👧 e\u0301 fox"])
def test_prompt_and_completion_concatenate_at_every_cut(name, text):
    tokens = encode(name, text)
    decoded = TOKENIZERS[name].decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for cut in range(1, len(tokens)):
        before = DETOKENIZERS[name].decode(tokens[:cut])
        _, _, after = run(stopper(name, tokens[:cut]), [*tokens[cut:], EOS])
        assert before.rstrip("\ufffd") + after == decoded


@each_tokenizer
def test_ids_that_the_tokenizer_does_not_know_have_no_text(name):
    tokens, unknown = encode(name, "the END"), len(TOKENIZERS[name]) + 5
    assert run(stopper(name), [unknown, *tokens, unknown, EOS])[2] == "the END"
    assert run(stopper(name, stop=("END",)), [unknown, *tokens])[2] == "the "


# Stop strings


@pytest.mark.parametrize("data", [b"\x9f" * 2000, ("ሰላም" * 300).encode(), b"\x9f\xe4" * 1000])
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_the_cost_of_a_long_run_of_bytes_is_bounded(name, data, monkeypatch):
    stop = stopper(name, stop=("never",), max_tokens=10_000)
    decode, lengths = stop._detokenizer.decode, []
    monkeypatch.setattr(stop._detokenizer, "decode", lambda tokens: (lengths.append(len(tokens)), decode(tokens))[1])
    assert run(stop, raw_bytes(name, data))[:2] == (None, len(data))
    assert max(lengths[:-2]) <= 4 * stopping._MAX_OPEN  # the last two are for the text itself


# Decoding step by step


@st.composite
def completions(draw):
    """A tokenizer, a prompt, tokens (text, single bytes, special tokens) and stop strings that are likely to occur."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    words = st.sampled_from(
        ["the", " the", " END", "fox", ".", "\n\n", "你好", "é", "👋🏽", "👨‍👩‍👧", "e\u0301", "ሰላም", "  "]
    )
    texts = st.one_of(words, st.text(max_size=6)).map(lambda text: encode(name, text))
    pieces = [texts, st.just([EOS]), st.lists(st.integers(0, len(TOKENIZERS[name]) - 1), max_size=3)]
    if name != "metaspace":
        characters = st.text(alphabet="é你👋", min_size=1, max_size=3).map(str.encode)
        pieces.append(st.one_of(st.binary(max_size=6), characters).map(lambda data: raw_bytes(name, data)))
    prompt = list(chain.from_iterable(draw(st.lists(texts, max_size=3))))
    tokens = list(chain.from_iterable(draw(st.lists(st.one_of(pieces), min_size=1, max_size=12))))[:40] or [5]
    whole = DETOKENIZERS[name].text(prompt, tokens)
    strings = []
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(whole) - 1)))
        strings.append(whole[at : at + draw(st.integers(1, 5))])
    strings += draw(st.lists(st.text(min_size=1, max_size=2), max_size=1))
    max_tokens = draw(st.integers(1, len(tokens) + 1))
    return name, prompt, tokens, tuple(s for s in strings if s), max_tokens, draw(st.booleans())


@settings(max_examples=examples(40, 300))
@given(completions())
def test_decoding_step_by_step_equals_decoding_everything_again(case):
    name, prompt, tokens, strings, max_tokens, ignore_eos = case
    got = run(stopper(name, prompt, max_tokens, stop=strings, ignore_eos=ignore_eos), tokens)
    assert got == expected(name, prompt, tokens, max_tokens, strings, ends=() if ignore_eos else (EOS,))


def test_a_repeating_completion_is_ended_only_with_max_repeats():
    tokenizer = make(plain=("<think>", "</think>"))
    ended = complete(tokenizer, "q", "Well, " + "ab" * 50, max_repeats=4)
    assert (ended.finish_reason, ended.text) == ("repetition", "Well, " + "ab" * 16)
    assert complete(tokenizer, "q", "Well, " + "ab" * 50).finish_reason is None
    thought = complete(tokenizer, "q<think>", "Hm." + "x" * 90 + "</think>Yes.", max_repeats=4)
    assert (thought.finish_reason, thought.text, thought.reasoning) == ("repetition", None, "Hm." + "x" * 32)
