"""A Llama of transformers with its tokenizer as a GGUF file, as llama.cpp's converter writes it. Needs the package gguf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.tiny_model import save_tiny_llama

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


def save_tiny_llama_with_merges(folder: Path) -> Path:
    """Writes the tiny chat model, its tokenizer with two merges: transformers reads no vocabulary of GGUF without any. Returns the folder."""
    save_tiny_llama(folder, chat=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {token: number for token, number in tokenizer["model"]["vocab"].items() if number < 254}
    tokenizer["model"] |= {"vocab": vocabulary | {"th": 254, "in": 255}, "merges": [["t", "h"], ["i", "n"]]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def write_gguf(folder: Path, to: Path, kind: str) -> dict[str, torch.Tensor]:
    """Writes the model of a folder with its matrices as `kind` (Q8_0, Q4_0, F16, …). Returns what they stand for, by their names in transformers."""
    import gguf
    from gguf.quants import dequantize, quantize
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(to, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    _write_tokenizer(writer, folder)
    stored = gguf.GGMLQuantizationType[kind]
    exact = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        array = weight.float().numpy()
        heads = _heads(name, config)
        rows = _pairs_beside(array, heads) if heads else array
        if array.ndim == 1:
            writer.add_tensor(_name(name), rows)
            exact[name] = weight.float()
        else:
            packed = quantize(rows, stored)
            writer.add_tensor(_name(name), packed, raw_dtype=stored)
            back = dequantize(packed, stored).astype(np.float32)
            exact[name] = torch.from_numpy(np.ascontiguousarray(_pairs_apart(back, heads) if heads else back))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


def _heads(name: str, config: dict[str, Any]) -> int:
    """The heads whose rotary pairs llama.cpp puts beside each other; 0 for other weights."""
    if "q_proj" in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if "k_proj" in name else 0


def _pairs_beside(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _pairs_apart(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _name(name: str) -> str:
    name = name.removeprefix("model.").removesuffix(".weight")
    if name.startswith("layers."):
        _, layer, part = name.split(".", 2)
        return f"blk.{layer}.{TENSORS[part]}.weight"
    return f"{OTHERS[name]}.weight"


def _write_tokenizer(writer: Any, folder: Path) -> None:
    import gguf

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = dict(tokenizer["model"]["vocab"]) | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    )
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_bos_token_id(vocabulary[settings["bos_token"]])
    writer.add_eos_token_id(vocabulary[settings["eos_token"]])
    writer.add_pad_token_id(vocabulary[settings["pad_token"]])
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())
