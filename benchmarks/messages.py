"""Prints the command's answers to broken models and wrong commands: exit code, processor time, message. They are read by a person.

python benchmarks/messages.py [models|misuse]
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}",
    "HF_HUB_OFFLINE": "1",
}

from support.broken_models import BROKEN, broken_model  # noqa: E402
from support.misuse import MISUSES, make_files  # noqa: E402
from support.tiny_model import save_tiny_llama  # noqa: E402


def tell(name: str, arguments: list[str], folder: Path, hidden: dict[str, str]) -> None:
    """Runs the command and prints its line of the table. `hidden`: paths, and the text that replaces each."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "batchgen_cli", *arguments],
        env=ENVIRONMENT,
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = done.stderr.strip().removeprefix("batchgen: error: ")
    for path, short in hidden.items():
        said = said.replace(path, short)
    print(f"{done.returncode:3} {seconds:5.2f} s  {name:<44} {said}", flush=True)


def models(good: Path, work: Path) -> None:
    (work / "rows.jsonl").write_text('{"prompt": "x"}\n')
    for i, name in enumerate(BROKEN):
        folder = broken_model(name, good, work / f"model-{i}")
        tell(
            name,
            ["run", "rows.jsonl", "-m", str(folder), "-o", f"{i}.jsonl", "--no-progress"],
            work,
            {str(folder): "M"},
        )


def misuse(good: Path, work: Path) -> None:
    make_files(work)
    for line, _, _ in MISUSES:
        words = [{"R": "rows.jsonl", "M": str(good)}.get(word, word) for word in line.split()]
        tell(line or "(nothing)", words, work, {str(good): "M"})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        good = save_tiny_llama(Path(name) / "good")
        # Where a user installs the program, its bytecode is kept. Without it, most of the time would be compilation.
        ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)
        first = [sys.executable, "-m", "batchgen_cli", "plan", "-", "-m", str(good)]
        subprocess.run(first, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, check=True)
        for table in (models, misuse):
            if sys.argv[1:] in ([], [table.__name__]):
                (work := Path(name) / table.__name__).mkdir()
                table(good, work)
