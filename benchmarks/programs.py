"""The engines, each of which runs as a process with the Python that has it.

batchgen and transformers run with this Python; the others are in environments that `setup_engines.sh` makes.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.models import INT8
from benchmarks.stand_in import without_bfloat16

ROOT = Path(__file__).resolve().parent.parent


class EngineFailed(Exception):
    """An engine's process ended without a result."""


class NotDone(EngineFailed):
    """An engine's process was ended because it took too long."""


@dataclass(frozen=True, slots=True)
class Program:
    label: str
    """In tables."""
    module: str
    environment: str | None = None
    """Its folder among the engines' environments; None: this Python."""
    converted: str | None = None
    """The suffix of a model folder's name for the model in the engine's own format; None: it takes the folder."""
    converts_all: bool = True
    """False: it takes the folder unless it runs in 8 bits."""
    swept: bool = False
    """Whether its best batch size is searched for first."""
    int8: bool = False
    """Whether it has a form of 8 bits."""
    options: tuple[str, ...] = ()
    """Options that are always given."""
    options_without_bfloat16: tuple[str, ...] = ()
    """Options for a processor without products of bfloat16."""


PROGRAMS: dict[str, Program] = {
    "batchgen": Program("batchgen", "benchmarks.engines.batchgen", int8=True),
    "batchgen-torch": Program(
        "batchgen `--dtype float32 --compile off`", "benchmarks.engines.batchgen", options=("--plain",)
    ),
    "transformers-generate": Program("transformers `generate`", "benchmarks.engines.transformers_generate", swept=True),
    "transformers-continuous": Program(
        "transformers continuous batching", "benchmarks.engines.transformers_continuous"
    ),
    "vllm": Program(
        "vLLM",
        "benchmarks.engines.vllm",
        "vllm",
        "w8a8",
        converts_all=False,
        int8=True,
        options_without_bfloat16=("--float32",),
    ),
    "openvino": Program("OpenVINO GenAI", "benchmarks.engines.openvino_cpu", "openvino", "openvino", int8=True),
    "llamacpp": Program("llama.cpp", "benchmarks.engines.llamacpp", "llamacpp", "gguf", swept=True, int8=True),
    "llamacpp-f16": Program(
        "llama.cpp F16", "benchmarks.engines.llamacpp", "llamacpp", "f16.gguf", swept=True, options=("--f16",)
    ),
    "ctranslate2": Program("CTranslate2", "benchmarks.engines.ctranslate2_cpu", "ctranslate2", "ctranslate2"),
}
OURS = "batchgen"
GENERATE = "transformers-generate"
VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one dtype on one workload, or on the first rows of it."""

    model: str
    dtype: str
    workload: str
    folder: Path
    input: Path
    limit: int | None = None

    def names(self) -> dict[str, Any]:
        return {"model": self.model, "dtype": self.dtype, "workload": self.workload, "limit": self.limit}

    def __str__(self) -> str:
        rows = f" ({self.limit} rows)" if self.limit else ""
        return f"{self.workload}{rows}, {self.model} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts engines one at a time, each with `threads` threads and a time limit."""

    engines_folder: Path
    threads: int
    timeout: float | None = None
    stand_in: Mapping[str, str] = field(default_factory=dict)
    """Variables with which an engine sees a smaller processor (`stand_in.py`)."""

    def missing(self, engine: str) -> str | None:
        """Returns in one line why an engine cannot run here; None if it can."""
        environment = PROGRAMS[engine].environment
        if environment is None or (self.engines_folder / environment / "ready").exists():
            return None
        setup = f"bash benchmarks/setup_engines.sh {self.engines_folder} {environment}"
        return f"{engine} is left out: it is not in {self.engines_folder / environment} ({setup})"

    def prepare(self, engine: str, case: Case) -> None:
        """Makes the model in the engine's own format, once for each model."""
        target = converted(engine, case)
        if target is None or target.exists():
            return
        unfinished = target.with_name(f"{target.name}.unfinished")
        self._run(engine, case, ["--convert"], unfinished, timeout=None)
        unfinished.rename(target)

    def call(self, engine: str, case: Case, options: Sequence[str]) -> dict[str, Any]:
        """Returns the JSON line that an engine's script prints. Raises `EngineFailed`."""
        stdout = self._run(engine, case, options, converted(engine, case), timeout=self.timeout)
        return last_json(engine, stdout)

    def _run(self, engine: str, case: Case, options: Sequence[str], target: Path | None, timeout: float | None) -> str:
        command = [self._python(engine), "-m", PROGRAMS[engine].module]
        command += ["--model", str(case.folder), "--input", str(case.input), *PROGRAMS[engine].options, *options]
        command += (
            PROGRAMS[engine].options_without_bfloat16 if without_bfloat16(self.stand_in.get("BATCHGEN_ISA")) else []
        )
        command += ["--int8"] if case.dtype == INT8 else []
        command += ["--converted", str(target)] if target else []
        return run(engine, command, self.environment(engine), timeout)

    def _python(self, engine: str) -> str:
        environment = PROGRAMS[engine].environment
        return str(self.engines_folder / environment / "bin" / "python") if environment else sys.executable

    def environment(self, engine: str) -> dict[str, str]:
        own = PROGRAMS[engine].environment is None
        path = python_path() if own else str(ROOT)
        as_the_command = {"GOMP_SPINCOUNT": "1000"} if engine == "batchgen" else {}  # `_wait_asleep` in the command
        preloads = filter(None, [self.stand_in.get("LD_PRELOAD"), *(self._preloads() if engine == "vllm" else [])])
        settings = dict(self.stand_in) | as_the_command | {"LD_PRELOAD": ":".join(preloads)}
        return environment_of(self.threads, path) | settings

    def _preloads(self) -> list[str | None]:
        """Returns the libraries to preload for vLLM: it is several times slower without Intel's OpenMP and a faster malloc."""
        openmp = self.engines_folder / "vllm" / "lib" / "libiomp5.so"
        return [ctypes.util.find_library("tcmalloc_minimal"), str(openmp) if openmp.exists() else None]


