"""Makes output rows (docs/reference/results.md), and finds the output file and the folder of its job."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.config import JobConfig, PromptConfig
from batchgen.errors import UsageError
from batchgen.parsers.heads import OutputHead
from batchgen.parsers.json_schemas import enforceable, loaded
from batchgen.process.user_cache import cache_folder
from batchgen.records.files import DELIMITERS, split_name
from batchgen.records.jsonl import to_json
from batchgen.records.openai_batch import OpenAIForm, batch_record
from batchgen.records.parquet_types import clean, id_text
from batchgen.records.remote import address, is_url, plain_name
from batchgen.records.result_values import PARTS, Part, completion_values, ids_known, plain_calls, plain_parts
from batchgen.records.rows import Row
from batchgen.result import Result
from batchgen.sampling_params import SamplingParams

_MAX_NAME = 100  # characters that the folder of a remote output's job takes from its name

RESULT_NAMES = frozenset([
    "text", "finish_reason", "usage", "error", "truncated", "choices", "choice_probs", "score", "token_ids", "tool_calls",
])  # fmt: skip
"""Names of result fields. An input column of such a name is carried as `input_…`."""
TASK_NAMES = frozenset(("prompt_logprobs", "embedding", "reward", "valid", "parsed"))
"""Names of result fields that only some commands have. For others, an input column of such a name is carried as it is."""
INPUT_FILE = "input_file"
"""If there are several input files, the column that names the row's file. `--keep` treats it like a column of the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """The form of output rows: what they have in addition to the result."""

    keep: tuple[str, ...] | None = None
    """Input columns that are carried, as far as a row has them; None for all."""
    id_column: str | None = None
    token_ids: bool = False
    """Whether rows have the completion's token ids."""
    input_file: bool = False
    """Whether rows name the input file."""
    reasoning: bool = False
    """Whether rows have the thoughts before their text, and how many tokens they took."""
    tool_calls: bool = False
    """Whether Parquet's choices have a field for calls of tools."""
    parsed: str = ""
    """The schema of the values of `parsed`, as JSON; empty if rows have no such field."""
    asked: tuple[str, ...] = ()
    """Parts of a result that the command asks of every row: rows that failed have them as null."""
    optional: tuple[str, ...] = ()
    """The parts of a result, of those that only some rows have (`OPTIONAL_RESULTS`), that a table has a column for even if no row has them."""
    openai: OpenAIForm | None = None
    """Rows are records of OpenAI's Batch output, which carry no columns; None for batchgen's own rows."""


def row_form(
    config: JobConfig,
    output: str,
    *,
    chat: bool,
    reasoning: bool = False,
    tool_calls: bool = False,
    head: OutputHead | None = None,
    optional: Collection[str] = (),
    several_files: bool = False,
) -> RowForm:
    """Returns the form of a job's rows.

    `chat` tells whether prompts go through a chat template, `reasoning` whether texts have thoughts, `tool_calls` whether answers may have calls.
    `head` is that of `--embed` or `--classify`, `optional` are further parts of results that rows may ask for, and `several_files` tells whether the input has more than one.

    Raises `UsageError` if the format of `output` cannot hold such rows.
    """
    openai, keep, asked = None, config.keep, parts_asked(config.prompts, config.sampling, head)
    asked += () if config.parse is None else ("parsed",)
    if config.output_format == "openai":
        if output != "-" and output_format(output)[0] != "jsonl":
            raise UsageError(
                f"--output-format openai is JSON lines, and {output} is not", "name a .jsonl output with -o"
            )
        openai = OpenAIForm(model=config.model.model, chat=chat, embed=config.model.embed)
        keep, reasoning, tool_calls = (), False, False
    return RowForm(
        keep=keep,
        id_column=config.id_column,
        token_ids=config.token_ids,
        input_file=several_files and (keep is None or INPUT_FILE in keep),
        reasoning=reasoning,
        tool_calls=tool_calls,
        parsed=_schema_of_parsed(config),
        asked=asked,
        optional=tuple(sorted({*optional, *asked})),
        openai=openai,
    )


