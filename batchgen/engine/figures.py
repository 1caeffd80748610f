"""What a step adds to the figures of a run. Integers only."""

from __future__ import annotations

from batchgen.engine.spans import Sequence, State
from batchgen.engine.steps import Step
from batchgen.stats import EngineStats


def count_step(stats: EngineStats, step: Step) -> None:
    """Counts a step that is launched and has not yet changed its spans; what it draws is counted when it is known."""
    stats.steps += 1
    for work in step.works:
        span = work.span
        if isinstance(span, Sequence) and span.state is State.DECODING:
            continue
        prompt = min(work.stop, span.prompt_end)
        stats.prefill_tokens += max(0, prompt - work.start)
        behind = max(work.start, prompt)
        if isinstance(span, Sequence) and not span.scoring:
            # The last token that it had drawn is run for the first time, as in any decode step.
            stats.recomputed_tokens += max(0, min(work.stop, span.end - 1) - behind)
        else:
            stats.scored_tokens += work.stop - behind
