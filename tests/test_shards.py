"""The merged output of a job in shards equals that of one run, in whatever order the shards run and whatever happens to them."""

import errno
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from batchgen import EngineConfig, JobConfig, JobReport, SamplingParams, job_status, merge_job, run_job
from batchgen.errors import Interrupted, OutputError, OutputLocked, UsageError
from batchgen.jobs.files.lease import Lease
from batchgen.jobs.files.results import Results
from batchgen.jobs.files.target import LocalTarget
from batchgen.jobs.opening import WORK_FILES
from batchgen.jobs.shards import CLAIMS, forget_plan, load_plan, shard_folder
from support.progress import Recorder, in_phase, interrupt, rows_done
from support.runs import Killed

pytestmark = pytest.mark.usefixtures("loaded_once")

Rows = list[dict[str, Any]]
GROUPS = ("The reports of the northern region begin alike and differ", "Southern ones are another matter, they say: ")


def rows(count: int = 24) -> Rows:
    found: Rows = [{"prompt": f"{GROUPS[i * 7 % 2]} {i * 5 % 11} {i}", "n": i} for i in range(count)]
    found[4]["prompt"] = 7  # not text, so the row fails
    found[5]["prompt"] = found[6]["prompt"]  # equal prompts with different keys
    return found


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(rows())
    return Path("in.jsonl")


def write(lines: Rows) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def config_of(model: Path, **options: Any) -> JobConfig:
    sampling = SamplingParams(max_tokens=3, temperature=0.9, seed=5)
    return JobConfig(**{"inputs": "in.jsonl", "output": "o.jsonl", "model": model, "sampling": sampling} | options)


def shard(model: Path, name: str, **options: Any) -> JobReport:
    return run_job(config_of(model, shard=name, **options))


def halves(model: Path, **options: Any) -> list[JobReport]:
    """Runs a job in two shards."""
    return [shard(model, name, **options) for name in ("1/2", "2/2")]


def whole(model: Path, **options: Any) -> bytes:
    """The output of one run."""
    run_job(config_of(model, output="whole.jsonl", **options))
    return Path("whole.jsonl").read_bytes()


def raises(error: BaseException | type[BaseException]) -> Callable[..., None]:
    def function(*_: Any) -> None:
        raise error

    return function


def place_of(number: int) -> Path:
    """The folder of a shard."""
    plan = load_plan(Path("o.jsonl.job"))
    return shard_folder(Path("o.jsonl.job"), plan, number)


@contextmanager
def held(place: Path, what: str, **options: bool) -> Iterator[None]:
    lease = Lease(place, what, **options)
    try:
        yield
    finally:
        lease.release()


def check_merged(model: Path) -> None:
    """Merges the shards, and checks that they write the output of one run."""
    merge_job("o.jsonl")
    assert Path("o.jsonl").read_bytes() == whole(model)


def test_shards_in_any_order_write_the_output_of_one_run(tiny_model_dir, source):
    assert [shard(tiny_model_dir, name).shard for name in ("2/3", "3/3", "1/3")] == ["2/3", "3/3", "1/3"]
    assert not Path("o.jsonl").exists()
    report = merge_job("o.jsonl")
    assert (report.exit_code, report.stats["job"]["rows"], report.stats["job"]["rows_failed"]) == (3, 24, 1)
    assert Path("o.jsonl").read_bytes() == whole(tiny_model_dir)
    entries = report.stats["shards"]
    assert [(entry["shard"], entry["device"]) for entry in entries] == [("1/3", "cpu"), ("2/3", "cpu"), ("3/3", "cpu")]
    assert sum(entry["rows"] for entry in entries) == 23
    assert report.stats["job"]["runs"] == 3  # the merge is not a run
    assert report.stats["job"]["prefill_tokens"] == sum(entry["prefill_tokens"] for entry in entries)
    assert sorted(p.name for p in Path("o.jsonl.job").iterdir()) == [
        "claims", "keys", "known.sqlite", "manifest.json", "report.json", "stats.json",
    ]  # fmt: skip


