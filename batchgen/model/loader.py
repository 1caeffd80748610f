"""Loads a transformers model and gives it batchgen's attention. Refused types end here; types that are not verified are first checked with a
small model."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from safetensors import SafetensorError

from batchgen.attention.base import register
from batchgen.config import ModelConfig
from batchgen.errors import ModelError
from batchgen.kernels import isa
from batchgen.kernels.build import NoKernels, library
from batchgen.kernels.codes import IN_16_BITS, PackedTensor, free_scratch, reserve_scratch
from batchgen.kernels.int8 import stay_packed
from batchgen.kernels.isa import NONE, instruction_set
from batchgen.kernels.memory import drop_read_pages, give_freed_back
from batchgen.model.adapter import prepare
from batchgen.model.architectures import check_architecture, context_note, is_multimodal, is_verified
from batchgen.model.checks.self_check import self_check
from batchgen.model.exact_float32 import use_exact_float32
from batchgen.model.heads import LANGUAGE_HEADS, class_for, without_language_head
from batchgen.model.loaded_model import LoadedModel
from batchgen.model.memory_budget import free_memory
from batchgen.model.multimodal import left_out, own_class
from batchgen.model.vision import Vision
from batchgen.model.weights.gguf import gguf_weights
from batchgen.model.weights.int8 import check_int8, checkpoint_scales, no_kernels, quantize
from batchgen.model.weights.lora import add_adapter
from batchgen.model.weights.packed import read_checkpoint
from batchgen.model.weights.quantized import (
    as_unquantized,
    fitting,
    is_weight_only,
    note_of,
    one_weight_at_a_time,
    packed_in,
    plain_layers,
    unpack,
)
from batchgen.model.weights.streamed import StreamedWeights, bytes_held, streamed_weights
from batchgen.model.weights.variants import check_quantization, check_stored, is_read_packed, quant_method
from batchgen.model.weights.weight_size import (
    bytes_in_memory,
    quantization,
    sizes_of,
    stored_tensors,
    weight_files,
    weight_sizes,
)
from batchgen.model_files import adapter_folder, check_weight_files, gguf_file, only_pickled
from batchgen.parsers.heads import OutputHead
from batchgen.process.machine import host_memory
from batchgen.prompts.gguf import METHOD
from batchgen.prompts.hub import asked
from batchgen.prompts.images import no_images
from batchgen.prompts.tokenizer import LoadedTokenizer, checkpoint_dtype, language_config, quiet
from batchgen.request import TokenArray
from batchgen.stats import size_text

PAGES_KEPT = 8 << 20
"""Bytes of a part of the model from which on its pages are dropped when kernels have replaced it."""
_HEAD_WEIGHTS = tuple(f"{name}.weight" for name in LANGUAGE_HEADS)


def check_room(config: ModelConfig, hf_config: Any, device: torch.device) -> None:
    """Raises `ModelError` if the sizes of the model's weights are known and they do not fit on this CUDA device."""
    dtype = dtype_of(config, hf_config)
    sizes = sizes_of(config, hf_config, dtype.itemsize, on_cpu=False)
    if sizes is None:
        return
    needed = sizes.kept
    if quant_method(hf_config) == METHOD or is_read_packed(quantization(hf_config)):
        needed += sizes.largest
    elif quant_method(hf_config) is not None:
        needed = sizes.plain if is_weight_only(hf_config) else sizes.stored
    if needed > torch.cuda.mem_get_info(device)[0]:  # asking about the other devices takes some of their memory
        free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
        check_fits(needed, dtype, device.index or 0, free)


def check_fits(needed: int, dtype: torch.dtype, device: int, free: Sequence[int]) -> None:
    """Raises `ModelError` unless `needed` bytes fit on CUDA device number `device`; `free` has the free bytes of every device."""
    if needed <= free[device]:
        return
    name = str(dtype).removeprefix("torch.")
    if len(free) > 1 and needed <= sum(free):
        hint = f"--device-map auto, without --device, spreads it over {len(free)} GPUs, of which {size_text(sum(free))} are free"
    elif dtype == torch.float32 and needed // 2 <= free[device]:
        hint = f"--dtype bfloat16 needs {size_text(needed // 2)}"
    else:
        hint = "use a quantized checkpoint, or larger or more GPUs"
    raise ModelError(
        f"the model's weights take {size_text(needed)} in {name}, and cuda:{device} has {size_text(free[device])} free",
        hint,
    )


