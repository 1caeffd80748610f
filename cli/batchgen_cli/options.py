"""The options, each declared once, in the groups that `--help` shows. Which command takes which: `arguments`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

_model = partial(typer.Option, rich_help_panel="Model")
_prompts = partial(typer.Option, rich_help_panel="Prompts")
_sampling = partial(typer.Option, rich_help_panel="Sampling")
_constraints = partial(typer.Option, rich_help_panel="Constraints")
_engine = partial(typer.Option, rich_help_panel="Engine")
_job = partial(typer.Option, rich_help_panel="Job")


Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...",
        help="JSONL, Parquet or CSV files (also .gz, .zst), a folder, a glob, a URL, or - for JSONL on standard input.",
    ),
]

# model
Model = Annotated[str, _model("--model", "-m", help="A folder or a hub name.")]
Revision = Annotated[str | None, _model("--revision", help="Branch, tag or commit of a hub model.")]
DtypeOption = Annotated[
    str, _model("--dtype", metavar="auto|float32|bfloat16|float16", help="auto is the checkpoint's own.")
]
Device = Annotated[
    str,
    _model(
        "--device",
        metavar="auto|cpu|mps|cuda[:N,…]",
        help="Where the model runs; cuda:0,1 on several GPUs, with a process each.",
    ),
]
DeviceMap = Annotated[
    str | None,
    _model("--device-map", metavar="auto", help="Spread the layers over all devices.", show_default="one device"),
]
TrustRemoteCode = Annotated[bool, _model("--trust-remote-code", help="Run code that the model's files bring along.")]

# prompts
PromptColumn = Annotated[str, _prompts("--prompt-column", help="Column of the prompt.")]
MessagesColumn = Annotated[str, _prompts("--messages-column", help="Column of a conversation.")]
IdColumn = Annotated[
    str | None,
    _prompts("--id-column", help="Column of the rows' ids.", show_default="id, custom_id, else the row's number"),
]
Template = Annotated[
    Path | None, _prompts("--template", metavar="FILE", help="Jinja over the row's columns; its text is the prompt.")
]
Prefix = Annotated[str | None, _prompts("--prefix", metavar="TEXT|@FILE", help="Put before every prompt.")]
Chat = Annotated[
    bool | None,
    _prompts(
        "--chat/--no-chat",
        help="Prompts as messages, or as raw text.",
        show_default="chat if the model has a chat template",
    ),
]
System = Annotated[str | None, _prompts("--system", metavar="TEXT|@FILE", help="A system message before every prompt.")]
ChatTemplate = Annotated[
    Path | None, _prompts("--chat-template", metavar="FILE", help="Jinja in place of the model's chat template.")
]
ChatTemplateKwargs = Annotated[
    str | None, _prompts("--chat-template-kwargs", metavar="JSON", help="Variables for the chat template.")
]
OnLongPrompt = Annotated[
    str,
    _prompts(
        "--on-long-prompt",
        metavar="error|truncate-left|truncate-right",
        help="What to do with a prompt that does not fit the context: fail, or shorten its content.",
    ),
]
RowParams = Annotated[
    str | None, _prompts("--row-params", metavar="COL,…", help="Columns that are a row's own sampling parameters.")
]

# sampling
MaxTokens = Annotated[int, _sampling("--max-tokens", metavar="N", help="Most tokens of a completion.")]
Temperature = Annotated[float, _sampling("--temperature", metavar="X", help="0 is greedy.")]
TopP = Annotated[
    float, _sampling("--top-p", metavar="X", help="Draw from the likeliest tokens of this much probability.")
]
TopK = Annotated[int, _sampling("--top-k", metavar="N", help="Draw from the N likeliest tokens; 0 is off.")]
MinP = Annotated[float, _sampling("--min-p", metavar="X", help="Least probability, relative to the likeliest token's.")]
RepetitionPenalty = Annotated[
    float, _sampling("--repetition-penalty", metavar="X", help="Above 1: repeat less of prompt and completion.")
]
PresencePenalty = Annotated[
    float, _sampling("--presence-penalty", metavar="X", help="Taken once from every token of the completion.")
]
FrequencyPenalty = Annotated[
    float, _sampling("--frequency-penalty", metavar="X", help="Taken for each time the completion has a token.")
]
Stop = Annotated[list[str] | None, _sampling("--stop", metavar="TEXT", help="Ends a completion; repeatable.")]
StopTokenId = Annotated[
    list[int] | None, _sampling("--stop-token-id", metavar="ID", help="Ends a completion; repeatable.")
]
IgnoreEos = Annotated[bool, _sampling("--ignore-eos", help="Go on at the model's end tokens.")]
Seed = Annotated[int, _sampling("--seed", metavar="N", help="Of the random numbers.")]
N = Annotated[int, _sampling("--n", "-n", metavar="N", help="Completions of each prompt.")]
Logprobs = Annotated[
    int | None,
    _sampling(
        "--logprobs",
        metavar="K",
        help="Add the log-probabilities of the tokens drawn, and of the K likeliest.",
        show_default="none",
    ),
]
TokenIds = Annotated[bool, _sampling("--token-ids", help="Add the completions' token ids to the rows.")]

# constraints
Choices = Annotated[
    str | None,
    _constraints("--choices", metavar="A,B,C", help="Labels, or a JSON list of them: the likeliest is the text."),
]
Regex = Annotated[str | None, _constraints("--regex", metavar="TEXT", help="A completion matches it as a whole.")]
JsonSchema = Annotated[
    Path | None, _constraints("--json-schema", metavar="FILE", help="A completion is JSON that is valid under it.")
]
ScoreOption = Annotated[bool, _constraints("--score", help="Generate nothing: score the completion that each row has.")]
CompletionColumn = Annotated[str, _constraints("--completion-column", help="Column of what --score scores.")]

# engine
ChunkSize = Annotated[int, _engine("--chunk-size", metavar="N", help="Tokens per chunk of the prefix hash.")]
BatchSize = Annotated[str, _engine("--batch-size", metavar="auto|N", help="Most sequences decoding at once.")]
MaxBatchTokens = Annotated[str, _engine("--max-batch-tokens", metavar="auto|N", help="Most tokens in one forward.")]
MaxPrefillTokens = Annotated[str, _engine("--max-prefill-tokens", metavar="auto|N", help="Of those, prompt tokens.")]
KvMemory = Annotated[str, _engine("--kv-memory", metavar="auto|SIZE", help="Memory for keys and values: 8GiB, 80%, …")]
MaxKvRead = Annotated[
    int | None,
    _engine("--max-kv-read", metavar="N", help="Most tokens of KV that a step reads.", show_default="no limit"),
]
HostKvMemory = Annotated[
    str | None,
    _engine(
        "--host-kv-memory", metavar="SIZE", help="Host memory for KV of idle prefixes (CUDA).", show_default="none"
    ),
]
Policy = Annotated[
    str,
    _engine("--policy", metavar="prefix|prefill-first|fifo", help="What is started first, and goes first in a step."),
]
PriorityColumn = Annotated[
    str | None, _engine("--priority-column", help="Column of numbers: rows with lower ones are started first.")
]
Window = Annotated[
    str | None,
    _engine(
        "--window",
        metavar="all|ROWS",
        help="Put all rows in prefix order (on disk when they are many), or so many at a time.",
        show_default="all; 4096 for -",
    ),
]
Share = Annotated[bool, _engine("--share/--no-share", help="Run shared prefixes once.")]
Compile = Annotated[
    str,
    _engine(
        "--compile",
        metavar="auto|on|off",
        help="On the CPU kernels of our own, compiled once (auto: where there is a C++ compiler). On a GPU steps as CUDA graphs"
        " (auto: where they pay; on: always, and under torch.compile, which takes a minute or more).",
    ),
]
Debug = Annotated[bool, _engine("--debug", help="Check invariants after every step.")]

# job
Output = Annotated[
    str | None,
    _job(
        "--output",
        "-o",
        metavar="OUTPUT",
        help="JSONL (also .gz, .zst) or Parquet by suffix; - is standard output.",
        show_default="beside the input, <stem>.out.…",
    ),
]
InputFormat = Annotated[
    str | None, _job("--input-format", metavar="jsonl|parquet|csv", help="In place of what the suffix says.")
]
OutputFormat = Annotated[
    str,
    _job("--output-format", metavar="rows|openai", help="Rows as batchgen's own, or as OpenAI's Batch output (JSONL)."),
]
Limit = Annotated[int | None, _job("--limit", metavar="N", help="Only the first N rows.")]
OrderOption = Annotated[str, _job("--order", metavar="input|done", help="Rows as in the input, or as they are done.")]
Overwrite = Annotated[bool, _job("--overwrite", help="Start anew, whatever the output holds.")]
RetryErrors = Annotated[bool, _job("--retry-errors", help="Run the rows again that failed before.")]
MaxErrors = Annotated[str | None, _job("--max-errors", metavar="N|P%", help="Give up when more rows fail.")]
RowTimeout = Annotated[
    float | None,
    _job(
        "--row-timeout", metavar="SECONDS", help="Ends a row that runs longer, with what it has.", show_default="none"
    ),
]
Keep = Annotated[str, _job("--keep", metavar="all|none|COL,…", help="Input columns carried to the output.")]
FlushEvery = Annotated[float, _job("--flush-every", metavar="SECONDS", help="How often results are synced to disk.")]
Grace = Annotated[float, _job("--grace", metavar="SECONDS", help="For running rows to finish after SIGTERM.")]
WorkDir = Annotated[
    str | None, _job("--work-dir", metavar="DIR", help="Place of the job's folder.", show_default="beside the output")
]
Stats = Annotated[str | None, _job("--stats", metavar="FILE", help="Write the figures there too.")]
AsJson = Annotated[bool, _job("--json", help="One JSON object on standard output.")]
ShowProgress = Annotated[
    bool | None,
    _job(
        "--progress/--no-progress",
        help="Show how far it is.",
        show_default="a bar on a terminal, a line now and then in a log",
    ),
]
LogFormat = Annotated[
    str, _job("--log-format", metavar="text|json", help="Standard error as text, or each line of it a JSON object.")
]
Quiet = Annotated[bool, _job("--quiet", "-q", help="Errors only.")]
Verbose = Annotated[bool, _job("--verbose", "-v", help="Warnings of libraries, and tracebacks of errors.")]

# status
JobOutput = Annotated[str, typer.Argument(metavar="OUTPUT", help="The output of a run.")]
