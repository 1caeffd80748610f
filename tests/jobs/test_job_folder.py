"""A job's folder when the job begins, is killed, goes on, finishes and changes, and accidents that it survives."""

import errno
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen import SamplingParams, job_status
from batchgen.errors import OutputError, OutputLocked, UsageError
from batchgen.jobs.files.disk import move_file
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.files.manifest import Manifest, differences, load_manifest
from batchgen.jobs.files.results import Results
from batchgen.jobs.job_folder import JobFolder
from batchgen.records.writers import DigestFile
from support.python_process import holding
from support.runs import FINISHED_FILES, Killed, Runs

START_AGAIN = "use --overwrite to start again, or another -o"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("output", ["o.jsonl", "o.jsonl.gz", "o.jsonl.zst", "o.parquet", "o.csv", "o.tsv.gz"])
def test_a_job_leaves_a_small_folder_with_which_its_rows_are_used_again(runs, output):
    runs.output = output
    assert sorted(runs.run(["a", "fail", "cut"], token_ids=True)[0]) == ["a", "cut", "fail"]
    is_text = ".csv" in output or ".tsv" in output  # which does not hold results whole
    assert files(runs.job_folder) == sorted([*FINISHED_FILES, "kept.sqlite"] if is_text else FINISHED_FILES)
    assert (runs.job_folder / "keys").stat().st_size == 48
    assert runs.run(["d", "cut", "a", "fail"], token_ids=True)[0] == ["d"]
    assert f"{output} was finished: 3 of its results are used again" in runs.notes
    rows = runs.rows()
    assert [row["text"] or None for row in rows] == ["a: d", "a: cut", "a: a", None]
    assert [row["token_ids"] or None for row in rows] == [("[1]" if is_text else [1])] * 3 + [None]
    assert [row.get("truncated") in (True, "true") for row in rows] == [False, True, False, False]
    error = {"type": "does_not_fit", "message": "too big"}
    assert (json.loads(rows[3]["error"]) if is_text else rows[3]["error"]) == error


def test_a_disk_that_the_output_has_filled_does_not_fail_the_job(runs, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Results, "shrink", lambda self, keys: None)
        runs.run(["a", "fail"])
    assert runs.notes[-1] == (
        "the disk is full, so o.jsonl.job/results.sqlite stays; the same command removes it once there is space"
    )
    whole = Path("o.jsonl").read_bytes()
    answered, report = runs.run(["a", "fail"])
    assert (report.already_finished, answered, Path("o.jsonl").read_bytes()) == (True, [], whole)
    assert files(runs.job_folder) == FINISHED_FILES


def test_a_killed_run_is_named_and_continued(runs):
    runs.run(["a", "b", "c"], most=2)
    with (
        holding(Lease, Path("o.jsonl.job/claims").absolute(), "o.jsonl") as process,
        pytest.raises(OutputLocked, match=f"process {process.pid} on {socket.gethostname()}"),
    ):
        runs.run(["a", "b", "c"])
    assert runs.run(["a", "b", "c"])[0] == ["c"]
    assert f"an earlier run (process {process.pid}) was killed; this run continues it" in runs.notes
    assert runs.texts() == ["a: a", "a: b", "a: c"]


def test_damaged_results_are_dropped_and_a_note_says_so(runs):
    runs.run(["a", "b", "c", "d"], most=3)
    assert not [note for note in runs.notes if "damaged" in note]
    file = Path("o.jsonl.job/results.sqlite")
    file.write_bytes(file.read_bytes().replace(b"a: a", b"a: x").replace(b"a: c", b"a: y"))
    assert runs.run(["a", "b", "c", "d"])[0] == ["a", "c", "d"]
    assert [note.partition(" are damaged")[0] for note in runs.notes if "damaged" in note] == [f"2 results in {file}"]


def test_damaged_keys_are_not_trusted(runs):
    runs.run(["a"])
    Path("o.jsonl.job/keys").write_bytes(b"x" * 16)
    assert runs.run(["a", "b"])[0] == ["a", "b"]
    assert "o.jsonl.job/keys is damaged, so the rows of o.jsonl cannot be recognised: they are generated again" in runs.notes  # fmt: skip


MANIFEST = Path("o.jsonl.job/manifest.json")


def test_other_versions_of_packages_are_only_noted(runs):
    runs.run(["a", "b"], most=1)
    manifest = load_manifest(MANIFEST)
    replace(manifest, mentions=manifest.mentions | {"transformers": "4.0"}).save(MANIFEST)
    assert runs.run(["a", "b"])[0] == ["b"]
    (note,) = [note for note in runs.notes if "versions" in note]
    assert note.startswith('o.jsonl was started with other versions: transformers was "4.0", is "')


