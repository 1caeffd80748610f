"""A result file of `compare.py`, or of `gpu.sh`, as markdown tables; they stand between two markers of docs/benchmarks.md, so that they can be updated and checked.

    python -m benchmarks.table benchmarks/results/cpu.json                        prints them
    python -m benchmarks.table benchmarks/results/cpu.json --write docs/benchmarks.md      puts them between the markers
    python -m benchmarks.table benchmarks/results/cpu.json --check docs/benchmarks.md      fails if the page has other tables

The markers are `<!-- benchmarks:NAME:begin -->` and `<!-- benchmarks:NAME:end -->`, with the name of the result.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.result import SCHEMA as GPU_SCHEMA
from benchmarks.gpu.tables import tables as gpu_tables
from benchmarks.machine import in_words
from benchmarks.models import PRECISIONS, SHAPES
from benchmarks.programs import OURS, PROGRAMS
from benchmarks.result_file import SCHEMA, medians, shares
from benchmarks.workloads import WORKLOADS

MISSING = "–"
SHORT = {"f32": "float32", "bf16": "bfloat16", "F32": "float32", "BF16": "bfloat16"}
"""Other engines' names for the dtypes by which rows are named."""


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def tables(result: dict[str, Any]) -> str:
    """Returns a table for each model, and a caption."""
    return "\n".join(f"{table(result, model)}\n" for model in SHAPES if model in _models(result)) + caption(result)


def table(result: dict[str, Any], model: str) -> str:
    """Rows: workloads in each dtype. Columns: tokens/s and share of the roofline of batchgen, tokens/s and ratio of the others."""
    others = [
        e for e in PROGRAMS if e != OURS and any(e in _engines(result, kind) for kind in ("measurements", "failures"))
    ]
    title = f"{model} ({number(result['models'][model]['parameters'] / 1e6)}M parameters)"
    lines = [[title, "", OURS, "of the roofline", *(PROGRAMS[e].label for e in others)]]
    lines.append(["---", "---", *["---:"] * (len(others) + 2)])
    for workload in WORKLOADS:
        for dtype in PRECISIONS:
            names = {"model": model, "dtype": dtype, "workload": workload, "limit": result["settings"]["limit"]}
            if not _entries(result, "measurements", names) and not _entries(result, "failures", names):
                continue
            ours = medians(result, names).get(OURS)
            share = shares(result, names).get(OURS)
            cells = [workload.replace("-", " "), dtype, number(ours) if ours else MISSING]
            cells += [f"{share:.0%}" if share else MISSING]
            lines.append(cells + [cell(result, engine, names) for engine in others])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(result: dict[str, Any], engine: str, names: dict[str, Any]) -> str:
    """Returns the tokens/s of an engine, and the ratio of batchgen's to them on the same rows."""
    rows = result["settings"]["engine_rows"].get(engine)
    limits = [names["limit"]] if rows is None else [rows, names["limit"]]
    for limit in limits:
        of = names | {"limit": limit}
        rates = medians(result, of)
        if engine in rates:
            ratio = f" **{rates[OURS] / rates[engine]:.1f}x**" if OURS in rates else ""
            fewer = f" ({limit} rows)" if limit != names["limit"] else ""
            return f"{number(rates[engine])}{ratio}{fewer}"
        for failure in _entries(result, "failures", of):
            if failure["engine"] == engine:
                after = failure["timed_out_after"]
                return "failed" if after is None else f"not in {after:g} s"
    return MISSING


def _entries(result: dict[str, Any], kind: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in result[kind] if all(e[key] == value for key, value in names.items())]


def _engines(result: dict[str, Any], kind: str) -> set[str]:
    return {e["engine"] for e in result[kind]}


def _models(result: dict[str, Any]) -> set[str]:
    return {m["model"] for m in result["measurements"]}


def caption(result: dict[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    versions: dict[str, str] = {}
    for m in result["measurements"]:
        versions |= _named_versions(m)
    listed = "".join(f", {name} {version}" for name, version in versions.items())
    stand_in = settings.get("stand_in")
    processor = machine["cpu"] if stand_in else in_words(machine)
    smaller = f", which stands in for one with {stand_in.upper()} at most (benchmarks/stand_in.py)" if stand_in else ""
    text = (
        f"Completion tokens/s, {_repeats(result)}; with tokenizing, without loading the model; in bold, how many times as fast batchgen is. The roofline is the "
        f"time that the linear layers and attention alone would take at this machine's own rates. {_precisions(result)}{processor}{smaller}, "
        f"{settings['threads']} threads{listed}, {machine['date'][:10]}."
    )
    if settings["limit"]:
        text += f" Only the first {settings['limit']} rows of each workload."
    return text + "\n"


def _named_versions(measurement: dict[str, Any]) -> dict[str, str]:
    """Returns the version of an engine in its own environment, which it names first; of other engines, the versions of torch and transformers."""
    listed = [(n, v) for n, v in measurement["versions"].items() if n != "python"]
    own = PROGRAMS[measurement["engine"]].environment is not None
    return dict(listed[:1]) if own else {n: v for n, v in listed if n in ("torch", "transformers")}


def _repeats(result: dict[str, Any]) -> str:
    counts = Counter((m["engine"], m["model"], m["dtype"], m["workload"], m["limit"]) for m in result["measurements"])
    least, most = min(counts.values(), default=0), max(counts.values(), default=0)
    if most <= 1:
        return "single runs"
    return f"medians of {least if least == most else f'{least} to {most}'} interleaved runs"


def _precisions(result: dict[str, Any]) -> str:
    """Returns which engines computed in another type than their row says; empty if that is not known."""
    others: dict[str, set[str]] = {}
    for m in result["measurements"]:
        extras = m.get("extras", {})
        name = extras.get("precision") or extras.get("compute_type")
        if name and SHORT.get(name, name) != m["dtype"]:
            others.setdefault(m["dtype"], set()).add(f"{PROGRAMS[m['engine']].label} {name}")
    return "".join(
        f"In the {dtype} rows: {', '.join(sorted(others[dtype]))}. " for dtype in PRECISIONS if dtype in others
    )


def put(text: str, name: str, content: str) -> str:
    """Returns `text` with `content` between the markers of `name`. Raises `ValueError` unless each marker is there once."""
    begin, end = f"<!-- benchmarks:{name}:begin -->", f"<!-- benchmarks:{name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the markers {begin} and {end} must be there once each, in this order")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{content}{end}{rest.partition(end)[2]}"


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("result", type=Path)
    what = p.add_mutually_exclusive_group()
    what.add_argument("--write", type=Path, metavar="FILE", help="put the tables between their markers in this file")
    what.add_argument("--check", type=Path, metavar="FILE", help="exit with 1 if the tables in this file are others")
    args = p.parse_args()
    try:
        result = json.loads(args.result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        p.error(f"{args.result} cannot be read: {e}")
    if result.get("schema") not in (SCHEMA, GPU_SCHEMA):
        p.error(f"{args.result} is not a result of compare.py ({SCHEMA}) or of gpu.sh ({GPU_SCHEMA})")
    content = gpu_tables(result) if result["schema"] == GPU_SCHEMA else tables(result)
    file = args.write or args.check
    if file is None:
        print(content, end="")
        return
    text = file.read_text(encoding="utf-8")
    try:
        new = put(text, result["name"], content)
    except ValueError as e:
        p.error(f"{file}: {e}")
    if args.write:
        file.write_text(new, encoding="utf-8")
    elif new != text:
        sys.exit(
            f"{file} is not what {args.result} says; make it again: python -m benchmarks.table {args.result} --write {file}"
        )


if __name__ == "__main__":
    main()
