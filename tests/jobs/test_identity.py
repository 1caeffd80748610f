"""What makes two runs one job."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from batchgen.config import EngineConfig, JobConfig, ModelConfig, PromptConfig
from batchgen.jobs.identity import _sampled, dtype_name, folder_identity, job_settings, model_identity
from batchgen.sampling_params import SamplingParams

HF_CONFIG = SimpleNamespace(dtype="float32")


def config_of(model: Path | str, **options: object) -> JobConfig:
    return JobConfig(inputs=("x.jsonl",), model=model, **options)  # type: ignore[arg-type]


def settings_of(model: Path, **options: object) -> dict[str, object]:
    return job_settings(config_of(model, **options), HF_CONFIG, chat=False)


def copy_of(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def identity_of(model: Path, **options: Any) -> dict[str, Any]:
    return model_identity(ModelConfig(model=str(model), **options))


def changed_files(model: Path, change: Callable[[Path], object], **options: Any) -> set[str]:
    """Returns the entries of a model's identity that differ after `change`."""
    before = identity_of(model, **options)
    change(model)
    after = identity_of(model, **options)
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def write_checkpoint(path: Path, tensors: int, values: int, seed: int = 0, changed: int | None = None) -> None:
    """Writes a safetensors file of random float32 tensors, with other values in tensor `changed`."""
    numbers = np.random.default_rng(seed)
    arrays = {f"layer.{i:03d}": numbers.standard_normal(values, dtype=np.float32) for i in range(tensors)}
    if changed is not None:
        arrays[f"layer.{changed:03d}"] += 0.01
    save_file(arrays, path)


def test_a_change_of_any_file_that_is_read_names_the_file(tiny_model_dir, tmp_path):
    copy = copy_of(tiny_model_dir, tmp_path)
    size = (copy / "model.safetensors").stat().st_size
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert changed_files(copy, lambda m, name=name: append(m / name, " ")) == {f"model file {name}"}
    for at in (size // 3, size - 4):
        change = lambda m, at=at: overwrite(m / "model.safetensors", at, b"abcd")  # noqa: E731
        assert changed_files(copy, change) == {"model file model.safetensors"}
    template = lambda m: (m / "chat_template.jinja").write_text("{{ messages }}")  # noqa: E731
    assert changed_files(copy, template) == {"model file chat_template.jinja"}


def test_other_files_of_a_models_folder_do_not_matter_and_its_code_only_if_it_may_run(tiny_model_dir, tmp_path):
    def add_files(model: Path) -> None:
        for name in (
            "README.md",
            "notes.txt",
            "trainer_state.json",
            "model.gguf",
            "pytorch_model.bin",
            "modeling_x.py",
        ):
            (model / name).write_text("not read")

    copy = copy_of(tiny_model_dir, tmp_path)
    assert changed_files(copy, add_files) == set()
    code = lambda m: (m / "modeling_x.py").write_text("x")  # noqa: E731
    assert changed_files(copy, code, trust_remote_code=True) == {"model file modeling_x.py"}


@pytest.mark.parametrize("changed", [0, 7, 119])
def test_one_changed_tensor_of_a_large_file_is_another_model(tmp_path, changed):
    files = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    write_checkpoint(files[0], 120, 50_000)
    write_checkpoint(files[1], 120, 50_000, changed=changed)
    assert files[0].stat().st_size == files[1].stat().st_size > 16 << 20
    one, two = (folder_identity_of_file(file) for file in files)
    assert one != two
    assert one == folder_identity_of_file(files[0])


def folder_identity_of_file(file: Path) -> Any:
    folder = file.with_suffix("")
    folder.mkdir(exist_ok=True)
    shutil.copyfile(file, folder / "model.safetensors")
    return folder_identity(folder)


def test_only_a_few_megabytes_of_a_large_file_are_read(tmp_path):
    path = tmp_path / "model.safetensors"
    write_checkpoint(path, 500, 12_000)
    with path.open("rb") as file:
        pieces = _sampled(file, path.stat().st_size)
    assert sum(length for _, length in pieces) < (1 << 20) + 100_000
    assert 200 < len(pieces) <= 257
    assert max(start + length for start, length in pieces) == path.stat().st_size


def test_a_damaged_header_does_not_prevent_an_identity(tmp_path):
    for begin in (b"", b"\xff" * 8, (5).to_bytes(8, "little") + b"[1,2]"):
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write(begin)
            file.truncate((16 << 20) + 1)
        assert len(folder_identity(tmp_path)) == 1


def test_a_hub_model_that_is_not_cached_is_identified_by_name_and_revision():
    assert identity_of(Path("nobody/nothing")) == {"model": "nobody/nothing at main"}
    assert identity_of(Path("nobody/nothing"), revision="v2") == {"model": "nobody/nothing at v2"}


def test_dtype_auto_is_identified_as_that_of_the_checkpoint():
    own = SimpleNamespace(dtype="torch.bfloat16")
    assert dtype_name(ModelConfig(model="m"), own) == "bfloat16"
    assert dtype_name(ModelConfig(model="m", dtype="float16"), own) == "float16"
    assert dtype_name(ModelConfig(model="m"), SimpleNamespace()) == "float32"
    speaks = SimpleNamespace(thinker_config=SimpleNamespace(text_config=own))
    assert dtype_name(ModelConfig(model="m"), speaks) == "bfloat16"


def test_prompt_and_sampling_options_are_settings(tiny_model_dir):
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


def test_options_that_do_not_change_results_are_not_settings(tiny_model_dir):
    free = settings_of(tiny_model_dir, window=3, limit=2, order="done", keep=(), flush_every=0.0, token_ids=True)
    assert free == settings_of(tiny_model_dir)
    engine = EngineConfig(policy="fifo", row_timeout=1.0, host_kv_memory="1GiB", batch_size=2)
    assert settings_of(tiny_model_dir, engine=engine) == free
    assert settings_of(tiny_model_dir, prompts=PromptConfig(priority_column="p")) == free
    spread = JobConfig(inputs=("x.jsonl",), model=ModelConfig(model=str(tiny_model_dir), device_map="auto"))
    assert job_settings(spread, HF_CONFIG, chat=False) == free


def test_a_long_text_is_stored_as_its_digest(tiny_model_dir):
    one = settings_of(tiny_model_dir, prompts=PromptConfig(prefix="a" * 1000))["prefix"]
    two = settings_of(tiny_model_dir, prompts=PromptConfig(prefix="a" * 999 + "b"))["prefix"]
    assert isinstance(one, str)
    assert one.startswith("a" * 40 + "… (1000 characters, digest ")
    assert one != two
