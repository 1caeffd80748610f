"""Results are compared with the texts that the user expects."""

import datetime as dt
import json
from decimal import Decimal
from itertools import product

import pytest

from batchgen.recording.agreement import MAX_PAIRS, Agreement
from batchgen.result import Result

FAILED = Result(row=0, text=None, finish_reason="error", error_type="invalid_row", error_message="m")


def given(text, probability=None):
    probs = None if probability is None else {text: probability, "other": 1 - probability}
    return Result(row=0, text=text, finish_reason="stop", choice_probs=probs)


def compared(*pairs, **options):
    agreement = Agreement("gold", **options)
    for result, expected in pairs:
        agreement.add(result, {"gold": expected, "text": "not this one"})
    return agreement.as_dict()


def test_rows_are_right_wrong_failed_or_without_a_value():
    pairs = [
        (given("a"), "a"),
        (given(" a\n"), "a "),
        (given("b"), "a"),
        (FAILED, "a"),
        (given("a"), None),
        (given("a"), " "),
        (given("a"), float("nan")),
    ]
    assert compared(*pairs) == {
        "column": "gold",
        "rows": 3,
        "rows_right": 2,
        "accuracy": 0.666667,
        "rows_failed": 1,
        "rows_without": 3,
        "confusion": [{"expected": "a", "given": "a", "rows": 2}, {"expected": "a", "given": "b", "rows": 1}],
        "confusion_other_rows": 0,
        "calibration": None,
    }
    empty = compared()
    assert (empty["rows"], empty["accuracy"], empty["confusion"]) == (0, None, [])


def test_objects_and_lists_are_compared_by_their_values():
    """What a JSON schema lets a model write has blanks where the model put them."""
    text = '{"mood":"good", "stars": [1,2]}'
    pairs = [
        (given(text), {"stars": [1, 2], "mood": "good"}),
        (given(text), '{"mood": "good", "stars": [1, 2]}'),
        (given(text), {"mood": "good", "stars": [2, 1]}),
        (given("[1,2]"), [1, 2]),
        (given("[1,2"), "[1,2"),
        (given("[1,2"), [1, 2]),
    ]
    found = compared(*pairs)
    assert (found["rows"], found["rows_right"]) == (6, 4)
    assert found["confusion"] == [
        {"expected": text, "given": text, "rows": 2},
        {"expected": '{"mood": "good", "stars": [2, 1]}', "given": text, "rows": 1},
        {"expected": "[1,2]", "given": "[1,2]", "rows": 1},
        {"expected": "[1,2", "given": "[1,2", "rows": 1},
        {"expected": "[1, 2]", "given": "[1,2", "rows": 1},
    ]


@pytest.mark.parametrize("value", [True, [True], {"a": [{"b": False}]}])
def test_true_and_false_are_no_numbers_in_an_object_or_a_list(value):
    text = json.dumps(value)
    as_numbers = text.replace("true", "1").replace("false", "0")
    assert [compared((given(text), other))["rows_right"] for other in (value, text, as_numbers)] == [1, 1, 0]
    assert compared((given(as_numbers), value))["rows_right"] == 0


def test_the_calibration_error_is_the_mean_difference_of_probability_and_share_over_the_bins():
    pairs = [(given("a", 0.95), "a"), (given("a", 0.91), "b"), (given("a", 0.62), "a"), (given("a", 1.0), "a")]
    found = compared(*pairs, (given("a"), "a"))["calibration"]
    # 0.9 to 1.0: mean 0.953333, 2 of 3 right; 0.6 to 0.7: 0.62, right. (3 * 0.286667 + 0.38) / 4
    assert (found["rows"], found["mean_probability"], found["accuracy"], found["error"]) == (4, 0.87, 0.75, 0.31)
    assert [(b["from"], b["to"], b["rows"]) for b in found["bins"]] == [
        (i / 10, (i + 1) / 10, {6: 1, 9: 3}.get(i, 0)) for i in range(10)
    ]
    assert (found["bins"][9]["mean_probability"], found["bins"][9]["accuracy"]) == (0.953333, 0.666667)
    assert found["bins"][0]["accuracy"] is None


@pytest.mark.parametrize(
    ("text", "expected", "names", "right"),
    [
        ("pos", 1, ["neg", "pos"], 1),
        ("1", 1, [], 1),
        ("true", True, ["no", "yes"], 1),
        ("5", 5, ["a"], 1),
        ("a", -1, ["a"], 0),
        ("1", 1.0, [], 1),
        ("0", 0.0, [], 1),
        ("1.0", 1.0, [], 1),
        ("0.5", 0.5, [], 1),
        ("pos", 1.0, ["neg", "pos"], 1),
        ("1", 0.0, [], 0),
        ("1.50", Decimal("1.50"), [], 1),
        ("1", Decimal("1.00"), [], 1),
        ("1.5", Decimal("1.50"), [], 1),
        ("0.50", 0.5, [], 1),
        ("1.0", 1, [], 1),
        ("True", True, [], 1),
        ("1", True, [], 0),
        ("True", True, ["False", "True"], 1),
        ("False", True, ["False", "True"], 0),
        *(
            (text, value, [], 0)
            for text in ("one", "", "sNaN", "-", "1e999999999999", "\0")
            for value in (1, 1.0, Decimal("1.00"))
        ),
        ("1", "1.0", [], 0),
        ("1", 1, ["neg", "pos"], 1),
        ("1", 0, ["1", "2"], 1),
        ("1", 1, ["1", "2"], 0),
        ("2024-02-29", dt.date(2024, 2, 29), [], 1),
    ],
)
def test_a_number_is_the_name_of_its_class_or_its_digits(text, expected, names, right):
    assert compared((given(text), expected), names=names)["rows_right"] == right


def test_equal_numbers_are_one_label_in_the_table():
    found = compared(*((given(text), value) for text in "12" for value in (Decimal("1.00"), 1.0, 1)))
    assert [(pair["expected"], pair["given"]) for pair in found["confusion"]] == [("1", "1"), ("1", "2")]


@pytest.mark.parametrize("labels", [("true", "false"), ("True", "False"), ("TRUE", "FALSE")])
def test_true_and_false_are_written_like_the_labels_in_the_table(labels):
    found = compared(*((given(text), value) for text in labels for value in (True, False)))
    assert {(pair["expected"], pair["given"]) for pair in found["confusion"]} == set(product(labels, labels))


def test_any_number_of_texts_takes_bounded_memory():
    found = compared(*((given("x" * 999 + str(i)), str(i)) for i in range(MAX_PAIRS + 5)))
    assert (found["rows"], len(found["confusion"]), found["confusion_other_rows"]) == (MAX_PAIRS + 5, MAX_PAIRS, 5)
    assert {len(pair["given"]) for pair in found["confusion"]} == {80}
