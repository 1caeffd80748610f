"""The figures of a run (schema `batchgen.stats/1`), made from what the engine and the job have counted. No torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from batchgen.process.machine import memory_bytes_peak
from batchgen.result import Result
from batchgen.version import versions

SCHEMA = "batchgen.stats/1"
DRAFT_SOURCES = ("grammar", "outputs", "prompt")
"""Where drafts come from: the text that a grammar forces, the outputs of other rows, the row's own prompt."""


@dataclass(slots=True)
class SchedulerCounts:
    """What the scheduler counts: sums over all steps so far."""

    prefill_tokens: int = 0
    """Prompt tokens run through the model, also those that run again after a preemption."""
    recomputed_tokens: int = 0
    """Generated tokens that run again after a preemption. No other figure includes them."""
    scored_tokens: int = 0
    """Tokens of choices and completions to score run through the model."""
    completion_tokens: int = 0
    """Sampled tokens that became part of a completion."""
    steps: int = 0
    decode_sequences: int = 0
    """Number of sequences that a token was sampled for and that had not ended, summed over steps."""
    preemptions: int = 0


@dataclass(slots=True)
class EngineStats(SchedulerCounts):
    """What the engine counts: sums over all steps so far."""

    drafted: Counter[str] = field(default_factory=Counter)
    """Draft tokens run through the model to be verified, by source (`DRAFT_SOURCES`)."""
    accepted: Counter[str] = field(default_factory=Counter)
    """Those of them that became part of a completion."""
    attention_parts: int = 0
    """Number of parts of attention (shared, causal), summed over steps."""
    kv_bytes: int = 0
    """KV memory in use now, in bytes."""
    kv_bytes_peak: int = 0
    """Maximum of the KV memory in use, in bytes."""
    state_bytes_peak: int = 0
    """Maximum of the memory used by states of recurrent layers, in bytes."""
    kv_bytes_unshared: int = 0
    """Maximum of the KV memory that the same sequences would have used if each had its own copy of its prefix, in bytes."""
    images_encoded: int = 0
    """Number of images that the model's encoder has run on."""
    weight_bytes: int = 0
    """Bytes of the model's weights, also of those that are streamed."""
    weight_bytes_read: int = 0
    """Bytes of streamed weights that steps have read."""
    forward_seconds: float = 0.0
    """Time in the model: launching steps and, on an asynchronous device, waiting for them."""
    process_bytes_peak: int = 0
    """Maximum of the memory of the engine's process in bytes; 0 if that is the job's own process."""
    quantization: Mapping[str, Any] | None = None
    """The effect of `--quantize` on the model; None without this option."""
    parts: Mapping[str, Any] | None = None
    """What the model consists of (`model.inventory`), with digests under `--debug`."""


def side_by_side(engines: Sequence[EngineStats]) -> EngineStats:
    """Returns the figures of engines that run at the same time: sums, but the mean of the time in the model, which is a part of the wall time."""
    of_the_model = ("quantization", "parts")
    none = EngineStats()
    names = [f.name for f in fields(EngineStats) if f.name not in of_the_model]
    sums = {name: sum((getattr(engine, name) for engine in engines), getattr(none, name)) for name in names}
    sums["forward_seconds"] /= max(1, len(engines))
    first: dict[str, Any] = {
        name: next((found for e in engines if (found := getattr(e, name))), None) for name in of_the_model
    }
    return EngineStats(**sums, **first)


