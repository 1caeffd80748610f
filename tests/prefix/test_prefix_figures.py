import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.prefix import (
    carried_tokens,
    merge_figures,
    plan_figures,
    plan_prefixes,
)


def arrays(lists):
    return [np.array(ids, dtype=np.int32) for ids in lists]


def figures(lists, max_tokens, block_size=4, bytes_per_token=10, share=True, carried=0, batch_size=2):
    plan = plan_prefixes(arrays(lists), 2, share=share)
    return plan_figures(
        plan,
        plan,
        [len(ids) + new for ids, new in zip(lists, max_tokens, strict=True)],
        block_size=block_size,
        bytes_per_token=bytes_per_token,
        batch_size=batch_size,
        prefill_tokens_min=plan.prefill_tokens_min - carried,
    )


def edges(lists):
    return {tuple(ids[:n]) for ids in lists for n in range(1, len(ids) + 1)}


def node_paths(plan, prompts):
    """The tokens from the start to the end of each node that has no child nodes."""
    parents = {node.parent for node in plan.nodes}
    return [prompts[plan.order[node.first]][: node.end] for node in plan.nodes if node.index not in parents]


token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12)


def test_figures_of_a_window():
    # Nodes: [0, 6) of the first three, [6, 9) of the first two. Blocks of 4: the node [0, 6) fills one, [6, 9) a second.
    root = [1, 2, 3, 4, 5, 6]
    lists = [[*root, 7, 8, 9, 1], [*root, 7, 8, 9, 2], [*root, 1], [9]]
    assert figures(lists, [2, 3, 1, 1]) == {
        "prompt_tokens": 28,
        "prefill_tokens_min": 6 + 3 + 1 + 1 + 1 + 1,
        "prefix_nodes": 2,
        "groups": 2,
        "grouped_rows": 3,
        "kv_bytes_unshared": (3 + 4 + 2 + 1) * 40,
        "kv_bytes_shared": ((1 + 1) + (1 + 2 + 1 + 1)) * 40,
        "kv_bytes_batch": (3 + 4) * 40,
        "kv_bytes_least": 4 * 40,
    }


@given(token_lists, st.integers(1, 5), st.integers(1, 6))
def test_shared_kv_is_what_is_stored_when_full_blocks_of_nodes_are_stored_once(lists, block_size, max_tokens):
    f = figures(lists, [max_tokens] * len(lists), block_size=block_size)
    prompts = arrays(lists)
    plan = plan_prefixes(prompts, 2)
    stored = set()
    for position, index in enumerate(plan.order.tolist()):
        parent = int(plan.leaf_parent[position])
        shared = plan.nodes[parent].end if parent >= 0 else 0
        for block in range(-(-(len(lists[index]) + max_tokens) // block_size)):
            end = (block + 1) * block_size
            stored.add((block, tuple(lists[index][:end])) if end <= shared else (block, index))
    assert f["kv_bytes_shared"] == len(stored) * block_size * 10


def test_windows_add_up_and_need_the_memory_of_the_largest():
    a = figures([[1, 2, 3, 4], [1, 2, 3, 5]], [4, 4])
    b = figures([[1, 2, 9], [1, 2, 8], [1, 2, 7]], [1, 1, 1], carried=2)
    merged = merge_figures([a, b])
    assert [merged[name] for name in ("prompt_tokens", "prefill_tokens_min")] == [17, 5 + 3]
    assert [merged[name] for name in ("prefix_nodes", "groups", "grouped_rows")] == [2, 2, 5]
    assert [merged[f"kv_bytes_{name}"] for name in ("unshared", "shared", "least")] == [4 * 40, 4 * 40, 80]
    assert merge_figures([a]) == a
    assert merge_figures([]) == dict.fromkeys(a, 0)


@given(token_lists, token_lists, st.randoms(use_true_random=False))
def test_carried_tokens_are_the_edges_of_the_trie_that_are_on_the_paths(before, now, random):
    paths = node_paths(plan_prefixes(arrays(before), 2), arrays(before))
    random.shuffle(paths)
    on_paths = edges([p.tolist() for p in paths])
    assert carried_tokens(plan_prefixes(arrays(now), 2), arrays(now), paths) == len(edges(now) & on_paths)
