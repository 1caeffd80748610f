"""Gathers the leaves of each row until its result is complete. Knows tokens and numbers, not the device."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from batchgen.errors import RowError
from batchgen.parsers.heads import OutputHead
from batchgen.parsers.json_schemas import is_valid
from batchgen.request import Image, Leaf, Request
from batchgen.result import Completion, OnResult, OnToken, Result, Score, TokenLogprob
from batchgen.sampling.philox import uniforms
from batchgen.scheduling.batch import SequenceUpdate
from batchgen.scheduling.scheduler import Scheduler
from batchgen.scheduling.sequence import GenerationSequence, TokenScore
from batchgen.scheduling.waiting import Window


@dataclass(slots=True, eq=False)
class RequestState:
    """A request whose leaves are being generated or scored."""

    request: Request
    on_result: OnResult
    on_token: OnToken | None
    window: Window | None = None
    """None until its leaves are in one."""
    places: dict[int, int] = field(default_factory=dict)
    """By number of a leaf: its place in the window, in depth-first order."""
    completions: dict[int, Completion] = field(default_factory=dict)
    """By number: the completions that have ended."""
    halted: dict[int, Completion] = field(default_factory=dict)
    """By number: the completions that go on in another window (`ResultAssembler.beyond`), as they are so far."""
    reasoning_tokens: dict[int, int] = field(default_factory=dict)
    """By number: the tokens of thoughts, and of the marks around them, in the completions that have ended."""
    scores: dict[int, list[TokenScore]] = field(default_factory=dict)
    """By number: `GenerationSequence.text_scores` of the texts that have been scored."""
    began: bool = False
    """Whether one of its leaves has run."""

    @property
    def whole(self) -> bool:
        """Whether all leaves have ended or halted."""
        return len(self.completions) + len(self.halted) + len(self.scores) == self.request.leaves

    def result(self, head: OutputHead | None, piece: Callable[[int], str]) -> Result:
        """Returns the result of a row that is whole. `head` and `piece`: see `ResultAssembler`."""
        if self.request.texts:
            return self._scored(head, piece)
        completions = tuple(self.completions[i] for i in range(self.request.leaves))
        return _generated(self.request, completions, sum(self.reasoning_tokens.values()))

    def failed(self, error: RowError) -> Result:
        return Result.from_error(self.request.row, error, len(self.request.tokens))

    def _scored(self, head: OutputHead | None, piece: Callable[[int], str]) -> Result:
        scores = [self.scores[i] for i in range(self.request.leaves)]
        result = partial(
            Result, row=self.request.row, prompt_tokens=len(self.request.tokens), truncated=self.request.truncated
        )
        if self.request.prompt_logprobs == "prompt":
            scores[0] = scores[0][:-1]  # without that of NO_TEXT
        if head is not None:
            output = scores[0][0].output
            assert output is not None
            if not np.isfinite(output).all():
                return self.failed(RowError("numerical_error", "the model's outputs for the prompt are not numbers"))
            fields = head.result_of(output)
            if "choice_probs" in fields:
                fields["choice_probs"] = self._top_choices(fields["choice_probs"], fields["text"])
            return result(**fields)
        sums = [math.fsum(token.logprob for token in tokens) for tokens in scores]
        if any(math.isnan(total) for total in sums):
            return self.failed(RowError("numerical_error", "the model's logits for the text are not numbers"))
        choices = self.request.params.choices
        if choices:
            probs = _normalised(sums)
            text = choices[_chosen(sums, probs, self.request)]
            shown = self._top_choices(dict(zip(choices, probs, strict=True)), text)
            return result(text=text, finish_reason="stop", choice_probs=shown)
        greedy = all(token.likeliest for token in scores[0])
        return result(
            text=None,
            finish_reason=None,
            score=Score(sums[0], len(scores[0]), greedy),
            prompt_logprobs=self._prompt_logprobs([token.logprob for token in scores[0]], piece),
        )

    def _top_choices(self, probs: dict[str, float], text: str) -> dict[str, float]:
        """Returns the probabilities that the row asks for: all in their order, or those of the likeliest labels and of the one that was chosen."""
        count = self.request.params.top_choices
        if count is None:
            return probs
        likeliest = sorted(probs, key=lambda label: -probs[label])
        return {label: probs[label] for place, label in enumerate(likeliest) if place < count or label == text}

    def _prompt_logprobs(self, logprobs: list[float], piece: Callable[[int], str]) -> tuple[TokenLogprob, ...] | None:
        wanted = self.request.prompt_logprobs
        if not wanted:
            return None
        if wanted == "prompt":
            logprobs = [math.nan, *logprobs]
        tokens = (self.request.tokens if wanted == "prompt" else self.request.texts[0]).tolist()
        return tuple(TokenLogprob(piece(t), t, p) for t, p in zip(tokens, logprobs, strict=True))


def cancelled_result(request: Request) -> Result:
    """Returns the result of a request that was cancelled before an engine had it."""
    if request.texts:
        return Result.from_error(request.row, _ended("cancelled"), len(request.tokens))
    return _generated(request, (Completion(text="", finish_reason="cancelled"),) * request.leaves)


def _generated(request: Request, completions: tuple[Completion, ...], reasoning_tokens: int = 0) -> Result:
    """Returns the result of completions, of which `reasoning_tokens` tokens are thoughts."""
    params, schema = request.params, request.params.json_schema
    if schema is not None:  # valid is also whole: the first digits of a number are a number too
        completions = tuple(
            replace(c, valid=c.finish_reason == "stop" and is_valid(c.text, schema)) for c in completions
        )
    first = completions[0]
    return Result(
        row=request.row,
        text=first.text,
        finish_reason=first.finish_reason,
        prompt_tokens=len(request.tokens),
        completion_tokens=sum(len(c.token_ids) for c in completions),
        token_ids=first.token_ids,
        reasoning=first.reasoning,
        tool_calls=first.tool_calls,
        reasoning_tokens=reasoning_tokens,
        truncated=request.truncated,
        valid=first.valid,
        completions=completions if params.n > 1 or params.logprobs is not None else (),
    )


def _unfinished(completion: Completion) -> Completion:
    """Returns a completion as one that goes on."""
    return Completion(text="", finish_reason="", token_ids=completion.token_ids, logprobs=completion.logprobs)


def _ended(reason: str) -> RowError:
    return RowError(reason, f"the row was ended ({reason}) before it was done")


class ResultAssembler:
    """The unfinished rows: which leaves of each have ended, and when its time is up. Makes the results of those that are done. A row is known by its number.

    `piece` returns the text of a token. `timeout` is in seconds from a row's start; None for no limit. `head` is that of the model.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        piece: Callable[[int], str],
        timeout: float | None,
        head: OutputHead | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._head = head
        self._piece = piece
        self._timeout = timeout
        self._rows: dict[int, RequestState] = {}
        self._started: dict[int, RequestState] = {}
        """Those that have run, in this run or an earlier one: only they can have tokens."""
        self.beyond: dict[int, Request] = {}
        """By row, for requests that run with fewer `max_tokens` than they have: the whole request, as which they go on in another window. It is `long` then."""
        self._waiting: dict[int, RequestState] = {}
        """Rows that are to go on."""
        self._deadlines = OrderedDict[RequestState, float]()  # in order, because all rows have the same time
        self._cancelled: deque[int] = deque()
        self.watched = False
        """Whether any row has an `on_token`."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request: Request, on_result: OnResult, on_token: OnToken | None) -> None:
        """Adds a row that has leaves to run. They run when a window that has them starts."""
        self.watched |= on_token is not None
        row = self._rows[request.row] = RequestState(request, on_result, on_token)
        if request.begun:
            self._started[request.row] = row
        for choice, begun in request.begun.items():
            if begun.finish_reason:
                row.completions[choice] = begun
            elif request.row in self.beyond and len(begun.token_ids) >= request.max_tokens:
                row.halted[choice] = begun

    def may_run(self, leaf: Leaf) -> bool:
        """Whether a leaf is that of an unfinished row, and has not ended or halted."""
        row = self._rows.get(leaf.request.row)
        return row is not None and leaf.choice not in row.completions and leaf.choice not in row.halted

    def start(self, window: Window) -> None:
        """The leaves of this window may run now."""
        for place, leaf in enumerate(window.leaves):
            if not window.has_ended(place):
                row = self._rows[leaf.request.row]
                row.window = window
                row.places[leaf.choice] = place

    @property
    def halted_leaves(self) -> int:
        """Number of leaves that are to go on."""
        return sum(len(row.halted) for row in self._waiting.values())

    def take_halted(self) -> list[Request]:
        """Returns the requests that are to go on, which must `start` in another window before the next step."""
        requests = [row.request for row in self._waiting.values()]
        for row in self._waiting.values():
            row.halted.clear()
        self._waiting.clear()
        return requests

    def update(self, update: SequenceUpdate) -> None:
        """Adds an update of a sequence. Calls `on_token`, and `on_result` if its row is done."""
        seq, token, reason, error = update
        if token is not None and reason is None and not self.watched:
            return
        row = self._rows[seq.request.row]
        choice = seq.leaf.choice
        if error is not None:
            self._fail(row, error)
        elif reason == "scored":
            row.scores[choice] = seq.text_scores
            self._finish(row)
        elif token is None:
            self._begin(row)
        else:
            if row.on_token is not None:
                row.on_token(row.request.row, choice, token)
            if reason is not None:
                halts = reason == "length" and row.request.row in self.beyond
                (row.halted if halts else row.completions)[choice] = self._completion(row, seq, reason)
                self._finish(row)

    def cancel(self, number: int) -> None:
        """Ends a row at the next `end_due`. Does nothing if it is done. Any thread may call this."""
        if number in self._rows:
            self._cancelled.append(number)

    @property
    def overdue(self) -> bool:
        """Whether the time of a row is up."""
        return bool(self._deadlines) and next(iter(self._deadlines.values())) <= time.monotonic()

    def end_cancelled(self) -> None:
        """Ends the rows that were cancelled."""
        while self._cancelled:
            self._end(self._rows.get(self._cancelled.popleft()), "cancelled")

    def end_due(self) -> None:
        """Ends the rows that were cancelled, and those whose time is up."""
        self.end_cancelled()
        while self.overdue:
            self._end(self._deadlines.popitem(last=False)[0], "timeout")

    def fail_shown(self, error_of: Callable[[Sequence[Image]], RowError | None]) -> None:
        """Ends the rows that have an image that cannot be shown. `error_of`: `Vision.error_of`."""
        for row in list(self._rows.values()):
            error = error_of(row.request.images)
            if error is not None:
                self._fail(row, error)

    def under_way(self) -> dict[int, dict[int, Completion]]:
        """Returns the completions of unfinished rows, by row and by number of the completion. Unfinished completions have no text."""
        found = {}
        for number, row in self._started.items():
            # A completion with thoughts is left out and generated again: the number of its thoughts' tokens would be lost.
            begun = {choice: c for choice, c in row.completions.items() if not row.reasoning_tokens.get(choice)}
            begun |= {choice: _unfinished(c) for choice, c in row.halted.items()}
            if row.window is None:
                begun = {**row.request.begun, **begun}
            for choice, seq in self._sequences(row):
                if seq is not None and seq.generated:
                    begun[choice] = self._completion(row, seq, "")
            if begun:
                found[number] = begun
        return found

    def _sequences(self, row: RequestState) -> Iterator[tuple[int, GenerationSequence | None]]:
        """The leaves of a row that run or are to run, by number, and their sequences; None for one that has not begun."""
        for choice, place in row.places.items():
            if choice not in row.completions and choice not in row.halted and row.window is not None:
                yield choice, row.window.sequences.get(place)

    def requests(self) -> list[tuple[Request, OnResult, OnToken | None]]:
        """The rows that are not done, each with its callbacks."""
        return [(self.beyond.get(n, row.request), row.on_result, row.on_token) for n, row in self._rows.items()]

    def clear(self) -> None:
        """Forgets all rows: the job is being interrupted."""
        for of in (self._rows, self._started, self._waiting, self.beyond, self._deadlines, self._cancelled):
            of.clear()

    def _begin(self, row: RequestState) -> None:
        self._started[row.request.row] = row
        if self._timeout is not None and not row.began:
            row.began = True
            self._deadlines[row] = time.monotonic() + self._timeout

    def _end(self, row: RequestState | None, reason: str) -> None:
        if row is None or self._rows.get(row.request.row) is not row:
            return  # already done
        if row.request.texts:
            self._fail(row, _ended(reason))
            return
        so_far = {**row.request.begun, **row.halted}
        for choice in range(row.request.leaves):
            if choice not in row.completions:
                seq = self._cancelled_leaf(row, choice)
                ended = replace(so_far.get(choice, Completion(text="", finish_reason="")), finish_reason=reason)
                row.completions[choice] = ended if seq is None else self._completion(row, seq, reason)
        row.halted.clear()
        self._finish(row)

    def _cancelled_leaf(self, row: RequestState, choice: int) -> GenerationSequence | None:
        """Ends a leaf where it runs or waits. Returns its sequence if it has begun."""
        place = row.places.get(choice)
        return None if place is None or row.window is None else self._scheduler.cancel(row.window, place)

    def _finish(self, row: RequestState) -> None:
        """If the row is whole, calls `on_result`, or notes that it is to go on."""
        if not row.whole:
            return
        if row.halted:
            begun = row.completions | {choice: _unfinished(c) for choice, c in row.halted.items()}
            row.request = replace(self.beyond.pop(row.request.row), long=True, begun=begun)
            self._waiting[row.request.row] = row
        else:
            self._forget(row)
            row.on_result(row.result(self._head, self._piece))

    def _fail(self, row: RequestState, error: RowError) -> None:
        """Ends the row's other leaves and calls `on_result` with the error."""
        for choice in row.places:
            if choice not in row.completions and choice not in row.scores:
                self._cancelled_leaf(row, choice)
        self._forget(row)
        row.on_result(row.failed(error))

    def _forget(self, row: RequestState) -> None:
        number = row.request.row
        del self._rows[number]
        self._deadlines.pop(row, None)
        for of in (self._started, self._waiting, self.beyond):
            of.pop(number, None)

    def _completion(self, row: RequestState, seq: GenerationSequence, reason: str) -> Completion:
        logprobs = None
        if seq.request.params.logprobs is not None:
            earlier = seq.request.begun.get(seq.leaf.choice)
            logprobs = (earlier and earlier.logprobs) or ()
            # If the completion could not be continued, the earlier ones are not its own.
            logprobs = logprobs if len(logprobs) + len(seq.logprobs) == len(seq.generated) else ()
            logprobs += _token_logprobs(self._piece, seq.logprobs, seq.generated[len(logprobs) :])
        stops = seq.stops
        if stops is None or not reason:
            return Completion(text="", finish_reason=reason, token_ids=tuple(seq.generated), logprobs=logprobs)
        calls = stops.tool_calls(f"call_{row.request.key.hex()[:16]}_{seq.leaf.choice}")
        row.reasoning_tokens[seq.leaf.choice] = stops.reasoning_tokens
        return Completion(
            text=stops.text,
            finish_reason=reason,
            reasoning=stops.reasoning,
            tool_calls=calls,
            token_ids=tuple(seq.generated),
            logprobs=logprobs,
        )


