"""What drafts save in jobs that a trained model answers: `python -m benchmarks.drafts`.

Trains the sample model further for a few minutes, so that it writes orders as JSON objects of ten fields, labels them with a reason, and writes them
again with one word changed. Then it runs each job with `--speculate off` and `auto`, in turn, and prints medians of the time and of the processor's. The
outputs must be equal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchgen import LLM, EngineConfig, SamplingParams
from batchgen.result import Result

SAMPLE = Path(__file__).parents[1] / "sample_data" / "model"
NAMES = ["Falk", "Keller", "Laine", "Berg", "Haas", "Fischer", "Kovac", "Moreau", "Marek", "Larsen", "Dubois", "Silva"]
TOWNS = ["Dover", "Geneva", "Vilnius", "Genoa", "Namur", "Turku", "Cork", "Leeds", "Galway", "Lisbon", "Lyon", "Oslo"]
GOODS = ["lamps", "chairs", "clocks", "ropes", "shelves", "mirrors", "carpets", "kettles", "tiles", "doors"]
COLOURS = ["red", "green", "blue", "white", "black"]
FIELDS: dict[str, dict[str, Any]] = {
    "order": {"type": "integer", "minimum": 0, "maximum": 9999},
    "name": {"type": "string", "maxLength": 12},
    "town": {"type": "string", "maxLength": 12},
    "goods": {"type": "string", "maxLength": 12},
    "pieces": {"type": "integer", "minimum": 0, "maximum": 99},
    "colour": {"enum": COLOURS},
    "price": {"type": "integer", "minimum": 0, "maximum": 999},
    "paid": {"type": "boolean"},
    "express": {"type": "boolean"},
    "currency": {"enum": ["EUR", "USD"]},
}
SCHEMA = json.dumps({"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False})
JOBS: dict[str, dict[str, Any]] = {
    "json": {"max_tokens": 160, "json_schema": SCHEMA},
    "label": {"max_tokens": 60},
    "rewrite": {"max_tokens": 90},
    "n = 8": {"max_tokens": 60, "n": 8, "temperature": 0.3},
}


def task(kind: str, rng: random.Random) -> tuple[str, str]:
    """Returns a prompt and its answer."""
    order = {
        "order": rng.randrange(1000, 9999), "name": rng.choice(NAMES), "town": rng.choice(TOWNS), "goods": rng.choice(GOODS),
        "pieces": rng.randrange(2, 99), "colour": rng.choice(COLOURS), "price": rng.randrange(10, 999), "paid": rng.random() < 0.5,
        "express": rng.random() < 0.5, "currency": rng.choice(["EUR", "USD"]),
    }  # fmt: skip
    text = (
        f"Order {order['order']} of {order['name']} in {order['town']}: {order['pieces']} {order['colour']} {order['goods']} for "
        f"{order['price']} {order['currency']}, {'paid' if order['paid'] else 'not paid'}, {'express' if order['express'] else 'by post'}."
    )
    if kind == "json":
        return f"Write the order as JSON.\n{text}", json.dumps(order, separators=(",", ":"))
    if kind == "rewrite":
        return f"Write the order again for another town, Bonn.\n{text}", text.replace(f"in {order['town']}", "in Bonn")
    label = "urgent" if order["express"] and order["paid"] else "normal"
    reason = f"the order is {'paid' if order['paid'] else 'not paid'} and goes {'express' if order['express'] else 'by post'}"
    return f"Say how urgent the order is, and why.\n{text}", f"The order of {order['name']} is {label}: {reason}."


def train(folder: Path, steps: int, width: int) -> None:
    """Writes a model that answers the tasks. Takes some seconds a step."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(SAMPLE),
        AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32),
    )
    rng, optimizer = random.Random(1), torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * min((step + 1) / 10, 1.1 - step / steps)
        ids, labels = [], []
        for kind in ("json", "rewrite", "label") * 8:
            prompt, answer = task(kind, rng)
            asked = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
            told = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            ids.append(torch.tensor(asked + told))
            labels.append(torch.tensor([-100] * len(asked) + told))
        batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        wanted = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        loss = model(input_ids=batch, labels=wanted).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"training: step {step}, loss {loss.item():.3f}", flush=True)
    widened(model, width).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def widened(model: Any, width: int) -> Any:
    """Returns a model that computes the same with larger layers: the additional weights are zeros. A tiny model's steps cost next to nothing."""
    config = type(model.config)(**model.config.to_dict() | {"intermediate_size": width})
    wide = type(model)(config)
    weights = wide.state_dict()
    for name, small in model.state_dict().items():
        weights[name].zero_()
        weights[name][tuple(slice(0, size) for size in small.shape)] = small
    wide.load_state_dict(weights)
    return wide


