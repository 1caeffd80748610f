"""A plan tells what a job would share and cost."""

import gzip
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen import JobConfig, ModelConfig, SamplingParams, plan_job, run_job
from batchgen.config import EngineConfig, InputLimits, PromptConfig
from batchgen.dry_run import computed_dtype, kv_bytes_per_token
from batchgen.errors import InputCorrupt, Interrupted, UsageError
from batchgen.kernels import isa
from batchgen.model_report import report_model
from batchgen.prompts import load_tokenizer
from batchgen.records.inputs import PIPE_WINDOW_ROWS
from support.progress import Recorder, in_phase, interrupt

pytestmark = pytest.mark.usefixtures("loaded_once")

ROOT = "All rows begin with this text, which is more than a chunk. "
SAMPLED = SamplingParams(max_tokens=2, temperature=1.0)  # equal rows have results of their own
GROUPS = ["The first group goes on like this. ", "The second one has other words here. "]


def rows() -> list[dict[str, Any]]:
    return [{"prompt": f"{ROOT}{GROUPS[i % 2]}{i}"} for i in range(8)]


def config_of(model: Path, source: Path, **options: Any) -> JobConfig:
    options.setdefault("sampling", SamplingParams(max_tokens=10))
    return JobConfig(inputs=(str(source),), model=ModelConfig(model=str(model)), **options)


def test_the_tree_of_windows_is_that_of_the_first_one_with_a_row_that_can_run(tiny_model_dir, write_jsonl):
    source = write_jsonl([{"prompt": 1}, {"prompt": 2}, *rows()])
    plan = plan_job(config_of(tiny_model_dir, source, window=2)).figures
    assert (plan["rows"], plan["rows_failed"], plan["windows"]) == (10, 2, 4)
    assert [(line["tokens"], line["rows"]) for line in plan["tree"]] == [(1 + len(ROOT) + len("The "), 2)]


def test_the_windows_of_rows_for_standard_output_are_those_of_the_run(tiny_model_dir, write_jsonl):
    source = write_jsonl({"prompt": "x"} for _ in range(PIPE_WINDOW_ROWS + 1))
    assert plan_job(config_of(tiny_model_dir, source, output="-", sampling=SAMPLED)).figures["windows"] == 2
    with pytest.raises(UsageError, match="--window all writes no row before all rows are done"):
        plan_job(config_of(tiny_model_dir, source, output="-", window="all"))


@pytest.mark.parametrize("window", [None, 3])
def test_an_input_that_breaks_off_has_no_plan(window, tiny_model_dir, tmp_path):
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows()).encode())[:-9])
    with pytest.raises(InputCorrupt, match=r"in\.jsonl\.gz"):
        plan_job(config_of(tiny_model_dir, source, window=window))


def test_an_interrupted_plan_says_that_it_begins_again(tiny_model_dir, write_jsonl):
    progress = Recorder(in_phase("planning"), interrupt)
    with pytest.raises(Interrupted, match=r"^interrupted by SIGINT; the same command begins the plan again$"):
        plan_job(config_of(tiny_model_dir, write_jsonl(rows())), progress)


def test_a_plan_predicts_the_prefill_of_the_run(tiny_model_dir, write_jsonl):
    for window in (None, 3):
        config = config_of(tiny_model_dir, write_jsonl(rows()), window=window, output=None, overwrite=True)
        assert plan_job(config).figures["prefill_tokens_min"] == run_job(config).stats["prefill_tokens"]


def test_a_plan_predicts_the_prefill_of_windows_by_priority(tiny_model_dir, write_jsonl):
    source = write_jsonl({"prompt": f"{GROUPS[i // 2 % 2]}{i}", "hurry": i} for i in range(8))
    config = config_of(
        tiny_model_dir,
        source,
        prompts=PromptConfig(priority_column="hurry"),
        limits=InputLimits(read_rows=2, run_rows=2, window_leaves=2, batch_rows=1),
        overwrite=True,
    )
    plan = plan_job(config)
    assert plan.figures["windows"] == 4
    assert plan.figures["prefill_tokens_min"] == run_job(config).stats["prefill_tokens_min"]
    assert not plan.whole
    assert [(line["rows"], line["text"]) for line in plan.figures["tree"]] == [
        (2, f"<|begin|>{GROUPS[0]}")
    ]  # of the first window


def test_nodes_and_groups_that_lie_in_several_windows_are_counted_once(tiny_model_dir, write_jsonl):
    limits = InputLimits(read_rows=2, run_rows=2, window_leaves=2, batch_rows=1)
    plan = plan_job(config_of(tiny_model_dir, write_jsonl(rows()), limits=limits))
    assert (plan.whole, plan.figures["windows"]) == (True, 4)
    assert [plan.figures[name] for name in ("prefix_nodes", "groups", "grouped_rows")] == [3, 2, 8]


def test_a_plan_writes_nothing_and_loads_no_weights(tiny_model_dir, write_jsonl, tmp_path):
    model = tmp_path / "without-weights"
    model.mkdir()
    for path in tiny_model_dir.iterdir():
        if path.suffix != ".safetensors":
            (model / path.name).write_bytes(path.read_bytes())
    source = write_jsonl(rows())
    before = sorted(tmp_path.rglob("*"))
    assert plan_job(config_of(model, source)).figures["rows"] == 8
    assert sorted(tmp_path.rglob("*")) == before


