"""Small quantized checkpoints, made on a CPU: by their own library where it can, else by the format's definition."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.models import build

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCK = 32


def original(name: str) -> Any:
    """The bfloat16 model that a checkpoint is made of."""
    if name == "mxfp4":
        return build("gpt_oss/yarn", intermediate_size=64).bfloat16()
    if name == "fp8 experts":
        return build("qwen3_moe").bfloat16()
    return build("llama").bfloat16()


def make(name: str, folder: Path) -> Any:
    """Writes the checkpoint and returns the model that it was made of."""
    model = original(name)
    if name.startswith("fp8"):
        _fp8(model, folder)
    elif name == "mxfp4":
        _mxfp4(model, folder)
    else:
        _compressed_tensors(model, name, folder)
    return model


CHECKPOINTS = ("fp8", "fp8 experts", "mxfp4", "W8A8", "W8A16", "W4A16", "FP8_DYNAMIC", "NVFP4A16")


def _write(model: Any, folder: Path, state: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = torch.bfloat16
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": settings}))
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def _fp8(model: Any, folder: Path) -> None:
    """DeepSeek's: float8_e4m3fn, with a float32 scale for each square block of a weight."""
    model.save_pretrained(folder)  # experts as the hub has them, one by one
    from safetensors.torch import load_file

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
    """OpenAI's for the experts of gpt-oss: two numbers of 4 bits in a byte, a power of two for each 32."""
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
    """By the library itself, scales from the largest numbers."""
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
    made = copy.deepcopy(model)
    groups = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    apply_quantization_config(made, QuantizationConfig(quantization_status=QuantizationStatus.FROZEN, **groups))
    for layer in made.modules():
        if not hasattr(layer, "weight_scale"):
            continue
        largest = layer.weight.float().reshape(*layer.weight_scale.shape, -1).abs().amax(-1)
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
