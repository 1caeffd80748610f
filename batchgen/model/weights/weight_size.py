"""How much memory a model's weights take, judged by the headers of its files, and whether they stay in memory or are streamed. No torch."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.attention.kv_size import kv_numbers
from batchgen.config import ModelConfig, parse_size
from batchgen.errors import ModelError
from batchgen.kernels import isa
from batchgen.model.architectures import is_multimodal
from batchgen.model.weights.mlx_names import name_in_transformers
from batchgen.model_files import (
    ADAPTER_CONFIG,
    MLX,
    find_file,
    gguf_file,
    is_int8_layer,
    is_merged,
    quantizer_of,
    read_json,
    safetensors_header,
)
from batchgen.process.machine import free_host_memory
from batchgen.prompts.gguf import METHOD, gguf_header
from batchgen.prompts.tokenizer import language_config, quiet, text_config
from batchgen.stats import size_text

LAYERS_READ = 3
"""Layers that are in memory at once when layers are streamed: one runs while two are read."""
KV_TOKENS = 8192
STEP_TOKENS, STEP_ROWS = 256, 64
"""Weights stay in memory if so many tokens of KV, and a step of so many tokens and rows of logits, fit beside them. With less, steps are too small to
be fast."""
ADAPTER_SHARE = 32
"""An adapter is taken to have one number for so many of the model's: rank 64 in all layers of a model of 7B has one for 44."""
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_GGUF_BITS = {
    "Q4_K": 4.625, "Q5_K": 5.625, "TQ1_0": 2.06, "IQ3_XXS": 3.25, "IQ2_XXS": 2.25, "IQ2_XS": 2.5, "IQ2_S": 2.625, "IQ1_S": 1.6875, "IQ1_M": 1.8125,
}  # fmt: skip
"""Bits of a number in memory, of the types that take more there than in the file."""
WHOLE_GGUF = {"Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4"}
"""The types of GGUF with codes of 4 bits that are whole numbers or halves, times the scale of 32 (`kernels.int8.are_multiplied`)."""
_4_BITS_GGUF = {*WHOLE_GGUF, "Q4_1", "Q4_K", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"}
"""Those whose codes have 4 bits: these, the ones with offsets and the ones of grids."""
_SCALES = ("scales", "scale", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "absmax", "nested_absmax", "quant_map", "nested_quant_map", "SCB", "biases")  # fmt: skip
"""The last parts of the names of tensors that belong to a packed weight, and stay in their own type."""


class StoredTensor(NamedTuple):
    """A tensor in a model's files."""

    name: str
    dtype: str
    """As safetensors or GGUF name it."""
    shape: Sequence[int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """The memory that a model's weights take, in bytes."""

    kept: int
    """As they are: packed ones stay packed."""
    int8: int
    """With `--quantize int8`."""
    int8_load: int
    """With `--quantize int8`, while they are loaded."""
    streamed: int
    """The least when layers are streamed: what is outside of the layers, and `LAYERS_READ` of them."""
    plain: int
    """When nothing stays packed."""
    stored: int
    """In the files."""
    largest: int
    """The largest packed weight when it is unpacked, which it is while it is used where our kernels for the CPU do not run."""


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """What the weights would take on a CPU of this machine, and what fits."""

    free: int
    """The memory that is free now, in bytes."""
    kept: int
    """Bytes of the weights as they are: packed ones stay packed."""
    int8: int
    """With `--quantize int8`."""
    int8_load: int
    """With `--quantize int8`, while they are loaded."""
    streamed: int
    """The least with `--weights streamed`."""
    kv: int
    """Bytes that `--weights auto` wants to have free beside the weights (`kv_beside`)."""
    auto: str | None
    """What `--weights auto` takes: resident or streamed; None if the model cannot run."""


def memory_table(config: ModelConfig, hf_config: Any, dtype: str) -> MemoryTable | None:
    """Returns the table for a model that is computed in this type; None if the headers of the files cannot be read."""
    sizes = sizes_of(config, hf_config, itemsize(dtype))
    if sizes is None:
        return None
    free, kv = free_host_memory(), kv_beside(hf_config, itemsize(dtype))
    auto: str | None = None
    with suppress(ModelError):
        asked = replace(config, weights="auto", quantize="none")
        auto = "streamed" if are_streamed(asked, sizes, kv, free) else "resident"
    return MemoryTable(free, sizes.kept, sizes.int8, sizes.int8_load, sizes.streamed, kv, auto)


def kv_beside(hf_config: Any, itemsize: int) -> int:
    """Returns the bytes of KV and of a step that are to fit beside weights that stay in memory, as far as the configuration tells them."""
    text = text_config(hf_config)
    vocab_size = getattr(text, "vocab_size", None) or 0
    return itemsize * (KV_TOKENS * kv_numbers(text) + STEP_TOKENS * step_numbers(text) + STEP_ROWS * vocab_size)


def step_numbers(config: Any) -> int:
    """Returns about how many numbers a step holds at once for each of its tokens, without logits; 0 if the configuration of the language model does not say."""

    def largest(name: str) -> int:
        found = getattr(config, name, None)  # some have a number for each layer, or one for text and one for images
        return max(
            (n for n in (found if isinstance(found, list | tuple) else [found]) if isinstance(n, int)), default=0
        )

    hidden, chosen = largest("hidden_size"), largest("num_experts_per_tok")
    inner = largest("intermediate_size") or 4 * hidden
    # The residual, what attention and an MLP read and make of it, and rows of experts, which are copies.
    return 8 * hidden + 2 * inner + chosen * (2 * hidden + (largest("moe_intermediate_size") or inner))


def itemsize(dtype: str) -> int:
    """Returns the bytes of a number of this type."""
    return {"float32": 4, "float64": 8}.get(dtype, 2)


def are_streamed(config: ModelConfig, sizes: WeightSizes | None, kv: int, free: int) -> bool:
    """Whether the weights are streamed on a CPU. `kv`: the KV that is to fit beside them, in bytes; `free`: the free memory.

    Weights of unknown `sizes` are taken to fit. Raises `ModelError` if they can be neither in memory nor streamed.
    """
    limit = None if config.weight_memory is None else parse_size(config.weight_memory, "--weight-memory")
    if sizes is None:
        return config.weights == "streamed" or limit is not None
    needed = bytes_in_memory(config, sizes)
    if config.weights != "streamed" and (needed + kv <= free if limit is None else needed <= limit):
        return False
    can_stream = config.quantize == "none" and config.weights != "resident"
    if not can_stream and needed <= free:
        return False
    there = f"the weights take {size_text(needed)}, and {size_text(free)} of memory are free"
    if not can_stream and config.quantize != "none":
        raise ModelError(f"--quantize int8 needs all weights in memory: {there}", "leave it out, and they are streamed")
    if not can_stream:
        raise ModelError(there, "leave out --weights resident, and most of them are read again in every step")
    if limit is not None and limit < sizes.streamed:
        raise ModelError(
            f"--weight-memory {config.weight_memory} is too little: the embedding, the head and {LAYERS_READ} layers take {size_text(sizes.streamed)}",
            f"give --weight-memory {-(-sizes.streamed * 11 // 10 >> 20)}MiB or more",
        )
    if sizes.streamed > free:
        raise ModelError(
            f"{there}; with --weights streamed, the embedding, the head and {LAYERS_READ} layers would still take {size_text(sizes.streamed)}",
            "use a smaller or a quantized model, or a machine with more memory",
        )
    return True


def bytes_in_memory(config: ModelConfig, sizes: WeightSizes) -> int:
    """Returns the bytes that the weights take if all of them are in memory, and while they are loaded."""
    return (sizes.kept if config.quantize == "none" else sizes.int8_load) + adapter_bytes(config, sizes)


def adapter_bytes(config: ModelConfig, sizes: WeightSizes) -> int:
    """Returns the bytes that the adapter takes, if there is one. One that is merged is counted with the plain weights; one that was never downloaded is
    taken to be none of these."""
    if config.lora is None:
        return 0
    file = find_file(replace(config, model=config.lora, revision=None), ADAPTER_CONFIG, fetch=False)
    return sizes.plain if file is not None and is_merged(read_json(file)) else sizes.plain // ADAPTER_SHARE


def streaming_room(config: ModelConfig, free: int) -> int:
    """Returns the bytes that streamed weights may take in memory. They take `WeightSizes.streamed` in any case."""
    if config.weight_memory is not None:
        return parse_size(config.weight_memory, "--weight-memory")
    return 0 if config.weights == "streamed" else free // 2


def weight_files(config: ModelConfig) -> list[Path] | None:
    """Returns the model's safetensors files, in its folder or in the hub's cache; None if some are not on the disk."""
    if gguf_file(config) is not None:
        return None
    whole = find_file(config, WHOLE, fetch=False)  # transformers reads it even if there is an index
    if whole is not None:
        return [whole]
    index = find_file(config, INDEX, fetch=False)
    if index is None:
        return None
    paths = [find_file(config, name, fetch=False) for name in shards_of(index)]
    return None if None in paths else [path for path in paths if path is not None]


def shards_of(index: Path) -> list[str]:
    """Returns the names of the files that an index lists."""
    return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))


