"""The summary at the end of a run."""

from collections import Counter
from dataclasses import replace

import pytest

from batchgen.assembly import JobReport
from batchgen.recording import Agreement
from batchgen.result import Result
from batchgen.stats import EngineStats, RowCounts, RunFigures, Setting, figures
from batchgen_cli.summary import summary

DONE = Result(row=0, text="x", finish_reason="stop", prompt_tokens=20, completion_tokens=5)
FAILED = Result(row=0, text=None, finish_reason="error", error_type="invalid_row", error_message="not JSON")


def report_of(failures: tuple[str, ...] = ()) -> JobReport:
    run = RunFigures(prefill_tokens_min=15, groups=1, prefix_nodes=1)
    for _ in range(2):
        run.new.add(DONE)
    for _ in failures:
        run.new.add(FAILED)
    run.resumed.add(replace(DONE, finish_reason="length", truncated=True))
    run.seconds |= {"load": 1.0, "generate": 2.0}
    engine = EngineStats(
        prefill_tokens=15,
        completion_tokens=10,
        steps=5,
        decode_sequences=10,
        attention_parts=5,
        drafted=Counter(grammar=8, prompt=4),
        accepted=Counter(grammar=3, prompt=1),
        preemptions=1,
        kv_bytes_peak=2048,
        kv_bytes_unshared=4096,
        forward_seconds=1.5,
    )
    sampling = {
        "temperature": {"value": 0.6, "from": "model"},
        "top_p": {"value": 0.9, "from": "option"},
        "max_tokens": {"value": 16384, "from": "auto"},
    }
    stats = figures(run, engine, Setting("m", "float32", "cpu", "cascade", sampling))
    stats["seconds"]["total"] = 3.5
    stats["memory_bytes_peak"] = 1 << 30
    return JobReport(stats, "out.jsonl", False, chat=True, failures=failures)


def test_the_summary_names_output_rows_tokens_speed_time_and_memory():
    assert summary(report_of(failures=("x",))) == [
        ("output", "out.jsonl"),
        ("rows", "2 done, 1 failed, 1 kept from an earlier run"),
        ("prompts", "through the chat template"),
        ("sampling", "temperature 0.6 (the model's), top_p 0.9, max_tokens 16,384 (auto)"),
        ("prompt tokens", "40, of which 15 were run (minimum: 15): 62.5% shared"),
        ("completion tokens", "10"),
        ("speed", "5 completion tokens/s, 25 with the prompts', 1.5 rows/s"),
        ("steps", "5, on average 2.0 sequences and 1.0 parts of attention, 1 preemption"),
        ("drafts", "4 of 12 tokens came true: 3 of 8 forced by a grammar, 1 of 4 as in the prompt"),
        ("prefix tree", "1 node, 1 group"),
        ("KV memory", "2.0 KiB at most (unshared: 4.0 KiB)"),
        ("time", "3.5 s: load 1.0, plan 0.0, generate 2.0 (in the model 1.5), write 0.0"),
        ("memory", "1.0 GiB at most"),
        ("model", "m, float32 on cpu, attention cascade"),
    ]


