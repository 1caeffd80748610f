import torch

from batchgen.kernels.transfer import Readback
from support import simulation as sim

CPU = torch.device("cpu")


def test_a_batch_says_which_row_of_the_logits_each_sequence_uses():
    s = sim.Simulation()
    s.load([[1, 2], [1, 2], [1, 2, 3], [4, 5]], [2, 2, 2, 1], texts=[[], [], [], [[6, 7, 8]]])
    first = s.step()  # the node [1, 2] and the text: logits after 2; after 5, 6 and 7
    assert first.packed.logits_places.tolist() == [1, 3, 4, 5]
    assert [row for _, row in first.kept_rows] == [0]
    assert (first.score_targets.rows, first.score_targets.tokens) == ([1, 2, 3], [6, 7, 8])
    assert (list(first.samples), first.sample_rows.tolist()) == ([], [])
    assert [seq.request.row for seq in first.scored] == [3]
    second = s.step()  # the longer prompt samples from its own row, the other two from the node's logits
    assert [(seq.request.row, position) for seq, _, position, _ in second.samples] == [(2, 0), (0, 0), (1, 0)]
    assert second.sample_rows.tolist() == [0]
    third = s.step()
    assert [(seq.request.row, position) for seq, _, position, _ in third.samples] == [(0, 1), (1, 1), (2, 1)]
    assert third.sample_rows.tolist() == [0, 1, 2]


def test_finished_sequences_and_their_sampler_indices_are_reported_once():
    s = sim.Simulation()
    s.load([[1], [2], [3]], [1, 2, 3])
    first = s.step()
    assert first.freed == ((), (), ())
    second = s.step()
    assert [seq.request.row for seq in second.freed.sequences] == [0]
    assert second.freed.sampler_indices == (first.samples[0].sampler_index,)
    third = s.step()
    assert [seq.request.row for seq in third.freed.sequences] == [1]
    ended, indices, nodes = s.scheduler.take_freed()
    assert ([seq.request.row for seq in ended], len(indices), nodes) == ([2], 1, ())
    assert s.scheduler.take_freed() == ((), (), ())


def test_a_readback_returns_the_numbers_of_each_tensor():
    tokens, valid = torch.tensor([3, 2**40 + 1]), torch.tensor([True, False])
    assert Readback([tokens, valid], CPU).lists() == [[3, 2**40 + 1], [1, 0]]
    measured = torch.tensor([[0.5, 7.0], [1.5, 8.0]], dtype=torch.float64)
    assert Readback([tokens, valid, measured], CPU).lists() == [[3, 2**40 + 1], [1, 0], [0.5, 7.0, 1.5, 8.0]]
    assert Readback([], CPU).lists() == []


def test_a_readback_keeps_the_values_of_the_time_it_was_made():
    numbers = torch.tensor([1, 2])
    back = Readback([numbers], CPU)
    numbers.zero_()
    assert back.lists() == [[1, 2]]
