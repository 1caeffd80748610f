"""Tokenizes text that many texts begin with once, and puts the token ids together again. Knows nothing of rows.

The texts of a call are sorted, and the beginnings that neighbours share become a tree (as token ids do in the prefix tree). Each node
of the tree is tokenized alone, up to a place where the tokenizer cuts whatever text follows (`Cuts`). A few texts of every call are also
tokenized whole. If one of them has other token ids, the job stops cutting texts.
"""

from __future__ import annotations

import json
import random
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from batchgen.request import TokenArray

Encode = Callable[[Sequence[str], bool], list[TokenArray | None]]
"""Token ids of texts, with special tokens around each or without; None for a text that cannot be tokenized."""

_MIN_PIECE = 200
"""Characters below which a shared piece is not worth its own tokenization."""
_MIN_SAVED = 1_000
"""Characters that a piece must save, because about 700 are tokenized to find where it can be cut."""
_CHECKED = 4
"""Texts with a new beginning that are checked in every call, and half as many others."""
_SEARCHED = (256, 4096)
"""How many characters at the end of a known text are searched for a cut: first few, because they must be tokenized for it."""
_TRIES = 16
"""Places that are tried for one cut."""
_MIN_PIECES_AFTER = 2
"""Pieces between a cut and the end of the known text; more text may change the last one."""
_PROBE = "a b, c"
# Post-processors that put the same tokens around any text.
_AROUND = ("ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing")


@dataclass(slots=True, eq=False)
class _Node:
    """The first `end` characters of some of the texts."""

    text: str
    """One of these texts."""
    end: int
    parent: _Node | None
    first: int
    """Place of the first of these texts in sorted order."""
    rows: int = 0
    """Number of these texts."""
    ids: TokenArray | None = None
    new: bool = False
    """Whether a part of it was not in the cache before this call."""


