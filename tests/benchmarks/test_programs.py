"""Engines as processes: a missing engine is named, one that takes too long is ended, and models are converted once."""

import ast
import os
import sys
from pathlib import Path

import pytest

from benchmarks.programs import PROGRAMS, ROOT, NotDone, run
from support.python_process import are_gone

NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
OTHERS = [name for name, program in PROGRAMS.items() if program.environment]


def imports(module: str) -> set[str]:
    """Packages that a module imports, wherever in it."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return names


@pytest.mark.parametrize("engine", OTHERS)
def test_an_engine_of_its_own_environment_imports_nothing_of_ours(engine):
    found = imports(PROGRAMS[engine].module)
    ours = {name for name in found if name.startswith(("batchgen", "benchmarks"))}
    assert ours <= {"benchmarks.engines.common", "benchmarks.engines.gguf_file", "benchmarks.engines.w8a8_file"}
    assert not {"torch", "transformers"} & {name.split(".")[0] for name in found}


@NEEDS_PROC
def test_a_process_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    file = tmp_path / "child"
    script = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(file)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(NotDone, match=r"^slow: not done after 2 s$"):
        run("slow", [sys.executable, "-c", script], os.environ, 2.0)
    assert are_gone([file.read_text()])
