"""The database of results: kills, damage, full disks, and readers in other processes."""

import errno
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.errors import OutputError, OutputLocked
from batchgen.jobs.files import results as results_module
from batchgen.jobs.files.disk import network_file_system, shares_memory
from batchgen.jobs.files.results import Results
from batchgen.jobs.reuse_output import is_held_whole, results_of_output
from batchgen.records.jsonl import to_json
from batchgen.records.output import RowForm, output_row
from batchgen.records.rows import Row
from batchgen.result import Completion, Result, TokenLogprob
from support.damage import damaged
from support.params import examples
from support.python_process import environment

KEYS = [bytes([i]) * 16 for i in range(6)]
RESULTS = [
    Result(row=-1, text="plain", finish_reason="stop", prompt_tokens=3, completion_tokens=2, token_ids=(1, 2)),
    Result(row=-1, text='é\n\u2028"\\\ud800', finish_reason="length", truncated=True),
    Result(row=-1, text=None, finish_reason="error", error_type="does_not_fit", error_message="too\nlong"),
    Result(row=-1, text="", finish_reason="timeout"),
    Result(row=-1, text="x" * 50_000, finish_reason="length", completion_tokens=9),
    Result(row=-1, text="last", finish_reason="stop"),
]
ALL = dict(zip(KEYS, RESULTS, strict=True))
BEGUN = {
    0: Completion(text="", finish_reason="", token_ids=(5, 6)),
    2: Completion(text="whole", finish_reason="stop", token_ids=(7,), logprobs=(TokenLogprob("w", 7, -0.5),)),
}


def opened(folder, flush_every=0.0):
    return closing(Results(folder, flush_every))


def fill(folder):
    with opened(folder) as results:
        for key, result in ALL.items():
            results.append(key, replace(result, row=12))


@pytest.fixture(params=[False, True], ids=["WAL", "network"])
def folder(request, tmp_path, monkeypatch):
    """A folder, once on a local and once on a (pretended) network file system."""
    monkeypatch.setattr(results_module, "network_file_system", lambda folder: request.param)
    return tmp_path


