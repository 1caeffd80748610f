"""Checks the files of a model's folder, so that a broken or foreign one is refused before anything slow is imported.

Knows JSON, the layout of safetensors files and the names that other programs give their files. Reads no weights.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchgen.config import ModelConfig
from batchgen.errors import ModelError, first_line

_LFS = b"version https://git-lfs"
_PULL = "run `git lfs pull` in the cloned folder, or download the model with `hf download`"
_AGAIN = "the download was not completed: download it again"
LOCAL = "use a local folder with config.json and the tokenizer's files"
_GGUF_HEADER = 24
CLASSIFIER = "ForSequenceClassification"
CLASSIFY_HINT = "classify the rows with batchgen run --classify, or in Python with task='classify'"
_HEADS = {
    CLASSIFIER: "a classifier or reward model",
    "ForTokenClassification": "a token classifier",
    "ForQuestionAnswering": "an extractive question answerer",
    "ForMaskedLM": "a masked language model, which fills gaps",
}
"""Models that do not write text, by the end of their architecture's name."""
MLX = "mlx"
"""The `quant_method` of checkpoints quantized for MLX, whose settings name none."""
WEIGHT_ONLY = {
    "fp8": "FP8", "mxfp8": "MXFP8", "mxfp4": "MXFP4", "compressed-tensors": "compressed-tensors",
    "awq": "AWQ", "gptq": "GPTQ", "auto-round": "AutoRound", "bitsandbytes": "bitsandbytes", "modelopt": "ModelOpt",
    "gguf": "GGUF", MLX: "MLX",
}  # fmt: skip
"""The quantizations of which only the weights are quantized, or only the weights are used so, by `quant_method`, with their names in messages."""
UNNAMED = "a method that its quantization_config does not name"
_WITH_OWN_LAYERS = ("torchao", "bitnet")
"""Those whose layers, of transformers or their package, stay in the model."""
_NOT_READ = {
    "fbgemm_fp8": "FP8 (fbgemm)", "aqlm": "AQLM", "eetq": "EETQ",
    "hqq": "HQQ", "quanto": "quanto", "higgs": "HIGGS", "vptq": "VPTQ", "spqr": "SpQR",
    "quark": "Quark", "fp_quant": "FP-Quant", "sinq": "SINQ", "nvfp4": "NVFP4 (transformers)",
}  # fmt: skip
"""Names of those that batchgen does not read. It does not read any that is in none of these lists either."""


