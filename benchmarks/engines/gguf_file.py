"""A Llama checkpoint of `models.py` as a GGUF file for llama.cpp. numpy and gguf alone: bfloat16 is read as 16-bit integers."""

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
OTHERS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(np.uint16)}


def checkpoint(folder: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Every tensor with its name; bfloat16 as the 16-bit integers that it is stored as."""
    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, dtype=np.uint8, mode="r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8:start].tobytes()).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                stored = data[start + first : start + last].view(DTYPES[entry["dtype"]])
                yield name, stored.reshape(entry["shape"])


def pairs_side_by_side(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Queries and keys in the order in which llama.cpp turns them: the two numbers of a rotary pair beside each other."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def write_gguf(folder: Path, to: Path, weights: str) -> None:
    """`weights`: the type of all matrices, by its name in gguf (F32, BF16, F16, Q8_0)."""
    kind = gguf.GGMLQuantizationType[weights]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(to, "llama")
    write_header(writer, config, "ALL_F32" if weights == "F32" else f"MOSTLY_{weights}")
    write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), config["vocab_size"])
    for name, weight in checkpoint(folder):
        name = name.removeprefix("model.").removesuffix(".weight")
        if name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            if part.endswith(("q_proj", "k_proj")):
                key = "num_attention_heads" if part.endswith("q_proj") else "num_key_value_heads"
                weight = pairs_side_by_side(weight, config[key])
            put(writer, f"blk.{layer}.{TENSORS[part]}.weight", weight, kind)
        else:
            put(writer, f"{OTHERS[name]}.weight", weight, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def put(writer: Any, name: str, weight: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> None:
    if weight.dtype == np.uint16:
        weight = (weight.astype(np.uint32) << 16).view(np.float32)
    if weight.ndim == 1:  # llama.cpp wants the norms in float32
        kind = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)


def write_header(writer: Any, config: dict[str, Any], file_type: str) -> None:
    rotary = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rotary["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[file_type])


def write_tokenizer(writer: Any, tokenizer: dict[str, Any], size: int) -> None:
    """Not used, prompts come as token ids; but llama.cpp loads no model without one."""
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens += [f"<unused{i}>" for i in range(len(tokens), size)]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
