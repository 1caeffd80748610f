"""A comparison whose engines are stand-ins, and the figures that they have measured."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.programs import PROGRAMS, Case, Launcher

MACHINE = {"cpu": "A CPU", "cores": 2, "date": "2026-01-02T03:04:05+00:00", "versions": {"torch": "2.13.0"}}


def measured(engine: str, rate: float) -> dict[str, Any]:
    """Returns an engine's figures of a run that made 1,000 tokens."""
    names = ("torch", "transformers") if PROGRAMS[engine].environment is None else (engine,)
    return {
        "engine": engine,
        "wall_s": 1000 / rate,
        "tokens_per_s": rate,
        "versions": {"python": "3.11.7"} | dict.fromkeys(names, "1.2"),
        "extras": {"precision": "bfloat16"},
    }


@pytest.fixture(name="measured")
def measured_fixture() -> Callable[..., dict[str, Any]]:
    return measured


class Engines:
    """Stand-ins for the engines. Records the calls, and answers each with the given figures."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | None]] = []
        self.prepared: list[str] = []
        self.rates: dict[str, float | Exception] = dict.fromkeys(PROGRAMS, 100.0)

    def call(self, launcher: Launcher, engine: str, case: Case, options: Sequence[str]) -> Mapping[str, Any]:
        if "--sweep" in options:
            self.calls.append((f"{engine} sweep", case.limit))
            return {"tokens_per_s": {"4": 9.0, "8": 10.0}, "best": 8}
        self.calls.append((engine, case.limit))
        rate = self.rates[engine]
        if isinstance(rate, Exception):
            raise rate
        return measured(engine, rate) | {"completion_tokens": case.limit or 1000}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    stand_ins = Engines()
    monkeypatch.setattr(Launcher, "call", lambda self, *given: stand_ins.call(self, *given))
    monkeypatch.setattr(Launcher, "prepare", lambda self, engine, case: stand_ins.prepared.append(engine))
    monkeypatch.setattr(compare, "run", lambda *given: '{"seconds": {"total": 5.0}}\n')
    monkeypatch.setattr(compare, "machine_facts", lambda: MACHINE)
    monkeypatch.setattr(compare, "model_folder", lambda work, model, dtype: work / f"{model}-{dtype}")
    monkeypatch.setattr(compare, "parameters", lambda folder: 32_000_000)
    monkeypatch.setattr(
        compare,
        "workload_file",
        lambda work, name, model, limit: (
            work / f"{name}-{limit}.jsonl",
            {"rows": limit or 512, "completion_tokens": limit or 1000},
        ),
    )
    return stand_ins


@pytest.fixture
def comparison(tmp_path: Path) -> Callable[..., compare.Comparison]:
    """Returns a comparison of batchgen with these engines on one case."""

    def make(*options: str, others: Sequence[str] = ("transformers-generate",)) -> compare.Comparison:
        for engine in others:
            environment = PROGRAMS[engine].environment
            if environment and engine != "ctranslate2":  # CTranslate2 is never installed here
                (tmp_path / "engines" / environment).mkdir(parents=True, exist_ok=True)
                (tmp_path / "engines" / environment / "ready").touch()
        given = ["--engines", "batchgen", *others, "--workloads", "few-shot", "--dtypes", "bfloat16"]
        given += ["--engines-folder", str(tmp_path / "engines"), "--output", str(tmp_path / "result.json")]
        return compare.Comparison(compare.parse([*given, "--threads", "2", *options]))

    return make
