"""`batchgen models`: shows which models are verified, and whether a model would run, judged by its configuration."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchgen.config import ModelConfig
from batchgen.stats import counted
from batchgen.stats import size_text as size
from batchgen_cli.options import AsJson, Display, option_of
from batchgen_cli.progress import progress_for
from batchgen_cli.stderr import printable, write_answer

if TYPE_CHECKING:
    from batchgen.model_report import ModelReport

_PROMPTS = {
    True: "through its chat template",
    False: "as raw text: it has no chat template",
    None: "unknown: the folder has no tokenizer files, which a run needs",
}
"""How prompts are sent, by whether the model has a chat template."""


def models(
    *,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A folder, or a name on the hub.", show_default=False)
    ] = None,
    revision: Annotated[str | None, option_of(ModelConfig, "revision")] = None,
    as_json: AsJson = False,
) -> int:
    """Show which types of models are verified, or whether MODEL would run, and its size.

    Reads the configuration and the tokenizer of MODEL, never its weights. The exit code is 1 if the model is refused.
    """
    from batchgen.model_report import known_models, report_model

    if model is None:
        known = known_models()
        write_answer(json.dumps(known) if as_json else "\n".join(_known_lines(known)))
        return 0
    with progress_for(Display(progress=False)):
        report = report_model(ModelConfig(model=model, revision=revision))
    write_answer(json.dumps(asdict(report)) if as_json else "\n".join(map(printable, _report_lines(report))))
    return 0


def _known_lines(known: dict[str, Any]) -> list[str]:
    oldest, newest = known["transformers"]
    lines = [f"Verified with transformers {oldest} to {newest}: the same tokens as generate().", ""]
    lines += textwrap.wrap(", ".join(known["verified"]), 98, initial_indent="  ", subsequent_indent="  ")
    lines += ["", "Verified with text rows, without their audio parts. Only those with * are shown images:", ""]
    names = [f"{name}*" if name in known["images"] else name for name in known["multimodal"]]
    lines += textwrap.wrap(", ".join(names), 98, initial_indent="  ", subsequent_indent="  ")
    lines += ["", "Refused, because their answers would be wrong:", ""]
    lines += [f"  {name:<28} {why}" for name, why in known["refused"].items()]
    return [
        *lines,
        "",
        "Any other decoder-only model is checked when it is loaded:",
        "a small model of its type is compared with transformers.",
    ]


def _report_lines(report: ModelReport) -> list[str]:
    runs = "would run: its type is verified"
    if not report.verified:
        runs = "may run: its type is not verified; when it is loaded, a small model of its type is compared with transformers"
    context = [f"          {report.context_note}"] if report.context_note else []
    computed = report.computed_dtype
    dtype = report.dtype if computed == report.dtype else f"{report.dtype}, which this machine computes in {computed}"
    kv = f"{size(report.kv_bytes_per_token)} per token" if report.kv_bytes_per_token else "unknown"
    return [
        f"model     {report.model} ({report.model_type})",
        f"          {runs}",
        f"context   {counted(report.context_length, 'token')}",
        *context,
        f"size      {counted(report.layers, 'layer')}, {counted(report.vocab_size, 'token')} in the vocabulary, {dtype}",
        f"prompts   {_PROMPTS[report.chat_template]}",
        *(["images    shown to the model"] if report.images else ()),
        f"KV        {kv}",
        *(() if report.memory is None else memory_lines(asdict(report.memory), 10)),
    ]


def memory_lines(memory: Mapping[str, Any], indent: int, kv: int | None = None) -> list[str]:
    """Returns a table of what the weights take, alone and with `kv` bytes of KV, and whether it fits this machine."""
    chosen = {"resident": "as they are", "streamed": "streamed"}.get(memory["auto"])
    lines = [
        ("on a CPU", "in memory" if kv is None else "in memory, with KV", f"of {size(memory['free'])} that are free")
    ]
    ways = (
        ("as they are", memory["kept"], memory["kept"]),
        ("--quantize int8", memory["int8"], memory["int8_load"]),
        ("streamed", memory["streamed"], memory["streamed"]),
    )
    for name, count, needed in ways:
        room = memory["free"] - needed
        fits = (
            "does not fit" if room < 0 else "fits" if room >= (memory["kv"] if kv is None else kv) else "little KV fits"
        )
        both = size(count) if kv is None else f"{size(count)}, {size(count + kv)}"
        lines.append((name, both, fits + ("; --weights auto takes this" if name == chosen else "")))
    starts = ["weights".ljust(indent), *[" " * indent] * 3]
    return [f"{start}{name:<17}{sizes:<22}{fits}" for start, (name, sizes, fits) in zip(starts, lines, strict=True)]
