"""Requests of token ids, without a tokenizer, and their prefix plans."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from batchgen.prefix import PrefixPlan, plan_requests
from batchgen.request import Leaf, Request
from batchgen.sampling_params import SamplingParams


def request(
    row: int, tokens: Iterable[int], max_tokens: int = 3, *, texts: Iterable[Iterable[int]] = (),
    params: SamplingParams | None = None, key: bytes | None = None, **fields: Any,
) -> Request:  # fmt: skip
    """A request to generate `max_tokens` tokens, or to score `texts`. Its key is made of its row."""
    prompt, *scored = (
        ids if isinstance(ids, np.ndarray) else np.array(list(ids), dtype=np.int32) for ids in (tokens, *texts)
    )
    return Request(
        row=row, tokens=prompt, params=params or SamplingParams(max_tokens=max_tokens), max_tokens=max_tokens,
        key=row.to_bytes(16, "little") if key is None else key, texts=tuple(scored), **fields,
    )  # fmt: skip


def planned(requests: Sequence[Request], *, share: bool = True, chunk_size: int = 16) -> tuple[list[Leaf], PrefixPlan]:
    """The first two arguments of an engine's `add`."""
    return plan_requests(requests, chunk_size, share=share)
