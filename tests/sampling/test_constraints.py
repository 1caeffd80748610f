import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.errors import RowError
from batchgen.parsers.thinking import thinking_format
from batchgen.sampling.constraints import Constraints
from batchgen.sampling.grammars import Vocabulary, token_bytes
from batchgen.sampling_params import SamplingParams
from support.marked import make
from support.params import examples

SAMPLE = Path(__file__).parents[2] / "sample_data" / "model"
TEXTS = [
    '{"name": "Ann", "age": 31, "tags": ["red", "blue"], "ok": true}',
    "Straße, naïve café: 12,50 €; 東京 2024-05-17. yes no maybe the and of",
] * 20
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue", "<|end|>"]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEXES = [
    r"[a-z]{2,5}@[a-z]+\.(com|org)",
    r"^(yes|no|maybe)$",
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "é+ü?(東京|€)*",
    "(a|b)*",
    "<eos>.{0,3}</s>",
]


def sample_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SAMPLE)


def byte_level_tokenizer() -> Any:
    """BPE over bytes, with added tokens: special ones, and plain ones that contain a space or a letter like é."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<eos>", "<|end|>", "<s>")])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("the café", "é!", "<tag>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def byte_fallback_tokenizer() -> Any:
    """Like a sentencepiece tokenizer: words begin with ▁, and characters that have no token are spelled in bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁yes", "yes", "東京", "é"]
    pieces += [chr(c) for c in range(0x21, 0x7F)] + ["▁▁", '"name', "true", '":', "com"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "sample": sample_tokenizer,
    "byte-level": byte_level_tokenizer,
    "byte-fallback": byte_fallback_tokenizer,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def byte_level() -> Any:
    return byte_level_tokenizer()


def regex(pattern: str, **more: Any) -> SamplingParams:
    return SamplingParams(regex=pattern, **more)


def schema(value: Any, **more: Any) -> SamplingParams:
    return SamplingParams(json_schema=json.dumps(value), **more)


def constraints_of(tokenizer: Any) -> Constraints:
    return Constraints(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))


def bits(mask: torch.Tensor, vocab_size: int) -> Any:
    """The mask as booleans [N, V]."""
    words = np.ascontiguousarray(mask.numpy()).view(np.uint8)
    return np.unpackbits(words, axis=1, bitorder="little")[:, :vocab_size].astype(bool)


def allowed(constraints: Constraints, name: int, vocab_size: int) -> set[int]:
    mask = constraints.mask([name])
    return set(np.flatnonzero(bits(mask, vocab_size)[0]).tolist())