def dtype_of(config: ModelConfig, hf_config: Any) -> torch.dtype:
    """Returns the type that the weights are loaded as."""
    found = getattr(torch, checkpoint_dtype(hf_config) if config.dtype == "auto" else config.dtype, None)
    return found if isinstance(found, torch.dtype) else torch.float32


def cpu_dtype(config: ModelConfig, hf_config: Any, processes: int = 1) -> torch.dtype:
    """Returns the type that the weights are loaded as on a CPU. `processes`: how many processes of this machine load them.

    `--dtype auto` is float32 for a 16-bit checkpoint on a processor that multiplies float32 faster, if that takes at most half of
    the machine's memory. The numbers of the checkpoint do not change. What is free does not matter: results depend on the type, and a job
    that is continued must have the same.
    """
    own = dtype_of(config, hf_config)
    fast = isa.has_bfloat16() if own == torch.bfloat16 else isa.has_float16()
    if (
        config.dtype != "auto"
        or own not in (torch.bfloat16, torch.float16)
        or fast
        or not isa.features()  # an unknown processor
        or (quant_method(hf_config) is not None and not is_weight_only(hf_config))
    ):
        return own
    sizes = sizes_of(config, hf_config, torch.float32.itemsize)
    if sizes is None:
        return own
    # Our kernels do not compute in float16; its weights stay in 16 bits.
    needed = bytes_in_memory(config, sizes) if own == torch.float16 else sizes.plain
    return torch.float32 if needed * processes <= host_memory() // 2 else own


def load_model(
    config: ModelConfig, tokenizer: LoadedTokenizer, processes: int = 1, texts: Sequence[TokenArray] = ()
) -> LoadedModel:
    """Loads the weights. Raises `ModelError` for a model that cannot be loaded, or, before it is loaded, for one that is not supported.

    `processes`: how many processes of this machine load it. `texts`: token ids of the prompts on which `--quantize` is measured.
    """
    device = pick_device(config.device)
    if config.device_map is not None and find_spec("accelerate") is None:
        raise ModelError("--device-map needs the package accelerate", "pip install 'batchgen-llm[device-map]'")
    check_weight_files(config, tokenizer=False)  # the tokenizer has been loaded
    check_int8(config, tokenizer.hf_config, device)
    notes = _check(config, tokenizer.hf_config)
    on_cuda = device.type == "cuda" and config.device_map is None
    if config.attention == "triton" and not on_cuda:
        raise ModelError("--attention triton is for one CUDA device", "leave it out")
    kernels = KernelBuild(config, device)
    if on_cuda:
        check_room(config, tokenizer.hf_config, device)
    use_exact_float32()
    # With accelerate, each tensor goes from the file to the device and is cast there. Without it, the files are mapped and the model is moved
    # to the device afterwards; the host holds a copy only of what is cast.
    direct = on_cuda and find_spec("accelerate") is not None
    register()
    dtype = _asked_dtype(config, tokenizer.hf_config, device, processes)
    itemsize = cpu_dtype(config, tokenizer.hf_config, processes).itemsize if device.type == "cpu" else 0
    streamed = streamed_weights(config, tokenizer.hf_config, device, itemsize, processes)
    with nullcontext() if streamed is None else streamed.loading():
        place = {"": device} if direct else config.device_map
        module = _from_pretrained(config, tokenizer.hf_config, dtype, device, place, tokenizer.head)
        module, note = _as_it_runs(module, config, tokenizer.hf_config, device, dtype, streamed)
    notes += note
    if config.device_map is None and not direct:
        module = module.to(device)
    elif config.device_map is not None:
        check_device_map(getattr(module, "hf_device_map", {}))
    compiled, note = kernels.wait()
    if compiled is None and _on_kernels(config, device):
        _unpack(module, config, device, streamed, kernels=False)
    int8 = config.quantize == "int8"
    if int8 and compiled is None:
        raise no_kernels(note)
    if tokenizer.head is not None:
        module = without_language_head(module, tokenizer.head)
    _give_freed_back()
    if streamed is not None:
        streamed.choose(module)
    around = partial(_packed_part, config, streamed)
    model = prepare(module, notes + note, compiled, config.compile, int8=int8, around=around)
    if compiled is not None:
        _unpack(module, config, device, streamed, fused=True)
    if int8:
        scales = checkpoint_scales(tokenizer.hf_config, weight_files(config)) if config.lora is None else {}
        model = quantize(model, texts, scales)
    _give_freed_back()
    if streamed is not None:
        model = replace(model, streamed=streamed, notes=(*model.notes, streamed.begin()))
    vision = _vision(config, tokenizer, model)
    return replace(model, attention=config.attention, vision=vision, weight_bytes=bytes_held(model.module))


