"""How long planning a window takes, and how much memory it takes besides the prompts.

    python benchmarks/planning.py --prompts 100000 --repeat 3 --json planning.json

Each case runs in its own process, so that its peak memory is its own. For Linux and macOS.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from batchgen.prefix import PrefixPlan, carried_tokens, plan_prefixes
from batchgen.request import TokenArray

VOCABULARY = 32_000
Random = Callable[[int], TokenArray]


def nested(count: int, draw: Random) -> list[TokenArray]:
    """Root of 200 tokens, 200 group prefixes of 500, 300 tokens of its own each."""
    root, groups = draw(200), [draw(500) for _ in range(200)]
    return [np.concatenate([root, groups[i % 200], draw(300)]) for i in range(count)]


def nothing_shared(count: int, draw: Random) -> list[TokenArray]:
    """1,000 random tokens each."""
    return [draw(1000) for _ in range(count)]


def all_equal(count: int, draw: Random) -> list[TokenArray]:
    """The same 1,000 tokens each."""
    prompt = draw(1000)
    return [prompt.copy() for _ in range(count)]


def equal_pairs(count: int, draw: Random) -> list[TokenArray]:
    """1,000 random tokens, each twice: as many groups as there can be."""
    half = [draw(1000) for _ in range(count // 2)]
    return half + [prompt.copy() for prompt in half]


def long_prefix(count: int, draw: Random) -> list[TokenArray]:
    """One prefix of 8,000 tokens, 100 of its own each; an eighth of the prompts."""
    prefix = draw(8000)
    return [np.concatenate([prefix, draw(100)]) for _ in range(count // 8)]


def few_words(count: int, draw: Random) -> list[TokenArray]:
    """1,000 tokens of which the first 200 are of 2 kinds: a tree that branches everywhere."""
    return [np.concatenate([draw(200) % 2, draw(800)]) for _ in range(count)]


CASES = {
    case.__name__.replace("_", "-"): case
    for case in (nested, nothing_shared, all_equal, equal_pairs, long_prefix, few_words)
}


def peak_mib() -> float:
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def measure(name: str, count: int, repeat: int) -> dict[str, Any]:
    """Measures one case: the shortest time of `repeat` plans, and the memory that the first plan needed besides the prompts."""
    rng = np.random.default_rng(0)
    prompts = CASES[name](count, lambda n: rng.integers(0, VOCABULARY, n, dtype=np.int32))
    order = rng.permutation(len(prompts))
    prompts = [prompts[i] for i in order]
    before = peak_mib()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        plan = plan_prefixes(prompts, 16)
        seconds.append(time.perf_counter() - start)
    memory = peak_mib() - before
    start = time.perf_counter()
    carried = carried_tokens(plan, prompts, _node_paths(plan, prompts))
    return {
        "case": name,
        "prompts": len(prompts),
        "prompt_tokens": plan.prompt_tokens,
        "prefill_tokens_min": plan.prefill_tokens_min,
        "nodes": len(plan.nodes),
        "groups": len(plan.groups),
        "seconds": round(min(seconds), 3),
        "extra_mib": round(memory, 1),
        "carried_tokens": carried,
        "carried_seconds": round(time.perf_counter() - start, 3),
    }


def _node_paths(plan: PrefixPlan, prompts: Sequence[TokenArray]) -> list[TokenArray]:
    """The tokens from the start to the end of each node that has no child nodes."""
    parents = {node.parent for node in plan.nodes}
    return [prompts[plan.order[node.first]][: node.end] for node in plan.nodes if node.index not in parents]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--case", choices=list(CASES), action="append", help="may be repeated; default: all")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    results = []
    print(f"{'case':<16}{'prompts':>9}{'tokens':>13}{'least':>13}{'nodes':>9}{'groups':>9}", end="")
    print(f"{'plan s':>9}{'MiB':>8}{'overlap s':>11}")
    for name in args.case or CASES:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            r = pool.submit(measure, name, args.prompts, args.repeat).result()
        results.append(r)
        print(f"{name:<16}{r['prompts']:>9,}{r['prompt_tokens']:>13,}{r['prefill_tokens_min']:>13,}", end="")
        print(f"{r['nodes']:>9,}{r['groups']:>9,}{r['seconds']:>9.2f}{r['extra_mib']:>8.0f}", end="")
        print(f"{r['carried_seconds']:>11.2f}", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(results, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
