"""When a job stops with an error, and what it notes at its end."""

import gc
from dataclasses import replace

import pytest

from batchgen.errors import ModelError, OutOfMemory, RowError, TooManyErrors, memory_errors
from batchgen.jobs.outcomes import Outcomes, check_errors
from batchgen.process.collector import few_collections
from batchgen.progress import Tracker
from batchgen.result import Result, Score, ToolCall
from support.progress import Recorder


def test_without_a_limit_any_number_of_rows_may_fail():
    outcomes = Outcomes(Tracker(Recorder()), None)
    for row in range(200):
        outcomes.done(Result.from_error(row, RowError("does_not_fit", "too big")))
    assert outcomes.run.failed == 200


def test_one_more_than_the_number_allowed_is_too_many():
    check_errors("2", failed=2, done=3, last="x")
    with pytest.raises(TooManyErrors) as error:
        check_errors("2", failed=3, done=4, last="a.jsonl:4: invalid_row: not JSON")
    assert str(error.value) == (
        "3 rows failed of 4 done so far, more than --max-errors 2 allows; the last one: a.jsonl:4: invalid_row: not JSON; "
        "correct the input, or allow more errors, and run the same command again to continue"
    )


def test_a_percentage_applies_from_the_hundredth_row_on():
    check_errors("10%", failed=99, done=99, last="x")
    check_errors("10%", failed=10, done=100, last="x")
    with pytest.raises(TooManyErrors, match=r"11 rows failed of 100 done so far, more than --max-errors 10% allows"):
        check_errors("10%", failed=11, done=100, last="x")


def test_zero_allows_no_failure():
    with pytest.raises(TooManyErrors):
        check_errors("0", failed=1, done=1, last="x")


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory: no memory left"),
        (OutOfMemoryError("CUDA out of memory. Tried to\nallocate"), "out of memory: CUDA out of memory. Tried to"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            "out of memory: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
        ),
    ],
)
def test_running_out_of_memory_is_one_error_with_a_fix(error, message):
    with pytest.raises(OutOfMemory) as told, memory_errors():
        raise error
    assert str(told.value) == f"{message}; lower --kv-memory, --batch-size or --window"


@pytest.mark.parametrize("error", [RuntimeError("shapes"), ModelError("no"), ValueError("x")])
def test_other_errors_are_not_changed(error):
    with pytest.raises(type(error)) as told, memory_errors():
        raise error
    assert told.value is error


def test_garbage_collection_is_restored_after_the_job():
    of_the_tests, of_python = gc.get_threshold(), (700, 10, 10)
    try:
        gc.set_threshold(*of_python)
        with few_collections():
            assert gc.get_threshold()[0] > 50 * of_python[0]
        assert gc.get_threshold() == of_python
    finally:
        gc.set_threshold(*of_the_tests)


def test_even_one_row_without_an_answer_is_noted():
    told = Recorder()
    outcomes = Outcomes(Tracker(told), None)
    cut = Result(row=0, text=None, reasoning="hm", finish_reason="length")
    outcomes.done(cut)
    outcomes.resumed(replace(cut, row=1, finish_reason="stop"))
    outcomes.done(Result(row=2, text="yes", reasoning="hm", finish_reason="stop"))
    outcomes.done(
        Result(row=3, text=None, reasoning="hm", finish_reason="stop", tool_calls=(ToolCall("a", "f", "{}"),))
    )
    outcomes.done(Result(row=4, text=None, finish_reason=None, score=Score(-1.0, 1, True)))
    outcomes.note_cut_rows()
    assert told.notes == [
        "2 of 5 rows have no answer (text is null), because the completion ended inside its thoughts; a larger --max-tokens with --retry length "
        "continues those that were cut, --reasoning-budget N makes room for an answer"
    ]


@pytest.mark.parametrize(
    ("repeating", "more"), [(12, "; 12 of them repeat themselves, which --max-repeats 4 ends early"), (9, "")]
)
def test_many_rows_that_repeated_themselves_up_to_the_limit_suggest_max_repeats(repeating, more):
    told = Recorder()
    outcomes = Outcomes(Tracker(told), None)
    for row in range(20):
        tokens = (1, 2, 3) * 30 if row < repeating else tuple(range(90))
        outcomes.done(Result(row=row, text="x", finish_reason="length", token_ids=tokens))
    outcomes.note_cut_rows()
    assert told.notes == [
        "20 of 20 rows were cut by their length (--max-tokens, or the end of the context); "
        f"run again with --retry length and a larger --max-tokens to finish them{more}"
    ]
