"""Weights of 16 bits in a model that is computed in float32: they stay in 16 bits from the file on."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file

from batchgen.config import ModelConfig
from batchgen.kernels.build import NoKernels
from batchgen.kernels.codes import IN_16_BITS, PackedTensor
from batchgen.kernels.ops import plain_weight, take_wide_rows
from batchgen.model import loader
from batchgen.model.vision import load_encoder
from batchgen.model.weights import packed
from batchgen.model.weights.packed import read_checkpoint
from batchgen.model.weights.streamed import bytes_held
from batchgen.prompts import load_tokenizer
from support.models import build, engine_for, load_folder, make_requests, random_tokens, run
from support.params import slow_but
from support.quantized import make
from support.vision import make as make_seeing

PROMPTS = [random_tokens(random.Random(0), size) for size in (3, 17, 40)]
NAMES = ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "gpt2", "mamba2", "gemma3n_text"]


@pytest.fixture(autouse=True)
def _even_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "SMALL", 1)


def saved(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    build(name, **changes).to(dtype).save_pretrained(folder)
    return folder


def results(model: Any) -> list[Any]:
    """The tokens that a model writes, and all log-probabilities, to the last bit."""
    found = run(engine_for(model), make_requests(PROMPTS, [5] * 3, logprobs=3))
    return [(r.token_ids, r.completions[0].logprobs) for r in found]


def as_float32(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The model as transformers loads it: all weights in float32, of which our kernels then pack some."""
    with monkeypatch.context() as changes:
        changes.setattr(packed, "SMALL", 1 << 40)
        return load_folder(folder, dtype="float32", **options)


FORMS = [(False, torch.bfloat16), (True, torch.float16), (False, torch.float16), (True, torch.bfloat16)]
"""Whether the head is tied, and the dtype of the file."""
QUICK = [
    (name, quantize, *FORMS[place % 4 ^ (quantize == "int8")])
    for place, name in enumerate(NAMES)
    for quantize in ("none", "int8")
]
"""Each model has both kinds of heads and both dtypes."""


@pytest.mark.parametrize(
    ("name", "quantize", "tied", "dtype"),
    slow_but(QUICK, [(name, quantize, *form) for name in NAMES for quantize in ("none", "int8") for form in FORMS]),
    ids=str,
)
@pytest.mark.usefixtures("compiled")
def test_results_are_those_of_weights_in_float32_to_the_last_bit(name, tied, quantize, dtype, tmp_path, monkeypatch):
    folder = saved(tmp_path, name, dtype, tie_word_embeddings=tied)
    held = load_folder(folder, dtype="float32", quantize=quantize)
    expected = as_float32(folder, monkeypatch, quantize=quantize)
    assert held.dtype == expected.dtype == torch.float32
    assert results(held) == results(expected)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.usefixtures("compiled")
def test_a_model_takes_what_its_file_takes(name, tied, tmp_path):
    """A tied head lies in memory as the kernels need it; the embedding's rows are read from the file."""
    folder = saved(
        tmp_path, name, tie_word_embeddings=tied, hidden_size=256, intermediate_size=1024, moe_intermediate_size=256
    )
    model = load_folder(folder, dtype="float32")
    table = model.module.get_input_embeddings().weight
    assert isinstance(table, PackedTensor)
    file = (folder / "model.safetensors").stat().st_size
    held = bytes_held(model.module) - tied * table.packed_bytes
    assert held < 1.25 * file  # with a table of cos and sin, and rows that fill panels


def missing() -> Any:
    raise NoKernels("there is no C++ compiler")


@pytest.mark.parametrize("kind", ["16 bits", "awq"])
def test_without_kernels_weights_are_in_float32(kind, tmp_path, monkeypatch):
    """Plain torch would unpack them in each step."""
    made = build("llama").bfloat16()
    made.save_pretrained(tmp_path) if kind == "16 bits" else make(kind, tmp_path, made)
    expected = results(load_folder(tmp_path, dtype="float32", compile="off"))
    monkeypatch.setattr(loader, "library", missing)
    model = load_folder(tmp_path, dtype="float32")
    assert not any(isinstance(weight, PackedTensor) for weight in model.module.parameters())
    assert results(model) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("compiled")
def test_rows_of_16_bits_are_those_of_the_table_in_float32(dtype):
    table = torch.randn(300, 34).to(dtype)
    table[3, 2], table[5, 1], table[7, 0] = -0.0, torch.inf, 2.0**-24
    indices = torch.randint(300, (2, 700))
    assert torch.equal(take_wide_rows(table, indices), table.float()[indices])
    with pytest.raises(IndexError, match="300 rows"):
        take_wide_rows(table, torch.tensor([300]))


def test_only_the_files_that_transformers_reads_are_downloaded(tmp_path, monkeypatch):
    """Some repositories have all weights twice, in files of other names."""
    asked: list[Any] = []
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}')

    def download(name: str, file: str, revision: str | None) -> str:
        asked.append(file)
        if file == "model.safetensors":
            raise EntryNotFoundError(file)
        return str(index)

    def download_some(name: str, revision: str | None, allow_patterns: list[str]) -> None:
        asked.append(allow_patterns)
        for file in allow_patterns:
            save_file({file: torch.zeros(2, 2, dtype=torch.bfloat16)}, tmp_path / file)
        monkeypatch.setattr(packed, "weight_files", lambda config: [tmp_path / file for file in allow_patterns])

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download_some)
    found = read_checkpoint(ModelConfig(model="some/model"), SimpleNamespace(), halves=True) or {}
    assert asked == ["model.safetensors", index.name, ["1.safetensors", "2.safetensors"]]
    assert sorted(found) == ["1.safetensors", "2.safetensors"]
    held = found["1.safetensors"][...]
    assert (held.coding, held.dtype, held.shape) == (IN_16_BITS, torch.float32, (2, 2))


@pytest.mark.parametrize("name", slow_but(["qwen2_vl"], ["qwen2_vl", "gemma3", "mistral3", "smolvlm"]))
def test_the_linear_layers_of_an_image_encoder_stay_in_16_bits(name, tmp_path):
    make_seeing(name, tmp_path).model.bfloat16().save_pretrained(tmp_path)
    config = ModelConfig(model=str(tmp_path))
    tokenizer = load_tokenizer(config)
    whole, held = (
        dict(load_encoder(config, tokenizer, torch.float32, halves=halves).named_parameters())
        for halves in (False, True)
    )
    assert whole.keys() == held.keys()
    assert any(isinstance(weight, PackedTensor) for weight in held.values())
    for key, weight in held.items():
        assert torch.equal(plain_weight(weight), whole[key]), key


@pytest.mark.usefixtures("compiled")
def test_a_weight_that_transformers_turns_round_lies_in_memory_as_transformers_leaves_it(tmp_path, monkeypatch):
    """That of ERNIE's router: our kernels multiply only rows of adjacent numbers."""
    make_seeing("ernie4_5_vl_moe", tmp_path).model.bfloat16().save_pretrained(tmp_path)
    held = load_folder(tmp_path, dtype="float32").module
    routers = [part.weight for part in held.modules() if type(part).__name__.endswith("TopKRouter")]
    assert routers
    assert all(weight.is_contiguous() for weight in routers)
    assert results(load_folder(tmp_path, dtype="float32")) == results(as_float32(tmp_path, monkeypatch))
