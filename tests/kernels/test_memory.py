"""Copies in huge pages equal their originals, share mapped memory, and are freed one by one."""

import errno
import mmap
import weakref

import pytest
import torch

from batchgen.kernels import memory
from batchgen.kernels.memory import ALIGNMENT, Pages, drop_read_pages, give_back, in_huge_pages, mapped_files, pieces_in


@pytest.mark.skipif(not mapped_files(), reason="the system does not tell which files are mapped")
def test_pages_of_a_models_files_are_dropped_and_those_that_were_written_to_are_not(tmp_path):
    """A page that was dropped is read again from its file, without what was written to the memory."""

    (tmp_path / "blobs").mkdir()  # the hub's cache

    def mapped(name, shared=False):
        torch.ones(1 << 16, dtype=torch.uint8).numpy().tofile(tmp_path / name)
        x = torch.from_file(str(tmp_path / name), shared=shared, size=1 << 16, dtype=torch.uint8)
        return x.fill_(2)

    weights, cached, other = mapped("a.safetensors"), mapped("blobs/0123abcd"), mapped("b.bin")
    own, streamed = mapped("c"), mapped("d", shared=True)
    for name in ("c", "d"):
        (tmp_path / name).unlink()
    drop_read_pages()
    assert [int(x.unique()) for x in (weights, cached, other, own, streamed)] == [1, 1, 2, 2, 2]


@pytest.mark.skipif(not mapped_files(), reason="the system does not tell which files are mapped")
def test_the_pages_of_tensors_that_lie_in_one_another_count_once(tmp_path):
    page = mmap.PAGESIZE
    torch.ones(16 * page, dtype=torch.uint8).numpy().tofile(tmp_path / "x")
    x = torch.from_file(str(tmp_path / "x"), size=16 * page, dtype=torch.uint8)

    def pages(*places):
        return Pages([x[start:end] for start, end in places], mapped_files()).nbytes // page

    assert pages((0, 16 * page), (5, 9), (3 * page, 4 * page)) == 16
    assert pages((0, 1), (page - 1, page + 1), (8 * page, 9 * page)) == 3


@pytest.mark.parametrize("shape", [(1,), (3, 5), (1, 2), (4096, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32], ids=str)
def test_a_copy_is_contiguous_and_equal(dtype, shape):
    x = torch.randint(-100, 100, shape).to(dtype).transpose(0, -1)
    copy = in_huge_pages(x)
    assert copy.is_contiguous()
    assert copy.dtype == dtype
    assert torch.equal(copy, x)
    assert copy.data_ptr() % ALIGNMENT == 0


class Refused(mmap.mmap):
    def madvise(self, *_):
        raise OSError(errno.EINVAL, "Invalid argument")


def test_without_huge_pages_in_the_kernel_ordinary_pages_are_used(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", Refused)
    with pieces_in(memory._Pieces()):
        assert in_huge_pages(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_a_mapped_piece_is_unmapped_with_its_last_copy():
    pieces = memory._Pieces()
    with pieces_in(pieces):
        first, second = in_huge_pages(torch.arange(5)), in_huge_pages(torch.arange(7))
        piece = weakref.ref(pieces.take(0)[0])
        del first
        assert piece() is not None
        del second
        assert piece() is None
        assert in_huge_pages(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_a_copy_made_in_inference_mode_can_be_written_later():
    with torch.inference_mode():
        copy = in_huge_pages(torch.zeros(4))
    assert copy.add_(1).tolist() == [1, 1, 1, 1]


def test_freeing_a_copy_leaves_its_neighbours():
    numbers = torch.arange(100_000, dtype=torch.int32)
    before, gone, after = (in_huge_pages(numbers) for _ in range(3))
    give_back(gone)
    assert (gone == 0).sum() > 90_000  # freed pages read as zeros
    assert torch.equal(before, numbers)
    assert torch.equal(after, numbers)