def stored_tensors(config: ModelConfig) -> list[StoredTensor] | None:
    """Returns the tensors in a model's files. For a model that is not on the disk, the hub is asked for their headers; None if it has none."""
    gguf, files = gguf_file(config), weight_files(config)
    if gguf is not None:
        return [StoredTensor(t.name, t.kind, t.shape, t.nbytes) for t in gguf_header(gguf).tensors]
    if files is not None:
        return [tensor for path in files for tensor in _in_file(path)]
    return None if Path(config.model).expanduser().exists() else _on_the_hub(config)


def _in_file(path: Path) -> list[StoredTensor]:
    return [
        StoredTensor(name, t["dtype"], t["shape"], t["data_offsets"][1] - t["data_offsets"][0])
        for name, t in safetensors_header(path).items()
    ]


def _on_the_hub(config: ModelConfig) -> list[StoredTensor] | None:
    from huggingface_hub import get_safetensors_metadata

    try:
        found = get_safetensors_metadata(config.model, revision=config.revision)
    except Exception:  # noqa: BLE001 - the library of requests differs with the version
        return None
    return [
        StoredTensor(name, t.dtype, t.shape, t.data_offsets[1] - t.data_offsets[0])
        for file in found.files_metadata.values()
        for name, t in file.tensors.items()
    ]


