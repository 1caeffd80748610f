"""Imports torch and transformers in the command's own processes, without the parts that only training or compiling needs.

A full import takes twice as long (benchmarks/NOTES.md). Five things make the difference:

- Some parts of torch are postponed: their code runs when one of their attributes is first used.
- transformers is told that some packages are not installed. It would import them, but no model that runs here needs them.
- transformers makes a table of its classes from its 1,600 source files at every start. The table is stored in the user's cache folder.
- pyarrow imports pandas if it is installed, to recognise its objects. The command has none.
- numpy starts threads for matrix products, which batchgen never computes with numpy.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from batchgen.config import ModelConfig
from batchgen.process.transformers_table import with_stored_table

_DYNAMO = "torch._dynamo"
_LIGHT = f"{_DYNAMO}._trace_wrapped_higher_order_op"
"""A part of it that needs no other part. transformers' masks import it."""
_METAS = "torch._meta_registrations"
"""The operations on the device `meta` that are written in Python. Loading most models needs only those in C++."""
_BY_TORCH = ("torch.export", "torch._export", _METAS)
"""The postponed parts that torch itself imports, in its order."""
_ALONE = ("torch.nn.attention.", "torch.utils._device", "torch.utils.checkpoint")
"""Modules that may be imported after torch and need none of these parts."""
_LAUNCHED = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
"""Variables that torchrun sets in the processes of a distributed program."""
_IMPORTS = "transformers.utils.import_utils"
_ours = _finished = False


def allow_lean_imports() -> None:
    """Marks this process as the command or one of its workers. In a user's program, all imports are as usual."""
    global _ours
    _ours = True


def import_arrow() -> None:
    """Imports numpy and pyarrow, if this process is the command: numpy with a single thread, pyarrow without pandas.

    numpy's OpenBLAS starts a thread for every core, and they spin for a while. batchgen multiplies no matrices with numpy.
    """
    if _ours and "numpy" not in sys.modules:
        with _one_blas_thread():
            importlib.import_module("numpy")
    if _ours and "pandas" not in sys.modules:
        pyarrow, finder = importlib.import_module("pyarrow"), _NoPandas()
        sys.meta_path.insert(0, finder)
        try:
            pyarrow.array([], pyarrow.null())  # the first array makes pyarrow look for pandas, only this once
        finally:
            sys.meta_path.remove(finder)


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Sets OpenBLAS's variable within the block, unless the user has set it. Not longer, because torch for ARM has an OpenBLAS too."""
    if "OPENBLAS_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OPENBLAS_NUM_THREADS"]


def import_transformers(config: ModelConfig) -> None:
    """Imports torch and transformers, without as many parts as this process and the model allow."""
    lean = _ours and not any(name in os.environ for name in _LAUNCHED)
    if lean and sys.modules.keys().isdisjoint(("torch", "transformers")) and find_spec("torch"):
        plain = config.device_map is None and not config.trust_remote_code
        finder = _Finder((_DYNAMO, *_BY_TORCH) if plain else (_DYNAMO,))
        sys.meta_path.insert(0, finder)
        torch = importlib.import_module("torch")
        _import_alone(_LIGHT)
        finder.torch_is_there = True
        finder.hidden = ["torch_distributed", "scipy"]
        settings = _settings_of(config)
        # transformers needs accelerate to load GGUF files and some quantized checkpoints.
        quantized = settings is None or b"quantization_config" in settings
        if config.device_map is None and not quantized and not torch.cuda.is_available():
            finder.hidden.append("accelerate")
        if settings is not None and b"torchao" not in settings:
            finder.hidden.append("torchao")
    import transformers  # noqa: F401


@cache
def import_chat_templates() -> ModuleType:
    """Imports the part of transformers that renders chat templates, without torch, for a process that needs nothing else."""
    finder = _Finder(())
    finder.hidden = ["torch", "vision"]
    sys.meta_path.insert(0, finder)
    return importlib.import_module("transformers.utils.chat_template_utils")


def finish_torch() -> bool:
    """Loads the postponed parts that torch itself imports. Returns whether there were any."""
    global _finished
    if _finished:
        return False
    _finished = True  # they import each other
    parts = [module for name in _BY_TORCH if isinstance(module := sys.modules.get(name), _Postponed)]
    for part in parts:
        if isinstance(part, _Postponed):
            part.run()
    return bool(parts)


def _needs_metas() -> bool:
    """Whether torch needs these operations while it is imported, or on this machine for random numbers on an accelerator (`torch.Generator`)."""
    accelerators = getattr(sys.modules["torch"]._C, "_cuda_getDeviceCount", int)()
    return "torch._decomp" in sys.modules or accelerators > 0 or sys.platform != "linux"