def complete(
    constraints: Constraints,
    tokenizer: Any,
    rows: Sequence[SamplingParams],
    *,
    sampled: bool = True,
    seed: int = 0,
    max_tokens: int = 150,
) -> list[tuple[list[int], str]]:
    """Samples from random logits, which favour signs that end a value, until all rows are done. Returns their tokens and finish reasons."""
    size = len(tokenizer)
    random = torch.Generator().manual_seed(seed)
    eos = tokenizer.eos_token_id
    bias = torch.tensor(
        [3.0 if i == eos or set(p) & set(b'"}],.') else 0.0 for i, p in enumerate(token_bytes(tokenizer, size))]
    )
    done: dict[int, tuple[list[int], str]] = {}
    unfinished: dict[int, list[int]] = {name: [] for name in range(len(rows))}
    for name, params in enumerate(rows):
        constraints.add(name, params)
    while unfinished:
        names = list(unfinished)
        constraints.start(names)
        logits = torch.randn(len(names), size, generator=random) * 2 + bias
        mask = constraints.mask(names)
        if mask is not None:
            logits = logits.masked_fill(~torch.from_numpy(bits(mask, size)), -torch.inf)
        assert torch.isfinite(logits.amax(dim=1)).all()
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=random)[:, 0] if sampled else logits.argmax(dim=1)
        for name, token in zip(names, tokens.tolist(), strict=True):
            whole = constraints.accept(name, token)
            if token != eos:
                unfinished[name].append(token)
            if whole or token == eos or len(unfinished[name]) == max_tokens:
                done[name] = unfinished.pop(name), "stop" if whole or token == eos else "length"
                constraints.remove(name)
    return [done[name] for name in range(len(rows))]


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    """Decodes tokens after another token, so that a space at the beginning is not lost."""
    before = tokenizer.encode("x", add_special_tokens=False)
    text = tokenizer.decode([*before, *tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert text.startswith("x")
    return text[1:]


@pytest.mark.parametrize("sampled", [False, True])
def test_every_completion_that_ends_with_stop_matches_its_regex(tokenizer, sampled):
    constraints = constraints_of(tokenizer)
    rows = [regex(pattern) for pattern in REGEXES] * 4
    ended = 0
    for params, (tokens, reason) in zip(rows, complete(constraints, tokenizer, rows, sampled=sampled), strict=True):
        text = text_of(tokenizer, tokens)
        if reason == "stop":
            ended += 1
            assert re.fullmatch(params.regex, text), (params.regex, text)
    assert ended >= 20


def test_the_bytes_of_the_tokens_of_a_text_are_its_bytes(tokenizer):
    text = "".join(map(chr, range(0x800))) + "東🎈"
    pieces = token_bytes(tokenizer, len(tokenizer))
    assert b"".join(pieces[i] for i in tokenizer.encode(text, add_special_tokens=False)) == text.encode()


def test_the_mask_of_a_row_does_not_depend_on_the_batch(byte_level):
    size = len(byte_level)
    rows = [regex("[a-c]+x"), SamplingParams(), schema(SCHEMA), regex("yes|no"), SamplingParams(), regex("[a-c]+x")]
    constraints = constraints_of(byte_level)
    for name, params in enumerate(rows):
        constraints.add(name, params)
    constraints.accept(0, byte_level.convert_tokens_to_ids("a"))
    constraints.start([5, 4, 3, 2, 1, 0])
    mask = constraints.mask([5, 4, 3, 2, 1, 0])
    assert mask.dtype == torch.int32
    assert mask.shape == (6, -(-size // 32))
    rows_of_bits = bits(mask, size)
    assert rows_of_bits[[1, 4]].all()
    for at, name in ((0, 5), (2, 3), (3, 2), (5, 0)):
        alone = constraints_of(byte_level)
        alone.add(7, rows[name], [byte_level.convert_tokens_to_ids("a")] if name == 0 else [])
        assert set(np.flatnonzero(rows_of_bits[at])) == allowed(alone, 7, size)


def test_masks_started_for_one_batch_are_not_used_for_another(byte_level):
    size, id_of = len(byte_level), byte_level.convert_tokens_to_ids
    constraints = constraints_of(byte_level)
    constraints.add(0, regex("a"))
    constraints.add(1, regex("b"))
    constraints.start([0, 1])
    assert allowed(constraints, 1, size) == {id_of("b")}
    constraints.start([0])
    constraints.remove(0)
    constraints.add(0, regex("c"))
    assert allowed(constraints, 0, size) == {id_of("c")}


def test_a_token_waits_until_the_other_thread_has_done_with_its_grammar(byte_level, monkeypatch):
    order: list[str] = []

    def slowly(vocabulary: Vocabulary, *arguments: Any) -> None:
        time.sleep(0.1)  # without waiting, the token would be accepted by now
        order.append("masks")

    monkeypatch.setattr(Vocabulary, "fill", slowly)
    constraints = constraints_of(byte_level)
    constraints.add(0, regex("a+"))
    constraints.start([0])
    constraints.accept(0, byte_level.convert_tokens_to_ids("a"))
    assert order == ["masks"]


def test_masks_that_fail_fail_the_step_that_asks_for_them_and_nothing_later(byte_level, monkeypatch):
    def fail(*_: Any) -> None:
        raise MemoryError

    constraints = constraints_of(byte_level)
    constraints.add(0, regex("a*"))
    with monkeypatch.context() as patch:
        patch.setattr(constraints, "_masks", fail)
        constraints.start([0])
        with pytest.raises(MemoryError):
            constraints.mask([0])
        constraints.clear()
    constraints.add(0, regex("a*"))
    assert constraints.mask([0]) is not None


def test_the_masks_behind_drafts_are_those_behind_their_tokens(byte_level):
    size, (a, b, c) = len(byte_level), byte_level.convert_tokens_to_ids(["a", "b", "c"])
    constraints = constraints_of(byte_level)
    constraints.add(0, regex("ab[cd]"))
    constraints.add(1, SamplingParams())
    found = bits(constraints.mask([0, 0, 0, 1], [(), (a,), (a, b), ()]), size)
    for row, generated in enumerate(([], [a], [a, b])):
        alone = constraints_of(byte_level)
        alone.add(7, regex("ab[cd]"), generated)
        assert set(np.flatnonzero(found[row])) == allowed(alone, 7, size)
    assert found[3].all()
    ended = constraints.mask([0, 0, 0, 0, 0], [(), (a,), (a, b), (a, b, c), (a, b, c, a)])
    assert bits(ended, size)[3:].all()  # whatever a row behind the end samples does not count
    assert not bits(constraints.mask([0, 0], [(), (c,)]), size)[1].any()
    assert set(np.flatnonzero(found[0])) == allowed(constraints, 0, size)  # a draft leaves no trace


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "city": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "city", "age"],
    "additionalProperties": False,
}
ROME = '{"name": "Ann", "city": "Rome", "age": 3}'


def guessed(constraints: Constraints, tokenizer: Any, params: SamplingParams, written: Sequence[int]) -> bytes:
    """The text that is drafted behind these tokens."""
    constraints.add("guess", params, written)
    texts = token_bytes(tokenizer, len(tokenizer))
    found = b"".join(texts[token] for token in constraints.forced("guess"))
    constraints.remove("guess")
    return found


def write(constraints: Constraints, params: SamplingParams, tokens: Sequence[int]) -> None:
    """A row that writes these tokens. Drafts are looked for in each step, and none is admitted."""
    constraints.add("row", params)
    for token in tokens:
        constraints.forced("row")
        constraints.accept("row", token)
    constraints.forced("row")
    constraints.remove("row")


@pytest.mark.parametrize("space", [" ", ""])
def test_text_is_forced_across_the_spaces_that_the_model_writes(tokenizer, space):
    def tokens(text: str) -> list[int]:
        return tokenizer.encode(text.replace(" ", space), add_special_tokens=False)

    constraints, params = constraints_of(tokenizer), schema(PERSON)
    assert guessed(constraints, tokenizer, params, tokens('{"name": "Ann",')) == b' "city": "'
    write(constraints, params, tokens(ROME))
    for begun, draft in (('"Ann",', ' "city": "'), ('"Ann", "city": "Rome",', ' "age": '), ('"Ann,', "")):
        found = guessed(constraints, tokenizer, params, tokens(f'{{"name": {begun}'))
        assert found.decode() == draft.replace(" ", space)
    write(constraints, params, tokenizer.encode(ROME, add_special_tokens=False))
    assert guessed(constraints, tokenizer, params, tokens('{"name": "Ann",')) == b' "city": "'


def test_forced_text_is_spelled_as_the_model_has_spelled_it_and_its_ends_too(byte_level):
    def spelled(*words: str) -> list[int]:
        return [token for word in words for token in byte_level.encode(word, add_special_tokens=False)]

    constraints, params = constraints_of(byte_level), schema(PERSON)
    key = spelled(*' "city": "')  # a token for each byte
    write(constraints, params, [*spelled('{"name": "Ann",'), *key, *spelled('R", "age": 3}')])
    for begun in range(len(key)):
        constraints.add(begun, params, [*spelled('{"name": "Ann",'), *key[:begun]])
        assert constraints.forced(begun) == key[begun:]


def test_a_tokenizer_that_puts_a_space_before_texts_does_not_spell_forced_text_with_it():
    from tokenizers import normalizers

    tokenizer = byte_fallback_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    assert guessed(constraints_of(tokenizer), tokenizer, regex("yes(a|b)"), []) == b"yes"


def test_end_tokens_may_follow_a_complete_text_and_special_tokens_never(byte_level):
    size, id_of = len(byte_level), byte_level.convert_tokens_to_ids
    eos, end, own = id_of("<eos>"), id_of("<|end|>"), id_of("x")
    constraints = Constraints(byte_level, size, (eos, end, 10_000))
    constraints.add(0, regex("ax*", stop_token_ids=(own,)))
    assert allowed(constraints, 0, size) == {id_of("a")}
    assert constraints.accept(0, id_of("a")) is False
    assert allowed(constraints, 0, size) == {eos, end, own}  # x would end the text, so it is not part of it
    assert constraints.accept(0, end) is True
    constraints.add(1, regex("(.|\n)*"))
    special = set(byte_level.all_special_ids) | {i for i, t in byte_level.added_tokens_decoder.items() if t.special}
    assert allowed(constraints, 1, size) & special == {eos, end}


def test_a_text_that_nothing_may_follow_is_complete_without_an_end_token(byte_level):
    id_of = byte_level.convert_tokens_to_ids
    constraints = Constraints(byte_level, len(byte_level), ())
    constraints.add(0, regex("ab?"))
    constraints.add(1, schema({"enum": [1]}))
    assert constraints.accept(0, id_of("a")) is False
    assert allowed(constraints, 0, len(byte_level)) == {id_of("b")}  # no end token: it continues while it can
    assert constraints.accept(0, id_of("b")) is True
    assert constraints.accept(1, id_of("1")) is True


@pytest.mark.parametrize("size", [300, 320, 417, 1000])
def test_logits_may_be_narrower_or_wider_than_the_tokenizer(byte_level, size):
    constraints = Constraints(byte_level, size, (byte_level.eos_token_id,))
    constraints.add(0, regex("(?s:.)*"))
    mask = constraints.mask([0])
    assert mask.shape == (1, -(-size // 32))
    may = set(np.flatnonzero(bits(mask, size)[0]).tolist())
    assert may <= set(range(min(size, len(byte_level))))
    assert len(may) > 100
    assert (byte_level.eos_token_id in may) == (byte_level.eos_token_id < size)


def test_a_grammar_that_cannot_be_used_fails_only_its_row(byte_level):
    size, id_of = len(byte_level), byte_level.convert_tokens_to_ids
    constraints = constraints_of(byte_level)
    constraints.add(0, regex("(a"))
    constraints.add(1, regex("a"))
    mask = constraints.mask([0, 1])
    assert set(np.flatnonzero(~bits(mask, size)[0])) == {byte_level.eos_token_id}  # it cannot end before it has failed
    for _ in range(2):
        with pytest.raises(RowError) as failure:
            constraints.accept(0, 17)
        assert failure.value.type == "constraint_error"
        assert failure.value.message == "regex cannot be used: unclosed group"
    assert constraints.accept(1, id_of("a")) is True


def test_a_dead_end_fails_only_its_row(byte_level):
    size, id_of = len(byte_level), byte_level.convert_tokens_to_ids
    constraints = Constraints(byte_level, size, (byte_level.eos_token_id, id_of("q")))
    for name, pattern in enumerate(("aq", "ab")):  # q ends a text, so it cannot be inside one
        constraints.add(name, regex(pattern))
        constraints.accept(name, id_of("a"))
    mask = constraints.mask([0, 1])
    assert set(np.flatnonzero(~bits(mask, size)[0])) == {byte_level.eos_token_id, id_of("q")}
    with pytest.raises(RowError) as failure:
        constraints.accept(0, id_of("b"))
    assert failure.value.message == "the grammar failed after 1 token: no token may follow"
    assert constraints.accept(1, id_of("b")) is True


def test_a_row_gets_a_lexer_of_its_own_when_the_shared_one_reaches_its_limit(byte_level, monkeypatch):
    from llguidance import LLMatcher, LLParserLimits

    def matcher(self: Vocabulary, text: str) -> LLMatcher:
        limits = LLParserLimits(max_lexer_states=80, verbose_errors=False)
        return LLMatcher(self._llguidance()[0], text, log_level=0, limits=limits)

    monkeypatch.setattr(Vocabulary, "_matcher", matcher)
    fresh: list[str] = []
    monkeypatch.setattr(Vocabulary, "fresh", lambda *a, f=Vocabulary.fresh: (fresh.append(""), f(*a))[1])
    pattern = "(a|b)*a(a|b){6}!"
    rows = [regex(pattern)] * 24
    outcomes = complete(constraints_of(byte_level), byte_level, rows)
    assert fresh
    for tokens, reason in outcomes:
        assert reason == "stop"
        assert re.fullmatch(pattern, text_of(byte_level, tokens))


def atoms() -> st.SearchStrategy[str]:  # no \d: Python may know fewer Unicode digits
    return st.sampled_from(["a", "b", "[a-c]", "[^a]", "[0-9]", ".", "é", "€", "/", r"\.", "yes", '"'])


def patterns() -> st.SearchStrategy[str]:
    return st.recursive(
        atoms(),
        lambda p: st.one_of(
            st.builds("({}|{})".format, p, p),
            st.builds("{}{}".format, p, p),
            st.builds("({}){}".format, p, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])),
        ),
        max_leaves=6,
    )


def schemas() -> st.SearchStrategy[Any]:
    lows = st.integers(-50, 50)
    leaves = st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["é", "a b", 3, None, "</s>"]}]),
        st.builds(lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, lows, st.integers(0, 300)),
        st.builds(
            lambda low, n: {"type": "string", "minLength": low, "maxLength": low + n},
            st.integers(0, 3),
            st.integers(0, 9),
        ),
    )

    def objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        named = st.dictionaries(st.sampled_from(["a", "b c", "é", 'q"']), parts, max_size=3)
        return named.flatmap(
            lambda p: st.builds(
                lambda r: {"type": "object", "properties": p, "required": r, "additionalProperties": False},
                st.lists(st.sampled_from(sorted(p)), unique=True) if p else st.just([]),
            )
        )

    def arrays(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.builds(
            lambda p, n, m: {"type": "array", "items": p, "minItems": n, "maxItems": n + m},
            parts,
            st.integers(0, 2),
            st.integers(0, 2),
        )

    return st.recursive(leaves, lambda p: st.one_of(objects(p), arrays(p)), max_leaves=5)


@settings(max_examples=examples(20, 80))
@given(
    rows=st.lists(st.one_of(patterns().map(regex), schemas().map(schema)), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_a_completion_matches_any_regex_and_is_valid_for_any_schema(byte_level, rows, seed):
    outcomes = complete(constraints_of(byte_level), byte_level, rows, seed=seed, max_tokens=100)
    for params, (tokens, reason) in zip(rows, outcomes, strict=True):
        if reason == "stop" and params.regex:
            assert re.fullmatch(params.regex, text_of(byte_level, tokens)), params.regex
        elif reason == "stop":
            jsonschema.validate(json.loads(text_of(byte_level, tokens)), json.loads(params.json_schema))


def test_a_model_that_may_think_either_opens_its_thoughts_or_begins_the_answer():
    tokenizer = make(special=("<|end|>",), plain=("<think>", "</think>"))
    size, (opens, closes) = len(tokenizer), tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    constraints = Constraints(tokenizer, size, (tokenizer.eos_token_id,), thinking_format(tokenizer))
    a, b, prompt = id_in(tokenizer, "a"), id_in(tokenizer, "b"), np.array([id_in(tokenizer, "q")], dtype=np.int32)
    constraints.add(0, regex("a"), (), prompt)
    assert allowed(constraints, 0, size) == {a, opens}
    assert not constraints.accept(0, opens)
    free = set(range(size)) - {tokenizer.eos_token_id}
    for token in (a, b, a):
        assert allowed(constraints, 0, size) == free
        assert not constraints.accept(0, token)
    assert not constraints.accept(0, closes)
    assert allowed(constraints, 0, size) == {a}
    assert constraints.accept(0, a)
    constraints.add(1, regex("a"), (), prompt)
    assert constraints.accept(1, a)
    constraints.add(2, regex("ab"), (opens, b, closes, a), prompt)  # after a preemption
    assert allowed(constraints, 2, size) == {b}


def test_an_answer_that_begins_in_the_last_token_of_the_mark_is_continued_after_a_preemption():
    tokenizer = make(plain=(">a",), template="x<think>y</think>")
    size, a = len(tokenizer), id_in(tokenizer, "a")
    constraints = Constraints(tokenizer, size, (tokenizer.eos_token_id,), thinking_format(tokenizer))
    prompt = np.array(tokenizer.encode("q<think>"), dtype=np.int32)
    generated = [*tokenizer.encode("Hm.</think"), tokenizer.convert_tokens_to_ids(">a"), a]
    constraints.add(0, regex("a{4}"), (), prompt)
    for token in generated:
        assert not constraints.accept(0, token)
    constraints.add(1, regex("a{4}"), generated, prompt)
    for name in (0, 1):
        assert [constraints.accept(name, a) for _ in range(2)] == [False, True]


def test_a_mark_of_several_tokens_is_completed_before_the_thoughts():
    tokenizer = make(special=("<|end|>",), plain=("<|channel>", "<channel|>"))
    size, opens = len(tokenizer), tokenizer.encode("<|channel>thought\n", add_special_tokens=False)
    closes, a = tokenizer.convert_tokens_to_ids("<channel|>"), id_in(tokenizer, "a")
    constraints = Constraints(tokenizer, size, (tokenizer.eos_token_id,), thinking_format(tokenizer))
    constraints.add(0, regex("a", reasoning_budget=1), (), np.array([a], dtype=np.int32))
    assert allowed(constraints, 0, size) == {a, opens[0]}
    for place, token in enumerate(opens):
        assert place == 0 or allowed(constraints, 0, size) == {token}
        assert not constraints.accept(0, token)
    # The budget is for the thoughts: as without a grammar, no token of the mark counts.
    assert allowed(constraints, 0, size) == set(range(size)) - {tokenizer.eos_token_id}
    assert not constraints.accept(0, a)
    assert allowed(constraints, 0, size) == {closes}
    assert not constraints.accept(0, closes)
    assert allowed(constraints, 0, size) == {a}
    assert constraints.accept(0, a)


def test_when_the_budget_of_thoughts_is_used_up_only_their_end_may_follow():
    tokenizer = make(special=("<|end|>",), plain=("<think>", "</think>"))
    size, (opens, closes) = len(tokenizer), tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    constraints = Constraints(tokenizer, size, (tokenizer.eos_token_id,), thinking_format(tokenizer))
    a, prompt = id_in(tokenizer, "a"), np.array([opens], dtype=np.int32)
    constraints.add(0, SamplingParams(reasoning_budget=2), (), prompt)
    for _ in range(2):
        assert allowed(constraints, 0, size) == set(range(size))
        assert not constraints.accept(0, a)
    assert allowed(constraints, 0, size) == {closes}
    assert not constraints.accept(0, closes)
    assert allowed(constraints, 0, size) == set(range(size))
    constraints.add(1, SamplingParams(reasoning_budget=2, reasoning="off"), (), prompt)
    assert constraints.mask([1]) is None


def id_in(tokenizer: Any, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))
