"""The outline of a prefix tree as JSON, with the texts of its nodes cut to a bounded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from batchgen.prefix.outline import PrefixOutline

TEXT_CHARACTERS = 300_000
"""All texts of a tree together, about. Nodes that save more tokens get their text first."""
MAX_TEXT = 4000
MIN_TEXT = 120


def tree_record(outline: PrefixOutline, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Returns the outline as JSON: sums, and a list for each field of a node. `decode` turns token ids to text."""
    nodes = outline.nodes
    texts = [""] * len(nodes)
    left = TEXT_CHARACTERS
    for place in sorted(range(len(nodes)), key=lambda i: -nodes[i].saved_tokens):
        node = nodes[place]
        limit = MAX_TEXT if left > 0 else MIN_TEXT
        text = decode(node.text_tokens[:limit].tolist())
        texts[place] = text[:limit]
        if len(text) > limit or node.tokens > len(node.text_tokens[:limit]):
            texts[place] += "…"
        left -= len(texts[place])
    return {
        "rows": outline.rows,
        "prompt_tokens": outline.prompt_tokens,
        "saved_tokens": outline.saved_tokens,
        "node_count": outline.node_count,
        "lone_rows": outline.lone_rows,
        "parents": [node.parent for node in nodes],
        "node_rows": [node.rows for node in nodes],
        "ending_rows": [node.ending_rows for node in nodes],
        "tokens": [node.tokens for node in nodes],
        "saved": [node.saved_tokens for node in nodes],
        "nodes_below": [node.nodes_below for node in nodes],
        "saved_below": [node.saved_below for node in nodes],
        "texts": texts,
    }