KILLED = """
import sys, os, signal
from pathlib import Path
from batchgen.jobs.files import results as module
from batchgen.result import Result
for name, network, flush_every in (("local", False, 3600), ("network", True, 3600), ("flushed", True, 0)):
    if not (child := os.fork()):
        module.network_file_system = lambda folder: network
        results = module.Results(Path(sys.argv[1]) / name, flush_every)
        for i in range(5):
            results.append(bytes([i]) * 16, Result(row=i, text=str(i), finish_reason="stop"))
        results.commit()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_a_killed_process_loses_only_results_that_were_not_committed_and_on_a_network_file_system_not_flushed(tmp_path):
    for name in ("local", "network", "flushed"):
        (tmp_path / name).mkdir()
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment(), check=True)
    for name, kept in (("local", 5), ("network", 0), ("flushed", 5)):
        with opened(tmp_path / name) as results:
            assert [r.text for r in results.stored(KEYS).values()] == [str(i) for i in range(kept)]


def test_a_file_system_without_shared_memory_needs_none(tmp_path, monkeypatch):
    def mmap(*_: object) -> None:
        raise OSError(errno.ENODEV, "No such device")  # as FUSE with direct_io

    monkeypatch.setattr("mmap.mmap", mmap)
    assert not shares_memory(tmp_path)
    with opened(tmp_path) as results:
        results.append(KEYS[0], RESULTS[0])
        results.flush()
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "results.sqlite",
            "results.sqlite-journal",
            "run.sqlite",
        ]
        assert (tmp_path / "results.sqlite").read_bytes()[18:20] == b"\1\1"  # no log


def test_whoever_the_umask_lets_write_to_the_folder_may_write_to_its_databases(folder):
    before = os.umask(0o002)
    try:
        with opened(folder) as results:
            assert results.keys_of_rows().occurrences([b"digest"]) == [0]
            modes = {file.name: file.stat().st_mode & 0o777 for file in folder.glob("*.sqlite*")}
    finally:
        os.umask(before)
    assert {"results.sqlite", "known.sqlite"} <= modes.keys()
    assert {mode for name, mode in modes.items() if not name.startswith("run.")} == {0o664}


@pytest.mark.parametrize("network", [False, True])
def test_a_database_that_was_removed_is_noticed_before_the_job_has_ended(tmp_path, network, monkeypatch):
    monkeypatch.setattr("batchgen.jobs.files.results.network_file_system", lambda folder: network)
    folder = tmp_path / "o.jsonl.job"
    folder.mkdir()
    with opened(folder) as results:
        results.append(KEYS[0], RESULTS[0])
        results.commit()
        folder.rename(tmp_path / "moved")
        with pytest.raises(
            OutputError, match=r"o\.jsonl\.job cannot be written: No such file or directory; its folder was"
        ):
            results.commit()
    with opened(tmp_path / "moved") as results:
        assert [*results.stored(KEYS)] == [KEYS[0]]


def test_the_log_is_synced_at_intervals_and_not_for_every_result(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with opened(tmp_path, flush_every=3600) as results:
        results.append(KEYS[0], RESULTS[0])
        results.commit()
        assert synced == []
        results.flush()
        assert len(synced) == 1
    with opened(tmp_path, flush_every=0) as results:
        synced.clear()
        results.append(KEYS[1], RESULTS[1])
        results.commit()
        assert len(synced) == 1


def test_an_output_that_breaks_off_gives_no_result_and_later_results_are_stored(folder):
    def entries():
        yield KEYS[0], RESULTS[0]
        raise OSError("gone")

    with opened(folder) as results:
        results.append(KEYS[2], RESULTS[2])
        assert results.count == 1
        with pytest.raises(OSError, match="gone"):
            results.add_missing(entries())
        assert results.count == 1
        results.append(KEYS[1], RESULTS[1])
    with opened(folder) as results:
        assert results.stored(KEYS) == {KEYS[1]: RESULTS[1], KEYS[2]: RESULTS[2]}


def test_results_to_generate_again_are_dropped_on_the_disk_before_the_manifest_says_so(folder, monkeypatch):
    fill(folder)
    with opened(folder, flush_every=3600) as results:
        dropped = []
        flush = results.flush
        monkeypatch.setattr(results, "flush", lambda: (dropped.append(results.count), flush()))
        results.forget(["stop"])
        assert dropped == [results.count]


@settings(max_examples=examples(10, 60))
@given(st.data())
def test_a_damaged_database_gives_no_wrong_result_and_accepts_new_ones(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("r")
    fill(folder)
    path = folder / "results.sqlite"
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    with opened(folder) as results:
        found = results.stored(KEYS)
        assert found.items() <= ALL.items()
        for key, result in ALL.items():
            results.append(key, result)
        assert results.stored(KEYS) == ALL
    with opened(folder) as results:
        assert results.stored(KEYS) == ALL


@pytest.mark.parametrize("damage", [(18, 18 ^ 255), (19, 9), (63, 1)], ids=["to write", "to read", "of our tables"])
def test_a_database_of_another_version_accepts_new_results(tmp_path, damage):
    fill(tmp_path)
    content = bytearray((tmp_path / "results.sqlite").read_bytes())
    content[damage[0]] = damage[1]
    (tmp_path / "results.sqlite").write_bytes(content)
    with opened(tmp_path) as results:
        assert results.damaged >= 1
        results.append(KEYS[0], RESULTS[1])
        assert results.stored(KEYS[:1]) == {KEYS[0]: RESULTS[1]}


def test_intact_results_of_a_damaged_database_are_recovered(tmp_path):
    """One page is overwritten with zeros. The results on the pages before and after it are recovered."""
    with opened(tmp_path) as results:
        for i in range(200):
            results.append(i.to_bytes(16, "big"), Result(row=i, text="x" * 1000, finish_reason="stop"))
        results.keep_beside_output([bytes(16)])
    path = tmp_path / "results.sqlite"
    content = bytearray(path.read_bytes())
    middle = len(content) // 8192 * 4096
    content[middle : middle + 4096] = bytes(4096)
    path.write_bytes(content)
    with opened(tmp_path) as results:
        assert results.damaged > 0
        assert 100 < results.count < 200
        assert results.shrink([bytes(16), bytes([*bytes(15), 1])])
        assert bytes(16) in results.stored([bytes(16)]), "it is not whole in the output"
        assert not results.stored([bytes([*bytes(15), 1])])


def test_a_damaged_result_is_left_out_and_counted_and_the_input_is_read_again(tmp_path):
    with opened(tmp_path) as results:
        results.append(KEYS[0], RESULTS[0])
        results.append(KEYS[5], RESULTS[5])
        results.set_fact("reading", {"rows": 2})
    path = tmp_path / "results.sqlite"
    path.write_bytes(path.read_bytes().replace(b'"plain"', b'"plaim"'))
    with opened(tmp_path) as results:
        assert results.damaged == 1
        assert results.stored(KEYS) == {KEYS[5]: RESULTS[5]}
        assert results.fact("reading") is None


def begun(*token_ids: int, reason: str = "", logprobs: bool = False) -> Completion:
    numbers = tuple(TokenLogprob("x", token, -token / 8) for token in token_ids) if logprobs else None
    return Completion(text="", finish_reason=reason, token_ids=token_ids, logprobs=numbers)


def entries(results: Results) -> list[tuple[int, int, int]]:
    return results._db.execute("SELECT number, start, tokens FROM under_way ORDER BY key, number, start").fetchall()


def test_partial_completions_are_kept_until_their_row_has_a_result(folder):
    with opened(folder) as results:
        results.keep_under_way({KEYS[0]: BEGUN, KEYS[1]: {0: BEGUN[0]}})
        results.keep_under_way({KEYS[1]: {0: begun(5, 6, 7)}})
    with opened(folder) as results:
        assert results.under_way() == {KEYS[0]: BEGUN, KEYS[1]: {0: begun(5, 6, 7)}}
        assert results.tokens_under_way == 6
        results.append(KEYS[0], RESULTS[0])
        assert entries(results) == [(0, 0, 2), (0, 2, 1)]
        assert results.tokens_under_way == 3
        assert list(results.under_way()) == [KEYS[1]]


@pytest.mark.parametrize("logprobs", [False, True])
def test_only_the_new_tokens_of_partial_completions_are_written(folder, logprobs):
    with opened(folder) as results:
        results.keep_under_way({KEYS[0]: {0: begun(1, 2, logprobs=logprobs)}})
        results.keep_under_way({KEYS[0]: {0: begun(1, 2, logprobs=logprobs), 1: begun(8, logprobs=logprobs)}})
        results.keep_under_way({KEYS[0]: {0: begun(1, 2, 3, logprobs=logprobs)}})
    with opened(folder) as results:
        results.under_way()
        results.keep_under_way({KEYS[0]: {0: begun(1, 2, 3, 4, 5, logprobs=logprobs)}})
        ended = {0: begun(1, 2, 3, 4, 5, reason="length", logprobs=logprobs), 1: begun(8, logprobs=logprobs)}
        results.keep_under_way({KEYS[0]: ended})
        results.keep_under_way({KEYS[0]: ended})
        assert entries(results) == [(0, 0, 2), (0, 2, 1), (0, 3, 2), (0, 5, 0), (1, 0, 1)]
    with opened(folder) as results:
        assert results.under_way() == {KEYS[0]: ended}
        longer = {0: begun(1, 2, 3, 4, 5, 6, logprobs=logprobs)}  # with a larger limit
        results.keep_under_way({KEYS[0]: longer})
        assert entries(results) == [(0, 0, 2), (0, 2, 1), (0, 3, 2), (0, 5, 1), (1, 0, 1)]
    with opened(folder) as results:
        assert results.under_way() == {KEYS[0]: ended | longer}


def test_a_completion_that_starts_over_replaces_its_kept_tokens(folder):
    with opened(folder) as results:
        results.keep_under_way({KEYS[0]: {0: begun(1, 2), 1: begun(3)}})
        results.keep_under_way({KEYS[0]: {0: begun(1, 2, 3), 1: begun(3, 4)}})
        results.keep_under_way({KEYS[0]: {0: begun(1, 9), 1: begun(3, 4, 5)}})
    with opened(folder) as results:
        assert results.under_way() == {KEYS[0]: {0: begun(1, 9), 1: begun(3, 4, 5)}}


def test_partial_completions_of_a_row_in_two_databases_are_not_mixed(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    with opened(tmp_path) as results:
        for tokens in ((1, 2), (1, 2, 3, 4)):
            results.keep_under_way({key: {0: begun(*tokens)} for key in KEYS[:3]})
    with opened(tmp_path / "other") as results:
        results.keep_under_way({KEYS[0]: {0: begun(8, 9)}})
        results.append(KEYS[2], RESULTS[2])
    synced = []
    with opened(tmp_path, flush_every=3600) as results:
        monkeypatch.setattr(os, "fsync", synced.append)
        assert results.take_from(tmp_path / "other") == 1
        assert synced, "the other database is removed next"
        assert results.tokens_under_way == 2 + 4
        assert results.under_way() == {KEYS[0]: {0: begun(8, 9)}, KEYS[1]: {0: begun(1, 2, 3, 4)}}
        assert results.stored(KEYS) == {KEYS[2]: RESULTS[2]}


def test_a_partial_completion_continues_from_before_its_damaged_part(tmp_path):
    with opened(tmp_path) as results:
        for tokens in ((5, 6), (5, 6, 7), (5, 6, 7, 8)):
            results.keep_under_way({key: {0: begun(*tokens), 1: begun(*tokens)} for key in KEYS[:2]})
        for key, start in ((KEYS[0], 2), (KEYS[1], 0)):
            results._db.execute(
                "UPDATE under_way SET value = replace(value, ']', ',1]') WHERE key = ? AND number = 1 AND start = ?",
                (key, start),
            )
        whole = begun(5, 6, 7, 8)
        assert results.under_way() == {KEYS[0]: {0: whole, 1: begun(5, 6)}, KEYS[1]: {0: whole}}
        results.keep_under_way({key: {1: begun(5, 6, 7, 8, 9)} for key in KEYS[:2]})
    with opened(tmp_path) as results:
        assert results.under_way() == {key: {0: whole, 1: begun(5, 6, 7, 8, 9)} for key in KEYS[:2]}


class Lost:
    """A lease that another process takes over."""

    gone = False

    def check(self) -> None:
        if self.gone:
            raise OutputLocked("taken over", "leave it")


@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize(
    "write", [Results.commit, Results.flush, lambda results: results.keep_under_way({KEYS[1]: BEGUN})]
)
def test_after_another_process_has_taken_over_nothing_is_written(folder, write, more):
    lease = Lost()
    with closing(Results(folder, 3600, lease)) as results:
        results.append(KEYS[0], RESULTS[0])
        results.flush()
        for key in KEYS[1 : 1 + more]:
            count = results.count  # writes those before
            results.append(key, RESULTS[1])
            assert count < results._known
        lease.gone = True
        with pytest.raises(OutputLocked):
            write(results)
    with opened(folder) as results:
        assert (results.stored(KEYS), results.under_way()) == ({KEYS[0]: RESULTS[0]}, {})


def test_rows_of_the_output_have_a_key_or_a_result(folder):
    with opened(folder) as results:
        results.begin_rows()
        results.add_rows([0, 1, 2], {0: KEYS[0], 2: KEYS[1]}, {1: RESULTS[2]})
        results.add_rows([3], {3: KEYS[2]}, {})
        assert results.row_count == 4
        assert results.rows(1, 2) == ({2: KEYS[1]}, {1: replace(RESULTS[2], row=1)})
        results.append(KEYS[1], RESULTS[1])
        results.add_rows([4], {4: KEYS[1]}, {})
        of_rows = {1: replace(RESULTS[2], row=1), 2: RESULTS[1], 4: RESULTS[1]}
        assert results.rows(1, 5) == ({2: KEYS[1], 3: KEYS[2], 4: KEYS[1]}, of_rows)
        assert list(results.failed_rows()) == [replace(RESULTS[2], row=1)]
        results.begin_rows()
        assert results.row_count == 0


def test_a_result_that_cannot_be_written_at_first_is_written_later(folder):
    with opened(folder) as results:
        results._db.execute("PRAGMA max_page_count = 1")
        results.append(KEYS[4], RESULTS[4])
        with pytest.raises(sqlite3.OperationalError, match="full"):
            results.keep_progress({})  # whose errors the job ignores
        results._connection.execute("PRAGMA max_page_count = 1000000")
        assert results.stored(KEYS) == {KEYS[4]: RESULTS[4]}


def test_removing_all_results_of_a_finished_output_writes_nothing_to_a_full_disk(tmp_path):
    fill(tmp_path)
    with opened(tmp_path) as results:
        results.add_rows([0], {0: KEYS[0]}, {})
        files = [tmp_path / "results.sqlite", tmp_path / "results.sqlite-wal"]
        before = [file.read_bytes() for file in files]
        assert not results.shrink(KEYS)
        assert before == [file.read_bytes() for file in files]


def test_on_a_full_disk_all_results_stay_until_there_is_space(tmp_path):
    fill(tmp_path)
    with opened(tmp_path) as results:
        held = results.stored(KEYS)
        for database in ("main", "run"):
            results._db.execute(f"PRAGMA {database}.max_page_count = 1")
        assert results.shrink(key.to_bytes(16, "big") for key in range(1000)) is None
        assert results.stored(KEYS) == held
    with opened(tmp_path) as results:
        assert results.shrink(KEYS) is False


def test_a_finished_job_keeps_only_results_that_its_output_does_not_hold(folder):
    fill(folder)
    with opened(folder) as results:
        results.keep_beside_output([KEYS[1]])
        results.keep_under_way({b"?" * 16: BEGUN})
        results.set_fact("reading", {})
        assert results.shrink(KEYS[:4])
    with opened(folder) as results:
        assert set(results.stored(KEYS)) == {KEYS[1], KEYS[4], KEYS[5]}
        assert (results.under_way(), results.fact("reading")) == ({}, None)
        assert results.shrink(KEYS)
        assert set(results.stored(KEYS)) == {KEYS[1]}
    with opened(folder) as results:
        results.append(KEYS[1], RESULTS[1])  # a new result for a key that the output holds
        assert not results.shrink(KEYS)


def test_more_keys_can_be_looked_up_than_fit_one_query(folder):
    keys = [i.to_bytes(16, "big") for i in range(1_234)]
    with opened(folder) as results:
        results.know_finished([*keys[:1_000], KEYS[0]])
        results.add_missing((key, RESULTS[0]) for key in keys)
        assert results.finished_at_hand == 1_000
        assert len(results.stored(keys)) == 1_234


def test_lines_of_an_output_are_results_until_they_are_damaged_or_to_be_generated_again(folder):
    form = RowForm(token_ids=True)
    rows = [Row(i, {"prompt": "é", "usage": 1, "n": i}, None, "") for i in range(len(KEYS))]
    lines = [to_json(output_row(row, result, form)) + b"\n" for row, result in zip(rows, RESULTS, strict=True)]
    held = {key: replace(r, row=-1) for key, r in ALL.items() if is_held_whole(r, form, "jsonl")}
    with opened(folder) as results:
        results.add_missing(zip(KEYS, lines, strict=True))
        assert results.finished_at_hand == 0  # no key is known as finished
        found = results.stored(KEYS)
        assert len(held) > 3
        assert {key: result for key, result in found.items() if key in held} == held
        results._db.execute("UPDATE results SET value = value || 'x' WHERE key = ?", (KEYS[0],))
    with opened(folder) as results:
        assert results.damaged == 1 + len(KEYS) - len(found)
        results.forget(["error", "timeout"])
        assert set(results.stored(KEYS)) == {
            k for k in found if k != KEYS[0] and found[k].reason not in ("error", "timeout")
        }


def test_columns_of_the_input_are_not_taken_for_parts_of_a_result(tmp_path):
    output, keys, form = tmp_path / "o.jsonl", tmp_path / "keys", RowForm(token_ids=True)
    row = Row(0, {"prompt": "p", "valid": True, "reward": 0.5, "embedding": [1.0]}, None, "")
    output.write_bytes(b"".join(to_json(output_row(row, result, form)) + b"\n" for result in RESULTS[:3]))
    keys.write_bytes(b"".join(KEYS[1:4]))
    with opened(tmp_path) as results:
        results.add_missing(results_of_output(str(output), keys, form.asked))
        found = results.stored(KEYS)
    assert [found[key].text for key in KEYS[1:4]] == ["plain", RESULTS[1].text, None]
    assert {(r.valid, r.reward, r.embedding) for r in found.values()} == {(None, None, None)}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(kind, True) for kind in ("nfs4", "fuse.sshfs", "fuse", "lustre")]
    + [(kind, False) for kind in ("ext4", "tmpfs", "fuseblk")],
)
@pytest.mark.parametrize("name", ["a b", "a Büro", "a\rb\u2028", os.fsdecode(b"a \xfc")])
def test_a_network_file_system_is_recognized_by_the_innermost_mount(tmp_path, kind, expected, name):
    mounts = tmp_path / "mountinfo"
    place = tmp_path / name / "job"
    place.mkdir(parents=True)
    mounts.write_bytes(
        b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        b"33 22 0:40 / %b rw master:1 - %b host:/home rw\n"
        b"34 22 0:41 / %b/a rw - nfs4 host:/other rw\n"
        % (os.fsencode(place.parent).replace(b" ", rb"\040"), kind.encode(), os.fsencode(tmp_path))
    )
    assert network_file_system(place, mounts) is expected
    assert network_file_system(place, tmp_path / "none") is False
