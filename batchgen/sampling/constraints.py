"""Which tokens the running sequences may sample next. Knows token ids; knows neither logits nor how grammars are written.

A sequence has any name that its caller gives it, from its `add` to its `remove`.

A token is allowed if the sampled text with the token's bytes is the beginning of a text of the row's grammar (grammars.py). End tokens (the
model's and the row's `stop_token_ids`) are allowed where the text is complete and nowhere else; other special tokens never. So a
completion that ends with `stop` is a text of the grammar, and one that was cut (`length`) is the beginning of one. Within these limits
the choice is the model's: no spelling in tokens is preferred or forced.

A model that marks its thoughts thinks first. While it thinks, every token but the end tokens is allowed; the grammar begins with the
answer. If the prompt has not opened the thoughts, the mark that opens them may come first; after its first token only its other tokens are
allowed. Thoughts that have used up their budget are ended: only the tokens of the closing mark are allowed.

The masks of a batch are computed in another thread while the model runs; that thread does not hold the interpreter lock.
Shapes: N rows, V vocabulary. A word of a mask has 32 tokens, the first in the lowest bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.errors import RowError
from batchgen.parsers.thinking import ThinkingFormat, ThoughtStream
from batchgen.request import TokenArray
from batchgen.sampling.grammars import Grammar, Vocabulary, one_line
from batchgen.sampling.stopping import Detokenizer
from batchgen.sampling_params import SamplingParams
from batchgen.stats import counted

if TYPE_CHECKING:
    from llguidance import LLMatcher

_ALL = np.uint32(0xFFFFFFFF)
_MAX_SPELLINGS = 10_000
_ENOUGH = 100
"""Bytes of forced text behind which no more is looked for: about what a draft can hold."""


@dataclass(eq=False)
class _Guided:
    """A sequence that may not sample every token."""

    grammar: Grammar | None
    matcher: LLMatcher | None
    """None if only the length of the thoughts is limited."""
    ends: frozenset[int]
    """The tokens that end its completion."""
    tokens: list[int]
    """The sampled tokens of the answer, without an end token."""
    error: RowError | None
    thoughts: ThoughtStream | None = None
    """None once the answer has begun."""
    budget: int | None = None
    """Tokens that the thoughts may still take; None for no limit."""
    forced: list[int] = field(default_factory=list)
    """The only tokens that are allowed, in this order: they complete the mark that opens the thoughts, or end the thoughts."""
    spelling: tuple[int, bytes] = (0, b"")
    """The text that `Constraints.forced` guessed when it was asked last, and the number of `tokens` before it."""
    drafted: bool = False
    """Whether this is a copy of a sequence that has taken draft tokens."""

    @property
    def thinking(self) -> bool:
        return self.thoughts is not None and self.thoughts.thinking


@dataclass(frozen=True)
class _MaskJob:
    """Masks that are being computed in the other thread."""

    names: list[Hashable]
    drafts: list[tuple[int, ...]]
    masks: Future[NDArray[np.uint32]]


class Constraints:
    """The grammars of the running sequences, and the masks of their next tokens.

    `tokenizer` is transformers'. `vocab_size` is the width of the logits; the tokenizer may have more or fewer tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        thinking: ThinkingFormat | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._detokenizer = None if thinking is None else Detokenizer(tokenizer)
        self._opening = [] if thinking is None else _opening(tokenizer, thinking, vocab_size)
        """The tokens of the mark that opens thoughts, if the first of them is an added token; else empty."""
        self._vocabulary = Vocabulary(tokenizer, vocab_size)
        self._vocab_size = vocab_size
        self._eos = frozenset(i for i in eos_token_ids if i < vocab_size)
        self._rows: dict[Hashable, _Guided] = {}
        self._thread = ThreadPoolExecutor(1, "masks")  # starts with the first job
        self._job: _MaskJob | None = None
        self._spellings: dict[bytes, list[int]] = {}
        """By text that was guessed: tokens for it."""
        self._gaps = {b":": b" ", b",": b" "}
        """By the byte before it: the space that JSON may have there; empty if the model writes none."""

    def add(
        self, name: Hashable, params: SamplingParams, generated: Sequence[int] = (), prompt: TokenArray | None = None
    ) -> None:
        """Adds a sequence. After a preemption, `generated` are the tokens that it had already sampled. `prompt` shows whether it begins in thoughts.

        If its grammar cannot be used, `accept` raises that for this sequence alone. Raises `UsageError` if no grammar can be used
        (`Vocabulary.grammar`).
        """
        self._settle()
        if name in self._rows:
            raise ValueError(f"{name} is in use")
        thoughts = self._thoughts(params, prompt)
        if not params.constrained and thoughts is None:
            return
        grammar = self._vocabulary.grammar(params) if params.constrained else None
        ends = self._eos | {i for i in params.stop_token_ids if i < self._vocab_size}
        error = RowError("constraint_error", grammar.fault) if grammar is not None and grammar.fault else None
        matcher = None if grammar is None else grammar.matcher.deep_copy()
        row = self._rows[name] = _Guided(grammar, matcher, ends, [], error, thoughts, params.reasoning_budget)
        self._limit(row)
        taken = 0  # the beginning of an answer that is in the last token of the mark before it
        for token in generated if error is None else ():
            if self._thought(row, token):
                taken = len(row.tokens)
            else:
                row.tokens.append(token)
        rest = row.tokens[taken:]
        if row.error is None and rest and row.matcher is not None and not row.matcher.consume_tokens(rest):
            self._replace_matcher(row)

    def _thoughts(self, params: SamplingParams, prompt: TokenArray | None) -> ThoughtStream | None:
        """Returns the stream that follows the completion's thoughts; None if it cannot have thoughts, or its row asks for the raw text."""
        if self._thinking is None or self._detokenizer is None or prompt is None or params.reasoning != "auto":
            return None
        stream = self._detokenizer.thoughts(self._thinking, prompt)
        return stream if stream.thinking or self._opening else None

    def _thought(self, row: _Guided, token: int) -> bool:
        """Takes a sampled token. Returns whether it belongs to the thoughts or their marks, not to the answer."""
        if row.thoughts is None:
            return False
        if (
            row.matcher is not None and not row.thinking
        ):  # the mask allowed it to open the thoughts or to begin the answer
            if token not in self._opening[:1]:
                row.thoughts = None
                return False
            row.thoughts.thinking, row.forced = True, list(self._opening)
        if row.forced:
            row.forced.pop(0)
        elif row.budget is not None and row.thinking:
            row.budget -= 1
        begins = row.thoughts.append(token)
        if not begins:
            self._limit(row)
            return True
        answered, rest = row.thoughts.answer_start == 0, row.thoughts.begins.strip()
        row.thoughts = None
        row.forced.clear()
        if rest and row.matcher is not None:  # the token ends the mark and begins the answer
            row.tokens += self._tokenizer.encode(rest, add_special_tokens=False)
            if not row.matcher.consume_tokens(row.tokens):
                row.error = _went_wrong(row, "the mark behind the thoughts runs into the answer")
        return not answered

    def _limit(self, row: _Guided) -> None:
        """Ends the thoughts of a sequence whose budget for them is used up."""
        if row.thoughts is None or not row.thinking or row.budget is None or row.budget > 0 or row.forced:
            return
        row.forced = self._tokenizer.encode(row.thoughts.ending, add_special_tokens=False)

    def remove(self, name: Hashable) -> None:
        """Forgets a sequence. Does nothing for one without a grammar."""
        if name in self._rows:
            self._settle()
            del self._rows[name]

    def clear(self) -> None:
        """Forgets all sequences."""
        self._settle()
        self._rows.clear()

    def start(self, names: Sequence[Hashable], drafts: Sequence[tuple[int, ...]] = ()) -> None:
        """Starts to compute the masks of these sequences in another thread. `mask` of the same sequences and drafts then returns them."""
        self._settle()
        rows = [self._rows.get(name) for name in names] if self._rows else []
        if any(rows):
            self._job = _MaskJob(list(names), list(drafts), self._thread.submit(self._masks, rows, drafts))

    def mask(self, names: Sequence[Hashable], drafts: Sequence[tuple[int, ...]] = ()) -> torch.Tensor | None:
        """Returns the allowed tokens, int32 [N, ceil(V / 32)] on the host, in the order of `names`; None if none of them has a grammar.

        `drafts[i]` are tokens that sequence i is taken to have sampled too. It then stands in several rows that follow one another: the first
        without such tokens, each next one with one more. After a draft that ends the text all bits are set.

        Waits for what `start` began, or computes it now. Rows without a grammar have all bits set. Rows whose grammar has failed have
        all bits but those of end tokens set, so that a token is sampled and `accept` can raise the error; after drafts no bit is set.
        """
        if self._job is None or self._job.names != list(names) or self._job.drafts != list(drafts):
            self.start(names, drafts)
        if self._job is None:
            return None
        masks = self._job.masks.result()
        return torch.from_numpy(masks.view(np.int32)[:, : (self._vocab_size + 31) // 32])

    def accept(self, name: Hashable, token: int) -> bool:
        """Takes a token that was sampled under the sequence's mask. Returns whether the text is complete and nothing may follow: the completion
        ends with `stop`.

        Raises `RowError("constraint_error")` if the sequence's grammar has failed, here or before.
        """
        self._settle()
        row = self._rows.get(name)
        if row is None:
            return False
        if row.error is None and self._thought(row, token):
            if row.error is not None:
                raise row.error
            return False
        if row.matcher is None:
            return False
        ended = token in row.ends
        if row.error is None and ended and not row.matcher.is_accepting():
            row.error = _went_wrong(row, "an end token was sampled inside the text")
        elif row.error is None and not ended:
            row.tokens.append(token)
            if not row.matcher.consume_token(token):
                self._replace_matcher(row)
        if row.error is not None:
            raise row.error
        return ended or row.matcher.is_stopped()

    def forced(self, name: Hashable) -> Sequence[int]:
        """Returns a guess of the tokens of the text that the sequence's grammar forces next; nothing if it leaves a choice.

        A space that JSON may have is guessed, from what the model has written last, so that the text does not end there. It is spelled as the
        model has spelled the same text before, else as the tokenizer would.
        """
        self._settle()
        row = self._rows.get(name)
        if row is None or row.error is not None:
            return ()
        if row.forced:
            return row.forced
        if row.matcher is None or row.thoughts is not None:
            return ()
        self._learn(row)
        text = self._guess(row, row.matcher)
        start, written = row.spelling
        row.spelling = start, written + text
        if text and text not in self._spellings:
            if len(self._spellings) >= _MAX_SPELLINGS:
                self._spellings.clear()
            self._spellings[text] = self._vocabulary.spell(text)
        return self._spellings[text] if text else ()

    def _guess(self, row: _Guided, matcher: LLMatcher) -> bytes:
        """Returns the text that is forced next. Where JSON may have a space, in front of it or inside, it has what the model writes there."""
        text = matcher.compute_ff_bytes()
        while len(text) < _ENOUGH:
            gap = self._gaps.get(text[-1:] or self._vocabulary.text(row.tokens[-1:])[-1:])
            if gap is None:
                break
            behind = self._vocabulary.forced_behind(matcher, text + b" ")
            if behind is None or not (behind or (text and gap)):  # as at a comma in a string
                break
            text += gap + behind
        return text

    def _learn(self, row: _Guided) -> None:
        """Learns how the model has spelled the text that was guessed last, or what it has written in a gap instead."""
        start, text = row.spelling
        tokens = row.tokens[start : start + len(text)]
        written = self._vocabulary.text(tokens)
        if written.startswith(text):
            spelled = self._vocabulary.spelling(tokens, len(text))
            for number, token in enumerate(spelled):  # the ends of the text too: a row may have written its beginning
                self._spellings[text] = spelled[number:]
                text = text[len(self._vocabulary.text([token])) :]
        elif text.startswith(written):  # the rest is to come
            row.spelling = start, written
            return
        else:
            wrong = next(i for i, (a, b) in enumerate(zip(text, written, strict=False)) if a != b)
            before = self._vocabulary.text(row.tokens[start - 1 : start]) + text[:wrong]
            self._gaps[before[-1:]] = b" " if written[wrong : wrong + 1] == b" " else b""
        row.spelling = len(row.tokens), b""

    def _settle(self) -> None:
        """Waits until no matcher is in use by the other thread, and drops the masks that it has computed."""
        job, self._job = self._job, None
        if job is not None:
            job.masks.exception()  # waits, and raises nothing: nobody has asked for these masks

    def _after(self, row: _Guided | None, token: int) -> _Guided | None:
        """Returns a copy of a sequence that has taken a draft token; None where nothing limits what comes next, or nothing comes next."""
        if row is None or row.error is not None:
            return None
        row = replace(
            row, matcher=row.matcher and row.matcher.deep_copy(), tokens=list(row.tokens), thoughts=copy(row.thoughts),
            forced=list(row.forced), drafted=True,
        )  # fmt: skip
        if self._thought(row, token) or row.matcher is None:
            return row
        if token in row.ends:
            return None
        if not row.matcher.consume_token(token):
            row.error = _went_wrong(row, "it does not take a draft")
        return None if row.matcher.is_stopped() and row.error is None else row

    def _masks(self, rows: list[_Guided | None], drafts: Sequence[tuple[int, ...]]) -> NDArray[np.uint32]:
        """Returns the masks [N, V // 32 + 1]. They have room for llguidance's end token, whose bit is not set."""
        for i, before in enumerate(drafts):
            if before:
                rows[i] = self._after(rows[i - 1], before[-1])
        masks = np.full((len(rows), self._vocab_size // 32 + 1), _ALL, dtype=np.uint32)
        for i, row in enumerate(rows):
            if row is not None and row.thinking and row.error is None:
                self._mask_thoughts(masks[i], row)
        ours = {
            i: row
            for i, row in enumerate(rows)
            if row is not None and (row.error is not None or (row.matcher is not None and not row.thinking))
        }
        self._vocabulary.fill(masks, [(row.matcher, i) for i, row in ours.items() if row.error is None and row.matcher])
        for i, row in ours.items():
            if row.error is None and row.matcher is not None and row.matcher.is_error():
                self._replace_matcher(row)
                if row.error is None:
                    self._vocabulary.fill(masks, [(row.matcher, i)])
        self._place_ends(masks, ours)
        for i, row in ours.items():
            if row.error is None and row.thoughts is not None and self._opening:
                masks[i, self._opening[0] // 32] |= np.uint32(1 << self._opening[0] % 32)
        for i in np.flatnonzero(~masks.any(axis=1)).tolist():
            if ours[i].error is None:  # the model has no end token, or its end token is the only text that could follow
                ours[i].error = _went_wrong(ours[i], "no token may follow")
        failed = {i: row for i, row in ours.items() if row.error is not None}
        if failed:
            masks[list(failed)] = _ALL
            self._place_ends(masks, failed)
        for i, row in failed.items():
            if row.drafted:  # the step that begins there finds out whether the sequence itself fails
                masks[i] = 0
        return masks

    def _mask_thoughts(self, mask: NDArray[np.uint32], row: _Guided) -> None:
        """Writes the mask of a sequence in its thoughts: all tokens but the end tokens, or the next token of the mark that opens or closes them."""
        if row.forced:
            mask[:] = 0
            mask[row.forced[0] // 32] = np.uint32(1 << row.forced[0] % 32)
        elif row.matcher is not None:
            for token in row.ends:
                mask[token // 32] &= ~np.uint32(1 << token % 32)

    def _place_ends(self, masks: NDArray[np.uint32], rows: dict[int, _Guided]) -> None:
        """Allows the end tokens of the rows where llguidance allows its own end token, and nowhere else."""
        at = np.fromiter(rows, dtype=np.int64, count=len(rows))
        end = self._vocabulary.end
        whole = masks[at, end // 32] >> np.uint32(end % 32) & np.uint32(1)
        whole[[row.error is not None for row in rows.values()]] = 0
        _put(masks, at, [end], np.zeros_like(whole))
        _put(masks, at, self._eos, whole)
        for place, (i, row) in enumerate(rows.items()):
            if len(row.ends) > len(self._eos):
                _put(masks, np.array([i]), row.ends - self._eos, whole[place : place + 1])

    def _replace_matcher(self, row: _Guided) -> None:
        """Replaces a failed matcher by one with its own lexer. Marks the row failed if that fails too.

        Rows with the same grammar share a lexer and may have reached its limits together; alone, the row may be able to go on.
        """
        assert row.grammar is not None
        if row.drafted:
            row.error = _went_wrong(row, "it does not take a draft")
            return
        row.matcher = self._vocabulary.fresh(row.grammar)
        if row.tokens:
            row.matcher.consume_tokens(row.tokens)
        if not row.matcher.is_error() and not row.matcher.is_stopped():
            row.matcher.compute_bitmask()
        if row.matcher.is_error():
            row.error = _went_wrong(row, one_line(row.matcher.get_error()))


def _opening(tokenizer: Any, thinking: ThinkingFormat, vocab_size: int) -> list[int]:
    ids: list[int] = tokenizer.encode(thinking.open, add_special_tokens=False)
    marks = set(tokenizer.get_added_vocab().values())
    return ids if ids and ids[0] in marks and max(ids) < vocab_size else []


def _put(
    masks: NDArray[np.uint32], rows: NDArray[np.int64], tokens: Iterable[int], allowed: NDArray[np.uint32]
) -> None:
    """Sets the bit of each token, in the given rows [n], to `allowed` [n] (0 or 1)."""
    for token in tokens:
        word, bit = divmod(token, 32)
        masks[rows, word] = masks[rows, word] & ~np.uint32(1 << bit) | allowed << np.uint32(bit)


def _went_wrong(row: _Guided, why: str) -> RowError:
    return RowError("constraint_error", f"the grammar failed after {counted(len(row.tokens), 'token')}: {why}")
