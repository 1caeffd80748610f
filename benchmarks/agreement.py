"""Whether batchgen and transformers write the same tokens: the rows that differ, and how close the logits of the two tokens were at the first difference.

    python -m benchmarks.agreement --rows 16

In float32, two greedy decodings may differ at a near tie, which rounding decides differently in batches of different shapes; then the rest of
the texts differs too. So the model is run over the common beginning, and the gap between the logits of the two tokens is compared with the
spread of all logits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from benchmarks.machine import cores
from benchmarks.models import DTYPES, SHAPES, model_folder
from benchmarks.programs import GENERATE, OURS, PROGRAMS, Case, EngineFailed, Launcher
from benchmarks.workloads import WORKLOADS, workload_file

NEAR_TIE = 1e-3
"""In standard deviations of the logits: rounding in float32 is well below it, a wrong computation well above.
In bfloat16 the two cannot be told apart, and the gaps are only shown."""


def ids_of(engine: str, case: Case, launcher: Launcher) -> list[list[int]]:
    launcher.prepare(engine, case)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ids.jsonl"
        launcher.call(engine, case, ["--ids-out", str(file)])
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def gap(case: Case, prompt: str, ours: list[int], theirs: list[int]) -> tuple[int, float]:
    """Returns the place where two completions begin to differ, and the difference of the two tokens' logits there in standard deviations of all logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case.folder)
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype="auto").eval()
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    with torch.inference_mode():
        logits = (
            model(torch.tensor([tokenizer(prompt)["input_ids"] + ours[:at]]), logits_to_keep=1).logits[0, -1].float()
        )
    return at, float((logits[ours[at]] - logits[theirs[at]]).abs() / logits.std())


def main() -> None:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.agreement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rows", type=int, default=16, help="the first of each workload (%(default)s)")
    p.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME")
    p.add_argument("--model", choices=list(SHAPES), default="30m")
    p.add_argument("--dtype", choices=DTYPES, default="float32")
    p.add_argument(
        "--engine", choices=[e for e in PROGRAMS if e != OURS], default=GENERATE, help="to compare with (%(default)s)"
    )
    p.add_argument("--threads", type=int)
    p.add_argument("--work", default=str(Path(tempfile.gettempdir()) / "batchgen-benchmarks"))
    p.add_argument(
        "--engines-folder", type=Path, help="what setup_engines.sh made (default: batchgen-engines beside --work)"
    )
    args = p.parse_args()
    disable_progress_bar()
    work, unexplained = Path(args.work), 0
    launcher = Launcher(args.engines_folder or work.absolute().parent / "batchgen-engines", args.threads or cores())
    missing = launcher.missing(args.engine)
    if missing:
        p.error(missing)
    folder = model_folder(work, args.model, args.dtype)
    for workload in args.workloads:
        file, _ = workload_file(work, workload, folder, args.rows)
        case = Case(args.model, args.dtype, workload, folder, file)
        prompts = [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()]
        try:
            ours, theirs = (ids_of(engine, case, launcher) for engine in (OURS, args.engine))
        except EngineFailed as e:
            raise SystemExit(str(e)) from e
        different = [row for row in range(len(prompts)) if ours[row] != theirs[row]]
        print(f"{case}: {len(different)} of {len(prompts)} rows differ from {args.engine}", flush=True)
        for row in different:
            at, size = gap(case, prompts[row], ours[row], theirs[row])
            verdict = ""
            if args.dtype == "float32":
                unexplained += size >= NEAR_TIE
                verdict = f" ({'a near tie' if size < NEAR_TIE else 'NOT a near tie'})"
            print(f"  row {row}, token {at}: {size:.2g} standard deviations apart{verdict}")
    if unexplained:
        raise SystemExit(f"{unexplained} rows differ at more than a near tie")


if __name__ == "__main__":
    main()
