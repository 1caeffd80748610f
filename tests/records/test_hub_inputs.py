"""hf:// inputs, read from a server that answers the few requests to the Hub that reading needs."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from batchgen.errors import UsageError
from batchgen.jobs.files.target import open_target
from batchgen.records.hub_errors import reaching_hub
from support.hub import TOKEN, FakeRepo, fake_hub
from support.records import JSONL, ROWS, opened, parquet_bytes

FILES = {"data/a.jsonl": JSONL, "data/b.parquet": parquet_bytes(), "README.md": b"#"}


@pytest.fixture
def hub(monkeypatch):
    with fake_hub(monkeypatch) as hub:
        hub.repos["user/rows"] = FakeRepo(dict(FILES))
        yield hub


@pytest.mark.parametrize("pattern", ["data", "data/*", "**/[ab].*"])
def test_folders_and_globs_of_a_dataset_give_their_files(hub, pattern):
    source = opened(f"hf://datasets/user/rows/{pattern}")
    assert [f.name for f in source.files] == [
        "hf://datasets/user/rows/data/a.jsonl",
        "hf://datasets/user/rows/data/b.parquet",
    ]
    assert [row.columns for row in source.rows()] == ROWS + ROWS


def test_an_output_needs_an_existing_repository(hub):
    target = open_target("hf://datasets/user/rows/out/o.jsonl")
    target.check()
    assert not target.exists()
    # huggingface_hub 1 notices before the output's folder is looked at.
    with pytest.raises(UsageError, match=r"^hf://datasets/user/none/o\.jsonl cannot be (written|reached): "):
        open_target("hf://datasets/user/none/o.jsonl").check()


CARD = b"""---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*.parquet
  - split: test
    path: [en/test.jsonl]
