"""What the engine runs: spans of tokens that follow one another on a path of the prefix tree. Integers only.

A span is a run of tokens with a block table; there is no prefill phase and no decode phase, only tokens computed so far
catching up with tokens there are. A `Branch` is a prefix node made resident, a `Sequence` a completion under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np

from batchgen.prefix import PrefixNode
from batchgen.request import Request, TokenArray


class State(Enum):
    """Where a sequence stands; `LEGAL` lists what may follow."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


LEGAL: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.DECODING, State.FAILED, State.CANCELLED}),
    State.PREFILLING: frozenset({State.DECODING, State.PREEMPTED, State.FINISHED, State.FAILED, State.CANCELLED}),
    State.DECODING: frozenset({State.PREEMPTED, State.FINISHED, State.FAILED, State.CANCELLED}),
    State.PREEMPTED: frozenset({State.PREFILLING, State.DECODING, State.FAILED, State.CANCELLED}),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}

# Place in depth-first order: (first request below, depth); a request comes after the nodes that begin with it.
Place = tuple[int, int]
AFTER_NODES = 1 << 40


@dataclass(slots=True, eq=False, kw_only=True)
class Span:
    """Tokens at positions `start` and on, behind those of `parent`."""

    place: Place
    parent: Branch | None
    start: int
    """First position of its own; its parent's end."""
    table: list[int]
    """Block table: the page of positions i*page_size and on, from position 0. The span holds a reference to each."""
    computed: int
    """Positions before this have their KV in the pages."""
    claims_tail: bool
    """Whether it writes on in the page that holds its parent's last tokens (at most one child does; others copy it)."""
    path: tuple[Branch, ...] = ()
    """The branches above, from the root down."""

    @property
    def end(self) -> int:
        """Number of tokens there are to compute, from position 0."""
        raise NotImplementedError

    def tokens(self, start: int, stop: int) -> TokenArray:
        """Token ids at positions [start, stop), int32."""
        raise NotImplementedError


@dataclass(slots=True, eq=False, kw_only=True)
class Branch(Span):
    """A prefix node whose KV is, or is being, computed. One node may have several in turn, if memory ran short."""

    node: PrefixNode
    prompt: TokenArray
    """The prompt of a request below; its first `node.end` tokens are the path's."""
    claimed: bool = False
    """Whether a child writes on in the page of the last tokens."""
    evicted: bool = False
    logits: Any = None
    """Logits after the last token [vocabulary], kept while prompts that end here wait to draw their first token."""

    @property
    def end(self) -> int:
        return self.node.end

    @property
    def complete(self) -> bool:
        return self.computed == self.node.end and not self.evicted

    def tokens(self, start: int, stop: int) -> TokenArray:
        return self.prompt[start:stop]


class Stops(Protocol):
    """Decides after each token whether a completion has ended, and makes its text."""

    def append(self, token: int) -> str | None: ...
    @property
    def text(self) -> str: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(Span):
    """A completion being generated for a request."""

    request: Request
    stops: Stops
    generated: list[int] = field(default_factory=list)
    state: State = State.WAITING
    slot: int = -1
    """Its row in the sampler while it runs."""

    @property
    def end(self) -> int:
        return len(self.request.tokens) + len(self.generated)

    @property
    def most_tokens(self) -> int:
        """Positions that it can need KV for: the last token drawn is never run."""
        return self.request.most_tokens

    def tokens(self, start: int, stop: int) -> TokenArray:
        prompt = self.request.tokens
        if stop <= len(prompt):
            return prompt[start:stop]
        drawn = np.asarray(self.generated[max(start - len(prompt), 0) : stop - len(prompt)], dtype=np.int32)
        return np.concatenate([prompt[start:], drawn]) if start < len(prompt) else drawn

    def become(self, state: State) -> None:
        """Changes the state; only the scheduler calls this. Raises `AssertionError` for an illegal transition."""
        assert state in LEGAL[self.state], f"{self.state.value} sequence cannot become {state.value}"
        self.state = state
