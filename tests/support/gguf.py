"""Writes a Llama of transformers and its tokenizer as a GGUF file. Needs the package gguf."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.tiny_model import save_tiny_llama


def save_tiny_llama_with_merges(folder: Path, **config: Any) -> Path:
    """Writes the tiny chat model with two merges in its tokenizer, as the vocabularies of real files have them. Returns the folder."""
    save_tiny_llama(folder, chat=True, **config)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {token: number for token, number in tokenizer["model"]["vocab"].items() if number < 254}
    tokenizer["model"] |= {"vocab": vocabulary | {"th": 254, "in": 255}, "merges": [["t", "h"], ["i", "n"]]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def write_gguf(folder: Path, to: Path, kind: str) -> dict[str, torch.Tensor]:
    """Writes the model of a folder with matrices of type `kind` (Q8_0, Q4_0, F16, …). Returns the dequantized weights by their names in transformers."""
    from gguf import GGUFReader, dequantize

    from benchmarks.engines import gguf_file

    gguf_file.write_gguf(folder, to, kind)
    config = json.loads((folder / "config.json").read_text())
    stored = {tensor.name: tensor for tensor in GGUFReader(to).tensors}
    exact = {}
    for name, _ in gguf_file.checkpoint(folder):
        tensor = stored[gguf_file.tensor_name(name)]
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        key = gguf_file.HEADS.get(name.split(".")[-2])
        exact[name] = torch.from_numpy(np.ascontiguousarray(_halves_apart(weight, config[key]) if key else weight))
    return exact


def _halves_apart(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undoes `gguf_file.pairs_side_by_side`."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_vocabulary(
    to: Path,
    tokens: Sequence[str | tuple[str, int]],
    *,
    architecture: str = "llama",
    chat_template: str | Sequence[Mapping[str, str]] | None = None,
    rope: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    kinds: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """Writes a GGUF file with a tokenizer and no weights but `tensors` and embeddings. Returns the file.

    `tokens`: texts, or texts with their types. `kinds`: the types of tensors that are not in float32. `settings`: values of `ARCHITECTURE`, `rope`: of `ARCHITECTURE.rope` (None leaves one out), `others`: of
    keys by their whole names, and `keys`: of `tokenizer.ggml`.
    """
    import gguf

    pairs = [token if isinstance(token, tuple) else (token, int(gguf.TokenType.NORMAL)) for token in tokens]
    writer = gguf.GGUFWriter(to, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_layer_norm_eps(1e-6)
    writer.add_key_length(8)
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(32)
    writer.add_token_list([text for text, _ in pairs])
    writer.add_token_types([kind for _, kind in pairs])
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    rope = {"dimension_count": (settings or {}).get("attention.key_length", 8)} | dict(rope or {})
    values = {f"{architecture}.rope.{name}": value for name, value in rope.items()}
    values |= {f"{architecture}.{name}": value for name, value in (settings or {}).items()}
    values |= {f"tokenizer.ggml.{name}": value for name, value in keys.items()} | dict(others or {})
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, value in ((name, value) for name, value in values.items() if value is not None):
        add.get(type(value), writer.add_string)(name, value)
    embeddings = {"token_embd.weight": np.zeros((len(tokens), 16))}
    for name, numbers in (embeddings | dict(tensors or {})).items():
        kind = (kinds or {}).get(name)
        exact = np.array(numbers, np.float32)
        writer.add_tensor(name, exact if kind is None else _quantized(exact, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def random_blocks(kind: str, shape: Sequence[int], scale: float = 0.02) -> np.ndarray[Any, Any]:
    """Random blocks of weights [..., K] of a type, whose scales in float16 are finite."""
    import gguf

    places = {
        "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "IQ1_M": (),
    }  # fmt: skip
    minima = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    numbers, (count, size) = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = numbers.integers(0, 256, (*shape[:-1], shape[-1] // count, size), dtype=np.uint8)
    for at in places.get(kind, (0, 2) if kind in minima else (0,)):
        blocks[..., at : at + 2] = numbers.normal(0, scale, (*blocks.shape[:-1], 1)).astype(np.float16).view(np.uint8)
    if kind == "IQ1_M":
        blocks[..., 55] &= 0x3F  # the upper bits of its scale
    return blocks.reshape(*shape[:-1], -1)


def _quantized(numbers: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    """Blocks of numbers; of the types that the package gguf does not write, random ones."""
    import gguf

    try:
        return gguf.quantize(numbers, kind)
    except NotImplementedError:
        return random_blocks(kind.name, numbers.shape, 0.0005)


def write_whole_model(
    module: torch.nn.Module,
    to: Path,
    architecture: str,
    *,
    kind: str | None = None,
    unpacked: bool = False,
    more: Sequence[str] = (),
    **settings: Any,
) -> Path:
    """Writes a model of transformers in float32, as llama.cpp's converter does, with a tokenizer of numbered tokens. Returns the file.

    `kind`: of all matrices but routers. `unpacked`: writes their numbers in float32. `more`: names of further tensors. `settings`: values of `ARCHITECTURE`, with `__` for dots.
    """
    import gguf

    config: Any = module.config
    (number,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors: dict[str, Any] = {}
    numbers: dict[str, list[float]] = {}
    for name, weight in module.state_dict().items():
        if ".act_fn." in name:
            numbers.setdefault(f"xielu.{name.split('.')[-1]}", []).append(weight.item())
        elif ".altup_" not in name and not (config.tie_word_embeddings and name == "lm_head.weight"):
            norm = name.endswith("norm.weight") and architecture in _SHIFTED and "linear_attn." not in name
            apart = architecture in _APART
            tensors |= _named(
                names, name, weight + 1 if norm else weight if apart else _in_order(name, weight, config), config
            )
    for ours in ("altup_projections", "altup_unembed_projections"):
        if hasattr(module.base_model, ours):
            stacked = torch.stack([linear.weight for linear in getattr(module.base_model, ours)])
            tensors[f"{names.get_name(f'model.{ours}')}.weight"] = stacked
    tensors = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    kinds = {
        name: gguf.GGMLQuantizationType[kind] for name, x in tensors.items() if kind and x.ndim > 1 and x.shape[-1] % 32 == 0 and "_inp." not in name
    }  # fmt: skip
    if unpacked:
        tensors |= {name: gguf.dequantize(_quantized(tensors[name], each), each) for name, each in kinds.items()}
    heads = getattr(config, "num_attention_heads", 0)
    values = {
        "embedding_length": config.hidden_size, "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "attention.head_count": heads, "attention.head_count_kv": config.to_dict().get("num_key_value_heads", heads),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", 1e-6),
    }  # fmt: skip
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    size = settings.get("attention__key_length") or config.hidden_size // (heads or 1)
    tensors |= {name: [[1.0]] for name in more}
    rope = getattr(config, "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] == "proportional":
        rotated = int(size * rope["partial_rotary_factor"] / 2)
        tensors["rope_freqs.weight"] = [1.0] * rotated + [1e30] * (size // 2 - rotated)
    if rope["rope_type"] == "llama3":
        waves = [2 * math.pi * rope["rope_theta"] ** (i / size) for i in range(0, size, 2)]
        tensors["rope_freqs.weight"] = [_divisor(wave, rope) for wave in waves]
    return write_vocabulary(
        to,
        [("<s>", 3), ("</s>", 3), ("<unk>", 2), *(f"t{i}" for i in range(config.vocab_size - 3))],
        architecture=architecture,
        rope={"freq_base": float(rope["rope_theta"]), "dimension_count": size},
        settings={"attention.key_length": size, "attention.value_length": size} | values,
        tensors=tensors,
        kinds={} if unpacked else kinds,
        others=numbers,
        model="llama",
        scores=[0.0] * config.vocab_size,
        eos_token_id=1,
    )


def _divisor(wavelength: float, rope: Mapping[str, float]) -> float:
    """Returns what Llama 3.1 divides a frequency by: the factor for long waves, 1 for short ones, and something between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / wavelength
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return 1 / ((1 - share) / rope["factor"] + share)


_SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")
"""The architectures whose norms multiply by one more than their weight."""
_APART = ("exaone", "pangu-embedded")
"""Architectures of Llamas in which the two numbers of a rotary pair are half a head apart."""
_PAIRED = (
    "arcee",
    "granite",
    "granitemoehybrid",
    "granitemoeshared",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo",
    "smollm3",
)
"""The model types whose rotary pairs lie side by side in a file."""
_OTHER_NAMES = {
    ".mlp.gate.moe_statics.": ".mlp.moe_statics.", "block_sparse_moe.router": "block_sparse_moe.router.layer",
    "router.per_expert_scale": "experts.down_proj", "router.scale": "router.proj",
}  # fmt: skip
"""Parts of names in transformers, and in the checkpoints that llama.cpp's converter reads."""


def _named(names: Any, name: str, weight: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a weight by their names in a file."""
    block, kind = f"blk.{name.split('.')[2]}" if ".layers." in name else "", config.model_type
    if name.endswith(("A_log", ".D")):
        weight = weight[:, None] if "mamba." in name else weight
        return {f"{block}.ssm_a": -weight.exp()} if name.endswith("log") else {f"{block}.ssm_d": weight}
    base, _, end = name.rpartition(".")
    if end not in ("weight", "bias"):
        ends = (
            end
            for part, end in (("_bias", "bias"), ("output_scale", "weight"), ("scale", "scale"))
            if name.endswith(part)
        )
        base, end = name if name.endswith("expert_bias") else name.removesuffix("_bias"), next(ends, "weight")
    base += "_proj" if base.endswith(".dt") else ""
    for ours, theirs in _OTHER_NAMES.items():
        base = base.replace(ours, theirs)
    if name.endswith("kv_b_proj.weight") and kind == "deepseek_v3":  # as newer files have it
        keys, values = weight.view(config.num_attention_heads, -1, weight.shape[1]).split(
            [config.qk_nope_head_dim, config.v_head_dim], 1
        )
        return {f"{block}.attn_k_b.{end}": keys.transpose(1, 2), f"{block}.attn_v_b.{end}": values}
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        weight = weight.squeeze(1)
    if name.endswith("in_proj_qkvz.weight"):
        return _delta_parts(block, weight, config)
    if weight.dim() == 3 and kind in ("gpt_oss", "llama4_text"):
        weight = weight.transpose(1, 2)
    parts = {
        "experts.gate_up_proj": "exps",
        "experts.down_proj": "exps",
        "experts.up_proj": "exps",
        "shared_mlp.input_linear": "shexp",
    }
    part = next((part for ours, part in parts.items() if base.endswith(ours)), None)
    bases = (base, base.removeprefix("transformer."), base.replace("model.", "backbone.", 1))
    found = next(filter(None, map(names.get_name, bases)), None)
    if part is None or found:
        return {f"{found}.{end}": weight}
    if not base.endswith(("gate_up_proj", "input_linear")):
        return {f"{block}.ffn_{'down' if 'down' in base else 'up'}_{part}.{end}": weight}
    dim = 1 if part == "exps" else 0
    halves = (weight[:, ::2], weight[:, 1::2]) if kind == "gpt_oss" else weight.chunk(2, dim)
    return {f"{block}.ffn_{each}_{part}.{end}": half for each, half in zip(("gate", "up"), halves, strict=True)}


def _delta_parts(block: str, weight: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Returns the weight of Qwen 3 Next that makes queries, keys, values and gates as a file has it."""
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim] * 2 + [values] * 2
    *qkv, gates = (
        part.flatten(0, 1) for part in weight.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, 1)
    )
    return {f"{block}.attn_qkv.weight": torch.cat(qkv), f"{block}.attn_gate.weight": gates}


def _in_order(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Returns a weight or bias with its rows as in a file, among them the two numbers of a rotary pair side by side."""
    part = name.split(".")[-2]
    if config.model_type in ("bloom", "gpt_neox") and part == "query_key_value":
        return weight.view(config.num_attention_heads, 3, -1, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)
    if config.model_type == "gpt2" and part in ("c_attn", "c_fc", "c_proj"):
        return weight.T
    if ".linear_attn." in name and part != "norm" and config.model_type != "qwen3_next":
        return _tiled(name, weight, config)
    if config.model_type not in _PAIRED or part not in ("q_proj", "k_proj"):
        return weight
    heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _tiled(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Returns a weight of a gated delta net with the first heads of values of all heads of keys before their second ones."""
    if "out_proj" in name:
        return _tiled("", weight.T, config).T
    first = 2 * config.linear_key_head_dim * config.linear_num_key_heads if "qkv" in name or "conv1d" in name else 0
    size = (len(weight) - first) // config.linear_num_value_heads
    heads = weight[first:].unflatten(0, (config.linear_num_key_heads, -1, size))
    return torch.cat([weight[:first], heads.transpose(0, 1).flatten(0, 2)])
