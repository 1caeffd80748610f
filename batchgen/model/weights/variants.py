"""Which quantized checkpoints are read, judged by their settings and by the headers of their files. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from batchgen.errors import ModelError
from batchgen.model.weights.weight_size import StoredTensor, quantization
from batchgen.model_files import MLX, WEIGHT_ONLY, check_quantizer, quantizer_of
from batchgen.prompts.gguf import METHOD

_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
"""The formats of compressed-tensors that are read here. transformers dequantizes the others."""
_SPARSE = {"sparse-bitmask", "sparse-24-bitmask", "marlin-24"}
AUTOROUND = {
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
}
"""The formats of AutoRound that are read here, and what they are called elsewhere."""
_MODELOPT = {
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "NVFP4",
    "NVFP4_AWQ",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "MIXED_PRECISION",
}
"""The algorithms of ModelOpt that are read here, those of AWQ unless activations are scaled before a layer."""
_OF_MLX = {
    "afmoe", "apertus", "aya_vision", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "exaone4", "exaone_moe", "falcon_h1",
    "falcon_mamba", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe", "glm_ocr", "gpt_oss",
    "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense", "idefics2", "idefics3", "internvl", "jamba", "lfm2", "lfm2_moe",
    "llama", "llava", "llava_next", "llava_onevision", "mamba", "mamba2", "minimax_m2", "ministral3", "mistral", "mistral3", "mixtral", "nemotron",
    "nemotron_h", "olmo2", "olmo3", "olmoe", "paligemma", "phi", "phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5",
    "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3", "smolvlm", "solar_open", "stablelm", "starcoder2",
}  # fmt: skip
"""The types of models whose weights have been compared with those that mlx-lm and mlx-vlm make of them."""
_MLX_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_PACKAGES = {"compressed-tensors": ("compressed_tensors", "quantized"), "torchao": ("torchao", "torchao")}
"""The packages that formats need, and the extras that install them."""


def quant_method(hf_config: Any) -> str | None:
    """Returns the quantization method that the configuration names; None if the weights are not quantized."""
    found = quantization(hf_config)
    return None if found is None else quantizer_of(found)


def check_quantization(model: str, hf_config: Any) -> None:
    """Raises `ModelError` for a format that batchgen does not read, or that needs a package that is not installed."""
    method = quant_method(hf_config)
    check_quantizer(repr(model), method)
    check_variant(model, quantization(hf_config) or {})
    if is_read_packed(quantization(hf_config)) or method not in _PACKAGES:
        return
    package, extra = _PACKAGES[method]
    if find_spec(package) is None:
        raise ModelError(
            f"the model {model!r} is quantized with {WEIGHT_ONLY.get(method or '', method)}, which needs the package {package.replace('_', '-')}",
            f"pip install 'batchgen-llm[{extra}]'",
        )


def check_stored(model: str, hf_config: Any, tensors: Iterable[StoredTensor]) -> None:
    """Raises `ModelError` if some of a checkpoint's tensors are codes and the configuration does not say that it is quantized: their scales would
    be ignored."""
    found = next((tensor for tensor in tensors if are_codes(tensor.name, tensor.dtype, tensor.shape)), None)
    if found is not None and quantization(hf_config) is None:
        kind = {"I8": "int8", "U8": "uint8", "U32": "uint32"}.get(found.dtype, "FP8")
        raise ModelError(
            f"{found.name} of the model {model!r} is in {kind}, and its config.json does not say how it is quantized",
            "copy the model's own config.json, or put its quantization_config into this one",
        )


def is_read_packed(settings: Mapping[str, Any] | None) -> bool:
    """Whether weights of a checkpoint with these quantization settings are read here."""
    method = None if settings is None else settings.get("quant_method")
    if settings is None or method not in WEIGHT_ONLY or method == METHOD:
        return False
    if method != "compressed-tensors":
        return True
    groups = compressed_groups(settings)
    formats = {group.get("format") or settings.get("format") for group in groups}
    bits = {(group.get("weights") or {}).get("num_bits") for group in groups}
    return bool(groups) and formats.issubset(_COMPRESSED) and bits.issubset((4, 8))


def compressed_groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the groups of layers of compressed-tensors, each with its scheme."""
    groups = (settings.get("config_groups") or {}).values()
    return [group if isinstance(group, dict) else {} for group in groups]


def check_variant(model: str, settings: Mapping[str, Any]) -> None:
    """Raises `ModelError` for settings of a format that change what its weights mean and are not supported."""
    problem = _unknown_variant(str(settings.get("quant_method")), settings)
    if problem is not None:
        raise not_read(model, problem)


def not_read(model: str, problem: str) -> ModelError:
    """Returns the error for a checkpoint with a `problem`."""
    return ModelError(
        f"the model {model!r} is quantized in a way that batchgen does not read: {problem}",
        "give the original model, or one quantized in a way that docs/quantized.md lists",
    )


