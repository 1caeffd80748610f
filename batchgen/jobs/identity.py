"""The settings that a job's results depend on, as a flat dictionary of plain values. Two runs belong to one job if they are equal."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.config import JobConfig, ModelConfig, PromptConfig
from batchgen.jobs.files.disk import json_digest
from batchgen.jobs.files.manifest import MODEL_FILE, as_stored, load_manifest
from batchgen.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_folder, find_file, gguf_file
from batchgen.parsers.heads import OutputHead
from batchgen.prompts import LoadedTokenizer, PromptBuilder
from batchgen.prompts.tokenizer import checkpoint_dtype
from batchgen.records.output import job_path
from batchgen.sampling_params import SamplingParams
from batchgen.version import versions

_SMALL_FILES = (
    "config.json", "generation_config.json", "*.safetensors.index.json", "hf_quant_config.json", "quantize_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken",
    "chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja",
    ADAPTER_CONFIG,
)  # fmt: skip
"""Configuration and tokenizer files of a model's folder. They are digested whole."""
_EMBEDDING_FILES = (
    "modules.json", "*_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json",
)  # fmt: skip
_WEIGHTS = "*.safetensors"
"""The only weight files that are read. Other files of a folder do not matter."""
_WHOLE_BYTES = 16 << 20
"""Weight files up to this size are digested whole, which takes a few hundredths of a second."""
_BLOCK_BYTES = 4096
_BLOCKS = 64
_TENSOR_BLOCKS = 192
_MAX_HEADER_BYTES = 1 << 26
_LONG_TEXT = 200
FREE_OPTIONS = (
    "device", "device_map", "ray", "workers", "cpus_per_worker", "ray_working_dir", "compile", "attention", "weights", "weight_memory",
)  # fmt: skip
"""Options of `ModelConfig` that say where and how a model runs: results do not depend on them, and a job may change them."""
_FREE_OF_PROMPTS = ("sampling_defaults", "priority_column")
"""Options of `PromptConfig` that a job may change, because results do not depend on them or only through the sampling parameters."""
_DIGEST_CHARACTERS = 16
_DATE = "date"
"""The setting that holds the time that a chat template writes into prompts."""


