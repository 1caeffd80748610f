"""Drafts are admitted where they make tokens come faster, best first, and results do not depend on that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen import LLM, EngineConfig, JobConfig, SamplingParams, run_job
from batchgen.drafting import speculator as module
from batchgen.drafting.chances import Chances, DraftKind
from batchgen.drafting.speculator import LONGEST, MAX_REST, TRIAL, Speculator, Trial
from batchgen.engine.engine import Engine
from batchgen.request import Request, leaves_of
from batchgen.scheduling.batch import ScheduledSpan, StepSize
from batchgen.scheduling.sequence import GenerationSequence, State

PROMPT = [*range(100, 130)]


class Prices:
    """Costs of steps: `each` seconds a token and a second for each step."""

    known = True

    def __init__(self, each: float) -> None:
        self.each = each
        self.asked = 0

    def seconds(self, size: StepSize) -> float:
        self.asked += 1
        return 1 + self.each * size.tokens


@pytest.fixture
def estimates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps really take does not count."""
    monkeypatch.setattr(Trial, "next_step", lambda self, sequences: 0)


def decoding(count: int, generated: list[int], max_tokens: int = 100) -> list[ScheduledSpan]:
    """Spans of sequences with the same prompt that have written the same tokens."""
    leaves = leaves_of(
        Request(
            row=row, tokens=np.array(PROMPT, dtype=np.int32), params=SamplingParams(max_tokens=max_tokens),
            max_tokens=max_tokens, key=bytes(16),
        )
        for row in range(count)
    )  # fmt: skip
    found = []
    for i, leaf in enumerate(leaves):
        seq = GenerationSequence(
            window=0, place=(i, 1), parent=None, start=0, table=[], computed=len(PROMPT) + len(generated) - 1, leaf=leaf,
            index=i, stops=None, generated=list(generated), state=State.DECODING,
        )  # fmt: skip
        found.append(ScheduledSpan(seq, seq.computed, seq.end, seq.computed))
    return found


def speculator(each: float = 0.001, forced: tuple[int, ...] = ()) -> Speculator:
    return Speculator(Prices(each), lambda _: forced)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "rests"), [(1.2, [0, 0]), (2.5, [MAX_REST * 2, MAX_REST * 4])])
