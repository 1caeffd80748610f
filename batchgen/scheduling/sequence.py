"""What the engine runs: spans of tokens that follow one another on a path of the prefix tree. Integers only.

A span is a run of tokens with a block table. There is no prefill phase and no decode phase, only tokens computed so far
that catch up with the tokens there are. A `PrefixNodeSpan` is a prefix node made resident. A `GenerationSequence` is a leaf in
progress: a completion being generated, or a text being scored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchgen.prefix import PrefixNode
from batchgen.request import IMAGE_IDS, Image, Leaf, Request, TokenArray
from batchgen.result import ToolCall


class State(Enum):
    """The states of a sequence; `LEGAL` lists what may follow each."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHING = "finishing"
    """All of its tokens are sampled or scored on the device. It holds no blocks, state slot or sampler index any more; its last numbers are in flight."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # Enum's own is a function in Python


LEGAL: dict[State, frozenset[State]] = {
    # A text to score whose tokens all lie on the nodes above it has nothing left to run.
    State.WAITING: frozenset({State.PREFILLING, State.DECODING, State.FINISHING, State.FAILED, State.CANCELLED}),
    State.PREFILLING: frozenset({State.DECODING, State.PREEMPTED, State.FINISHING, State.FAILED, State.CANCELLED}),
    State.DECODING: frozenset({State.PREEMPTED, State.FINISHING, State.FINISHED, State.FAILED, State.CANCELLED}),
    State.PREEMPTED: frozenset({State.PREFILLING, State.DECODING, State.FAILED, State.CANCELLED}),
    State.FINISHING: frozenset({State.FINISHED, State.FAILED, State.CANCELLED}),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}

_RUNNING = (State.DECODING, State.PREFILLING, State.FINISHING)

# Place in depth-first order: (first leaf below, depth). A leaf comes after the nodes that begin with it. Leaves are numbered
# through all windows.
Place = tuple[int, int]
AFTER_NODES = 1 << 40

NEVER = 1 << 60
"""The position of logits that nobody wants."""


class WantedLogits(NamedTuple):
    """Which logits along a prefix node the leaves below it want."""

    start: int = NEVER
    """The first position after which logits are wanted, to sample from or to score texts."""
    prompt_end: int = 0
    """Positions before this belong to a prompt. Those from here on belong to texts that are scored."""
    sampled: bool = False
    """Whether a completion samples its first token from the logits after the node's last token."""
    targets: tuple[int, ...] = ()
    """The tokens that follow the node's last token in texts that are scored."""


@dataclass(slots=True)
class TokenScore:
    """The score of one token of a given text. Filled in when the numbers of its step reach the host."""

    logprob: float = math.nan
    likeliest: bool = False
    """Whether no other token is likelier in its place."""
    output: NDArray[np.float32] | None = None
    """[width] If the request is embedded or classified: the model's output there, instead of a score."""


