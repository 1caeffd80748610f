"""Drafts where they pay: collects guesses for the decoding sequences of a step, and admits those that make tokens come faster.

A draft costs a token in a step, and it is worth the tokens that the completion gets earlier. The chance of each draft token is learned from those that
were verified, and the cost of a step from the steps that have run (`StepCosts`). The draft tokens that are likeliest to be accepted are
admitted first, as many as give the most accepted tokens per second. In a large batch on a processor that computes at its limit that is none.
Then nothing is searched and nothing is learned, and all of this costs next to nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate

from batchgen.drafting.chances import DEPTHS, SOURCES, Chances, DraftKind
from batchgen.drafting.continuations import CONTEXTS, LONGEST_CONTEXT, OutputIndex, OutputText, PromptText
from batchgen.scheduling.batch import ScheduledSpan, StepSize
from batchgen.scheduling.sequence import GenerationSequence, State
from batchgen.scheduling.step_costs import StepCosts

ALWAYS = False
"""Whether every draft is admitted, whatever it costs. For tests."""
LONGEST = 24
"""Maximum number of draft tokens of a sequence in a step."""
MAX_DRAFTS = 512
"""Maximum number of draft tokens in a step: each needs a row of logits."""
GAIN = 1.05
"""Drafts must promise to be faster by this factor: costs and chances are estimates."""
HOPE = 0.95
"""The best chance that is expected of drafts before any are searched."""
SHARE = 0.01
"""Largest share of the time that searches in vain take."""
LEARNING = 0.05
"""Share of the time of the steps with drafts in which outputs are added to the index."""
MAX_REST = 64
"""Steps at most until it is worked out again whether drafts pay, if they did not."""
RECENT = 256
"""Finished outputs that are kept while drafts do not pay, to learn from them when they do."""
TRIAL = 12
"""Steps with drafts after which it is checked whether they were faster than steps without."""
MIN_CHANCE = 0.2
"""Drafts that are less likely to be accepted are not followed further."""

Draft = list[tuple[int, DraftKind]]


class Speculator:
    """Proposes drafts for a scheduler, and learns from what becomes of them."""

    def __init__(self, costs: StepCosts, forced: Callable[[GenerationSequence], Sequence[int]]) -> None:
        """`forced` returns a guess of the tokens of the text that a sequence's grammar forces next; nothing if it leaves a choice."""
        self._costs = costs
        self._forced = forced
        self._chances = Chances()
        self._outputs = OutputIndex()
        self._texts: dict[GenerationSequence, tuple[OutputText, PromptText]] = {}
        self._recent: deque[GenerationSequence] = deque(maxlen=RECENT)
        self._made: dict[GenerationSequence, Draft] = {}
        self._resting = (0, 0)  # steps that are left, and the spans of the step in which drafts could not pay
        self._trial = Trial()
        self.drafted = dict.fromkeys(SOURCES, 0)
        self.accepted = dict.fromkeys(SOURCES, 0)

    # -- what the scheduler calls

    def propose(self, step: Sequence[ScheduledSpan]) -> Mapping[GenerationSequence, Sequence[int]]:
        """Returns draft tokens by sequence. See `scheduler.Drafter`."""
        decoding = [s for s in step if isinstance(s.span, GenerationSequence) and s.span.state is State.DECODING]
        pause = self._trial.next_step(len(decoding) if len(decoding) == len(step) else 0)
        if pause and not ALWAYS:
            self._resting = pause, len(step)
        self._made.clear()
        steps, spans = self._resting
        if steps and len(step) > 0.8 * spans:
            self._resting = steps - 1, spans
            return {}
        load = _size(decoding)
        if not self._can_pay(load):
            self._resting = MAX_REST, len(step)
            return {}
        began = time.perf_counter()
        self._learn(
            [s.span for s in decoding if isinstance(s.span, GenerationSequence)], LEARNING * self._seconds(load)
        )
        drafts = {s.span: self._draft(s.span) for s in decoding if isinstance(s.span, GenerationSequence)}
        search = time.perf_counter() - began
        found = {seq: draft for seq, draft in drafts.items() if draft}
        self._made = self._admitted(load, search, found)
        self._trial.drafted = bool(self._made)
        self._chances.fade()
        # A search that was in vain is not repeated before its time is a small share of that of the steps.
        rest = 0.0 if self._made or ALWAYS else search / (SHARE * self._seconds(load))
        self._resting = min(MAX_REST, int(rest)), len(step)
        return {seq: [token for token, _ in draft] for seq, draft in self._made.items()}

    def verified(self, scheduled: ScheduledSpan, accepted: int) -> None:
        """Learns from a verified draft. See `scheduler.Drafter`."""
        seq = scheduled.span
        assert isinstance(seq, GenerationSequence)
        self._trial.accepted += accepted
        for place, (_, kind) in enumerate(self._made[seq][: len(scheduled.drafts)]):
            self.drafted[kind.source] += 1
            if place < accepted:
                self.accepted[kind.source] += 1
            if place < accepted or (
                place == accepted and seq.running
            ):  # nothing follows in a completion that has ended
                self._chances.note(kind, place < accepted)

    def finished(self, seq: GenerationSequence) -> None:
        """Keeps a finished output to learn from it. See `scheduler.Drafter`."""
        self._recent.append(seq)

    # -- drafts

    def _draft(self, seq: GenerationSequence) -> Draft:
        """Returns a guess of the sequence's next tokens, as far as it may be right."""
        limit = min(LONGEST, seq.request.max_tokens - seq.num_sampled - 1)
        greedy, chance = seq.request.params.greedy, 1.0
        draft: Draft = []
        text, prompt = self._texts[seq]
        context = text.tokens[-LONGEST_CONTEXT:]
        found, source, count = self._forced(seq), "grammar", 0
        while limit > 0 and chance > MIN_CHANCE:
            if not found:
                found, source, count = self._follow(context, _group(seq), prompt, greedy)
                if not found:
                    break
            for token in found[: limit - len(draft)]:
                kind = DraftKind(source, count, min(len(draft), DEPTHS), greedy)
                chance *= self._chances.of(kind)
                draft.append((token, kind))
                context.append(token)
                if chance <= MIN_CHANCE:
                    break
            if len(draft) >= limit:
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
                likely = self._chances.of(DraftKind(source, count, 0, greedy))
                if likely > chance:
                    found = prompt.find(last) if source == "prompt" else self._outputs.find(group, last)
                    if not found and source == "outputs" and group is not None:
                        found = self._outputs.find(None, last)
                    if found:
                        best, chance = (found, source, count), likely
        return best

    def _learn(self, decoding: list[GenerationSequence], seconds: float) -> None:
        """Reads what the sequences have written since the last time, and adds it to the index for so many seconds; the rest next time."""
        until = time.perf_counter() + seconds
        for seq in decoding:
            self._read(seq)
        for seq in decoding:
            if time.perf_counter() > until:
                break
            self._outputs.add(self._texts[seq][0], _group(seq))
        while self._recent and time.perf_counter() < until:
            seq = self._recent.popleft()
            self._outputs.add(self._read(seq), _group(seq))
            del self._texts[seq]
        if len(self._texts) > 2 * len(decoding) + 64:  # of rows that were cancelled or preempted
            self._texts = {seq: self._texts[seq] for seq in decoding}

    def _read(self, seq: GenerationSequence) -> OutputText:
        if seq not in self._texts:
            prompt = seq.request.text_tokens
            self._texts[seq] = OutputText(prompt), PromptText(prompt)
        text = self._texts[seq][0]
        text.tokens += seq.generated[len(text.tokens) - text.start :]
        return text

    # -- prices

    def _can_pay(self, load: StepSize) -> bool:
        """Whether good drafts, if there were any, would make tokens come faster."""
        if ALWAYS:
            return True
        if not self._costs.known:
            return False
        rows, each = load.tokens, load.pairs // max(1, load.tokens)
        rate = GAIN * rows / self._seconds(load)
        counts = {1, 2, max(1, rows // 4), rows, 4 * rows}
        return any((rows + HOPE * n) / self._seconds(_with(load, n, n * each)) > rate for n in counts)

    def _seconds(self, size: StepSize) -> float:
        return max(1e-9, self._costs.seconds(size))

    def _admitted(
        self, load: StepSize, search: float, drafts: Mapping[GenerationSequence, Draft]
    ) -> dict[GenerationSequence, Draft]:
        """Returns the beginnings of the drafts that give the most accepted tokens per second in a step of decoding sequences alone.

        `search` are the seconds that it took to find them. What else the step runs does not count: a draft saves a token of a later step, which is one of these.
        """
        if ALWAYS:
            return dict(drafts)
        ranked: list[tuple[float, GenerationSequence]] = []
        for seq, draft in drafts.items():
            chance = 1.0
            for _, kind in draft:
                chance *= self._chances.of(kind)
                ranked.append((chance, seq))
        # A draft's chances fall from token to token and the sort is stable, so each draft is admitted from its beginning.
        ranked.sort(key=lambda item: -item[0])
        del ranked[MAX_DRAFTS:]
        gains = list(accumulate((chance for chance, _ in ranked), initial=float(load.tokens)))
        pairs = [0, *accumulate(seq.end for _, seq in ranked)]
        best, count = GAIN * load.tokens / self._seconds(load), 0
        for n in _counts(len(ranked)):
            rate = gains[n] / (self._seconds(_with(load, n, pairs[n])) + search)
            if rate > best:
                best, count = rate, n
        admitted: dict[GenerationSequence, int] = {}
        for _, seq in ranked[:count]:
            admitted[seq] = admitted.get(seq, 0) + 1
        return {seq: drafts[seq][:n] for seq, n in admitted.items()}


class Trial:
    """Compares the steps that had drafts with those that had none, by the time that passes from one step to the next.

    Costs and chances are estimates. What counts is whether tokens did come faster, so drafts that were not worth it stop for some time, and for longer each time.
    """

    def __init__(self) -> None:
        self.drafted = False
        """Whether the step under way has drafts."""
        self.accepted = 0
        """The draft tokens of the step under way that were right."""
        self._sequences = 0
        self._began = 0.0
        self._plain: dict[int, float] = {}
        """Seconds of a sequence in a step of decoding sequences without drafts, by the bits of their number."""
        self._steps = 0
        self._took = self._plainly = 0.0
        """Steps with drafts since the last check, their seconds, and those of as many tokens without drafts."""
        self._rest = MAX_REST

    def next_step(self, sequences: int) -> int:
        """Takes note that a step ends and one of `sequences` decoding sequences begins; 0 if it runs anything else.

        Returns the number of steps that should have no drafts.
        """
        now = time.perf_counter()
        rest = self._step_done(now - self._began) if self._sequences and self._began else 0
        self._sequences, self._began, self.drafted, self.accepted = sequences, now, False, 0
        first = sequences > 0 and sequences.bit_length() not in self._plain
        return max(rest, 1) if first else rest

    def _step_done(self, seconds: float) -> int:
        bits = self._sequences.bit_length()
        plain = self._plain.get(bits)
        if not self.drafted:
            each = seconds / self._sequences
            self._plain[bits] = each if plain is None else 0.8 * plain + 0.2 * min(each, 2 * plain)
            return 0
        self._steps += 1
        self._took += seconds
        self._plainly += (self._sequences + self.accepted) * (plain or 0.0)
        if self._steps < TRIAL:
            return 0
        paid = self._took * GAIN < self._plainly
        self._steps, self._took, self._plainly = 0, 0.0, 0.0
        self._rest = MAX_REST if paid else min(2 * self._rest, 8 * MAX_REST)
        return 0 if paid else self._rest


def _counts(most: int) -> list[int]:
    """Numbers of draft tokens that are compared: all small ones, and larger ones in steps of about a tenth."""
    found, n = [], 1
    while n < most:
        found.append(n)
        n += max(1, n // 10)
    return [*found, most] if most else []


def _size(decoding: Sequence[ScheduledSpan]) -> StepSize:
    """Returns the size of a step of these sequences alone."""
    keys, pairs, above = 0, 0, {}
    for scheduled in decoding:
        span = scheduled.span
        keys += scheduled.stop - span.start
        pairs += scheduled.stop
        if span.parent is not None:
            above[span.parent] = span.path
    nodes = {node for path in above.values() for node in path}
    keys += sum(node.end - node.start for node in nodes)
    return StepSize(len(decoding), len(decoding), keys, pairs)


def _with(load: StepSize, drafts: int, pairs: int) -> StepSize:
    return StepSize(load.tokens + drafts, load.logit_rows + drafts, load.keys + drafts, load.pairs + pairs)


def _group(seq: GenerationSequence) -> Hashable:
    """Returns the name of the rows that share the sequence's last prefix node; None for the whole job."""
    return None if seq.parent is None else (seq.window, seq.parent.node.index)