def _vision(config: ModelConfig, tokenizer: LoadedTokenizer, model: LoadedModel) -> Vision | None:
    """Returns what shows images to the model; None if it is not shown any."""
    if no_images(tokenizer) is not None or model.spread:
        return None
    encoder = 0
    if model.device.type == "cuda":  # elsewhere the KV takes half of the memory
        tensors, settings = stored_tensors(config) or [], quantization(tokenizer.hf_config)
        whole, rest = (
            weight_sizes(tensors, settings, model.dtype.itemsize, without, on_cpu=False).kept
            for without in (frozenset[str](), left_out(tokenizer.hf_config))
        )
        encoder = whole - rest
    fuse = model.kernels is not None
    return Vision(config, tokenizer, model.module, model.dtype, weight_bytes=encoder, fuse=fuse)


@contextmanager
def _packed_part(config: ModelConfig, streamed: StreamedWeights | None, part: torch.nn.Module) -> Iterator[None]:
    """The context in which kernels replace a part of the model. What the part took goes back to the system: freed memory, and pages of files."""
    size = sum(parameter.nbytes for parameter in part.parameters())
    packed = any(isinstance(parameter, PackedTensor) for parameter in part.parameters())
    with nullcontext() if streamed is None else streamed.around(part):
        yield
    if size > PAGES_KEPT and packed:
        give_freed_back()
    if size > PAGES_KEPT and config.lora is None:  # a merged adapter has changed such pages
        drop_read_pages()


def _as_it_runs(
    module: Any, config: ModelConfig, hf_config: Any, device: torch.device, dtype: Any, streamed: StreamedWeights | None
) -> tuple[Any, tuple[str, ...]]:
    """Gives the weights of a packed model the form in which they run, in place, and adds the adapter. Returns the model, and notes for the user.

    `dtype`: see `_asked_dtype`.
    """
    notes: tuple[str, ...] = ()
    others = [(part, name) for part, name in packed_in(module) if not _is_read_packed(part, name)]
    keep = None if streamed is None else streamed.keep
    unpack(others, keep)
    if is_weight_only(hf_config):
        if config.device_map is None:
            plain_layers(module)
        for parameter in module.parameters():
            # transformers leaves some in another type. Buffers, such as rotary frequencies, keep theirs.
            if dtype not in ("auto", parameter.dtype):
                parameter.data = parameter.data.to(dtype)
        if config.device_map is None:
            module = module.to(device)
        _unpack(module, config, device, streamed)
        notes += (note_of(hf_config, module),)
    if config.lora is not None:
        with quiet():
            module, note = add_adapter(module, config.lora, adapter_folder(config.lora), keep)
        notes += (note,)
    return module, notes


def _give_freed_back() -> None:
    """Returns the memory to the system that loading has freed: of copies in another type, and of what was packed."""
    free_scratch()
    give_freed_back()


def _is_read_packed(part: torch.nn.Module, name: str) -> bool:
    """Whether our kernels may read a packed weight as it is: one of 16 bits only in the parts of torch, and in experts as most are written."""
    known = type(part) is torch.nn.Linear or isinstance(part, torch.nn.Embedding) or hasattr(part, "_apply_gate")
    return known or getattr(part, name).coding != IN_16_BITS