def parts_asked(prompts: PromptConfig, sampling: SamplingParams, head: OutputHead | None) -> tuple[str, ...]:
    """Returns the parts of a result, of those that only some results have, that these options ask of every row."""
    if head is not None:
        return (head.result_name,)
    if prompts.score or prompts.prompt_logprobs:
        return ("score", "prompt_logprobs") if prompts.prompt_logprobs else ("score",)
    asked = {
        "choices": sampling.n > 1 or sampling.logprobs is not None,
        "choice_probs": bool(sampling.choices) or prompts.choices_column is not None,
        "valid": sampling.json_schema is not None or "json_schema" in prompts.row_params,
    }
    return tuple(name for name, wanted in asked.items() if wanted)


def _schema_of_parsed(config: JobConfig) -> str:
    if config.parse is None:
        return ""
    try:
        return json.dumps(enforceable(loaded(config.sampling.json_schema or "")))
    except (ValueError, RecursionError):  # another check has the message
        return ""


def output_row(row: Row, result: Result, form: RowForm, parts: Mapping[str, Part] = PARTS) -> dict[str, Any]:
    """Returns the output row of an input row: id (else the row's number), carried columns as they came, and result; or its record of OpenAI's Batch output.

    `token_ids` is null if they are not known (a failed row, or a result of an output that had none). `truncated` is present only if
    true; `tool_calls`, `choices`, `choice_probs`, `score`, `prompt_logprobs`, `embedding` and `reward` only if the result has them or the command asks for them.
    `parts`: how they are written. Rows that become columns of Arrow (`result_array`) have `CODED_PARTS`.
    """
    own = own_id(row, form.id_column, openai=form.openai is not None)
    if form.openai is not None:
        custom_id = id_text(row.number if own is None else own)
        return batch_record(row, result, form.openai, custom_id=custom_id, token_ids=form.token_ids)
    out: dict[str, Any] = {"id": row.number if own is None else own}
    if form.input_file:
        out[INPUT_FILE] = row.file
    for column, name in carried_names(row.columns, form).items():
        out[name] = row.columns[column]
    out["text"] = result.text
    out["finish_reason"] = result.finish_reason
    if form.reasoning:
        out["reasoning"] = result.reasoning
    out["usage"] = {"prompt_tokens": result.prompt_tokens, "completion_tokens": result.completion_tokens}
    if form.reasoning:
        out["usage"]["reasoning_tokens"] = result.reasoning_tokens
    if result.truncated:
        out["truncated"] = True
    if result.valid is not None and ("valid" in form.asked or "valid" not in out):
        out["valid"] = result.valid
    if form.parsed and result.valid:
        out["parsed"] = json.loads(result.text or "null")
    if result.tool_calls:
        out["tool_calls"] = plain_calls(result.tool_calls)
    if result.completions:
        out["choices"] = completion_values(result.completions, token_ids=form.token_ids, known=ids_known(result))
        for choice in out["choices"] if form.parsed else ():
            choice["parsed"] = json.loads(choice["text"]) if choice.get("valid") else None
    out |= plain_parts(result, parts)
    for name in form.asked:
        out.setdefault(name, None)
    if form.token_ids:
        out["token_ids"] = list(result.token_ids) if ids_known(result) else None
    failed = result.failed
    out["error"] = {"type": result.error_type, "message": result.error_message} if failed else None
    return out


def own_id(row: Row, id_column: str | None, *, openai: bool = False) -> Any:
    """Returns the value of the id column, else of `id` or `custom_id` (in OpenAI's form `custom_id` or `id`). Null and NaN count as missing; None if all are."""
    for name in (id_column, "custom_id", "id") if openai else (id_column, "id", "custom_id"):
        value = None if name is None else row.columns.get(name)
        if value is not None and value == value:  # not NaN
            return value
    return None


