"""The memory that a plan says suffices is enough when an engine divides it."""

from itertools import product

import pytest

from batchgen.scheduling.pool_size import MemoryShare, sufficient_memory


@pytest.mark.parametrize(("kv", "state_slot", "batch_size"), [*product([0, 1, 100, 5000], [0, 7, 300], [1, 4, 64])])
def test_the_memory_that_is_said_to_suffice_holds_the_kv_and_two_states(kv, state_slot, batch_size):
    share = MemoryShare(sufficient_memory(kv, state_slot, batch_size), 1 if kv else 0, state_slot)
    state_slots = share.state_slots(batch_size)
    assert state_slots >= 2
    assert share.blocks(state_slots) >= kv
