"""A model and a job in a notebook: progress bars, short reprs, and interrupts. The last test runs a notebook in a kernel."""

import signal
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from batchgen import LLM, EngineConfig, Result
from batchgen.engine.engine import Engine
from batchgen.notebook import NotebookBar
from batchgen.progress import GENERATING, Snapshot
from batchgen.result import Score

PARAMS = {"max_tokens": 400, "ignore_eos": True}


def test_an_interrupt_keeps_finished_results_and_unfinished_texts(tiny_model_dir, capfd, monkeypatch):
    llm = LLM(tiny_model_dir, progress=True)
    short = {"max_tokens": 2, "ignore_eos": True}
    before = llm.generate("zero", short)
    last, step = llm.stats.steps + 5, Engine.step

    def interrupted(engine: Engine, admit: bool) -> None:
        if engine.stats.steps == last:
            signal.raise_signal(signal.SIGINT)
        step(engine, admit)

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^1 of 3 prompts were done; LLM\.interrupted has the results$"):
        llm.generate(["zero", "one", "two"], [short, PARAMS, PARAMS])
    monkeypatch.setattr(Engine, "step", step)
    shown = capfd.readouterr().err
    assert "1/3 prompts" in shown.splitlines()[-1]
    assert "3/3 prompts" not in shown
    assert [r.finish_reason for r in llm.interrupted] == ["length", "cancelled", "cancelled"]
    assert llm.interrupted[0] == before[0]
    assert all(0 < r.completion_tokens < 400 for r in llm.interrupted[1:])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("zero", short) == before
    assert llm.interrupted == []


def test_a_second_interrupt_within_a_step_keeps_finished_results(tiny_model_dir, monkeypatch):
    llm = LLM(tiny_model_dir)
    short = {"max_tokens": 2, "ignore_eos": True}
    before = llm.generate("zero", short)
    last, step = llm.stats.steps + 5, Engine.step

    def interrupted(engine: Engine, admit: bool) -> None:
        step(engine, admit)
        if engine.stats.steps == last:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "zero"], [PARAMS, short])
    monkeypatch.setattr(Engine, "step", step)
    lost, kept = llm.interrupted
    assert (lost.row, lost.error_type) == (0, "cancelled")
    assert kept == replace(before[0], row=1)
    assert llm.generate("zero", short) == before


