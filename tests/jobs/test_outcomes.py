"""When a job stops with an error, and what it notes at its end."""

import gc
from dataclasses import replace

import pytest

from batchgen.errors import ModelError, OutOfMemory, RowError, TooManyErrors, memory_errors
from batchgen.jobs.outcomes import Outcomes
from batchgen.process.collector import few_collections
from batchgen.progress import Tracker
from batchgen.result import Result, Score, ToolCall
from support.progress import Recorder


@pytest.mark.parametrize(
    ("limit", "failed", "done", "said"),
    [
        ("2", 2, 3, None),
        ("2", 3, 4, "3 rows failed of 4 done so far, more than --max-errors 2 allows"),
        ("0", 1, 1, "1 row failed of 1 done so far, more than --max-errors 0 allows"),
        ("10%", 99, 99, None),  # a percentage applies from the hundredth row on
        ("10%", 10, 100, None),
        ("10%", 11, 100, "11 rows failed of 100 done so far, more than --max-errors 10% allows"),
    ],
)
def test_one_more_row_than_the_limit_is_too_many(limit, failed, done, said):
    outcomes = Outcomes(Tracker(Recorder()), limit)
    for _ in range(done - failed):
        outcomes.done(Result(row=0, text="a", finish_reason="stop"))
    malformed = Result.from_error(3, RowError("invalid_row", "not JSON"))
    for _ in range(failed - 1):
        outcomes.done(malformed, "a.jsonl:4")
    if said is None:
        outcomes.done(malformed, "a.jsonl:4")
        return
    with pytest.raises(TooManyErrors) as error:
        outcomes.done(malformed, "a.jsonl:4")
    assert str(error.value) == (
        f"{said}; the last one: a.jsonl:4: invalid_row: not JSON; "
        "correct the input, or allow more errors, and run the same command again to continue"
    )


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error."""


ALLOCATOR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "no memory left"),
        (OutOfMemoryError("CUDA out of memory. Tried to\nallocate"), "CUDA out of memory. Tried to"),
        (RuntimeError(ALLOCATOR), ALLOCATOR),
    ],
)
def test_running_out_of_memory_is_one_error_with_a_fix(error, said):
    with pytest.raises(OutOfMemory) as told, memory_errors():
        raise error
    assert str(told.value) == f"out of memory: {said}; lower --kv-memory, --batch-size or --window"


@pytest.mark.parametrize("error", [RuntimeError("shapes"), ModelError("no"), ValueError("x")])
def test_other_errors_are_not_changed(error):
    with pytest.raises(type(error)) as told, memory_errors():
        raise error
    assert told.value is error


def test_garbage_collection_is_restored_after_the_last_of_several_calls():
    of_the_tests, of_python = gc.get_threshold(), (700, 10, 10)
    one, other = few_collections(), few_collections()
    try:
        gc.set_threshold(*of_python)
        one.__enter__()
        other.__enter__()
        assert gc.get_threshold()[0] > 50 * of_python[0]
        one.__exit__(None, None, None)
        assert gc.get_threshold()[0] > 50 * of_python[0]
        other.__exit__(None, None, None)
        assert gc.get_threshold() == of_python
    finally:
        gc.set_threshold(*of_the_tests)


@pytest.fixture
def told() -> Recorder:
    return Recorder()


@pytest.fixture
def outcomes(told: Recorder) -> Outcomes:
    return Outcomes(Tracker(told), None)


def test_even_one_row_without_an_answer_is_noted(told, outcomes):
    cut = Result(row=0, text=None, reasoning="hm", finish_reason="length")
    outcomes.done(cut)
    outcomes.resumed(replace(cut, row=1, finish_reason="stop"))
    outcomes.done(Result(row=2, text="yes", reasoning="hm", finish_reason="stop"))
    call = ToolCall("a", "f", "{}")
    outcomes.done(Result(row=3, text=None, reasoning="hm", finish_reason="stop", tool_calls=(call,)))
    outcomes.done(Result(row=4, text=None, finish_reason=None, score=Score(-1.0, 1, True)))
    outcomes.note_cut_rows()
    assert told.notes == [
        "2 of 5 rows have no answer (text is null), because the completion ended inside its thoughts; a larger --max-tokens with --retry length "
        "continues those that were cut, --reasoning-budget N makes room for an answer"
    ]


def test_cut_json_suggests_retry_length_only_where_length_has_cut_a_row(told, outcomes):
    outcomes.done(Result(row=0, text="[1", finish_reason="repetition", valid=False))
    outcomes.note_cut_rows()
    assert told.notes == []
    outcomes.done(Result(row=1, text="[1", finish_reason="length", valid=False))
    outcomes.note_cut_rows()
    assert told.notes == [
        "2 of 2 completions end in the middle of their JSON; run again with --retry length and a larger --max-tokens to finish them"
    ]


@pytest.mark.parametrize(
    ("repeating", "more"), [(12, "; 12 of them repeat themselves, which --max-repeats 4 ends early"), (9, "")]
)
def test_many_rows_that_repeated_themselves_up_to_the_limit_suggest_max_repeats(repeating, more, told, outcomes):
    for row in range(20):
        tokens = (1, 2, 3) * 30 if row < repeating else tuple(range(90))
        outcomes.done(Result(row=row, text="x", finish_reason="length", token_ids=tokens))
    outcomes.note_cut_rows(endless=True)
    assert told.notes == []
    outcomes.note_cut_rows()
    assert told.notes == [
        "20 of 20 rows were cut by their length (--max-tokens, or the end of the context); "
        f"run again with --retry length and a larger --max-tokens to finish them{more}"
    ]
