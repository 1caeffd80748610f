"""Weights that do not fit in memory: those of some layers lie in files, and each step reads them again, ahead of the layer that needs them.

The files are mapped, so that a layer reads its weights where they always are, whatever it is made of. They have no name: they vanish with the
process. What needs no other form than the model's own files have stays there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.kernels.codes import PackedTensor
from batchgen.kernels.experts import FusedExperts
from batchgen.kernels.memory import MAPS, FilePieces, Mapping, Pages, in_huge_pages, mapped_files, pieces_in, read_pages
from batchgen.model.weights.quantized import bytes_of, one_weight_at_a_time
from batchgen.model.weights.weight_size import (
    LAYERS_READ,
    adapter_bytes,
    are_streamed,
    kv_beside,
    sizes_of,
    streaming_room,
)
from batchgen.process.machine import free_host_memory
from batchgen.process.user_cache import cache_folder
from batchgen.stats import size_text

SMALL = 1 << 12
"""Tensors of fewer bytes always stay in memory."""
MOST_EXPERTS = 0.75
"""If a step needs more than this share of a layer's experts, the next step reads all of them ahead."""


def streamed_weights(
    config: ModelConfig, hf_config: Any, device: torch.device, itemsize: int, processes: int = 1
) -> StreamedWeights | None:
    """Returns what streams the weights, if the options ask for it or if they do not fit the memory of a CPU; None if they stay in memory.

    `itemsize`: bytes of a number in the type in which the model is computed. `processes`: how many processes of this machine load it.
    Raises `ModelError` if the weights can be neither in memory nor streamed.
    """
    if device.type != "cpu" or config.device_map is not None or not MAPS.exists():
        if config.weights == "streamed" or config.weight_memory is not None:
            raise ModelError(
                "weights are streamed only on a CPU so far, under Linux", "leave out --weights and --weight-memory"
            )
        return None
    sizes, free = sizes_of(config, hf_config, itemsize), free_host_memory() // processes
    if not are_streamed(config, sizes, kv_beside(hf_config, itemsize), free):
        return None
    folder = _folder_for(0 if sizes is None else int(1.2 * sizes.kept) + adapter_bytes(config, sizes))
    return StreamedWeights(folder, streaming_room(config, free), merges=config.lora is not None)


class StreamedWeights:
    """Moves the weights of a model into files while it is loaded, and reads them ahead of the layers when it runs."""

    def __init__(self, folder: Path, room: int, *, merges: bool = False) -> None:
        """`folder`: where the files are made. `room`: the memory for all weights, in bytes; what must be in memory is there in any case.
        `merges`: whether weights are written to before they are packed."""
        self.folder = folder
        self._room = room
        self._merges = merges
        self._pieces = FilePieces(folder)
        self._parts: WeakSet[torch.nn.Module] = WeakSet()
        """The modules in the layers that are streamed."""
        self._layers: list[torch.nn.Module] = []
        self._ahead: ReadAhead | None = None

    @property
    def bytes_read(self) -> int:
        """The bytes that steps have read so far. The system may have had them in memory."""
        return 0 if self._ahead is None else self._ahead.bytes_read

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Moves into files what becomes a parameter of a module, one by one."""

        def keep_all(parent: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
            for parameter in () if part is None else part.parameters():
                self.keep(parameter)

        hooks = (
            register_module_parameter_registration_hook(lambda module, name, parameter: self.keep(parameter)),
            register_module_module_registration_hook(keep_all),  # peft gives a layer back when its weight is merged
        )
        try:
            with one_weight_at_a_time():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def keep(self, weight: torch.Tensor | None) -> None:
        """Moves a weight into files, in place, unless it lies in a file already. Raises `ModelError` if the disk is full."""
        if weight is None or weight.is_meta:
            return
        if isinstance(weight, PackedTensor):
            weight.parts = {name: self._in_file(part) for name, part in weight.parts.items()}
        else:
            weight.data = self._in_file(weight.data)

    def _in_file(self, x: torch.Tensor) -> torch.Tensor:
        if x.nbytes < SMALL or self._pieces.has(x):
            return x
        if not self._merges and any(each.start <= x.data_ptr() < each.end for each in mapped_files()):
            return x
        with pieces_in(self._pieces):
            return in_huge_pages(x)

    def choose(self, module: torch.nn.Module) -> None:
        """Chooses the layers that stay in memory: as many as there is room for, evenly among the others, so that there is always one to read."""
        layers = decoder_layers(module)
        if not layers:
            return
        sizes = [sum(map(bytes_of, layer.parameters())) for layer in layers]
        largest, whole = max(sizes), sum(map(bytes_of, module.parameters()))
        least = whole - sum(sizes) + LAYERS_READ * largest
        n = len(layers)
        stay = n if self._room >= whole else max(0, self._room - least) // largest
        self._layers = [layer for i, layer in enumerate(layers) if (i + 1) * stay // n == i * stay // n]
        self._parts = WeakSet(part for layer in self._layers for part in layer.modules())

    @contextmanager
    def around(self, part: torch.nn.Module) -> Iterator[None]:
        """The context in which a part of the model is packed: into files if its layer is streamed."""
        with pieces_in(self._pieces) if part in self._parts else nullcontext():
            yield

    def begin(self) -> str:
        """Makes the layers wait for their weights from now on. Returns a sentence for the user."""
        if not self._layers:
            return "all weights stay in memory: there is room for them"
        mapped = mapped_files()
        pages = [LayerPages(layer, mapped) for layer in self._layers]
        self._ahead = ReadAhead(pages)
        for i, layer in enumerate(self._layers):
            pages[i].drop()
            layer.register_forward_pre_hook(partial(self._ahead.wait, i))
            layer.register_forward_hook(partial(self._ahead.done, i))
        size = sum(each.nbytes for each in pages)
        files = (
            f"files without a name in {self.folder} that vanish with the process"
            if self._pieces.nbytes
            else "the model's own files"
        )
        return f"the weights of {len(pages)} layers ({size_text(size)}) are read again in every step, from {files}"


class ExpertPages:
    """The pages of a mixture's experts. A step with few tokens reads only those of the experts that it needs, when their router has chosen them."""

    def __init__(self, part: FusedExperts, mapped: Sequence[Mapping]) -> None:
        count = part.up.experts
        self.tensors = [x for x in tensors_in(part) if x.nbytes >= SMALL and len(x) % count == 0]
        self.pages = [Pages(own, mapped) for own in zip(*(x.chunk(count) for x in self.tensors), strict=True)]
        self.ahead = True
        """Whether all of them are read before the layer runs: most were needed in its last step, or it has not run yet."""
        self.bytes_read = 0
        """Without those that were read ahead."""
        part.register_forward_pre_hook(self._read_chosen)

    def _read_chosen(self, _: torch.nn.Module, arguments: Any) -> None:
        # Experts behind those with weights return their input.
        chosen = [self.pages[expert] for expert in arguments[1].unique().tolist() if expert < len(self.pages)]
        if not self.ahead:
            self.bytes_read += read_pages(chosen)
        self.ahead = len(chosen) > MOST_EXPERTS * len(self.pages)


