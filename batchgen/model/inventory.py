"""What a loaded model consists of, so that two runs whose numbers differ can be compared: its parts by kind and type, and digests of its tensors."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from batchgen.kernels.isa import instruction_set
from batchgen.model.loaded_model import LoadedModel


def parts(model: LoadedModel) -> dict[str, Any]:
    """Returns the instruction set of the kernels (None without kernels), the number of threads, and how many modules there are of each kind.

    A kind is the name of a class with the type of its tensors, such as "PackedLinear float32". Modules that hold neither tensors nor a forward
    that batchgen has given them are left out.
    """
    kinds: Counter[str] = Counter()
    for module in model.module.modules():
        types = sorted({str(tensor.dtype).removeprefix("torch.") for _, tensor in _tensors(module)})
        changed = ["with a forward of batchgen"] if "forward" in module.__dict__ else []
        if types or changed:
            kinds[" ".join([type(module).__name__, *types, *changed])] += 1
    return {
        "instruction_set": None if model.kernels is None else instruction_set(),
        "threads": torch.get_num_threads(),
        "modules": dict(sorted(kinds.items())),
    }


def digests(model: LoadedModel) -> dict[str, str]:
    """Returns a digest of the weights and one of the tables of positions: frequencies, and cos and sin."""
    found: dict[str, list[tuple[str, torch.Tensor]]] = {"weights": [], "tables": []}
    for name, module in model.module.named_modules():
        kind = "tables" if "Rotary" in type(module).__name__ else "weights"
        found[kind] += [(f"{name}.{own}", tensor) for own, tensor in _tensors(module)]
    return {kind: tensor_digest(tensors) for kind, tensors in found.items()}


def tensor_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns a digest of named tensors: their names, types, shapes and bytes, in this order."""
    made = hashlib.blake2b(digest_size=8)
    for name, tensor in (plain for named in tensors for plain in _plain(*named)):
        made.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        made.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def _plain(name: str, tensor: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of numbers that a tensor of a quantized type consists of; a plain tensor itself."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [(name, tensor)]
    parts: dict[str, Any] = getattr(tensor, "parts", None) or {
        part: getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]
    }
    return [found for part, of in sorted(parts.items()) for found in _plain(f"{name}.{part}", of)]


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors that a module itself holds, by name. Kernels hold theirs as plain attributes. Parts that were left out have no numbers."""
    held = {**module.__dict__, **module._parameters, **module._buffers}
    return [(name, x) for name, x in sorted(held.items()) if isinstance(x, torch.Tensor) and not x.is_meta]