def test_an_interrupted_call_counts_only_scores_that_were_ready(tiny_model_dir, monkeypatch):
    llm = LLM(tiny_model_dir, engine=EngineConfig(batch_size=1, share=False))
    take, calls = llm._take, count()

    def interrupted() -> None:
        if next(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        take()

    monkeypatch.setattr(llm, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt) as error:
        llm.score([f"prompt {i}" for i in range(20)], ["a long completion"] * 20)
    ready = [r for r in llm.interrupted if r.score is not None]
    assert 0 < len(ready) < 20
    assert str(error.value) == f"{len(ready)} of 20 prompts were done; LLM.interrupted has the results"
    assert {r.error_type for r in llm.interrupted if r.score is None} == {"cancelled"}


def test_the_bar_of_a_job_shows_phase_rows_time_left_and_speed(capfd):
    bar = NotebookBar()
    bar.note("a {note}")
    bar.update(Snapshot(phase="loading model"))
    bar.update(
        Snapshot(
            phase=GENERATING, rows_total=8, rows_done=2, rows_failed=1, completion_tokens_per_s=55.0, seconds_left=90
        )
    )
    bar.update(Snapshot(phase=GENERATING, rows_total=8, rows_done=8, completion_tokens_per_s=60.0))
    bar.close()
    out, err = capfd.readouterr()
    assert out == "a {note}\n"
    shown = [" ".join(line.replace("#", "").split()) for line in err.split("\r")]
    assert "generating: 25%| | 2/8 rows, 90 s left, 1 failed, 55 tokens/s" in [
        line.replace("█", "").replace("▌", "") for line in shown
    ]
    assert "100%" in shown[-1]
    assert "8/8 rows, 60 tokens/s" in shown[-1]


def test_the_repr_of_a_result_is_one_short_line():
    result = Result(
        row=3,
        text="word " * 100,
        finish_reason="stop",
        prompt_tokens=7,
        token_ids=tuple(range(200)),
        choice_probs={str(i): 1 / 8 for i in range(8)},
        score=Score(-1.5, 3, greedy=True),
    )
    assert repr(result) == (
        f"Result(row=3, text={'word ' * 16!r}… (500 characters), finish_reason='stop', prompt_tokens=7, token_ids=<200>, "
        "choice_probs={'0': 0.125, '1': 0.125, '2': 0.125, '3': 0.125, '4': 0.125, …}, "
        "score=Score(logprob=-1.5, tokens=3, greedy=True))"
    )


SETUP = """
import os, signal, threading, time
from batchgen import LLM, JobConfig, run_job
llm = LLM({model!r})
"""
INTERRUPTED = """
def wait():
    while llm.stats.steps < begun + 5:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
begun = llm.stats.steps
threading.Thread(target=wait, daemon=True).start()
llm.generate(["a", "b"], {"max_tokens": 400, "ignore_eos": True})
"""
JOB = """
report = run_job(JobConfig(inputs={rows!r}, model={model!r}, output={output!r}, sampling={{"max_tokens": 4}}))
report
"""


@pytest.mark.slow
def test_a_notebook_shows_bars_and_results_and_survives_an_interrupt(
    tiny_model_dir, tmp_path, write_jsonl, monkeypatch, command_environment
):
    import nbformat
    from nbclient import NotebookClient

    for name in ("PYTHONPATH", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, command_environment[name])
    rows = str(write_jsonl([{"prompt": f"row {i}"} for i in range(3)]))
    cells = [
        SETUP.format(model=str(tiny_model_dir)),
        'llm.generate(["one", "two"], {"max_tokens": 4})',
        INTERRUPTED,
        "[(r.finish_reason, 0 < len(r.token_ids) < 400) for r in llm.interrupted]",
        JOB.format(rows=rows, model=str(tiny_model_dir), output=str(tmp_path / "out.jsonl")),
        JOB.format(rows=rows, model=str(tiny_model_dir), output=str(tmp_path / "nowhere" / "out.jsonl")),
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
    NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=300).execute()
    _, generated, interrupted, kept, job, refused = [cell["outputs"] for cell in notebook["cells"]]
    widgets = notebook["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    said = [str(state["state"].get("value")).replace("\u2007", " ") for state in widgets.values()]
    assert [value for value in said if "2/2 prompts, " in value], said
    assert [value for value in said if "3/3 rows" in value], said
    assert result_of(generated).startswith("[Result(row=0, text=")
    assert result_of(generated).count("\n") == 1
    assert (error_of(interrupted)["ename"], result_of(kept)) == (
        "KeyboardInterrupt", "[('cancelled', True), ('cancelled', True)]",
    )  # fmt: skip
    assert result_of(job).startswith(f"<JobReport {tmp_path}/out.jsonl: 3 rows, 0 failed; ")
    assert page_of(job).startswith("<iframe srcdoc=")
    assert error_of(refused)["traceback"] == [
        f"UsageError: there is no folder {tmp_path}/nowhere to write to; create it with mkdir -p {tmp_path}/nowhere"
    ]


def result_of(outputs: list[Any]) -> str:
    return next(output["data"]["text/plain"] for output in outputs if output["output_type"] == "execute_result")


def page_of(outputs: list[Any]) -> str:
    return next(output["data"]["text/html"] for output in outputs if output["output_type"] == "execute_result")


def error_of(outputs: list[Any]) -> Any:
    return next(output for output in outputs if output["output_type"] == "error")
