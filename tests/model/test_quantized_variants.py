"""Settings and tensors of quantized checkpoints as the makers' packages write them: what changes what weights mean is read, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from batchgen.kernels.codes import PackedTensor
from batchgen.model.weights.packed import packed_weights


def weight_of(tensors: dict[str, torch.Tensor], settings: dict[str, Any], folder: Path) -> torch.Tensor:
    save_file(tensors, folder / "model.safetensors")
    found = packed_weights("org/name", [folder / "model.safetensors"], settings)["a.weight"][...]
    return found.unpacked() if isinstance(found, PackedTensor) else found


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_zeros_of_gptq_are_those_before_one_was_subtracted_from_whole_words(
    bits: int, key: str, version: str, tmp_path: Path
) -> None:
    zeros = torch.tensor([0, 1, 3, 0, 0, 2, 1, 0] * 4)
    words = (zeros.view(-1, 32 // bits) << (bits * torch.arange(32 // bits))).sum(1)
    if version == "gptq":
        words = words - sum(1 << shift for shift in range(0, 32, bits))
    parts = {
        "a.qweight": torch.zeros(2 * bits, 32).int(),
        "a.qzeros": words.to(torch.int32)[None],
        "a.scales": torch.ones(1, 32).half(),
    }
    found = weight_of(parts, {"quant_method": "gptq", "bits": bits, key: version}, tmp_path)
    assert torch.equal(found, -zeros[:, None].float().expand(32, 64))
