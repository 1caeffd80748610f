"""Rows with images on a device, compared with transformers' `generate` on the CPU, which gets the inputs of the family's own processor. In float32."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import Bench
from benchmarks.programs import ROOT

sys.path.insert(0, str(ROOT / "tests"))

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "idefics3", "internvl", "qwen3_5")
"""They have positions of three dimensions, features in several layers, tokens that attend in both directions, tiles, and recurrent layers."""


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for name in bench.size(FAMILIES, FAMILIES[:1]):
        yield name, lambda name=name: equal_rows(bench, name)  # type: ignore[misc]


def equal_rows(bench: Bench, name: str) -> dict[str, Any]:
    """Counts rows (of text, and with one and several images) with the tokens of `generate`, all at once and in slices smaller than an image."""
    from parity.test_images import CONVERSATIONS, MODES, Sees

    from support.models import run

    with tempfile.TemporaryDirectory() as folder:
        sees = Sees(name, Path(folder), str(bench.device))
        expected = [tokens for _, tokens in sees.expected()]
        found: dict[str, Any] = {}
        for how in ("all at once", "in slices smaller than an image"):
            engine = sees.engine(**MODES[how])
            results = run(engine, sees.build(CONVERSATIONS))
            equal = [list(result.token_ids) == tokens for result, tokens in zip(results, expected, strict=True)]
            found[how] = {"rows": len(equal), "equal": sum(equal), "attention": engine.runner.attention}
            errors = {result.error_message for result in results} - {None}
            if errors:
                raise RuntimeError(f"{how}: {errors}")
    return {"exact": all(f["equal"] == f["rows"] for f in found.values()), "modes": found}
