"""What `batchgen plan` and `run` advise for ten jobs, and what following it saves: `python -m benchmarks.advice [--write PAGE]`.

The jobs label reviews of a few products. Most have something in their template or prompts that costs time. Each runs as it is and as advised. Prompt
tokens are counted; the seconds are those of the engine's steps (`--clock processor`: their processor time, for a busy machine).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen import JobConfig, ModelConfig, SamplingParams
from batchgen.config import PromptConfig
from benchmarks.estimates import CLOCKS, alone
from benchmarks.table import put

INSTRUCTION = (
    "You read reviews of things that people have bought. Say in one word whether the review is good, bad or neither. A review that praises "
    "the thing and complains about its delivery is good. A review that is mostly about another thing is neither. Do not explain your answer, and "
    "do not repeat the review. If the review is in another language, answer in English all the same."
)
Columns = dict[str, str]


@dataclass(frozen=True)
class Case:
    """A job, and the same job after its advice was followed. None: what `plan --write-template` writes."""

    name: str
    template: str
    better: str | None
    filled_in: bool = False
    """Whether the input has whole prompts, in which the template is filled in already."""
    equal: float = 0.0
    """The part of the rows that are equal to others. The job beside it has as many rows, and no equal ones."""
    max_tokens: int = 4
    enough_tokens: int = 4
    """More than `max_tokens`: the rows are finished with `--retry length`. The job beside it begins again."""


CASES = [
    Case("instruction, product, review", f"{INSTRUCTION}\n\n{{{{product}}}}\n\n{{{{review}}}}\n\nAnswer:", None),
    Case("review first", f"Review: {{{{review}}}}\n\n{INSTRUCTION}\n\nAnswer:", None),
    Case("review before product", f"{INSTRUCTION}\n\n{{{{review}}}}\n\n{{{{product}}}}\n\nAnswer:", None),
    Case("time of the row first", f"Time: {{{{time}}}}\n\n{INSTRUCTION}\n\n{{{{review}}}}\n\nAnswer:", None),
    Case(
        "id in the first sentence",
        f"Review {{{{id}}}}. {INSTRUCTION}\n\n{{{{review}}}}\n\nAnswer:",
        f"{INSTRUCTION}\n\nReview {{{{id}}}}. {{{{review}}}}\n\nAnswer:",
    ),
    Case(
        "prompts that begin with random text",
        f"[{{{{random}}}}] {INSTRUCTION}\n\n{{{{review}}}}\n\nAnswer:",
        f"{INSTRUCTION}\n\n[{{{{random}}}}] {{{{review}}}}\n\nAnswer:",
        filled_in=True,
    ),
    Case("question before a long document", "{{question}}\n\n{{product}}\n\nAnswer:", None),
    Case(
        "prompts with the question before the document",
        "{{question}}\n\n{{product}}\n\nAnswer:",
        "{{product}}\n\n{{question}}\n\nAnswer:",
        filled_in=True,
    ),
    Case("60 % equal rows", f"{INSTRUCTION}\n\n{{{{review}}}}\n\nAnswer:", None, equal=0.6),
    Case("too few tokens", f"{INSTRUCTION}\n\n{{{{review}}}}\n\nAnswer:", None, max_tokens=8, enough_tokens=32),
]


def columns_of(case: Case, count: int) -> list[Columns]:
    """Returns the columns of each row."""
    rng = random.Random(5)
    words = [
        "good", "bad", "late", "broken", "cheap", "bright", "heavy", "loud", "small", "box", "lamp", "chair", "price", "colour", "again",
    ]  # fmt: skip
    products = [f"Product {i}: " + " ".join(rng.choices(words, k=120)) for i in range(8)]

    def row(i: int) -> Columns:
        return {
            "id": f"{rng.randrange(1 << 32):08x}",
            "time": f"2026-11-{rng.randrange(1, 29):02} {rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}",
            "random": f"{rng.getrandbits(96):024x}",
            "product": rng.choice(products),
            "question": f"Is it {rng.choice(words)} or {rng.choice(words)}, or number {i}?",
            "review": f"{i}: " + " ".join(rng.choices(words, k=rng.randrange(15, 40))),
        }

    different = [row(i) for i in range(count - int(count * case.equal))]
    rows = different + rng.choices(different, k=count - len(different))
    rng.shuffle(rows)
    return rows


def config_of(case: Case, template: str, rows: list[Columns], model: str, file: Path) -> JobConfig:
    """Writes the rows to `file` and returns the job that runs them with this template."""
    if case.filled_in:
        rows = [{"prompt": filled(template, row)} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prompts = PromptConfig(template=None if case.filled_in else template, chat=False)
    params = SamplingParams(max_tokens=case.max_tokens, ignore_eos=True)
    return JobConfig(
        inputs=(str(file),),
        output=f"{file}.out.jsonl",
        model=ModelConfig(model=model),
        prompts=prompts,
        sampling=params,
    )


def filled(template: str, row: Columns) -> str:
    for name, text in row.items():
        template = template.replace(f"{{{{{name}}}}}", text)
    return template


def measured(case: Case, model: str, rows: int, clock: str, work: Path) -> dict[str, Any]:
    """Returns what the job is told, and the prefilled tokens and the seconds of its steps as it is and as advised."""
    columns, costs, best = columns_of(case, rows), work / "costs", work / "best.jinja"
    cut = case.enough_tokens > case.max_tokens
    config = config_of(case, case.template, columns, model, work / "rows.jsonl")
    plan = alone(["plan"], clock, costs, config, None if case.filled_in else str(best))
    now = after = alone(["run"], clock, costs, config)
    if case.better or best.exists():
        better = config_of(case, case.better or best.read_text(), columns, model, work / "better.jsonl")
        after = alone(["run"], clock, costs, better)
    elif case.equal:
        different = columns_of(replace(case, equal=0.0), rows)
        now = alone(["run"], clock, costs, config_of(case, case.template, different, model, work / "different.jsonl"))
    elif cut:
        enough = replace(config, sampling=replace(config.sampling, max_tokens=case.enough_tokens))
        after = alone(["run"], clock, costs, replace(enough, retry=("length",)))
        now = {**alone(["run"], clock, costs, replace(enough, output=str(work / "again.jsonl"))), "notes": now["notes"]}
    said = plan["advice"] or next((note for note in now["notes"] if cut and "--max-tokens" in note), "")
    return {"name": case.name, "says": said, "now": now, "after": after}


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| job | prompt tokens that run | as advised | seconds of steps | as advised |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        now, after = one["now"], one["after"]
        as_is = [f"{now['prefill']:,}", f"{after['prefill']:,}", f"{now['steps']:.1f}", f"{after['steps']:.1f}"]
        lines.append(f"| {one['name']} | {' | '.join(as_is)} |")
    said = [f"- {one['name']}: {one['says'] or 'nothing'}" for one in found]
    return "\n".join([*lines, "", *said, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--model", default="sample_data/model")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between its markers in this page")
    args = parser.parse_args()
    found = []
    for case in CASES:
        if args.cases is None or case.name in args.cases:
            with tempfile.TemporaryDirectory() as work:
                found.append(measured(case, args.model, args.rows, args.clock, Path(work)))
            print(table(found[-1:]), flush=True)
    if args.write:
        args.write.write_text(put(args.write.read_text(encoding="utf-8"), "advice", table(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
