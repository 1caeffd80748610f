"""Sharing never takes more KV memory than the same rows take without it."""

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from support import simulation as sim
from support.params import examples

cases = given(seed=st.integers(0, 2**32), policy=st.sampled_from(["prefix", "prefill-first"]))
options = settings(max_examples=examples(15, 1000))


def random_prompts(rng):
    """Prompts of a random tree, with many nodes of a few tokens. Some are equal, and some are prefixes of others."""
    paths = [[]]
    for _ in range(rng.randint(1, 40)):
        branch = rng.choice(paths)
        paths.append([*branch, *(rng.randrange(2) for _ in range(rng.choice([1, 1, 2, 3, 9])))])
    return rng.choices(paths[1:], k=rng.randint(1, 60))


@options
@cases
@example(seed=1301596169, policy="prefix")  # a kept node of another window whose first token is taken over
def test_blocks_in_use_never_exceed_those_of_the_rows_under_way_alone(seed, policy):
    """Each prompt token runs once nevertheless."""
    rng = random.Random(seed)

    def check(batch, plan):
        assert manager.pool.num_used <= manager.peak_unshared_blocks

    s = sim.Simulation(
        block_size=rng.choice([1, 2, 3, 4, 16]), batch_size=rng.choice([1, 2, 3, 8, 100]), policy=policy,
        prefill=rng.choice([1, 2, 5, 1000]), every_step=check,
    )  # fmt: skip
    manager = s.block_manager
    for _ in range(2):
        prompts = random_prompts(rng)
        lengths, n = [rng.choice([1, 1, 2, 9]) for _ in prompts], rng.choices([1, 1, 3], k=len(prompts))
        texts = [[[1]] * rng.randint(0, 3) for _ in prompts] if rng.random() < 0.3 else []
        plan = s.load(prompts, lengths, n=n, texts=texts)
        s.finish()
        if s.window.number == 0 and not texts:
            assert s.prefilled == plan.prefill_tokens_min


@options
@cases
def test_rows_that_run_at_once_take_no_more_blocks_than_without_sharing(seed, policy):
    rng = random.Random(seed)
    block_size, length, prompts = rng.choice([1, 2, 3, 4, 16]), rng.choice([1, 2, 10]), random_prompts(rng)
    peaks = {}
    for share in (True, False):
        s = sim.Simulation(blocks=4000, block_size=block_size, policy=policy)
        s.load(prompts, [length] * len(prompts), share=share)
        s.finish()
        peaks[share] = s.block_manager.pool.peak_used
    assert peaks[True] <= peaks[False]
    assert s.block_manager.peak_unshared_blocks == peaks[False]


def test_short_rows_take_a_block_for_each_sequence_and_none_for_tiny_nodes():
    """800 rows of seven tokens, with 16 sequences at a time."""
    rng = random.Random(5)
    s = sim.Simulation(blocks=8000, block_size=16, batch_size=16)
    plan = s.load([[rng.randrange(4) for _ in range(7)] for _ in range(800)], [1] * 800)
    s.finish()
    assert len(plan.nodes) > 100
    assert (s.block_manager.pool.peak_used, s.block_manager.peak_unshared_blocks) == (16, 16)
    assert s.prefilled == plan.prefill_tokens_min


def test_nodes_that_start_early_do_not_take_the_places_of_waiting_sequences():
    """Eight groups of four rows, eight sequences at a time: all eight run in the second step and from then on."""
    s = sim.Simulation(batch_size=8)
    s.load([[g, g, row] for g in range(8) for row in range(4)], [5] * 32)
    sizes = []
    while s.scheduler.unfinished:
        s.step()
        sizes.append(len(s.scheduler.running))
    assert sizes.count(8) >= 4 * 4
    assert s.steps <= 4 * 5 + 5
