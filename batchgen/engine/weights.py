"""How large a model's weights will be in memory, from the headers of its safetensors files; and whether a GPU holds them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from batchgen.config import ModelConfig
from batchgen.engine.kernels import isa
from batchgen.errors import ModelError

_FLOATS = {"F64", "F32", "F16", "BF16"}
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def check_room(config: ModelConfig, hf_config: Any, device: torch.device) -> None:
    """Raises `ModelError` where the model's files are on the disk and say that its weights do not fit on this CUDA device."""
    files = weight_files(config)
    if files is None:
        return
    dtype = dtype_of(config, hf_config)
    quantized = getattr(hf_config, "quantization_config", None) is not None
    needed = weight_bytes(files, None if quantized else dtype)
    if needed > torch.cuda.mem_get_info(device)[0]:  # asking the others takes some of their memory
        free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
        check_fits(needed, dtype, device.index or 0, free)


def check_fits(needed: int, dtype: torch.dtype, device: int, free: Sequence[int]) -> None:
    """Raises `ModelError` unless so many bytes fit on CUDA device `device`; `free` are the bytes of all of them."""
    if needed <= free[device]:
        return
    name = str(dtype).removeprefix("torch.")
    if len(free) > 1 and needed <= sum(free):
        hint = f"--device-map auto, without --device, spreads it over {len(free)} GPUs, of which {_size(sum(free))} are free"
    elif dtype == torch.float32 and needed // 2 <= free[device]:
        hint = f"--dtype bfloat16 needs {_size(needed // 2)}"
    else:
        hint = "use a quantized checkpoint, or larger or more GPUs"
    raise ModelError(
        f"the model's weights take {_size(needed)} in {name}, and of cuda:{device} are {_size(free[device])} free", hint
    )


def dtype_of(config: ModelConfig, hf_config: Any) -> torch.dtype:
    """What the weights are loaded as."""
    own = getattr(hf_config, "dtype", None) if config.dtype == "auto" else config.dtype
    found = getattr(torch, str(own).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def cpu_dtype(config: ModelConfig, hf_config: Any, processes: int = 1) -> torch.dtype:
    """What the weights are loaded as on a CPU, where `processes` of this machine do so.

    `--dtype auto` is float32 for a 16-bit checkpoint on a processor that multiplies float32 faster, if that takes at most half of
    the machine's memory: all numbers of the checkpoint stay as they are.
    """
    own = dtype_of(config, hf_config)
    fast = isa.has_bfloat16() if own == torch.bfloat16 else isa.has_float16()
    if (
        config.dtype != "auto"
        or own not in (torch.bfloat16, torch.float16)
        or fast
        or not isa.features()  # an unknown processor
        or getattr(hf_config, "quantization_config", None) is not None
    ):
        return own
    files = weight_files(config)
    needed = weight_bytes(files, torch.float32) if files is not None else _bytes_on_the_hub(config)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.float32 if needed is not None and needed * processes <= memory // 2 else own


def _bytes_on_the_hub(config: ModelConfig) -> int | None:
    """Bytes of a hub model's weights in float32; None where the hub does not say."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, OfflineModeIsEnabled

    try:
        found = get_safetensors_metadata(config.model, revision=config.revision)
    except (HfHubHTTPError, NotASafetensorsRepoError, OfflineModeIsEnabled, OSError, ValueError):
        return None
    return 4 * sum(found.parameter_count.values())


def weight_files(config: ModelConfig) -> list[Path] | None:
    """The model's safetensors files, of a folder or in the hub's cache; None where they are not all on the disk."""
    index = _path(config, _INDEX)
    if index is None:
        whole = _path(config, _WHOLE)
        return None if whole is None else [whole]
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    paths = [_path(config, name) for name in sorted(names)]
    return None if None in paths else [path for path in paths if path is not None]


def weight_bytes(files: Sequence[Path], dtype: torch.dtype | None) -> int:
    """Bytes of the tensors in the files, floating-point ones as `dtype` (None: as they are)."""
    total = 0
    for path in files:
        with path.open("rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            if dtype is not None and tensor["dtype"] in _FLOATS:
                total += math.prod(tensor["shape"]) * dtype.itemsize
            else:
                total += end - start
    return total


def _path(config: ModelConfig, name: str) -> Path | None:
    folder = Path(config.model).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(config.model, name, revision=config.revision)
    return Path(found) if isinstance(found, str) else None


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
