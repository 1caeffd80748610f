"""Jobs on models with recurrent layers: loaded from safetensors, resumed, and on two devices."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from batchgen import EngineConfig, JobConfig, ModelConfig, PromptConfig, SamplingParams, dry_run, run_job
from batchgen.dry_run import plan_job
from batchgen.model.weights import weight_size
from support.models import build, generate
from support.params import slow_but
from support.records import json_rows
from support.shapes import RECURRENT_SHAPES
from support.tiny_model import EOS_ID, save_tiny_tokenizer


def built(name: str, **changes: Any) -> Any:
    return build(name, vocab_size=260, eos_token_id=EOS_ID, **changes)


def saved(name: str, path: Path, **changes: Any) -> Path:
    """A tiny model with a byte tokenizer."""
    built(name, **changes).save_pretrained(path)
    save_tiny_tokenizer(path, chat=False)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3_5_text", tmp_path_factory.mktemp("models") / "qwen")


def prompts() -> list[str]:
    root = "You are a careful assistant. Answer in one word.\n"
    groups = [f"{root}{name}: " for name in ("Sort", "Name the colour of", "Translate")]
    return [f"{group}{word}" for group in groups for word in ("sky", "grass", "sea and land", "a", "")]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT_SHAPES)
def test_a_resumed_job_on_two_devices_equals_generate(name, tmp_path, write_jsonl, cli):
    folder = saved(name, tmp_path / "model")
    source = write_jsonl([{"prompt": p} for p in prompts()])
    options = ["--model", folder, "--max-tokens", "12", "--temperature", "0", "--debug", "-q"]
    whole = tmp_path / "whole.jsonl"
    assert cli("run", source, *options, "-o", whole, "-n", "2", "--token-ids", "--kv-memory", "4MiB").code == 0
    rows = json_rows(whole)
    stats = json.loads((tmp_path / "whole.jsonl.job" / "stats.json").read_text())
    assert stats["prefill_tokens"] == stats["prefill_tokens_min"]
    assert stats["state_bytes_peak"] > 0
    model, tokenizer = built(name), AutoTokenizer.from_pretrained(folder)
    for prompt, row in zip(prompts(), rows, strict=True):
        want = generate(model, tokenizer(prompt).input_ids, 12, (EOS_ID,))
        assert [c["token_ids"] for c in row["choices"]] == [want, want]
    part = tmp_path / "part.jsonl"
    small = [*options, "-o", part, "-n", "2", "--token-ids", "--batch-size", "3"]
    assert cli("run", source, *small, "--limit", "7").code == 0
    assert cli("run", source, *small, "--device", "cpu:0,1").code == 0
    assert [row["choices"] for row in json_rows(part)] == [row["choices"] for row in rows]


def prefix_tree_prompts(depth: int, text: str = "") -> list[str]:
    """Prompts of a tree of this depth, at its leaves and at some branches."""
    if depth == 0:
        return [f"{text}{word} is it?" for word in ("who", "what", "where")]
    branches = [f"{text}{word} and so on and on, {depth}. " for word in ("red", "green", "blue")]
    return [branches[0], *(prompt for branch in branches for prompt in prefix_tree_prompts(depth - 1, branch))]


def strangers() -> list[str]:
    rng = random.Random(60)
    return ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 60))) for _ in range(60)]


TREES: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    "one prefix, more rows than run at once": (
        [f"All of them begin so. {i}" for i in range(150)],
        {},
        {"batch_size": 64},
    ),
    "nested, all of them at once": (prefix_tree_prompts(3), {}, {}),
    "nested, few at once": (prefix_tree_prompts(3), {"max_tokens": 5}, {"batch_size": 6}),
    "nested, in the order of the input": (prefix_tree_prompts(3), {}, {"batch_size": 6, "policy": "fifo"}),
    "nothing shared, short steps": (strangers(), {"max_tokens": 3}, {"batch_size": 40, "max_batch_tokens": 64}),
    "several completions of a prompt": (prefix_tree_prompts(2), {"n": 3, "temperature": 1.0}, {"batch_size": 16}),
    "little memory": (prefix_tree_prompts(3), {}, {"batch_size": 24, "kv_memory": "600KiB"}),
}


@pytest.mark.parametrize("tree", slow_but(("nested, few at once", "little memory"), TREES))
def test_the_plan_predicts_the_memory_of_states(tree, folder, tmp_path, write_jsonl):
    prompts, params, engine = TREES[tree]
    config = JobConfig(
        inputs=(str(write_jsonl([{"prompt": p} for p in prompts])),),
        output=str(tmp_path / "out.jsonl"),
        model=ModelConfig(model=str(folder), device="cpu"),
        prompts=PromptConfig(chat=False),
        sampling=SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "temperature": 0.0} | params),
        engine=EngineConfig(**{"kv_memory": "64MiB"} | engine),
    )
    planned = plan_job(config).figures["state_bytes_peak"]
    used = run_job(config).stats["state_bytes_peak"]
    assert used > 0
    assert abs(planned - used) <= 0.05 * used


@pytest.mark.parametrize("weights", ["auto", "streamed"])
def test_the_plan_counts_the_states_of_a_model_whose_weights_do_not_fit(weights, write_jsonl, tmp_path, monkeypatch):
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3
    deep = {"num_hidden_layers": len(layers), "layer_types": layers, "intermediate_size": 1024}
    folder = saved("qwen3_5_text", tmp_path / "model", **deep)
    prompts = [{"prompt": p} for p in prefix_tree_prompts(2)]
    config = JobConfig(
        inputs=(str(write_jsonl(prompts)),),
        model=ModelConfig(model=str(folder), device="cpu", weights=weights),
        prompts=PromptConfig(chat=False),
        sampling=SamplingParams(max_tokens=4),
    )
    kept = plan_job(config).figures["weight_bytes"]
    for module in (dry_run, weight_size):
        monkeypatch.setattr(module, "free_host_memory", lambda: kept)
    plan = plan_job(config).figures
    assert plan["memory"]["auto"] == "streamed"
    assert plan["state_bytes_peak"] > 0
