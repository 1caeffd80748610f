"""What a plan shares and costs: the figures of `batchgen plan`. Counts tokens and bytes; prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from batchgen.prefix.order import depth_first_order, neighbour_lengths
from batchgen.prefix.reuse import resident_lengths
from batchgen.prefix.tree import PrefixPlan
from batchgen.request import TokenArray

_FIGURES = (
    "prompt_tokens", "prefill_tokens_min", "prefix_nodes", "groups", "grouped_rows",
    "kv_bytes_unshared", "kv_bytes_shared", "kv_bytes_batch", "kv_bytes_least",
)  # fmt: skip


def plan_figures(
    rows: PrefixPlan,
    leaves: PrefixPlan,
    lengths: Sequence[int],
    *,
    block_size: int,
    bytes_per_token: int,
    batch_size: int,
    prefill_tokens_min: int,
) -> dict[str, int]:
    """Returns the figures of one window: those of tokens and groups by the plan of its rows, those of memory by the plan of its leaves.

    `prefill_tokens_min` is the size of the prompts' token trie, less the tokens carried over from the window before, and `grouped_rows` the number of
    requests that are in a group. KV is in bytes of whole blocks, with completions of full length: `kv_bytes_unshared` if each prompt is stored on its own,
    and `kv_bytes_shared` if every node is stored once. (A node stores the blocks that it fills; the rest of its path is copied into blocks below.)
    `kv_bytes_batch` is the most that rows which run at once may take in prefix order: the `batch_size` largest, each on its own, but never more than
    `kv_bytes_shared`. `kv_bytes_least` is that of the longest single request, which cannot run with less.

    `lengths` are those of the leaves in full, in tokens. `block_size` is in tokens. `bytes_per_token` is the KV of one token in all layers.
    `batch_size` is the number of leaves that run at once.
    """
    starts = np.array([node.start for node in leaves.nodes], dtype=np.int64)
    ends = np.array([node.end for node in leaves.nodes], dtype=np.int64)
    own_starts = np.append(ends, 0)[leaves.leaf_parent]  # index -1 is the extra 0
    blocks = -(-np.array(lengths, dtype=np.int64) // block_size)
    unshared = int(blocks.sum())
    shared = unshared - int((own_starts // block_size).sum()) + int((ends // block_size - starts // block_size).sum())
    block_bytes = block_size * bytes_per_token
    return {
        "prompt_tokens": rows.prompt_tokens,
        "prefill_tokens_min": prefill_tokens_min,
        "prefix_nodes": len(rows.nodes),
        "groups": rows.groups,
        "grouped_rows": rows.grouped_requests,
        "kv_bytes_unshared": unshared * block_bytes,
        "kv_bytes_shared": shared * block_bytes,
        "kv_bytes_batch": min(shared, int(np.sort(blocks)[-batch_size:].sum())) * block_bytes,
        "kv_bytes_least": int(blocks.max(initial=0)) * block_bytes,
    }


def carried_tokens(plan: PrefixPlan, prompts: Sequence[TokenArray], paths: Sequence[TokenArray]) -> int:
    """Number of tokens of the plan's trie that also lie on `paths`. They need not be run again if the paths are still in memory.

    The order of the paths does not matter, and they may share tokens with each other.
    """
    matches = [paths[resident.path][: resident.length] for resident in resident_lengths(plan, prompts, paths)]
    repeated = neighbour_lengths(matches, depth_first_order(matches))
    return sum(len(match) for match in matches) - int(repeated.sum())


def merge_figures(windows: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Returns the figures of windows that follow each other: sums (a node or group that lies in two windows counts twice), and for the KV the largest window's."""
    return {
        name: (max if name.startswith("kv_") else sum)([0, *(window[name] for window in windows)]) for name in _FIGURES
    }
