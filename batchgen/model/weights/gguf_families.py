"""The weights of the families of GGUF files (`prompts/gguf_families.py`): which tensors of a file make which weight of the model.

The package gguf knows the names of tensors by those of modules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchgen.errors import ModelError
from batchgen.prompts.gguf import ACTIVATION, GgufHeader
from batchgen.prompts.gguf_families import GgufFamily
from batchgen.prompts.gguf_file import GgufTensor

_OTHER_NAMES = (
    ("block_sparse_moe.router", "block_sparse_moe.router.layer"), ("block_sparse_moe.experts", "mlp.experts"),
    ("shared_mlp.input_linear", "mlp.shared_expert.gate_up_proj"), ("shared_mlp.input_linear", "mlp.gate_up_proj"),
    ("shared_mlp.output_linear", "mlp.down_proj"), ("gate.moe_statics", "moe_statics"), ("mamba.dt", "mamba.dt_proj"), ("linear_attn.dt", "linear_attn.dt_proj"),
    ("mixer.dt", "mixer.dt_proj"), ("mixer.experts", "mlp.experts"), ("feed_forward.experts", "mlp.experts"), ("feed_forward.expert", "feed_forward.expert_bias"),
    ("router.scale", "router.proj"), ("router.per_expert_scale", "experts.down_proj"), ("mlp.expert", "mlp.expert_bias"),
)  # fmt: skip
"""What modules are called here, and in the checkpoints that llama.cpp's converter reads."""
_PREFIXES = ("model.", "transformer.", "backbone.", "gpt_neox.")
"""What the names of a causal language model's weights begin with, beside those of the model without its head."""
_STACKED = re.compile(r"(.*altup_\w+)\.(\d+)\.weight")
"""Weights of Gemma 3n that lie in one tensor."""
_IN_ACTIVATION = re.compile(r".*\.(\d+)\.mlp\.act_fn\.(\w+)")
"""Weights of an activation, with the number of the layer."""
_KEYS = ".attn_k_b."
"""The part of a name of DeepSeek's weights that unpack keys, which lie in columns."""
_Array = np.ndarray[Any, Any]


def family_tensors(file: Path, header: GgufHeader, module: Any) -> dict[str, list[GgufTensor]]:
    """Returns the tensors that make each weight of a model, by its name: one, or those of the experts' gates and of their other half.

    Raises `ModelError` if the installed package gguf does not know the architecture.
    """
    import gguf

    number = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture), None)
    if number is None:
        raise ModelError(
            f"the installed version of the package gguf does not know the architecture {header.architecture!r} of {file}",
            "pip install --upgrade gguf",
        )
    names = gguf.get_tensor_name_map(number, module.config.get_text_config().num_hidden_layers)
    there = {tensor.name: tensor for tensor in header.tensors}
    found: dict[str, list[GgufTensor]] = {}
    for weight in module.state_dict():
        activation = _IN_ACTIVATION.fullmatch(weight)
        if activation is not None:
            if (name := f"{ACTIVATION}{activation[2]}.{activation[1]}") in there:
                found[weight] = [there[name]]
            continue
        stacked = _STACKED.fullmatch(weight)
        for parts, end in _candidates(weight if stacked is None else stacked[1] + ".weight"):
            tensors = [there.get(f"{names.get_name(part)}{end}") for part in parts]
            if None not in tensors:
                found[weight] = [
                    tensor if stacked is None else _piece(tensor, int(stacked[2]))
                    for tensor in tensors
                    if tensor is not None
                ]
                break
    return found


def _piece(tensor: GgufTensor, number: int) -> GgufTensor:
    """Returns one of the matrices that a tensor holds."""
    size = tensor.nbytes // tensor.shape[0]
    return tensor._replace(shape=tensor.shape[1:], offset=tensor.offset + number * size, nbytes=size)


