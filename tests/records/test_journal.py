"""The journal: what survives cuts, flipped bits and a full disk."""

from __future__ import annotations

import errno
import os
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.records.index import Index
from batchgen.records.journal import Journal, decode, encode
from batchgen.result import Result

KEYS = [bytes([i]) * 16 for i in range(6)]
RESULTS = [
    Result(row=-1, text="plain", finish_reason="stop", prompt_tokens=3, completion_tokens=2, token_ids=(1, 2)),
    Result(row=-1, text='é\n\u2028"\\', finish_reason="length", truncated=True),
    Result(row=-1, text=None, finish_reason="error", error_type="does_not_fit", error_message="too\nlong"),
    Result(row=-1, text="", finish_reason="stop"),
    Result(row=-1, text="x" * 500, finish_reason="length", completion_tokens=9),
    Result(row=-1, text="last", finish_reason="stop"),
]
LINES = [encode(k, r) for k, r in zip(KEYS, RESULTS, strict=True)]


@contextmanager
def reopened(path, flush_every=0.0):
    with closing(Index(None)) as index, closing(Journal(path, index, flush_every)) as journal:
        yield journal


def in_next_run(path):
    with reopened(path) as journal:
        return journal.results(KEYS)


@pytest.mark.parametrize(("key", "result"), list(zip(KEYS, RESULTS, strict=True)))
def test_a_line_holds_everything_but_the_row_number(key, result):
    line = encode(key, replace(result, row=12))
    assert line.count(b"\n") == 1
    assert decode(line) == (key, result)


def test_a_line_is_readable_and_short():
    assert LINES[3] == b'c6b4a771 03030303030303030303030303030303 {"text": "", "finish_reason": "stop"}\n'


def test_results_are_found_in_the_same_run_and_in_the_next(tmp_path):
    expected = dict(zip(KEYS, RESULTS, strict=True))
    with reopened(tmp_path / "journal") as journal:
        for key, result in expected.items():
            journal.append(key, result)
        assert journal.results([*KEYS, b"?" * 16]) == expected
    assert in_next_run(tmp_path / "journal") == expected


def test_of_two_results_with_one_key_the_last_counts(tmp_path):
    with reopened(tmp_path / "journal") as journal:
        journal.append(KEYS[0], RESULTS[0])
        journal.append(KEYS[0], RESULTS[1])
        assert journal.results(KEYS) == {KEYS[0]: RESULTS[1]}
    assert in_next_run(tmp_path / "journal") == {KEYS[0]: RESULTS[1]}


def test_every_result_is_handed_to_the_system_at_once_and_synced_by_time(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with reopened(tmp_path / "slow", flush_every=3600) as slow:
        slow.append(KEYS[0], RESULTS[0])
        assert (tmp_path / "slow").read_bytes() == LINES[0]
        assert synced == []
        slow.flush()
        assert len(synced) == 1
    with reopened(tmp_path / "each", flush_every=0) as each:
        each.append(KEYS[0], RESULTS[0])
        each.append(KEYS[1], RESULTS[1])
        assert len(synced) == 3


@settings(deadline=None)
@given(st.data())
def test_a_journal_cut_anywhere_keeps_every_whole_record_and_goes_on(tmp_path_factory, data):
    whole = b"".join(LINES)
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.mktemp("j") / "journal"
    path.write_bytes(whole[:cut])
    kept = [i for i in range(len(LINES)) if len(b"".join(LINES[: i + 1])) <= cut]
    with reopened(path) as journal:
        assert journal.results(KEYS) == {KEYS[i]: RESULTS[i] for i in kept}
        assert journal.damaged == 0
        journal.append(KEYS[5], RESULTS[5])
    assert path.read_bytes() == b"".join(LINES[: len(kept)]) + LINES[5]


@settings(deadline=None)
@given(st.integers(0, 8 * len(b"".join(LINES)) - 1))
def test_a_flipped_bit_costs_at_most_its_record_and_its_neighbour_and_is_never_believed(tmp_path_factory, bit):
    data = bytearray(b"".join(LINES))
    data[bit // 8] ^= 1 << bit % 8
    path = tmp_path_factory.mktemp("j") / "journal"
    path.write_bytes(data)
    with reopened(path) as journal:
        found = journal.results(KEYS)
        assert found.items() <= dict(zip(KEYS, RESULTS, strict=True)).items()
        assert len(found) >= len(KEYS) - 2  # two where the flip took the end of a line
        journal.append(KEYS[0], RESULTS[0])
    assert in_next_run(path) == found | {KEYS[0]: RESULTS[0]}


def test_damaged_records_are_counted(tmp_path):
    (tmp_path / "journal").write_bytes(LINES[0] + b"junk\n" + LINES[1][:-9] + b"\n" + LINES[2] + b"\x00" * 4096)
    with reopened(tmp_path / "journal") as journal:
        assert journal.damaged == 2
        assert journal.results(KEYS) == {KEYS[0]: RESULTS[0], KEYS[2]: RESULTS[2]}


class FullDisk:
    """A file that takes seven bytes more."""

    def __init__(self, file):
        self.file, self.calls = file, 0

    def write(self, data):
        self.calls += 1
        if self.calls > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data[:7])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_record_that_did_not_fit_on_the_disk_leaves_no_half_line(tmp_path, monkeypatch):
    with reopened(tmp_path / "journal") as journal:
        journal.append(KEYS[0], RESULTS[0])
        with monkeypatch.context() as patch:
            patch.setattr(journal, "_file", FullDisk(journal._file))
            with pytest.raises(OSError, match="No space left"):
                journal.append(KEYS[1], RESULTS[1])
        journal.append(KEYS[2], RESULTS[2])
        assert (tmp_path / "journal").read_bytes() == LINES[0] + LINES[2]
        assert journal.results(KEYS) == {KEYS[0]: RESULTS[0], KEYS[2]: RESULTS[2]}


def test_equal_digests_are_numbered_over_calls(tmp_path):
    a, b, c = KEYS[:3]
    for index in (Index(None), Index(tmp_path / "index.sqlite")):
        assert index.occurrences([a, b, a, a]) == [0, 0, 1, 2]
        assert index.occurrences([]) == []
        assert index.occurrences([c, a, b]) == [0, 3, 1]
        index.close()


def test_an_index_takes_more_keys_than_one_query_can(tmp_path):
    keys = [i.to_bytes(16, "big") for i in range(1_234)]
    index = Index(tmp_path / "index.sqlite")
    index.add((key, i) for i, key in enumerate(keys))
    assert index.places(keys) == {key: i for i, key in enumerate(keys)}
    index.close()
    again = Index(tmp_path / "index.sqlite")
    assert again.places(keys) == {}
    again.close()