def test_a_command_that_cannot_be_known_is_not_taken_for_finished(runs, monkeypatch):
    runs.run(["a"])
    replace(load_manifest(MANIFEST), command="").save(MANIFEST)
    monkeypatch.setattr("batchgen.job_setup.command_digest", lambda *_: "")
    assert runs.run(["a"])[0] == []
    assert runs.loaded == 2


# -- refused


def test_other_settings_are_refused_by_name_and_overwrite_starts_again(runs):
    runs.run(["a"])
    other = {"sampling": SamplingParams(max_tokens=3, temperature=0.7)}
    with pytest.raises(UsageError) as caught:
        runs.run(["a"], **other)
    assert str(caught.value) == (
        f"o.jsonl was made with other settings: max_tokens was 4, is 3; temperature was 0, is 0.7; {START_AGAIN}"
    )
    assert runs.texts() == ["a: a"]
    assert runs.run(["a"], overwrite=True, **other)[0] == ["a"]
    with pytest.raises(UsageError, match=r"temperature was 0\.7, is 0"):
        runs.run(["a"])


def test_an_option_that_an_earlier_version_did_not_have_had_its_default(runs):
    runs.run(["a"])
    manifest = load_manifest(MANIFEST)
    replace(manifest, settings={k: v for k, v in manifest.settings.items() if k not in ("min_p", "prefix")}).save(
        MANIFEST
    )
    with pytest.raises(UsageError, match=r"min_p was 0, is 0\.5"):
        runs.run(["a", "b"], sampling=SamplingParams(max_tokens=4, min_p=0.5))
    assert runs.run(["a", "b"])[0] == ["b"]


FILES = ("config.json", "a.safetensors", "b.safetensors")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({"t": 0.0, "stop": []}, {"t": 0.7, "stop": ["\n"]}, 't was 0, is 0.7; stop was [], is ["\\n"]'),
        ({}, {"template": "x" * 100}, f'template was not set, is "{"x" * 59}…"'),
        ({"t": "x" * 90 + "a"}, {"t": "x" * 90 + "b"}, f't was "…{"x" * 24}a", is "…{"x" * 24}b"'),
        ({"a": None, "b": False}, {"c": []}, ""),
        ({f"model file {f}": 1 for f in FILES} | {"a": 0}, {f"model file {f}": 2 for f in FILES} | {"a": 1, "b": 2},
            "3 files of the model differ (config.json, a.safetensors, …); a was 0, is 1; b was not set, is 2"),
        ({f"model file {f}": "1 bytes" for f in FILES[1:]}, {f"model file {f}": "2 bytes" for f in FILES[1:]},
            'model file a.safetensors was "1 bytes", is "2 bytes"; model file b.safetensors was "1 bytes", is "2 bytes"'),
        ({}, {f"s{i}": 1 for i in range(8)}, "; ".join([*(f"s{i} was not set, is 1" for i in range(6)), "and 2 more"])),
    ],
)  # fmt: skip
def test_differences_are_named_and_many_of_them_summarized(old, new, said):
    assert differences(old, new) == said


@pytest.mark.parametrize(
    ("manifest", "message"),
    [('{"schema": "batchgen.job/0"}', "was written by another version of batchgen"), ("{", "is damaged")],
)
def test_a_folder_whose_manifest_cannot_be_read_is_refused(manifest, message, runs):
    runs.job_folder.mkdir()
    (runs.job_folder / "manifest.json").write_text(manifest)
    with pytest.raises(UsageError) as caught:
        runs.run(["a"])
    assert str(caught.value) == f"o.jsonl.job/manifest.json {message}; {START_AGAIN}"


# -- other places


def test_the_work_dir_holds_the_folder_of_one_output(runs):
    Path("work").mkdir()
    runs.run(["a"], work_dir="work")
    assert Path("work/o.jsonl.job/keys").exists()
    assert not Path("o.jsonl.job").exists()
    assert runs.run(["a"], work_dir="work")[1].already_finished
    Path("elsewhere").mkdir()
    runs.output = "elsewhere/o.jsonl"
    for overwrite in (False, True):
        with pytest.raises(UsageError) as caught:
            runs.run(["a"], work_dir="work", overwrite=overwrite)
        assert str(caught.value) == (
            f"work/o.jsonl.job is the job folder of {Path('o.jsonl').absolute()}; use another --work-dir, or another -o"
        )
    runs.output = "o.jsonl"
    Path("work/o.jsonl.job/manifest.json").write_text("damaged", encoding="utf-8")
    assert runs.run(["b"], work_dir="work", overwrite=True)[0] == ["b"]


