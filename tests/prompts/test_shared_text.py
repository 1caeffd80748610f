"""A prefix that many texts share is tokenized once, and every text keeps its tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prompts import shared_text
from batchgen.prompts.encoding import Encoder, EncoderLimits
from batchgen.prompts.shared_text import common_characters

ROOT = "A task: say whether the film is good.\n" * 10
GROUPS = [ROOT + f"Examples of kind {kind}: " + "it was fine, it was not. " * 12 for kind in "abc"]


class Watched:
    """An encoder that records the texts it sends to the tokenizer, beside one that shares nothing."""

    def __init__(self, tools, cache_bytes=1 << 26, **options):
        limits = EncoderLimits(min_shared_call=0, shared_cache_bytes=cache_bytes)
        self.notes: list[str] = []
        self.encoder = Encoder(tools.byte_tokenizer(**options), self.notes.append, limits)
        self.whole = Encoder(tools.byte_tokenizer(**options))
        self.whole._shared = None
        self.seen: list[str] = []
        encode = self.encoder._encode

        def watched(texts, special):
            self.seen += texts
            return encode(texts, special)

        self.encoder._encode = watched

    def check_same_tokens(self, texts, special=True):
        found = [ids.tolist() for ids in self.encoder.encode(texts, special=special)]
        assert found == [ids.tolist() for ids in self.whole.encode(texts, special=special)]

    def tokenized_characters(self, texts):
        """Returns how many characters were tokenized, without the whole texts that the encoder checks itself with."""
        return sum(len(text) for text in self.seen if text not in texts)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_a_prefix_that_all_texts_share_is_tokenized_once(tools, special, eos):
    watched = Watched(tools, eos=eos)
    texts = [f"{ROOT}Film {i}: good?" for i in range(50)]
    watched.check_same_tokens(texts, special)
    head = ROOT.rindex(" good")
    assert watched.tokenized_characters(texts) - 2 * len(shared_text._PROBE) * special == head + sum(
        len(t) - head for t in texts
    )
    watched.seen.clear()
    watched.check_same_tokens([f"{ROOT}Film {i}: bad?" for i in range(50)], special)
    assert not any(text.startswith(ROOT) and len(text) == head for text in watched.seen), "it was kept"
    assert watched.notes == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["", ROOT, *GROUPS, "<s>" + ROOT]), st.text(max_size=8)).map("".join), max_size=12
    ),
    st.booleans(),
)
def test_any_texts_have_the_tokens_of_unshared_tokenization(tools, texts, special):
    Watched(tools).check_same_tokens(texts, special)


def test_a_text_that_cannot_be_tokenized_fails_alone(tools):
    watched = Watched(tools)
    texts = [f"{ROOT}Film {i}" for i in range(9)] + [f"{ROOT}Film \ud800"]
    out = watched.encoder.encode(texts, special=True)
    assert (
        out[9].message
        == f"the prompt cannot be tokenized: character {len(ROOT) + 5} is half of a surrogate pair (U+D800)"
    )
    assert [ids.tolist() for ids in out[:9]] == [ids.tolist() for ids in watched.whole.encode(texts[:9], special=True)]
    assert watched.notes == []


def test_a_difference_in_tokens_turns_sharing_off_with_one_note(tools):
    watched = Watched(tools)
    encode = watched.encoder._encode

    def broken(texts, special):
        longer = {ROOT[: ROOT.rindex(" good")]: np.array([9], dtype=np.int32)}
        return [
            np.append(ids, longer.get(text, ids[:0])) for text, ids in zip(texts, encode(texts, special), strict=True)
        ]

    watched.encoder._encode = broken
    texts = [f"{ROOT}Film {i}" for i in range(9)]
    watched.check_same_tokens(texts)
    watched.check_same_tokens(texts)
    assert watched.notes == [
        "the start of a prompt is no longer tokenized once for all prompts: a prompt had other tokens in parts than as a whole. "
        "No result is affected; please report this with the name of the model"
    ]


def test_the_cache_of_shared_text_is_bounded(tools):
    watched = Watched(tools, cache_bytes=6000)
    for group in GROUPS * 2:
        watched.check_same_tokens([f"{group}Now {i}" for i in range(5)])
        assert 0 < watched.encoder._shared._cached <= 6000
    assert watched.encoder._shared._cached == sum(
        shared_text._bytes_kept(piece, ids) for piece, ids in watched.encoder._shared._cache.items()
    )


@given(st.text("ab", max_size=300), st.text("ab", max_size=5), st.text("ab", max_size=5), st.integers(0, 400))
def test_the_length_of_the_prefix_two_texts_share_is_exact(begin, a, b, guess):
    one, other = begin + a, begin + b
    expected = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    assert common_characters(one, other, guess) == expected
