"""The least time that a decode step could take, part by part, and the operations of a prefill. Arithmetic only: no tensors.

A part takes the larger of its bytes at the machine's measured bandwidth and its operations at the measured rate of a large matrix
product; parts follow one another. Softmax, norms, rotary, sampling and whatever the host does are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.roofline import ITEM_BYTES, Shape


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the device reaches, measured in the same run."""

    bandwidth: float
    """Bytes a second that a large copy moves, those read and those written."""
    matmul: float
    """Floating-point operations a second of a large product in the model's dtype."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a part of a step cannot do without."""

    bytes: float
    flop: float

    def seconds(self, ceiling: Ceiling) -> float:
        return max(self.bytes / ceiling.bandwidth, self.flop / ceiling.matmul)


def decode_costs(shape: Shape, sequences: int, shared: int, own: float) -> dict[str, Cost]:
    """Of one step in which `sequences` draw a token each, all under one prefix of `shared` tokens, with `own` tokens of their own.

    The linear layers' weights and the prefix's keys and values are read once for all; `own` counts the token that is run.
    """
    item = ITEM_BYTES[shape.dtype]
    weights = {name: out * into for name, (out, into) in shape.linears().items()}
    head = weights.pop("head")
    layers = shape.layers * sum(weights.values())
    kv_token = shape.layers * 2 * shape.kv_heads * shape.head_dim * item
    pair = attention_flop(shape)
    return {
        "linear layers": Cost(layers * item, 2.0 * sequences * layers),
        "shared parts": Cost(shared * kv_token, sequences * shared * pair),
        "own blocks": Cost(sequences * own * kv_token, sequences * own * pair),
        "head": Cost(head * item, 2.0 * sequences * head),
    }


def floor_seconds(costs: Mapping[str, Cost], ceiling: Ceiling) -> float:
    return sum(cost.seconds(ceiling) for cost in costs.values())


def attention_flop(shape: Shape) -> float:
    """Operations of one query and one key that it sees, in all layers: two products, a multiplication and an addition each."""
    return 4.0 * shape.layers * shape.heads * shape.head_dim


def prefill_flop(shape: Shape, lengths: Sequence[int]) -> float:
    """Operations of running prompts that share nothing, whole, and of the logits after each one's last token."""
    weights = {name: out * into for name, (out, into) in shape.linears().items()}
    head = weights.pop("head")
    linear = 2.0 * sum(lengths) * shape.layers * sum(weights.values())
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return linear + 2.0 * len(lengths) * head + pairs * attention_flop(shape)


def busy(intervals: Sequence[tuple[float, float]]) -> float:
    """The time in which at least one of these intervals (from, to) lies."""
    total, end = 0.0, float("-inf")
    for begins, ends in sorted(intervals):
        if ends > end:
            total += ends - max(begins, end)
            end = ends
    return total
