"""What each command takes, as an object with a field for each option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

from batchgen_cli import options as o

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What rows there are, and what their prompts and texts are: options of every command."""

    inputs: o.Inputs
    model: o.Model
    revision: o.Revision = None
    dtype: o.DtypeOption = "auto"
    trust_remote_code: o.TrustRemoteCode = False
    prompt_column: o.PromptColumn = "prompt"
    messages_column: o.MessagesColumn = "messages"
    template: o.Template = None
    prefix: o.Prefix = None
    chat: o.Chat = None
    system: o.System = None
    chat_template: o.ChatTemplate = None
    chat_template_kwargs: o.ChatTemplateKwargs = None
    on_long_prompt: o.OnLongPrompt = "error"
    row_params: o.RowParams = None
    max_tokens: o.MaxTokens = 256
    n: o.N = 1
    choices: o.Choices = None
    score: o.ScoreOption = False
    completion_column: o.CompletionColumn = "completion"
    chunk_size: o.ChunkSize = 16
    window: o.Window = None
    input_format: o.InputFormat = None
    limit: o.Limit = None
    log_format: o.LogFormat = "text"
    quiet: o.Quiet = False
    verbose: o.Verbose = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(Shared):
    device: o.Device = "auto"
    device_map: o.DeviceMap = None
    compile: o.Compile = "auto"
    id_column: o.IdColumn = None
    temperature: o.Temperature = 0.0
    top_p: o.TopP = 1.0
    top_k: o.TopK = 0
    min_p: o.MinP = 0.0
    repetition_penalty: o.RepetitionPenalty = 1.0
    presence_penalty: o.PresencePenalty = 0.0
    frequency_penalty: o.FrequencyPenalty = 0.0
    stop: o.Stop = None
    stop_token_id: o.StopTokenId = None
    ignore_eos: o.IgnoreEos = False
    seed: o.Seed = 0
    logprobs: o.Logprobs = None
    token_ids: o.TokenIds = False
    regex: o.Regex = None
    json_schema: o.JsonSchema = None
    batch_size: o.BatchSize = "auto"
    max_batch_tokens: o.MaxBatchTokens = "auto"
    max_prefill_tokens: o.MaxPrefillTokens = "auto"
    max_kv_read: o.MaxKvRead = None
    kv_memory: o.KvMemory = "auto"
    host_kv_memory: o.HostKvMemory = None
    policy: o.Policy = "prefix"
    priority_column: o.PriorityColumn = None
    share: o.Share = True
    debug: o.Debug = False
    output: o.Output = None
    output_format: o.OutputFormat = "rows"
    order: o.OrderOption = "input"
    overwrite: o.Overwrite = False
    retry_errors: o.RetryErrors = False
    max_errors: o.MaxErrors = None
    row_timeout: o.RowTimeout = None
    keep: o.Keep = "all"
    flush_every: o.FlushEvery = 5.0
    grace: o.Grace = 5.0
    work_dir: o.WorkDir = None
    stats: o.Stats = None
    progress: o.ShowProgress = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Shared):
    as_json: o.AsJson = False


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    output: o.JobOutput
    work_dir: o.WorkDir = None
    as_json: o.AsJson = False


def takes(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """The function of one object as a command that has its fields as options, in the order in which `options` declares them."""
    types = get_type_hints(options, include_extras=True)
    declared = list(vars(o).values())
    parameters = [
        Parameter(
            f.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if f.default is MISSING else f.default,
            annotation=types[f.name],
        )
        for f in sorted(fields(options), key=lambda f: declared.index(types[f.name]))  # type: ignore[arg-type]
    ]

    def with_options(command: Callable[[T], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            command(options(**values))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return run

    return with_options
