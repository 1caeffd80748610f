"""A few-shot task of lm-evaluation-harness, with batchgen and with the harness's own model `hf`: results and time.

    python -m benchmarks.harness

The multiple-choice task is made here: each document has a question of about 12 tokens and 4 answers of 2 to 5 tokens, after 10 examples that are the same for
all documents. The model is `30m`. The time is that of the call `loglikelihood` with all requests, which includes tokenizing but not loading the model. The two models take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_facts
from benchmarks.models import model_folder

EXAMPLES = 10
ANSWERS = 4
WORDS = (
    "file",
    "name",
    "value",
    "return",
    "list",
    "class",
    "open",
    "read",
    "write",
    "line",
    "module",
    "number",
    "string",
    "error",
    "path",
    "time",
)
TASK = """
task: few_shot_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {docs}, train: {examples}}}}}
test_split: test
fewshot_split: train
num_fewshot: {number}
fewshot_config: {{sampler: first_n}}
output_type: multiple_choice
doc_to_text: "Passage: {{{{passage}}}}\\nQuestion: {{{{question}}}}\\nAnswer:"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def make_task(folder: Path, documents: int) -> None:
    rnd = random.Random(7)

    def text(n: int) -> str:
        return " ".join(rnd.choice(WORDS) for _ in range(n))

    def document() -> dict[str, Any]:
        answers = [text(rnd.randint(2, 5)) for _ in range(ANSWERS)]
        return {"passage": text(40), "question": text(12), "choices": answers, "answer": rnd.randrange(ANSWERS)}

    for name, count in (("examples", EXAMPLES), ("docs", documents)):
        lines = (json.dumps(document()) + "\n" for _ in range(count))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    task = TASK.format(docs=folder / "docs.jsonl", examples=folder / "examples.jsonl", number=EXAMPLES)
    (folder / "few_shot_choice.yaml").write_text(task, encoding="utf-8")


def evaluated(model: Any, folder: Path) -> dict[str, Any]:
    """Runs the task and returns its figures: the accuracies, the sum of the log-likelihoods, seconds and processor seconds."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    spent: dict[str, float] = {}
    model.loglikelihood = timed(type(model).loglikelihood.__get__(model), spent)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(
        model=model, tasks=["few_shot_choice"], task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    assert found is not None
    results = found["results"]["few_shot_choice"]
    total = sum(float(answer[0][0]) for sample in found["samples"]["few_shot_choice"] for answer in sample["resps"])
    return {"acc": results["acc,none"], "acc_norm": results["acc_norm,none"], "logprob": round(total, 3), **spent}


def timed(method: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    @wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        answers = method(*args, **options)
        spent.update(
            seconds=round(time.perf_counter() - wall, 2), processor_seconds=round(time.process_time() - processor, 2)
        )
        return answers

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[8, 1], help="batch sizes of hf, each with one run"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "batchgen-benchmarks")
    parser.add_argument("--out", type=Path, default=None, help="write the figures there, as JSON")
    args = parser.parse_args()
    from lm_eval.models.huggingface import HFLM

    from batchgen.lm_eval import BatchgenLM

    model = str(model_folder(args.work, "30m", args.dtype))
    ways: dict[str, list[dict[str, Any]]] = {"batchgen": []}
    with tempfile.TemporaryDirectory() as folder:
        make_task(Path(folder), args.documents)
        for size in args.batch_sizes:
            for name in ("batchgen", f"hf, batch size {size}", "batchgen"):
                if name == "batchgen":  # loaded again, because it would still have the prefixes of the last run
                    chosen = BatchgenLM(model, device="cpu", dtype=args.dtype)
                else:
                    chosen = HFLM(model, device="cpu", dtype=args.dtype, batch_size=size)
                ways.setdefault(name, []).append(evaluated(chosen, Path(folder)))
                if name == "batchgen":
                    chosen.llm.close()
                print(name, ways[name][-1], flush=True)
    seconds = {name: statistics.median(run["seconds"] for run in runs) for name, runs in ways.items()}
    ratio = min(time for name, time in seconds.items() if name != "batchgen") / seconds["batchgen"]
    print(f"the fastest of hf takes {ratio:.1f} times as long as batchgen")
    if args.out:
        facts = {
            "machine": machine_facts(),
            "dtype": args.dtype,
            "documents": args.documents,
            "ways": ways,
            "ratio": ratio,
        }
        args.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