def test_the_output_and_its_folder_can_be_moved_together(runs):
    runs.run(["a"])
    Path("moved").mkdir()
    for name in ("o.jsonl", "o.jsonl.job"):
        Path(name).rename(f"moved/{name}")
    runs.output = "moved/o.jsonl"
    assert runs.run(["a"])[1].already_finished


def test_with_a_work_dir_on_another_disk_the_output_still_appears_at_once(runs, monkeypatch):
    Path("work").mkdir()
    real = Path.replace

    def other_disk(self, target):
        if self.parent.name == "o.jsonl.job" and Path(target).parent != self.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", other_disk)
    runs.run(["a"], work_dir="work")
    assert runs.texts() == ["a: a"]
    assert [name for name in files(Path()) if name.startswith(".")] == []
    assert runs.run(["a"], work_dir="work")[1].already_finished


def test_an_output_that_is_a_link_stays_a_link(runs):
    Path("real").mkdir()
    Path("o.jsonl").symlink_to("real/o.jsonl")
    runs.run(["a"])
    assert Path("o.jsonl").is_symlink()
    assert Path("real/o.jsonl").exists()
    assert runs.run(["a"])[1].already_finished


def _full(self, data):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("output", ["o.parquet", "o.jsonl.zst"])
def test_a_full_disk_at_the_end_leaves_the_old_output_in_place(runs, output, monkeypatch):
    runs.output = output
    runs.run(["a"])
    old = Path(output).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(DigestFile, "write", _full)
        with pytest.raises(OutputError, match="No space left on device"):
            runs.run(["a", "b"])
    assert Path(output).read_bytes() == old
    assert runs.run(["a", "b"])[0] == []


LARGER = {"retry": ("length",), "sampling": SamplingParams(max_tokens=8)}


def finished(runs: Runs, count: int, *cut: str, name: str = "o.jsonl") -> list[str]:
    """Finishes a job of so many rows, of which some are cut by their length. Returns its prompts."""
    runs.output, runs.reason = runs.folder / name, lambda prompt: "length" if prompt in cut else "stop"
    prompts = [f"p{i}" for i in range(count)]
    runs.run(prompts)
    return prompts


@pytest.mark.parametrize("name", ["o.jsonl", "o.csv"])
def test_rows_after_the_limit_that_are_to_be_tried_again_stay_in_the_output(runs, name):
    prompts = finished(runs, 40, "p3", "p35", name=name)
    before = runs.rows()
    assert runs.run(prompts, retry=("length",), limit=20)[0] == ["p3", "p35"]
    assert runs.rows() == before
    assert runs.run(prompts, limit=20)[0] == []


