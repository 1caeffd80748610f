"""What a job's results depend on, as a flat dictionary of words: two runs belong to one job if theirs are equal. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchgen.config import JobConfig, ModelConfig, PromptConfig
from batchgen.prompts import LoadedTokenizer

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_NOT_READ_BY_US = ("README.md", "training_args.bin", "trainer_state.json")
_LONG_TEXT = 200
_DIGEST_CHARACTERS = 16


def job_settings(config: JobConfig, text: LoadedTokenizer, *, chat: bool) -> dict[str, Any]:
    """Everything that changes results. Device, batch, memory, limits and what is carried to the output are free."""
    sampling = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(config.sampling).items()}
    sampling |= {"regex": _text(config.sampling.regex), "json_schema": _text(config.sampling.json_schema)}
    return {
        "model": model_identity(config.model),
        "dtype": dtype_name(config.model, text.hf_config),
        **_prompt_settings(config.prompts, chat=chat),
        **sampling,
    }


def _prompt_settings(prompts: PromptConfig, *, chat: bool) -> dict[str, Any]:
    return {
        "prompt_column": prompts.prompt_column,
        "messages_column": prompts.messages_column,
        "template": _text(prompts.template),
        "prefix": _text(prompts.prefix),
        "system": _text(prompts.system),
        "chat": chat,
        "chat_template": _text(prompts.chat_template),
        "chat_template_kwargs": json.dumps(prompts.chat_template_kwargs, sort_keys=True),
        "on_long_prompt": prompts.on_long_prompt,
        "row_params": list(prompts.row_params),
        "score": prompts.score,
        "completion_column": prompts.completion_column,
    }


def _text(text: str | None) -> str | None:
    """A short text as it is, a long one by its digest."""
    if text is None or len(text) <= _LONG_TEXT:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{text[:40]}… ({len(text)} characters, digest {digest})"


def dtype_name(config: ModelConfig, hf_config: Any) -> str:
    """The dtype a model is run in: `auto` is the checkpoint's own."""
    if config.dtype != "auto":
        return config.dtype
    own = getattr(hf_config, "dtype", None)
    return "float32" if own is None else str(own).removeprefix("torch.")


def model_identity(config: ModelConfig) -> str:
    """A hub model by name and commit; a folder by its small files, and by the headers and sizes of its weights: not a hash of everything."""
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        return f"{config.model} at {_commit(config)}"
    digest = hashlib.blake2b()
    size = 0
    for path in sorted(
        p for p in folder.iterdir() if p.is_file() and p.name not in _NOT_READ_BY_US and p.name[0] != "."
    ):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        if path.name.endswith(_WEIGHTS):
            size += path.stat().st_size
            digest.update(_header(path))
        else:
            for block in _blocks(path):
                digest.update(block)
    return f"{size:,} bytes of weights, digest {digest.hexdigest()[:_DIGEST_CHARACTERS]}"


def _header(path: Path) -> bytes:
    """The header of a safetensors file (names, shapes and types of its tensors); of others the first bytes."""
    with path.open("rb") as f:
        start = f.read(8)
        if path.suffix == ".safetensors":
            return start + f.read(min(int.from_bytes(start, "little"), 1 << 26))
        return start + f.read(4096)


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            yield block


def _commit(config: ModelConfig) -> str:
    """The commit that a hub model's name stands for in the local cache, where its config has just been loaded to."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(config.model, "config.json", revision=config.revision)
    if isinstance(found, str):
        return Path(found).parent.name
    return config.revision or "main"
