"""The sums over an output's rows are those of its results."""

import json
import math

import numpy as np
import pytest

from batchgen.errors import RowError
from batchgen.recording.row_figures import BINS, MAX_LABELS, SAMPLES, RowFigures, histogram, shortened
from batchgen.result import Completion, Result, Score


def figures_of(results):
    figures = RowFigures()
    for result in results:
        figures.add(result, lambda result=result: {"id": result.row, "text": result.text})
    return figures.as_dict()


def done(row, prompt=10, completion=2, reason="stop", **more):
    return Result(
        row=row, text=f"t{row}", finish_reason=reason, prompt_tokens=prompt, completion_tokens=completion, **more
    )


def test_rows_are_counted_by_how_they_ended():
    failed = Result.from_error(7, RowError("prompt_too_long", "5,000 tokens"), prompt_tokens=5000)
    ends = tuple(Completion(text="", finish_reason=reason) for reason in ("stop", "length"))
    found = figures_of([*(done(i) for i in range(6)), done(6, completion=8, completions=ends), failed])
    assert found["rows"] == 8
    assert found["reasons"] == {"stop": 6, "length": 1, "error": 1}
    assert found["errors"] == {"prompt_too_long": 1}
    assert found["samples"] == {
        "stop": [{"id": i, "text": f"t{i}"} for i in range(SAMPLES)],
        "length": [{"id": 6, "text": "t6"}],
        "error: prompt_too_long": [{"id": 7, "text": None}],
    }
    assert (found["prompt_tokens"]["count"], found["prompt_tokens"]["max"]) == (7, 10)  # the failed row is in no length
    assert found["completion_tokens"]["bins"] == [
        [2, 3, 6], [3, 4, 0], [4, 5, 0], [5, 6, 0], [6, 7, 0], [7, 8, 0], [8, 9, 1],
    ]  # fmt: skip


def test_labels_are_counted_with_their_probabilities():
    rows = [{"yes": 0.75, "no": 0.25}, {"yes": 0.5, "no": 0.5}, {"yes": 0.125, "no": 0.875}]
    found = figures_of(
        [Result(row=i, text=max(p, key=p.get), finish_reason="stop", choice_probs=p) for i, p in enumerate(rows)]
    )
    yes, no = found["labels"]
    assert (yes["label"], yes["rows"]) == ("yes", 2)
    assert (yes["mean_probability"], yes["mean_probability_chosen"]) == (0.458333, 0.625)
    assert (no["rows"], no["mean_probability"], no["mean_probability_chosen"]) == (1, 0.541667, 0.875)
    assert found["completion_tokens"] is None


def test_many_labels_are_counted_together():
    found = figures_of(
        [Result(row=i, text=f"l{i}", finish_reason="stop", choice_probs={f"l{i}": 1.0}) for i in range(MAX_LABELS + 3)]
    )
    assert (len(found["labels"]), found["other_labels"]) == (MAX_LABELS, 3)


def test_scores_are_means_of_a_token():
    scores = [Score(-4.0, 4, True), Score(-6.0, 4, False), Score(-1.0, 2, True)]
    found = figures_of([Result(row=i, text=None, finish_reason=None, score=s) for i, s in enumerate(scores)])
    assert found["reasons"] == {"scored": 3}
    assert (found["scores"]["min"], found["scores"]["max"], found["scores_greedy"]) == (-1.5, -0.5, 2)
    assert (found["scores"]["bins"][0], found["scores"]["bins"][-1]) == ([-1.5, -1.45, 1], [-0.5, -0.45, 1])


def test_infinite_scores_and_rewards_are_in_no_histogram():
    results = [
        Result(row=i, text=None, finish_reason=None, score=Score(x, 1, False)) for i, x in enumerate((-math.inf, -2.0))
    ]
    results += [Result(row=i, text=None, finish_reason=None, reward=x) for i, x in enumerate((math.nan, 0.25, 0.25))]
    found = figures_of(results)
    assert (found["scores"]["count"], found["scores"]["min"]) == (1, -2.0)
    assert found["rewards"]["bins"] == [[0.25, 0.26, 2]]
    assert (found["rows"], found["completion_tokens"]) == (5, None)


def test_memory_does_not_grow_with_rows_of_ever_different_rewards():
    figures = RowFigures()
    for i in range(6_000):
        figures.add(Result(row=i, text=None, finish_reason=None, reward=100_000 + i * 3.7), dict)
    assert len(figures._rewards) == 223  # 100,000 to 122,200 in steps of 100
    found = figures.as_dict()["rewards"]
    assert (found["count"], found["min"], found["max"]) == (6_000, 100_000, 122_200)
    assert found["p50"] == pytest.approx(100_000 + 5_999 * 3.7 / 2, rel=1e-3)


def test_embedded_rows_have_a_sample_of_a_few_numbers():
    embedding = np.arange(20, dtype=np.float32)
    figures = RowFigures()
    result = Result(row=0, text=None, finish_reason=None, prompt_tokens=3, embedding=embedding)
    figures.add(result, lambda: {"embedding": embedding})
    found = figures.as_dict()
    assert found["samples"]["embedded"] == [{"embedding": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, "… 12 more"]}]
    assert (found["prompt_tokens"]["count"], found["completion_tokens"]) == (1, None)


def test_a_histogram_holds_every_value_once():
    counts = dict.fromkeys(range(1000, 1400, 4), 1) | {1900: 1}
    found = histogram(counts)
    assert (found["count"], found["min"], found["max"], found["p50"], found["p99"]) == (101, 1000, 1900, 1200, 1396)
    assert found["bins"][:2] == [[1000, 1010, 3], [1010, 1020, 2]]
    assert found["bins"][-1] == [1400, 1900, 1]  # the long tail is one bin
    assert sum(count for *_, count in found["bins"]) == 101
    assert len(found["bins"]) <= BINS + 2
    assert histogram({}) is None
    assert histogram({7: 3})["bins"] == [[7, 8, 3]]


def test_a_sample_is_cut_to_what_a_person_reads():
    long = "a" * 500 + "end"
    assert shortened(long) == "a" * 80 + " … 183 characters … " + "a" * 237 + "end"
    assert shortened({"ids": list(range(20)), "x": None, "f": math.nan, "p": 0.123456789}) == {
        "ids": [0, 1, 2, 3, 4, 5, 6, 7, "… 12 more"], "x": None, "f": "nan", "p": 0.123457,
    }  # fmt: skip
    assert shortened({"a": {"b": {"c": {"d": [1]}}}}) == {"a": {"b": {"c": '{"d": [1]}'}}}
    row = {f"column {i}": long for i in range(1000)}
    assert len(json.dumps(shortened(row))) < 15_000