- config_name: de
  data_files: de/*.jsonl
license: mit
---
# Rows
"""


def with_configs() -> FakeRepo:
    files = {"README.md": CARD, "de/rows.jsonl": JSONL, "en/test.jsonl": JSONL, "en/notes.txt": b"-"}
    return FakeRepo(files | {f"en/train-{n}.parquet": parquet_bytes() for n in range(2)})


def test_a_dataset_is_read_by_name_configuration_and_split_at_its_current_commit(hub):
    repo = hub.repos["user/rows"] = with_configs()
    source = opened("hf://datasets/user/rows", config="en", split="train")
    root = f"hf://datasets/user/rows@{repo.commit}"
    assert [f.name for f in source.files] == [f"{root}/en/train-0.parquet", f"{root}/en/train-1.parquet"]
    assert source.notes == ["hf://datasets/user/rows: configuration en, split train, 2 files"]
    assert [row.columns for row in source.rows()] == ROWS + ROWS
    assert source.schema == pa.schema([("prompt", pa.string())])
    assert [f.name for f in opened("hf://datasets/user/rows@v1", config="de").files] == [f"{root}/de/rows.jsonl"]
    both = opened("hf://datasets/user/rows", config="de", split="all")
    assert [row.columns for row in both.rows()] == ROWS


def test_folders_of_the_hubs_parquet_copy_are_configurations_and_splits(hub):
    hub.repos["user/rows"] = FakeRepo(
        {f"{c}/{s}/0000.parquet": parquet_bytes() for c in ("a", "b") for s in ("train", "extra")}
    )
    for revision in ("refs/convert/parquet", "~parquet"):
        source = opened(f"hf://datasets/user/rows@{revision}", config="b", split="extra")
        assert [f.name.partition("/b/")[2] for f in source.files] == ["extra/0000.parquet"]
        assert [row.columns for row in source.rows()] == ROWS


def test_a_private_dataset_needs_the_token(hub, monkeypatch):
    hub.repos["user/rows"].private = True
    with pytest.raises(UsageError) as caught:
        opened("hf://datasets/user/rows", format="jsonl")
    assert str(caught.value) == (
        "there is no dataset user/rows on the hub; check the name; for a private dataset, set HF_TOKEN or run `hf auth login`"
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert [row.columns for row in opened("hf://datasets/user/rows", format="jsonl").rows()] == ROWS


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("user/rows", {}, "hf://datasets/user/rows has several configurations; choose one with --dataset-config: en, de"),
        ("user/rows", {"config": "fr"}, "hf://datasets/user/rows has no configuration 'fr'; use one of these with --dataset-config: en, de"),
        ("user/rows", {"config": "en"}, "hf://datasets/user/rows has several splits; choose with --split: train, test, or all"),
        ("user/rows", {"config": "en", "split": "dev"}, "hf://datasets/user/rows has no split 'dev'; choose with --split: train, test, or all"),
        ("user/rows", {"config": "en", "split": "all"}, None),
        ("user/rows@v2", {"config": "en"}, "dataset user/rows has no revision 'v2'; use a branch, a tag or a commit of it"),
        ("user/rows?split=train", {}, "hf://datasets/user/rows?split=train is not the name of a dataset; choose a part of it with --dataset-config and --split"),
        ("user/mixed", {}, "split train of hf://datasets/user/mixed has files of several formats: jsonl, parquet; choose one with --input-format"),
        ("user/pictures", {}, "split train of hf://datasets/user/pictures has no jsonl, parquet, csv or tsv file (but .json, .png); name the format with --input-format, or read the Hub's Parquet copy, hf://datasets/user/pictures@refs/convert/parquet"),
        ("user/empty", {}, "hf://datasets/user/empty has no data files; name its files, or a glob"),
        ("user/rows/en/test.jsonl", {"split": "train"}, "--dataset-config and --split are for datasets, and hf://datasets/user/rows/en/test.jsonl is not one; leave them out, or name a folder or hf://datasets/OWNER/NAME"),
        *((f"hf://{name}", {}, f"no such file: hf://{name}; a dataset is hf://datasets/user/rows; without datasets/ it is a model's repository")
            for name in ("user/rows", "user/rows@main", "user/rows/data/a.jsonl")),
        ("user/broken", {}, "the configs of hf://datasets/user/broken/README.md cannot be read: data_files is 7; correct that file"),
    ],
)  # fmt: skip
def test_an_unclear_or_unknown_choice_is_refused_with_the_possible_ones(hub, name, options, message):
    hub.repos |= {
        "user/rows": with_configs(),
        "user/mixed": FakeRepo({"a.jsonl": JSONL, "b.parquet": parquet_bytes()}),
        "user/pictures": FakeRepo({"a.json": b"[]", "b.png": b""}),
        "user/empty": FakeRepo({"README.md": b"# Nothing"}),
        "user/broken": FakeRepo({"README.md": b"---\nconfigs:\n- config_name: a\n  data_files: 7\n---\n"}),
    }
    url = name if "://" in name else f"hf://datasets/{name}"
    if message is None:
        assert len(opened(url, **options).files) == 3
        return
    with pytest.raises(UsageError) as caught:
        opened(url, **options)
    assert str(caught.value) == message


def test_a_failing_hub_and_offline_mode_are_one_line_errors(hub, monkeypatch):
    from huggingface_hub import constants

    hub.failing = "/api/"
    with pytest.raises(UsageError, match=r"^dataset user/rows: the hub failed: [^\n]*; check the connection and run the same command again$"):  # fmt: skip
        opened("hf://datasets/user/rows")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"^dataset user/rows is on the hub, and HF_HUB_OFFLINE is set; unset it, or name a local copy$"):  # fmt: skip
        opened("hf://datasets/user/rows")


HUB_FAILED = "dataset user/rows: the hub failed: {}; check the connection and run the same command again"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("GatedRepoError", {}, "dataset user/rows is gated, and you have no access to it; ask for access on its page and set HF_TOKEN or run `hf auth login`"),
        ("HfHubHTTPError", {}, "the token gives no access to dataset user/rows; use a token that has the permission"),
        ("HfHubHTTPError", {"server_message": "Storage limit\nreached"}, "the token gives no access to dataset user/rows (the hub says: Storage limit reached); use a token that has the permission"),
        ("HfHubHTTPError", {"status": 413, "server_message": "The file is too large"}, HUB_FAILED.format("The file is too large")),
        ("HfHubHTTPError", {"status": 413}, HUB_FAILED.format("413 for its address")),
        ("HFValidationError", None, "'user/rows' is not the name of a dataset on the hub; use OWNER/NAME"),
        ("ValueError", None, HUB_FAILED.format("no: the file is too large")),
    ],
)  # fmt: skip
def test_an_error_of_the_hubs_package_is_told_in_one_line_with_what_the_hub_says(kind, options, message):
    """It raises an error of its own from the hub's, and puts reasons into further lines."""
    from huggingface_hub import errors

    with pytest.raises(UsageError) as caught, reaching_hub("user/rows"):
        if options is None:
            raise getattr(errors, kind, ValueError)("no:\nthe file is too large")
        status = options.get("status", 403)
        response = SimpleNamespace(status_code=status, headers={}, request=None)
        cause = getattr(errors, kind)(
            f"{status} for\nits address", response=response, server_message=options.get("server_message")
        )
        raise RuntimeError("error while uploading") from cause
    assert str(caught.value) == message