def sizes_of(config: ModelConfig, hf_config: Any, itemsize: int, *, on_cpu: bool = True) -> WeightSizes | None:
    """Returns the memory of a model's weights; None if the headers of its files cannot be read. For the others, see `weight_sizes`."""
    tensors = stored_tensors(config)
    if tensors is None:
        return None
    without: frozenset[str] = frozenset()
    if is_multimodal(hf_config):
        with quiet():
            from batchgen.model.multimodal import left_out  # with torch
        without = left_out(hf_config)
    return weight_sizes(tensors, quantization(hf_config), itemsize, without, on_cpu=on_cpu)


def weight_sizes(
    tensors: Iterable[StoredTensor], settings: Mapping[str, Any] | None, itemsize: int, without: frozenset[str] = frozenset(), *,
    on_cpu: bool = True,
) -> WeightSizes:  # fmt: skip
    """Returns the memory of these tensors, without those of modules named in `without`.

    `settings`: the checkpoint's quantization settings. `itemsize`: bytes of a number in the type in which the model is computed. `on_cpu`: whether
    our kernels for the CPU may keep the weights.
    """
    layers: defaultdict[str, int] = defaultdict(int)
    kept = int8 = plain = stored = largest = 0
    tensors, of_mlx = list(tensors), settings is not None and settings.get("quant_method") == MLX
    packed_first = _are_packed_first(tensors, settings, on_cpu=on_cpu)
    for tensor in tensors:
        known = name_in_transformers(tensor.name, settings or {}) if of_mlx else tensor.name
        if not without.isdisjoint(known.split(".")):
            continue
        here, numbers = _kept(tensor, settings, itemsize, on_cpu=on_cpu)
        whole = numbers * itemsize if numbers else tensor.nbytes
        if numbers and tensor.dtype not in _FLOATS:
            largest = max(largest, whole)
        kept += here
        plain += whole
        stored += tensor.nbytes
        name = f"{known.rpartition('.')[0]}.weight" if numbers else known
        shape = _shape_of(tensor, numbers)
        if on_cpu and numbers and _stays_in_4_bits(tensor, settings):
            int8 += here
        elif not (of_mlx and known.endswith((".scales", ".biases")) and tensor.dtype in _FLOATS and _layer_of(known)):
            stays = not _layer_of(tensor.name) and (packed_first or "emb" in tensor.name)
            rest = here if stays else whole
            int8 += numbers + 8 * shape[0] * max(shape[1:-1], default=1) if is_int8_layer(name, shape) else rest
        layers[_layer_of(tensor.name)] += here
    outside = layers.pop("", 0)
    at_once = LAYERS_READ * max(layers.values(), default=0)
    int8_load = plain
    if packed_first:  # weights that are packed twice are in memory in both forms
        int8_load = kept + int8 if largest and int8 != kept else max(kept, int8)
    return WeightSizes(kept, int8, int8_load, min(kept, outside + at_once), plain, stored, largest)


