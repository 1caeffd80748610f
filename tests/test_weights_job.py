"""Jobs with packed and with streamed weights: the same bytes as with plain weights in memory, whatever the model and the task."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen.kernels.memory import mapped_files
from support.models import kernels
from support.params import slow_but
from support.quantized import make_for_jobs

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of each other
STREAMED = ("--weights", "streamed")
ROWS = [{"prompt": f"All rows begin alike, and this is number {i}", "completion": f"word {i % 3}"} for i in range(9)]
MODELS = ("plain", "awq", "awq experts", "awq hybrid", "gguf")
WAYS: dict[str, list[list[str]]] = {
    "generate": [[]],
    "sample": [["-n", "2", "--temperature", "1", "--logprobs", "2"]],
    "labels": [["--choices", "cat,dog"]],
    "scores": [["--score"]],
    "embeddings": [["--embed", "--pooling", "mean"]],
    "adapter": [["--lora", "ADAPTER"]],
    "parts": [["--limit", "3"], ["--limit", "6", "--weights", "resident"], []],
    "shards": [["--shard", "1/2"], ["--shard", "2/2", "--merge"]],
}
"""The options of the runs of one job. What `parts` and `shards` write is compared with the output of `generate`."""
QUICK = [
    ("plain", "embeddings"), ("awq", "sample"), ("awq", "adapter"), ("awq experts", "labels"), ("plain", "parts"), ("gguf", "scores"),
    ("awq hybrid", "shards"),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Returns a model and its unpacked form (`make_for_jobs`), with a random adapter in the folder `adapter` of the latter."""
    made: dict[str, tuple[Path, Path]] = {}

    def model(name: str) -> tuple[Path, Path]:
        if name == "gguf":
            pytest.importorskip("gguf")
        if name not in made:
            made[name] = make_for_jobs(name, tmp_path_factory.mktemp("models") / name)
        return made[name]

    return model


def with_adapter(exact: Path) -> Path:
    """Writes a random adapter for a model. Returns its folder."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(exact), peft.LoraConfig(r=4, target_modules=["o_proj", "down_proj"])
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    adapted.save_pretrained(exact / "adapter")
    return exact / "adapter"


@pytest.mark.parametrize(("name", "way"), slow_but(QUICK, itertools.product(MODELS, WAYS)))
def test_a_job_has_the_bytes_of_plain_weights_in_memory(name, way, models, cli, write_jsonl, tmp_path):
    if name != "plain" and kernels() is None:
        pytest.skip("torch's products depend on where a weight begins in memory")
    model, exact = models(name)
    adapter = with_adapter(exact) if way == "adapter" else ""
    source = write_jsonl(ROWS)

    def run(to: str, model: Path, runs: list[list[str]], weights: tuple[str, ...] = ()) -> bytes:
        output = tmp_path / f"{to}.jsonl"
        for options in runs:
            own = [str(adapter) if option == "ADAPTER" else option for option in options]
            own += () if "--weights" in own else weights
            own += () if {"--score", "--embed"} & {*own} else ("--max-tokens", "6")
            common = ("-m", model, "--dtype", "bfloat16", "-o", output, "--kv-memory", "4MiB", "--device", "cpu", "-q")
            outcome = cli("run", source, *common, *own)
            assert outcome.code == 0, outcome.err
        return output.read_bytes()

    # An adapter is merged into plain weights and rounded with them, and runs beside packed ones (model/test_lora.py).
    beside = way == "adapter"
    expected = run("expected", model if beside else exact, WAYS["generate"] if len(WAYS[way]) > 1 else WAYS[way])
    assert expected.count(b"\n") == len(ROWS)
    if name != "plain" and not beside:
        assert run("packed", model, WAYS[way]) == expected
    if mapped_files():
        assert run("streamed", model, WAYS[way], STREAMED) == expected
        figures = json.loads((tmp_path / "streamed.jsonl.job" / "stats.json").read_text())
        assert figures["weight_bytes_read"] > 0 or way == "shards"  # a merge has no weights