def converted(engine: str, case: Case) -> Path | None:
    """Returns the place of a case's model in the engine's own format; None if the engine takes the folder."""
    suffix = PROGRAMS[engine].converted
    if case.dtype != INT8 and not PROGRAMS[engine].converts_all:
        return None
    form = f"{suffix}-{INT8}" if case.dtype == INT8 else suffix
    return case.folder.with_name(f"{case.folder.name}.{form}") if suffix else None


def python_path() -> str:
    """Returns PYTHONPATH with this checkout in front."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def run_batchgen(rows: Path, model: Path | str, output: Path | str, *options: str, **environment: str) -> None:
    """Runs the command on a file of rows as they are. Raises `subprocess.CalledProcessError`."""
    command = [
        sys.executable,
        "-m",
        "batchgen",
        "run",
        str(rows),
        "-m",
        str(model),
        "-o",
        str(output),
        "--ignore-eos",
        "-q",
    ]
    subprocess.run([*command, *options], check=True, env=os.environ | {"PYTHONPATH": python_path()} | environment)


def environment_of(threads: int, path: str) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false" if threads == 1 else "true",
        "CUDA_VISIBLE_DEVICES": "",
    }


def end_children_too() -> None:
    """Makes SIGTERM end this process like an interrupt, so that `run` ends what it started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def run(name: str, command: Sequence[str], environment: Mapping[str, str], timeout: float | None) -> str:
    """Returns what a command prints. Ends it and everything that it started when its time is up or this process is interrupted."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as e:
        raise NotDone(f"{name}: not done after {timeout:g} s") from e
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        last = (stderr.strip().splitlines() or ["no message"])[-1]
        raise EngineFailed(f"{name}: exit {process.returncode}: {last}")
    return stdout


def last_json(name: str, stdout: str) -> dict[str, Any]:
    """Returns the last line that is a JSON object. Engines print other things before it."""
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise EngineFailed(f"{name}: printed no figures")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
