"""How the texts of options become the values of `batchgen.config`. Errors name the option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.errors import UsageError

if TYPE_CHECKING:
    from batchgen.config import EngineConfig, ModelConfig, PromptConfig
    from batchgen.sampling_params import SamplingParams


def number_or_auto(option: str, text: str) -> int | None:
    """The number, None for auto."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a number", "give a whole number, or auto") from None


def columns(text: str | None) -> tuple[str, ...]:
    """Column names separated by commas."""
    return tuple(name for name in (text or "").split(",") if name)


def kept_columns(text: str) -> tuple[str, ...] | None:
    """None for all."""
    return None if text == "all" else () if text == "none" else columns(text)


def file_text(option: str, path: str | Path | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise UsageError(f"{option} {path} cannot be read: {e.strerror}", "check the path") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"{option} {path} is not UTF-8 text", "save it as UTF-8") from e


def text_or_file(option: str, value: str | None) -> str | None:
    """The text itself, or that of the file behind an @."""
    return file_text(option, value[1:]) if value is not None and value.startswith("@") else value


def json_object(option: str, text: str | None) -> dict[str, object]:
    try:
        value = json.loads(text or "{}")
    except ValueError as e:
        raise UsageError(
            f"{option} is not JSON: {e}", """give an object such as '{"enable_thinking": false}'"""
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object, not {text}", """such as '{"enable_thinking": false}'""")
    return value


def model_config(model: str, revision: str | None, dtype: str, device: str, trust_remote_code: bool) -> ModelConfig:
    from batchgen.config import ModelConfig

    return ModelConfig(model=model, revision=revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code)


def prompt_config(
    *,
    prompt_column: str,
    messages_column: str,
    template: Path | None,
    prefix: str | None,
    chat: bool | None,
    system: str | None,
    chat_template: Path | None,
    chat_template_kwargs: str | None,
    on_long_prompt: str,
    row_params: str | None,
) -> PromptConfig:
    from batchgen.config import PromptConfig

    return PromptConfig(
        prompt_column=prompt_column,
        messages_column=messages_column,
        template=file_text("--template", template),
        prefix=text_or_file("--prefix", prefix),
        chat=chat,
        system=text_or_file("--system", system),
        chat_template=file_text("--chat-template", chat_template),
        chat_template_kwargs=json_object("--chat-template-kwargs", chat_template_kwargs),
        on_long_prompt=on_long_prompt,
        row_params=columns(row_params),
    )


def sampling_params(**values: object) -> SamplingParams:
    """The parameters; a value out of range is told by its option's name."""
    from batchgen.sampling_params import SamplingParams

    try:
        return SamplingParams(**values)  # type: ignore[arg-type]
    except ValueError as e:
        name, _, rest = str(e).partition(" ")
        option = {"stop_token_ids": "stop-token-id"}.get(name, name.replace("_", "-"))
        raise UsageError(f"--{option} {rest}") from None


def engine_config(
    *,
    chunk_size: int,
    batch_size: str,
    max_batch_tokens: str,
    max_prefill_tokens: str,
    kv_memory: str,
    share: bool,
    debug: bool,
) -> EngineConfig:
    from batchgen.config import EngineConfig

    return EngineConfig(
        chunk_size=chunk_size,
        batch_size=number_or_auto("--batch-size", batch_size),
        max_batch_tokens=number_or_auto("--max-batch-tokens", max_batch_tokens),
        max_prefill_tokens=number_or_auto("--max-prefill-tokens", max_prefill_tokens),
        kv_memory=kv_memory,
        share=share,
        debug=debug,
    )
