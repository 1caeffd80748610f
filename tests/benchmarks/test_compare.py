"""Which runs a comparison makes and in which order, what it keeps, and what it leaves out."""

import json

import pytest

from benchmarks import result_file
from benchmarks.programs import EngineFailed, NotDone
from benchmarks.result_file import OtherRun, medians, shares

NAMES = {"model": "30m", "dtype": "bfloat16", "workload": "few-shot", "limit": None}


def names_of(calls: list[tuple[str, int | None]]) -> str:
    return " ".join(name for name, _ in calls)


def test_engines_take_turns_and_each_repeat_begins_with_another(engines, comparison):
    comparison("--repeats", "3", others=["vllm", "openvino"]).run()
    assert names_of(engines.calls) == ("batchgen vllm openvino vllm openvino batchgen openvino batchgen vllm")


def test_generate_runs_at_the_batch_that_its_sweep_found_best(engines, comparison):
    made = comparison("--repeats", "1")
    made.run()
    assert names_of(engines.calls) == "transformers-generate sweep batchgen transformers-generate"
    assert made.file.result["sweeps"][0]["best"] == 8


def test_every_case_has_its_roofline_and_each_engine_its_share_of_it(engines, comparison):
    engines.rates |= {"batchgen": 100.0, "vllm": 50.0}
    made = comparison("--repeats", "1", others=["vllm"])
    made.run()
    assert made.file.result["rooflines"] == [NAMES | {"seconds": {"total": 5.0}}]
    assert shares(made.file.result, NAMES) == {"batchgen": 0.5, "vllm": 0.25}


def test_an_engine_with_fewer_rows_is_compared_with_batchgen_on_just_those(engines, comparison):
    made = comparison("--repeats", "1", "--engine-rows", "vllm=32", others=["vllm"])
    made.run()
    assert engines.calls == [("batchgen", None), ("vllm", 32), ("batchgen", 32)]
    assert medians(made.file.result, NAMES) == {"batchgen": 100.0}
    assert medians(made.file.result, NAMES | {"limit": 32}) == {"batchgen": 100.0, "vllm": 100.0}


def test_what_fails_once_on_a_case_is_not_tried_again(engines, comparison):
    engines.rates["vllm"] = EngineFailed("vllm: exit 1: no")
    made = comparison("--repeats", "3", others=["vllm"])
    made.run()
    assert names_of(engines.calls) == "batchgen vllm batchgen batchgen"
    assert made.file.result["failures"] == [
        NAMES | {"engine": "vllm", "message": "vllm: exit 1: no", "timed_out_after": None}
    ]


def test_another_number_of_tokens_is_a_failure(engines, comparison, monkeypatch):
    made = comparison("--repeats", "1", others=["vllm"])
    monkeypatch.setitem(made.tokens, ("few-shot", None), 1000)
    call = engines.call
    engines.call = lambda launcher, engine, case, options: (
        call(launcher, engine, case, options) | ({"completion_tokens": 999} if engine == "vllm" else {})
    )
    made.run()
    assert [f["message"] for f in made.file.result["failures"]] == ["vllm: made 999 tokens"]


def test_going_on_measures_only_what_is_not_there(engines, comparison, capsys, tmp_path):
    comparison("--repeats", "2").run()
    engines.calls.clear()
    capsys.readouterr()
    made = comparison("--repeats", "3", "--continue", others=["transformers-generate", "vllm"])
    made.run()
    assert capsys.readouterr().out.startswith(f"{tmp_path}/result.json: 4 measurements are kept\n")
    assert names_of(engines.calls) == "vllm vllm vllm batchgen transformers-generate"
    assert json.loads((tmp_path / "result.json").read_text())["measurements"] == made.file.result["measurements"]
    assert sorted(m["repeat"] for m in made.file.result["measurements"]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_going_on_with_another_batchgen_measures_it_again(engines, comparison, monkeypatch, capsys):
    comparison("--repeats", "2", others=["vllm"]).run()
    engines.calls.clear()
    monkeypatch.setattr(result_file, "source_digest", lambda: "another")
    comparison("--repeats", "2", "--continue", others=["vllm"]).run()
    assert names_of(engines.calls) == "batchgen batchgen"
    assert "batchgen is not what it was: 2 measurements of it are made again\n" in capsys.readouterr().out


def test_going_on_tries_a_failure_again_but_not_what_took_too_long(engines, comparison):
    engines.rates |= {"vllm": EngineFailed("vllm: exit 1: no"), "openvino": NotDone("openvino: not done after 900 s")}
    comparison("--repeats", "1", others=["vllm", "openvino"]).run()
    engines.calls.clear()
    comparison("--repeats", "1", "--continue", others=["vllm", "openvino"]).run()
    assert names_of(engines.calls) == "vllm"


def test_going_on_with_other_settings_is_refused(engines, comparison, tmp_path):
    comparison("--repeats", "1", others=[]).run()
    with pytest.raises(OtherRun) as refused:
        comparison("--repeats", "1", "--continue", "--limit", "8", others=[]).run()
    assert str(refused.value) == f"{tmp_path}/result.json was made with settings limit None, not 8; --name another"
