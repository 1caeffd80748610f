"""The files of a dataset on disk: those that the package `datasets` would load."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchgen.errors import UsageError
from batchgen.records.dataset_files import find_dataset
from support.records import opened

LINE = '{"prompt": "one"}\n'


def make(folder: Path, names: list[str], configs: object = None) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LINE)
    if configs is not None:
        (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n# A dataset\n")
    return folder


def ours(folder: Path, config: str | None = None) -> dict[str, list[str]]:
    """The files of every split as batchgen finds them, as names relative to the folder."""
    dataset = find_dataset(str(folder), chosen=True)
    splits = dataset._splits(dataset.configs.get(dataset._config(config), {}))
    return {split: sorted(set(names)) for split, names in splits.items() if names}


def theirs(folder: Path, config: str | None = None) -> dict[str, list[str]]:
    import datasets

    with tempfile.TemporaryDirectory() as cache:
        builder = datasets.load_dataset_builder(str(folder), config, cache_dir=cache)
        found = builder.config.data_files
    root = folder.resolve()
    return {
        str(split): sorted({Path(name).relative_to(root).as_posix() for name in names})
        for split, names in found.items()
        if names
    }


words = st.sampled_from(
    ["train", "training", "val", "dev", "test", "eval", "validation", "tested", "rows", "my-train", "test_2", "x.dev", "a train",
     "data", "__cache__", ".hidden", "latest", "Train"]
)  # fmt: skip
files = st.builds(
    lambda folders, stem, end: "/".join([*folders, stem + end]),
    st.lists(words, max_size=2),
    words,
    st.sampled_from([".jsonl", "-00000-of-00002.jsonl", "-00001-of-00002.jsonl", "_1.jsonl"]),
)
sharded = st.builds(
    "data/{}-0000{}-of-00003.jsonl".format, st.sampled_from(["train", "test", "extra", "my_split"]), st.integers(0, 2)
)


@given(st.lists(st.one_of(files, sharded), min_size=1, max_size=6, unique=True))
@example(["data/train-00000-of-00001.jsonl", "other.jsonl"])
@example(["train.jsonl", "test/rows.jsonl"])
@example(["config.json", "rows.jsonl"])
@example(["data/train-00000-of-00003.jsonl", "data/.hidden-00000-of-00002.jsonl"])
@example(["data/my-train-00000-of-00002.jsonl"])
@example(["__cache__/train.jsonl", "test.jsonl"])
def test_without_configurations_the_splits_equal_those_of_datasets(names):
    with tempfile.TemporaryDirectory() as place:
        folder = make(Path(place), [name for name in names if not any(other.startswith(f"{name}/") for other in names)])
        visible = [name for name in names if not any(part.startswith((".", "__")) for part in name.split("/")[:-1])]
        visible = [name for name in visible if not name.rpartition("/")[2].startswith(".")]
        if not visible:
            return
        try:
            wanted = theirs(folder)
        except ValueError as e:  # the package refuses shards of a split with such a name
            if "Split name should match" not in str(e):
                raise
            return
        assert ours(folder) == wanted


names = ["en/a.jsonl", "en/b.jsonl", "en/train.jsonl", "en/test/c.jsonl", "d.jsonl", "README.jsonl", "x/.y/z.jsonl"]
patterns = st.sampled_from(
    ["en/*", "en/a.jsonl", "**", "**/*.jsonl", "*.jsonl", "en/**", "./d.jsonl", "en/[ab].jsonl", "x/.y/*", "en/t*/*", "en/?.jsonl"]
)  # fmt: skip
several = st.one_of(patterns, st.lists(patterns, min_size=1, max_size=3))
data_files = st.one_of(
    several,
    st.lists(
        st.builds(
            lambda split, path: {"split": split, "path": path}, st.sampled_from(["train", "test", "x.y"]), several
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda entry: entry["split"],
    ),
)


@given(data_files)
def test_the_files_of_a_configuration_equal_those_of_datasets(declared):
    with tempfile.TemporaryDirectory() as place:
        folder = make(Path(place), names, [{"config_name": "one", "data_files": declared}])
        assert ours(folder, "one") == theirs(folder, "one")


@pytest.mark.parametrize(
    "configs",
    [
        [{"config_name": "a", "data_files": "d.jsonl"}, {"config_name": "b", "default": True, "data_files": "en/*"}],
        [{"config_name": "a", "data_files": "d.jsonl"}, {"config_name": "default", "data_files": "en/*"}],
        [{"config_name": "a", "data_dir": "en"}],
        [{"config_name": "a", "data_dir": "./en/", "data_files": "*.jsonl"}],
    ],
)
def test_the_default_configuration_and_its_folder_equal_those_of_datasets(tmp_path, configs):
    folder = make(tmp_path, names, configs)
    assert ours(folder) == theirs(folder)


def test_a_folder_is_a_dataset_because_of_its_readme_its_files_or_the_command(tmp_path):
    plain = make(tmp_path / "plain", ["train.jsonl", "test.jsonl"])
    assert [f.name for f in opened(plain).files] == [f"{plain}/test.jsonl", f"{plain}/train.jsonl"]
    assert [f.name for f in opened(plain, split="train").files] == [f"{plain}/train.jsonl"]
    assert [f.name for f in opened(plain, split="test+train").files] == [f"{plain}/test.jsonl", f"{plain}/train.jsonl"]
    shards = make(tmp_path / "shards", ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"])
    assert [f.name.rpartition("/")[2] for f in opened(shards).files] == sorted(
        p.name for p in (shards / "data").iterdir()
    )
    configs = [{"config_name": "a", "data_files": [{"split": "s", "path": "rows/*.jsonl"}]}]
    named = make(tmp_path / "named", ["rows/1.jsonl", "other.jsonl"], configs)
    source = opened(named)
    assert [f.name for f in source.files] == [f"{named}/rows/1.jsonl"]
    assert source.notes == [f"{named}: split s, 1 file"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("---\nconfigs: [\n---\n", "the header of {}/README.md cannot be read: "),
        ("---\nconfigs:\n- data_files: x\n---\n", "the header of {}/README.md cannot be read: 'config_name'; correct that file"),
        ("---\n- configs\n---\n", "the header of {}/README.md cannot be read: repo card metadata block should be a dict; correct that file"),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_read_is_a_one_line_error(tmp_path, text, message):
    make(tmp_path, ["train.jsonl"])
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(UsageError) as caught:
        opened(tmp_path)
    assert str(caught.value).startswith(message.format(tmp_path))


def test_a_folder_of_save_to_disk_says_how_it_becomes_parquet(tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    rows = datasets.Dataset.from_list([{"prompt": "a"}])
    rows.save_to_disk("saved")
    datasets.DatasetDict({"train": rows}).save_to_disk("splits")
    for name, chosen, split in [("saved", False, ""), ("splits", True, "['SPLIT']")]:
        with pytest.raises(UsageError) as caught:
            find_dataset(name, chosen=chosen)
        assert str(caught.value) == (
            f"{name} is a folder of Arrow files, which save_to_disk wrote; write it as Parquet first, in Python: "
            f"datasets.load_from_disk('{name}'){split}.to_parquet('rows.parquet')"
        )