@pytest.mark.parametrize("name", ["o.jsonl", "o.csv"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_refused_run_keeps_every_result_also_of_rows_that_it_has_tried_again(runs, name, window):
    prompts = finished(runs, 20, "p3", name=name)
    before, runs.reason = runs.rows(), lambda prompt: "stop"
    with pytest.raises(UsageError, match="11 of the 20 finished rows"):
        runs.run([*prompts[:9], "new"], retry=("length",), window=window)
    assert (job_status(runs.output)["state"], runs.rows()) == ("finished", before)
    assert runs.run([*prompts, "new"])[0] == (["new"] if window is None else [])  # by windows, it had been generated
    assert [row["finish_reason"] for row in runs.rows() if row["prompt"] == "p3"] == ["length"]


@pytest.mark.parametrize("name", ["o.jsonl", "o.csv"])
def test_a_result_whose_row_is_gone_when_it_is_to_be_tried_again_comes_back_with_it(runs, name):
    prompts = finished(runs, 40, "p3", name=name)
    assert runs.run([*prompts[:3], *prompts[4:]], retry=("length",))[0] == []
    assert runs.run(prompts)[0] == []


def test_results_of_an_earlier_limit_do_not_come_back(runs):
    prompts = finished(runs, 10, "p3", "p5")
    runs.reason = lambda prompt: "stop"
    assert runs.run(prompts, most=1, **LARGER)[1] is None  # killed after one of the two
    assert len(runs.run(prompts, sampling=LARGER["sampling"])[0]) == 1
    assert {row["finish_reason"] for row in runs.rows()} == {"stop"}


def test_a_row_that_was_away_when_the_limit_was_raised_runs_again(runs):
    prompts = finished(runs, 40, "p3")
    runs.run([*prompts[:3], *prompts[4:]], **LARGER)
    assert runs.run(prompts, sampling=LARGER["sampling"])[0] == ["p3"]


@contextmanager
def killed_in(owner: type, method: str, *, done: bool = False, putting_back: bool = True) -> Iterator[None]:
    """A process dies in this method, which has `done` its work then, once it is putting everything back (or always)."""
    real, put_back, begun = getattr(owner, method), JobFolder._put_back, [] if putting_back else [1]

    def killed(self: Any, *args: object) -> None:
        if not begun or done:
            real(self, *args)
        if begun:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, killed)
        patch.setattr(JobFolder, "_put_back", lambda self, old: (begun.append(1), put_back(self, old)))
        yield


@pytest.mark.parametrize("more", [{}, {"sampling": SamplingParams(max_tokens=8)}])
def test_rows_are_tried_again_after_a_run_that_was_killed_while_it_put_everything_back(runs, more):
    prompts = finished(runs, 20, "p3")
    with killed_in(Manifest, "save"):
        assert runs.run([*prompts[:9], "new"], retry=("length",), **more)[1] is None
    runs.reason = lambda prompt: "stop"
    assert runs.run(prompts, retry=("length",), **more)[0] == ["p3"]
    assert {row["finish_reason"] for row in runs.rows()} == {"stop"}


def test_a_refused_run_with_a_larger_limit_leaves_no_results_of_that_limit(runs):
    prompts = finished(runs, 20, "p3")
    with pytest.raises(UsageError, match="of the 20 finished rows"):
        runs.run([*prompts[:9], "new"], window=5, **LARGER)
    assert runs.run([*prompts, "new"])[0] == ["new"]


@pytest.mark.parametrize("step", ["forget", "restore_forgotten", "flush"])
def test_a_refused_run_that_is_killed_while_it_puts_everything_back_loses_nothing(runs, step):
    prompts = finished(runs, 20, "p3", name="o.csv")
    with killed_in(Results, step, done=step != "restore_forgotten", putting_back=step != "forget"):
        assert runs.run([*prompts[:9], "new"], retry=("length",))[1] is None
    assert runs.run(prompts)[0] == []
    assert runs.run([*prompts, "new"])[0] == ["new"]


def test_pruning_after_a_refused_run_removes_what_that_run_has_left(runs):
    prompts, other = [f"p{i}" for i in range(20)], runs.folder / "other.jsonl"
    runs.run(prompts, prune=True)
    other.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in [*prompts[:9], "new"]))
    with pytest.raises(UsageError, match="11 of the 20 finished rows"):
        runs.run(None, inputs=str(other), window=5)
    assert (runs.job_folder / "kept.sqlite").exists()
    assert not runs.run(None, prune=True)[1].already_finished
    assert not (runs.job_folder / "kept.sqlite").exists()


def test_pruning_a_second_time_finds_nothing_to_do(runs):
    runs.output = runs.folder / "o.csv"
    runs.run(["a", "b"], prune=True)
    assert runs.run(["a", "b"], prune=True)[1].already_finished
    assert runs.run(["a"], prune=True)[0] == []
    assert len(runs.rows()) == 1


@pytest.mark.parametrize("there", [False, True])
def test_an_output_that_changes_while_the_job_runs_is_not_replaced(runs, there):
    if there:
        runs.run(["a"])

    def reason(prompt: str) -> str:
        runs.output.write_text("of another program")
        return "stop"

    runs.reason = reason
    with pytest.raises(OutputError, match="appeared or was changed while the job ran; move it away and run the same"):
        runs.run(["a", "b"])
    assert runs.output.read_text() == "of another program"
    runs.output.unlink()
    assert runs.run(["a", "b"])[0] == []
    assert runs.texts() == ["a: a", "a: b"]
    runs.run(["a", "b"], overwrite=True)
    assert runs.texts() == ["a: a", "a: b"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_in_a_read_only_folder_is_refused_before_anything_is_generated(runs):
    (runs.folder / "work").mkdir()
    runs.output = runs.folder / "read only" / "o.jsonl"
    runs.output.parent.mkdir(mode=0o555)
    with pytest.raises(
        UsageError, match=r"o\.jsonl cannot be written: .*/read only is read-only; check its permissions"
    ):
        runs.run(["a"], work_dir=runs.folder / "work")
    assert not list((runs.folder / "work").iterdir())


def test_a_file_that_could_not_be_moved_to_another_disk_leaves_no_part(tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("x")

    def other_disk(*_: object) -> None:
        raise OSError(errno.EXDEV, "other disk")

    def full(_: object, to: Path) -> None:
        to.write_text("part")
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "replace", other_disk)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="full"):
        move_file(source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
