"""`--push` uploads the output of a job as a dataset of the Hub. A server in this process stands in for the Hub."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config import JobConfig, ModelConfig
from batchgen.jobs.files.lease import Lease
from batchgen.push.card import dataset_card
from batchgen.push.upload import parquet_shards
from batchgen.result import Result
from batchgen.stats import EngineStats, RunFigures, Setting, figures
from support.hub import READ_ONLY, TOKEN, FakeRepo, fake_hub

pytestmark = pytest.mark.usefixtures("loaded_once")

ROWS = [{"prompt": f"row {i}", "kind": {"name": "a", "tags": [i]}} for i in range(3)]
SHARD = "data/train-00000-of-00001.parquet"


@pytest.fixture
def hub(monkeypatch):
    with fake_hub(monkeypatch) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def run(cli, write_jsonl, tiny_model_dir):
    """Runs the job with `--push me/answers` and other options."""
    path = write_jsonl(ROWS)

    def run(*options):
        return cli("run", path, "-m", tiny_model_dir, "--push", "me/answers", "--max-tokens", 4, *options)

    run.output = path.with_name("prompts.out.parquet")
    return run


def table_of(repo: FakeRepo) -> pa.Table:
    return pq.read_table(io.BytesIO(repo.files[SHARD]))


def test_a_finished_job_is_pushed_as_parquet_with_a_card_in_one_commit(hub, run):
    done = run()
    assert done.code == 0
    repo = hub.repos["me/answers"]
    assert (set(repo.files), repo.private) == ({".gitattributes", "README.md", SHARD}, True)
    assert table_of(repo).equals(pq.read_table(run.output))
    assert repo.messages == ["batchgen: 3 rows of tiny"]
    assert f"batchgen: pushing {run.output} to {hub.endpoint}/datasets/me/answers\n" in done.err
    assert f"pushed 3 rows in 1 file: {hub.endpoint}/datasets/me/answers/commit/{repo.commit}\n" in done.err
    assert f" pushed              {hub.endpoint}/datasets/me/answers\n" in done.err
    card = repo.files["README.md"].decode()
    assert "3 rows that `tiny` generated from `prompts.jsonl`, with batchgen " in card
    assert "| kind | struct<name: string, tags: list<element: int64>> |\n" in card
    assert str(run.output.parent) not in card


def test_an_output_is_pushed_once_and_a_changed_output_replaces_it(hub, run, write_jsonl):
    assert run().code == 0
    repo = hub.repos["me/answers"]
    again = run()
    assert (again.code, len(repo.messages)) == (0, 1)
    assert f"batchgen: {hub.endpoint}/datasets/me/answers has this output already\n" in again.err
    repo.files["data/train-00007-of-00008.parquet"] = b"which load_dataset would read, too"
    write_jsonl([*ROWS, {"prompt": "more"}])
    assert run().code == 0
    assert repo.messages == ["batchgen: 3 rows of tiny", "batchgen: 4 rows of tiny"]
    assert table_of(repo).column("prompt").to_pylist() == ["row 0", "row 1", "row 2", "more"]
    assert set(repo.files) == {".gitattributes", "README.md", SHARD}


def test_a_private_dataset_stays_private_and_says_so(hub, run, write_jsonl):
    assert run().code == 0
    write_jsonl([*ROWS, {"prompt": "more"}])
    again = run("--push-public")
    assert (again.code, hub.repos["me/answers"].private) == (0, True)
    assert (
        f"{hub.endpoint}/datasets/me/answers stays private, as it was before: make it public in its settings\n"
        in again.err
    )


def test_an_output_that_another_process_is_pushing_is_refused(hub, run):
    assert run().code == 0
    job = run.output.parent / f"{run.output.name}.job"
    on_its_way = job / "push" / "0.parquet"
    on_its_way.parent.mkdir()
    on_its_way.write_bytes(b"of the other process")
    lease = Lease(job / "claims", str(run.output))
    again = run()
    assert (again.code, on_its_way.read_bytes()) == (75, b"of the other process")
    assert f"another run holds {run.output} (process " in again.err
    lease.release()
    assert run().code == 0
    assert not on_its_way.exists()


@pytest.mark.parametrize("failing", ["/api/repos/create", "/preupload/", "/info/lfs/", "/store/", "/commit/"])
def test_after_a_failed_push_the_same_command_pushes_the_output(hub, run, failing):
    hub.failing = failing
    failed = run()
    assert failed.code == 1
    last = failed.err.splitlines()[-1]
    assert last.startswith(
        f"batchgen: error: {run.output} is complete, but it could not be pushed: dataset me/answers: the hub failed: "
    )
    assert last.endswith("; the same command then pushes it, and generates nothing")
    before = run.output.read_bytes()
    assert [p.name for p in run.output.parent.joinpath(f"{run.output.name}.job").iterdir() if p.name == "push"] == []
    hub.failing = ""
    again = run()
    assert again.code == 0
    assert "is complete (3 rows): nothing to do" in again.err
    assert (run.output.read_bytes(), table_of(hub.repos["me/answers"]).num_rows) == (before, 3)


@pytest.mark.parametrize(
    ("options", "token", "message"),
    [
        ([], "", "dataset me/answers needs a token of the hub; set HF_TOKEN or run `hf auth login`"),
        ([], "hf_wrong", "dataset me/answers needs a token of the hub; set HF_TOKEN or run `hf auth login`"),
        ([], READ_ONLY, "the token can only read, and --push writes to dataset me/answers; use a token that may write"),
        (["-o", "x.jsonl"], TOKEN, "--push needs a Parquet file on this machine, and the output is x.jsonl; name a .parquet file with -o"),
        (["--push", "answers"], TOKEN, "--push 'answers' is not the name of a dataset on the hub; use OWNER/NAME"),
        (["--shard", "1/2"], TOKEN, "--push with --shard is for the run that merges; give every shard --merge, too"),
        (["--push", "you/theirs"], TOKEN, "dataset you/theirs has files that batchgen did not push (README.md, rows.csv); use another name with --push, or delete them there; --overwrite replaces them, but also starts the job again"),
    ],
)  # fmt: skip
def test_an_impossible_push_is_refused_before_anything_runs(hub, run, monkeypatch, options, token, message):
    monkeypatch.setenv("HF_TOKEN", token)
    hub.repos["you/theirs"] = FakeRepo({"rows.csv": b"a", "README.md": b"# Mine"})
    refused = run(*options)
    assert (refused.code, refused.err) == (2, f"batchgen: error: {message}\n")
    assert not run.output.exists()
    assert "me/answers" not in hub.repos


def test_overwrite_replaces_only_the_data_files_of_an_existing_dataset(hub, run):
    hub.repos["me/answers"] = FakeRepo(
        {"data/train-00000-of-00002.parquet": b"old", "README.md": b"# Mine", "notes.txt": b"n"}
    )
    assert run("--overwrite").code == 0
    repo = hub.repos["me/answers"]
    assert set(repo.files) == {SHARD, "README.md", "notes.txt"}


def test_the_shard_that_merges_pushes_the_output(hub, run):
    assert run("--shard", "1/2", "--merge").code == 0
    assert "me/answers" not in hub.repos
    assert run("--shard", "2/2", "--merge").code == 0
    assert table_of(hub.repos["me/answers"]).column("prompt").to_pylist() == ["row 0", "row 1", "row 2"]


def test_a_public_dataset_of_labels_can_be_loaded_by_datasets(hub, run, tmp_path):
    import datasets

    assert run("--choices", "yes,no", "--push-public").code == 0
    repo = hub.repos["me/answers"]
    assert repo.private is False
    for name, data in repo.files.items():
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    loaded = datasets.load_dataset(str(tmp_path / "copy"), split="train", cache_dir=str(tmp_path / "cache"))
    local = pq.read_table(run.output).to_pylist()
    assert [row["text"] for row in loaded] == [row["text"] for row in local]
    assert [[(e["key"], e["value"]) for e in row["choice_probs"]] for row in loaded] == [
        row["choice_probs"] for row in local
    ]
    assert [row["kind"] for row in loaded] == [row["kind"] for row in ROWS]


def test_a_large_output_is_pushed_in_several_files(tmp_path):
    maps = pa.array([[("a", 0.5)], None, [], [("b", None)]] * 250, pa.map_(pa.string(), pa.float64()))
    table = pa.table({"n": range(1000), "m": maps, "text": [f"{i:x}" * 50 for i in range(1000)]})
    table = table.replace_schema_metadata({"huggingface": "the features of datasets"})
    pq.write_table(table, tmp_path / "o.parquet", row_group_size=100)
    (tmp_path / "push").mkdir()
    shards = parquet_shards(tmp_path / "o.parquet", tmp_path / "push", max_bytes=6_000)
    assert 1 < len(shards) <= 10
    assert {pq.read_schema(shard).metadata[b"huggingface"] for shard in shards} == {b"the features of datasets"}
    back = pa.concat_tables([pq.read_table(shard) for shard in shards])
    assert back.column("n").to_pylist() == list(range(1000))
    assert back.schema.field("m").type == pa.list_(pa.struct([("key", pa.string()), ("value", pa.float64())]))
    assert back.column("m").to_pylist()[:4] == [[{"key": "a", "value": 0.5}], None, [], [{"key": "b", "value": None}]]
    assert back.column("text").equals(table.column("text"))


def test_the_card_shows_settings_but_no_folders_or_signatures_of_inputs():
    inputs = [
        "hf://datasets/user/rows",
        "/home/me/secret/more.jsonl",
        "https://host/f/signed.jsonl?X-Amz-Signature=secret",
    ]
    model = ModelConfig(model="org/model", weights="streamed", weight_memory="2GiB", ray="auto", workers=2)
    config = JobConfig(inputs=inputs, model=model, split="test", sampling={"stop": ["a|b\nc"]})
    run = RunFigures()
    for row in range(12):
        run.new.add(Result(row=row, text="x", finish_reason="stop", prompt_tokens=20, completion_tokens=5))
    sampling = {"temperature": {"value": 0.6, "from": "model"}}
    stats = figures(run, EngineStats(), Setting("m", "bfloat16", "cpu", "kernels", sampling))
    schema = pa.schema([("text", pa.string())])
    card = dataset_card(
        config, "me/out", "abc", stats=stats, settings={"model": "org/model at abc"}, schema=schema, rows=12
    )
    assert "from `hf://datasets/user/rows`, `more.jsonl`, `signed.jsonl`, split `test`, with batchgen " in card
    assert "secret" not in card
    lines = ["size_categories:", "- n<1K", "| model | org/model at abc |", "| temperature | 0.6 (the model's) |"]
    lines += ["| --stop | a\\|b c |", "| ended with stop | 12 |", "| prompt tokens | 240 |", "| text | string |"]
    assert [line for line in lines if line not in card.splitlines()] == []
    assert "streamed" not in card, "an option that no result depends on"
    assert "2GiB" not in card