_PROJECTOR = b"general.architecture" + struct.pack("<IQ", 8, 4) + b"clip"
"""What a GGUF file of a projector has near its beginning: a key, the type of its value, and its value."""
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_TOKENIZERS = {"tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "spiece.model"}
"""Files that can hold a vocabulary. tokenizer_config.json holds none."""
_VOCABULARIES = (".model", ".tiktoken", ".tekken", ".spm", ".bpe")
_DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")


def check_model_files(config: ModelConfig, *, tokenizer: bool = True) -> None:
    """Raises `ModelError` if the model is a folder or file that cannot be loaded, and its files show why. Names on the hub are not looked up.

    Does not look at weights: see `check_weight_files`. `tokenizer` says whether the folder must hold one.
    """
    folder = Path(config.model).expanduser()
    file = gguf_file(config)
    if file is not None:
        _check_gguf(config, file)
        return
    if folder.is_file():
        raise ModelError(
            f"model {str(folder)!r} is a file",
            "give the folder that holds config.json, the weights and the tokenizer's files",
        )
    if not folder.is_dir():
        if is_path(config.model):
            raise ModelError(
                f"model folder {config.model!r} does not exist", f"{LOCAL}, or a hub name such as org/model"
            )
        return
    if not (folder / "config.json").is_file():
        _refuse_without_config(folder)
    _check_revision(config, "folder")
    settings = read_json(folder / "config.json")
    _check_task(folder, settings, config.task)
    quantized = mlx_settings(settings) or settings.get("quantization_config")
    check_quantizer(f"in {str(folder)!r}", quantizer_of(quantized) if isinstance(quantized, dict) else None)
    _check_dtype(folder, settings)
    if tokenizer:
        _check_tokenizer(folder)


def check_weight_files(config: ModelConfig, *, needed: bool = True, tokenizer: bool = True) -> None:
    """Checks like `check_model_files`, and also the weights. Raises `ModelError` if they are missing, cut, damaged or pointers.

    Reads only the headers of the shards. Unless `needed`, weights may be missing.
    """
    check_model_files(config, tokenizer=tokenizer)
    folder = Path(config.model).expanduser()
    if (
        gguf_file(config) is not None
        or not folder.is_dir()
        or not (needed or any(p.name.endswith(_WEIGHTS) for p in folder.iterdir()))
    ):
        return
    for shard in _shards(folder):
        safetensors_header(shard)


INT8_SMALL = 16
"""`--quantize int8` leaves a layer as it is if its outputs times this number are at most its inputs. Routers are such layers: they decide much and cost little."""


def is_int8_layer(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight of a layer, or of that of all experts, that `--quantize int8` packs, judged by its name and shape."""
    parts = name.split(".")
    if parts[-1] != "weight" or not any(map(str.isdigit, parts)):
        return False
    if len(shape) == 3:
        return not {"experts", "input_linear", "output_linear"}.isdisjoint(parts)
    return len(shape) == 2 and INT8_SMALL * shape[0] > shape[1]


def gguf_file(config: ModelConfig) -> Path | None:
    """The GGUF file that the model is: the file itself, or the only one of a folder without other weights, beside projectors. None for other models.

    Raises `ModelError` for a folder that holds several.
    """
    path = Path(config.model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    names = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    if any(
        name.endswith((".safetensors", ".safetensors.index.json")) or name.startswith("pytorch_model") for name in names
    ):
        return None
    files = [path / name for name in names if name.endswith(".gguf")]
    if len(files) > 1:
        files = [file for file in files if not _is_projector(file)] or files[:1]
    if len(files) > 1:
        raise ModelError(f"model folder {str(path)!r} holds {len(files)} GGUF files", f"give one of them: {files[0]}")
    return files[0] if files else None


def _is_projector(file: Path) -> bool:
    """Whether a GGUF file makes features of images or sound for a language model."""
    if not file.is_file():
        return False
    with file.open("rb") as f:
        return _PROJECTOR in f.read(512)


def _check_gguf(config: ModelConfig, file: Path) -> None:
    _check_revision(config, "file")
    with file.open("rb") as f:
        start = f.read(512)
    _check_content(file, start)
    if not start.startswith(b"GGUF"):
        raise ModelError(f"{file} is not a GGUF file", "download it again")
    if len(start) < _GGUF_HEADER:
        raise ModelError(f"{file} is cut inside its header", _AGAIN)
    if _is_projector(file):
        raise ModelError(
            f"{file} is a projector (mmproj), which makes features of images or sound for a language model",
            "give the file of the language model",
        )
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", file.name):
        raise ModelError(
            f"{file} is one part of a GGUF file", "put the parts together with `llama-gguf-split --merge` of llama.cpp"
        )
    if find_spec("gguf") is None:
        raise ModelError(
            f"{file} is a GGUF file, which needs the package gguf", "pip install 'batchgen-llm[quantized]'"
        )


def _check_revision(config: ModelConfig, kind: str) -> None:
    if config.revision is not None:
        raise ModelError(
            f"--revision {config.revision!r} names a revision on the hub, and {config.model!r} is a local {kind}",
            "leave --revision out",
        )


def is_path(model: str) -> bool:
    """Whether a name can only be a path. A hub name is `name` or `org/name`."""
    return model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1 or "\\" in model


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BEGUN_BESIDE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""The ways to begin an adapter (`init_lora_weights`) that leave the model's weights as they are. Others, such as PiSSA, take a part from them, in each load."""


def is_merged(settings: Mapping[str, Any]) -> bool:
    """Whether an adapter with this configuration can only be merged into plain weights."""
    return bool(settings.get("use_dora")) or settings.get("init_lora_weights", True) not in _BEGUN_BESIDE


def adapter_folder(lora: str) -> Path:
    """Returns the folder with an adapter's configuration and weights: the user's, or the download of a hub adapter.

    Raises `ModelError` if one of the two files is missing or damaged.
    """
    folder = Path(lora).expanduser()
    if not folder.is_dir():
        if is_path(lora):
            raise ModelError(f"there is no adapter folder {lora!r}", "give a folder, or a hub name such as org/adapter")
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(lora, allow_patterns=[ADAPTER_CONFIG, ADAPTER_WEIGHTS]))
        except Exception as e:
            raise ModelError(
                f"the adapter {lora!r} is not a folder here, and it could not be downloaded from the hub: {first_line(e)}",
                "give a folder with adapter_config.json and adapter_model.safetensors, or a hub name such as org/adapter",
            ) from e
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(
                f"the adapter {lora!r} has no {name}", "give the folder that peft's save_pretrained has written"
            )
    read_json(folder / ADAPTER_CONFIG)
    safetensors_header(folder / ADAPTER_WEIGHTS)
    return folder


def has_chat_template(config: ModelConfig) -> bool | None:
    """Whether a model's folder has a chat template; None if the model is not a folder, or a GGUF file."""
    folder = Path(config.model).expanduser()
    if not folder.is_dir() or gguf_file(config) is not None:
        return None
    if any(
        (folder / name).exists() for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    ):
        return True
    files = [folder / name for name in ("tokenizer_config.json", "processor_config.json")]
    try:
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file == files[0] or file.exists()]
        return any(settings.get("chat_template") is not None for settings in found)
    except (OSError, ValueError, AttributeError):
        return None


