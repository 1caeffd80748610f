"""Whole jobs with the real tokenizer and a fake engine, whose answers are the name of its model and the prompt."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import batchgen.job
import batchgen.job_setup
from batchgen import JobConfig, JobReport, ModelConfig, SamplingParams, run_job
from batchgen.errors import RowError
from batchgen.jobs.files.target import open_target
from batchgen.prompts import LoadedTokenizer, load_tokenizer
from batchgen.records.output import job_path
from batchgen.request import Leaf, Request
from batchgen.result import Completion, Result
from batchgen.stats import EngineStats
from support.progress import Recorder
from support.records import opened

FINISHED_FILES = ["claims", "keys", "known.sqlite", "manifest.json", "report.json", "stats.json"]
"""What the folder of a finished job holds."""


@cache
def tokenizer_of(model: str) -> LoadedTokenizer:
    return load_tokenizer(ModelConfig(model=model))


class Killed(BaseException):
    """Stands for the death of the process."""


class Oracle:
    """Replaces the engine. Raises `Killed` after `most` answers, and remembers the prompts. The prompt `fail` fails, and `cut` counts as truncated."""

    dtype = device = attention = "none"
    waiting = unfinished = 0

    def __init__(self, model: str, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.notes: list[str] = []
        self.stats = EngineStats()
        self.model = model
        self.most: int | None = None
        self.answered: list[str] = []
        self.reason: Callable[[str], str] = lambda prompt: "stop"

    def add(self, leaves: Sequence[Leaf], plan: Any, on_result: Callable[[Result], None]) -> None:
        self.added = leaves, on_result

    def run(self, stop: Any) -> None:
        leaves, on_result = self.added
        for leaf in leaves:
            if len(self.answered) == self.most:
                raise Killed
            if leaf.choice == 0:
                prompt = self.decode(leaf.request.tokens.tolist())
                self.answered.append(prompt)
                on_result(self.answer(leaf.request, prompt))

    def answer(self, request: Request, prompt: str) -> Result:
        if prompt == "fail":
            return Result.from_error(request.row, RowError("does_not_fit", "too big"), prompt_tokens=5)
        return Result(
            row=request.row, text=f"{self.model}: {prompt}", finish_reason=self.reason(prompt), truncated=prompt == "cut",
            prompt_tokens=len(request.tokens), completion_tokens=1, token_ids=(1,),
        )  # fmt: skip

    def under_way(self) -> dict[int, dict[int, Completion]]:
        return {}

    def close(self) -> None: ...


class Runs:
    """Runs of one output, with one of two models of the same shapes."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.output: Path | str = folder / "o.jsonl"
        self.models = {}
        for name in "ab":
            self.models[name] = Path(shutil.copytree(model, folder / name))
            with (self.models[name] / "model.safetensors").open("r+b") as file:
                file.seek(-8, 2)
                file.write(name.encode() * 8)
        self.tokenizer = tokenizer_of(str(model))
        self.reason: Callable[[str], str] = lambda prompt: "stop"
        self.engine = Oracle
        self.loaded = 0
        """The number of times the tokenizer was loaded."""
        self.notes: list[str] = []
        """What the last run said."""

    @property
    def job_folder(self) -> Path:
        return job_path(str(self.output), None)

    def run(
        self,
        rows: Sequence[str | Mapping[str, Any] | None] | None,
        *,
        model: str = "a",
        most: int | None = None,
        **options: Any,
    ) -> tuple[list[str], JobReport | None]:
        """Runs a job. Returns the answered prompts and the report, which is None if the run was killed after `most` answers.

        In `rows`, None is a malformed row, and a text is a prompt. `rows` itself may be None: the input stays as it is.
        """
        if rows is not None:
            self._write_input(rows)
        decode = self.tokenizer.hf_tokenizer.decode
        oracle = self.engine(model, lambda tokens: str(decode(tokens, skip_special_tokens=True)))
        oracle.most, oracle.reason = most, self.reason
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batchgen.job, "open_engine", lambda *_: oracle)
            patch.setattr(batchgen.job_setup, "load_tokenizer", self._load)
            config = JobConfig(
                **{
                    "inputs": str(self.folder / "in.jsonl"),
                    "output": str(self.output),
                    "model": ModelConfig(model=str(self.models[model])),
                    "sampling": SamplingParams(max_tokens=4),
                }
                | options
            )
            told = Recorder()
            try:
                return oracle.answered, run_job(config, told)
            except Killed:
                return oracle.answered, None
            finally:
                self.notes = told.notes

    def _write_input(self, rows: Sequence[str | Mapping[str, Any] | None]) -> None:
        lines = (
            "[]" if row is None else json.dumps({"prompt": row} if isinstance(row, str) else dict(row)) for row in rows
        )
        text, source = "".join(f"{line}\n" for line in lines), self.folder / "in.jsonl"
        if not source.exists() or source.read_text() != text:
            source.write_text(text)

    def _load(self, _: ModelConfig) -> Any:
        self.loaded += 1
        return self.tokenizer

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the output, in any format and place."""
        if not open_target(str(self.output)).exists():
            return []
        return [row.columns for row in opened(self.output).rows()]

    def texts(self) -> list[str | None]:
        return [row["text"] for row in self.rows()]


@pytest.fixture
def runs(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Runs in the test's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return Runs(Path(), tiny_model_dir)