def _settings_of(config: ModelConfig) -> bytes | None:
    """Returns the config.json of a model; None for a GGUF file, and for a model that must be downloaded: they may need any package."""
    path: Any = Path(config.model, "config.json").expanduser()
    if not Path(config.model).expanduser().exists():
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError):  # not the name of a model
            path = try_to_load_from_cache(config.model, "config.json", revision=config.revision)
    try:
        return Path(path).read_bytes() if isinstance(path, str | Path) else None
    except OSError:
        return None


class _NoPandas(MetaPathFinder):
    """Makes every import of pandas fail."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not needed here", name=name)
        return None


class _Postponed(ModuleType):
    """A module whose code runs when an attribute is first used, other than names such as `__file__`."""

    def __getattr__(self, name: str) -> Any:
        # Code that looks through all modules (inspect.getmodule) reads such names of each. Importing a part of a module reads `__path__`.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        self.execute()
        return getattr(self, name)

    def execute(self) -> None:
        """Runs the module's code, after the parts that torch itself imports."""
        finish_torch()
        if isinstance(self, _Postponed):
            self.run()

    def run(self) -> None:
        """Runs the module's code in this module, which becomes an ordinary one."""
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        spec.loader.exec_module(self)


class _Dynamo(_Postponed):
    """`torch._dynamo`, with the decorators that modules apply to functions while they are imported."""

    def disable(self, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        return fn if fn is not None else lambda function: function

    def allow_in_graph(self, fn: Any) -> Any:
        return fn

    def assume_constant_result(self, fn: Any) -> Any:
        return fn


class _Export(_Postponed):
    """`torch._export`, with such a decorator."""

    wrappers = SimpleNamespace(allow_in_pre_dispatch_graph=lambda cls: cls)


_WITH_DECORATORS: Mapping[str, type[ModuleType]] = {_DYNAMO: _Dynamo, "torch._export": _Export}


class _Finder(MetaPathFinder):
    """Finds the postponed modules, and the module in which transformers looks for packages. Runs the postponed ones before any other part of torch
    is imported."""

    def __init__(self, postponed: Sequence[str]) -> None:
        self._postponed = postponed
        self.torch_is_there = False
        self.hidden: list[str] = []
        """Packages that transformers must not find."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == _IMPORTS:
            spec = PathFinder.find_spec(name, path)
            return None if spec is None else ModuleSpec(name, _Changed(spec, self._change), origin=spec.origin)
        if not name.startswith("torch."):
            return None
        if name in self._postponed and not _finished and not (name == _METAS and _needs_metas()):
            spec = PathFinder.find_spec(name, path)
            return None if spec is None else ModuleSpec(name, _Later(spec))
        if self.torch_is_there and not name.startswith(_ALONE):
            finish_torch()
        module = sys.modules.get(name)
        if module is None:
            return None
        # `finish_torch` has imported it. With the module's own spec, the import system would run its code again.
        module.__dict__["__spec__"] = spec = ModuleSpec(name, _Loaded(module))
        return spec

    def _change(self, module: Any) -> None:
        """Hides packages from transformers, and gives it the stored table."""
        for package in self.hidden:
            setattr(module, f"is_{package}_available", lambda *args, **kwargs: False)
        if hasattr(module, "define_import_structure"):
            module.define_import_structure = with_stored_table(module.define_import_structure)


class _Later(Loader):
    """Makes a module without running its code, and changes its class to one that runs the code later."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def exec_module(self, module: ModuleType) -> None:
        spec = self._spec
        module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, spec.parent
        module.__file__ = spec.origin
        module.__class__ = _WITH_DECORATORS.get(spec.name, _Postponed)


class _Loaded(Loader):
    """The loader of a module that was imported while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__spec__"] = self._spec


class _Changed(Loader):
    """Runs a module's code and then a change to it."""

    def __init__(self, spec: ModuleSpec, change: Callable[[ModuleType], None]) -> None:
        self._spec, self._change = spec, change

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return module_from_spec(self._spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        assert self._spec.loader is not None
        self._spec.loader.exec_module(module)
        self._change(module)


def _import_alone(name: str) -> None:
    """Imports a part of a postponed module without that module."""
    parent, _, last = name.rpartition(".")
    module = importlib.import_module(parent)
    spec = None
    if isinstance(module, _Postponed) and module.__spec__ is not None:
        spec = PathFinder.find_spec(name, module.__spec__.submodule_search_locations)
    if spec is not None and spec.loader is not None:
        sys.modules[name] = part = module_from_spec(spec)
        setattr(module, last, part)
        spec.loader.exec_module(part)
