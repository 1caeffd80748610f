"""Which runs a comparison makes and in which order, what it keeps, and what it leaves out."""

import json

from benchmarks.programs import EngineFailed
from benchmarks.result_file import medians

NAMES = {"model": "30m", "dtype": "bfloat16", "workload": "few-shot", "limit": None}


def names_of(calls: list[tuple[str, int | None]]) -> str:
    return " ".join(name for name, _ in calls)


def test_engines_take_turns_and_each_repeat_begins_with_another(engines, comparison):
    comparison("--repeats", "3", others=["vllm", "openvino"]).run()
    assert names_of(engines.calls) == ("batchgen vllm openvino vllm openvino batchgen openvino batchgen vllm")


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
