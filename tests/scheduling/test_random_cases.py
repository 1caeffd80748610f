"""Random trees, lengths, budgets, policies, forks, texts to score, priorities, windows and cancellations.

After each step, `Simulation` checks blocks, tables, reads and budgets. At the end it checks that no leaf ended twice and nothing was left behind.
"""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchgen.scheduling.waiting import POLICIES
from support import simulation as sim
from support.params import examples, slow_but


def random_prompts(rng, count, longest):
    """Prompts of many lengths over two tokens; many are equal or prefixes of others."""
    prompts = []
    for _ in range(count):
        begin = rng.choice(prompts)[: rng.randint(0, longest)] if prompts and rng.random() < 0.7 else []
        prompts.append((begin + [rng.randrange(2) for _ in range(rng.randint(0, longest))])[:longest] or [0])
    return prompts


def random_window(rng, scored):
    prompts = random_prompts(rng, rng.randint(1, 14), rng.choice([3, 8, 20]))
    texts = [
        [random_prompts(rng, 1, 5)[0] for _ in range(rng.randint(1, 4))] if rng.random() < scored else []
        for _ in prompts
    ]
    return {
        "prompts": prompts,
        "lengths": [rng.randint(1, 6) for _ in prompts],
        "n": [rng.choice([1, 1, 1, 2, 4]) for _ in prompts],
        "texts": texts,
        "priorities": [rng.choice([0, 0, 0, -1, 5]) for _ in prompts],
    }


def longest_leaf(w):
    rows = zip(w["prompts"], w["lengths"], w["texts"], strict=True)
    return max(len(p) + (max(map(len, texts)) if texts else n) - 1 for p, n, texts in rows)


def leaves(w):
    rows = zip(w["n"], w["texts"], strict=True)
    return {(row, i) for row, (n, texts) in enumerate(rows) for i in range(len(texts) or n)}


def tree_tokens(w):
    """The number of tokens in the prefix tree of the prompts."""
    return len({tuple(p[: i + 1]) for p in w["prompts"] for i in range(len(p))})


ENDS = (1003, 1008)  # of the eleven tokens that may be sampled


def check(seed, spare, policy, sliding_window, scored, cancels, ends=(), state_slots=None):
    """Runs a random job step by step, with a step ahead, and with drafts. The results must be equal unless requests are cancelled."""
    loops = [(False, None), (True, None), (False, seed % 4 / 3)]
    one, *others = (
        check_once(seed, spare, policy, sliding_window, scored, cancels, ends, state_slots, ahead, drafts)
        for ahead, drafts in loops
    )
    assert cancels or all(other == one for other in others)


def check_once(seed, spare, policy, sliding_window, scored, cancels, ends, state_slots, ahead, drafts):
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4])
    tokens = rng.choice([1, 2, 5, 16, 100])
    windows = [random_window(rng, scored) for _ in range(rng.randint(1, 3))]
    needed = max(-(-longest_leaf(w) // block_size) for w in windows)
    s = sim.Simulation(
        blocks=needed + spare, block_size=block_size, tokens=tokens, batch_size=min(tokens, rng.choice([1, 2, 3, 50])),
        prefill=rng.randint(1, tokens), scored=rng.choice([1, 3, 1000]),
        sliding_window=sliding_window, policy=policy, shared_reads=rng.choice([1, 4, 1000]),
        ahead=ahead, ends=ends, state_slots=state_slots, drafts=drafts,
    )  # fmt: skip
    results = []
    for number, w in enumerate(windows):
        before = s.prefilled
        s.load(**w)
        window_leaves = s.window.leaves  # the window drops them when all are done
        cancelled = set()
        while cancels and s.scheduler.unfinished and len(cancelled) < 3:
            for _ in range(rng.randint(0, 4)):
                if s.scheduler.unfinished:
                    s.step()
            index = rng.randrange(len(window_leaves))
            leaf = window_leaves[index]
            s.cancel(index)
            cancelled.add((leaf.request.row, leaf.choice))
        s.finish()
        assert leaves(w) - cancelled <= s.done.keys() <= leaves(w)
        results.append(s.done)
        if not cancels and spare == 1000:
            assert s.scheduler.counts.preemptions == 0
            assert s.recomputed == 0 or (drafts is not None and state_slots)  # a state cannot be taken back
            prefilled = s.prefilled - before
            if state_slots in (None, 1000):
                assert prefilled == tree_tokens(w) if number == 0 else prefilled <= tree_tokens(w)
    assert not s.late or (ahead and (ends or cancels))
    s.block_manager.evict_all()
    assert s.block_manager.pool.num_used == 0
    assert s.block_manager.state_slots is None or s.block_manager.state_slots.num_used == 0
    return results


cases = given(
    seed=st.integers(0, 2**32),
    spare=st.sampled_from([0, 1, 2, 3, 5, 8, 13, 1000]),
    policy=st.sampled_from(sorted(POLICIES)),
    sliding_window=st.sampled_from([None, None, 1, 4, 9]),
    scored=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    cancels=st.booleans(),
    ends=st.sampled_from([(), ENDS]),
    state_slots=st.sampled_from([None, None, 2, 3, 5, 9, 1000]),
)


# This case once failed: a child wrote into a block that was still held below a node dropped for its state slot.
@example(
    seed=171253, spare=0, policy="prefill-first", sliding_window=None, scored=0.5, cancels=False, ends=(), state_slots=3
)
# This one once never ended: a leaf took one block more than the pool has beside its parent's.
@example(seed=123577, spare=0, policy="fifo", sliding_window=1, scored=1.0, cancels=False, ends=(), state_slots=None)
@settings(max_examples=examples(12, 500))
@cases
def test_every_leaf_is_right_with_any_tree_limits_and_memory(
    seed, spare, policy, sliding_window, scored, cancels, ends, state_slots
):
    check(seed, spare, policy, sliding_window, scored, cancels, ends, state_slots)


@pytest.mark.parametrize("state_slots", slow_but({None, 2}, [None, 2, 7]))
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_leaf_of_windows_that_run_together_finishes(policy, ahead, state_slots):
    for seed in range(examples(2, 20)):
        rng = random.Random(seed)
        s = sim.Simulation(
            blocks=40,
            block_size=2,
            tokens=9,
            batch_size=4,
            policy=policy,
            ahead=ahead,
            ends=ENDS,
            state_slots=state_slots,
        )
        count = 0
        for _ in range(4):
            w = random_window(rng, 0.3)
            s.load(**w)
            count += len(leaves(w))
            for _ in range(rng.randint(0, 6)):
                if s.scheduler.unfinished:
                    s.step()
            if not s.busy:
                count = 0
        s.finish()
        assert len(s.done) == count or not count