def measure(model: Path, job: str, rows: int, repeats: int, dtype: str) -> dict[str, Any]:
    """Runs a job with and without drafts, in turn. Returns medians."""
    rng = random.Random(2)
    asked = [task("label" if job.startswith("n") else job, rng) for _ in range(rows)]
    prompts, params = [prompt for prompt, _ in asked], SamplingParams(**JOBS[job])
    modes = ("off", "auto")
    llms = {mode: LLM(model, dtype=dtype, engine=EngineConfig(speculate=mode)) for mode in modes}
    seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    texts: dict[str, list[Any]] = {}
    counts: dict[str, tuple[int, ...]] = {}
    for repeat in range(repeats + 1):  # the first one warms up, and learns what steps cost
        for mode in modes if repeat % 2 else modes[::-1]:
            before, began, processor = figures(llms[mode]), time.perf_counter(), time.process_time()
            results = llms[mode].generate(prompts, params)
            if repeat:
                seconds[mode].append((time.perf_counter() - began, time.process_time() - processor))
            counts[mode] = tuple(b - a for a, b in zip(before, figures(llms[mode]), strict=True))
            texts[mode] = [told(result) for result in results]
    if texts["off"] != texts["auto"]:
        raise SystemExit(f"{job}, {rows} rows: the outputs differ")
    right = sum(texts["off"][i][0] == answer for i, (_, answer) in enumerate(asked))
    for llm in llms.values():
        llm.close()
    medians = {mode: [statistics.median(times) for times in zip(*seconds[mode], strict=True)] for mode in modes}
    return {
        "right": right / rows,
        "ratios": [off / auto for off, auto in zip(medians["off"], medians["auto"], strict=True)],
        "steps": (counts["off"][0], counts["auto"][0]),
        "drafts": counts["auto"][1:],
    }


def figures(llm: LLM) -> tuple[int, int, int]:
    """The steps, drafted and accepted tokens so far."""
    return llm.stats.steps, llm.stats.drafted.total(), llm.stats.accepted.total()


def told(result: Result) -> list[str | None]:
    """The texts of a result."""
    return [result.text, *(completion.text for completion in result.completions)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a folder of an earlier run's model (default: one is trained)")
    parser.add_argument("--keep", type=Path, help="folder for the trained model (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    parser.add_argument("--width", type=int, default=16384, help="intermediate size of the model's layers")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 32, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", default=[*JOBS], choices=[*JOBS])
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model = args.model
        if model is None:
            model = args.keep or Path(temporary)
            train(model, args.steps, args.width)
        print(
            "| job | rows | right | off / auto, time | processor | steps off, auto | accepted of drafted |\n"
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
        )
        for job in args.jobs:
            for rows in args.rows:
                m = measure(model, job, rows, args.repeats, args.dtype)
                drafted, accepted = m["drafts"]
                clock, processor = m["ratios"]
                print(
                    f"| {job} | {rows} | {m['right']:.0%} | {clock:.2f} | {processor:.2f} | {m['steps'][0]}, {m['steps'][1]} | {accepted} of {drafted} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
