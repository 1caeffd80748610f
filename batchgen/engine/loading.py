"""Loads a transformers model with our attention in it: refused by name, on the verified list, or checked in small beforehand."""

from __future__ import annotations

import ctypes
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from batchgen.config import ModelConfig
from batchgen.engine.architectures import check_architecture, is_verified
from batchgen.engine.attention.base import NAME, register
from batchgen.engine.kernels.build import NoKernels, library
from batchgen.engine.prepared import LoadedModel, prepare
from batchgen.engine.self_check import self_check
from batchgen.engine.weights import check_room, cpu_dtype
from batchgen.errors import ModelError
from batchgen.prompts.tokenizer import LoadedTokenizer, quiet


def load_model(config: ModelConfig, text: LoadedTokenizer, processes: int = 1) -> LoadedModel:
    """Loads the weights; so do `processes` of this machine, each its own. Raises `ModelError` for a model that cannot be loaded or is not supported, the latter before it is loaded."""
    device = pick_device(config.device)
    if config.device_map is not None and find_spec("accelerate") is None:
        raise ModelError("--device-map needs the package accelerate", "install batchgen[device-map]")
    notes = _check(config, text.hf_config)
    on_cuda = device.type == "cuda" and config.device_map is None
    kernels = Kernels(config, device)
    if on_cuda:
        check_room(config, text.hf_config, device)
    use_exact_float32()
    # A tensor at a time from the file to the device, and cast there. Without accelerate the files are mapped, so that the host holds a copy
    # of the model only where it is cast, and it is moved then.
    direct = on_cuda and find_spec("accelerate") is not None
    register()
    dtype: Any = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    if (
        device.type == "cpu"
        and config.device_map is None
        and cpu_dtype(config, text.hf_config, processes) == torch.float32
    ):
        dtype = torch.float32
    try:
        with quiet():
            module, found = AutoModelForCausalLM.from_pretrained(
                config.model,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                dtype=dtype,
                attn_implementation=NAME,
                use_safetensors=True,
                output_loading_info=True,
                device_map={"": device} if direct else config.device_map,
            )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as e:
        reason = " ".join(str(e).split())
        if isinstance(e, OSError) and "file named model.safetensors" in reason:
            raise ModelError(
                f"the model {config.model!r} cannot be loaded: it has no weights in safetensors files, and pickled ones (pytorch_model.bin), which can run any program, are never opened",
                "convert them where that does no harm (from_pretrained and save_pretrained of transformers), or name another model or --revision",
            ) from e
        raise ModelError(f"the model {config.model!r} cannot be loaded: {reason[:300]}") from e
    missing = sorted(found["missing_keys"])
    if missing:  # transformers would go on with random numbers there
        raise ModelError(f"the weights of {config.model!r} lack {len(missing)} tensors, {missing[0]} the first")
    if config.device_map is None and not direct:
        module = module.to(device)
    elif config.device_map is not None:
        check_device_map(getattr(module, "hf_device_map", {}))
    library, note = kernels.wait()
    return prepare_model(module, notes + note, library, config.compile)


def prepare_model(
    module: Any, notes: tuple[str, ...] = (), kernels: ctypes.CDLL | None = None, compile: str = "auto"
) -> LoadedModel:
    """A transformers model already in memory, its attention switched to ours. Whether it is exact there is the caller's to know."""
    check_architecture(module.config)
    return prepare(module, notes, kernels, compile)


def use_exact_float32() -> None:
    """Keeps float32 products in float32 on GPUs, for all of the process: not in TF32, which has 10 bits of mantissa."""
    torch.set_float32_matmul_precision(
        "highest"
    )  # torch's default, but an environment variable or other code may have changed it
    torch.backends.cudnn.allow_tf32 = False  # here TF32 is the default


class Kernels:
    """Our kernels for the CPU, being compiled while the model is loaded."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Raises `ModelError` where they are asked for and not for this device."""
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
        """The library, or None and what the user should know. Raises `ModelError` where they were asked for and cannot be had."""
        if self._made is None:
            return None, ()
        try:
            return self._made.result(), ()
        except NoKernels as e:
            if self._asked:
                raise ModelError(f"--compile on: {e.message}", "leave it out, and plain torch runs") from e
            return None, (f"{e.message}; plain torch runs, which is slower on a CPU",)


def pick_device(name: str) -> torch.device:
    """The device of `--device`. Raises `ModelError` for one that this machine does not have."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device("cpu" if name.startswith("cpu") else name)  # cpu:N is a process, of which torch knows nothing
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count()} CUDA device(s)"
        raise ModelError(f"--device {name}: this machine has {found}", "use --device auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(f"--device {name}: this machine has no MPS device", "use --device auto or cpu")
    return device


def check_device_map(places: dict[str, int | str | torch.device]) -> None:
    """Raises `ModelError` where parts of a model were left on the disk, or on the CPU beside accelerators: each step would load them anew."""
    kinds = [str(place).partition(":")[0] for place in places.values()]
    away = [
        part
        for part, kind in zip(places, kinds, strict=True)
        if kind == "disk" or (kind == "cpu" and set(kinds) != {"cpu"})
    ]
    if away:
        raise ModelError(
            f"--device-map auto: the devices have no room for {len(away)} of {len(places)} parts of the model, {away[0]} the first",
            "use more devices, a smaller --dtype or a quantized checkpoint",
        )


def _check(config: ModelConfig, hf_config: Any) -> tuple[str, ...]:
    """What the user should know of the architecture. Raises `ModelError` where it is not supported."""
    check_architecture(hf_config)
    if is_verified(hf_config):
        return ()
    self_check(hf_config, trust_remote_code=config.trust_remote_code, revision=config.revision)
    name = getattr(hf_config, "model_type", "unknown")
    return (
        f"models of type {name!r} are not on the verified list; a small one of the kind was checked against transformers and agreed",
    )
