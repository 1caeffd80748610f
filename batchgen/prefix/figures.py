"""What a plan shares and costs: the figures behind `batchgen plan`. Counts tokens, pages and bytes; prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from batchgen.prefix.order import depth_first_order, neighbour_lengths
from batchgen.prefix.overlap import resident_lengths
from batchgen.prefix.tree import PrefixPlan
from batchgen.request import TokenArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """Figures of a window's plan, or of several windows' (`merge_figures`)."""

    requests: int = 0
    prompt_tokens: int = 0
    prefill_tokens_min: int = 0
    """Size of the prompts' token trie, less what was kept of the window before."""
    prefix_nodes: int = 0
    groups: int = 0
    """Of all windows: a group that two windows have counts twice."""
    grouped_requests: int = 0
    """Requests that are in a group."""
    kv_tokens_unshared: int = 0
    """KV of every prompt and completion (at its `max_tokens`), each stored for itself. The largest window's, as the
    figures below: windows follow each other."""
    kv_tokens_shared: int = 0
    """The same with every node stored once."""
    kv_pages_unshared: int = 0
    kv_pages_shared: int = 0
    """In whole pages: a node stores those that it fills, and the tail of its path is copied into a page below."""
    kv_bytes_unshared: int = 0
    kv_bytes_shared: int = 0
    """The pages in bytes."""
    kv_bytes_least: int = 0
    """The pages of the longest single request: with less, it cannot run at all."""

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that need not be run."""
        return self.prompt_tokens - self.prefill_tokens_min

    @property
    def shared_fraction(self) -> float:
        """1 - prefill_tokens_min / prompt_tokens; 0 when there are no prompts."""
        return self.saved_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def plan_figures(
    plan: PrefixPlan,
    prompts: Sequence[TokenArray],
    max_tokens: Sequence[int],
    *,
    page_size: int,
    bytes_per_token: int,
    carried: int = 0,
) -> PlanFigures:
    """Figures of one window. `max_tokens` is each prompt's, in the prompts' order.

    `page_size` is in tokens; `bytes_per_token` is the KV of one token in all layers; `carried` is what the window has
    from the one before (`carried_tokens`).
    """
    lengths = np.array([len(tokens) for tokens in prompts], dtype=np.int64) + np.array(max_tokens, dtype=np.int64)
    starts = np.array([node.start for node in plan.nodes], dtype=np.int64)
    ends = np.array([node.end for node in plan.nodes], dtype=np.int64)
    own_starts = np.append(ends, 0)[plan.leaf_parent]  # the last entry is that of -1
    pages = -(-lengths // page_size)
    pages_unshared = int(pages.sum())
    pages_shared = pages_unshared - int((own_starts // page_size).sum())
    pages_shared += int((ends // page_size - starts // page_size).sum())
    unshared = int(lengths.sum())
    return PlanFigures(
        requests=len(prompts),
        prompt_tokens=plan.prompt_tokens,
        prefill_tokens_min=plan.prefill_tokens_min - carried,
        prefix_nodes=len(plan.nodes),
        groups=len(plan.groups),
        grouped_requests=sum(group.rows for group in plan.groups),
        kv_tokens_unshared=unshared,
        kv_tokens_shared=unshared - int(own_starts.sum()) + int((ends - starts).sum()),
        kv_pages_unshared=pages_unshared,
        kv_pages_shared=pages_shared,
        kv_bytes_unshared=pages_unshared * page_size * bytes_per_token,
        kv_bytes_shared=pages_shared * page_size * bytes_per_token,
        kv_bytes_least=int(pages.max(initial=0)) * page_size * bytes_per_token,
    )


def carried_tokens(plan: PrefixPlan, prompts: Sequence[TokenArray], paths: Sequence[TokenArray]) -> int:
    """Tokens of the plan's trie that are on `paths` too: what is not run again when the paths were kept.

    `paths` are `node_paths` of the window before, say. Their order does not matter, nor what they share.
    """
    matches = [paths[resident.path][: resident.length] for resident in resident_lengths(plan, prompts, paths)]
    repeated = neighbour_lengths(matches, depth_first_order(matches))
    return sum(len(match) for match in matches) - int(repeated.sum())


def merge_figures(windows: Iterable[PlanFigures]) -> PlanFigures:
    """Figures of windows that follow each other: sums, and for the KV the largest window's."""
    merged = PlanFigures()
    for window in windows:
        merged = PlanFigures(
            requests=merged.requests + window.requests,
            prompt_tokens=merged.prompt_tokens + window.prompt_tokens,
            prefill_tokens_min=merged.prefill_tokens_min + window.prefill_tokens_min,
            prefix_nodes=merged.prefix_nodes + window.prefix_nodes,
            groups=merged.groups + window.groups,
            grouped_requests=merged.grouped_requests + window.grouped_requests,
            kv_tokens_unshared=max(merged.kv_tokens_unshared, window.kv_tokens_unshared),
            kv_tokens_shared=max(merged.kv_tokens_shared, window.kv_tokens_shared),
            kv_pages_unshared=max(merged.kv_pages_unshared, window.kv_pages_unshared),
            kv_pages_shared=max(merged.kv_pages_shared, window.kv_pages_shared),
            kv_bytes_unshared=max(merged.kv_bytes_unshared, window.kv_bytes_unshared),
            kv_bytes_shared=max(merged.kv_bytes_shared, window.kv_bytes_shared),
            kv_bytes_least=max(merged.kv_bytes_least, window.kv_bytes_least),
        )
    return merged
