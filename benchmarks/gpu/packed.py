"""Packed weights on a device: the same tokens as from weights that are unpacked while they are loaded. In bfloat16, as jobs run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from batchgen.model import loader
from batchgen.model.weights.quantized import packed_in
from benchmarks.gpu.device import Bench
from benchmarks.gpu.parity import Seen, small_engine
from benchmarks.programs import ROOT

sys.path.insert(0, str(ROOT / "tests"))

FORMATS = (
    "awq",
    "awq experts",
    "gptq",
    "gptq in order",
    "gptq 8 bits",
    "modelopt FP8",
    "modelopt NVFP4",
    "fp8",
    "fp8 experts",
    "mxfp4",
)
"""Those whose tests need no package beside batchgen's own."""


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for name in bench.size(FORMATS, FORMATS[:1]):
        yield name, lambda name=name: packed_and_plain(bench, name)  # type: ignore[misc]


def packed_and_plain(bench: Bench, name: str) -> dict[str, Any]:
    """Compares tokens, and the logits of the rows whose tokens are equal, relative to the largest."""
    from support.models import load_folder, make_requests, run
    from support.quantized import make
    from support.shapes import prompts_and_lengths

    prompts, lengths = prompts_and_lengths()
    with tempfile.TemporaryDirectory() as folder:
        make(name, Path(folder))
        rows, logits, weights = [], [], []
        for stays_packed in (False, True):
            # They stay packed where the plain ones would take more than half of the free memory.
            with mock.patch.object(loader, "free_memory", lambda _, packed=stays_packed: 0 if packed else 1 << 40):
                model = load_folder(Path(folder), device=str(bench.device), dtype="bfloat16")
            weights.append(len(packed_in(model.module)))
            engine = small_engine(model)
            seen = Seen(engine)
            results = run(engine, make_requests(prompts, lengths))
            rows.append([list(result.token_ids) for result in results])
            logits.append({(row, number): found for row, number, found in seen.logits(results)})
    plain, packed = rows
    equal = [plain[row] == packed[row] for row in range(len(plain))]
    pairs = [(found, logits[1][at]) for at, found in logits[0].items() if equal[at[0]]]
    return {
        "rows": len(equal),
        "equal": sum(equal),
        "packed_weights": weights[1],
        "unpacked": weights[0] == 0,
        "logit_error": max((float((a - b).abs().max() / a.abs().max()) for a, b in pairs), default=0.0),
        "attention": engine.runner.attention,
    }
