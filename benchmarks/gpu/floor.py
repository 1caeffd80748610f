"""The minimum time of a decode step, part by part, and the operations of a prefill. Arithmetic only, no tensors.

A part takes the time of its bytes at the measured bandwidth or of its operations at the measured rate of a large matrix product, whichever is
longer. Parts follow one another. Softmax, norms, rotary embeddings, sampling and the work of the host are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.roofline import ITEM_BYTES, Shape


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The device's highest rates, measured in the same run."""

    bandwidth: float
    """Bytes per second that a large copy reads and writes, added up."""
    matmul: float
    """Floating-point operations per second of a large product in the model's dtype."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes and operations that a part of a step needs at least."""

    bytes: float
    flop: float

    def seconds(self, ceiling: Ceiling) -> float:
        return max(self.bytes / ceiling.bandwidth, self.flop / ceiling.matmul)


def decode_costs(shape: Shape, sequences: int, shared: int, own: float) -> dict[str, Cost]:
    """Returns the costs of one step in which `sequences` sample a token each, all under one prefix of `shared` tokens, with `own` tokens of their own.

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
    """Returns the operations of one query and one key that it sees, in all layers: two products, a multiplication and an addition each."""
    return 4.0 * shape.layers * shape.heads * shape.head_dim


def prefill_flop(shape: Shape, lengths: Sequence[int]) -> float:
    """Returns the operations of running whole prompts that share nothing, and of the logits after the last token of each."""
    weights = {name: out * into for name, (out, into) in shape.linears().items()}
    head = weights.pop("head")
    linear = 2.0 * sum(lengths) * shape.layers * sum(weights.values())
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return linear + 2.0 * len(lengths) * head + pairs * attention_flop(shape)