def _candidates(weight: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Returns the names of the modules that may hold a weight in the checkpoints that the package gguf knows, with the ends of their tensors."""
    base, _, last = weight.rpartition(".")
    ends = [f".{last}"]
    if weight.endswith("_bias"):
        base, ends = weight.removesuffix("_bias"), [".bias"]
    elif last.endswith("scale"):
        base, ends = weight, [".scale", ".weight"]
    elif last not in ("weight", "bias"):
        base, ends = weight, [".weight", ""]
    bare = next((base.removeprefix(prefix) for prefix in _PREFIXES if base.startswith(prefix)), base)
    names = [bare, *(bare.replace(ours, theirs) for ours, theirs in _OTHER_NAMES if ours in bare)]
    for name in (prefix + name for name in names for prefix in ("", *_PREFIXES)):
        for end in ends:
            if "gate_up_proj" in name:
                yield tuple(name.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj")), end
            if "in_proj_qkvz" in name:
                yield tuple(name.replace("in_proj_qkvz", part) for part in ("in_proj_qkv", "in_proj_z")), end
            if "kv_b_proj" in name:
                yield tuple(name.replace("kv_b_proj", half) for half in ("k_b_proj", "v_b_proj")), end
            yield (name,), end


def is_left_out(config: Any, name: str) -> bool:
    """Whether a tensor belongs to layers after those of the model, which guess the tokens after the next one, or to keys and values that a layer takes from
    another one."""
    block, _, layer = name.partition(".")
    if block != "blk":
        return False
    number, _, part = layer.partition(".")
    own = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    return int(number) >= int(
        own if part.startswith(("attn_k.", "attn_v.", "attn_k_norm.")) else config.num_hidden_layers
    )


def arranged(family: GgufFamily, config: Any, tensors: Sequence[GgufTensor], rows: Sequence[_Array]) -> _Array:
    """Returns the rows of a weight in the order of the model. `rows`: those of its tensors, [..., rows, bytes or numbers], or numbers alone."""
    each = [_as_in_the_model(family, config, tensor.name, part) for tensor, part in zip(tensors, rows, strict=True)]
    if len(each) == 1:
        return each[0]
    if _KEYS in tensors[0].name:  # [heads, compressed, keys] and [heads, values, compressed]
        return np.concatenate([each[0].swapaxes(1, 2), each[1]], 1).reshape(-1, each[1].shape[-1])
    if ".attn_qkv." in tensors[0].name:
        return _by_heads(config, *each)
    axis = each[0].ndim - (1 if tensors[0].name.endswith(".bias") else 2)
    if not family.interleaved:
        return np.concatenate(each, axis)
    both = np.stack(each, axis + 1)
    return both.reshape(*both.shape[:axis], -1, *both.shape[axis + 2 :])


def _by_heads(config: Any, rows: _Array, gates: _Array) -> _Array:
    """Returns the queries, keys, values and gates of a gated delta net with those of a head of keys side by side."""
    heads, keys = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    parts = [*np.split(rows, [keys, 2 * keys]), gates]
    return np.concatenate([part.reshape(heads, -1, part.shape[-1]) for part in parts], 1).reshape(-1, rows.shape[-1])


def _as_in_the_model(family: GgufFamily, config: Any, name: str, rows: _Array) -> _Array:
    """Undoes what the converter does to a tensor."""
    if family.rows == "pairs" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        rows = _swapped(rows, heads, len(rows) // heads // 2, 2)
    if family.rows == "parts" and ".attn_qkv." in name:
        rows = _swapped(rows, 1, 3, config.num_attention_heads)
    if family.rows == "tiled":
        rows = _untiled(config, name, rows)
    if name.endswith(".ssm_a"):
        return np.log(-rows)
    shifted = family.shift and name.endswith("norm.weight") and ".ssm_norm." not in name
    return rows - np.float32(family.shift) if shifted else rows


def _swapped(rows: _Array, groups: int, outer: int, inner: int) -> _Array:
    """Returns rows that lie in `outer` blocks of `inner` blocks each, in `inner` blocks of `outer` each. `groups`: how many times they do."""
    return rows.reshape(groups, outer, inner, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _untiled(config: Any, name: str, rows: _Array) -> _Array:
    """Returns a tensor of a gated delta net with the heads of values that have the same keys side by side."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if ".ssm_out." in name:
        return _swapped(rows.T, 1, values // keys, keys).T
    if not any(part in name for part in (".attn_qkv.", ".attn_gate.", ".ssm_")) or ".ssm_norm." in name:
        return rows
    first = 2 * config.linear_key_head_dim * keys if ".attn_qkv." in name or ".ssm_conv1d." in name else 0
    return np.concatenate([rows[:first], _swapped(rows[first:], 1, values // keys, keys)])


def are_rows_of_inputs(family: GgufFamily, config: Any, tensors: Sequence[GgufTensor]) -> bool:
    """Whether the rows of tensors are rows of the weight, so that it can stay packed. Columns may be in another order, of heads that have whole bytes."""
    name = tensors[0].name
    moved = _KEYS in name or (heads_of_columns(family, config, tensors) and config.linear_value_head_dim % 64)
    return len(tensors[0].shape) > 1 and not name.endswith(".bias") and not moved


def heads_of_columns(family: GgufFamily, config: Any, tensors: Sequence[GgufTensor]) -> int:
    """Returns of how many heads the columns of a tensor are, if `arranged` moves them, not rows; else 0."""
    moved = family.rows == "tiled" and ".ssm_out." in tensors[0].name
    return int(config.linear_num_value_heads) if moved else 0


def is_transposed(family: GgufFamily, tensors: Sequence[GgufTensor]) -> bool:
    """Whether the rows of a weight's tensors are its columns."""
    return tensors[0].name.endswith(".weight") and any(part in tensors[0].name for part in family.columns)


def in_shape(weight: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a weight in the model's shape, if that differs only in dimensions of 1 or has a single one."""
    same = len(shape) == 1 or [n for n in weight.shape if n != 1] == [n for n in shape if n != 1]
    return weight.reshape(tuple(shape)) if same and weight.numel() == math.prod(shape) else weight
