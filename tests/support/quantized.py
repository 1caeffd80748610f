"""Small quantized checkpoints, made on a CPU by their own library if it can, otherwise from the definition of the format."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from batchgen.model.weights.quantized import plain_layers
from support.gguf import save_tiny_llama_with_merges, write_gguf
from support.models import build
from support.tiny_model import EOS_ID, save_tiny_llama, save_tiny_tokenizer

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCK = 32


def original(name: str) -> Any:
    """The bfloat16 model from which a checkpoint is made."""
    if name == "mxfp4":
        return build("gpt_oss/yarn", intermediate_size=64).bfloat16()
    if name.endswith((" experts", " hybrid")):
        return build("qwen3_moe" if name.endswith("experts") else "qwen3_next").bfloat16()
    if name.startswith(
        "bitsandbytes"
    ):  # whose CPU kernel takes rows that are no multiple of a block for others (0.50.2)
        return build("llama", intermediate_size=128).bfloat16()
    return build("llama").bfloat16()


def make(name: str, folder: Path, model: Any = None) -> Any:
    """Writes a checkpoint of a bfloat16 model, by default of `original(name)`. Returns the model."""
    model = model or original(name)
    if name in PACKED or name == "mlx hybrid":
        if name.startswith("bitsandbytes"):
            _bitsandbytes(model, name, folder)
        elif name.startswith("mlx"):
            _mlx(model, name, folder)
        else:
            _packed(model, name, folder)
        return model
    if name.startswith("fp8"):
        _fp8(model, folder)
    elif name == "mxfp4":
        _mxfp4(model, folder)
    else:
        _compressed_tensors(model, name, folder)
    return model


def make_for_jobs(name: str, folder: Path) -> tuple[Path, Path]:
    """Writes a model with a tokenizer of bytes. Returns it, packed unless it is `plain`, and one that has exactly its numbers, unpacked."""
    folder.mkdir()
    if name == "gguf":
        save_tiny_llama_with_merges(folder, num_hidden_layers=5)
        packed, exact = folder / "tiny.Q4_0.gguf", folder / "exact"
        state = write_gguf(folder, packed, "Q4_0")
        shutil.copytree(folder, exact, ignore=shutil.ignore_patterns("*.gguf"))
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        (exact / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))  # the file has none
        save_file(state, exact / "model.safetensors", metadata={"format": "pt"})
        return packed, exact
    if name == "plain":
        return (save_tiny_llama(folder, num_hidden_layers=5),) * 2
    shape, layers = {"awq": ("llama", 5), "awq experts": ("qwen3_moe", 4), "awq hybrid": ("qwen3_5_text", 4)}[name]
    settings = {"num_hidden_layers": layers} if shape == "llama" else {}
    make("awq", folder, build(shape, vocab_size=262, eos_token_id=EOS_ID, **settings).bfloat16())
    for place in (folder, folder / "exact"):
        save_tiny_tokenizer(place, chat=False)
    return folder, folder / "exact"


CHECKPOINTS = ("fp8", "fp8 experts", "mxfp4", "W8A8", "W8A16", "W4A16", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16")
"""Those that transformers can dequantize."""
PACKED = (
    "awq", "awq experts", "gptq", "gptq in order", "gptq 8 bits", "gptq_v2", "modelopt FP8", "modelopt NVFP4",
    "bitsandbytes nf4", "bitsandbytes fp4", "bitsandbytes int8", "mlx", "mlx experts",
)  # fmt: skip
"""Those that it cannot."""


def dequantized(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model with the exact dequantized weights of a checkpoint, by transformers, by the format's own library, or from the folder `exact`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name in CHECKPOINTS:
        config = AutoConfig.from_pretrained(folder)
        config.quantization_config["dequantize"] = True
        found = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).to(dtype).eval()
        plain_layers(found)  # transformers 5.17 rounds activations
        if name == "W4A16":  # and does not round weights to the type of their scales
            for layer in found.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.weight.data = layer.weight.data.bfloat16().to(dtype)
        return found
    if name.startswith("bitsandbytes"):
        made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for weight in made.parameters():
            if getattr(weight, "quant_state", None) is not None:
                weight.quant_state.dtype = torch.float32  # otherwise the library rounds to the checkpoint's type
        made = made.dequantize().float()
        if name.endswith("int8"):  # the library multiplies by a rounded 1 / 127
            for key, scales in load_file(folder / "model.safetensors").items():
                if key.endswith(".SCB"):
                    layer = made.get_submodule(key.removesuffix(".SCB"))
                    layer.weight.data = (layer.weight / (scales / 127)[:, None]).round() * scales[:, None] / 127
        if name.endswith("fp4"):  # code 8 is -0.0, of which the library's kernels for AVX-512 and NEON make 0.0
            for key, codes in load_file(folder / "model.safetensors").items():
                if key.endswith("_proj.weight"):
                    weight = made.get_parameter(key)
                    weight.data[torch.stack([codes >> 4, codes & 15], -1).view(weight.shape) == 8] = -0.0
        return made.to(dtype).eval()
    return AutoModelForCausalLM.from_pretrained(folder / "exact", dtype=dtype).eval()


def _write(model: Any, folder: Path, state: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = torch.bfloat16
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    places = ("quantization_config",) if "quant_method" in settings else ("quantization", "quantization_config")
    (folder / "config.json").write_text(json.dumps(written | dict.fromkeys(places, settings)))
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def _fp8(model: Any, folder: Path) -> None:
    """DeepSeek's format: float8_e4m3fn, with a float32 scale for each square block of a weight."""
    model.save_pretrained(folder)  # experts as the hub has them, one by one
    state = load_file(folder / "model.safetensors")
    for name, weight in list(state.items()):
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape
            blocks = weight.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scale = blocks.abs().amax((1, 3)) / 448
            state[name] = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = scale
    settings = {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }
    _write(model, folder, state, settings)


