"""The card of a dataset that a job has made: its README.md, which names the model, the settings and the figures of the job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import PurePath
from typing import Any

import pyarrow as pa

from batchgen.config import JobConfig
from batchgen.jobs.identity import FREE_OPTIONS
from batchgen.options import flag_of
from batchgen.stats import counted

SPLIT = "train"
MARK = "<!-- pushed by batchgen: "
"""The beginning of the last line, which a reader of the card does not see: the digest of the output follows."""
_LONG_TEXT = 120
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "1B<n<10B")
_NOT_SHOWN = {"model", "given", *FREE_OPTIONS}
"""Fields that do not change results, or that the card shows elsewhere."""


def dataset_card(
    config: JobConfig,
    repo: str,
    digest: str,
    *,
    stats: Mapping[str, Any],
    settings: Mapping[str, Any],
    schema: pa.Schema,
    rows: int,
) -> str:
    """Returns the text of the card.

    `digest` is that of the output, `stats` are the job's figures, `settings` those of its manifest; `schema` and `rows` describe the files that are pushed. Of a path on this
    machine only the last name is shown.
    """
    model = settings.get("model") or _last_name(config.model.model)
    inputs = ", ".join(f"`{_last_name(name)}`" for name in config.inputs)
    part = "".join(
        f", {what} `{name}`"
        for what, name in (("configuration", config.dataset_config), ("split", config.split))
        if name
    )
    return "\n".join(
        [
            "---",
            _metadata(rows),
            "---",
            "",
            f"# {repo.rpartition('/')[2]}",
            "",
            f"{counted(rows, 'row')} that `{model}` generated from {inputs}{part}, with batchgen {stats['versions']['batchgen']}.",
            "",
            "```python",
            "from datasets import load_dataset",
            "",
            f'rows = load_dataset("{repo}", split="{SPLIT}")',
            "```",
            *_markdown_section("Model and settings", ("setting", "value"), _setting_lines(config, model, stats)),
            *_markdown_section("Rows", ("rows", "number"), _count_lines(stats["job"])),
            *_markdown_section("Figures", ("figure", "value"), _figure_lines(stats)),
            *_markdown_section("Columns", ("column", "type"), [(field.name, str(field.type)) for field in schema]),
            "",
            f"{MARK}{digest} -->",
            "",
        ]
    )


def _metadata(rows: int) -> str:
    from huggingface_hub import DatasetCardData

    size = next((name for power, name in enumerate(_SIZES, 3) if rows < 10**power), "n>10B")
    data = DatasetCardData(
        configs=[{"config_name": "default", "data_files": [{"split": SPLIT, "path": f"data/{SPLIT}-*"}]}],
        size_categories=[size],
        tags=["batchgen", "synthetic"],
    )
    return str(data.to_yaml())


def _setting_lines(config: JobConfig, model: str, stats: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the model, the sampling parameters that were used, and the options that the command has set."""
    lines = [("model", model), ("dtype", stats["dtype"])]
    origins = {"model": " (the model's)", "auto": " (auto)"}
    used = stats["sampling"]
    lines += [(name, f"{value['value']}{origins.get(value['from'], '')}") for name, value in used.items()]
    for part in (config.model, config.prompts, config.sampling):
        for f in fields(part):
            value = getattr(part, f.name)
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            if "option" in f.metadata and f.name not in {*_NOT_SHOWN, *used, "dtype"} and value != default:
                lines.append(
                    (flag_of(type(part), f.name), _last_name(value) if f.name == "lora" else _short_cell(value))
                )
    return lines


def _count_lines(job: Mapping[str, Any]) -> list[tuple[str, str]]:
    ends = [(f"ended with {name}", n) for name, n in job["finish_reasons"].items() if n]
    counts = [
        ("rows", job["rows"]),
        ("failed", job["rows_failed"]),
        ("with a truncated prompt", job["rows_truncated"]),
        *ends,
    ]
    return [(name, f"{n:,}") for name, n in counts if n or name in ("rows", "failed")]


def _figure_lines(stats: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns sums over all runs of the job, and the device of the last one that had a model."""
    job, seconds = stats["job"], stats["job"]["seconds"]
    prompt, run = job["prompt_tokens"], job["prefill_tokens"]
    lines = [
        ("prompt tokens", f"{prompt:,}"),
        ("of these run through the model", f"{run:,} (minimum: {job['prefill_tokens_min']:,})"),
        ("completion tokens", f"{job['completion_tokens']:,}"),
    ]
    if seconds.get("generate"):
        lines.append(("time to generate", f"{seconds['generate']:,.1f} s in {counted(job['runs'], 'run')}"))
        lines.append(("speed", f"{job['rows'] / seconds['generate']:,.1f} rows/s, {job['completion_tokens'] / seconds['generate']:,.1f} completion tokens/s"))  # fmt: skip
    if stats["device"]:
        lines.append(("device", f"{stats['device']}, attention {stats['attention']}"))
    return [*lines, ("versions", ", ".join(f"{name} {version}" for name, version in stats["versions"].items()))]


def _markdown_section(title: str, head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> list[str]:
    return [
        "",
        f"## {title}",
        "",
        f"| {head[0]} | {head[1]} |",
        "| --- | --- |",
        *(f"| {_markdown_cell(a)} | {_markdown_cell(b)} |" for a, b in rows),
    ]


def _markdown_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _short_cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
    return text if len(text) <= _LONG_TEXT else f"{text[:_LONG_TEXT]}… ({len(text):,} characters)"


def _last_name(name: str) -> str:
    """Returns a name of the Hub or a model as it is; of a path or another address, only its last part, without a signature."""
    if "://" in name:
        name = name.partition("?")[0]
    local = name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1
    return PurePath(name.rstrip("/")).name if local and not name.startswith("hf://") else name