def test_equal_rows_run_in_one_shard_and_the_merge_counts_them(tiny_model_dir, source):
    write([{"prompt": f"{GROUPS[i % 2]} {i % 5}"} for i in range(24)])
    greedy = SamplingParams(max_tokens=3)
    assert sum(report.stats["rows"] for report in halves(tiny_model_dir, sampling=greedy)) == 10
    report = merge_job("o.jsonl")
    assert (report.stats["job"]["rows"], report.stats["job"]["rows_equal"]) == (24, 14)
    assert Path("o.jsonl").read_bytes() == whole(tiny_model_dir, sampling=greedy)


def test_a_merge_that_is_repeated_after_a_failure_counts_every_run_once(tiny_model_dir, source, monkeypatch):
    before = run_job(config_of(tiny_model_dir)).stats["job"]
    write([*rows(), {"prompt": "one more"}, {"prompt": "and another"}])
    done = [report.stats["prefill_tokens"] for report in halves(tiny_model_dir)]
    with monkeypatch.context() as patch, pytest.raises(OutputError, match="No space left"):
        patch.setattr(LocalTarget, "put", raises(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        merge_job("o.jsonl")
    found = merge_job("o.jsonl").stats["job"]
    assert (found["runs"], found["prefill_tokens"]) == (3, before["prefill_tokens"] + sum(done))


def test_shards_with_retry_run_the_rows_again_that_ended_before_the_shards_began(tiny_model_dir, source):
    engine = EngineConfig(row_timeout=1e-9, batch_size=1)
    with pytest.raises(Interrupted):
        run_job(config_of(tiny_model_dir, engine=engine), Recorder(rows_done(8), interrupt))
    halves(tiny_model_dir)
    for name in ("2/2", "1/2"):
        shard(tiny_model_dir, name, retry=("timeout",))
    check_merged(tiny_model_dir)


def test_a_merge_that_is_repeated_keeps_the_rows_that_shards_with_retry_have_not_mended(
    tiny_model_dir, source, monkeypatch
):
    halves(tiny_model_dir, retry=("timeout",), engine=EngineConfig(row_timeout=1e-9))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LocalTarget, "put", raises(Killed))
        merge_job("o.jsonl")
    assert merge_job("o.jsonl").stats["job"]["finish_reasons"]["timeout"] == 23
    assert len(Path("o.jsonl").read_text().splitlines()) == 24


def test_a_run_without_shards_counts_the_earlier_runs_of_shards(tiny_model_dir, source):
    first = shard(tiny_model_dir, "1/2").stats
    last = run_job(config_of(tiny_model_dir)).stats
    assert last["job"]["runs"] == 2
    for name in ("prefill_tokens", "completion_tokens"):
        assert 0 < last[name] == last["job"][name] - first[name] < last["job"][name]


@pytest.mark.parametrize("prune", [False, True])
def test_a_merge_keeps_results_without_a_row_unless_the_shards_ran_with_prune(prune, tiny_model_dir, source):
    run_job(config_of(tiny_model_dir))
    write(rows()[: 20 if prune else 23])  # without --prune, few rows may be missing
    shard(tiny_model_dir, "1/1", prune=prune, merge=True)
    assert Path("o.jsonl.job/kept.sqlite").exists() is not prune


def test_a_shard_that_another_process_has_taken_over_stores_no_more_results(tiny_model_dir, source, monkeypatch):
    lost = raises(OutputLocked("taken over"))
    progress = Recorder(rows_done(2), lambda: monkeypatch.setattr(Lease, "check", lost))
    with pytest.raises(OutputLocked, match="taken over"):
        run_job(config_of(tiny_model_dir, shard="1/2", flush_every=0.0), progress)
    with closing(sqlite3.connect(place_of(1) / "results.sqlite")) as database:
        assert database.execute("SELECT COUNT(*) FROM results").fetchone()[0] < 2


def test_a_disk_that_stays_full_is_a_one_line_error_of_a_shard(tiny_model_dir, source, monkeypatch):
    full = raises(sqlite3.OperationalError("database or disk is full"))
    progress = Recorder(in_phase("generating"), lambda: monkeypatch.setattr(Results, "commit", full))
    with pytest.raises(OutputError) as error:
        run_job(config_of(tiny_model_dir, shard="1/2"), progress)
    assert error.value.message == f"{place_of(1)} cannot be written: database or disk is full"


def test_another_number_of_shards_is_refused_before_the_merge(tiny_model_dir, source):
    shard(tiny_model_dir, "1/3")
    with pytest.raises(UsageError, match=r"o\.jsonl is under way in 3 shards, not in 4; use --shard 2/3"):
        shard(tiny_model_dir, "2/4")


def test_shards_that_write_other_fields_of_rows_do_not_share_a_plan(tiny_model_dir, source):
    sampling = SamplingParams(max_tokens=4, json_schema={"type": "integer"})
    parsed = {"sampling": sampling, "parse": "json"}
    shard(tiny_model_dir, "1/2", sampling=sampling)
    plan = load_plan(Path("o.jsonl.job"))
    shard(tiny_model_dir, "2/2", **parsed)
    assert load_plan(Path("o.jsonl.job")).id != plan.id
    shard(tiny_model_dir, "1/2", **parsed)
    merge_job("o.jsonl")
    assert Path("o.jsonl").read_bytes() == whole(tiny_model_dir, **parsed)


def test_a_job_without_shards_has_nothing_to_merge(tiny_model_dir, source):
    with pytest.raises(UsageError, match=r"there is no job of o\.jsonl"):
        merge_job("o.jsonl")
    run = run_job(config_of(tiny_model_dir))
    merged = merge_job("o.jsonl")
    assert (merged.already_finished, merged.chat) == (True, run.chat)
    write([*rows(), {"prompt": "one more"}])
    with pytest.raises(Interrupted):
        run_job(config_of(tiny_model_dir), Recorder(in_phase("generating"), interrupt))
    with pytest.raises(UsageError, match=r"^o\.jsonl has not run in shards; run the same command again to continue$"):
        merge_job("o.jsonl")


def test_a_running_shard_is_locked(tiny_model_dir, source, monkeypatch):
    shard(tiny_model_dir, "1/2")
    with held(place_of(2), "shard 2/2 of o.jsonl"):
        with pytest.raises(OutputLocked, match=r"shard 2/2 of o\.jsonl runs"):
            merge_job("o.jsonl")
        with monkeypatch.context() as patch, pytest.raises(OutputLocked, match="another run holds shard 2/2"):
            patch.setattr("batchgen.job_setup.load_tokenizer", None)  # the lock is noticed before anything is loaded
            shard(tiny_model_dir, "2/2")
        with pytest.raises(OutputLocked, match=r"another run holds shard 2/2 of o\.jsonl"):
            run_job(config_of(tiny_model_dir))
        with pytest.raises(OutputLocked, match="is running with other input or options: limit was not set, is 3"):
            shard(tiny_model_dir, "1/2", limit=3)
        assert [s["state"] for s in job_status("o.jsonl")["shards"]] == ["done", "running"]


def test_the_merge_names_the_holder_of_a_shard_on_another_machine(tiny_model_dir, source):
    shard(tiny_model_dir, "1/2")
    claim = place_of(2) / "claim-000001"
    now = datetime.now(UTC)
    holder = {"pid": 12, "host": "n7", "boot": "another", "state": "running", "started": now.isoformat(), "told": {}}
    claim.write_text(json.dumps(holder | {"seen": now.isoformat()}))
    with pytest.raises(OutputLocked, match=r"shard 2/2 of o\.jsonl runs \(process 12 on n7\); merge when it is done"):
        merge_job("o.jsonl")
    claim.write_text(json.dumps(holder | {"seen": "2026-03-04T05:06:07+00:00"}))
    with pytest.raises(
        OutputLocked,
        match=r"shard 2/2 of o\.jsonl is not done, and its holder, process 12 on n7, has been silent since "
        r"2026-03-04T05:06:07\+00:00; if that machine is gone, run the shard again with the command it had",
    ):
        merge_job("o.jsonl")
    assert job_status("o.jsonl")["shards"][1]["state"] == "silent"


def test_a_shard_is_refused_while_a_run_without_shards_holds_the_job(tiny_model_dir, source):
    shard(tiny_model_dir, "1/2")
    # Held by a run that has not yet taken over the results of the shards.
    running = held(Path("o.jsonl.job") / CLAIMS, "o.jsonl", unsharded=True)
    with running, pytest.raises(OutputLocked, match=r"a run without --shard holds o\.jsonl \(process"):
        shard(tiny_model_dir, "2/2")
    assert shard(tiny_model_dir, "2/2", merge=True).shard == ""


def test_a_shard_makes_a_new_plan_if_its_plan_is_removed_as_it_starts(tiny_model_dir, source, monkeypatch):
    shard(tiny_model_dir, "1/2")
    removed = []

    def removing(place: Path, what: str, *others: Any) -> Lease:
        if not removed and what.startswith("shard 2/2"):
            removed.append(what)
            forget_plan(Path("o.jsonl.job"))
        return Lease(place, what, *others)

    monkeypatch.setattr("batchgen.jobs.shards.Lease", removing)
    assert shard(tiny_model_dir, "2/2").shard == "2/2"
    assert removed


def test_a_shard_that_ends_during_a_merge_does_not_merge(tiny_model_dir, source, monkeypatch):
    halves(tiny_model_dir)
    monkeypatch.setattr("batchgen.job.is_last_shard", lambda *_: True)  # both shards have found that they are the last
    with held(Path("o.jsonl.job") / CLAIMS, "the merge of o.jsonl"):
        assert shard(tiny_model_dir, "2/2", merge=True).shard == "2/2"


@pytest.mark.slow
def test_an_input_that_changes_before_the_merge_is_noticed(tiny_model_dir, source):
    halves(tiny_model_dir)
    write(rows(25))
    with pytest.raises(Exception, match=r"in\.jsonl changed while the job was running"):
        merge_job("o.jsonl")
    assert sum(report.stats["rows"] for report in halves(tiny_model_dir)) == 1
    check_merged(tiny_model_dir)


def test_a_merge_killed_while_it_removes_the_shards_is_complete(tiny_model_dir, source, monkeypatch):
    halves(tiny_model_dir)

    def removing(path: Path, **options: Any) -> None:
        for inside in Path(path).glob("*/*/*"):
            inside.unlink()  # everything except the plan
        raise Killed

    with monkeypatch.context() as killing, pytest.raises(Killed):
        killing.setattr("shutil.rmtree", removing)
        merge_job("o.jsonl")
    assert merge_job("o.jsonl").already_finished
    assert not [path for path in Path("o.jsonl.job").iterdir() if path.name in WORK_FILES]
    assert shard(tiny_model_dir, "1/2").already_finished
    assert Path("o.jsonl").read_bytes() == whole(tiny_model_dir)


def test_a_damaged_plan_can_be_deleted_without_losing_results(tiny_model_dir, source):
    plan = Path("o.jsonl.job/shards/plan.json")
    generated = shard(tiny_model_dir, "1/2").stats["rows"]
    plan.write_text("{")
    with pytest.raises(
        UsageError, match=r"plan\.json is damaged; delete it and run the shards again: results are kept"
    ):
        shard(tiny_model_dir, "2/2")
    plan.unlink()
    with pytest.raises(UsageError, match="was made with other settings"):
        run_job(config_of(tiny_model_dir, sampling={"max_tokens": 4}))
    assert generated + sum(shard(tiny_model_dir, name).stats["rows"] for name in ("2/2", "1/2")) == 23
    check_merged(tiny_model_dir)


@pytest.mark.slow
def test_there_may_be_more_shards_than_rows_and_no_rows_at_all(tiny_model_dir, source):
    write(rows()[:2])
    for number in range(1, 6):
        shard(tiny_model_dir, f"{number}/5")
    check_merged(tiny_model_dir)
    write([])
    for number in (1, 2):
        shard(tiny_model_dir, f"{number}/2", output="empty.jsonl")
    assert merge_job("empty.jsonl").exit_code == 0
    assert Path("empty.jsonl").read_bytes() == b""


def test_the_shards_of_a_remote_output_need_a_folder(tiny_model_dir, source):
    config = config_of(tiny_model_dir, shard="1/2")
    with pytest.raises(UsageError, match=r"the shards of s3://b/o\.jsonl need a folder that all of them see"):
        run_job(replace(config, output="s3://b/o.jsonl"))
    with pytest.raises(UsageError, match=r"^there is no folder none to write to; create it with mkdir -p none$"):
        run_job(replace(config, output="memory://b/o.jsonl", work_dir="none"))


def test_shards_in_a_folder_on_an_object_store_are_refused_before_anything_is_written(
    tiny_model_dir, source, monkeypatch
):
    monkeypatch.setattr("batchgen.jobs.files.lease.file_system", lambda folder: "fuse.s3fs")
    with pytest.raises(UsageError, match=r"is on fuse\.s3fs"):
        shard(tiny_model_dir, "1/2")
    assert not Path("o.jsonl.job").exists()


def test_a_shard_whose_figures_are_damaged_runs_again(tiny_model_dir, source):
    halves(tiny_model_dir)
    for damage in (None, b"", b"{}", b'{"job": {"finish_reasons": 1, "seconds": {}}}'):
        figures = place_of(1) / "stats.json"
        figures.unlink()
        if damage is not None:
            figures.write_bytes(damage)
        assert [one["state"] for one in job_status(Path("o.jsonl"))["shards"]] == ["stopped", "done"]
        with pytest.raises(UsageError, match=r"shards of o.jsonl are not done: 1/2; run each of them again"):
            merge_job("o.jsonl")
        assert shard(tiny_model_dir, "1/2").stats["completion_tokens"] == 0
    check_merged(tiny_model_dir)


@pytest.mark.parametrize("lost", ["o.jsonl", "o.jsonl.job/stats.json"])
def test_a_merged_output_that_is_gone_is_not_called_complete(lost, tiny_model_dir, source):
    shard(tiny_model_dir, "1/1")
    assert not merge_job(Path("o.jsonl")).already_finished
    assert merge_job("o.jsonl").already_finished
    Path(lost).unlink()
    with pytest.raises(UsageError, match="missing or were changed since batchgen wrote them; run the job's command"):
        merge_job("o.jsonl")


@pytest.mark.parametrize("name", ["o.jsonl", "link.jsonl"])
def test_figures_do_not_replace_the_files_of_the_job(name, tiny_model_dir, source):
    shard(tiny_model_dir, "1/1")
    merge_job("o.jsonl")
    Path("link.jsonl").symlink_to("o.jsonl")
    before = Path("o.jsonl").read_bytes(), source.read_bytes()
    with pytest.raises(UsageError, match=f"^--stats {name} would replace o.jsonl, which the job needs"):
        merge_job("o.jsonl", stats=name)
    for stats in (name, "in.jsonl"):
        with pytest.raises(UsageError, match=f"^--stats {stats} would replace"):
            run_job(config_of(tiny_model_dir, stats=stats))
    assert (Path("o.jsonl").read_bytes(), source.read_bytes()) == before