def find_file(config: ModelConfig, name: str, *, fetch: bool = True) -> Path | None:
    """Returns the path of a file of the model, in its folder or in the hub's cache; None if it is not there. A small one is downloaded (`fetch`)."""
    folder = Path(config.model).expanduser()
    if folder.exists():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    find = hf_hub_download if fetch else try_to_load_from_cache
    try:
        found = find(config.model, name, revision=config.revision)
    except (EntryNotFoundError, HFValidationError):  # not there, offline and never fetched, or no name of a model
        return None
    return Path(found) if isinstance(found, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file of a model. Raises `ModelError`, which says what is wrong with the file."""
    value = _value_in(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object", "copy the file from the model again")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Does the same for a list of objects."""
    value = _value_in(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelError(f"{path} holds no list of objects", "copy the file from the model again")
    return value


def _value_in(path: Path) -> Any:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror}", "check its permissions") from None
    _check_content(path, data[:512])
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path} is not JSON: {e}", "copy the file from the model again") from None


def _check_content(path: Path, start: bytes) -> None:
    """Raises `ModelError` for a file that is empty, a Git LFS pointer or a web page."""
    if not start:
        raise ModelError(f"{path} is empty", _AGAIN)
    if start.startswith(_LFS):
        raise ModelError(f"{path} is a Git LFS pointer, not the file itself", _PULL)
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise ModelError(f"{path} is a web page, not the file itself", "download it with `hf download`")


def _refuse_without_config(folder: Path) -> None:
    """Raises `ModelError`, which says what a folder without config.json is."""
    names = {p.name for p in folder.iterdir()}
    what = f"model folder {str(folder)!r}"
    if ADAPTER_CONFIG in names:
        _refuse_adapter(folder)
    if "params.json" in names:
        raise ModelError(
            f"{what} is in the format of the model's authors (params.json), not in that of transformers",
            "download the version with config.json",
        )
    if (folder / "snapshots").is_dir():
        found = sorted(p.parent for p in folder.glob("snapshots/*/config.json"))
        hint = f"give {found[0]}, or the model's name on the hub" if found else "give the model's name on the hub"
        raise ModelError(f"{what} is an entry of the hub's cache", hint)
    inside = sorted(p.parent for p in folder.glob("*/config.json"))
    if inside:
        raise ModelError(f"{what} has no config.json", f"did you mean {inside[-1]}?")
    if not names:
        raise ModelError(f"{what} is empty", "give the folder that holds the model")
    raise ModelError(f"{what} has no config.json", "give the folder that holds the model")