def test_drafts_that_did_not_make_tokens_come_faster_rest_longer_each_time(
    seconds: float, rests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sequences take a second without drafts; with drafts, each gets two tokens in a step."""
    now, trial = [1.0], Trial()
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    assert trial.next_step(8) == 1  # nothing is known about steps without drafts
    now[0] += 1.0
    assert trial.next_step(8) == 0
    for rest in rests:
        given = []
        for _ in range(TRIAL):
            trial.drafted, trial.accepted = True, 8
            now[0] += seconds
            given.append(trial.next_step(8))
        assert given == [0] * (TRIAL - 1) + [rest]


@pytest.mark.usefixtures("estimates_alone")
def test_a_completion_that_copies_its_prompt_is_drafted_from_it() -> None:
    step = decoding(2, PROMPT[4:12])
    drafts = speculator().propose(step)
    assert [list(drafts[s.span])[:5] for s in step] == [PROMPT[12:17]] * 2  # type: ignore[index]


@pytest.mark.usefixtures("estimates_alone")
def test_a_draft_is_no_longer_than_the_completion_may_become() -> None:
    (scheduled,) = decoding(1, [104, 105], max_tokens=5)
    assert list(speculator().propose([scheduled])[scheduled.span]) == [106, 107]  # type: ignore[index]
    (scheduled,) = decoding(1, [104, 105], max_tokens=3)
    assert speculator().propose([scheduled]) == {}


@pytest.mark.usefixtures("estimates_alone")
def test_text_that_a_grammar_forces_comes_before_everything_else() -> None:
    (scheduled,) = decoding(1, [104, 105])
    drafts = list(speculator(forced=(1, 2, 107)).propose([scheduled])[scheduled.span])  # type: ignore[index]
    assert drafts[:3] == [1, 2, 107]


@pytest.mark.usefixtures("estimates_alone")
def test_rows_are_drafted_from_what_others_have_written_and_from_finished_ones() -> None:
    found = speculator()
    first, second, third = decoding(3, [1, 2, 3, 4, 5, 6, 7])
    second.span.generated[2:] = third.span.generated[:] = []  # type: ignore[attr-defined]
    assert list(found.propose([first, second])[second.span])[:4] == [3, 4, 5, 6]  # type: ignore[index]
    found.finished(first.span)  # type: ignore[arg-type]
    third.span.generated += [9, 4, 5]  # type: ignore[attr-defined]
    assert list(found.propose([third])[third.span])[:2] == [6, 7]  # type: ignore[index]


@pytest.mark.usefixtures("estimates_alone")
def test_nothing_is_drafted_where_a_token_more_costs_as_much_as_it_gives() -> None:
    step = decoding(20, PROMPT[4:12])
    assert speculator(each=10.0).propose(step) == {}
    few, many = (sum(map(len, speculator(each).propose(step).values())) for each in (0.01, 0.0001))
    assert 0 < few < many <= 20 * LONGEST


@pytest.mark.usefixtures("estimates_alone")
def test_the_likeliest_drafts_are_admitted_first() -> None:
    step = decoding(4, [104, 105])
    forced = step[1].span
    found = Speculator(Prices(0.2), lambda seq: (1, 2, 3) if seq is forced else ())  # type: ignore[arg-type]
    assert found.propose(step) == {forced: [1, 2, 3]}


@pytest.mark.usefixtures("estimates_alone")
def test_costs_are_worked_out_again_only_after_some_steps_or_with_fewer_rows() -> None:
    found, step = speculator(each=10.0), decoding(20, [104, 105])
    found.propose(step)
    asked = found._costs.asked  # type: ignore[attr-defined]
    for _ in range(MAX_REST):
        found.propose(step)
    assert found._costs.asked == asked  # type: ignore[attr-defined]
    found.propose(step)
    assert found._costs.asked > asked  # type: ignore[attr-defined]
    asked = found._costs.asked  # type: ignore[attr-defined]
    found.propose(step[:10])
    assert found._costs.asked > asked  # type: ignore[attr-defined]


@pytest.mark.usefixtures("estimates_alone")
def test_drafts_that_fail_are_given_up_and_tried_again_later() -> None:
    chances, kind = Chances(), DraftKind("outputs", 4, 0, True)
    first = chances.of(kind)
    for _ in range(40):
        chances.note(kind, False)
    assert chances.of(kind) < 0.1 < chances.of(kind._replace(context=8))
    for _ in range(500):
        chances.fade()
    assert chances.of(kind) == pytest.approx(first, abs=0.01)
    for _ in range(1000):
        chances.note(kind, True)
    assert chances.of(kind) > 0.98


@pytest.mark.usefixtures("estimates_alone")
def test_chances_are_learned_up_to_the_first_wrong_token() -> None:
    found = speculator()
    (scheduled,) = decoding(1, PROMPT[4:12])
    drafts = tuple(found.propose([scheduled])[scheduled.span])  # type: ignore[index]
    kinds = [kind for _, kind in found._made[scheduled.span]]  # type: ignore[index]
    found.verified(scheduled._replace(drafts=drafts[:4]), 2)
    seen = {kind: tuple(counts) for kind, counts in found._chances._seen.items()}
    assert seen == {kinds[0]: (1, 1), kinds[1]: (1, 1), kinds[2]: (0, 1)}
    assert (found.drafted["prompt"], found.accepted["prompt"]) == (4, 2)


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "blue"]}, "count": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["kind", "count"],
}
ROWS = [{"prompt": f"The same beginning, again. {i % 4}", "n": i} for i in range(12)]


def job(folder: Path, model: Path, name: str, speculate: str, **sampling: Any) -> tuple[bytes, dict[str, Any]]:
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    report = run_job(
        JobConfig(
            inputs=source, output=folder / name, model=model, sampling={"max_tokens": 60} | sampling,
            engine=EngineConfig(speculate=speculate, debug=True),
        )
    )  # fmt: skip
    assert report.exit_code == 0
    return (folder / name).read_bytes(), dict(report.stats)


@pytest.mark.parametrize(
    "sampling",
    [{"json_schema": json.dumps(SCHEMA)}, {"temperature": 0.3, "n": 3, "logprobs": 1}, {"frequency_penalty": 0.1}],
    ids=["schema", "three samples", "greedy"],
)
def test_a_job_has_the_same_output_with_every_draft_verified(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    want, off = job(tmp_path, tiny_model_dir, "off.jsonl", "off", **sampling)
    monkeypatch.setattr(module, "ALWAYS", True)
    got, stats = job(tmp_path, tiny_model_dir, "auto.jsonl", "auto", **sampling)
    assert got == want
    assert stats["steps"] < off["steps"] or stats["mean_decode_batch"] < off["mean_decode_batch"]
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert off["drafted_tokens"] == off["accepted_tokens"] == 0
    for made in ("drafted", "accepted"):
        assert sum(of[made] for of in stats["drafts"].values()) == stats[f"{made}_tokens"]
    assert (stats["drafts"]["grammar"]["accepted"] > 0) == ("json_schema" in sampling)


def test_models_with_recurrent_states_and_steps_ahead_have_no_drafts(tiny_model_dir: Path) -> None:
    with LLM(tiny_model_dir) as auto, LLM(tiny_model_dir, engine=EngineConfig(speculate="off")) as off:
        assert isinstance(auto.engine, Engine)
        assert isinstance(off.engine, Engine)
        assert isinstance(auto.engine.scheduler.drafter, Speculator)
        assert off.engine.scheduler.drafter is None
