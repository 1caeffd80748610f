"""`--retry length` with a larger `--max-tokens`: complete rows stay, truncated rows are generated with the new limit."""

import hashlib
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen import JobConfig, PromptConfig, SamplingParams, merge_job, run_job
from batchgen.errors import UsageError
from batchgen.request import Request
from batchgen.result import Completion, Result
from support.params import examples
from support.records import json_rows
from support.runs import Oracle, Runs
from support.tiny_model import CONTEXT_LENGTH

pytestmark = pytest.mark.usefixtures("loaded_once")

Rows = list[dict[str, Any]]


def length(prompt: str, choice: int = 0) -> int:
    """Returns the length of the whole completion, 1 to 12 tokens."""
    return hashlib.blake2b(f"{prompt}/{choice}".encode()).digest()[0] % 12 + 1


def completion(prompt: str, limit: int, choice: int = 0) -> Completion:
    whole = length(prompt, choice)
    tokens = min(whole, limit)
    reason = "stop" if whole <= limit else "length"
    return Completion(text=f"{prompt}/{choice} {tokens}", finish_reason=reason, token_ids=(1,) * tokens)


class TruncatingOracle(Oracle):
    """Answers with completions of different lengths, truncated at the limit."""

    def answer(self, request: Request, prompt: str) -> Result:
        found = tuple(completion(prompt, request.max_tokens, choice) for choice in range(request.params.n))
        return Result(
            row=request.row, text=found[0].text, finish_reason=found[0].finish_reason,
            prompt_tokens=len(request.tokens), completion_tokens=sum(len(c.token_ids) for c in found),
            token_ids=found[0].token_ids, completions=found if len(found) > 1 else (),
        )  # fmt: skip


@pytest.fixture(autouse=True)
def truncating(runs: Runs) -> None:
    runs.engine = TruncatingOracle


def with_limit(limit: int, **sampling: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(max_tokens=limit, **sampling)}


PROMPTS = [f"p{i}" for i in range(24)]
CUT_AT_4 = [p for p in PROMPTS if length(p) > 4]
CUT_AT_8 = [p for p in PROMPTS if length(p) > 8]


def test_only_truncated_rows_are_generated_again(runs):
    runs.run(PROMPTS, **with_limit(4))
    kept = {row["text"] for row in runs.rows() if row["finish_reason"] == "stop"}
    assert (len(CUT_AT_4), len(CUT_AT_8), len(kept)) == (15, 7, 9)
    answered, report = runs.run(PROMPTS, retry=("length",), **with_limit(8))
    assert sorted(answered) == sorted(CUT_AT_4)
    assert "o.jsonl was finished: 9 of its results are used again" in runs.notes
    assert [row["text"] for row in runs.rows()] == [f"{p}/0 {min(length(p), 8)}" for p in PROMPTS]
    assert report.stats["job"]["finish_reasons"] == {"stop": 17, "length": 7, "timeout": 0, "error": 0}
    assert runs.run(PROMPTS, **with_limit(8))[0] == []
    assert sorted(runs.run(PROMPTS, retry=("length",), **with_limit(8))[0]) == sorted(CUT_AT_8)
    assert sorted(runs.run(PROMPTS, retry=("length",), **with_limit(12))[0]) == sorted(CUT_AT_8)
    assert [row["finish_reason"] for row in runs.rows()] == ["stop"] * 24
    assert runs.run([*PROMPTS, "new"], **with_limit(12))[0] == ["new"]


@pytest.mark.parametrize("window", [None, 5])
def test_a_limit_of_rows_takes_no_truncated_rows_away_after_an_interrupted_run(runs, window):
    runs.run(PROMPTS, window=window, **with_limit(4))
    again = runs.run(PROMPTS, retry=("length",), most=2, window=window, **with_limit(8))[0]
    for most in (3, None):
        again += runs.run(PROMPTS, limit=1, most=most, window=window, **with_limit(8))[0]
    assert sorted(again) == sorted(CUT_AT_4)
    assert [row["text"] for row in runs.rows()] == [f"{p}/0 {min(length(p), 8)}" for p in PROMPTS]
    assert runs.run(PROMPTS, window=window, **with_limit(8))[0] == []


def test_a_larger_limit_alone_and_a_smaller_one_are_refused(runs):
    runs.run(PROMPTS, **with_limit(4))
    before = {p.name: p.read_bytes() for p in (runs.output, runs.folder / "o.jsonl.job" / "manifest.json")}
    with pytest.raises(UsageError) as error:
        runs.run(PROMPTS, **with_limit(8))
    assert str(error.value) == (
        f"{runs.output} was made with other settings: max_tokens was 4, is 8; "
        "add --retry length to generate the rows again that were cut, and keep all others; --overwrite starts again"
    )
    for options in (
        {"retry": ("length",), **with_limit(3)},
        {"retry": ("length",), **with_limit(8, temperature=0.5)},
        {"retry": ("errors", "timeout"), **with_limit(8)},
    ):
        with pytest.raises(UsageError, match="max_tokens was 4, is"):
            runs.run(PROMPTS, **options)
    assert before == {p.name: p.read_bytes() for p in (runs.output, runs.folder / "o.jsonl.job" / "manifest.json")}


