"""What makes two runs one job."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from batchgen.config import EngineConfig, JobConfig, ModelConfig, PromptConfig
from batchgen.jobs.identity import _sampled, command_digest, dtype_name, job_settings, local_identity, model_identity
from batchgen.sampling_params import SamplingParams


def settings_of(model: Path | ModelConfig, **options: Any) -> dict[str, Any]:
    config = JobConfig(inputs=("x.jsonl",), model=model, **options)
    tokenizer = SimpleNamespace(hf_config=SimpleNamespace(dtype="float32"), head=None)
    return job_settings(config, tokenizer, SimpleNamespace(sampling=config.sampling, chat=False, date=None), None)


def identity_of(model: Path, **options: Any) -> dict[str, Any]:
    return model_identity(ModelConfig(model=str(model), **options))


def write_checkpoint(folder: Path, tensors: int, values: int, changed: int | None = None) -> Path:
    """Writes a safetensors file of random float32 tensors, with other values in tensor `changed`. Returns its path."""
    numbers = np.random.default_rng(0)
    arrays = {f"layer.{i:03d}": numbers.standard_normal(values, dtype=np.float32) for i in range(tensors)}
    if changed is not None:
        arrays[f"layer.{changed:03d}"] += 0.01
    save_file(arrays, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    ("name", "at", "options", "counts"),
    [
        *((f"{name}.json", None, {}, True) for name in ("config", "tokenizer", "tokenizer_config", "generation_config")),
        ("chat_template.jinja", None, {}, True),
        ("model.safetensors", 1 / 3, {}, True),
        ("model.safetensors", 1, {}, True),
        *((name, None, {}, False) for name in ("README.md", "notes.txt", "trainer_state.json", "model.gguf", "pytorch_model.bin")),
        ("modeling_x.py", None, {}, False),
        ("modeling_x.py", None, {"trust_remote_code": True}, True),
    ],
)  # fmt: skip
def test_a_model_is_another_if_a_file_that_is_read_changes_and_its_code_counts_only_if_it_may_run(
    name, at, options, counts, tiny_model_dir, tmp_path
):
    """`at`: the place of four bytes that are overwritten; without it the file gets a space, and is made if there is none."""
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))
    before = identity_of(model, **options)
    content = (model / name).read_bytes() if (model / name).exists() else b""
    if at is None:
        content += b" "
    else:
        place = int(at * (len(content) - 4))
        content = content[:place] + b"abcd" + content[place + 4 :]
    (model / name).write_bytes(content)
    after = identity_of(model, **options)
    differ = {entry for entry in before.keys() | after.keys() if before.get(entry) != after.get(entry)}
    assert differ == ({f"model file {name}"} if counts else set())


@pytest.mark.parametrize("changed", [0, 7, 119])
def test_one_changed_tensor_of_a_large_file_is_another_model(tmp_path, changed):
    first, second, third = (
        (write_checkpoint(tmp_path, 120, 50_000, of).stat().st_size, identity_of(tmp_path))
        for of in (None, changed, None)
    )
    assert first[0] == second[0] > 16 << 20
    assert first[1] != second[1]
    assert first == third


def test_only_a_few_megabytes_of_a_large_file_are_read(tmp_path):
    path = write_checkpoint(tmp_path, 500, 12_000)
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
        assert len(identity_of(tmp_path)) == 1


def test_a_hub_model_that_is_not_cached_is_identified_by_name_and_revision():
    assert identity_of(Path("nobody/nothing")) == {"model": "nobody/nothing at main"}
    assert identity_of(Path("nobody/nothing"), revision="v2") == {"model": "nobody/nothing at v2"}


def test_a_finished_job_of_a_hub_model_is_recognised_before_its_tokenizer_is_loaded(
    cli, write_jsonl, tiny_model_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "hub" / "models--org--name"
    shutil.copytree(tiny_model_dir, repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    command = ("run", write_jsonl([{"prompt": "a"}]), "-m", "org/name", "--max-tokens", "2", "-o", tmp_path / "o.jsonl")
    assert cli(*command).code == 0
    monkeypatch.setattr("batchgen.job_setup.load_tokenizer", None)
    assert "is complete (1 row): nothing to do" in cli(*command).err


def test_the_hub_need_not_be_asked_for_a_commit(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for revision, known in ((None, False), ("v2", False), ("0123abcd" * 5, True)):
        model = ModelConfig(model="nobody/nothing", revision=revision)
        assert local_identity(model) == ({"model": f"nobody/nothing at {revision}"} if known else None)


def test_dtype_auto_is_identified_as_that_of_the_checkpoint():
    own = SimpleNamespace(dtype="torch.bfloat16")
    assert dtype_name(ModelConfig(model="m"), own) == "bfloat16"
    assert dtype_name(ModelConfig(model="m", dtype="float16"), own) == "float16"
    assert dtype_name(ModelConfig(model="m"), SimpleNamespace()) == "float32"
    speaks = SimpleNamespace(thinker_config=SimpleNamespace(text_config=own))
    assert dtype_name(ModelConfig(model="m"), speaks) == "bfloat16"


SETTINGS: list[tuple[str, type, Any]] = [
    ("max_tokens", SamplingParams, 3), ("stop", SamplingParams, ("x",)), ("n", SamplingParams, 2), ("logprobs", SamplingParams, 0),
    ("choices", SamplingParams, ("a", "b")), ("regex", SamplingParams, "a"), ("json_schema", SamplingParams, "{}"), ("prefix", PromptConfig, "p"),
    ("template", PromptConfig, "{{ a }}"), ("on_long_prompt", PromptConfig, "truncate-left"), ("score", PromptConfig, True),
    ("completion_column", PromptConfig, "answer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "value"), SETTINGS)
def test_prompt_and_sampling_options_are_settings(name, kind, value, tiny_model_dir):
    base = settings_of(tiny_model_dir)
    place = "sampling" if kind is SamplingParams else "prompts"
    other = settings_of(tiny_model_dir, **{place: kind(**{name: value})})
    assert {setting for setting in base if base[setting] != other[setting]} == {name}
    assert json.loads(json.dumps(base)) == base == settings_of(tiny_model_dir)


def test_options_that_do_not_change_results_are_not_settings(tiny_model_dir):
    free = settings_of(tiny_model_dir, window=3, limit=2, order="done", keep=(), flush_every=0.0, token_ids=True)
    assert free == settings_of(tiny_model_dir)
    engine = EngineConfig(policy="fifo", row_timeout=1.0, batch_size=2)
    assert settings_of(tiny_model_dir, engine=engine) == free
    assert settings_of(tiny_model_dir, prompts=PromptConfig(priority_column="p")) == free
    assert settings_of(ModelConfig(model=str(tiny_model_dir), device_map="auto")) == free


def test_a_command_is_the_same_wherever_its_model_runs_and_another_in_another_type():
    def digest(**options: Any) -> str:
        return command_digest(JobConfig(inputs=("x.jsonl",), model=ModelConfig(model="m", **options)), {})

    assert digest(ray="auto", workers=2, cpus_per_worker=1) == digest(device="cuda:0,1") == digest()
    assert digest(dtype="float32") != digest()


def test_a_long_text_is_stored_as_its_digest(tiny_model_dir):
    one = settings_of(tiny_model_dir, prompts=PromptConfig(prefix="a" * 1000))["prefix"]
    two = settings_of(tiny_model_dir, prompts=PromptConfig(prefix="a" * 999 + "b"))["prefix"]
    assert isinstance(one, str)
    assert one.startswith("a" * 40 + "… (1000 characters, digest ")
    assert one != two