def _refuse_adapter(folder: Path) -> None:
    try:
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    of = f" of {base}" if isinstance(base, str) and base else ""
    raise ModelError(
        f"model folder {str(folder)!r} holds an adapter (LoRA){of}, not a model",
        "name its base model with --model, and this folder with --lora",
    )


def _check_task(folder: Path, settings: Mapping[str, Any], task: str) -> None:
    """Raises `ModelError` for models that do not do the task (`ModelConfig.task`), and for configurations that do not name their type."""
    architectures = [a for a in settings.get("architectures") or () if isinstance(a, str)]
    if not isinstance(settings.get("model_type"), str) and not architectures:
        raise ModelError(
            f"{folder / 'config.json'} does not say the model's model_type", "give the folder of a transformers model"
        )
    if settings.get("is_encoder_decoder") is True:
        raise ModelError(
            f"the model in {str(folder)!r} is an encoder-decoder ({settings.get('model_type')}), and batchgen runs decoder-only models",
            "give a decoder-only model",
        )
    for name in architectures[:1]:
        kind = next((kind for ending, kind in _HEADS.items() if name.endswith(ending)), None)
        classifier = name.endswith(CLASSIFIER)
        if kind is not None and not (classifier and task != "generate"):
            raise ModelError(
                f"the model in {str(folder)!r} is {kind} ({name}), not a model that writes text",
                CLASSIFY_HINT if classifier else "give a causal language model (…ForCausalLM)",
            )
        if task == "classify" and not classifier:
            raise ModelError(
                f"--classify: the model in {str(folder)!r} has no classification head (its architecture is {name})",
                "give a …ForSequenceClassification model; --choices labels prompts with a model that writes text",
            )