def id_digest(id: Any) -> bytes | None:
    """Digest (16 bytes) of a row's id (`own_id`): the same for the number 1 and the text 1. Stored keys are made of it, so it must not change. None for None."""
    if id is None:
        return None
    text = id if isinstance(id, str) else to_json(id).decode()
    return hashlib.blake2b(clean(text).encode("utf-8", "replace"), digest_size=16, person=b"id").digest()


def carried_names(columns: Sequence[str] | dict[str, Any], form: RowForm) -> dict[str, str]:
    """Returns the output names of the carried columns.

    The column `id` becomes the output's `id`. If another column was chosen for that, it is carried as `input_id`, so that nothing is lost.
    """
    names: dict[str, str] = {}
    if form.keep == ():
        return names
    for column in columns:
        if form.keep is not None and column not in form.keep:
            continue
        name = column
        if column == "id":
            if form.id_column in (None, "id"):
                continue
            name = "input_id"
        elif (
            column in RESULT_NAMES
            or column in form.asked
            or (form.reasoning and column == "reasoning")
            or (form.input_file and column == INPUT_FILE)
        ):
            name = f"input_{column}"
        while name != column and name in columns:
            name = f"input_{name}"
        names[column] = name
    return names


def output_of(config: JobConfig) -> str:
    """Returns the output of a job: the one that is named, else one beside the input file, or `-` for standard input. Raises `UsageError` if it must be named."""
    if config.output:
        return config.output
    inputs = [plain_name(name) for name in config.inputs]
    if "-" in inputs:
        return "-"
    if len(inputs) != 1:
        raise UsageError("several inputs need an output", "name it with -o")
    path = Path(inputs[0])
    if is_url(inputs[0]):
        raise UsageError(f"the remote input {inputs[0]} needs an output", "name it with -o")
    if path.is_dir():
        raise UsageError(f"the folder {inputs[0]} needs an output", "name it with -o")
    if not path.exists():
        raise UsageError(f"the glob {inputs[0]} needs an output", "name it with -o")
    stem, by_suffix, _ = split_name(path.name)
    stem = stem if by_suffix else Path(stem).stem
    parquet = config.push is not None or (config.input_format or by_suffix) == "parquet"
    return str(path.with_name(stem + (".out.parquet" if parquet else ".out.jsonl")))


def output_format(output: str) -> tuple[str, str | None]:
    """Returns format (one of `INPUT_FORMATS`) and compression of an output by its suffix. Raises `UsageError` for other suffixes."""
    _, kind, compression = split_name(output)
    if kind == "parquet" and compression:
        raise UsageError(
            f"the output {output} would be compressed twice", "Parquet is compressed inside: leave the suffix out"
        )
    if kind not in ("jsonl", "parquet", *DELIMITERS):
        raise UsageError(
            f"the output {output} has an unknown suffix",
            "use .jsonl, .csv, .tsv (or one of them with .gz or .zst) or .parquet, or - for standard output",
        )
    return kind, compression


def job_path(output: str, work_dir: str | os.PathLike[str] | None) -> Path:
    """Path of the job folder of an output, whether it exists or not.

    It is beside the output, or in the cache if the output is remote, or in `work_dir`. Raises `UsageError` if there is no cache.
    """
    output = plain_name(output)
    if work_dir is not None:
        return Path(work_dir) / f"{output.rpartition('/')[2]}.job"
    if not is_url(output):
        return Path(f"{output}.job")
    digest = hashlib.blake2b(address(output).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    try:
        jobs = jobs_folder()
    except OSError as e:
        raise UsageError(
            f"{output} needs a folder for its job, and there is no cache: {e}", "name one with --work-dir"
        ) from e
    return jobs / f"{output.rpartition('/')[2][-_MAX_NAME:]}-{digest}.job"


def jobs_folder() -> Path:
    """Returns the folder that holds the job folders of remote outputs. Raises `OSError` if there is no home."""
    return cache_folder() / "jobs"


def in_jobs_folder(folder: Path) -> bool:
    """Whether a job's folder is that of a remote output in the cache, which batchgen makes. Other parents are the user's to make."""
    with suppress(OSError):
        return folder.parent == jobs_folder()
    return False