@dataclass(slots=True, eq=False, kw_only=True)
class Span:
    """Tokens at positions `start` and on, after those of `parent`."""

    window: int
    """Number of its window (`waiting.Window`)."""
    place: Place
    parent: PrefixNodeSpan | None
    start: int
    """First position of its own: its parent's end."""
    table: list[int]
    """Block table: entry i is the block of positions i * block_size and on, from position 0. The span holds a reference to each
    block but the first `dropped`."""
    computed: int
    """Positions before this have their KV in the blocks."""
    path: tuple[PrefixNodeSpan, ...] = ()
    """The nodes above it, from the root down."""
    dropped: int = 0
    """Number of blocks at the beginning of the table that lie behind every sliding window and were released."""
    state_slot: int = -1
    """State slot for the recurrent layers after `computed` tokens; -1 without such layers."""
    read_state_slot: int = -1
    """State slot that the next forward reads. Before the first forward it is that of the node that the span follows,
    which the span holds too until then; afterwards its own. -1 at the beginning of a text."""
    draft_state_slot: int = -1
    """State slot that a step with drafts writes, instead of the span's own; -1 in other steps."""
    scores: dict[tuple[int, int], TokenScore] = field(default_factory=dict)
    """By (position, next token), where texts are scored."""
    source: PrefixNodeSpan | None = None
    """Where outputs are summed: the node whose sum it continues, its parent or a node of an earlier window. None once it has a sum of its own."""
    total: Any = None
    """The sum of the model's outputs after its `computed` tokens, where outputs are pooled by their mean. The executor fills it in."""

    @property
    def item(self) -> int:
        """Its number in its window: n for node n, ~i for leaf i."""
        raise NotImplementedError

    @property
    def key(self) -> tuple[int, int]:
        """The number of its window, and its item."""
        return self.window, self.item

    @property
    def scoring(self) -> bool:
        """Whether texts are scored here."""
        raise NotImplementedError

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of a prompt that begins with the span's path, in the order of their tokens."""
        raise NotImplementedError

    def next_tokens(self, position: int) -> list[int]:
        """The tokens that follow the one at `position` in the texts that are scored here."""
        return [int(token) for token in self.tokens(position + 1, position + 2)]

    @property
    def logits_from(self) -> int:
        """First position after which the logits are wanted."""
        raise NotImplementedError

    @property
    def prompt_end(self) -> int:
        """Positions before this belong to a prompt."""
        raise NotImplementedError

    @property
    def end(self) -> int:
        """Number of tokens there are to compute, from position 0."""
        raise NotImplementedError

    def tokens(self, start: int, stop: int) -> TokenArray:
        """Token ids at positions [start, stop), as far as the host knows them."""
        raise NotImplementedError


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixNodeSpan(Span):
    """A prefix node whose KV is computed or being computed. A node that was evicted gets another one."""

    node: PrefixNode
    wanted: WantedLogits
    prompt: TokenArray
    """The tokens of a leaf below the node; the first `node.end` of them are the node's path."""
    images: tuple[Image, ...] = ()
    """Those of the same leaf."""
    evicted: bool = False
    children: dict[Span, None] = field(default_factory=dict)
    """The spans directly below it that run, and the nodes that leaves need."""
    successor: PrefixNodeSpan | None = None
    """The node that took over its tokens, if it was evicted because of that."""
    end: int = field(init=False)  # copied from the node because it is read often

    def __post_init__(self) -> None:
        self.end = self.node.end

    @property
    def item(self) -> int:
        return self.node.index

    @property
    def scoring(self) -> bool:
        return bool(self.wanted.targets)

    def next_tokens(self, position: int) -> list[int]:
        return list(self.wanted.targets) if position == self.end - 1 else Span.next_tokens(self, position)

    @property
    def logits_from(self) -> int:
        return self.wanted.start

    @property
    def prompt_end(self) -> int:
        return self.wanted.prompt_end

    @property
    def complete(self) -> bool:
        return self.computed == self.end and not self.evicted

    def tokens(self, start: int, stop: int) -> TokenArray:
        return self.prompt[start:stop]


def last_seen(span: Span, start: int, stop: int) -> NDArray[np.int64]:
    """Returns, for each position of [start, stop), the last one that its token sees: its own, or the last of its image if that is `whole`, or of its prompt."""
    positions = np.arange(start, stop)
    if start >= span.prompt_end or not any(image.whole or image.prompt for image in span.images):
        return positions
    if span.images[0].prompt:
        return np.maximum(positions, span.prompt_end - 1)
    tokens = span.tokens(start, stop)
    ends = np.append(np.flatnonzero(tokens[1:] != tokens[:-1]), len(tokens) - 1)
    return np.where(tokens < IMAGE_IDS, positions, start + ends[np.searchsorted(ends, positions - start)])


def uncut(span: Span, start: int, stop: int) -> int:
    """Returns the last position up to `stop` at which [start, stop) may end without cutting an image that is `whole`, or such a prompt; `start` if
    there is none."""
    images = span.images
    if not images or stop >= span.end or stop <= start or not any(image.whole or image.prompt for image in images):
        return stop
    if images[0].prompt:
        return start if start < span.prompt_end > stop else stop
    tokens = span.tokens(start, stop + 1)
    if tokens[-1] < IMAGE_IDS or tokens[-1] != tokens[-2]:
        return stop
    others = np.flatnonzero(tokens != tokens[-1])
    return start + int(others[-1]) + 1 if len(others) else start


