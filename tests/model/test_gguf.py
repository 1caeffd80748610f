"""GGUF files: configuration, tokenizer and weights come from one file, and the output is that of transformers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchgen import LLM, JobConfig, SamplingParams, run_job
from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.jobs.identity import model_identity
from batchgen.kernels import int8
from batchgen.kernels.coded import can_unpack
from batchgen.kernels.codes import PackedTensor
from batchgen.kernels.int8 import are_multiplied
from batchgen.model.weights.gguf import TYPES, _read_weight, from_blocks
from batchgen.model.weights.gguf_families import arranged
from batchgen.model.weights.weight_size import WHOLE_GGUF
from batchgen.model_files import gguf_file
from batchgen.prompts import load_tokenizer
from batchgen.prompts.gguf_families import FAMILIES
from batchgen.prompts.gguf_file import GgufTensor
from support.gguf import random_blocks, save_tiny_llama_with_merges, write_gguf, write_vocabulary
from support.params import in_turn, slow_but

pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of each other
PROMPTS = ["the same beginning, and the end", "the same beginning", "else"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny chat model."""
    return save_tiny_llama_with_merges(tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="module", params=["Q8_0", pytest.param("Q4_0", marks=pytest.mark.slow), "F16"])
def model(
    request: pytest.FixtureRequest, original: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A GGUF file, and a transformers folder with exactly the same weights."""
    from safetensors.torch import save_file

    file = tmp_path_factory.mktemp("gguf") / f"tiny.{request.param}.gguf"
    exact = write_gguf(original, file, request.param)
    folder = tmp_path_factory.mktemp("exact")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text((original / name).read_text())
    save_file(exact, folder / "model.safetensors", metadata={"format": "pt"})
    return file, folder


@torch.inference_mode()
def test_the_output_is_that_of_transformers_on_the_dequantized_weights(model):
    file, folder = model
    params = SamplingParams(max_tokens=16, temperature=0)
    llm = LLM(file, dtype="float32")
    got = llm.generate(PROMPTS, params)
    want = LLM(folder, dtype="float32").generate(PROMPTS, params)
    assert [(r.token_ids, r.prompt_tokens, r.text) for r in got] == [
        (r.token_ids, r.prompt_tokens, r.text) for r in want
    ]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": PROMPTS[0]}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    tokens = reference.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert list(got[0].token_ids) == tokens


def test_a_16_bit_file_runs_in_its_own_dtype_and_others_in_bfloat16(model):
    hf_config = load_tokenizer(ModelConfig(model=model[0])).hf_config
    assert str(hf_config.dtype).removeprefix("torch.") == ("float16" if "F16" in model[0].name else "bfloat16")


def test_a_job_runs_on_a_folder_with_a_gguf_file_and_recognizes_it_again(model, tmp_path):
    file, _ = model
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / file.name).write_bytes(file.read_bytes())
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "the"}) + "\n")
    config = JobConfig(inputs=tmp_path / "in.jsonl", model=str(folder), sampling={"max_tokens": 3})
    assert run_job(config).exit_code == 0
    assert run_job(config).already_finished
    assert gguf_file(ModelConfig(model=folder)) == folder / file.name
    assert list(model_identity(ModelConfig(model=folder))) == [f"model file {file.name}"]
    assert model_identity(ModelConfig(model=folder)) == model_identity(ModelConfig(model=file))
    (folder / "config.json").write_text("{}")  # as many repositories have it
    assert run_job(config).already_finished
    (folder / "model.safetensors").touch()
    assert gguf_file(ModelConfig(model=folder)) is None


def test_a_projector_is_refused_and_passed_over_beside_a_language_model(model, tmp_path):
    projector = write_vocabulary(tmp_path / "a-mmproj.gguf", ["a"], architecture="clip")
    for path in (projector, tmp_path):
        with pytest.raises(ModelError) as e:
            load_tokenizer(ModelConfig(model=path))
        assert str(e.value) == (
            f"{projector} is a projector (mmproj), which makes features of images or sound for a language model; "
            "give the file of the language model"
        )
    text = tmp_path / model[0].name
    text.symlink_to(model[0])
    assert gguf_file(ModelConfig(model=tmp_path)) == text
    assert load_tokenizer(ModelConfig(model=tmp_path)).hf_config.model_type == "llama"


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("batchgen.model_files.find_spec", lambda name: None)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(30))
    with pytest.raises(ModelError, match=r"needs the package gguf; pip install 'batchgen-llm\[quantized\]'"):
        load_tokenizer(ModelConfig(model=file))


@pytest.mark.parametrize(("kind", "size"), slow_but(in_turn(TYPES, (128, 32, 192)), product(TYPES, (128, 32, 192))))
def test_a_weight_whose_columns_are_those_of_heads_in_another_order_stays_packed(kind, size):
    """`size`: columns of a head. Heads of 32 would share bytes of fine scales."""
    data, family, heads = random_blocks(kind, (8, 768)), FAMILIES["qwen35"], 768 // size
    config = SimpleNamespace(linear_num_key_heads=heads // 2, linear_num_value_heads=heads, linear_value_head_dim=size)
    tensors = [GgufTensor("blk.0.ssm_out.weight", kind, (8, 768), 0, data.nbytes)]
    in_file_order = from_blocks(torch.from_numpy(data), kind)
    weight = _read_weight(data.reshape(-1), tensors, family, config, (8, 768), halves=False)
    assert isinstance(weight, PackedTensor) == (size > 32)
    if isinstance(weight, PackedTensor):
        assert can_unpack(weight) == can_unpack(in_file_order)
        assert weight.packed_bytes <= 1.3 * in_file_order.packed_bytes
        weight = weight.unpacked()
    assert torch.equal(weight, torch.from_numpy(arranged(family, config, tensors, [in_file_order.unpacked().numpy()])))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_the_numbers_of_packed_blocks_are_those_of_the_package_gguf_to_the_last_bit(kind, monkeypatch):
    from gguf import GGMLQuantizationType, dequantize

    data = random_blocks(kind, (8, 1024))
    packed = from_blocks(torch.from_numpy(data.copy()), kind)
    assert isinstance(packed, PackedTensor)
    expected = torch.from_numpy(dequantize(data, GGMLQuantizationType[kind]).copy())
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(packed.to(dtype).unpacked().view(torch.int16), expected.to(dtype).view(torch.int16))
    monkeypatch.setattr(int8, "least_coded_group", lambda: 32)
    assert are_multiplied(SimpleNamespace(coding=packed.coding, parts=packed.parts)) == (kind in WHOLE_GGUF)
    if kind != "TQ1_0":  # five numbers in a byte become four
        grid = packed.parts.get("grid", torch.empty(0))
        assert packed.packed_bytes - grid.nbytes <= 1.1 * data.nbytes
