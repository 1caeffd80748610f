"""What may come next: guesses of the tokens that decoding sequences will sample, from grammars, outputs and prompts, and how likely they are right,
learned from those that were verified. Token ids only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from batchgen.drafting.continuations import CONTEXTS, LONGEST_CONTEXT, OutputIndex, OutputText, PromptText
from batchgen.scheduling.sequence import GenerationSequence

LONGEST = 24
"""Maximum number of draft tokens of a sequence in a step."""
RECENT = 256
"""Finished outputs that are kept until there is time to learn from them."""
PER_SECOND = 100_000
"""Tokens that are added to the index of outputs in a second, about."""
MIN_CHANCE = 0.2
"""Drafts that are less likely to be accepted are not followed further."""
DEPTHS = 4
"""Draft tokens from this place of a draft on have the same chance."""
PRIOR = 4.0
"""Weight of the first guess, in verified drafts."""
MEMORY = 300.0
"""Verified drafts of a kind that are remembered: older ones count less and less."""
FORGET = 0.98
"""What is known fades with every round of drafts, so that a kind that has failed is tried again after some time."""


class DraftKind(NamedTuple):
    """A kind of draft token. Tokens of one kind are taken to be right equally often, if those before them are."""

    source: str
    """One of `stats.DRAFT_SOURCES`."""
    context: int
    """Number of tokens that the context had by which it was found; 0 for a grammar."""
    depth: int
    """Number of draft tokens before it, up to `DEPTHS`."""
    greedy: bool
    """Whether the row takes its likeliest tokens."""


class Chances:
    """The chance of each kind of draft token."""

    def __init__(self) -> None:
        self._seen: dict[DraftKind, list[float]] = {}  # right ones, verified ones

    def of(self, kind: DraftKind) -> float:
        """Returns the chance that a token of this kind is right."""
        right, verified = self._seen.get(kind, (0.0, 0.0))
        return (right + PRIOR * _guess(kind)) / (verified + PRIOR)

    def note(self, kind: DraftKind, right: bool) -> None:
        """Takes note that a token was verified."""
        seen = self._seen.setdefault(kind, [0.0, 0.0])
        if seen[1] >= MEMORY:
            seen[0] *= 0.5
            seen[1] *= 0.5
        seen[0] += right
        seen[1] += 1

    def fade(self) -> None:
        """Brings what is known closer to the first guess."""
        for seen in self._seen.values():
            seen[0] *= FORGET
            seen[1] *= FORGET


def _guess(kind: DraftKind) -> float:
    if kind.source == "grammar":
        return 0.97
    return (0.5 if kind.context < 4 else 0.65 if kind.context < 8 else 0.8) + 0.03 * kind.depth


class DraftToken(NamedTuple):
    """A guess of a token."""

    token: int
    kind: DraftKind
    chance: float
    """The chance that it and all draft tokens before it are right."""


Draft = list[DraftToken]


class Guesses:
    """Makes drafts, and learns from outputs and from what became of drafts."""

    def __init__(self, forced: Callable[[GenerationSequence], Sequence[int]]) -> None:
        """`forced` returns a guess of the tokens of the text that a sequence's grammar forces next; nothing if it leaves a choice."""
        self._forced = forced
        self.chances = Chances()
        self._outputs = OutputIndex()
        self._texts: dict[GenerationSequence, tuple[OutputText, PromptText]] = {}
        self._recent: deque[GenerationSequence] = deque(maxlen=RECENT)

    def finished(self, seq: GenerationSequence) -> None:
        """Keeps a finished output, to learn from it."""
        self._recent.append(seq)

    def learn(self, decoding: Sequence[GenerationSequence], seconds: float) -> None:
        """Reads what the sequences have written since the last time, and adds it to the index for about so many seconds; the rest next time."""
        left = seconds * PER_SECOND
        for seq in decoding:
            text = self._read(seq)
            if left > 0:
                left -= self._outputs.add(text, _group(seq))
        while self._recent and left > 0:
            seq = self._recent.popleft()
            left -= self._outputs.add(self._read(seq), _group(seq))
            del self._texts[seq]
        if len(self._texts) > 2 * len(decoding) + 64:  # of rows that were cancelled or preempted
            self._texts = {seq: self._texts[seq] for seq in decoding}

    def drafts(self, decoding: Iterable[GenerationSequence]) -> dict[GenerationSequence, Draft]:
        """Returns a draft for each of the sequences that one was found for. `learn` has read them."""
        self.chances.fade()
        drafts = ((seq, self._draft(seq)) for seq in decoding)
        return {seq: draft for seq, draft in drafts if draft}

    def _draft(self, seq: GenerationSequence) -> Draft:
        limit = min(LONGEST, seq.request.max_tokens - seq.num_sampled - 1)
        greedy, chance = seq.request.params.greedy, 1.0
        draft: Draft = []
        text, prompt = self._texts[seq]
        context = text.tokens[-LONGEST_CONTEXT:]
        found, source, count = self._forced(seq), "grammar", 0
        while len(draft) < limit and chance > MIN_CHANCE:
            if not found:
                found, source, count = self._follow(context, _group(seq), prompt, greedy)
                if not found:
                    break
            for token in found[: limit - len(draft)]:
                kind = DraftKind(source, count, min(len(draft), DEPTHS), greedy)
                chance *= self.chances.of(kind)
                draft.append(DraftToken(token, kind, chance))
                context.append(token)
                if chance <= MIN_CHANCE:
                    break
            found = ()
        return draft

    def _follow(
        self, context: list[int], group: Hashable, prompt: PromptText, greedy: bool
    ) -> tuple[Sequence[int], str, int]:
        """Returns the continuation that is likeliest to be right, its source, and the number of tokens that it was found by."""
        best: tuple[Sequence[int], str, int] = ((), "", 0)
        chance = 0.0
        for count in CONTEXTS:
            if count > len(context):
                continue
            last = tuple(context[-count:])
            for source in ("outputs", "prompt"):
                likely = self.chances.of(DraftKind(source, count, 0, greedy))
                if likely > chance:
                    found = prompt.find(last) if source == "prompt" else self._outputs.find(group, last)
                    if not found and source == "outputs" and group is not None:
                        found = self._outputs.find(None, last)
                    if found:
                        best, chance = (found, source, count), likely
        return best

    def _read(self, seq: GenerationSequence) -> OutputText:
        if seq not in self._texts:
            prompt = seq.request.text_tokens
            self._texts[seq] = OutputText(prompt), PromptText(prompt)
        text = self._texts[seq][0]
        text.tokens += seq.generated[len(text.tokens) - text.start :]
        return text


def _group(seq: GenerationSequence) -> Hashable:
    """Returns the name of the rows that share the sequence's last prefix node; None for the whole job."""
    return None if seq.parent is None else (seq.window, seq.parent.node.index)