def _unpack(
    module: Any,
    config: ModelConfig,
    device: torch.device,
    streamed: StreamedWeights | None,
    *,
    fused: bool = False,
    kernels: bool = True,
) -> None:
    """Unpacks the packed weights that our kernels do not read, in place, because plain torch unpacks them again in each step.

    They stay packed if the plain ones took more than half of the free memory of their device. `fused`: layers that kernels replace are replaced.
    `kernels`: whether there are any.
    """
    packed = packed_in(module)
    if kernels and _on_kernels(config, device):
        packed = [(part, name) for part, name in packed if not isinstance(part, torch.nn.Embedding)]
        if config.quantize == "none" or stay_packed(getattr(part, name) for part, name in packed):
            packed = packed if fused else []
    if streamed is None:
        packed = fitting(packed, free_memory)
    unpack(packed, None if streamed is None else streamed.keep)
    reserve_scratch(parameter for parameter in module.parameters() if parameter.device.type == "cuda")


def _on_kernels(config: ModelConfig, device: torch.device) -> bool:
    """Whether our kernels multiply by the weights of the checkpoint on this device, if they can be compiled."""
    on_cpu = device.type == "cpu" and config.device_map is None
    return config.compile != "off" and instruction_set() != NONE and on_cpu


def _asked_dtype(config: ModelConfig, hf_config: Any, device: torch.device, processes: int) -> Any:
    """Returns the `dtype` that transformers is asked for: a type, or "auto" for the checkpoint's own."""
    if device.type == "cpu" and config.device_map is None and cpu_dtype(config, hf_config, processes) == torch.float32:
        return torch.float32
    return "auto" if config.dtype == "auto" else getattr(torch, config.dtype)


def _from_pretrained(
    config: ModelConfig, hf_config: Any, dtype: Any, device: torch.device, device_map: Any, head: OutputHead | None
) -> Any:
    """Returns the module. Raises `ModelError`."""
    multimodal, kind = is_multimodal(hf_config), class_for(head, hf_config)
    place: str | None = config.model
    own: dict[str, Any] = {}
    if multimodal or is_weight_only(hf_config):
        own["config"] = as_unquantized(language_config(hf_config))
    try:
        with quiet(), ExitStack() as stack:
            halves = dtype == torch.float32 and _on_kernels(config, device) and not config.trust_remote_code
            packed = _packed(config, hf_config, kind, own.get("config"), halves=halves)
            if packed is not None:
                own.setdefault("config", copy.deepcopy(hf_config))
                kind, place = own_class(kind, own["config"]), None
                own["state_dict"] = packed
                stack.enter_context(one_weight_at_a_time())
                dtype = dtype_of(config, hf_config) if dtype == "auto" else dtype
            module, found = kind.from_pretrained(
                place,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                dtype=dtype,
                attn_implementation="eager",  # transformers makes some parts only for this one
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # `_check_found` refuses them by name
                output_loading_info=True,
                device_map=device_map,
                **own,
            )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as e:
        reason = " ".join(str(e).split())
        if isinstance(e, OSError) and "file named model.safetensors" in reason:  # on the hub
            raise _without_weights(config) from e
        if "automatic conversion of the weights" in reason:  # a report that is not shown says of which
            reason = (
                "tensors that make one weight together, such as those of experts, are missing or do not fit one another"
            )
        raise ModelError(f"the model {config.model!r} cannot be loaded: {reason[:300]}") from e
    _check_found(config, found)
    return module


def _without_weights(config: ModelConfig) -> ModelError:
    """Returns the error of a name on the hub for which transformers finds no weights: the hub has none in safetensors files, or cannot be asked."""
    if asked(config) is None:
        return only_pickled(config.model)
    return ModelError(
        f"the weights of model {config.model!r} are not in the local cache, and the hub cannot be reached",
        "check the connection and HF_HUB_OFFLINE",
    )


def _packed(
    config: ModelConfig, hf_config: Any, kind: Any, own_config: Any, *, halves: bool
) -> Mapping[str, Any] | None:
    """Returns the weights of a checkpoint that is read here; None for others. `halves`: those of 16 bits stay in 16 bits."""
    gguf = gguf_file(config)
    if gguf is None:
        return read_checkpoint(config, hf_config, halves=halves)
    own_config = copy.copy(own_config)
    own_config.dtype = dtype_of(config, own_config)  # a file's is a name, and xIELU makes tensors of it
    with torch.device("meta"):
        return gguf_weights(gguf, own_class(kind, own_config)(own_config), halves=halves)


