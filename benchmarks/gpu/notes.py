"""Prints the part of a GPU result that belongs in NOTES.md: where a step's milliseconds go, and the speed of attention by itself.

python -m benchmarks.gpu.notes benchmarks/results/gpu.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.result import NotAResult, read_result


def notes(result: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for entry in result["figures"]:
        f = entry["figures"]
        if entry["part"] == "profile":
            lines += [f"- {entry['case']} ({entry['date'][:10]}, code {entry['source'][:8]}): {profile(f)}"]
            lines += [f"  - {kernel(k)}" for k in f["kernels"]]
        elif entry["part"] == "kernels":
            lines += [f"- attention, {entry['case']} ({entry['date'][:10]}, code {entry['source'][:8]}):"]
            lines += [f"  - {line}" for line in (crossover(f) if "grid" in f else flat(f))]
    return "".join(f"{line}\n" for line in lines) or "Nothing has been measured.\n"


def profile(f: Mapping[str, Any]) -> str:
    """Returns a step in one line."""
    kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in f["kinds_ms"].items())
    return f"{f['step_ms']:.2f} ms a step, {f['launches_per_step']:g} kernels; idle {f['idle_ms']:.2f}, {kinds}"


def kernel(k: Mapping[str, Any]) -> str:
    return f"{k['ms']:.3f} ms in {k['per_step']:g}: `{k['name']}`"


def crossover(f: Mapping[str, Any]) -> Iterator[str]:
    """Returns how many times as fast sharing is, one line for each length of the prefix."""
    for prefix in dict.fromkeys(cell["prefix"] for cell in f["grid"]):
        cells = [cell for cell in f["grid"] if cell["prefix"] == prefix]
        said = ", ".join(f"{cell['sharers']}: {cell['flat_ms'] / cell['shared_ms']:.2f}x" for cell in cells)
        yield f"prefix of {prefix:,}, by sharers: {said}"
    yield f"sharing pays best from {f['best_shared_reads']:,} queries x blocks; {f['used']:,} is used"


def flat(f: Mapping[str, Any]) -> Iterator[str]:
    """Returns figures as they are, with one line for each variant."""
    variants = f.get("variants")
    if variants is None:
        yield ", ".join(f"{name} {value}" for name, value in f.items())
        return
    if "tile" in f:
        yield "the tile: " + ", ".join(f"{name} {value}" for name, value in f["tile"].items())
    for variant in variants:
        change = ", ".join(f"{name} {value}" for name, value in variant["change"].items()) or "as it is"
        yield f"{change}: " + ", ".join(f"{name} {value}" for name, value in variant.items() if name != "change")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("result", type=Path)
    args = p.parse_args()
    try:
        print(notes(read_result(args.result)), end="")
    except NotAResult as e:
        p.error(str(e))


if __name__ == "__main__":
    main()
