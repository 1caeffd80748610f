"""The tests that need a GPU, as a part of the benchmarks, so that one command runs everything on a machine with a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from batchgen.process.machine import usable_cores
from benchmarks.gpu.device import Bench
from benchmarks.programs import ROOT

LIMIT = 400.0


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    yield "pytest -m gpu", lambda: gpu_tests(bench)


def gpu_tests(bench: Bench) -> dict[str, Any]:
    """Runs the tests that need a GPU. A tiny bench runs some that do not, to show that this part works."""
    # Most examples of the slow tests compile their own kernel.
    on_gpu = [
        "-m",
        "gpu and not slow and not nightly",
        *(f"tests/{part}" for part in ("attention", "devices", "engine", "kernels", "model", "sampling")),
    ]
    tests = bench.size(on_gpu, ["-m", "", "tests/prefix/test_hashing.py"])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Other versions of torch and transformers have other warnings; here only results count.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-W",
            "default",
            "-p",
            "no:cacheprovider",
            "-n",
            str(min(8, usable_cores())),  # most of the time is that of Triton's compiler
            "--junit-xml",
            str(report),
        ]
        path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "cli"), os.environ.get("PYTHONPATH")]))
        process = subprocess.run(
            [*command, "--continue-on-collection-errors", *tests],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with {process.returncode}: {process.stdout[-2000:]}")
        return counted(ET.parse(report).getroot())


def counted(report: ET.Element) -> dict[str, Any]:
    """Counts tests by outcome in pytest's report. Lists failed tests with the first line of their message."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for case in report.iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        outcome = "failed" if bad is not None else "skipped" if case.find("skipped") is not None else "passed"
        found[outcome] += 1
        if bad is not None:
            said = (bad.get("message") or "").strip().splitlines()
            found["failures"].append(f"{case.get('classname')}::{case.get('name')}: {said[0] if said else ''}"[:300])
    return found
