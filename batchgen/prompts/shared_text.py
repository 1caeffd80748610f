"""Text that many texts begin with is tokenized once: where to cut them, and their tokens put together again. Knows nothing of rows.

The texts of a call are sorted, neighbours' common beginnings make a tree (as token ids do in the prefix tree), and each of its nodes is tokenized alone, up to
the last place where a cut is known to be good (`cuts.Cuts`). Of every call a few texts are also tokenized whole; one difference, and nothing is cut any more.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from batchgen.prompts.cuts import Cuts
from batchgen.request import TokenArray

Encode = Callable[[Sequence[str], bool], list[TokenArray | None]]
"""Tokens of texts, with special ones around each or without; None for one that cannot be tokenized."""

_MIN_PIECE = 200
"""Characters that are worth a piece of their own."""
_MIN_CALL = 10_000
"""Characters of a call that is worth a look."""
_CACHE_BYTES = 1 << 26
_CHECKED = 4
"""Of each call: texts that begin with something new that are checked, and half as many others."""
_PROBE = "a b, c"
# What puts the same tokens around any text.
_AROUND = ("ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing")


@dataclass(slots=True, eq=False)
class _Node:
    """The first `end` characters of some of the texts."""

    text: str
    """One of them."""
    end: int
    parent: _Node | None
    ids: TokenArray | None = None
    new: bool = False
    """Whether some of it has not been seen before."""


class SharedText:
    """Of one tokenizer. `encode` is the whole tokenization; `note` is told if it ever differs."""

    def __init__(self, backend: Any, encode: Encode, note: Callable[[str], None]) -> None:
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
        """The tokens of each text, None for one that may not be tokenized; None where whole tokenization is the way."""
        if not self._on or len(texts) < 2 or sum(map(len, texts)) < _MIN_CALL or not self._cuts.any:
            return None
        around = self._around if special else (_NO_IDS, _NO_IDS)
        if around is None:
            return None
        nodes = _tree(texts, self._cuts)
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
        """Gives the nodes, and those above them, their ids."""
        used: dict[_Node, str] = {}
        for one in nodes:
            node: _Node | None = one
            while node is not None and node not in used:
                used[node] = node.text[node.parent.end if node.parent else 0 : node.end]
                node = node.parent
        lacking = list(dict.fromkeys(piece for piece in used.values() if piece not in self._cache))
        pieces = {
            piece: ids for piece, ids in zip(lacking, self._encode(lacking, False), strict=True) if ids is not None
        }
        for node in sorted(used, key=lambda node: node.end):  # parents before what is below them
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
                self._cached += _size(piece, new[piece])
            elif piece in self._cache:
                self._cache.move_to_end(piece)
        while self._cached > _CACHE_BYTES:
            self._cached -= _size(*self._cache.popitem(last=False))

    def _checks(
        self, texts: Sequence[str], nodes: Sequence[_Node | None], found: Sequence[TokenArray | None], special: bool
    ) -> bool:
        """Whether a sample of the texts has the tokens that it has as a whole."""
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
                    "shared text is not tokenized once: put together from its parts, a prompt has other tokens than as a "
                    "whole; please report it, with the name of the model"
                )
                return False
        return True


_NO_IDS: TokenArray = np.zeros(0, dtype=np.int32)


def _size(piece: str, ids: TokenArray) -> int:
    return len(piece) + ids.nbytes + 200


def _around(backend: Any, encode: Encode) -> tuple[TokenArray, TokenArray] | None:
    """The special tokens before and behind a text; None where they cannot be told."""
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


def _tree(texts: Sequence[str], cuts: Cuts) -> list[_Node | None]:
    """For each text the deepest node above it, None for none."""
    agreed = common_length(min(texts), max(texts))
    order = sorted(range(len(texts)), key=lambda i: texts[i][agreed:])
    above: list[_Node | None] = [None] * len(texts)
    stack: list[_Node] = []  # the open nodes, each deeper than the one below it
    length = 0
    for place, i in enumerate(order):
        text = texts[i]
        if place + 1 < len(order):
            length = common_length(text, texts[order[place + 1]], max(length, agreed))
        else:
            length = 0
        cut = cuts.last(text, length) or 0 if length >= _MIN_PIECE else 0
        if cut > (stack[-1].end if stack else 0):
            stack.append(_Node(text, cut, stack[-1] if stack else None))
        above[i] = stack[-1] if stack else None
        while stack and stack[-1].end > cut:
            closed = stack.pop()
            if cut > (stack[-1].end if stack else 0):
                stack.append(_Node(text, cut, stack[-1] if stack else None))
                closed.parent = stack[-1]
    worth: dict[_Node, _Node | None] = {}
    return [_worth(node, worth) for node in above]


def _worth(node: _Node | None, known: dict[_Node, _Node | None]) -> _Node | None:
    """The node, or the first above it that has characters enough of its own; its parents are put right on the way."""
    path = []
    while node is not None and node not in known:
        path.append(node)
        node = node.parent
    above = known[node] if node is not None else None
    for one in reversed(path):
        one.parent = above
        above = known[one] = one if one.end - (above.end if above else 0) >= _MIN_PIECE else above
    return above


def common_length(a: str, b: str, guess: int = 0) -> int:
    """Number of characters that both begin with; quick where it is a little more than `guess`."""
    most = min(len(a), len(b))
    low = guess if guess <= most and a[:guess] == b[:guess] else 0
    step = 64
    while low < most:
        high = min(most, low + step)
        if a[low:high] == b[low:high]:
            low, step = high, step * 2
        elif high - low == 1:
            return low
        else:
            step = (high - low) // 2
            most = high
    return low
