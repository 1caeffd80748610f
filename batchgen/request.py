"""Requests, and the leaves that they add to the prefix tree. They hold token ids only: this module knows nothing of files and texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.result import Completion, row_dataclass
from batchgen.sampling_params import SamplingParams

TokenArray = NDArray[np.signedinteger[Any]]
"""Token ids. int64 if some of them stand for images: see `IMAGE_IDS`."""
IMAGE_IDS = 1 << 62
"""Token ids from here on stand for images. All tokens of an image have its `Image.id`, so equal prefixes have equal images."""
NO_TEXT: tuple[TokenArray, ...] = (np.zeros(1, dtype=np.int32),)
"""The `texts` of a request whose prompt alone is wanted, to be embedded, classified or scored. The token itself means nothing."""
DECODE_COST = 4
"""Cost of a token to generate, in prompt tokens: an estimate."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a prompt."""

    token: int
    """What the encoder is shown, at least `IMAGE_IDS`: a digest of the file's bytes and of how it is prepared."""
    count: int
    """Number of its tokens."""
    path: str
    """The file that has its bytes."""
    grid: tuple[int, ...] = (0, 0)
    """Rows and columns of its tokens, for models whose positions have axes; (0, 0) for other models. For positions on a canvas: rows and columns
    of slices, of the tokens of one slice, and of the image's own."""
    alone: bool = True
    """False if it is prepared as one of several images, by a model that makes a difference."""
    whole: bool = False
    """Whether its tokens see one another, those after them too: they run in one step."""
    prompt: int = 0
    """If all tokens of its prompt see one another: a digest of the prompt, below `IMAGE_IDS`. They run in one step, and no other prompt shares them."""
    named: str = ""
    """How messages call it, such as `the image 'a.png' of messages[0].content[1]`."""

    @property
    def id(self) -> int:
        """The id of its tokens."""
        return self.token ^ self.prompt


def image_ends(images: Sequence[Image], tokens: TokenArray) -> list[int]:
    """Returns the end (the position after its last token) of each image that ends in these tokens, which begin with the prompt."""
    places = np.flatnonzero(tokens >= IMAGE_IDS)
    ends = np.cumsum([image.count for image in images])
    return [int(places[end - 1]) + 1 for end in ends.tolist() if end <= len(places)]


@row_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A row rendered and tokenized, with the parameters of its completion."""

    row: int
    """The row's number in the input, from 0."""
    tokens: TokenArray
    """The prompt [prompt length], at least one token."""
    params: SamplingParams
    max_tokens: int
    """`params.max_tokens`, or less if the model's context leaves less room."""
    key: bytes
    """The row key (16 bytes), which seeds the row's random numbers. That of a new request is its digest (`row_digest`); a row that is equal to
    another one gets a key of its own (`jobs.files.row_keys`)."""
    truncated: bool = False
    """Whether the prompt was cut to fit the context."""
    texts: tuple[TokenArray, ...] = ()
    """Texts to score after the prompt, each of at least one token: those of `params.choices` in order, or the row's completion.
    If there are any, nothing is generated."""
    prompt_logprobs: str = ""
    """The tokens whose log-probabilities the result has: `completion`, those of the only text, or `prompt`, those of `tokens` after the first.
    Empty for none."""
    priority: float = 0.0
    """Requests with lower numbers start first."""
    tools: str = ""
    """The row's tools as JSON if calls of them are looked for in the answer; else empty."""
    source: str = ""
    """The row's place in its file, for messages; empty if the row comes from no file."""
    images: tuple[Image, ...] = ()
    """The prompt's images, in the order of their tokens."""
    long: bool = False
    """Whether LongRoPE uses its long factors for the row: what runs before its first sampled token is longer than the model's `short_context`."""
    begun: Mapping[int, Completion] = field(default_factory=dict)
    """Completions that an earlier run started, by number. They are continued, unless they have a finish reason."""

    @property
    def is_sampled(self) -> bool:
        """Whether its result depends on random numbers."""
        return not self.params.greedy and (not self.texts or bool(self.params.choices))

    @property
    def leaves(self) -> int:
        return len(self.texts) or self.params.n

    @property
    def text_tokens(self) -> TokenArray:
        """The prompt without its images."""
        return self.tokens[self.tokens < IMAGE_IDS] if self.images else self.tokens

    @property
    def leaf_tokens(self) -> int:
        """Number of tokens of its leaves. The completions of a prompt have its tokens in common; each text to score has a copy."""
        return len(self.tokens) * max(1, len(self.texts)) + sum(map(len, self.texts))

    @property
    def scored_from(self) -> int:
        """The position of the token after which the first token is scored."""
        return 0 if self.prompt_logprobs == "prompt" else len(self.tokens) - 1

    @property
    def cost(self) -> int:
        """Estimated cost in prompt tokens, as if nothing were shared and every completion had its full length."""
        if self.texts:
            return len(self.tokens) + sum(map(len, self.texts))
        return len(self.tokens) + DECODE_COST * self.max_tokens * self.params.n


