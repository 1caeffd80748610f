"""Writes a Llama or a hybrid of Qwen3.5's shape as a GGUF file, as llama.cpp's converter does. Needs only numpy and gguf: bfloat16 is read as 16-bit integers.

Tests write their GGUF files with it, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
LINEAR = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
}
"""Tensors that only a hybrid has, or that have another name there."""
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""The setting that has the number of heads, by the layers whose rotary pairs are put side by side."""
OTHERS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
SECTIONS = [11, 11, 10, 0]
"""The sections of a rotary embedding with positions of images. In text all sections have the same position."""
FILE_TYPES = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_M", "MXFP4": "MOSTLY_MXFP4_MOE"}
"""The type of a file, by the type of its matrices, where it is not MOSTLY_ and this."""
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(np.uint16)}


def checkpoint(folder: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yields every tensor with its name; bfloat16 as 16-bit integers."""
    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, dtype=np.uint8, mode="r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8:start].tobytes()).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                stored = data[start + first : start + last].view(DTYPES[entry["dtype"]])
                yield name, stored.reshape(entry["shape"])


def pairs_side_by_side(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Returns the weight of queries or keys in llama.cpp's order: the two numbers of a rotary pair are adjacent."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def write_gguf(folder: Path, to: Path, weights: str) -> None:
    """`weights`: the type of all matrices, by its name in gguf (F32, BF16, F16, Q8_0, Q4_0, MXFP4, Q4_K)."""
    kind = gguf.GGMLQuantizationType[weights]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hybrid = config["model_type"] == "qwen3_5_text"
    writer = gguf.GGUFWriter(to, "qwen35" if hybrid else "llama")
    write_header(writer, config, FILE_TYPES.get(weights, f"MOSTLY_{weights}"))
    if hybrid:
        write_hybrid_header(writer, config)
    write_tokenizer(writer, folder, config["vocab_size"])
    for name, weight in checkpoint(folder):
        if hybrid:
            put_hybrid(writer, name, weight, kind)
        else:
            heads = HEADS.get(name.split(".")[-2])
            put(writer, tensor_name(name), pairs_side_by_side(weight, config[heads]) if heads else weight, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_name(name: str) -> str:
    """Returns the name of a Llama's tensor in GGUF. `name`: its name in transformers."""
    name = name.removeprefix("model.").removesuffix(".weight")
    if not name.startswith("layers."):
        return f"{OTHERS[name]}.weight"
    _, layer, part = name.split(".", 2)
    return f"blk.{layer}.{TENSORS[part]}.weight"


def put_hybrid(writer: Any, name: str, weight: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> None:
    """Writes a tensor as llama.cpp's converter does if there are as many value heads as key heads: norms with their offset of one, decays as -exp(A)."""
    name = name.removeprefix("model.").removesuffix(".weight")
    if name.endswith("norm") and not name.endswith("linear_attn.norm"):
        weight = widened(weight) + 1
    if not name.startswith("layers."):
        put(writer, f"{OTHERS[name]}.weight", weight, kind)
        return
    _, layer, part = name.split(".", 2)
    if part == "linear_attn.A_log":
        put(writer, f"blk.{layer}.ssm_a", -np.exp(widened(weight)), kind)
    elif part == "linear_attn.dt_bias":
        put(writer, f"blk.{layer}.ssm_dt.bias", weight, kind)
    elif part == "linear_attn.conv1d":
        put(writer, f"blk.{layer}.ssm_conv1d.weight", weight.squeeze(1), gguf.GGMLQuantizationType.F32)
    else:
        put(writer, f"blk.{layer}.{(TENSORS | LINEAR)[part]}.weight", weight, kind)


def widened(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the tensor in float32."""
    return weight if weight.dtype == np.float32 else (weight.astype(np.uint32) << 16).view(np.float32)


def put(writer: Any, name: str, weight: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> None:
    if weight.ndim == 1:  # llama.cpp wants the norms in float32
        kind = gguf.GGMLQuantizationType.F32
    numbers = np.ascontiguousarray(widened(weight))
    q4_k = kind == gguf.GGMLQuantizationType.Q4_K
    writer.add_tensor(name, q4_k_blocks(numbers) if q4_k else gguf.quants.quantize(numbers, kind), raw_dtype=kind)


def q4_k_blocks(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a matrix [N, K] in float32 as blocks of Q4_K, [N, K / 256 * 144], which the package gguf reads but does not write.

    A number is d * scale * code - dmin * minimum, with a scale and a minimum of 6 bits for each 32 numbers, d and dmin in float16 for each 256.
    """
    groups = weight.reshape(-1, 8, 32)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    steps, halves, whole = [], [], []
    for size in ((high - low) / 15, -low):
        halves.append((size.max(-1, keepdims=True) / 63).astype(np.float16))
        coarse = np.maximum(halves[-1].astype(np.float32), 1e-12)
        whole.append(np.clip(np.rint(size / coarse), 0, 63).astype(np.uint8))
        steps.append((halves[-1].astype(np.float32) * whole[-1])[..., None])
    codes = np.clip(np.rint((groups + steps[1]) / np.maximum(steps[0], 1e-12)), 0, 15).astype(np.uint8)
    pairs = codes.reshape(-1, 4, 2, 32)
    first = [
        part[:, :4] | (part[:, 4:] >> 4) << 6 for part in whole
    ]  # the upper bits of the last four lie above the first four
    rest = (whole[0][:, 4:] & 15) | (whole[1][:, 4:] & 15) << 4
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    blocks = np.concatenate([*(half.view(np.uint8) for half in halves), *first, rest, nibbles], axis=1)
    return blocks.reshape(weight.shape[0], -1)


def write_header(writer: Any, config: dict[str, Any], file_type: str) -> None:
    rotary = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rotary.get("partial_rotary_factor", 1)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rotary["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[file_type])


def write_hybrid_header(writer: Any, config: dict[str, Any]) -> None:
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_sections(SECTIONS)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])


def write_tokenizer(writer: Any, folder: Path, size: int) -> None:
    """Writes tokens, merges, special tokens and the chat template. llama.cpp loads no model without a tokenizer, even if prompts are token ids."""
    tokenizer, settings = (
        json.loads((folder / name).read_text(encoding="utf-8")) for name in ("tokenizer.json", "tokenizer_config.json")
    )
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | added
    tokens = sorted(ids, key=ids.__getitem__)
    tokens += [f"<unused{i}>" for i in range(len(tokens), size)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([gguf.TokenType.CONTROL if t in added else gguf.TokenType.NORMAL for t in tokens])
    writer.add_bos_token_id(ids[settings["bos_token"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_pad_token_id(ids[settings["pad_token"]])
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text(encoding="utf-8"))
