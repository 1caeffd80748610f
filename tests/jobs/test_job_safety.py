"""Changes that a job's folder refuses, and accidents that it survives."""

import errno
from pathlib import Path

import pytest

from batchgen.errors import OutputError, UsageError
from batchgen.jobs.files.manifest import differences
from batchgen.records.writers import DigestFile
from support.jobs import SETTINGS


def test_other_settings_are_refused_by_name_and_overwrite_starts_again(run, texts, write_input):
    write_input(["a"])
    run()
    other = {"model": "tiny", "temperature": 0.7, "max_tokens": 64, "stop": ["\n"], "template": "x" * 100}
    with pytest.raises(UsageError) as caught:
        run(settings=other)
    assert str(caught.value) == (
        "o.jsonl was made with other settings: temperature was 0, is 0.7; max_tokens was 256, is 64; "
        f'stop was [], is ["\\n"]; template was not set, is "{"x" * 59}…"; use --overwrite to start again, or another -o'
    )
    assert texts() == ["A"]
    assert run(settings=other, overwrite=True)[1] == ["a"]
    with pytest.raises(UsageError, match=r"stop was \[\"\\n\"\], is \[\]"):
        run()


def test_an_option_that_an_earlier_version_did_not_have_had_its_default(run, write_input):
    write_input(["a"])
    run()
    write_input(["a", "b"])
    with pytest.raises(UsageError, match="min_p was 0, is "):
        run(settings=SETTINGS | {"min_p": 0.5})
    assert run(settings=SETTINGS | {"min_p": 0.0, "top_p": 1.0, "prefix": None})[1] == ["b"]


def test_the_work_dir_holds_the_folder_of_one_output(run, write_input):
    write_input(["a"])
    Path("work").mkdir()
    run(work_dir="work")
    assert Path("work/o.jsonl.job/keys").exists()
    assert not Path("o.jsonl.job").exists()
    assert run(work_dir="work")[0].finished == {"rows": 1}
    Path("elsewhere").mkdir()
    with pytest.raises(UsageError) as caught:
        run("elsewhere/o.jsonl", work_dir="work")
    assert str(caught.value) == (
        f"work/o.jsonl.job is the job folder of {Path('o.jsonl').absolute()}; use another --work-dir, or another -o"
    )


def test_the_output_and_its_folder_can_be_moved_together(run, write_input):
    write_input(["a"])
    run()
    Path("moved").mkdir()
    Path("o.jsonl").rename("moved/o.jsonl")
    Path("o.jsonl.job").rename("moved/o.jsonl.job")
    assert run("moved/o.jsonl")[0].finished == {"rows": 1}


def test_with_a_work_dir_on_another_disk_the_output_still_appears_at_once(monkeypatch, run, texts, write_input):
    write_input(["a"])
    Path("work").mkdir()
    real = Path.replace

    def other_disk(self, target):
        if self.parent.name == "o.jsonl.job" and Path(target).parent != self.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", other_disk)
    run(work_dir="work")
    assert texts() == ["A"]
    assert [p.name for p in Path().iterdir() if p.name.startswith(".")] == []
    assert run(work_dir="work")[0].finished == {"rows": 1}


def test_an_output_that_is_a_link_stays_a_link(run, texts, write_input):
    write_input(["a"])
    Path("real").mkdir()
    Path("o.jsonl").symlink_to("real/o.jsonl")
    run()
    assert Path("o.jsonl").is_symlink()
    assert texts("real/o.jsonl") == ["A"]
    assert run()[0].finished == {"rows": 1}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [('{"schema": "batchgen.job/0"}', "was written by another version of batchgen"), ("{", "is damaged")],
)
def test_a_folder_whose_manifest_cannot_be_read_is_refused(manifest, message, run, write_input):
    write_input(["a"])
    Path("o.jsonl.job").mkdir()
    Path("o.jsonl.job/manifest.json").write_text(manifest)
    with pytest.raises(UsageError) as caught:
        run()
    assert str(caught.value) == (f"o.jsonl.job/manifest.json {message}; use --overwrite to start again, or another -o")


def _full(self, data):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("output", ["o.parquet", "o.jsonl.zst"])
def test_a_full_disk_at_the_end_leaves_the_old_output_in_place(monkeypatch, output, run, write_input):
    write_input(["a"])
    run(output)
    old = Path(output).read_bytes()
    write_input(["a", "b"])
    with monkeypatch.context() as patch:
        patch.setattr(DigestFile, "write", _full)
        with pytest.raises(OutputError, match="No space left on device"):
            run(output)
    assert Path(output).read_bytes() == old
    assert run(output)[1] == []


def test_many_changed_model_files_are_summarized_before_other_settings():
    old = {f"model file {name}": "1 bytes" for name in ("config.json", "a.safetensors", "b.safetensors")}
    new = dict.fromkeys(old, "2 bytes")
    settings = {f"setting {i}": i for i in range(2)}
    assert differences({**old, "setting 1": 0}, {**new, **settings}) == (
        "3 files of the model differ (config.json, a.safetensors, …); setting 0 was not set, is 0; setting 1 was 0, is 1"
    )
    del new["model file config.json"], old["model file config.json"]
    assert differences(old, new).startswith('model file a.safetensors was "1 bytes", is "2 bytes"; model file b.')
