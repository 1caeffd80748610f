"""The minimum time of a workload's unavoidable work on this machine: its linear layers and its attention, at the rates measured now.

    python -m benchmarks.roofline --model FOLDER --input ROWS.jsonl

This work is unavoidable: every token of the prompts' trie goes through the layers once, and so does every completion token except a row's
last. The head runs for the sampled tokens. Every query is multiplied with every key that it sees. All rows decode together, and a step reads the weights, and
the keys and values of the decoding rows, once each. Linear layers and attention follow each other; each takes its time for arithmetic or for reading,
whichever is longer. Softmax, norms, activations and everything else count as free. No engine can be much faster than the roofline.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.prefix.order import depth_first_order, neighbour_lengths
from batchgen.request import TokenArray

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """The settings of a Llama that determine its arithmetic."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    dtype: str

    @classmethod
    def of(cls, folder: Path) -> Shape:
        c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
        names += ("intermediate_size", "vocab_size")
        return cls(*(c[name] for name in names), c.get("dtype") or c["torch_dtype"])

    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of a layer's weights, with those that have one input taken together, and of the head."""
        queries = self.heads * self.head_dim
        return {
            "qkv": (queries + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, queries),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocabulary, self.hidden),
        }

    def weight_bytes(self) -> int:
        sizes = {name: out * into for name, (out, into) in self.linears().items()}
        head = sizes.pop("head")
        return (self.layers * sum(sizes.values()) + head) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Rates:
    """The machine's rates per second."""

    linear: Mapping[str, float]
    """Floating-point operations, by name of `Shape.linears`."""
    attention: float
    """Floating-point operations in the two products of attention."""
    bandwidth: float
    """Bytes of memory read."""


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a workload, whichever engine runs it."""

    prefill_tokens: int
    """Size of the prompts' token trie."""
    layer_tokens: int
    """Tokens that go through the layers."""
    head_tokens: int
    """Tokens that are sampled."""
    pairs: int
    """Number of pairs of a query and a key that it sees."""
    steps: int
    """Number of decode steps of the longest completion."""
    kv_tokens_read: int
    """Distinct tokens whose keys and values a decode step needs, summed over the steps."""


def load_of(prompts: Sequence[TokenArray], max_tokens: Sequence[int]) -> Load:
    order = depth_first_order(prompts)
    shared = neighbour_lengths(prompts, order)[:-1]  # [rows] with the row before it in this order; 0 for the first
    lengths = np.array([len(prompts[i]) for i in order], dtype=np.int64)
    made = np.array([max_tokens[i] for i in order], dtype=np.int64)
    prefill = int((lengths - shared).sum())
    # A token at position p sees p + 1 keys: positions shared..length-1 are a row's own part of the trie.
    prompt_pairs = int((_triangle(lengths) - _triangle(shared)).sum())
    # The last of m tokens is never run: positions length..length+m-2.
    decode_pairs = int((_triangle(lengths + made - 1) - _triangle(lengths)).sum())
    return Load(
        prefill_tokens=prefill,
        layer_tokens=prefill + int((made - 1).sum()),
        head_tokens=int(made.sum()),
        pairs=prompt_pairs + decode_pairs,
        steps=int(made.max()),
        kv_tokens_read=_kv_tokens_read(lengths, shared, made),
    )


def _triangle(count: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """1 + 2 + … + count."""
    return count * (count + 1) // 2


def _kv_tokens_read(lengths: np.ndarray[Any, Any], shared: np.ndarray[Any, Any], made: np.ndarray[Any, Any]) -> int:
    """Step k of the decoding (from 1) runs the k-th token of each row that has more than k, over its prompt and k tokens."""
    total, first = 0, 1
    for last in sorted(set(made.tolist())):
        steps = last - first  # the same rows decode in all of them
        if steps > 0:
            alive = np.flatnonzero(made >= last)
            trie = int(lengths[alive].sum()) - _shared_between(shared, alive)
            total += steps * trie + len(alive) * (last * (last - 1) - first * (first - 1)) // 2
            first = last
    return total


def _shared_between(shared: np.ndarray[Any, Any], alive: np.ndarray[Any, Any]) -> int:
    """Returns the sum of the tokens that each row of `alive` shares with the one before it there. `shared` has these numbers for all rows, in depth-first order."""
    if len(alive) < 2:
        return 0
    # Two rows share the minimum of what the neighbours between them share.
    return int(np.minimum.reduceat(shared[: alive[-1] + 1], alive[:-1] + 1).sum())


def seconds(load: Load, shape: Shape, rates: Rates) -> dict[str, float]:
    """Returns the roofline and its parts, in seconds."""
    arithmetic = 0.0
    for name, (out, into) in shape.linears().items():
        tokens = load.head_tokens if name == "head" else load.layer_tokens * shape.layers
        arithmetic += tokens * 2 * out * into / rates.linear[name]
    reading = load.steps * shape.weight_bytes() / rates.bandwidth
    products = load.pairs * shape.layers * 4 * shape.heads * shape.head_dim / rates.attention
    kv_bytes = shape.layers * 2 * shape.kv_heads * shape.head_dim * ITEM_BYTES[shape.dtype]
    kv_reading = load.kv_tokens_read * kv_bytes / rates.bandwidth
    linear, attention = max(arithmetic, reading), max(products, kv_reading)
    return {
        "linear_arithmetic": arithmetic,
        "linear_reading": reading,
        "attention_arithmetic": products,
        "attention_reading": kv_reading,
        "total": linear + attention,
    }


def roofline(folder: Path, rows: Path, dtype: str | None = None) -> dict[str, Any]:
    """Returns the roofline of a model and a workload's file, with the rates measured now. `dtype` replaces the checkpoint's if it is given."""
    from transformers import AutoTokenizer

    from benchmarks.engines.common import read_work
    from benchmarks.rates import measure

    shape, work = Shape.of(folder), read_work(str(rows))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    load = load_of([np.array(ids, dtype=np.int32) for ids in tokenizer(work.prompts)["input_ids"]], work.max_tokens)
    if dtype:
        shape = replace(shape, dtype=dtype)
    rates = measure(shape)
    return {
        "load": asdict(load),
        "rates": {
            "linear_gflops": {name: round(rate / 1e9, 1) for name, rate in rates.linear.items()},
            "attention_gflops": round(rates.attention / 1e9, 1),
            "bandwidth_gb": round(rates.bandwidth / 1e9, 2),
        },
        "seconds": {name: round(value, 4) for name, value in seconds(load, shape, rates).items()},
    }


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", type=Path, required=True)
    p.add_argument("--input", type=Path, required=True, help="JSONL of {id, prompt, sampling_params: {max_tokens}}")
    p.add_argument("--dtype", choices=ITEM_BYTES, help="(default: the checkpoint's)")
    args = p.parse_args()
    print(json.dumps(roofline(args.model, args.input, args.dtype)))


if __name__ == "__main__":
    main()