@row_dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A continuation of a request's prompt: a completion to generate or a text to score. The prefix tree is built over leaves."""

    request: Request
    choice: int
    """Its number among the request's completions or texts."""
    tokens: TokenArray
    """The tokens that run before the first token is sampled: the prompt and, for a text to score, all tokens of the text except the last."""

    @property
    def scored(self) -> TokenArray:
        """The tokens to score: those of the text, which follow the prompt, and of the prompt if they are asked for. Empty for a completion to generate."""
        if not self.request.texts:
            return _NONE
        text = self.request.texts[self.choice]
        if self.request.prompt_logprobs != "prompt":
            return text
        return np.concatenate([self.request.tokens[self.request.scored_from + 1 :], text])

    @property
    def ended(self) -> bool:
        """Whether it is a completion that an earlier run has finished."""
        begun = self.request.begun.get(self.choice)
        return begun is not None and bool(begun.finish_reason)

    @property
    def max_kv_tokens(self) -> int:
        """Maximum number of positions that need KV. The last token of a completion is never run."""
        return len(self.tokens) + (0 if self.request.texts else self.request.max_tokens - 1)


_NONE: TokenArray = np.zeros(0, dtype=np.int32)


def leaves_of(requests: Iterable[Request]) -> list[Leaf]:
    """Returns the leaves of all requests, in order."""
    leaves: list[Leaf] = []
    for request in requests:
        if request.texts:
            leaves += [
                Leaf(request, choice, np.concatenate([request.tokens, text[:-1]]))
                for choice, text in enumerate(request.texts)
            ]
        else:
            leaves += [Leaf(request, choice, request.tokens) for choice in range(request.params.n)]
    return leaves


def row_digest(
    tokens: TokenArray,
    params: SamplingParams,
    texts: Sequence[TokenArray] = (),
    tools: str = "",
    max_tokens: int | None = None,
) -> bytes:
    """Digest (16 bytes) of a request's final tokens, effective parameters, texts to score and tools; equal requests have equal digests.

    `max_tokens` stands for the parameter of that name, if it is given.
    """
    h = hashlib.blake2b(params.digest(max_tokens), digest_size=16)
    h.update(tools.encode("utf-8", "backslashreplace"))
    for part in (tokens, *texts):
        h.update(len(part).to_bytes(8, "little"))
        h.update(part.astype(f"<i{part.itemsize}", copy=False).tobytes())
    return h.digest()


def row_key(digest: bytes, occurrence: int) -> bytes:
    """Returns a row's key (16 bytes), made from its digest (or `id_key`) and the number (from 0) of its occurrence among rows with the same one."""
    if occurrence == 0:
        return digest
    return hashlib.blake2b(digest + occurrence.to_bytes(8, "little"), digest_size=16).digest()


def id_key(digest: bytes, id: bytes) -> bytes:
    """Returns the key (16 bytes) of a sampled row with an id. `id` is the digest (16 bytes) of its id."""
    return hashlib.blake2b(digest + id, digest_size=16, person=b"row").digest()