def _check_found(config: ModelConfig, found: Mapping[str, Any]) -> None:
    """Raises `ModelError` for weights whose shapes are not the configuration's, and for missing ones: transformers would use random numbers."""
    where, hint = f"the weights in {config.model!r}", "copy config.json and the weights from one model"
    for name, there, wanted in sorted(found.get("mismatched_keys") or (), key=str):
        raise ModelError(
            f"{where} do not fit its config.json: {name} has shape {list(there)}, and the configuration says {list(wanted)}",
            hint,
        )
    missing = sorted(found["missing_keys"])
    if config.task == "embed":
        missing = [name for name in missing if not name.endswith(_HEAD_WEIGHTS)]  # of multimodal models
    if missing and all(name.endswith(_HEAD_WEIGHTS) for name in missing):
        raise ModelError(
            f"{where} have no output head ({missing[0]}): the model gives hidden states, not text",
            "add --embed for embeddings, or give a causal language model (…ForCausalLM)",
        )
    if missing:
        count = "one tensor, " + missing[0] if len(missing) == 1 else f"{len(missing)} tensors, among them {missing[0]}"
        raise ModelError(f"{where} lack {count}", hint)


class KernelBuild:
    """batchgen's kernels for the CPU, which are compiled while the model is loaded."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Starts to compile them. Raises `ModelError` if `--compile on` asks for kernels on a device that has none."""
        self._asked = config.compile == "on"
        self._made: Future[ctypes.CDLL] | None = None
        if config.compile == "off":
            return
        if device.type == "cpu" and config.device_map is None:
            pool = ThreadPoolExecutor(1)
            self._made = pool.submit(library)
            pool.shutdown(wait=False)
        elif self._asked and (device.type != "cuda" or config.device_map is not None):
            raise ModelError("--compile on is for the CPU and for one CUDA device", "leave it out")

    def wait(self) -> tuple[ctypes.CDLL | None, tuple[str, ...]]:
        """Returns the library, or None and what the user should know. Raises `ModelError` if `--compile on` asks for it and it cannot be compiled."""
        if self._made is None:
            return None, ()
        try:
            return self._made.result(), ()
        except NoKernels as e:
            if self._asked:
                raise ModelError(f"--compile on: {e.message}", "leave it out, and plain torch runs") from e
            return None, (f"{e.message}; plain torch runs, which is slower on a CPU",)


def pick_device(name: str) -> torch.device:
    """Returns the device of `--device`. Raises `ModelError` for one that this machine does not have."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(
        "cpu" if name.startswith("cpu") else name
    )  # cpu:N is one of several processes, which torch does not know
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        found = f"{count or 'no'} CUDA device{'s' if count > 1 else ''}"
        raise ModelError(f"--device {name}: this machine has {found}", "use --device auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(f"--device {name}: this machine has no MPS device", "use --device auto or cpu")
    return device


def check_device_map(places: dict[str, int | str | torch.device]) -> None:
    """Raises `ModelError` if parts of a model were left on the disk, or on the CPU beside accelerators: each step would load them again."""
    kinds = [str(place).partition(":")[0] for place in places.values()]
    away = [
        part
        for part, kind in zip(places, kinds, strict=True)
        if kind == "disk" or (kind == "cpu" and set(kinds) != {"cpu"})
    ]
    if away:
        raise ModelError(
            f"--device-map auto: the devices have no room for {len(away)} of {len(places)} parts of the model, first {away[0]}",
            "use more devices, a smaller --dtype or a quantized checkpoint",
        )


def _check(config: ModelConfig, hf_config: Any) -> tuple[str, ...]:
    """Returns what the user should know about the architecture. Raises `ModelError` if it is not supported."""
    check_quantization(config.model, hf_config)
    check_architecture(hf_config)
    check_stored(config.model, hf_config, stored_tensors(config) or ())
    note = context_note(hf_config)
    notes = () if note is None else (note,)
    if is_verified(hf_config):
        return notes
    self_check(hf_config, trust_remote_code=config.trust_remote_code, revision=config.revision)
    name = getattr(hf_config, "model_type", "unknown")
    return (
        *notes,
        f"models of type {name!r} are not on the verified list; a small model of this type was checked against transformers and agreed",
    )
