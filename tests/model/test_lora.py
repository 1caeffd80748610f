"""`--lora`: the output is that of peft's model with the adapter beside the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.jobs.identity import model_identity
from batchgen.kernels.memory import mapped_files
from batchgen.model.weights import packed
from batchgen.model.weights.streamed import decoder_layers, tensors_in
from batchgen.model_files import adapter_folder
from support.late import late
from support.models import build, engine_for, generate_all, kernels, load_folder, tokens_of
from support.params import FULL, slow_but
from support.quantized import dequantized, make
from support.wrappers import text_model

peft = late("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns of transformers and torch
PROMPTS = [list(range(3, 60)), [*range(3, 50), 7, 8, 9], [11, 12]]
LENGTHS = [12, 5, 20] if FULL else [5, 3, 9]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "all layers": {"target_modules": "all-linear"},
    "embeddings": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [3, 7, 9]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
}
TIED = ("head", "embedding", "embeddings", "tokens", "tied")
"""Kinds of adapters whose layers may share a weight."""


def write(model: Any, folder: Path, **options: Any) -> Any:
    """Saves a model and a random adapter. Returns peft's model."""
    model.save_pretrained(folder / "model")
    return add_to(model, folder, **options)


def add_to(model: Any, folder: Path, **options: Any) -> Any:
    """Saves a random adapter. Returns peft's model."""
    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | options))
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if any(part in name for part in ("lora", "modules_to_save", "trainable_tokens")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(folder / "adapter")
    return adapted.eval()


def rewrite(folder: Path, kept: Callable[[str], str]) -> None:
    """Gives the adapter's tensors other names; those whose name becomes empty are gone."""
    path = folder / "adapter" / "adapter_model.safetensors"
    save_file({kept(name): tensor for name, tensor in load_file(path).items() if kept(name)}, path, {"format": "pt"})


def load(folder: Path, **options: Any) -> Any:
    own = {"lora": str(folder / "adapter"), "dtype": "float32", "compile": "off"}
    return load_folder(folder / "model", **own | options)


def tokens(model: Any) -> list[list[int]]:
    return tokens_of(engine_for(model), PROMPTS, LENGTHS)


@pytest.mark.parametrize("kind", slow_but(("plain", "DoRA", "head tied"), (*KINDS, *(f"{kind} tied" for kind in TIED))))
def test_the_output_is_that_of_peft(kind, tmp_path):
    settings = {"tie_word_embeddings": kind.endswith(" tied")}
    plain = generate_all(build("llama", **settings), PROMPTS, LENGTHS)
    adapted = write(build("llama", **settings), tmp_path, **KINDS[kind.removesuffix(" tied")])
    expected = generate_all(adapted, PROMPTS, LENGTHS)
    model = load(tmp_path)
    assert tokens(model) == expected != plain
    assert f"the adapter {tmp_path / 'adapter'} was merged into the weights" in model.notes
    ids = torch.tensor(PROMPTS[:1])
    model.module.set_attn_implementation("eager")
    with torch.inference_mode():
        want, got = adapted(ids).logits, model.module(ids).logits
    assert float((want - got).abs().max()) < 1e-5 * float(want.abs().max())


@pytest.mark.parametrize("options", [{}, {"compile": "auto"}], ids=["plain", "kernels"])
def test_layers_that_share_a_weight_have_adapters_of_their_own(options, tmp_path):
    """In Zamba 2, layers share all weights of their attention."""
    model = build("zamba2", tie_word_embeddings=True).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    adapted = add_to(model.float(), tmp_path, target_modules=["q_proj", "o_proj"])
    assert tokens(load(tmp_path, **options)) == generate_all(adapted, PROMPTS, LENGTHS)


def test_a_weight_that_layers_share_is_not_changed_by_an_adapter_of_another_kind(tmp_path):
    model = build("zamba2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    add_to(model, tmp_path, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(ModelError, match="cannot be merged: it changes a weight that several layers share"):
        load(tmp_path)


def test_an_adapter_of_a_multimodal_checkpoint_is_merged_into_its_language_model(tmp_path):
    adapted = write(text_model("gemma3"), tmp_path)
    expected = generate_all(adapted, PROMPTS, LENGTHS)
    assert tokens(load(tmp_path)) == expected
    # With older names, which peft converts, too.
    rewrite(tmp_path, lambda name: name.replace(".model.language_model.layers.", ".language_model.model.layers."))
    assert tokens(load(tmp_path)) == expected


PACKED = ("awq", "gptq in order", "bitsandbytes nf4", "fp8", "mlx", "awq experts", "mlx hybrid")


@pytest.fixture
def needs_kernels() -> None:
    if kernels() is None:
        pytest.skip("plain torch reads plain weights")


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize(
    ("name", "kind"),
    slow_but(
        (
            ("awq", "all layers"),
            ("awq experts", "all layers"),
            ("mlx", "DoRA"),
            ("awq", "PiSSA"),
            ("fp8", "embeddings"),
        ),
        [(name, kind) for name in PACKED for kind in ("plain", "all layers", "DoRA", "PiSSA", "embeddings", "head")],
    ),
)
def test_packed_layers_stay_packed_beside_an_adapter(name, kind, tmp_path):
    make(name, tmp_path / "model")
    expected = generate_all(add_to(dequantized(name, tmp_path / "model"), tmp_path, **KINDS[kind]), PROMPTS, LENGTHS)
    for options in ({"compile": "off"}, {"compile": "auto"}, {"compile": "auto", "weights": "streamed"}):
        model = load(tmp_path, **options)
        assert tokens(model) == expected
        adapted = [part for part in model.module.modules() if getattr(part, "adapter", None) is not None]
        # Without kernels, what fits is unpacked.
        assert bool(adapted) == (kind not in ("DoRA", "PiSSA") and options["compile"] == "auto")
        assert bool(adapted) == any("runs beside the packed weights" in note for note in model.notes)
        assert all(part.codes is not None for part in adapted)


@pytest.mark.usefixtures("needs_kernels")
def test_an_adapter_with_a_bias_and_an_odd_rank_runs_beside_layers_without_a_bias(tmp_path):
    make("awq", tmp_path / "model")
    options = {"target_modules": "all-linear", "lora_bias": True, "r": 3}
    expected = generate_all(add_to(dequantized("awq", tmp_path / "model"), tmp_path, **options), PROMPTS, LENGTHS)
    assert tokens(load(tmp_path, compile="auto")) == expected


@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize(
    "kind",
    slow_but(
        ("all layers", "tokens"), ("plain", "all layers", "DoRA", "head tied", "embedding", "tokens", "tokens tied")
    ),
)
def test_layers_of_16_bits_stay_so_beside_an_adapter(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "SMALL", 1)  # the embedding, too
    tied, folder = kind.endswith(" tied"), tmp_path / "model"
    # Beside narrower layers, panels of an adapter's few columns take more than 16 bits save.
    settings = {"tie_word_embeddings": tied, "hidden_size": 256, "intermediate_size": 256}
    build("llama", **settings).bfloat16().save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = generate_all(add_to(base, tmp_path, **KINDS[kind.removesuffix(" tied")]), PROMPTS, LENGTHS)
    model = load(tmp_path, compile="auto")
    assert tokens(model) == expected
    build("llama", **settings).save_pretrained(folder)
    in_32_bits = load(tmp_path, compile="auto").weight_bytes
    assert model.weight_bytes < in_32_bits or kind == "DoRA"


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as e:
        load(folder, **options)
    return str(e.value)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path):
    write(build("llama"), tmp_path)
    shutil.rmtree(tmp_path / "model")
    build("llama", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    assert "does not fit the model: the model has no place for 4 of its 8 tensors" in refusal(tmp_path)
    shutil.rmtree(tmp_path / "model")
    build("llama", hidden_size=32).save_pretrained(tmp_path / "model")
    assert "cannot be merged: " in refusal(tmp_path)


def test_an_adapter_of_separate_experts_is_merged_into_a_joint_tensor(tmp_path):
    """Older adapters name the modules that transformers 4 had for each expert."""
    model = build("mixtral")
    model.save_pretrained(tmp_path / "model")
    torch.manual_seed(1)
    adapter, merged = dict[str, Any](), dict[str, Any]()

    def adapted(name: str, weight: torch.Tensor) -> torch.Tensor:
        a, b = torch.randn(4, weight.shape[1]) * 0.1, torch.randn(weight.shape[0], 4) * 0.1
        adapter[f"base_model.model.{name}.lora_A.weight"], adapter[f"base_model.model.{name}.lora_B.weight"] = a, b
        return weight + 2 * b @ a

    for name, weights in model.state_dict().items():
        parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.get(name.rpartition(".")[2], ())
        if parts:
            place = name.rpartition(".")[0].replace(".mlp.", ".block_sparse_moe.")
            experts = [zip(parts, weight.chunk(len(parts)), strict=True) for weight in weights]
            changed = [[adapted(f"{place}.{i}.{w}", half) for w, half in expert] for i, expert in enumerate(experts)]
            merged[name] = torch.stack([torch.cat(halves) for halves in changed])
    model.load_state_dict(merged, strict=False)
    expected = generate_all(model, PROMPTS, LENGTHS)
    peft.LoraConfig(r=4, lora_alpha=8, target_modules=["w1", "w2", "w3"]).save_pretrained(tmp_path / "adapter")
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    assert len(merged) == 4
    assert tokens(load(tmp_path)) == expected


def test_an_adapter_with_older_names_of_multimodal_models_is_refused_with_the_reason(tmp_path):
    write(text_model("qwen2_5_vl"), tmp_path)
    rewrite(tmp_path, lambda name: name.replace("model.language_model.layers", "model.layers"))
    assert refusal(tmp_path).endswith(
        "give the model that the adapter was trained for; or, if transformers before 4.52 saved the adapter, rename its tensors as in this model"
    )


def test_an_adapter_that_lacks_tensors_is_refused(tmp_path):
    """peft would only warn and leave the modules without tensors unchanged."""
    write(build("llama", num_hidden_layers=1), tmp_path)
    shutil.rmtree(tmp_path / "model")
    build("llama").save_pretrained(tmp_path / "model")
    folder, first = tmp_path / "adapter", "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert refusal(tmp_path) == (
        f"the adapter '{folder}' does not fit the model: it lacks 4 of the 8 tensors that the model has places for, for example {first}; "
        "give the model that the adapter was trained for, or the whole adapter"
    )
    write(build("llama"), tmp_path)
    rewrite(tmp_path, lambda name: "" if "v_proj.lora_B" in name else name)
    assert "it lacks 2 of the 8 tensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_config.json", b"{", "is not JSON: "),
        ("adapter_model.safetensors", b"", "is empty; the download was not completed: download it again"),
        ("adapter_model.safetensors", None, "is cut: it has "),
    ],
)
def test_a_damaged_adapter_is_refused_before_the_model_is_loaded(file, content, message, tmp_path):
    write(build("llama"), tmp_path)
    path = tmp_path / "adapter" / file
    path.write_bytes(path.read_bytes()[:-50] if content is None else content)
    assert refusal(tmp_path).startswith(f"{path} {message}")
    with pytest.raises(ModelError):
        adapter_folder(str(tmp_path / "adapter"))