class LayerPages:
    """The pages of a layer's weights."""

    def __init__(self, layer: torch.nn.Module, mapped: Sequence[Mapping]) -> None:
        self.experts = [ExpertPages(part, mapped) for part in layer.modules() if isinstance(part, FusedExperts)]
        apart = {x.data_ptr() for experts in self.experts for x in experts.tensors}
        self._whole = Pages(tensors_in(layer), mapped)
        self.rest = Pages((x for x in tensors_in(layer) if x.data_ptr() not in apart), mapped)
        self.nbytes = self._whole.nbytes

    def read(self) -> int:
        """Reads the pages that are certain to be needed, and waits for them. Returns how many bytes these are."""
        return read_pages([self.rest, *(pages for of in self.experts if of.ahead for pages in of.pages)])

    def drop(self) -> None:
        """Takes the pages out of the process."""
        self._whole.drop()


class ReadAhead:
    """Reads the weights of the layers that run next, in another thread."""

    def __init__(self, pages: Sequence[LayerPages]) -> None:
        self._pages = pages
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._reading: dict[int, Future[int]] = {}
        self._bytes_read = 0

    @property
    def bytes_read(self) -> int:
        """The bytes that the layers that ran have read."""
        return self._bytes_read + sum(experts.bytes_read for pages in self._pages for experts in pages.experts)

    def wait(self, layer: int, *_: Any) -> None:
        """Waits for a layer's weights. Those of the layers after it are read in the meantime."""
        for ahead in range(min(LAYERS_READ, len(self._pages))):
            following = (layer + ahead) % len(self._pages)
            if following not in self._reading:
                self._reading[following] = self._thread.submit(self._pages[following].read)
        self._bytes_read += self._reading[layer].result()

    def done(self, layer: int, *_: Any) -> None:
        """Drops the weights of a layer that has run."""
        del self._reading[layer]
        self._pages[layer].drop()


def decoder_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the layers of the stack that has the most weights."""
    stacks = [list(part) for part in module.modules() if isinstance(part, torch.nn.ModuleList) and len(part)]
    return max(stacks, key=lambda stack: sum(sum(map(bytes_of, layer.parameters())) for layer in stack), default=[])


def bytes_held(module: torch.nn.Module) -> int:
    """Returns the memory of a module's tensors. What lies in the memory of another one counts once."""
    total = end = 0
    for start, size in sorted((x.data_ptr(), x.nbytes) for x in tensors_in(module)):
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


def tensors_in(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yields the tensors that a module and the modules in it hold, those of packed weights as the tensors that they consist of."""
    for part in module.modules():
        for held in (*part._parameters.values(), *part._buffers.values(), *part.__dict__.values()):
            packed = getattr(held, "parts", None)  # no dict where an embedding's codes are those of the head
            for x in packed.values() if isinstance(packed, dict) else (held,) if packed is None else ():
                if isinstance(x, torch.Tensor) and not x.is_meta:
                    yield x


def _folder_for(needed: int) -> Path:
    """Returns the folder for files of `needed` bytes: `weights` in the user's cache folder. Raises `ModelError` if the disk has no room."""
    try:
        folder = cache_folder() / "weights"
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as e:
        raise ModelError(
            f"the weights cannot be streamed: there is no folder for them ({e})", "set XDG_CACHE_HOME"
        ) from e
    if free < needed:
        raise ModelError(
            f"the weights cannot be streamed: {folder} has {size_text(free)} free, and the files take up to {size_text(needed)}",
            "free some space, or set XDG_CACHE_HOME to a folder on another disk",
        )
    return folder
