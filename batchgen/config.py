"""What a user can set, validated once. Raises `UsageError` naming the option."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from batchgen.errors import UsageError
from batchgen.sampling_params import SamplingParams

POLICIES = ("prefix", "prefill-first", "fifo")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and where it runs."""

    model: str
    """A folder or a hub name."""
    revision: str | None = None
    dtype: str = "auto"
    """auto (the checkpoint's own), float32, bfloat16 or float16"""
    device: str = "auto"
    """auto (CUDA, else MPS, else the CPU), cpu, mps, cuda, cuda:N; several, with a process each: cuda:0,1 (GPUs) or cpu:0,1 (shares of the
    CPU's threads)"""
    device_map: str | None = None
    """auto: the layers are spread over the devices that there are; None: all on `device`."""
    trust_remote_code: bool = False
    compile: str = "auto"
    """On the CPU kernels of our own, compiled once on the machine: auto (where it has a C++ compiler), on or off. On one CUDA device steps as
    CUDA graphs: auto (where they pay), on (from the first step, and under torch.compile) or off."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise UsageError(f"--dtype {self.dtype!r} is unknown", "use auto, float32, bfloat16 or float16")
        if not re.fullmatch(r"auto|mps|(cpu|cuda)(:[0-9]{1,4}(,[0-9]{1,4})*)?", self.device):
            raise UsageError(
                f"--device {self.device!r} is unknown", "use auto, cpu, mps, cuda, cuda:N or several as in cuda:0,1"
            )
        twice = [device for device, times in Counter(self.devices).items() if times > 1]
        if twice:
            raise UsageError(f"--device {self.device} names {twice[0]} twice", "name each device once")
        if self.compile not in ("auto", "on", "off"):
            raise UsageError(f"--compile {self.compile!r} is unknown", "use auto, on or off")
        if self.device_map not in (None, "auto"):
            raise UsageError(f"--device-map {self.device_map!r} is unknown", "use auto")
        if self.device_map is not None and self.device != "auto":
            raise UsageError("--device-map chooses the devices itself", "leave --device out")

    @property
    def devices(self) -> tuple[str, ...]:
        """Each by its name: cuda:0 and cuda:1 of cuda:0,1."""
        kind, _, numbers = self.device.partition(":")
        return tuple(f"{kind}:{int(number)}" for number in numbers.split(",")) if numbers else (kind,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    """How a row becomes a prompt."""

    prompt_column: str = "prompt"
    messages_column: str = "messages"
    template: str | None = None
    """Jinja source over the row's columns (sandboxed); its text is the prompt."""
    prefix: str | None = None
    """Put before every prompt."""
    system: str | None = None
    """A system message before every prompt or conversation."""
    chat: bool | None = None
    """None: by the model's chat template where it has one."""
    chat_template: str | None = None
    """Jinja source in place of the model's own."""
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    on_long_prompt: str = "error"
    """error, or truncate-left or truncate-right: the longest texts of the prompt are shortened, their ends or their beginnings kept."""
    row_params: tuple[str, ...] = ()
    """Plain columns that are a row's own sampling parameters."""
    score: bool = False
    """Nothing is generated: the completion column is scored after its prompt."""
    completion_column: str = "completion"
    priority_column: str | None = None
    """Column of numbers; rows with lower ones are started first."""

    def __post_init__(self) -> None:
        if self.on_long_prompt not in ("error", "truncate-left", "truncate-right"):
            raise UsageError(
                f"--on-long-prompt {self.on_long_prompt!r} is unknown", "use error, truncate-left or truncate-right"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the work is batched. None means: chosen for the device."""

    chunk_size: int = 16
    """Tokens per chunk of the prefix hash."""
    batch_size: int | None = None
    """Most sequences decoding at once."""
    max_batch_tokens: int | None = None
    """Most tokens in one forward pass."""
    max_prefill_tokens: int | None = None
    """Of those, prompt tokens."""
    kv_memory: str = "auto"
    """KV memory of each device: auto, a size (8GiB, 500MB) or a share of what is free (80%)."""
    max_kv_read: int | None = None
    """Tokens of KV that a step may read (a shared part counts once); None: no limit. A step always takes one sequence."""
    policy: str = "prefix"
    """What is started first, and whether prefill or decoding has the step's tokens first: prefix, prefill-first or fifo."""
    share: bool = True
    """Run shared prefixes once; False runs every prompt whole (for comparison)."""
    row_timeout: float | None = None
    """Seconds from a row's start to its end; what it has by then is its result."""
    host_kv_memory: str | None = None
    """Host memory for KV of prefixes that the device has no room for (a size); None: they are run again. CUDA only."""
    processes: int = 1
    """Engines on this machine, this one among them: each has its part of the host's memory."""
    debug: bool = False
    """Check the engine's invariants after every step."""

    def __post_init__(self) -> None:
        for name in ("chunk_size", "batch_size", "max_batch_tokens", "max_prefill_tokens", "max_kv_read"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.policy not in POLICIES:
            raise UsageError(
                f"--policy {self.policy!r} is unknown", f"use {', '.join(POLICIES[:-1])} or {POLICIES[-1]}"
            )
        if self.row_timeout is not None and not self.row_timeout > 0:
            raise UsageError(f"--row-timeout must be above 0, not {self.row_timeout}")
        parse_memory(self.kv_memory)
        if self.host_kv_memory is not None and not isinstance(
            parse_memory(self.host_kv_memory, "--host-kv-memory"), int
        ):
            raise UsageError(f"--host-kv-memory {self.host_kv_memory!r} is not a size", "use a size such as 8GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A whole job: from input files to an output file."""

    inputs: tuple[str, ...]
    output: str | None = None
    """None: beside the input (or standard output for `-`)."""
    input_format: str | None = None
    """jsonl, parquet or csv in place of the suffix's."""
    id_column: str | None = None
    model: ModelConfig
    prompts: PromptConfig = field(default_factory=PromptConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineConfig = field(default_factory=EngineConfig)
    window: int | Literal["all"] | None = None
    """Rows planned at a time, in input order; all: the whole input is put in prefix order. None: all for files, 4,096 rows where input or output
    is a pipe, 50,000 for `order` done."""
    limit: int | None = None
    """Only the first rows of the input."""
    order: str = "input"
    """input or done"""
    overwrite: bool = False
    retry_errors: bool = False
    """Run the rows again that failed in an earlier run."""
    max_errors: str | None = None
    """N rows, or P% of the rows done (after the first 100)."""
    keep: tuple[str, ...] | None = None
    """Input columns carried to the output; None: all."""
    token_ids: bool = False
    """Add the completion's token ids to the rows."""
    output_format: str = "rows"
    """rows, or openai: records of OpenAI's Batch output"""
    flush_every: float = 5.0
    """Seconds between syncs of the journal to disk."""
    grace: float = 5.0
    """Seconds that running rows have to finish after SIGTERM or SIGHUP."""
    work_dir: str | None = None
    """Where the job's folder goes; None: beside the output."""
    stats: str | None = None
    """File for the figures, besides the job's folder."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise UsageError("no input", "name a file, a folder, a glob or - for standard input")
        if isinstance(self.window, int) and self.window < 1:
            raise UsageError(f"--window must be at least 1, not {self.window}")
        if self.limit is not None and self.limit < 0:
            raise UsageError(f"--limit must be at least 0, not {self.limit}")
        if self.order not in ("input", "done"):
            raise UsageError(f"--order {self.order!r} is unknown", "use input or done")
        self._check_output_format()
        if self.flush_every < 0:
            raise UsageError(f"--flush-every must be at least 0, not {self.flush_every}")
        if self.grace < 0:
            raise UsageError(f"--grace must be at least 0, not {self.grace}")
        if self.max_errors is not None:
            parse_max_errors(self.max_errors)

    def _check_output_format(self) -> None:
        if self.output_format not in ("rows", "openai"):
            raise UsageError(f"--output-format {self.output_format!r} is unknown", "use rows or openai")
        if self.output_format == "openai" and self.prompts.score:
            raise UsageError("--output-format openai has no place for scores", "leave it out, or --score")
        if self.output_format == "openai" and self.keep:
            raise UsageError("--output-format openai carries no columns", "leave it out, or --keep")


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


def parse_memory(text: str, option: str = "--kv-memory") -> int | float | None:
    """Bytes (int) of a size, the fraction (float) of a percentage, None of `auto`."""
    if text == "auto":
        return None
    m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*", text)
    if m and m[2] == "%" and 0 < float(m[1]) <= 100:
        return float(m[1]) / 100
    if m and m[2] != "%" and m[2].upper() in _UNITS and float(m[1]) > 0:
        return int(float(m[1]) * _UNITS[m[2].upper()])
    raise UsageError(f"{option} {text!r} is not a size", "use auto, a size such as 8GiB, or a share such as 80%")


def parse_max_errors(text: str) -> int | float:
    """A number of rows (int), or the fraction (float) of a percentage."""
    m = re.fullmatch(r"\s*(\d+)\s*|\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if m and m[1]:
        return int(m[1])
    if m and float(m[2]) <= 100:
        return float(m[2]) / 100
    raise UsageError(f"--max-errors {text!r} is not a limit", "use a number of rows such as 10, or a share such as 5%")