def test_completions_and_labels_take_memory_but_do_not_count_as_prompts(tiny_model_dir, write_jsonl):
    # With <s> a block of 32. Other seeds, because equal rows would run once.
    source = write_jsonl(
        {"prompt": "x" * 31, "completion": "y" * 16, "sampling_params": {"seed": seed}} for seed in range(2)
    )

    def figures(**options: Any) -> dict[str, Any]:
        plan = plan_job(config_of(tiny_model_dir, source, **options)).figures
        assert (plan["rows"], plan["rows_failed"], plan["prompt_tokens"], plan["prefill_tokens_min"]) == (2, 0, 64, 32)
        assert [(line["tokens"], line["rows"]) for line in plan["tree"]] == [(32, 2)]
        assert (plan["groups"], plan["grouped_rows"], plan["prefix_nodes"]) == (1, 2, 1)
        block = plan["kv_bytes_per_token"] * EngineConfig().block_size
        return {name: plan[f"kv_bytes_{name}"] // block for name in ("unshared", "shared", "least")}

    def sampled(n: int) -> SamplingParams:
        return SamplingParams(max_tokens=16, n=n)

    assert figures(sampling=sampled(1)) == {"unshared": 4, "shared": 3, "least": 2}
    assert figures(sampling=sampled(3)) == {"unshared": 12, "shared": 7, "least": 2}
    labels = SamplingParams(choices=("a" * 17, "b" * 2))  # 16 and 1 tokens to run
    assert figures(sampling=labels) == {"unshared": 8, "shared": 5, "least": 2}
    assert figures(sampling=sampled(1), prompts=PromptConfig(score=True)) == {"unshared": 4, "shared": 3, "least": 2}


def test_rows_with_nothing_to_score_add_no_prompt_tokens(tiny_model_dir, write_jsonl):
    source = write_jsonl([{"prompt": "a", "completion": ""}, {"prompt": "a"}, {"prompt": "a", "completion": "b"}])
    plan = plan_job(config_of(tiny_model_dir, source, prompts=PromptConfig(score=True))).figures
    assert (plan["rows"], plan["rows_failed"], plan["prompt_tokens"]) == (3, 1, 2)


def test_equal_rows_count_their_prompts_and_nothing_else(tiny_model_dir, write_jsonl):
    plan = plan_job(config_of(tiny_model_dir, write_jsonl({"prompt": prompt} for prompt in ("aa", "aa", "b")))).figures
    assert [plan[name] for name in ("rows", "rows_equal", "prompt_tokens", "prefill_tokens_min")] == [3, 1, 8, 4]


def test_a_kv_memory_that_the_run_refuses_has_no_plan(tiny_model_dir, write_jsonl):
    with pytest.raises(
        UsageError, match=r"^--kv-memory 1KiB does not hold a block of 32 tokens \(8.0 KiB\); give 8KiB"
    ):
        plan_job(config_of(tiny_model_dir, write_jsonl(rows()), engine=EngineConfig(kv_memory="1KiB")))


def test_an_empty_input_has_an_empty_plan(tiny_model_dir, write_jsonl):
    plan = plan_job(config_of(tiny_model_dir, write_jsonl([]))).figures
    assert [plan[name] for name in ("rows", "prompt_tokens", "tree", "largest_groups")] == [0, 0, [], []]


@pytest.mark.parametrize(
    ("heads", "dtype", "expected"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, "float32", 3 * 2 * 16 * 2 * 4),
        ({"num_attention_heads": 4}, "bfloat16", 3 * 4 * 16 * 2 * 2),
        ({"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}, "float16", 3 * 256 * 2 * 2),
        ({}, "float32", 0),
    ],
)
def test_kv_bytes_per_token_come_from_the_configuration(heads, dtype, expected):
    config = SimpleNamespace(num_hidden_layers=3, hidden_size=64, **heads)
    assert kv_bytes_per_token(config, dtype) == expected
    assert kv_bytes_per_token(SimpleNamespace(text_config=config), dtype) == expected


@pytest.mark.parametrize(("fast", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_plan_and_models_count_kv_and_weights_in_the_dtype_of_the_run(
    tiny_model_dir, tmp_path, write_jsonl, monkeypatch, fast, dtype
):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    monkeypatch.setattr(isa, "has_bfloat16", lambda: fast)
    monkeypatch.setattr(isa, "features", lambda: frozenset({"avx2"}))
    config = ModelConfig(model=folder, device="cpu")
    assert computed_dtype(config, load_tokenizer(config).hf_config) == dtype
    plan = plan_job(JobConfig(inputs=write_jsonl([{"prompt": "x"}]), model=config)).as_dict()
    report = report_model(config)
    assert (report.dtype, report.computed_dtype) == ("bfloat16", dtype)
    assert report.kv_bytes_per_token == plan["kv_bytes_per_token"]
    assert asdict(report)["memory"]["kept"] == plan["memory"]["kept"]
