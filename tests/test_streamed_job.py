"""Jobs with streamed weights: the same rows as with weights in memory, whatever the task, and across runs of either kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen.kernels.memory import mapped_files
from support.tiny_model import save_tiny_llama

pytestmark = pytest.mark.skipif(not mapped_files(), reason="streamed weights need Linux")
ROWS = [{"prompt": f"All rows begin alike, and this is number {i}", "completion": f"word {i % 3}"} for i in range(9)]
TASKS = {
    "generate": [],
    "sample": ["-n", "2", "--temperature", "1", "--logprobs", "2"],
    "choices": ["--choices", "cat,dog"],
    "score": ["--score"],
    "embed": ["--embed", "--pooling", "mean"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=5)


@pytest.fixture
def run(cli: Any, write_jsonl: Any, model: Path, tmp_path: Path) -> Any:
    source = write_jsonl(ROWS)

    def run(name: str, *options: str) -> str:
        output = tmp_path / name
        common = ["-m", model, "-o", output, "--kv-memory", "4MiB", "--device", "cpu", "-q"]
        tokens = [] if {"--score", "--embed"} & set(options) else ["--max-tokens", "6"]
        outcome = cli("run", source, *common, *tokens, *options)
        assert outcome.code == 0, outcome.err
        return output.read_text() if output.exists() else ""

    return run


@pytest.mark.parametrize("task", TASKS)
def test_a_task_has_the_rows_of_weights_in_memory(task: str, run: Any, tmp_path: Path) -> None:
    assert run("a.jsonl", *TASKS[task], "--weights", "streamed") == run("b.jsonl", *TASKS[task])
    streamed, resident = (json.loads((tmp_path / f"{name}.jsonl.job" / "stats.json").read_text()) for name in "ab")
    assert streamed["weight_bytes"] == resident["weight_bytes"] > 0
    assert streamed["weight_bytes_read"] > 0 == resident["weight_bytes_read"]


def test_a_job_goes_on_with_streamed_weights_and_back(run: Any) -> None:
    whole = run("whole.jsonl")
    for limit, weights in ((3, "streamed"), (6, "resident"), (9, "streamed")):
        part = run("part.jsonl", "--limit", str(limit), "--weights", weights)
    assert part == whole


def test_shards_may_stream_their_weights(run: Any) -> None:
    for shard in ("1/2", "2/2"):
        merged = run("shards.jsonl", "--shard", shard, "--merge", "--weights", "streamed", "--weight-memory", "1GiB")
    assert merged == run("whole.jsonl")
