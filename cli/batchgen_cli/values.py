"""How the texts of options become the values of `batchgen.config`. Errors name the option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from batchgen.errors import UsageError

if TYPE_CHECKING:
    from batchgen.config import EngineConfig, ModelConfig, PromptConfig
    from batchgen.sampling_params import SamplingParams
    from batchgen_cli.arguments import RunOptions, Shared


def number_or_auto(option: str, text: str) -> int | None:
    """The number, None for auto."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a number", "give a whole number, or auto") from None


def window(text: str | None) -> int | Literal["all"] | None:
    """Rows, or all of them."""
    if text is None or text == "all":
        return "all" if text else None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--window {text!r} is not a number", "give a number of rows, or all") from None


def as_json(log_format: str) -> bool:
    if log_format not in ("text", "json"):
        raise UsageError(f"--log-format {log_format!r} is unknown", "use text or json")
    return log_format == "json"


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


def json_schema(path: Path | None) -> str | None:
    """The schema of a file, in the order it has there, blanks apart."""
    text = file_text("--json-schema", path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as e:
        raise UsageError(f"--json-schema {path} is not JSON: {e}", "mend the file") from None
    if not isinstance(value, dict):
        raise UsageError(f"--json-schema {path} must hold a JSON object", """such as {"type": "object"}""")
    return json.dumps(value)


def model_config(given: Shared) -> ModelConfig:
    from batchgen.config import ModelConfig

    return ModelConfig(
        model=given.model, revision=given.revision, dtype=given.dtype, trust_remote_code=given.trust_remote_code
    )


def prompt_config(given: Shared) -> PromptConfig:
    from batchgen.config import PromptConfig

    return PromptConfig(
        prompt_column=given.prompt_column,
        messages_column=given.messages_column,
        template=file_text("--template", given.template),
        prefix=text_or_file("--prefix", given.prefix),
        chat=given.chat,
        system=text_or_file("--system", given.system),
        chat_template=file_text("--chat-template", given.chat_template),
        chat_template_kwargs=json_object("--chat-template-kwargs", given.chat_template_kwargs),
        on_long_prompt=given.on_long_prompt,
        row_params=columns(given.row_params),
        score=given.score,
        completion_column=given.completion_column,
    )


def shared_sampling(given: Shared) -> dict[str, object]:
    return {"max_tokens": given.max_tokens, "n": given.n, "choices": choices(given.choices)}


def run_sampling(given: RunOptions) -> dict[str, object]:
    return {
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "min_p": given.min_p,
        "repetition_penalty": given.repetition_penalty,
        "presence_penalty": given.presence_penalty,
        "frequency_penalty": given.frequency_penalty,
        "stop": tuple(given.stop or ()),
        "stop_token_ids": tuple(given.stop_token_id or ()),
        "ignore_eos": given.ignore_eos,
        "seed": given.seed,
        "logprobs": given.logprobs,
        "regex": given.regex,
        "json_schema": json_schema(given.json_schema),
    }


def choices(text: str | None) -> tuple[str, ...]:
    from batchgen.sampling_params import choices_of

    try:
        return () if text is None else choices_of(text)
    except ValueError as e:
        raise UsageError(f"--{e}") from None


def sampling_params(**values: object) -> SamplingParams:
    """The parameters; a value out of range is told by its option's name."""
    from batchgen.sampling_params import SamplingParams

    try:
        return SamplingParams(**values)  # type: ignore[arg-type]
    except ValueError as e:
        name, _, rest = str(e).partition(" ")
        before, together, other = rest.rpartition("combined with ")
        if together:
            rest = f"{before}{together}{_option(other)}"
        raise UsageError(f"{_option(name)} {rest}") from None


def _option(name: str) -> str:
    return "--" + {"stop_token_ids": "stop-token-id"}.get(name, name.replace("_", "-"))


def engine_config(given: RunOptions) -> EngineConfig:
    from batchgen.config import EngineConfig

    return EngineConfig(
        chunk_size=given.chunk_size,
        batch_size=number_or_auto("--batch-size", given.batch_size),
        max_batch_tokens=number_or_auto("--max-batch-tokens", given.max_batch_tokens),
        max_prefill_tokens=number_or_auto("--max-prefill-tokens", given.max_prefill_tokens),
        max_kv_read=given.max_kv_read,
        kv_memory=given.kv_memory,
        host_kv_memory=given.host_kv_memory,
        policy=given.policy,
        row_timeout=given.row_timeout,
        share=given.share,
        debug=given.debug,
    )