def are_codes(name: str, dtype: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of a file of safetensors, by its name, type and shape, can only be codes that have scales elsewhere."""
    return dtype.startswith("F8") or (
        dtype in ("I8", "U8", "U32") and len(shape) > 1 and not name.endswith(("bias", "mask"))
    )


def _unknown_variant(method: str, settings: Mapping[str, Any]) -> str | None:
    """Returns in words which setting of a format is not supported; None if all are."""
    bits = settings.get("bits", settings.get("w_bit"))
    if method == "awq":
        layouts = [
            settings.get("version"),
            settings.get("format"),
            "llm-awq" if settings.get("backend") == "llm-awq" else None,
        ]
        other = next((name.lower() for name in layouts if name and name.lower() != "gemm"), None)
        if other is not None or bits not in (None, 4):
            return f"AWQ of version {other or 'gemm'!r} with {bits} bits"
    if method == "gptq":
        return _unknown_gptq(settings)
    if method == "auto-round":
        return _unknown_autoround(settings)
    if method == MLX:
        return _unknown_mlx(settings)
    if method == "modelopt":
        layers = (settings.get("quantized_layers") or {}).values()
        algorithms = [settings.get("quant_algo"), *(layer.get("quant_algo") for layer in layers)]
        return next((f"ModelOpt's {name}" for name in algorithms if name and name.upper() not in _MODELOPT), None)
    return _unknown_compressed(settings) if method == "compressed-tensors" else None


def _unknown_gptq(settings: Mapping[str, Any]) -> str | None:
    layers = (settings.get("dynamic") or {}).values()
    all_bits = [settings.get("bits"), *(own["bits"] for own in layers if own and "bits" in own)]
    if unknown := [bits for bits in all_bits if bits not in (2, 4, 8)]:
        return f"GPTQ with {unknown[0]} bits"
    older = "marlin" if settings.get("is_marlin_format") else None
    for layout in (settings.get("checkpoint_format"), settings.get("format"), older):
        if layout not in (None, "gptq", "gptq_v2"):
            return f"GPTQ in the format {layout!r}"
    if settings.get("rotation"):
        return f"GPTQ with rotation {settings['rotation']!r}, which rotates activations, too"
    words = settings.get("pack_dtype")
    return f"GPTQ in words of {words}" if words not in (None, "int32") else None


def _unknown_autoround(settings: Mapping[str, Any]) -> str | None:
    packing = settings.get("packing_format")
    if packing not in AUTOROUND:
        return f"AutoRound in the format {packing!r}"
    layers = [dict(settings) | own for own in ({}, *(settings.get("extra_config") or {}).values())]
    for own in (own for own in layers if own.get("bits") != 16):  # layers of 16 bits are not quantized
        if own.get("bits") not in ((4,) if AUTOROUND[packing] == "awq" else (2, 4, 8)):
            return f"AutoRound with {own.get('bits')} bits"
        if (own.get("act_bits") or 16) < 16 or not str(own.get("data_type") or "int").startswith("int"):
            return f"AutoRound of {own.get('data_type')}, with activations of {own.get('act_bits')} bits"
    rotation = settings.get("rotation_config") or settings.get("hadamard_config")
    return f"AutoRound with rotation {rotation!r}, which rotates activations, too" if rotation else None


def _unknown_mlx(settings: Mapping[str, Any]) -> str | None:
    if settings["model_type"] not in _OF_MLX:
        return f"MLX, for models of type {settings['model_type']!r}"
    if settings["model_type"] == "gemma3n" and not settings.get("lacks_encoder"):
        return "MLX, for models of type 'gemma3n' with their encoders"
    for own in (settings, *(own for own in settings.values() if isinstance(own, dict))):
        if own.get("bits") not in (2, 3, 4, 5, 6, 8):
            return f"MLX with {own.get('bits')} bits"
        if own.get("group_size") not in (16, 32, 64, 128):
            return f"MLX with groups of {own.get('group_size')}"
        if own.get("mode", "affine") not in _MLX_MODES:
            return f"MLX in the mode {own['mode']!r}"
    return None


def _unknown_compressed(settings: Mapping[str, Any]) -> str | None:
    for transform in ((settings.get("transform_config") or {}).get("config_groups") or {}).values():
        places = {apply.get("location") for apply in transform.get("apply") or ()}
        if online := sorted(map(str, places - {"weight_input", "weight_output"})):
            return f"its activations are transformed ({transform.get('type')}, {online[0]})"
    formats = {str(group.get("format") or settings.get("format")) for group in compressed_groups(settings)}
    formats.add(str((settings.get("sparsity_config") or {}).get("format")))
    if sparse := sorted(formats.intersection(_SPARSE)):
        return f"weights are sparse ({sparse[0]})"
    schemes = [group.get("weights") or {} for group in compressed_groups(settings)]
    blocks = {str(scheme["block_structure"]) for scheme in schemes if scheme.get("block_structure")}
    if len(blocks) > 1:
        return f"weights have blocks of several sizes ({', '.join(sorted(blocks))})"
    if not is_read_packed(settings) and any(scheme != schemes[0] for scheme in schemes):
        return f"layers have several schemes, of the formats {', '.join(sorted(formats - {'None'}))}"
    return None
