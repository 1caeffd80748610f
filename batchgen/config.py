"""The configuration of a job, checked when it is created. `batchgen/options.py` explains how to add an option.

Every class raises `UsageError`, which names the option, for an invalid value, and `TypeError`, which names the field, for a wrong type.
"""

from __future__ import annotations

import codecs
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from os import PathLike
from typing import Any, ClassVar, Literal

from batchgen.errors import UsageError
from batchgen.options import (
    PathText,
    Rule,
    above,
    at_least,
    check,
    comma_list,
    file_text,
    json_object,
    option,
    text_or_file,
    whole_number,
    whole_number_or_auto,
)
from batchgen.sampling_params import SamplingParams

RETRY_REASONS = {"errors": "error", "timeout": "timeout", "length": "length", "repetition": "repetition"}
"""The names that `--retry` takes, and the reason (`Result.reason`) of the results that each one means."""
POLICIES = ("prefix", "prefill-first", "fifo")
_NAMED: Rule = (lambda v: bool(v.strip()), "a name that is not empty")
_TEMPLATE: Rule = (
    lambda v: not re.fullmatch(r"[^\s{}]+\.(jinja2?|j2|tmpl|template|txt|md)", v),
    "the text of a template (the name of a file would be the prompt of all rows)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and where it runs."""

    GROUP: ClassVar = "Model"

    model: PathText = option(
        MISSING,
        "A folder with a model, or the name of a model on the hub.",
        flags=["--model", "-m"],
        metavar="MODEL",
        rules=[_NAMED],
    )
    revision: str | None = option(None, "Branch, tag or commit of a model on the hub.", metavar="NAME", shown="main")
    lora: PathText | None = option(
        None,
        "A LoRA adapter for the model: a folder, or a name on the hub. It is merged into the weights when they are loaded.",
        metavar="DIR|HUB",
        rules=[_NAMED],
        shown="none",
    )
    dtype: str = option(
        "auto",
        "Type of the weights and the KV. auto uses the checkpoint's type, or float32 on a CPU that is faster with it.",
        values=["auto", "float32", "bfloat16", "float16"],
    )
    quantize: str = option(
        "none",
        "Compute linear layers in 8 bits (CPU). Their weights are rounded when the model is loaded; the summary says what that changes.",
        values=["none", "int8"],
    )
    weights: str = option(
        "auto",
        "Keep the weights in memory (resident), or read those of most layers again in every step, in larger steps (streamed, CPU). auto "
        "streams those that do not fit. Results are the same.",
        values=["auto", "resident", "streamed"],
    )
    weight_memory: str | None = option(
        None,
        "Memory that the weights may take; with less, layers are streamed.",
        metavar="SIZE",
        shown="what is free",
    )
    device: str = option(
        "auto",
        "Device to run on. auto uses CUDA, else MPS, else the CPU. cuda:0,1 runs one process on each GPU.",
        metavar="auto|cpu|mps|cuda[:N,…]",
    )
    """`cpu:0,1` runs several processes that share the CPU's threads."""
    device_map: str | None = option(
        None,
        "auto distributes the layers of one model over all devices.",
        values=["auto"],
        shown="one device",
    )
    ray: str | None = option(
        None,
        "Run the engines as actors on a Ray cluster: auto is the cluster of RAY_ADDRESS or of this machine.",
        group="Machines",
        metavar="[ADDRESS]",
        shown="no cluster",
    )
    """May also be `local`: a cluster of only this machine, started for the job."""
    workers: int | None = option(
        None,
        "Number of engines on the cluster.",
        group="Machines",
        rules=[at_least(1)],
        shown="one for each GPU, or as many as --cpus-per-worker allows",
    )
    cpus_per_worker: int | None = option(
        None,
        "CPUs of each engine on the cluster, and its number of threads.",
        group="Machines",
        rules=[at_least(1)],
        shown="1 beside a GPU, else those of the smallest machine",
    )
    ray_working_dir: PathText | None = option(
        None,
        "Folder that is copied to every machine of the cluster, for a model that the machines do not have.",
        group="Machines",
        metavar="DIR",
        shown="none",
    )
    embed: bool = option(
        False,
        "Generate nothing. Write the embedding of each row's prompt: the hidden state that the model's sentence-transformers files ask for.",
        group="Tasks",
    )
    classify: bool = option(
        False,
        "Generate nothing. Write the labels' probabilities, or the reward, that the model's classification head gives each row's prompt.",
        group="Tasks",
    )
    pooling: str = option(
        "auto",
        "For --embed: the hidden state after the last token, or the mean of all.",
        group="Tasks",
        values=["auto", "last", "mean"],
        shown="auto: as the model says, else last",
    )
    normalize: bool | None = option(
        None,
        "For --embed: scale embeddings to length 1.",
        group="Tasks",
        shown="as the model says, else --normalize",
    )
    image_max_pixels: int | None = option(
        None,
        "Make larger images smaller: at most this many pixels. For models whose processor has such a limit.",
        group="Prompts",
        rules=[at_least(1)],
        shown="the model's own",
        after="image_column",
    )
    trust_remote_code: bool = option(False, "Allow Python code from the model's folder to run.")
    compile: str = option(
        "auto",
        "On a CPU: use batchgen's kernels, compiled once per machine (auto: if there is a C++ compiler). On a GPU: run steps as "
        "CUDA graphs (auto: if they save time; on: always, with torch.compile).",
        group="Engine",
        values=["auto", "on", "off"],
    )
    attention: str = option(
        "auto",
        "Attention by batchgen's kernels if they agree with plain torch on this device (auto), by those for CUDA without a check "
        "(triton), or by plain torch.",
        group="Engine",
        values=["auto", "triton", "torch"],
    )

    def __post_init__(self) -> None:
        check(self)
        if not re.fullmatch(r"auto|mps|(cpu|cuda)(:[0-9]{1,4}(,[0-9]{1,4})*)?", self.device):
            raise UsageError(
                f"--device {self.device!r} is unknown", "use auto, cpu, mps, cuda, cuda:N or several as in cuda:0,1"
            )
        twice = [device for device, times in Counter(self.devices).items() if times > 1]
        if twice:
            raise UsageError(f"--device {self.device} names {twice[0]} twice", "name each device once")
        if self.embed and self.classify:
            raise UsageError("--embed and --classify cannot be combined", "leave one of them out")
        if not self.embed and (self.pooling != "auto" or self.normalize is not None):
            raise UsageError("--pooling and --normalize are for --embed", "add --embed, or leave them out")
        if self.quantize != "none" and self.task != "generate":
            raise UsageError(f"--quantize is for models that write text, not for --{self.task}", "leave it out")
        if self.weight_memory is not None:
            parse_size(self.weight_memory, "--weight-memory")
            if self.weights == "resident":
                raise UsageError("--weight-memory is for streamed weights", "leave out --weights resident")
        if self.quantize != "none" and (self.weights == "streamed" or self.weight_memory is not None):
            option = "--weights streamed" if self.weights == "streamed" else "--weight-memory"
            raise UsageError(f"--quantize {self.quantize} needs all weights in memory", f"leave out {option}")
        if self.quantize != "none" and self.compile == "off":
            raise UsageError(f"--quantize {self.quantize} needs batchgen's own kernels", "leave out --compile off")
        if self.ray is None and any((self.workers, self.cpus_per_worker, self.ray_working_dir)):
            raise UsageError(
                "--workers, --cpus-per-worker and --ray-working-dir are for a cluster", "add --ray, or use --device"
            )
        if self.ray is not None and (self.device not in ("auto", "cpu", "cuda") or self.device_map is not None):
            raise UsageError("with --ray the cluster chooses the devices", "use --device cpu or cuda, or leave it out")
        if self.device_map is not None and self.device != "auto":
            raise UsageError("--device-map chooses the devices itself", "leave --device out")

    @property
    def task(self) -> str:
        """What the model does: generate, embed or classify."""
        return "embed" if self.embed else "classify" if self.classify else "generate"

    @property
    def devices(self) -> tuple[str, ...]:
        """The name of each device: `cuda:0` and `cuda:1` for `cuda:0,1`."""
        kind, _, numbers = self.device.partition(":")
        return tuple(f"{kind}:{int(number)}" for number in numbers.split(",")) if numbers else (kind,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    """How a row becomes a prompt."""

    GROUP: ClassVar = "Prompts"

    prompt_column: str = option("prompt", "Column that holds the prompt.", metavar="COL")
    messages_column: str = option("messages", "Column that holds a conversation.", metavar="COL")
    template: str | None = option(
        None,
        "Jinja template that makes the prompt from the row's columns (sandboxed).",
        metavar="FILE",
        parse=file_text,
        rules=[_TEMPLATE],
    )
    """The template's source."""
    prefix: str | None = option(None, "Text to put before every prompt.", metavar="TEXT|@FILE", parse=text_or_file)
    system: str | None = option(
        None,
        "System message to put before every prompt or conversation.",
        metavar="TEXT|@FILE",
        parse=text_or_file,
    )
    chat: bool | None = option(
        None,
        "Send prompts through the chat template, or as raw text.",
        shown="chat if the model has a chat template",
    )
    chat_template: str | None = option(
        None,
        "Jinja template to use instead of the model's chat template.",
        metavar="FILE",
        parse=file_text,
        rules=[_TEMPLATE],
    )
    """The template's source."""
    chat_template_kwargs: dict[str, object] = option(
        dict,
        """Variables for the chat template, such as '{"enable_thinking": false}'.""",
        metavar="JSON",
        parse=json_object,
    )
    on_long_prompt: str = option(
        "error",
        "For a prompt longer than the model's context: fail, or shorten its longest texts on this side.",
        values=["error", "truncate-left", "truncate-right"],
    )
    """truncate-left keeps the ends of the longest texts, truncate-right their beginnings. The chat template's own text stays whole."""
    row_params: tuple[str, ...] | Any = option(
        (),
        "Columns that hold a row's own sampling parameters, such as temperature.",
        metavar="COL,…",
        parse=comma_list,
    )
    choices_column: str | None = option(
        None,
        "Column that holds a row's own labels: a list, or text as --choices takes it.",
        group="Constraints",
        metavar="COL",
        rules=[_NAMED],
        shown="none",
        after="choices",
    )
    """A row without labels in it has those of `SamplingParams.choices`."""
    score: bool = option(
        False,
        "Generate nothing. Score the completion that each row already has.",
        group="Constraints",
    )
    completion_column: str = option(
        "completion", "Column of the completion that --score scores.", group="Constraints", metavar="COL"
    )
    prompt_logprobs: bool = option(
        False,
        "Add each token's log-probability: of the completion with --score, else of the prompt, and generate nothing.",
        group="Constraints",
    )
    prompt_name: str | None = option(
        None,
        "For --embed: the text of config_sentence_transformers.json that is put before every prompt, such as query.",
        group="Tasks",
        metavar="NAME",
        shown="the model's default",
    )
    sampling_defaults: str = option(
        "model",
        "Sampling if no option sets it: that of the model's generation_config.json, or greedy decoding.",
        group="Sampling",
        values=["model", "greedy"],
    )
    """Does not affect labels and scores."""
    image_column: tuple[str, ...] | Any = option(
        (),
        "Columns of images to put before the prompt, or where --template names them: paths, URLs, bytes, or lists of these.",
        metavar="COL,…",
        parse=comma_list,
    )
    priority_column: str | None = option(
        None, "Column of numbers; rows with lower numbers start first.", group="Engine", metavar="COL"
    )

    def __post_init__(self) -> None:
        check(self)


def _chosen_number(help: str) -> Any:
    return option(
        None,
        help,
        metavar="auto|N",
        rules=[at_least(1)],
        parse=whole_number_or_auto,
        shown="auto",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the work is batched. None means that batchgen chooses a value for the device."""

    GROUP: ClassVar = "Engine"

    chunk_size: int = option(16, "Tokens per chunk of the prefix hash.", rules=[at_least(1)])
    batch_size: int | None = _chosen_number("Maximum number of sequences that decode at once.")
    max_batch_tokens: int | None = _chosen_number("Maximum number of tokens in one forward pass.")
    max_prefill_tokens: int | None = _chosen_number("Maximum number of prompt tokens in one forward pass.")
    kv_memory: str = option(
        "auto",
        "Memory for keys and values on each device: a size such as 8GiB, or a share of the free memory such as 80%.",
        metavar="auto|SIZE",
    )
    policy: str = option("prefix", "Order in which rows start and in which a step takes tokens.", values=POLICIES)
    share: bool = option(True, "Run shared prefixes once, or run every prompt whole (for comparison).")
    speculate: str = option(
        "auto",
        "Run guesses of the next tokens of a row in the same step and keep those that come true where that is faster. "
        "The output is the same.",
        values=["auto", "off"],
    )
    row_timeout: float | None = option(
        None,
        "End a row after this time and keep the text it has.",
        group="Job",
        metavar="SECONDS",
        rules=[above(0)],
        shown="none",
    )
    threads: int | None = option(
        None,
        "Number of CPU threads for all processes together.",
        rules=[at_least(1)],
        shown="the cores that the process may use",
    )
    processes: int = 1
    """Number of engines on this machine, this one included. Each gets an equal part of the host's memory."""
    block_tokens: int = 32
    """Tokens that blocks are made for. Measured on CPUs (benchmarks/NOTES.md)."""
    debug: bool = option(
        False,
        "Check the engine's invariants after every step, and add digests of what the model computes with to the figures.",
    )

    def __post_init__(self) -> None:
        check(self)
        parse_memory(self.kv_memory)

    @property
    def block_size(self) -> int:
        """Tokens per block: a multiple of the chunk size, and of `block_tokens` if the chunk size is a multiple of 8.

        Matrix units add 32 keys at a time, and results must not depend on the chunk size.
        """
        if self.chunk_size % 8 == 0:
            return math.lcm(self.chunk_size, self.block_tokens)
        return -(-self.block_tokens // self.chunk_size) * self.chunk_size


def _parse_kept_columns(name: str, text: str) -> tuple[str, ...] | None:
    columns = () if text == "none" else comma_list(name, text)
    if not columns and text != "none":
        raise UsageError(f"{name} must be all, none or names of columns, not {text!r}")
    return None if text == "all" else columns


def _is_text_encoding(name: str) -> bool:
    try:
        # Some encodings have decoders that can only be strict: they raise here.
        return (
            codecs.lookup(name)._is_text_encoding
            and codecs.getincrementaldecoder(name)("backslashreplace").decode(b"", True) == ""
        )
    except (LookupError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class InputLimits:
    """How much of an input is in memory at a time if it is read twice and its requests are sorted.

    A run of the sort exceeds its limits by at most one request, a window by at most one batch.
    """

    read_rows: int = 2_000
    """Rows that are read, and written, at a time."""
    run_rows: int = 50_000
    window_leaves: int = 20_000
    """Completions and texts to score. Fewer than the rows of a run, because a planned one needs much more memory than a waiting request."""
    max_tokens: int = 1 << 24
    """Tokens of a run's prompts, and of a window's leaves: a prompt counts once for each of its labels."""
    max_runs: int = 64
    """Number of runs that are merged at a time."""
    batch_rows: int = 256
    batch_tokens: int = 1 << 16
    """A batch is what a merge holds of each run, and what a window grows by."""


INPUT_LIMITS = InputLimits()


@dataclass(frozen=True, slots=True)
class InputFormat:
    """A format of input files."""

    suffixes: tuple[str, ...]
    reader: str
    """The generator that reads it, as `module:function`. It is imported when the first such file is opened."""
    is_text: bool = True
    """Whether its files are text. Others are read from their end, and `--encoding` does not apply to them."""


INPUT_FORMATS = {
    "jsonl": InputFormat((".jsonl", ".ndjson"), "batchgen.records.jsonl:read_jsonl"),
    "parquet": InputFormat((".parquet",), "batchgen.records.tables:read_parquet", is_text=False),
    "csv": InputFormat((".csv",), "batchgen.records.tables:read_csv"),
    "tsv": InputFormat((".tsv",), "batchgen.records.tables:read_tsv"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A whole job: from input files to an output file."""

    GROUP: ClassVar = "Job"

    inputs: tuple[PathText, ...] | Any
    """Files, folders, globs, URLs or `-`: one or a list of them."""
    output: PathText | None = option(
        None,
        "Output file: JSONL, CSV or TSV (also .gz, .zst), or Parquet, by its suffix. - writes JSONL to standard output.",
        flags=["--output", "-o"],
        metavar="OUTPUT",
        rules=[_NAMED],
        shown="beside the input, <stem>.out.jsonl or .parquet",
    )
    input_format: str | None = option(
        None,
        "Format of the input, instead of the one its suffix names.",
        values=list(INPUT_FORMATS),
        shown="by suffix",
    )
    encoding: str | None = option(
        None,
        "Encoding of text files that are not UTF-8, such as cp1252, utf-16 or shift_jis.",
        metavar="NAME",
        rules=[(_is_text_encoding, "the name of a text encoding, such as cp1252, utf-16 or shift_jis")],
        shown="utf-8",
    )
    dataset_config: str | None = option(
        None,
        "Configuration of an input that is a dataset: hf://datasets/OWNER/NAME, or a folder with the Hub's layout.",
        metavar="NAME",
        shown="the default one",
    )
    split: str | None = option(
        None,
        "Split of an input that is a dataset: a name, several as in train+test, or all.",
        metavar="NAME",
        shown="the only one",
    )
    id_column: str | None = option(
        None,
        "Column that holds the rows' ids.",
        group="Prompts",
        metavar="COL",
        shown="id, custom_id, else the row's number",
    )
    model: ModelConfig | Any
    """May also be only a folder or the name of a model."""
    prompts: PromptConfig = field(default_factory=PromptConfig)
    sampling: SamplingParams | Any = field(default_factory=SamplingParams)
    """May also be a dict of parameters."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    window: int | Literal["all"] | None = option(
        None,
        "Sort all rows into prefix order (on disk if they are many), or process this many rows at a time as they arrive.",
        group="Engine",
        metavar="all|ROWS",
        rules=[(lambda v: v == "all" or (type(v) is int and v >= 1), "all, or a whole number of at least 1")],
        parse=lambda name, text: "all" if text == "all" else whole_number(name, text, "a number of rows or all"),
        shown="all; 4096 for -",
    )
    """None: all for files, 4,096 rows if input or output is a pipe, 50,000 rows for `order` "done"."""
    expect: str | None = option(
        None,
        "Column with the right label or text of each row: the figures, the summary and the report then say how many are right and how sure the model is.",
        group="Constraints",
        metavar="COL",
        rules=[_NAMED],
        shown="none",
    )
    limit: int | None = option(
        None,
        "Generate only the first N rows. Later rows that already have a result stay in the output.",
        rules=[at_least(0)],
    )
    order: str = option(
        "input",
        "Write rows in input order, or in the order in which they finish.",
        values=["input", "done"],
    )
    overwrite: bool = option(False, "Discard the existing output and start again.")
    retry_errors: bool = option(False, "Run rows again that failed in an earlier run.")
    retry: tuple[str, ...] | Any = option(
        (),
        "Run rows again that failed in an earlier run, or were cut by their time limit, length or repetition.",
        metavar="errors,timeout,length,repetition",
        parse=comma_list,
        rules=[(lambda v: set(v) <= set(RETRY_REASONS), "of errors, timeout, length and repetition")],
        shown="none",
    )
    prune: bool = option(
        False,
        "Remove finished rows from the output that are no longer in the input, and delete their results.",
    )
    max_errors: str | None = option(
        None,
        "Stop if more rows than this have failed. A percentage applies to the finished rows, from 100 rows on.",
        metavar="N|P%",
        shown="no limit",
    )
    keep: tuple[str, ...] | Any | None = option(
        None,
        "Input columns to copy to the output.",
        metavar="all|none|COL,…",
        parse=_parse_kept_columns,
        shown="all",
    )
    """None: all."""
    token_ids: bool = option(False, "Add the completion's token ids to each row.", group="Sampling")
    parse: str | None = option(
        None,
        "Add the JSON value of each valid text to its row, as parsed. For --json-schema; in Parquet a struct.",
        group="Constraints",
        values=["json"],
    )
    output_format: str = option(
        "rows",
        "Write rows in batchgen's own form, or in that of OpenAI's Batch output.",
        values=["rows", "openai"],
    )
    flush_every: float = option(
        5.0,
        "Time between writes of results and unfinished completions to disk.",
        metavar="SECONDS",
        rules=[at_least(0)],
    )
    grace: float = option(
        5.0,
        "Time that running rows get to finish after SIGTERM or SIGHUP.",
        metavar="SECONDS",
        rules=[at_least(0)],
    )
    work_dir: PathText | None = option(
        None,
        "Folder that holds the job's folder.",
        metavar="DIR",
        rules=[_NAMED],
        shown="beside the output",
    )
    shard: str | None = option(
        None,
        "Generate only the I-th of N contiguous parts of the prefix order; batchgen merge joins them.",
        group="Machines",
        metavar="I/N",
        shown="the whole job",
    )
    """The other parts are run by other processes, on any machine that sees the job's folder."""
    merge: bool = option(False, "Write the output when this shard is the last one to be done.", group="Machines")
    push: str | None = option(
        None,
        "When the job is finished, push its output to this dataset of the Hub, with a card. The output must be Parquet.",
        metavar="OWNER/NAME",
        shown="nowhere",
    )
    push_public: bool = option(False, "If --push creates the dataset, let everybody read it.")
    stats: PathText | None = option(None, "Also write the job's figures to this file.", metavar="FILE", rules=[_NAMED])
    report: PathText | None = option(
        None,
        "Also write a report to this file: a page for a browser with the prefix tree, speed, lengths and errors.",
        metavar="FILE.html",
        rules=[_NAMED],
    )
    limits: InputLimits = field(default_factory=lambda: INPUT_LIMITS)
    """How much of the input is in memory at a time if it is read twice. No option of the command."""

    def __post_init__(self) -> None:
        if isinstance(self.model, str | PathLike):
            object.__setattr__(self, "model", ModelConfig(model=self.model))
        if isinstance(self.sampling, Mapping):
            object.__setattr__(self, "sampling", SamplingParams(**self.sampling))
        parts = {"model": ModelConfig, "prompts": PromptConfig, "sampling": SamplingParams, "engine": EngineConfig}
        for name, part in parts.items():
            if not isinstance(getattr(self, name), part):
                raise TypeError(f"{name} must be {part.__name__}, not {getattr(self, name)!r}")
        check(self)
        if not self.inputs:
            raise UsageError("no input", "name a file, a folder, a glob or - for standard input")
        if not all(name.strip() for name in self.inputs):
            raise UsageError("an input has an empty name", "name a file, a folder, a glob or - for standard input")
        self._check_output_format()
        if self.parse is not None and self.sampling.json_schema is None:
            raise UsageError("--parse json is for texts of --json-schema", "add --json-schema FILE")
        wordless = {
            "score": self.prompts.score,
            "prompt-logprobs": self.prompts.prompt_logprobs,
            "embed": self.model.embed,
        }
        task = next((name for name, given in wordless.items() if given), None)
        if self.expect is not None and task is not None:
            raise UsageError(f"--expect compares texts, and --{task} writes none", "leave one of them out")
        if self.max_errors is not None:
            parse_max_errors(self.max_errors)
        if self.push_public and self.push is None:
            raise UsageError("--push-public is for --push", "name the dataset with --push")
        self._check_shard()

    @property
    def shard_of(self) -> tuple[int, int] | None:
        """I and N of `shard`."""
        return None if self.shard is None else parse_shard(self.shard)

    @property
    def retried(self) -> list[str]:
        """The names given by `retry` and `retry_errors` together, sorted, each once."""
        return sorted({*self.retry, "errors"} if self.retry_errors else set(self.retry))

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """Options that name columns of the input (other than those that make prompts), each with its column."""
        ids = [("--id-column", self.id_column)] if self.id_column is not None else []
        expected = [("--expect", self.expect)] if self.expect is not None else []
        return ids + expected + [("--keep", name) for name in self.keep or ()]

    def _check_shard(self) -> None:
        if self.merge and self.shard is None:
            raise UsageError("--merge is for a run with --shard", "name the shard, or use batchgen merge OUTPUT")
        if self.shard is None:
            return
        parse_shard(self.shard)
        if self.push is not None and not self.merge:
            raise UsageError("--push with --shard is for the run that merges", "give every shard --merge, too")
        if self.overwrite:
            raise UsageError(
                "--overwrite would delete the work of the other shards", "delete the output and its .job folder instead"
            )
        if self.order == "done" or self.window not in (None, "all"):
            raise UsageError("--shard cuts the prefix order of the whole input", "leave out --window and --order done")

    def _check_output_format(self) -> None:
        others = (
            ("scores", "--score", self.prompts.score),
            ("log-probabilities of prompts", "--prompt-logprobs", self.prompts.prompt_logprobs),
            ("classes", "--classify", self.model.classify),
            ("parsed values", "--parse", self.parse is not None),
            ("input columns", "--keep", bool(self.keep)),
        )
        for what, flag, given in others:
            if given and self.output_format == "openai":
                raise UsageError(
                    f"--output-format openai cannot hold {what}", f"leave out one of --output-format and {flag}"
                )


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


def parse_size(text: str, option: str, hint: str = "use a size such as 8GiB") -> int:
    """Returns the bytes of a size such as `8GiB`. Raises `UsageError` for any other text; `option` and `hint` are for its message."""
    m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if m and m[2].upper() in _UNITS and float(m[1]) > 0:
        return int(float(m[1]) * _UNITS[m[2].upper()])
    raise UsageError(f"{option} {text!r} is not a size", hint)


def parse_memory(text: str) -> int | float | None:
    """Returns what `--kv-memory` says: the bytes of a size (int), the fraction of a percentage (float), or None for `auto`."""
    if text == "auto":
        return None
    m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if m and 0 < float(m[1]) <= 100:
        return float(m[1]) / 100
    return parse_size(text, "--kv-memory", "use auto, a size such as 8GiB, or a share such as 80%")


def parse_shard(text: str) -> tuple[int, int]:
    """I and N of `I/N`: 1 <= I <= N."""
    m = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
    if m and 1 <= int(m[1]) <= int(m[2]):
        return int(m[1]), int(m[2])
    raise UsageError(f"--shard {text!r} is not a part of a job", "use 1/4, 2/4, 3/4 and 4/4 for four")


def parse_max_errors(text: str) -> int | float:
    """Returns a number of rows (int), or the fraction of a percentage (float)."""
    m = re.fullmatch(r"\s*(\d+)\s*|\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if m and m[1]:
        return int(m[1])
    if m and float(m[2]) <= 100:
        return float(m[2]) / 100
    raise UsageError(f"--max-errors {text!r} is not a limit", "use a number of rows such as 10, or a share such as 5%")


def check_config(config: object) -> None:
    """Raises `TypeError` for anything that is not a `JobConfig`."""
    if not isinstance(config, JobConfig):
        raise TypeError(f"config must be a JobConfig, not {repr(config)[:60]}")