@dataclass
class RowCounts:
    """Sums over rows that have a result."""

    ok: int = 0
    failed: int = 0
    truncated: int = 0
    """Rows whose prompt was shortened to fit the context."""
    unanswered: int = 0
    """Rows whose completion ended inside its thoughts."""
    prompt_tokens: int = 0
    """Shared ones are counted for every row. Failed rows do not count."""
    completion_tokens: int = 0
    equal: int = 0
    """Rows that have the result of an equal row."""
    equal_tokens: int = 0
    """Their completion tokens, which no engine has generated."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of rows by the reason why they ended (`Result.reason`)."""
    json: Counter[str] = field(default_factory=Counter)
    """Number of completions by what their text is to their JSON schema: `valid`, `cut` in its middle, `invalid`."""

    def __post_init__(self) -> None:
        self.reasons = Counter(self.reasons)  # a plain dict if the counts were stored as JSON
        self.json = Counter(self.json)

    @property
    def rows(self) -> int:
        return self.ok + self.failed

    def add(self, result: Result, rows: int = 1, equal: int = 0) -> None:
        """Adds rows that have this result, of which `equal` have that of an equal row."""
        failed = result.failed
        self.failed += rows if failed else 0
        self.ok += 0 if failed else rows
        self.truncated += rows if result.truncated else 0
        self.unanswered += rows if result.unanswered else 0
        self.reasons[result.reason] += rows
        for one in result.completions or (result,):
            if one.valid is not None:
                self.json["valid" if one.valid else "invalid" if one.finish_reason == "stop" else "cut"] += rows
        self.prompt_tokens += 0 if failed else rows * result.prompt_tokens
        self.completion_tokens += rows * result.completion_tokens
        self.equal += equal
        self.equal_tokens += equal * result.completion_tokens


@dataclass(slots=True)
class RunFigures:
    """What the job counts during one run, in addition to the engine."""

    new: RowCounts = field(default_factory=RowCounts)
    """Rows that this run has finished."""
    resumed: RowCounts = field(default_factory=RowCounts)
    """Rows whose result was taken from an earlier run."""
    rows_repeating: int = 0
    """Number of this run's rows that were cut by their length and repeat themselves at the end."""
    begun_tokens: int = 0
    """Completion tokens of this run's rows that earlier runs had generated."""
    prefill_tokens_min: int = 0
    """Size of the token trie of this run's prompts."""
    images: int = 0
    """Images of this run's prompts."""
    image_tokens: int = 0
    """Their tokens; shared ones are counted for every row."""
    groups: int = 0
    prefix_nodes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"load": 0.0, "plan": 0.0, "generate": 0.0, "write": 0.0})
    started_at: float = field(default_factory=time.perf_counter)

    @property
    def done(self) -> int:
        """Rows that have a result, from this run or an earlier one."""
        return self.new.rows + self.resumed.rows

    @property
    def failed(self) -> int:
        return self.new.failed + self.resumed.failed

    @property
    def all_reasons(self) -> Counter[str]:
        """Number of rows by the reason why they ended, in this run or an earlier one."""
        return self.new.reasons + self.resumed.reasons if self.resumed.reasons else self.new.reasons

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a run, as the figures mention it."""

    model: str
    dtype: str = ""
    device: str = ""
    attention: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """`RowParams.sources` of the job."""


_SECONDS = ("load", "plan", "generate", "forward", "write", "total")
_POOL_FIGURES = ("preemptions", "kv_bytes_peak", "kv_bytes_unshared", "state_bytes_peak")
_WEIGHT_FIGURES = ("weight_bytes", "weight_bytes_read")


def figures(
    run: RunFigures, engine: EngineStats, setting: Setting, earlier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the figures of a run in the documented form. `earlier` are those of the job's last run; its `job` has the sums so far."""
    new, generate = run.new, run.seconds["generate"]
    seconds = run.seconds | {"forward": engine.forward_seconds, "total": time.perf_counter() - run.started_at}
    # The plans' sum is too large if planned rows did not run (the run was stopped) or if prefixes were kept over several windows. The
    # minimum is never more than what was run.
    prefill_min = min(run.prefill_tokens_min, engine.prefill_tokens)
    stats: dict[str, Any] = {
        "schema": SCHEMA,
        "rows": new.rows,
        "rows_ok": new.ok,
        "rows_failed": new.failed,
        "rows_resumed": run.resumed.rows,
        **_row_sums(new),
        "prefill_tokens": engine.prefill_tokens,
        "prefill_tokens_min": prefill_min,
        "recomputed_tokens": engine.recomputed_tokens,
        "scored_tokens": engine.scored_tokens,
        "prefill_efficiency": _ratio(prefill_min, engine.prefill_tokens, nothing=1.0),
        "shared_fraction": round(1 - _ratio(engine.prefill_tokens, new.prompt_tokens, nothing=1.0), 6),
        "completion_tokens": engine.completion_tokens,
        "embeddings": new.reasons["embedded"],
        "completion_tokens_per_s": _ratio(engine.completion_tokens, generate),
        "total_tokens_per_s": _ratio(new.prompt_tokens + engine.completion_tokens, generate),
        "rows_per_s": _ratio(new.rows, generate),
        "seconds": {name: round(seconds[name], 4) for name in _SECONDS},
        "steps": engine.steps,
        "mean_decode_batch": _ratio(engine.decode_sequences, engine.steps),
        "drafted_tokens": engine.drafted.total(),
        "accepted_tokens": engine.accepted.total(),
        "drafts": _drafts(engine),
        "attention_parts_per_step": _ratio(engine.attention_parts, engine.steps),
        **{name: getattr(engine, name) for name in _POOL_FIGURES},
        "memory_bytes_peak": memory_bytes_peak() + engine.process_bytes_peak,
        **{name: getattr(engine, name) for name in _WEIGHT_FIGURES},
        "images": run.images,
        "images_encoded": engine.images_encoded,
        "image_tokens": run.image_tokens,
        "groups": run.groups,
        "prefix_nodes": run.prefix_nodes,
        **asdict(setting),
        "quantization": engine.quantization,
        "parts": engine.parts,
        "expect": None,
        "versions": versions(),
    }
    stats["job"] = _job_sums(stats, run, (earlier or {}).get("job") or {})
    return stats


