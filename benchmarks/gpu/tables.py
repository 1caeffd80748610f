"""The GPU result as tables in markdown. Missing figures are shown as not measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.parts import CONTINUOUS, DECODE_PREFIXES, PARTS
from benchmarks.gpu.result import find
from benchmarks.programs import GENERATE, OURS, PROGRAMS, VLLM

NOT_MEASURED = "not measured"
Result = Mapping[str, Any]


def tables(result: Result) -> str:
    if not result["figures"] and not result["failures"]:
        return caption(result)
    parts = [decode(result), single(result), workloads(result)]
    return "\n".join([*parts, caption(result)])


def figures(result: Result, part: str, case: str) -> dict[str, Any] | None:
    found = find(result, "figures", part, case)
    return None if found is None else found["figures"]


def on(result: Result, part: str, case: str) -> str:
    """Returns on which GPU a case was measured, if the result has figures of several."""
    entry = find(result, "figures", part, case)
    names = [machine["gpu"] or "no GPU" for machine in result["machines"]]
    used = {names[e["machine"]] for e in result["figures"]}
    return "" if entry is None or len(used) == 1 else f", {names[entry['machine']].removeprefix('NVIDIA ').split()[0]}"


def missing(result: Result, part: str, case: str) -> str:
    """Returns why there is no figure."""
    return "failed" if find(result, "failures", part, case) else NOT_MEASURED


def markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rows = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rows))


def decode(result: Result) -> str:
    """Returns a table with a row for each length of the prefix."""
    lines = [["decoding, 8B, 256 sequences under one prefix", "tokens/s", "ms a step", "floor, ms", "of the floor"]]
    for prefix in DECODE_PREFIXES:
        name = f"{prefix:,} tokens"
        f = figures(result, "decode", f"8b {prefix}")
        name += on(result, "decode", f"8b {prefix}")
        if f is None:
            lines.append([name, missing(result, "decode", f"8b {prefix}"), "", "", ""])
        else:
            lines.append(
                [
                    name,
                    f"{f['tokens_per_s']:,.0f}",
                    f"{f['step_ms']:.1f}",
                    f"{f['floor_ms']:.1f}",
                    f"{f['floor_share']:.0%}",
                ]
            )
    return markdown(lines)


def single(result: Result) -> str:
    """Returns the table of single figures."""
    lines = [["", ""]]
    for text, part, case, said in (
        ("8B, prompts of 2,048 tokens: of the rate of a large matrix product", "prefill", "8b 32 x 2048", _prefill),
        ("8B, prompts of 16,384 tokens", "prefill", "8b 4 x 16384", _prefill),
        ("0.5B, prompts of 2,048 tokens", "prefill", "0.5b 128 x 2048", _prefill),
        ("0.5B, bfloat16: largest difference of a logit from transformers alone, and that of transformers in batches",
         "parity", "bfloat16 0.5b", _spread),
    ):  # fmt: skip
        f = figures(result, part, case)
        lines.append([text + on(result, part, case), missing(result, part, case) if f is None else said(f)])
    lines.append(["architectures whose float32 tokens are those of `generate`", exact(result)])
    lines.append(
        ["families whose rows with images have the tokens of `generate`", share(result, "images", lambda f: f["exact"])]
    )
    packed = share(result, "packed", lambda f: f["equal"] == f["rows"] and not f["logit_error"])
    lines.append(["formats of packed weights with the logits of unpacked ones, to the last bit", packed])
    return markdown(lines)


def _prefill(f: Mapping[str, Any]) -> str:
    return f"{f['matmul_share']:.0%}, {f['tokens_per_s']:,.0f} tokens/s"


def _spread(f: Mapping[str, Any]) -> str:
    return f"{f['difference']:.3g}, {f['spread_of_transformers']:.3g}"


def exact(result: Result) -> str:
    """Returns how many of the rows that were run are equal."""

    def of_float32(kind: str) -> list[dict[str, Any]]:
        return [e for e in result[kind] if e["part"] == "parity" and e["case"].startswith("float32 ")]

    ran = of_float32("figures")
    failed = {e["case"] for e in of_float32("failures")} - {e["case"] for e in ran}
    if not ran and not failed:
        return NOT_MEASURED
    names = {e["case"].removeprefix("float32 ").split("/")[0] for e in ran if e["figures"]["exact"]}
    bad = [e["case"] for e in ran if not e["figures"]["exact"]]
    return f"{len(names)}" + (
        f"; not {', '.join(n.removeprefix('float32 ') for n in [*bad, *sorted(failed)])}" if bad or failed else ""
    )


def share(result: Result, part: str, holds: Callable[[Mapping[str, Any]], bool]) -> str:
    """Returns for how many cases of a part that were run something holds."""
    found = [holds(e["figures"]) for e in result["figures"] if e["part"] == part]
    return f"{sum(found)} of {len(found)}" if found else NOT_MEASURED


def workloads(result: Result) -> str:
    """Returns the tokens/s; in bold how many times as fast batchgen is on the same rows."""
    others = (f"{OURS} --no-share", VLLM, GENERATE, CONTINUOUS)
    labels = ("without sharing", *(PROGRAMS[engine].label for engine in others[1:]))
    lines = [["completion tokens/s", "batchgen", *labels]]
    for name, part in PARTS.items():
        if part.workload:
            whole = figures(result, name, OURS)
            cells = [f"{whole['tokens_per_s']:,.0f}" if whole else missing(result, name, OURS)]
            cells += [compared(result, name, engine) for engine in others]
            workload, model = part.workload.split()
            lines.append([f"{workload.replace('-', ' ')}, {model.upper()}{on(result, name, OURS)}", *cells])
    return markdown(lines)


def compared(result: Result, part: str, engine: str) -> str:
    """Returns another engine's tokens/s and the ratio, on the rows that it ran."""
    theirs = figures(result, part, engine)
    if theirs is None:
        return missing(result, part, engine)
    where = on(result, part, engine)
    for case in (OURS, f"{OURS} {theirs['rows']} rows"):
        ours = figures(result, part, case)
        if ours is not None and ours["rows"] == theirs["rows"] and on(result, part, case) == where:
            fewer = "" if case == OURS else f" ({theirs['rows']} rows)"
            return f"{theirs['tokens_per_s']:,.0f} **{ours['tokens_per_s'] / theirs['tokens_per_s']:.1f}x**{fewer}"
    return f"{theirs['tokens_per_s']:,.0f} ({theirs['rows']} rows{where})"


