"""Writes a checkpoint again with its decoder's linear layers as compressed-tensors W8A8, which vLLM reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def write_w8a8(model: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(model, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, Any] = {}
    for file in model.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            tensors[name] = weight
            if ".layers." in name and weight.dim() == 2:
                scale = weight.float().abs().amax(1, keepdim=True) / 127
                tensors[name] = (weight.float() / scale).round().to(torch.int8)
                tensors[f"{name}_scale"] = scale.to(weight.dtype)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text(encoding="utf-8"))
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": numbers | {"strategy": "channel", "dynamic": False},
                "input_activations": numbers | {"strategy": "token", "dynamic": True},
            }
        },
    }
    (to / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