def mlx_settings(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the quantization settings of a model quantized for MLX, by those of its config.json; None for others."""
    found, elsewhere = settings.get("quantization"), settings.get("quantization_config")
    if (
        not isinstance(found, dict)
        or "bits" not in found
        or (isinstance(elsewhere, dict) and quantizer_of(elsewhere) != UNNAMED)
    ):
        return None
    is_multimodal = bool(settings.get("text_config") or settings.get("vision_config"))
    return {"quant_method": MLX, "model_type": settings.get("model_type"), "is_multimodal": is_multimodal, **found}


def quantizer_of(settings: Mapping[str, Any]) -> str:
    """Returns the `quant_method` of quantization settings, which those of older bitsandbytes checkpoints do not name; `UNNAMED` if it is not known."""
    older = bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))
    return str(settings.get("quant_method") or ("bitsandbytes" if older else UNNAMED))


def check_quantizer(model: str, method: str | None) -> None:
    """Raises `ModelError` for a quantization that batchgen does not read, by its `quant_method`. `model` says which model."""
    if method is not None and method not in WEIGHT_ONLY and method not in _WITH_OWN_LAYERS:
        raise ModelError(
            f"the model {model} is quantized with {_NOT_READ.get(method, method)}, which batchgen does not read",
            "give the original model, or one quantized in a way that docs/quantized.md lists",
        )


def _check_dtype(folder: Path, settings: Mapping[str, Any]) -> None:
    dtype = settings.get("dtype", settings.get("torch_dtype"))
    if isinstance(dtype, str) and dtype.startswith("float8") and "quantization_config" not in settings:
        raise ModelError(
            f"the weights in {str(folder)!r} are {dtype} without scales, which batchgen does not read",
            "give the original model",
        )
    if isinstance(dtype, str) and dtype not in _DTYPES and not dtype.startswith("float8"):
        raise ModelError(
            f"{folder / 'config.json'} gives the dtype {dtype!r}",
            f"correct it: {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}",
        )


def _shards(folder: Path) -> list[Path]:
    """Returns the files of the weights. Raises `ModelError` if there are none or one is missing."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.exists() or single.is_symlink():
        return [_there(single, folder)]
    if index.exists():
        mapped = read_json(index).get("weight_map")
        if not isinstance(mapped, dict) or not mapped:
            raise ModelError(f"{index} has no weight_map", "copy the file from the model again")
        return [
            _there(folder / name, folder, len(set(mapped.values()))) for name in sorted(set(map(str, mapped.values())))
        ]
    names = sorted(p.name for p in folder.iterdir())
    loose = [name for name in names if name.endswith(".safetensors")]
    if ADAPTER_WEIGHTS in loose or ADAPTER_CONFIG in names:
        _refuse_adapter(folder)
    if any(name.startswith("model-") for name in loose):
        raise ModelError(
            f"model folder {str(folder)!r} has shards ({loose[0]}) but no model.safetensors.index.json", _AGAIN
        )
    if loose:
        raise ModelError(
            f"model folder {str(folder)!r} has {loose[0]}, but no model.safetensors",
            "rename it if it holds all weights in the format of transformers, or download the version that has model.safetensors",
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise only_pickled(str(folder))
    raise ModelError(f"model folder {str(folder)!r} has no weights (model.safetensors)", _AGAIN)


def only_pickled(model: str) -> ModelError:
    """Returns the refusal of a model (a folder or a name on the hub) that has weights, but none in safetensors files."""
    return ModelError(
        f"the model {model!r} has only pickled weights (pytorch_model.bin), which batchgen never opens because they can run any program",
        "convert them on a machine where that is safe (from_pretrained and save_pretrained of transformers), or use another model or --revision",
    )


def _there(path: Path, folder: Path, count: int = 1) -> Path:
    if path.is_file():
        return path
    if path.is_symlink():
        raise ModelError(f"{path} is a link to a file that does not exist", "download the model again")
    raise ModelError(f"the weights in {str(folder)!r} lack {path.name}, one of {count} shards", _AGAIN)


def safetensors_header(path: Path) -> dict[str, Any]:
    """Returns what a safetensors file says of its tensors, by name. Raises `ModelError` unless the file is as long as that.

    The layout: 8 bytes with the header's length, the header as JSON, the tensors' bytes.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as f:
            start = f.read(512)
            _check_content(path, start)
            length = int.from_bytes(start[:8], "little")
            f.seek(8)
            header = f.read(length) if len(start) >= 8 and length <= size - 8 else b""
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror}", "check its permissions") from None
    try:
        tensors: dict[str, Any] = json.loads(header)
        tensors.pop("__metadata__", None)
        end = max((t["data_offsets"][1] for t in tensors.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
        if 8 <= size < length + 8 < 1 << 30:
            raise ModelError(f"{path} is cut inside its header", _AGAIN) from None
        raise ModelError(f"{path} is damaged, or not a safetensors file", "download it again") from None
    if 8 + length + end > size:
        raise ModelError(f"{path} is cut: it has {size:,} of {8 + length + end:,} bytes", _AGAIN)
    return tensors


def has_tokenizer(config: ModelConfig) -> bool:
    """Whether a model has a tokenizer, as far as is known without looking at the hub."""
    folder = Path(config.model).expanduser()
    return not folder.is_dir() or gguf_file(config) is not None or _has_tokenizer(folder)


def _has_tokenizer(folder: Path) -> bool:
    names = {p.name for p in folder.iterdir()}
    own = any(name.startswith("tokenization_") for name in names)  # the model's own code may read any file
    return own or bool(names & _TOKENIZERS) or any(name.endswith(_VOCABULARIES) for name in names)


def _check_tokenizer(folder: Path) -> None:
    """Raises `ModelError` for a folder without a tokenizer, and for a tokenizer.json that is a pointer, a web page or cut off."""
    if not _has_tokenizer(folder):
        raise ModelError(
            f"model folder {str(folder)!r} has no tokenizer files",
            "copy tokenizer.json and tokenizer_config.json of the model into it",
        )
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    with path.open("rb") as f:
        _check_content(path, f.read(512))
        f.seek(-min(64, path.stat().st_size), 2)
        whole = f.read().rstrip().endswith(b"}")
    if not whole:
        read_json(path)  # raises what is wrong with it