class Stops(Protocol):
    """Decides after each token whether a completion has ended, and makes its text."""

    def append(self, token: int) -> str | None: ...
    @property
    def text(self) -> str | None: ...
    @property
    def reasoning(self) -> str | None: ...
    @property
    def reasoning_tokens(self) -> int: ...
    def tool_calls(self, id_start: str) -> tuple[ToolCall, ...]: ...


@dataclass(slots=True, eq=False, kw_only=True)
class GenerationSequence(Span):
    """A leaf in progress: a completion being generated for a request, or a text being scored after its prompt."""

    leaf: Leaf
    index: int
    """Its place among the leaves of its window."""
    stops: Stops | None
    """None for a text to score."""
    generated: list[int] = field(default_factory=list)
    """The sampled tokens that the host knows."""
    num_pending_tokens: int = 0
    """Number of tokens sampled after those, which only the device knows yet."""
    state: State = State.WAITING
    sampler_index: int = -1
    """The row of its parameters in the sampler's tables while it runs; -1 otherwise."""
    last_step: int = 0
    """The last step that it decoded in."""
    logprobs: list[Any] = field(default_factory=list)
    """`logprobs.TokenLogprobs` of each sampled token, if they are wanted."""
    text_scores: list[TokenScore] = field(default_factory=list)
    """The scores of a text's tokens, once it has been scored."""
    # Copied from the leaf because they are read several times a token.
    request: Request = field(init=False)
    scoring: bool = field(init=False)
    start_tokens: int = field(init=False)
    """Number of tokens that run before the first one is sampled."""
    max_kv_tokens: int = field(init=False)
    """Number of positions that it can need KV for; the last sampled token is never run."""

    def __post_init__(self) -> None:
        self.request = self.leaf.request
        self.scoring = bool(self.request.texts)
        self.start_tokens = len(self.leaf.tokens)
        self.max_kv_tokens = self.leaf.max_kv_tokens

    @property
    def images(self) -> tuple[Image, ...]:
        return self.request.images

    def next_tokens(self, position: int) -> list[int]:
        return [int(self.leaf.scored[-1])] if position == self.end - 1 else Span.next_tokens(self, position)

    @property
    def item(self) -> int:
        return ~self.index

    @property
    def logits_from(self) -> int:
        return self.leaf.request.scored_from if self.scoring else self.end - 1

    @property
    def prompt_end(self) -> int:
        return len(self.leaf.request.tokens)

    @property
    def end(self) -> int:
        return self.start_tokens + len(self.generated) + self.num_pending_tokens  # read often

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled so far, pending ones included."""
        return len(self.generated) + self.num_pending_tokens

    @property
    def running(self) -> bool:
        """Whether it runs or is finishing: what is sampled for it counts."""
        return self.state in _RUNNING

    def tokens(self, start: int, stop: int) -> TokenArray:
        prompt = self.leaf.tokens
        if stop <= len(prompt):
            return prompt[start:stop]
        sampled = np.asarray(self.generated[max(start - len(prompt), 0) : stop - len(prompt)], dtype=np.int32)
        return np.concatenate([prompt[start:], sampled]) if start < len(prompt) else sampled

    def gather(self) -> None:
        """Collects the scores of the text's tokens from the spans that they lie on."""
        spans = iter((*self.path, self))
        span = next(spans)
        for position, token in enumerate(self.leaf.scored.tolist(), self.leaf.request.scored_from):
            while position >= span.end:
                span = next(spans)
            self.text_scores.append(span.scores[position, token])

    def become(self, state: State) -> None:
        """Changes the state; only the scheduler calls this. Raises `AssertionError` for an illegal transition."""
        assert state in LEGAL[self.state], f"{self.state.value} sequence cannot become {state.value}"
        self.state = state