def test_an_input_of_other_rows_is_still_refused_after_the_limit_was_raised(runs):
    runs.run(PROMPTS, **with_limit(4))
    runs.run(PROMPTS, retry=("length",), **with_limit(8))
    before = runs.rows()
    for options in (with_limit(8), {"retry": ("length",), **with_limit(8)}):
        with pytest.raises(UsageError, match=r"24 of the 24 finished rows of .* are no longer in the input"):
            runs.run([f"other {p}" for p in PROMPTS], **options)
    assert runs.rows() == before
    assert runs.run(PROMPTS, **with_limit(8))[0] == []


@pytest.fixture
def job(tiny_model_dir: Path, tmp_path: Path) -> Any:
    """Runs a job with a real model over rows with this prompt. Returns the output rows."""

    def run(name: str, limit: int, *, prompts: list[str], options: Any = None, **sampling: Any) -> Rows:
        source, output = tmp_path / "in.jsonl", tmp_path / name
        text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        if not source.exists():
            source.write_text(text)
        assert source.read_text() == text
        limits = SamplingParams(max_tokens=limit, **sampling)
        run_job(JobConfig(inputs=source, output=str(output), model=tiny_model_dir, sampling=limits, **options or {}))
        return json_rows(output) if output.exists() else []

    return run


AGAIN = {"retry": ("length",)}


def test_a_prompt_that_is_shortened_for_a_larger_limit_is_another_row(job):
    prompts, cut = (
        [f"{i} {'a' * CONTEXT_LENGTH}" for i in range(12)],
        {"prompts": PromptConfig(on_long_prompt="truncate-left")},
    )
    job("raised.jsonl", 4, prompts=prompts, options=cut)
    raised = job("raised.jsonl", 32, prompts=prompts, options=cut | AGAIN)
    fresh = job("fresh.jsonl", 32, prompts=prompts, options=cut)
    assert all(row["truncated"] and row["error"] is None for row in fresh)
    assert raised == fresh


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 1.0, "n": 2}],
    ids=["greedy", "sampled", "two each"],
)
def test_a_real_model_continues_a_truncated_completion_where_it_ended(sampling, job):
    ends = tuple(range(0, 240, 8))  # so that some completions end before the limit

    def completions(name: str, limit: int, **options: Any) -> list[tuple[list[int], str]]:
        prompts = [f"row {i}" for i in range(16)]
        rows = job(name, limit, prompts=prompts, options={"token_ids": True} | options, stop_token_ids=ends, **sampling)
        return [(c["token_ids"], c["finish_reason"]) for row in rows for c in row.get("choices") or [row]]

    short, longer = completions("o.jsonl", 5), completions("o.jsonl", 12, **AGAIN)
    for (begun, reason), (tokens, _) in zip(short, longer, strict=True):
        assert tokens[: len(begun)] == begun
        assert (len(tokens) > len(begun)) == (reason == "length")
    kinds = Counter(reason for _, reason in short)
    assert kinds["length"] > 2
    if sampling:
        assert kinds["stop"] > 2
    else:
        assert longer == completions("fresh.jsonl", 12)


def test_a_merged_job_is_continued_in_shards(job, tmp_path):
    prompts = [f"row {i}" for i in range(12)]
    for limit, again in ((3, {}), (9, AGAIN)):
        for shard in ("1/2", "2/2"):
            job("o.jsonl", limit, prompts=prompts, options={"shard": shard} | again)
        merge_job(str(tmp_path / "o.jsonl"))
    for limit in (9, 20):
        assert job("o.jsonl", limit, prompts=prompts, options=AGAIN) == job(
            f"fresh{limit}.jsonl", limit, prompts=prompts
        )


def rows_of_any_kind() -> st.SearchStrategy[Rows]:
    own = st.sampled_from(
        [{}, {}, {"max_tokens": 3}, {"max_tokens": 5}, {"max_tokens": 7}, {"n": 2, "temperature": 1.0}]
    )
    row = st.builds(lambda i, params: {"prompt": f"p{i}", "sampling_params": params}, st.integers(0, 5), own)
    return st.lists(row, min_size=1, max_size=8)


@given(data=st.data())
@settings(max_examples=examples(6, 150), suppress_health_check=list(HealthCheck))
def test_over_any_runs_every_row_is_truncated_at_the_last_limit_or_its_own(tiny_model_dir, data):
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), tiny_model_dir)
        runs.engine = TruncatingOracle
        rows, limit = data.draw(rows_of_any_kind()), 3
        for _ in range(data.draw(st.integers(2, 6))):
            rows = data.draw(st.just(rows) | st.permutations(rows) | rows_of_any_kind())
            larger = data.draw(st.sampled_from([limit, 5, 7, 12]))
            retry = ("length",) if larger > limit else data.draw(st.sampled_from([(), ("length",)]))
            limit = max(limit, larger)
            most, window = data.draw(st.none() | st.integers(0, 4)), data.draw(st.sampled_from([None, 3]))
            _, report = runs.run(rows, most=most, retry=retry, prune=True, window=window, **with_limit(limit))
            if report is None:
                continue
            for row, out in zip(rows, runs.rows(), strict=True):
                own = row["sampling_params"]
                wanted = [completion(row["prompt"], own.get("max_tokens", limit), c) for c in range(own.get("n", 1))]
                found = out["choices"] if len(wanted) > 1 else [out]
                assert [(c["text"], c["finish_reason"]) for c in found] == [(w.text, w.finish_reason) for w in wanted]