class SharedText:
    """The shared beginnings of the texts of one tokenizer."""

    def __init__(
        self, backend: Any, encode: Encode, note: Callable[[str], None], min_call: int, cache_bytes: int
    ) -> None:
        """`backend` is a `tokenizers.Tokenizer`, `encode` tokenizes whole texts, and `note` is told if the results ever differ.

        Calls with fewer than `min_call` characters are not searched. Tokens of shared text are kept in `cache_bytes` of memory.
        """
        self._min_call, self._cache_bytes = min_call, cache_bytes
        self._backend, self._encode, self._note = backend, encode, note
        self._on = True
        self._cache: OrderedDict[str, TokenArray] = OrderedDict()
        self._cached = 0
        self._random = random.Random(0)

    @cached_property
    def _cuts(self) -> Cuts:
        return Cuts(self._backend)

    @cached_property
    def _around(self) -> tuple[TokenArray, TokenArray] | None:
        return _around(self._backend, self._encode)

    def encode(self, texts: Sequence[str], special: bool) -> list[TokenArray | None] | None:
        """Returns the token ids of each text (None for one that cannot be tokenized), or None if the texts must be tokenized whole."""
        lengths = sorted(map(len, texts))
        may_share = len(texts) > 1 and lengths[-2] >= _MIN_PIECE and sum(lengths) >= self._min_call
        if not (may_share and self._on and self._cuts.any):
            return None
        around = self._around if special else (_NO_IDS, _NO_IDS)
        if around is None:
            return None
        nodes = _text_tree(texts, self._cuts)
        if not any(nodes):
            return None
        self._tokenize([node for node in nodes if node is not None])
        own = self._encode([t[node.end :] if node else t for t, node in zip(texts, nodes, strict=True)], False)
        found: list[TokenArray | None] = []
        for node, ids in zip(nodes, own, strict=True):
            if ids is None or (node is not None and node.ids is None):
                found.append(None)
            else:
                begin = node.ids if node is not None and node.ids is not None else _NO_IDS
                found.append(np.concatenate((around[0], begin, ids, around[1])))
        return found if self._checks(texts, nodes, found, special) else None

    def _tokenize(self, nodes: Sequence[_Node]) -> None:
        """Gives token ids to the nodes and to their ancestors."""
        used: dict[_Node, str] = {}
        for one in nodes:
            node: _Node | None = one
            while node is not None and node not in used:
                used[node] = node.text[node.parent.end if node.parent else 0 : node.end]
                node = node.parent
        missing = list(dict.fromkeys(piece for piece in used.values() if piece not in self._cache))
        pieces = {
            piece: ids for piece, ids in zip(missing, self._encode(missing, False), strict=True) if ids is not None
        }
        for node in sorted(used, key=lambda node: node.end):  # parents first
            piece, parent = used[node], node.parent
            ids = pieces.get(piece, self._cache.get(piece))
            node.new = piece in pieces or (parent is not None and parent.new)
            if ids is not None and (parent is None or parent.ids is not None):
                node.ids = ids if parent is None or parent.ids is None else np.concatenate((parent.ids, ids))
        self._keep(list(dict.fromkeys(used.values())), pieces)

    def _keep(self, used: Sequence[str], new: dict[str, TokenArray]) -> None:
        for piece in used:
            if piece in new:
                self._cache[piece] = new[piece]
                self._cached += _bytes_kept(piece, new[piece])
            elif piece in self._cache:
                self._cache.move_to_end(piece)
        while self._cached > self._cache_bytes:
            self._cached -= _bytes_kept(*self._cache.popitem(last=False))

    def _checks(
        self, texts: Sequence[str], nodes: Sequence[_Node | None], found: Sequence[TokenArray | None], special: bool
    ) -> bool:
        """Tokenizes a sample of the texts whole. Returns whether they have the same token ids; if not, nothing is cut any more."""
        first: dict[_Node, int] = {}
        for i, node in enumerate(nodes):
            if node is not None and found[i] is not None:
                first.setdefault(node, i)
        new = [i for node, i in first.items() if node.new]
        old = [i for i, node in enumerate(nodes) if node is not None and found[i] is not None]
        chosen = {
            *self._random.sample(new, min(_CHECKED, len(new))),
            *self._random.sample(old, min(_CHECKED // 2, len(old))),
        }
        whole = self._encode([texts[i] for i in chosen], special)
        for i, expected in zip(chosen, whole, strict=True):
            ids = found[i]
            if ids is None or expected is None or not np.array_equal(ids, expected):
                self._on = False
                self._note(
                    "the start of a prompt is no longer tokenized once for all prompts: a prompt had other tokens in parts than as a whole. "
                    "No result is affected; please report this with the name of the model"
                )
                return False
        return True


_NO_IDS: TokenArray = np.zeros(0, dtype=np.int32)


def _bytes_kept(piece: str, ids: TokenArray) -> int:
    return len(piece) + ids.nbytes + 200


def _around(backend: Any, encode: Encode) -> tuple[TokenArray, TokenArray] | None:
    """The special tokens before and after a text; None if they are not the same for every text."""
    state = backend.post_processor
    kinds = [state] if state is not None else []
    while any(type(kind).__name__ == "Sequence" for kind in kinds):
        kinds = [part for kind in kinds for part in (list(kind) if type(kind).__name__ == "Sequence" else [kind])]
    if any(type(kind).__name__ not in _AROUND for kind in kinds):
        return None
    plain, whole = encode([_PROBE], False)[0], encode([_PROBE], True)[0]
    if plain is None or whole is None or len(plain) == 0:
        return None
    places = range(len(whole) - len(plain) + 1)
    found = [i for i in places if np.array_equal(whole[i : i + len(plain)], plain)]
    return (whole[: found[0]], whole[found[0] + len(plain) :]) if len(found) == 1 else None


# -- the tree of shared beginnings


def _text_tree(texts: Sequence[str], cuts: Cuts) -> list[_Node | None]:
    """Returns the deepest node above each text; None for a text that shares nothing."""
    agreed = common_characters(min(texts), max(texts))
    order = sorted(range(len(texts)), key=lambda i: texts[i][agreed:])
    above: list[_Node | None] = [None] * len(texts)
    stack: list[_Node] = []  # the open nodes, each deeper than the one below it
    length = 0
    for place, i in enumerate(order):
        text = texts[i]
        if place + 1 < len(order):
            length = common_characters(text, texts[order[place + 1]], max(length, agreed))
        else:
            length = 0
        end = length if length >= _MIN_PIECE else 0
        if end > (stack[-1].end if stack else 0):
            stack.append(_Node(text, end, stack[-1] if stack else None, place))
        above[i] = stack[-1] if stack else None
        while stack and stack[-1].end > end:
            closed = stack.pop()
            closed.rows = place + 1 - closed.first
            if end > (stack[-1].end if stack else 0):
                stack.append(_Node(text, end, stack[-1] if stack else None, closed.first))
                closed.parent = stack[-1]
    known: dict[_Node, _Node | None] = {}
    return [_cut(node, cuts, known) for node in above]


def _cut(node: _Node | None, cuts: Cuts, known: dict[_Node, _Node | None]) -> _Node | None:
    """Moves the end of the node and of its ancestors back to a cut. Returns the node, or its nearest ancestor that keeps enough text."""
    path = []
    while node is not None and node not in known:
        path.append(node)
        node = node.parent
    above = known[node] if node is not None else None
    for one in reversed(path):
        start = above.end if above else 0
        one.parent = above
        own = one.end - start
        if own >= _MIN_PIECE and own * (one.rows - 1) >= _MIN_SAVED:
            one.end = cuts.last(one.text, start, one.end) or start
            above = known[one] = one if one.end > start else above
        else:
            known[one] = above
    return above


def common_characters(a: str, b: str, guess: int = 0) -> int:
    """Number of characters that both texts begin with; fast if it is slightly more than `guess`."""
    high = min(len(a), len(b))
    low = guess if guess <= high and a[:guess] == b[:guess] else 0
    step = 64
    while low < high:
        stop = min(high, low + step)
        if a[low:stop] == b[low:stop]:
            low, step = stop, step * 2
        elif stop - low == 1:
            return low
        else:
            step = (stop - low) // 2
            high = stop
    return low


# -- where a text can be cut


class Cuts:
    """Places where a text can be cut so that the token ids of its parts are those of the whole, whatever text follows.

    The tokenizer is asked how it splits the end of a known text. It finds added tokens first, then normalizes, splits into pieces
    (the pre-tokenizer), and tokenizes each piece alone. A place is a cut if

    - it lies between two pieces, and the second begins with white space or is an added token,
    - at least two more pieces follow it, so that more text cannot move it, and no added token that crosses it can still begin, and
    - both parts of the known text, tokenized alone, have the token ids of the whole.

    A BPE that splits nothing (Llama 2, Gemma) is cut before a space where no token of its vocabulary reaches across.
    """

    def __init__(self, backend: Any) -> None:
        """`backend` is a `tokenizers.Tokenizer`."""
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._marks = {i for i, token in added.items() if not token.normalized}
        """Added tokens that are found in the text as it is, before everything else."""
        self._longest = max((len(token.content) for token in added.values()), default=0)
        self._unmergeable = _unmergeable(backend)
        # Added tokens that depend on their neighbours or on normalized blanks, and merges left out by chance, may change at any place.
        unsafe = any(t.single_word or (t.normalized and _holds_blank(t.content)) for t in added.values())
        unsafe = unsafe or bool(getattr(backend.model, "dropout", None))
        splits = len(set(backend.encode(_PROBE, add_special_tokens=False).word_ids)) > 1
        self.any = not unsafe and bool(splits or self._unmergeable or self._marks)
        """Whether a text can have a cut."""

    def last(self, text: str, start: int, stop: int) -> int | None:
        """Returns the last cut in `text[start:stop]`, which depends on nothing else; None if none is found near its end."""
        if not self.any:
            return None
        for size in _SEARCHED:
            begin = max(start, stop - self._longest - size)
            known = text[begin:stop]
            whole = self._backend.encode(known, add_special_tokens=False)
            for place in islice(self._places(known, whole), _TRIES):
                if self._ids(known[:place]) + self._ids(known[place:]) == whole.ids:
                    return begin + place
            if begin == start:
                break
        return None

    def _ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _places(self, known: str, whole: Any) -> Iterator[int]:
        """Places that may be cuts, the last one first."""
        words, offsets, stop = whole.word_ids, whole.offsets, len(known) - max(1, self._longest)
        for i in range(len(words) - 1, 0, -1):
            if words[i] == words[i - 1] or words[i] > words[-1] - _MIN_PIECES_AFTER + 1:
                continue
            is_mark = whole.ids[i] in self._marks
            place = offsets[i][0] if is_mark else offsets[i - 1][1]
            # Other places are where a blank follows what is none.
            if 0 < place <= stop and (is_mark or (known[place] in " \n" and not known[place - 1].isspace())):
                yield place
        if self._unmergeable:
            place = known.rfind(" ", 1, max(1, stop + 1))
            while place > 0:
                if known[place - 1] in self._unmergeable:
                    yield place
                place = known.rfind(" ", 1, place)


def _holds_blank(text: str) -> bool:
    plain = unicodedata.normalize("NFKC", text)
    return any(character.isspace() or character == "▁" for character in plain)


def _unmergeable(backend: Any) -> frozenset[str]:
    """Characters that no token of a BPE vocabulary has before a space; none if the tokenizer may split or rewrite a text."""
    model, blank = backend.model, _blank_of_whole_pieces(backend)
    if blank is None or type(model).__name__ != "BPE" or getattr(model, "ignore_merges", False):
        return frozenset()
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return frozenset()
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if blank not in vocabulary:
        return frozenset()
    merged = {token[i - 1] for token in vocabulary for i in range(1, len(token)) if token[i] == blank}
    return frozenset(token for token in vocabulary if len(token) == 1) - merged


def _blank_of_whole_pieces(backend: Any) -> str | None:
    """The character that stands for a space (such as '▁') if the tokenizer splits nothing; None if it may split or rewrite anything else."""
    blank = " "
    for part in _json_parts(backend.normalizer, "normalizers"):
        if part["type"] != "Replace" or part["pattern"] != {"String": " "} or blank != " " or len(part["content"]) != 1:
            return None
        blank = part["content"]
    stages = _json_parts(backend.pre_tokenizer, "pretokenizers")
    for stage in stages:
        if stage["type"] == "Metaspace" and not stage.get("split", True) and blank == " " and stage is stages[-1]:
            blank = stage["replacement"]
        elif not (stage["type"] == "Split" and stage["pattern"] == {"String": " "} and blank != " "):
            return None
    return str(blank)


def _json_parts(part: Any, name: str) -> list[Mapping[str, Any]]:
    """The parts of a normalizer or pre-tokenizer in order, as its file holds them; `name` is that of the parts of a sequence."""

    def flat(state: Any) -> list[Mapping[str, Any]]:
        return [one for inner in state[name] for one in flat(inner)] if state["type"] == "Sequence" else [state]

    return [] if part is None else flat(json.loads(part.__getstate__()))
