"""Equal rows are told apart by their ids: each keeps its result whatever happens to the others."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen import SamplingParams
from batchgen.errors import UsageError
from batchgen.jobs.files.results import Results
from batchgen.jobs.files.row_keys import KNOWN_FILE, RowKeys
from batchgen.request import Request, id_key, row_key
from batchgen.result import Result
from support.params import examples
from support.runs import Oracle, Runs

D, A, B, C = (letter.encode() * 16 for letter in "dabc")
RESULT = Result(row=-1, text="first", finish_reason="stop")


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Results]:
    results = Results(tmp_path, 5.0)
    yield results
    results.close()


CASES: dict[str, tuple[list[bytes | None], list[bytes]]] = {
    "without ids": ([None] * 3, [D, row_key(D, 1), row_key(D, 2)]),
    "with other ids": ([A, B, C], [D, id_key(D, B), id_key(D, C)]),
    "with equal ids": ([A, A, B, B], [D, row_key(D, 1), id_key(D, B), row_key(id_key(D, B), 1)]),
    "only some with ids": ([None, A, B, None], [D, id_key(D, A), id_key(D, B), row_key(D, 1)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("calls", ["one call", "a call for each row"])
def test_the_first_of_equal_rows_has_their_digest_as_its_key(case: str, calls: str) -> None:
    ids, expected = CASES[case]
    row_keys = RowKeys()
    lists = [ids] if calls == "one call" else [[own] for own in ids]
    keys = [key for part in lists for key in row_keys.keys([D] * len(part), part, [True] * len(part))]
    assert keys == [(key, False) for key in expected]


def test_equal_rows_that_are_not_sampled_have_one_key_and_those_after_the_first_are_told() -> None:
    row_keys = RowKeys()
    assert row_keys.keys([D, A, D], [A, B, C], [False] * 3) == [(D, False), (A, False), (D, True)]
    assert row_keys.keys([A, B], [None, A], [False] * 2) == [(A, True), (B, False)]


def test_rows_without_equals_have_their_digests_whatever_their_ids() -> None:
    keys = RowKeys().keys([A, B, C, D], [None, D, C, C], [True] * 4)
    assert keys == [(A, False), (B, False), (C, False), (D, False)]


def runs_of(folder: Path, *inputs: list[bytes | None], finished: bool = True) -> list[list[bytes]]:
    """The keys of equal rows in several runs of a job, of which each gives every row a result."""
    given = []
    for ids in inputs:
        results = Results(folder, 5.0)
        keys = results.row_keys().keys([D] * len(ids), ids, [True] * len(ids), lambda ids=ids: filter(None, ids))
        given.append([key for key, _ in keys])
        for key in given[-1] if finished else ():
            results.append(key, RESULT)
        results.close()
    return given


def test_keys_outlive_the_rows_before_them(tmp_path: Path) -> None:
    assert runs_of(tmp_path, [A, B], [B], [C, B, A]) == [
        [D, id_key(D, B)],
        [id_key(D, B)],
        [id_key(D, C), id_key(D, B), D],
    ]


def test_a_row_that_was_alone_gives_its_digest_to_the_row_that_takes_its_place(tmp_path: Path) -> None:
    assert runs_of(tmp_path, [A], [B], [C, B]) == [[D], [D], [id_key(D, C), D]]


def test_rows_of_a_job_that_numbered_them_get_keys_of_their_own_and_keep_their_results(results: Results) -> None:
    numbered = [D, row_key(D, 1), row_key(D, 2)]
    for number, key in enumerate(numbered):
        results.append(key, Result(row=-1, text=str(number), finish_reason="stop"))
    results.know_finished(numbered)
    expected = [D, id_key(D, B), id_key(D, C)]
    assert results.row_keys().keys([D] * 3, [A, B, C], [True] * 3) == [(key, False) for key in expected]
    assert [results.stored(expected)[key].text for key in expected] == ["0", "1", "2"]
    results.add_rows([0, 1, 2], dict(enumerate(expected)), {})
    assert results.compared() == (3, 0, 0, 0)


@pytest.mark.parametrize("damage", [b"x" * 10_000, b""])
def test_a_damaged_memory_is_made_again(tmp_path: Path, damage: bytes) -> None:
    runs_of(tmp_path, [A, B])
    (tmp_path / KNOWN_FILE).write_bytes(damage)
    assert runs_of(tmp_path, [B, A]) == [[id_key(D, B), D]]


def test_owners_without_a_row_and_a_result_are_forgotten(results: Results, tmp_path: Path) -> None:
    row_keys = results.row_keys()
    row_keys.keys([D, A, B], [C, C, C], [True] * 3)
    results.append(A, RESULT)
    results.add_rows([0], {0: B}, {})
    row_keys.forget_unasked()
    with sqlite3.connect(tmp_path / KNOWN_FILE) as db:
        assert [digest for (digest,) in db.execute("SELECT digest FROM owners ORDER BY digest")] == [A, B]


class Sampling(Oracle):
    """Its texts depend on the row's key, as sampled texts do."""

    def answer(self, request: Request, prompt: str) -> Result:
        return Result(
            row=request.row, text=request.key.hex(), finish_reason="stop",
            prompt_tokens=len(request.tokens), completion_tokens=1, token_ids=(1,),
        )  # fmt: skip


SAMPLED = SamplingParams(max_tokens=4, temperature=1.0)
FIRST = [(f"row {i}", "pqr"[i % 3]) for i in range(9)]
INPUTS = st.lists(st.sampled_from([(f"row {i}", "pqr"[i % 3]) for i in range(15)]), unique=True, min_size=1)


@settings(
    max_examples=examples(6, 60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    inputs=st.lists(st.tuples(INPUTS, st.sampled_from([None, 2]), st.none() | st.integers(0, 6)), max_size=4),
    prune=st.booleans(),
)
def test_rows_with_ids_keep_their_texts_when_equal_ones_are_deleted_moved_and_inserted(
    inputs: Any, prune: bool, tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> None:
    runs = Runs(tmp_path_factory.mktemp("job"), tiny_model_dir)
    runs.engine = Sampling
    known: dict[str, str] = {}
    for pool, window, most in [(FIRST, None, None), *inputs, (FIRST, None, None)]:
        rows = [{"id": own, "prompt": prompt} for own, prompt in pool]
        try:
            _, report = runs.run(rows, window=window, most=most, prune=prune, sampling=SAMPLED)
        except UsageError as e:
            assert "are no longer in the input" in str(e)  # noqa: PT017 - whether there is one depends on the input
            continue
        if report is not None:
            texts = {row["id"]: row["text"] for row in runs.rows()}
            assert len({*texts.values()}) == len(pool), "equal rows have texts of their own"
            assert texts == {own: known.get(own, texts[own]) for own, _ in pool}
            known = texts if prune else known | texts