def job_settings(
    config: JobConfig, tokenizer: LoadedTokenizer, prompts: PromptBuilder, model: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns everything that changes results. Device, batch, memory, limits and the columns of the output do not.

    `model`: `model_identity`, if it is known already.
    """
    return {
        **(model_identity(config.model) if model is None else model),
        "dtype": dtype_name(config.model, tokenizer.hf_config),
        "quantize": config.model.quantize,
        "image_max_pixels": config.model.image_max_pixels,
        **_head_settings(tokenizer.head),
        **_plain_settings(config.prompts, _FREE_OF_PROMPTS),
        "chat": prompts.chat,
        _DATE: None if prompts.date is None else prompts.date.isoformat(),
        **_plain_settings(prompts.sampling, ("given",)),
    }


def with_defaults(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a job that an earlier version began: options of `new` that it did not have yet have their defaults."""
    options = _plain_settings(PromptConfig(), _FREE_OF_PROMPTS) | _plain_settings(SamplingParams(), ("given",))
    return {name: value for name, value in as_stored(options).items() if name in new} | dict(old)


def date_of_job(output: str, work_dir: str | None) -> datetime | None:
    """Returns the time that a job's chat template writes into prompts: that of the job's first run. None if there is no job or no such template.

    All runs and shards of a job write the same time. With another time every prompt would be new, and no result could be used.
    Raises `UsageError` if the job's manifest is damaged.
    """
    manifest = None if output == "-" else load_manifest(job_path(output, work_dir) / "manifest.json")
    date = None if manifest is None else manifest.settings.get(_DATE)
    return None if date is None else datetime.fromisoformat(date)


def command_digest(config: JobConfig, model: Mapping[str, Any]) -> str:
    """Digest of all that `job_settings` and the form of the output's rows are made of, known before a tokenizer is loaded.

    That is the command's own options, the model's files (`local_identity`) and the versions of what reads them.
    """
    command = {
        "model": {name: value for name, value in asdict(config.model).items() if name not in FREE_OPTIONS},
        "files": dict(model),
        "prompts": asdict(config.prompts),
        "sampling": asdict(config.sampling),
        "rows": [config.keep, config.id_column, config.token_ids, config.output_format, config.expect, config.parse],
        "versions": versions(),
    }
    return json_digest(command)


def _head_settings(head: OutputHead | None) -> dict[str, Any]:
    if head is None:
        return {}
    settings = {"task": head.task, "pooling": head.pooling, "normalize": head.normalize}
    return (
        settings if head.task == "embed" else settings | {"labels": list(head.labels), "independent": head.independent}
    )


def _plain_settings(config: PromptConfig | SamplingParams, without: Collection[str]) -> dict[str, Any]:
    """Returns the options of a configuration as plain values; long texts as their digest."""
    found = {name: value for name, value in asdict(config).items() if name not in without}
    for name, value in found.items():
        if isinstance(value, tuple):
            found[name] = list(value)
        elif isinstance(value, dict):
            found[name] = json.dumps(value, sort_keys=True)
        elif isinstance(value, str):
            found[name] = _text_or_digest(value)
    return found


def _text_or_digest(text: str) -> str:
    """Returns a short text as it is, and a long one as its start and its digest."""
    if len(text) <= _LONG_TEXT:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{text[:40]}… ({len(text)} characters, digest {digest})"


def dtype_name(config: ModelConfig, hf_config: Any) -> str:
    """Returns the dtype that results depend on. `auto` is the checkpoint's own, even if a processor computes it in float32."""
    return checkpoint_dtype(hf_config) if config.dtype == "auto" else config.dtype


def model_identity(config: ModelConfig) -> dict[str, Any]:
    """Returns what identifies a model: for a model of the hub its name and commit, for a folder the size and digest of each of its files.

    Configuration and tokenizer files are digested whole. Of a large weight file, the header and about 256 blocks of 4 KiB are digested, spread
    over the file and its tensors: two checkpoints of one training run differ in nearly all of them. A model's code counts if it may run, and
    its sentence-transformers files with `--embed`.
    """
    folder = Path(config.model).expanduser()
    found: dict[str, Any]
    file = gguf_file(config)
    if file is not None:
        found = {f"{MODEL_FILE}{file.name}": _file_identity(file)}
    elif folder.is_dir():
        more = (*(("*.py",) if config.trust_remote_code else ()), *(_EMBEDDING_FILES if config.embed else ()))
        patterns = (*_SMALL_FILES, _WEIGHTS, *more)
        paths = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
        found = {f"{MODEL_FILE}{path.relative_to(folder).as_posix()}": _file_identity(path) for path in paths}
    else:
        cached = find_file(config, "config.json", fetch=False)  # it has just been loaded, in the folder of its commit
        commit = cached.parent.name if cached is not None else config.revision or "main"
        found = {"model": f"{config.model} at {commit}"}
    if config.lora is not None:
        adapter = adapter_folder(config.lora)
        found |= {f"--lora {name}": _file_identity(adapter / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    return found


def local_identity(config: ModelConfig) -> dict[str, Any] | None:
    """Returns `model_identity` if the hub need not be asked: the model is a folder, a GGUF file, a commit of the hub, or in its cache and the hub is
    offline, and the adapter is a folder. Else None."""
    adapter = config.lora is None or Path(config.lora).expanduser().is_dir()
    local = Path(config.model).expanduser().is_dir() or gguf_file(config) is not None
    return model_identity(config) if adapter and (local or _commit_is_known(config)) else None


def _commit_is_known(config: ModelConfig) -> bool:
    """Whether it is known without the hub which commit of a model of the hub will be loaded."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return find_file(config, "config.json", fetch=False) is not None
    return re.fullmatch("[0-9a-f]{40}", config.revision or "") is not None


def _file_identity(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        if path.suffix in (".safetensors", ".gguf") and size > _WHOLE_BYTES:
            for start, length in _sampled(file, size):
                file.seek(start)
                digest.update(file.read(length))
        else:
            while block := file.read(1 << 20):
                digest.update(block)
    return f"{size:,} bytes with digest {digest.hexdigest()[:_DIGEST_CHARACTERS]}"


def _sampled(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Start and length of what is read of a safetensors file: its header, blocks at equal distances, and the middle of tensors.

    Of a GGUF file: its first MiB, where its settings are, and many more blocks at equal distances.

    The middles of tensors show a change of a few layers only, such as that of a merged adapter.
    """
    if file.read(4) == b"GGUF":
        count = _BLOCKS + _TENSOR_BLOCKS
        starts = [i * (size - _BLOCK_BYTES) // (count - 1) for i in range(count)]
        return [(0, 1 << 20), *((start, _BLOCK_BYTES) for start in starts)]
    file.seek(0)
    header_bytes = min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)
    data = 8 + header_bytes
    try:
        header = json.loads(file.read(header_bytes))
        ends = sorted(t["data_offsets"] for name, t in header.items() if name != "__metadata__")
        middles = [data + (start + end) // 2 for start, end in ends]
    except (ValueError, TypeError, KeyError, AttributeError):
        middles = []  # a damaged file, which is reported when the model is loaded
    middles = [middles[i * len(middles) // _TENSOR_BLOCKS] for i in range(_TENSOR_BLOCKS)] if middles else []
    even = [i * (size - _BLOCK_BYTES) // (_BLOCKS - 1) for i in range(_BLOCKS)]
    blocks = sorted({min(start, size - _BLOCK_BYTES) for start in (*even, *middles)})
    return [(0, data), *((start, _BLOCK_BYTES) for start in blocks)]
