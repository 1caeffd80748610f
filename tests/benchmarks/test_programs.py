"""Engines as processes: a missing engine is named, one that takes too long is ended, and models are converted once."""

import ast
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.programs import (
    PROGRAMS,
    ROOT,
    Case,
    EngineFailed,
    Launcher,
    NotDone,
    converted,
    run,
)

NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
OTHERS = [name for name, program in PROGRAMS.items() if program.environment]


def alive(process: int) -> bool:
    """Whether a process that was just ended still exists after a moment."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True


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


def test_an_engine_without_its_environment_is_missing_in_one_line(tmp_path):
    assert Launcher(tmp_path, 1).missing("vllm") == (
        f"vllm is left out: it is not in {tmp_path}/vllm (bash benchmarks/setup_engines.sh {tmp_path} vllm)"
    )


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
    assert not alive(int(file.read_text()))


def test_a_process_that_fails_is_told_by_the_last_line_it_wrote():
    with pytest.raises(EngineFailed, match=r"^x: exit 3: why$"):
        run(
            "x", [sys.executable, "-c", "import sys; print('no\\nwhy', file=sys.stderr); sys.exit(3)"], os.environ, 20.0
        )


def test_a_model_is_converted_once_and_never_seen_half_done(tmp_path, monkeypatch):
    case = Case("30m", "float32", "few-shot", tmp_path / "model", tmp_path / "rows.jsonl")
    made: list[Path] = []

    def convert(self: Launcher, engine: str, case: Case, options: list[str], target: Path, timeout: None) -> str:
        assert options == ["--convert"]
        made.append(target)
        target.touch()
        return ""

    monkeypatch.setattr(Launcher, "_run", convert)
    launcher = Launcher(tmp_path, 1)
    for engine in ("llamacpp", "llamacpp", "vllm"):
        launcher.prepare(engine, case)
    assert made == [tmp_path / "model.gguf.unfinished"]
    assert converted("llamacpp", case) == tmp_path / "model.gguf"
    assert converted("llamacpp", replace(case, dtype="int8")) == tmp_path / "model.gguf-int8"
    assert converted("vllm", case) is None
    assert converted("vllm", replace(case, dtype="int8")) == tmp_path / "model.w8a8-int8"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf"]