_SUMMED = (
    "prefill_tokens", "prefill_tokens_min", "recomputed_tokens", "scored_tokens", "steps", "preemptions", "images", "images_encoded",
    "image_tokens", "drafted_tokens", "accepted_tokens",
)  # fmt: skip
_LARGEST = ("kv_bytes_peak", "state_bytes_peak", "memory_bytes_peak")


def _job_sums(stats: Mapping[str, Any], run: RunFigures, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sums over all runs of the job. Rows and their tokens are counted in the output itself, which includes rows of killed runs."""
    sums = sum_of_jobs([*([earlier] if earlier else []), {**stats, "runs": 1}])
    not_generated = run.begun_tokens + run.new.equal_tokens + run.resumed.completion_tokens  # by this run
    return {
        "runs": sums.pop("runs"),
        "rows": run.done,
        "rows_ok": run.new.ok + run.resumed.ok,
        "rows_failed": run.failed,
        **_row_sums(run.new, run.resumed),
        "completion_tokens": stats["completion_tokens"] + not_generated,
        **sums,
    }


def sum_of_jobs(jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns figures of runs, one after the other or side by side, as one `earlier` for `figures`: sums, the largest of peaks."""
    names = dict.fromkeys(name for job in jobs for name in job["seconds"])
    return {
        "runs": sum(job.get("runs", 0) for job in jobs),
        **{name: sum(job.get(name, 0) for job in jobs) for name in _SUMMED},
        **{name: max((job.get(name, 0) for job in jobs), default=0) for name in _LARGEST},
        "seconds": {name: round(sum(job["seconds"].get(name, 0.0) for job in jobs), 4) for name in names},
    }


def reasons_in_order(counts: Counter[str]) -> dict[str, int]:
    """Returns the counts of the documented reasons, and of others if there are any."""
    return dict.fromkeys(("stop", "length", "timeout", "error"), 0) | {k: n for k, n in sorted(counts.items()) if n}


def _drafts(engine: EngineStats) -> dict[str, dict[str, int]]:
    return {name: {"drafted": engine.drafted[name], "accepted": engine.accepted[name]} for name in DRAFT_SOURCES}


def _row_sums(*counts: RowCounts) -> dict[str, Any]:
    """Returns the figures of rows that a run and a job have alike."""
    reasons = sum((c.reasons for c in counts), Counter[str]())
    json = sum((c.json for c in counts), Counter[str]())
    return {
        "rows_equal": sum(c.equal for c in counts),
        "rows_truncated": sum(c.truncated for c in counts),
        "finish_reasons": reasons_in_order(reasons),
        "json": {name: json[name] for name in ("valid", "cut", "invalid")} if json else None,
        "prompt_tokens": sum(c.prompt_tokens for c in counts),
    }


def _ratio(part: float, whole: float, nothing: float = 0.0) -> float:
    return round(part / whole, 6) if whole else nothing


def size_text(count: float) -> str:
    """Returns a number of bytes as text: 512 B, 3.1 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun, which has the plural in s: 1 row, 2,304 rows."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"
