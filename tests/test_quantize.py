"""Jobs with `--quantize int8` report what it changes, resume, and cannot be continued without it."""

import json
import math
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from batchgen import EngineConfig, JobConfig, ModelConfig, PromptConfig, SamplingParams, run_job
from batchgen.errors import UsageError
from batchgen.kernels.int8 import Int8Linear
from batchgen.model.adapter import prepare
from batchgen.model.weights.int8 import quantize
from batchgen.model_report import report_model
from batchgen.process.templates import template_process
from support.models import build, kernels
from support.params import in_turn, slow_but
from support.records import json_rows

ROWS = [{"id": i, "prompt": f"A few words, the same for all, and number {i}"} for i in range(8)]


pytestmark = pytest.mark.usefixtures("compiled")


def job(model: Path, rows: Path, output: Path, quantize: str = "int8", **options: Any) -> Any:
    return run_job(
        JobConfig(
            inputs=rows,
            output=str(output),
            model=ModelConfig(model=str(model), device="cpu", quantize=quantize),
            sampling=SamplingParams(max_tokens=6),
            engine=EngineConfig(kv_memory="8MiB"),
            **options,
        )
    )


def test_the_figures_say_what_quantization_changes(tiny_model_dir, tmp_path, write_jsonl):
    found = job(tiny_model_dir, write_jsonl(ROWS), tmp_path / "o.jsonl").stats["quantization"]
    assert (found["method"], found["layers"], found["rows"], found["tokens"]) == ("int8", 7, 4, 4 * 32)
    assert 0 < found["mean_kl"] < 0.05
    assert 0.5 < found["equal_tokens"] <= 1
    assert json.loads((tmp_path / "o.jsonl.job" / "stats.json").read_text())["quantization"] == found


MIXERS = ["mamba", "jamba", "zamba", "recurrent_gemma"]


@pytest.mark.parametrize(("name", "packed"), slow_but(in_turn(MIXERS, (False, True)), product(MIXERS, (False, True))))
def test_mixers_with_projections_of_their_own_are_quantized(name, packed):
    made = quantize(prepare(build(name), kernels=kernels(), int8=not packed), [np.arange(40, dtype=np.int32)], {})
    found = made.quantization
    places = [child for part in made.module.modules() for child in part.children() if isinstance(child, Int8Linear)]
    assert len(places) == len(set(places)) > 4
    assert found["mean_kl"] < 0.02


def test_the_first_shard_makes_the_prompts_that_it_is_measured_on_while_its_reading_ends(
    tiny_model_dir, tmp_path, write_jsonl, monkeypatch
):
    def close() -> None:
        template_process().close()
        time.sleep(0.1)  # the reading has a result and has not ended

    monkeypatch.setattr("batchgen.jobs.order.requests.template_process", lambda: SimpleNamespace(close=close))
    template = PromptConfig(template="Say: {{ prompt }}")
    report = job(tiny_model_dir, write_jsonl(ROWS), tmp_path / "o.jsonl", shard="1/2", prompts=template)
    assert report.stats["quantization"]["rows"] == 4


def test_a_quantized_job_resumes(tiny_model_dir, tmp_path, write_jsonl):
    rows = write_jsonl(ROWS)
    job(tiny_model_dir, rows, tmp_path / "whole.jsonl")
    job(tiny_model_dir, rows, tmp_path / "parts.jsonl", limit=3)
    report = job(tiny_model_dir, rows, tmp_path / "parts.jsonl")
    assert report.stats["rows_resumed"] == 3
    assert json_rows(tmp_path / "parts.jsonl") == json_rows(tmp_path / "whole.jsonl")


def test_resuming_without_quantization_is_refused(tiny_model_dir, tmp_path, write_jsonl):
    rows = write_jsonl(ROWS)
    job(tiny_model_dir, rows, tmp_path / "o.jsonl", limit=1)
    with pytest.raises(UsageError, match='quantize was "int8", is "none"'):
        job(tiny_model_dir, rows, tmp_path / "o.jsonl", quantize="none")


def test_plan_and_models_know_the_size_of_the_weights(tiny_model_dir):
    model = ModelConfig(model=str(tiny_model_dir))
    with safe_open(tiny_model_dir / "model.safetensors", framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    numbers = sum(math.prod(shape) for shape in shapes.values())
    packed = [shape for name, shape in shapes.items() if "layers" in name and len(shape) == 2]
    memory = report_model(model).memory
    assert (memory.kept, memory.int8) == (4 * numbers, 4 * numbers + sum(8 * n - 3 * n * k for n, k in packed))
