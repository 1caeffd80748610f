"""Writes `prompts.jsonl` and `prompts.parquet`: the same rows twice, few-shot prompts in nested groups with their answers.

    python sample_data/make_prompts.py

Every row's prompt is the general rules, a task's rules, a desk's notes and the row's own input. No row's input
is in the training text with the row's answer (see `office_tasks.base.is_held_out`).
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from office_tasks import ROOT, TASKS, Task, desk_text, draw_questions, input_text, prefix_text

FOLDER = Path(__file__).parent
SEED = 7
DESKS_PER_TASK = 4
ROWS_PER_DESK = 24


def task_rows(rng: Random, task: Task) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    forms: set[str] = set()
    while len(forms) < DESKS_PER_TASK:
        desk = task.desk(rng)
        drawn = draw_questions(rng, desk, 200, held_out=True)
        questions = list({question.text: question for question in drawn}.values())
        if desk.form in forms or len(questions) < ROWS_PER_DESK:
            continue
        forms.add(desk.form)
        prefix = prefix_text(ROOT, task.rules, desk_text(rng, desk))
        for question in questions[:ROWS_PER_DESK]:
            rows.append(
                {
                    "id": f"{task.name}-{len(rows):03}",
                    "task": task.name,
                    "prompt": prefix + input_text(question),
                    "expected": question.answer,
                    "meta": {"desk": desk.name, "difficulty": question.difficulty},
                }
            )
    return rows


def all_rows() -> list[dict[str, Any]]:
    rng = Random(SEED)
    rows = [row for task in TASKS for row in task_rows(rng, task)]
    rng.shuffle(rows)
    return rows


def main() -> None:
    rows = all_rows()
    for column in ("id", "prompt"):
        assert len({row[column] for row in rows}) == len(rows), f"two rows with the same {column}"
    with (FOLDER / "prompts.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    pq.write_table(pa.Table.from_pylist(rows), FOLDER / "prompts.parquet", compression="zstd")
    shape = f"{len(TASKS)} tasks of {DESKS_PER_TASK} desks of {ROWS_PER_DESK} rows"
    print(f"wrote {len(rows)} rows ({shape}) to prompts.jsonl and prompts.parquet")


if __name__ == "__main__":
    main()