def test_an_adapter_of_another_kind_or_without_weights_is_refused(tmp_path):
    write(build("llama"), tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(path.read_text())
    for change, why in (
        ({"target_modules": "("}, "cannot be merged: missing ), unterminated subpattern"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "peft starts it with other numbers in each load (init_lora_weights pissa_niter_4)",
        ),
        ({"layer_replication": [[0, 2], [1, 2]]}, "cannot be merged: it adds layers (layer_replication)"),
        ({"peft_type": "IA3"}, "is of type IA3, and only LORA can be used"),
    ):
        path.write_text(json.dumps(settings | change))
        assert why in refusal(tmp_path)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    why = "has no adapter_model.safetensors; give the folder that peft's save_pretrained has written"
    assert why in refusal(tmp_path)


def test_an_adapter_folder_that_does_not_exist_is_not_looked_up_on_the_hub(tmp_path):
    write(build("llama"), tmp_path)
    (tmp_path / "adapter").rename(tmp_path / "other")
    assert refusal(tmp_path) == (
        f"there is no adapter folder '{tmp_path}/adapter'; give a folder, or a hub name such as org/adapter"
    )


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    write(build("llama"), tmp_path)
    monkeypatch.setattr("batchgen.model.weights.lora.find_spec", lambda name: None)
    assert refusal(tmp_path) == "--lora needs the package peft; pip install 'batchgen-llm[lora]'"


def test_the_adapter_is_part_of_a_jobs_identity(tmp_path):
    write(build("llama"), tmp_path)
    with_it = ModelConfig(model=str(tmp_path / "model"), lora=str(tmp_path / "adapter"))
    before = model_identity(with_it)
    assert before != model_identity(replace(with_it, lora=None))
    shutil.rmtree(tmp_path / "adapter")
    write(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path, lora_alpha=16)
    assert {name for name in before if model_identity(with_it)[name] != before[name]} >= {"--lora adapter_config.json"}


@pytest.mark.parametrize("kind", ["all layers", "tied"])
def test_merged_weights_can_be_streamed(kind, tmp_path):
    write(build("llama", num_hidden_layers=4, tie_word_embeddings=kind == "tied"), tmp_path, **KINDS[kind])
    for kernels_are in ("off", "auto"):
        streamed = load(tmp_path, weights="streamed", compile=kernels_are)
        assert tokens(streamed) == tokens(load(tmp_path, weights="resident", compile=kernels_are))
        mapped = mapped_files()
        for x in tensors_in(decoder_layers(streamed.module)[0]):
            assert x.nbytes < 4096 or any(each.shared and each.start <= x.data_ptr() < each.end for each in mapped)