def _normalised(logprobs: list[float], temperature: float = 1.0) -> list[float]:
    """Returns probabilities that add up to 1; equal ones if every choice is impossible."""
    top = max(logprobs)
    if top == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp((logprob - top) / temperature) for logprob in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _chosen(logprobs: list[float], probs: list[float], request: Request) -> int:
    """Returns the index of the likeliest choice (the first of equal ones). Above temperature 0, samples by the inverse of the cumulative
    distribution."""
    params = request.params
    if params.greedy:
        return probs.index(max(probs))
    weights = np.cumsum(_normalised(logprobs, params.temperature))
    key = np.frombuffer(request.key, dtype="<u8").reshape(1, 2)
    zero = np.zeros(1, dtype=np.int64)
    u = uniforms(key, np.array([params.seed], dtype=np.int64), zero, zero)[0]
    return min(int(np.searchsorted(weights, u * weights[-1], side="right")), len(logprobs) - 1)


def _token_logprobs(piece: Callable[[int], str], sampled: list[Any], tokens: list[int]) -> tuple[TokenLogprob, ...]:
    """Returns the log-probabilities of `tokens` with their texts. `sampled` holds the `logprobs.TokenLogprobs` of each token."""
    return tuple(
        TokenLogprob(
            piece(token),
            token,
            numbers.logprob,
            tuple(TokenLogprob(piece(t), t, p) for t, p in zip(numbers.top_ids, numbers.top_logprobs, strict=True)),
        )
        for token, numbers in zip(tokens, sampled, strict=True)
    )