def expected_lines(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The lines about rows that expect the first and are given the second of each pair, with probability 0.75."""
    agreement = Agreement("gold")
    for expected, given in pairs:
        result = replace(DONE, text=given, choice_probs={given: 0.75})
        agreement.add(result, {"gold": expected})
    report = report_of()
    report.stats["expect"] = agreement.as_dict()
    lines = summary(report)
    first = next(place for place, (name, _) in enumerate(lines) if name == "accuracy")
    return lines[first : next(place for place, (name, _) in enumerate(lines) if name == "prompt tokens")]


def test_the_summary_says_how_many_rows_are_as_expected_and_which_labels_are_taken_for_which():
    assert expected_lines([("a", "a"), ("a", "bb"), ("bb", "bb"), ("bb", "bb")]) == [
        ("accuracy", "3 of 4 rows as in 'gold' (75.0%)"),
        ("calibration", "mean probability 75.0%, right 75.0%: expected calibration error 0.0%"),
        ("confusion", "expected \\ given  a  bb"),
        ("", "               a  1   1"),
        ("", "              bb  0   2"),
    ]
    assert [name for name, _ in expected_lines([("a", "a")])] == ["accuracy", "calibration"]


def test_the_summary_names_the_most_frequent_mistakes_among_many_labels():
    wrong = [("0", "1"), ("0", "1"), ("2", "3")]
    assert expected_lines([(str(i), str(i)) for i in range(9)] + wrong)[2:] == [
        ("confusion", "expected '0', given '1': 2 rows"),
        ("", "expected '2', given '3': 1 row"),
    ]


def spelling(*pairs: tuple[str, str]) -> list[str]:
    return [line for name, line in expected_lines(list(pairs)) if name == "spelling"]


def test_the_summary_says_that_rows_are_wrong_because_labels_are_written_otherwise():
    never_right = [("1.0", "1"), ("1.0", "1"), ("1.0", "2"), ("Yes", "no"), ("No", "yes")]
    assert spelling(*never_right) == [
        "'gold' has '1.0' for '1' (3 rows), 'Yes' for 'yes' (1 row), 'No' for 'no' (1 row): such rows count as wrong"
    ]
    assert spelling(("Paris", "Paris"), ("Paris", "paris."), ("Paris", "Rome")) == [
        "'gold' has 'Paris' for 'paris.' (1 row): such rows count as wrong"
    ]
    labels_that_differ_in_case = [("c", "c"), ("C", "C"), ("C", "c"), ("-1", "1"), ("1", "-1")]
    assert spelling(*labels_that_differ_in_case) == []
    assert spelling(("?", "!"), ("...", "")) == []
    assert spelling(*((f"L{i}", f"l{i}") for i in range(10)))[0].endswith(", and 2 more: such rows count as wrong")


@pytest.mark.parametrize(
    ("reasons", "truncated", "text"),
    [
        ({"stop": 1200}, 0, None),
        ({"stop": 1200, "error": 7}, 0, None),
        ({"scored": 3}, 0, None),
        ({"stop": 1200, "length": 1034, "timeout": 2, "error": 7}, 0, "1,200 stop, 1,034 length, 2 timeout"),
        ({"length": 5}, 0, "5 length"),
        ({"stop": 4, "cancelled": 1}, 0, "4 stop, 1 cancelled"),
        ({"stop": 4}, 3, "4 stop, 3 with a truncated prompt"),
        ({"stop": 3, "length": 1}, 1, "3 stop, 1 length, 1 with a truncated prompt"),
    ],
)
def test_how_rows_ended_is_told_if_not_all_stopped_or_prompts_were_truncated(reasons, truncated, text):
    run = RunFigures(new=RowCounts(truncated=truncated, reasons=Counter(reasons)))
    stats = figures(run, EngineStats(), Setting("m"))
    assert dict(summary(JobReport(stats, "out.jsonl", False))).get("ended") == text


def test_the_effect_of_quantize_is_told_and_measured_only_where_rows_were_generated():
    report = report_of()
    found = {"method": "int8", "layers": 14, "weights": 0.75, "weight_bytes": 3 << 20, "mean_kl": None}
    report.stats["quantization"] = found
    made = "14 linear layers, 75% of the weights; all take 3.0 MiB"
    assert ("int8", made) in summary(report)
    found |= {"mean_kl": 0.00123, "equal_tokens": 0.985, "tokens": 1200, "rows": 8}
    measured = "on 1,200 tokens of 8 rows, beside the unquantized model: mean KL divergence 0.0012 nats, 98.5% of the likeliest tokens the same"
    assert ("int8", f"{made}; {measured}") in summary(report)


def test_the_summary_of_a_merge_has_the_sums_over_all_shards():
    report = report_of()
    job = report.stats["job"] | {"rows_ok": 380, "rows_failed": 4, "prompt_tokens": 251_000, "prefill_tokens": 12_143}
    job |= {"images": 12, "image_tokens": 1_920, "images_encoded": 4}
    job |= {"completion_tokens": 96_000, "finish_reasons": {"stop": 300, "length": 80, "error": 4}}
    job |= {"seconds": job["seconds"] | {"total": 1248.04, "forward": 1000.06}, "memory_bytes_peak": 5 << 20}
    merged = replace(report, stats=report.stats | {"job": job, "shards": [{}, {}, {}]})
    assert summary(merged) == [
        ("output", "out.jsonl"),
        ("rows", "380 done, 4 failed, by 3 shards"),
        ("ended", "300 stop, 80 length, 1 with a truncated prompt"),
        ("prompt tokens", "251,000, of which 12,143 were run"),
        ("images", "12 of 1,920 tokens, 4 encoded"),
        ("completion tokens", "96,000"),
        ("time", "1,248.0 s of all machines together (in the model 1,000.1)"),
        ("memory", "5.0 MiB at most, of one process"),
        ("model", "m, float32 on cpu, attention cascade"),
    ]