def caption(result: Result) -> str:
    entries = result["figures"]
    if not entries:
        return (
            "Nothing has been measured on a GPU yet: the code for GPUs has run on an emulated device only, and [checks itself](gpu.md) on a real "
            "one. `benchmarks/gpu.sh` measures decoding, prefill, parity and whole jobs beside transformers.\n"
        )
    used = [result["machines"][place] for place in sorted({e["machine"] for e in entries})]
    where = "; ".join(dict.fromkeys(_machine(machine) for machine in used))
    dates = sorted(e["date"][:10] for e in entries)
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    codes = len({e["source"] for e in entries})
    text = (
        "Random weights, bfloat16, greedy. The floor of a step is the sum over linear layers, shared parts, own blocks and head of the larger of "
        "bytes at the bandwidth of a large copy and operations at the rate of a large matrix product, both measured in the same run; in bold how many times as fast "
        f"batchgen is on the same rows. {where}, {days}."
    )
    return text + (f" Figures are of {codes} states of the code.\n" if codes > 1 else "\n")


def _machine(machine: Mapping[str, Any]) -> str:
    named = ("torch", "transformers", "triton")
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in named if name in machine["versions"])
    device = machine["gpu"] or f"no GPU ({machine['cpu']})"
    return f"{device}, driver {machine['driver']}, CUDA {machine['cuda']}, {versions}"