def _are_packed_first(tensors: Iterable[StoredTensor], settings: Mapping[str, Any] | None, *, on_cpu: bool) -> bool:
    """Whether weights stay as they are until `--quantize int8` packs them, and the embedding and the head stay so (`kernels.int8.stay_packed`)."""
    if not on_cpu or isa.instruction_set() == isa.NONE:
        return False
    packed = [t for t in tensors if t.dtype not in _FLOATS and _kept(t, settings, 4, on_cpu=True)[1]]
    return not packed or (isa.least_coded_group() < math.inf and any(_has_4_bits(t, settings) for t in packed))


def _has_4_bits(tensor: StoredTensor, settings: Mapping[str, Any] | None) -> bool:
    """Whether a packed weight has codes of 4 bits."""
    if tensor.dtype == "U32" or tensor.name.endswith((".qweight", ".weight_packed")):
        return packed_bits(_settings_of(tensor, settings)) == 4
    return tensor.dtype in (*_4_BITS_GGUF, "U8") or tensor.name.endswith("_blocks")


def _shape_of(tensor: StoredTensor, numbers: int) -> Sequence[int]:
    """Returns the shape of a weight of so many numbers, or about that shape: words of packed numbers may lie the other way round, except MLX's, and
    the bytes of bitsandbytes in one column. Then none is of a router."""
    if tensor.dtype == "U32" and numbers:
        return [*tensor.shape[:-1], numbers // math.prod(tensor.shape[:-1])]
    if tensor.dtype in _FLOATS:
        return tensor.shape
    side = math.isqrt(numbers) if tensor.shape and tensor.shape[-1] == 1 else max(tensor.shape, default=0)
    return [side] * len(tensor.shape)


def _settings_of(tensor: StoredTensor, settings: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns the quantization settings of a tensor: MLX's layers may have their own."""
    own = (settings or {}).get(tensor.name.rpartition(".")[0])
    return own if isinstance(own, dict) else settings or {}


def _stays_in_4_bits(tensor: StoredTensor, settings: Mapping[str, Any] | None) -> bool:
    """Whether `--quantize int8` keeps a packed weight as it is, and multiplies its codes (`kernels.int8`)."""
    last, own = tensor.name.rpartition(".")[2], _settings_of(tensor, settings)
    if isa.instruction_set() == isa.NONE or _group_size(tensor, own) < isa.least_coded_group():
        return False
    if not _layer_of(tensor.name) or not _has_4_bits(tensor, settings):
        return False
    settings = settings or {}
    if settings.get("quant_method") == METHOD:
        return tensor.dtype in WHOLE_GGUF
    if tensor.dtype == "U32":  # MLX's, unless groups have offsets
        return bool(own.get("mode", "affine") != "affine")
    if last == "qweight":  # AWQ, and GPTQ whose groups have neighbouring inputs
        return not settings.get("desc_act")
    return last != "weight" or settings.get("quant_method") == "modelopt"


def _group_size(tensor: StoredTensor, settings: Mapping[str, Any]) -> int:
    """Returns how many inputs have one scale, as the settings say; a large number if all of a row have."""
    if tensor.dtype in WHOLE_GGUF or tensor.name.endswith("_blocks"):
        return 32
    weights = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    sizes = [each.get("group_size") for each in (settings, *weights)]
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    return min(known, default=16 if settings.get("quant_method") == "modelopt" else 1 << 30)


def _kept(tensor: StoredTensor, settings: Mapping[str, Any] | None, itemsize: int, *, on_cpu: bool) -> tuple[int, int]:
    """Returns the bytes that a tensor takes if it stays packed, and its number of numbers; none of scales and of whole numbers."""
    method = (settings or {}).get("quant_method")
    count = math.prod(tensor.shape)
    if method == METHOD and tensor.dtype not in _FLOATS:
        return int(count * _GGUF_BITS[tensor.dtype] / 8) if tensor.dtype in _GGUF_BITS else tensor.nbytes, count
    packed = method not in (None, METHOD)
    bits = packed_bits(_settings_of(tensor, settings))
    numbers = num_weights(tensor.name, tensor.dtype, list(tensor.shape), bits) if packed else 0
    if numbers:
        return tensor.nbytes, numbers
    if tensor.dtype not in _FLOATS or (packed and tensor.name.rpartition(".")[2] in _SCALES):
        return tensor.nbytes, 0
    # Our kernels keep weights in 16 bits that are computed in float32, if these hold their numbers.
    half = on_cpu and tensor.dtype in ("BF16", "F16") and len(tensor.shape) > 1 and isa.instruction_set() != isa.NONE
    return count * (2 if half else itemsize), count


def _layer_of(name: str) -> str:
    """Returns the part of a tensor's name that names its layer; empty for one outside of the layers."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def num_weights(name: str, dtype: str, shape: list[int], bits: int = 4) -> int:
    """Returns how many plain numbers a quantized tensor of a safetensors file holds; 0 for scales, and for tensors that are not quantized.

    `bits`: size of a number in a packed word.
    """
    count = math.prod(shape)
    if name.endswith(".qweight") or (name.endswith(".weight") and dtype == "U32"):  # AWQ and GPTQ, MLX
        return count * 32 // bits
    if name.endswith(".weight") and dtype == "U8":  # bitsandbytes and NVFP4
        return 2 * count
    if name.endswith("_blocks"):  # MXFP4: two to a byte
        return 2 * count
    if name.endswith(".weight_packed"):  # compressed-tensors
        return count * (32 // bits if dtype == "I32" else 2)
    return count if dtype.startswith("F8_") or dtype == "I8" else 0


def packed_bits(settings: Mapping[str, Any] | None) -> int:
    """Returns the bits of a number in a packed word, as the quantization settings say; the fewest, if groups of layers have several."""
    groups = ((settings or {}).get("config_groups") or {}).values()
    known = [(settings or {}).get("bits"), *((group.get("weights") or {}).get("num_bits") for group in groups)]
    return min((bits for bits in known if isinstance(bits, int) and bits > 0), default=4)


def configs_of(hf_config: Any) -> tuple[Any, ...]:
    """Returns the configurations that may have the settings of the quantization: the checkpoint's, and those of the language model in it."""
    return hf_config, language_config(hf_config), text_config(hf_config)


def quantization(hf_config: Any) -> dict[str, Any] | None:
    """Returns the settings of the quantization, of the checkpoint or of the language model in it; None if it is not quantized."""
    for part in configs_of(hf_config):
        found = getattr(part, "quantization_config", None)
        if isinstance(found, dict):
            return found if "quant_method" in found else found | {"quant_method": quantizer_of(found)}
    return None
