"""What makes two runs one job."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from batchgen.config import EngineConfig, JobConfig, ModelConfig, PromptConfig
from batchgen.identity import dtype_name, job_settings, model_identity
from batchgen.sampling_params import SamplingParams


def config_of(model: Path | str, **options: object) -> JobConfig:
    return JobConfig(inputs=("x.jsonl",), model=ModelConfig(model=str(model)), **options)  # type: ignore[arg-type]


def settings_of(model: Path, **options: object) -> dict[str, object]:
    text = SimpleNamespace(hf_config=SimpleNamespace(dtype="float32"))
    return job_settings(config_of(model, **options), text, chat=False)  # type: ignore[arg-type]


def copy_of(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def test_a_copy_of_a_model_is_the_same_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    assert model_identity(ModelConfig(model=str(tiny_model_dir))) == model_identity(
        ModelConfig(model=str(copy_of(tiny_model_dir, tmp_path)))
    )


def test_another_config_or_tokenizer_or_weight_file_is_another_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny_model_dir, tmp_path)
    seen = {model_identity(ModelConfig(model=str(copy)))}
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    seen.add(model_identity(ModelConfig(model=str(copy))))
    with (copy / "tokenizer.json").open("a") as f:
        f.write(" ")
    seen.add(model_identity(ModelConfig(model=str(copy))))
    with (copy / "model.safetensors").open("ab") as f:
        f.write(b"\0")
    seen.add(model_identity(ModelConfig(model=str(copy))))
    assert len(seen) == 4


def test_the_weights_themselves_are_not_read(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny_model_dir, tmp_path)
    before = model_identity(ModelConfig(model=str(copy)))
    size = (copy / "model.safetensors").stat().st_size
    with (copy / "model.safetensors").open("r+b") as f:
        f.seek(size - 4)
        f.write(b"abcd")
    assert model_identity(ModelConfig(model=str(copy))) == before
    assert before.startswith(f"{size:,} bytes of weights, digest ")


def test_a_readme_beside_the_model_changes_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny_model_dir, tmp_path)
    before = model_identity(ModelConfig(model=str(copy)))
    (copy / "README.md").write_text("a model")
    assert model_identity(ModelConfig(model=str(copy))) == before


def test_a_hub_model_that_is_not_cached_goes_by_name_and_revision() -> None:
    assert model_identity(ModelConfig(model="nobody/nothing")) == "nobody/nothing at main"
    assert model_identity(ModelConfig(model="nobody/nothing", revision="v2")) == "nobody/nothing at v2"


def test_auto_is_the_dtype_of_the_checkpoint() -> None:
    own = SimpleNamespace(dtype="torch.bfloat16")
    assert dtype_name(ModelConfig(model="m"), own) == "bfloat16"
    assert dtype_name(ModelConfig(model="m", dtype="float16"), own) == "float16"
    assert dtype_name(ModelConfig(model="m"), SimpleNamespace()) == "float32"


def test_prompt_and_sampling_options_are_settings(tiny_model_dir: Path) -> None:
    base = settings_of(tiny_model_dir)
    assert base == settings_of(tiny_model_dir)
    new: dict[str, Any] = {"n": 2, "logprobs": 0, "choices": ("a", "b"), "regex": "a", "json_schema": "{}"}
    others = [
        settings_of(tiny_model_dir, sampling=SamplingParams(max_tokens=3)),
        settings_of(tiny_model_dir, sampling=SamplingParams(stop=("x",))),
        settings_of(tiny_model_dir, prompts=PromptConfig(prefix="p")),
        settings_of(tiny_model_dir, prompts=PromptConfig(template="{{ a }}")),
        settings_of(tiny_model_dir, prompts=PromptConfig(on_long_prompt="truncate-left")),
        settings_of(tiny_model_dir, prompts=PromptConfig(score=True)),
        settings_of(tiny_model_dir, prompts=PromptConfig(completion_column="answer")),
        *(settings_of(tiny_model_dir, sampling=SamplingParams(**{name: value})) for name, value in new.items()),
    ]
    differing = [{name for name in base if base[name] != other[name]} for other in others]
    options = ["max_tokens", "stop", "prefix", "template", "on_long_prompt", "score", "completion_column", *new]
    assert differing == [{option} for option in options]
    assert json.loads(json.dumps(base)) == base


def test_what_does_not_change_results_is_no_setting(tiny_model_dir: Path) -> None:
    free = settings_of(tiny_model_dir, window=3, limit=2, order="done", keep=(), flush_every=0.0, token_ids=True)
    assert free == settings_of(tiny_model_dir)
    engine = EngineConfig(policy="fifo", row_timeout=1.0, host_kv_memory="1GiB", max_kv_read=9, batch_size=2)
    assert settings_of(tiny_model_dir, engine=engine) == free
    assert settings_of(tiny_model_dir, prompts=PromptConfig(priority_column="p")) == free
    text = SimpleNamespace(hf_config=SimpleNamespace(dtype="float32"))
    spread = JobConfig(inputs=("x.jsonl",), model=ModelConfig(model=str(tiny_model_dir), device_map="auto"))
    assert job_settings(spread, text, chat=False) == free  # type: ignore[arg-type]


def test_a_long_text_is_told_by_its_digest(tiny_model_dir: Path) -> None:
    one = settings_of(tiny_model_dir, prompts=PromptConfig(prefix="a" * 1000))["prefix"]
    two = settings_of(tiny_model_dir, prompts=PromptConfig(prefix="a" * 999 + "b"))["prefix"]
    assert isinstance(one, str)
    assert one.startswith("a" * 40 + "… (1000 characters, digest ")
    assert one != two


def test_a_long_regex_or_schema_is_told_by_its_digest(tiny_model_dir: Path) -> None:
    for name in ("regex", "json_schema"):
        one, two = (
            settings_of(tiny_model_dir, sampling=SamplingParams(**{name: "a" * 999 + end}))[name] for end in "ab"
        )
        assert isinstance(one, str)
        assert one.startswith("a" * 40 + "… (1000 characters, digest ")
        assert one != two
