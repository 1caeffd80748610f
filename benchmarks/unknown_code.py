"""Prints lines for the table of `batchgen/kernels/recognition.py`: the code of this version of transformers that it lacks (CONTRIBUTING.md)."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType

from batchgen.kernels.recognition import code_digest, code_of

NAMES = (
    "Norm", "NormGated", "apply_rotary_pos_emb", "RotaryEmbedding", "Linear", "MLP", "Mlp", "Attention", "GatedDeltaNet", "Mixer", "MambaLayer",
    "ShortConv", "DecoderLayer", "EncoderLayer", "AttentionLayer", "Block", "Model",
)  # fmt: skip
"""The ends of the names of classes and functions in transformers that have such code."""


def unknown_code(modules: Iterable[ModuleType]) -> dict[str, list[str]]:
    """Returns the digests that the table lacks: each with the names of the classes and functions that have it, the most frequent first."""
    found: dict[str, list[str]] = {}
    for module in modules:
        for name, value in vars(module).items():
            is_own = getattr(value, "__module__", None) == module.__name__
            if not is_own or not name.endswith(NAMES) or name.endswith("PreTrainedModel"):
                continue
            code = (value.forward, value) if hasattr(value, "forward") else (value, None)
            made = code_digest(*code)
            if made is not None and code_of(*code) is None:
                found.setdefault(made, []).append(name)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def models_of_transformers() -> Iterator[ModuleType]:
    """Imports the modules of transformers that contain models. Names those on standard error that need a missing package."""
    import transformers.models

    for info in pkgutil.walk_packages(transformers.models.__path__, "transformers.models."):
        if ".modeling_" in info.name:
            try:
                yield importlib.import_module(info.name)
            except ImportError as e:
                sys.stderr.write(f"{info.name}: {e}\n")


if __name__ == "__main__":
    for made, names in unknown_code(models_of_transformers()).items():
        if len(names) > 1:
            sys.stdout.write(f'    "{made}": Code.,  # {len(names)}: {", ".join(names[:6])}\n')
