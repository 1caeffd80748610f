"""Imports transformers in a process of our own without what it would only need to train, or to run on several processes.

The import of transformers and of a model's code takes as long as that of torch and half again (benchmarks/NOTES.md). Most of that is
for `torch.compile` (marks on functions that are never run here), for `torch.distributed`, for torchao and accelerate where they happen to be
installed, and for a second look at its own 1,600 files.
`torch._dynamo` is only put off: it is imported when something asks for more than such a mark.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from batchgen.config import ModelConfig

_DYNAMO = "torch._dynamo"
_LIGHT = f"{_DYNAMO}._trace_wrapped_higher_order_op"
"""A part of it that stands alone, and that transformers' masks import."""
_LAUNCHED = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
"""Variables of torchrun and the like, which start the processes of a distributed program."""
_ours = False


def allow_lean_imports() -> None:
    """This process is the command or one of its workers. In a user's program transformers is imported as it always is."""
    global _ours
    _ours = True


def import_transformers(config: ModelConfig) -> None:
    """Imports transformers and torch, as lean as this process and the model allow."""
    lean = _ours and not any(name in os.environ for name in _LAUNCHED)
    if lean and sys.modules.keys().isdisjoint(("torch", "transformers")) and find_spec("torch"):
        torch = importlib.import_module("torch")
        _defer_dynamo(torch)
        unused = ["torch_distributed"]
        if config.device_map is None and not torch.cuda.is_available():
            unused.append("accelerate")
        if not _may_need_torchao(config):
            unused.append("torchao")
        _hide(unused)
    import transformers  # noqa: F401


def _may_need_torchao(config: ModelConfig) -> bool:
    """Whether a model is quantized with torchao, or may be."""
    try:
        return b"torchao" in Path(config.model, "config.json").expanduser().read_bytes()
    except OSError:  # a model of the hub
        return True


def _hide(packages: Iterable[str]) -> None:
    """Has transformers go on as where these packages are not installed, and look at its own files once."""
    from transformers import utils
    from transformers.utils import import_utils

    for package in packages:
        for module in (utils, import_utils):
            setattr(module, f"is_{package}_available", lambda *args, **kwargs: False)
    read = getattr(import_utils, "create_import_structure_from_path", None)
    if read is not None:
        import_utils.create_import_structure_from_path = _read_once(read)


def _read_once(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`read` remembers folders by its argument, and gets the same one as a Path, as text and as its __init__.py: now always the first."""

    def normalized(path: Any) -> Any:
        folder = Path(path)
        folder = folder.parent if folder.suffix == ".py" else folder
        return read(folder if folder.name == "models" else str(folder))

    return normalized


class _Dynamo(ModuleType):
    """Stands for `torch._dynamo`, with the marks that are put on functions while modules are imported."""

    def disable(self, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        return fn if fn is not None else lambda function: function

    def allow_in_graph(self, fn: Any) -> Any:
        return fn

    def assume_constant_result(self, fn: Any) -> Any:
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """The real one, in this one's place."""
        if sys.modules.get(_DYNAMO) is self:
            del sys.modules[_DYNAMO]
            del sys.modules["torch"]._dynamo
            real = importlib.import_module(_DYNAMO)
            if _LIGHT in sys.modules:
                setattr(real, _LIGHT.rpartition(".")[2], sys.modules[_LIGHT])
        return importlib.import_module(_DYNAMO)


class _Parts(MetaPathFinder):
    """Loads the real `torch._dynamo` before any part of it but the one that stands alone."""

    def __init__(self, deferred: _Dynamo) -> None:
        self._deferred = deferred

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{_DYNAMO}.") or name == _LIGHT or sys.modules.get(_DYNAMO) is not self._deferred:
            return None
        self._deferred.load()
        return ModuleSpec(name, _Loaded()) if name in sys.modules else None


class _Loaded(Loader):
    """The loader of a module that was imported while it was being looked for."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None: ...


def _defer_dynamo(torch: ModuleType) -> None:
    spec = PathFinder.find_spec(_DYNAMO, torch.__path__)
    if spec is None or spec.submodule_search_locations is None or _DYNAMO in sys.modules:
        return
    deferred = _Dynamo(_DYNAMO)
    deferred.__spec__, deferred.__path__ = spec, spec.submodule_search_locations
    sys.modules[_DYNAMO] = deferred
    torch._dynamo = deferred  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Parts(deferred))