def _mxfp4(model: Any, folder: Path) -> None:
    """OpenAI's format for the experts of gpt-oss: two 4-bit numbers in a byte, and a power of two for each 32 numbers."""
    state: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks = weight.float().transpose(1, 2)
            blocks = blocks.reshape(*blocks.shape[:2], -1, 32)
            exponent = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=1e-9))) - 2
            code = (blocks / torch.exp2(exponent)[..., None])[..., None].sub(E2M1).abs().argmin(-1).to(torch.uint8)
            state[f"{name}_blocks"] = code[..., 0::2] | (code[..., 1::2] << 4)
            state[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
        else:
            state[name] = weight
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _write(model, folder, state, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def _compressed_tensors(model: Any, preset: str, folder: Path) -> None:
    """Uses the library itself, with scales from the largest weights."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    scheme = preset_name_to_scheme(preset, ["Linear"])
    kind = scheme.weights
    if kind.group_size and preset != "NVFP4A16":
        kind.group_size = 32
    if kind.block_structure:
        kind.block_structure = [48, 32]  # the last blocks of 64 rows are cut
    made = copy.deepcopy(model)
    groups = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    apply_quantization_config(made, QuantizationConfig(quantization_status=QuantizationStatus.FROZEN, **groups))
    for layer in made.modules():
        if not hasattr(layer, "weight_scale"):
            continue
        largest = _largest(layer.weight.float().abs(), layer.weight_scale.shape, kind.block_structure)
        scale = largest / ((kind.num_bits == 4 and 6) or 448 if kind.type == "float" else 2 ** (kind.num_bits - 1) - 1)
        if hasattr(layer, "weight_global_scale"):
            layer.weight_global_scale.data.fill_(448 / float(scale.max()))
            scale = scale * layer.weight_global_scale
        layer.weight_scale.data.copy_(scale)
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data.zero_()
    compressor = ModelCompressor.from_pretrained_model(made)
    compressor.compress_model(made)
    made.save_pretrained(folder)
    compressor.update_config(folder)


def _largest(sizes: torch.Tensor, shape: torch.Size, block: list[int] | None) -> torch.Tensor:
    """The largest number of each row, of each group of a row, or of each block."""
    if block is None:
        return sizes.reshape(*shape, -1).amax(-1)
    fill = (shape[1] * block[1] - sizes.shape[1], shape[0] * block[0] - sizes.shape[0])
    whole = torch.nn.functional.pad(sizes, (0, fill[0], 0, fill[1]))
    return whole.view(shape[0], block[0], shape[1], block[1]).amax((1, 3))


def _packed(model: Any, name: str, folder: Path) -> None:
    """Follows the definition of the format. Also writes the exact dequantized weights to the folder `exact`, in float32."""
    model.save_pretrained(folder)  # experts as the hub has them, one by one
    state, exact = load_file(folder / "model.safetensors"), {}
    pack = {"awq": _awq, "gptq": _gptq, "modelopt": _modelopt}[name.split()[0].removesuffix("_v2")]
    for key, weight in list(state.items()):
        if key.endswith("_proj.weight"):
            parts, dense = pack(weight.float(), name)
            exact[key] = dense
            del state[key]
            layer = key.removesuffix(".weight")
            state |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
        else:
            exact[key] = weight.float()
    settings: dict[str, Any] = {
        "awq": {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "version": "gemm", "zero_point": True},
        "gptq": {"quant_method": "gptq", "bits": 8 if "8 bits" in name else 4, "group_size": BLOCK, "sym": False},
        "modelopt": {"quant_method": "modelopt", "quant_algo": name.split()[-1]},
    }[name.split()[0].removesuffix("_v2")]
    if name == "gptq_v2":
        settings["checkpoint_format"] = "gptq_v2"
    _write_exact(folder, exact)
    _write(model, folder, state, settings)


def _write_exact(folder: Path, exact: dict[str, torch.Tensor]) -> None:
    (folder / "exact").mkdir()
    save_file({k: v.contiguous() for k, v in exact.items()}, folder / "exact" / "model.safetensors", {"format": "pt"})
    (folder / "exact" / "config.json").write_text((folder / "config.json").read_text())


MLX_BITS = {
    "mlx": {"q_proj": 3, "k_proj": 2, "o_proj": 5, "gate_proj": 6, "up_proj": 6},
    "mlx experts": {"gate": 8},
    "mlx hybrid": {"out_proj": 8},
}
"""Of layers that do not have 4 bits."""


def _mlx(model: Any, name: str, folder: Path) -> None:
    """As mlx-lm stores models: embeddings are quantized, too, layers have bits of their own, and experts are stacked, here in MXFP4."""
    model.save_pretrained(folder)
    state, exact = load_file(folder / "model.safetensors"), {}
    mxfp4 = "experts" in name
    first: dict[str, Any] = {"group_size": BLOCK, "bits": 4, "mode": "mxfp4" if mxfp4 else "affine"}
    settings, found = dict(first), {}
    for key, weight in state.items():
        layer, last = key.removesuffix(".weight"), key.split(".")[-2]
        exact[key] = weight.float()
        if last == "lm_head":
            settings[layer] = False
        elif weight.dim() == 2:
            bits = MLX_BITS[name].get(last, 4)
            mode = "mxfp4" if mxfp4 and bits == 4 else "affine"
            parts, exact[key] = _mlx_parts(weight.float(), bits, mode)
            found |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
            if bits != 4:
                settings[layer] = {"group_size": BLOCK, "bits": bits}
            continue
        if name == "mlx hybrid" and "norm" in last and "linear_attn" not in key:
            weight = (weight.float() + 1).bfloat16()
            exact[key] = weight.float() - 1
        found[key] = weight.transpose(1, 2) if last == "conv1d" else weight
    for key in [key for key in found if ".experts.0." in key]:
        names = [key.replace(".experts.0.", f".experts.{i}.") for i in range(model.config.num_experts)]
        found[key.replace(".experts.0.", ".switch_mlp.")] = torch.stack([found.pop(expert) for expert in names])
    _write_exact(folder, exact)
    _write(model, folder, found, settings)


def _mlx_parts(weight: torch.Tensor, bits: int, mode: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    groups = weight.unflatten(-1, (-1, BLOCK))
    if mode == "mxfp4":
        exponents = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
        codes = ((groups / exponents.exp2())[..., None] - E2M1).abs().argmin(-1)
        scales = {"scales": (exponents[..., 0] + 127).to(torch.uint8)}
        exact = E2M1[codes] * exponents.exp2()
    else:
        low, high = groups.amin(-1, keepdim=True).bfloat16(), groups.amax(-1, keepdim=True)
        scale = ((high - low.float()) / (2**bits - 1)).bfloat16()
        codes = ((groups - low.float()) / scale.float()).round().clamp(0, 2**bits - 1).long()
        scales = {"scales": scale[..., 0], "biases": low[..., 0]}
        exact = codes * scale.float() + low.float()
    stream = np.unpackbits(codes.flatten(-2).numpy().astype("<u1")[..., None], axis=-1, bitorder="little")
    stream = np.packbits(stream[..., :bits].reshape(len(weight), -1), axis=-1, bitorder="little")
    return {"weight": torch.from_numpy(stream.view("<u4").copy()), **scales}, exact.flatten(-2)


def save_falcon_h1_of_mlx(model: Any, folder: Path) -> None:
    """Writes a model as mlx-lm does, without quantizing it: with most multipliers in the weights, not with those of keys and values."""
    model.save_pretrained(folder)
    config, state = model.config, load_file(folder / "model.safetensors")
    gate, down = config.mlp_multipliers
    sizes = [config.mamba_d_ssm] * 2 + [config.mamba_n_groups * config.mamba_d_state] * 2 + [config.mamba_n_heads]
    inner = torch.cat([torch.full((size, 1), each) for size, each in zip(sizes, config.ssm_multipliers, strict=True)])
    into: dict[str, Any] = {
        "embed_tokens": config.embedding_multiplier, "lm_head": config.lm_head_multiplier, "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier, "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
        "gate_proj": gate, "down_proj": down, "in_proj": config.ssm_in_multiplier * inner,
    }  # fmt: skip
    found = {name: weight * into.get(name.split(".")[-2], 1.0) for name, weight in state.items()}
    found = {name: weight.transpose(1, 2) if "conv1d.weight" in name else weight for name, weight in found.items()}
    _write(model, folder, found, {"group_size": BLOCK, "bits": 8})


MLX_NAMES = {
    "qwen2_vl": {"lm_head.": "language_model.lm_head.", "model.language_model.": "language_model.model.", "model.visual.": "vision_tower."},
    "mistral3": {
        "lm_head.": "language_model.lm_head.", "model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower.vision_model.",
        "model.": "",
    },
    "smolvlm": {"lm_head.": "language_model.lm_head.", "model.text_model.": "language_model.", "model.": ""},
}  # fmt: skip
"""By the type of a multimodal model: what names begin with in transformers, and in MLX."""


def make_multimodal_of_mlx(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Replaces the weights in a model's folder by those of MLX, in 8 bits, those of the encoder too. Returns what they stand for, by transformers' names."""
    found, exact = {}, {}
    for key, weight in model.state_dict().items():
        starts = MLX_NAMES[model.config.model_type].items()
        name = next(new + key.removeprefix(old) for old, new in starts if key.startswith(old))
        exact[key] = weight.float()
        if weight.dim() == 2 and weight.shape[1] % BLOCK == 0 and key.endswith(".weight"):
            parts, exact[key] = _mlx_parts(weight.float(), 8, "affine")
            found |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
        else:  # the channels of convolutions are last
            found[name] = weight.movedim(1, -1) if weight.dim() > 3 else weight
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization": {"group_size": BLOCK, "bits": 8}}))
    return exact


def _by_groups(weight: torch.Tensor, groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Codes [in, out], zeros and scales [groups, out] of an asymmetric quantization, the group of each input, and the exact weights [out, in]."""
    rows = weight.T.contiguous()
    count = int(groups.max()) + 1
    zeros, scales = torch.empty(count, rows.shape[1], dtype=torch.int32), torch.empty(count, rows.shape[1])
    for group in range(count):
        low, high = rows[groups == group].amin(0).clamp(max=0), rows[groups == group].amax(0).clamp(min=0)
        scales[group] = ((high - low) / (2**bits - 1)).half().float()
        zeros[group] = (-low / scales[group]).round().clamp(0, 2**bits - 1).int()
    codes = (rows / scales[groups] + zeros[groups]).round().clamp(0, 2**bits - 1).int()
    return codes, zeros, scales, ((codes - zeros[groups]) * scales[groups]).T


def _words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs the last dimension into int32 words, lowest bits first. `order` gives the index of the number in each place of a word."""
    per_word = 32 // bits
    blocks = codes.long().unflatten(-1, (-1, per_word))[..., list(order or range(per_word))]
    words = (blocks << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _awq(weight: torch.Tensor, name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """AutoAWQ's WQLinear_GEMM."""
    codes, zeros, scales, exact = _by_groups(weight, torch.arange(weight.shape[1]) // BLOCK, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": _words(codes, 4, order), "qzeros": _words(zeros, 4, order), "scales": scales.half()}
    return parts, exact


def _gptq(weight: torch.Tensor, name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """AutoGPTQ's QuantLinear. Except for `in order`, inputs are sorted by their activations (`desc_act`)."""
    bits = 8 if "8 bits" in name else 4
    groups = torch.arange(weight.shape[1]) // BLOCK
    if "in order" not in name:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))]
    codes, zeros, scales, exact = _by_groups(weight, groups, bits)
    ones = 0 if name == "gptq_v2" else sum(1 << shift for shift in range(0, 32, bits))
    parts = {
        "qweight": _words(codes.T, bits).T,
        "qzeros": _words(zeros, bits) - ones,  # in words, as GPTQModel does it
        "scales": scales.half(),
    }
    return parts | ({} if "in order" in name else {"g_idx": groups.int()}), exact


def _modelopt(weight: torch.Tensor, name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """NVIDIA's checkpoints: FP8 with one scale, or NVFP4."""
    one = torch.tensor(1.0)
    if name.endswith("FP8"):
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale, "input_scale": one}, codes.float() * scale
    whole = weight.abs().max() / (6 * 448)
    blocks = weight.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    scales = (scale.float() * whole)[..., None]
    code = (blocks / scales.clamp(min=1e-12))[..., None].sub(E2M1).abs().argmin(-1)
    exact = (E2M1[code] * scales).flatten(-2)
    code = code.flatten(-2).to(torch.uint8)
    parts = {"weight": code[..., 0::2] | (code[..., 1::2] << 4), "weight_scale": scale, "weight_scale_2": whole}
    return parts | {"input_scale": one}, exact


def _bitsandbytes(model: Any, name: str, folder: Path) -> None:
    """Uses the library itself, through transformers."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model.save_pretrained(folder / "plain")
    kind = name.split()[1]
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": kind == "nf4"}
    settings = BitsAndBytesConfig(**({"load_in_8bit": True} if kind == "int8" else four))
    made = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.bfloat16, quantization_config=settings)
    made.save_pretrained(folder)
