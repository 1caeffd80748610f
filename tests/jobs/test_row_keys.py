"""Equal rows are told apart by their ids: each keeps its result whatever happens to the others."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen import SamplingParams
from batchgen.config import InputLimits
from batchgen.errors import UsageError
from batchgen.jobs.files.results import Results
from batchgen.jobs.files.row_keys import KNOWN_FILE, RowKeys
from batchgen.jobs.files.row_memory import KnownRequest
from batchgen.request import Request, id_key, row_key
from batchgen.result import Result
from support.params import examples
from support.runs import Oracle, Runs

D, A, B, C = (letter.encode() * 16 for letter in "dabc")

CASES: dict[str, tuple[list[bytes | None], list[bytes]]] = {
    "without ids": ([None] * 3, [D, row_key(D, 1), row_key(D, 2)]),
    "with other ids": ([A, B, C], [id_key(D, A), id_key(D, B), id_key(D, C)]),
    "with equal ids": ([A, A, B, B], [key for own in (A, B) for key in (id_key(D, own), row_key(id_key(D, own), 1))]),
    "only some with ids": ([None, A, B, None], [D, id_key(D, A), id_key(D, B), row_key(D, 1)]),
}


@pytest.fixture
def row_keys() -> Iterator[RowKeys]:
    with closing(RowKeys()) as keys:
        yield keys


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("calls", ["one call", "a call for each row"])
def test_a_sampled_row_has_a_key_of_its_id_or_of_the_number_of_its_occurrence(case, calls, row_keys):
    ids, expected = CASES[case]
    lists = [ids] if calls == "one call" else [[own] for own in ids]
    keys = [key for part in lists for key in row_keys.keys([D] * len(part), part, [True] * len(part))]
    assert keys == [(key, False) for key in expected]


def test_equal_rows_that_are_not_sampled_have_one_key_and_those_after_the_first_are_told(row_keys):
    assert row_keys.keys([D, A, D], [A, B, C], [False] * 3) == [(D, False), (A, False), (D, True)]
    assert row_keys.keys([A, B], [None, A], [False] * 2) == [(A, True), (B, False)]


def finished(results: Results, keys: list[bytes]) -> None:
    """Gives rows results, whose texts are their numbers."""
    for number, key in enumerate(keys):
        results.append(key, Result(row=-1, text=str(number), finish_reason="stop"))
    results.know_finished(keys)
    results.commit()


@pytest.mark.parametrize(
    ("before", "ids", "texts", "compared"),
    [
        ([D, row_key(D, 1), row_key(D, 2)], [A, B, C], ["0", "1", "2"], (3, 0, 0, 0)),
        ([D, row_key(D, 1), row_key(D, 2)], [A, A, B], ["0", None, "2"], (3, 1, 1, 1)),
        ([id_key(D, A), D, row_key(D, 1)], [A, B], ["0", "2"], (3, 1, 0, 1)),
    ],
    ids=["all", "equal ones", "some had theirs"],
)
def test_rows_of_a_finished_job_keep_their_results_when_they_get_ids(tmp_path, before, ids, texts, compared):
    with closing(Results(tmp_path, 5.0)) as results:
        finished(results, before)
        keys = [key for key, _ in results.keys_of_rows().keys([D] * len(ids), ids, [True] * len(ids))]
        first = [id_key(D, own) for own in ids if own is not None]
        assert keys == [key if key not in first[:i] else row_key(key, 1) for i, key in enumerate(first)]
        stored = results.stored(keys)
        assert [stored[key].text if key in stored else None for key in keys] == texts
        results.add_rows(range(len(keys)), dict(enumerate(keys)), {})
        assert results.compared() == compared


@pytest.mark.parametrize("run_rows", [1, 100], ids=["the reading is stored", "it is made again"])
def test_rows_that_got_ids_are_still_those_of_the_output_after_a_killed_run(runs, run_rows):
    runs.engine = Sampling
    rows = [{"prompt": f"p{i}"} for i in range(10)]
    runs.run(rows, sampling=SAMPLED)
    before = runs.texts()
    new = [*({**row, "id": f"r{i}"} for i, row in enumerate(rows)), *({"prompt": "new", "id": i} for i in range(2))]
    options = {"sampling": SAMPLED, "limits": InputLimits(run_rows=run_rows)}
    assert runs.run(new, most=0, **options)[1] is None
    assert runs.run(new, **options)[0] == ["new"] * 2
    assert runs.texts()[:10] == before


def test_a_row_with_an_id_does_not_take_the_result_of_one_without_before_there_is_an_output(runs):
    runs.engine = Sampling
    rows = [{"prompt": "a", "id": "A"}, {"prompt": "a"}]
    assert runs.run([rows[1], "b"], sampling=SAMPLED, most=1) == (["a"], None)
    runs.run(rows, sampling=SAMPLED)
    after = runs.texts()
    runs.run(rows, sampling=SAMPLED, overwrite=True)
    assert after == runs.texts()


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"x" * 10_000,
        lambda whole: b"",
        lambda whole: whole[:4096] + b"x" * (len(whole) - 4096),
        lambda whole: whole[:18] + b"\xed" + whole[19:],
    ],
    ids=["other bytes", "no bytes", "a page", "another version"],
)
def test_a_damaged_memory_is_made_again(tmp_path, damage):
    for _ in range(2):
        with closing(Results(tmp_path, 5.0)) as results:
            keys = results.keys_of_rows().keys([D, D], [B, A], [True] * 2)
            assert keys == [(id_key(D, B), False), (id_key(D, A), False)]
            memory = results.memory_of_rows(b"")
            assert memory.find([A]) == {}
            memory.add([(A, KnownRequest(D, is_sampled=True))])
            memory.flush()
        (tmp_path / KNOWN_FILE).write_bytes(damage((tmp_path / KNOWN_FILE).read_bytes()))


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


@settings(max_examples=examples(6, 60))
@given(
    inputs=st.lists(st.tuples(INPUTS, st.sampled_from([None, 2]), st.none() | st.integers(0, 6)), max_size=4),
    prune=st.booleans(),
)
def test_rows_with_ids_keep_their_texts_when_equal_ones_are_deleted_moved_and_inserted(
    inputs, prune, tmp_path_factory, tiny_model_dir
):
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
