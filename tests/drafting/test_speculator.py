"""Drafts are admitted where they make tokens come faster, best first, and results do not depend on that."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen import EngineConfig, JobConfig, ModelConfig, run_job
from batchgen.drafting.guesses import LONGEST, Chances, DraftKind, DraftToken
from batchgen.drafting.payoff import MAX_REST, MEASURED_FIRST, REMEMBERED, Payoff
from batchgen.drafting.speculator import Speculator
from batchgen.request import leaves_of
from batchgen.scheduling.batch import StepSize
from batchgen.scheduling.sequence import GenerationSequence, State
from support.drafters import EveryDraft
from support.models import build
from support.params import slow_but
from support.requests import request
from support.tiny_model import EOS_ID, save_tiny_tokenizer

PROMPT = [*range(100, 130)]
KIND = DraftKind("outputs", 4, 0, True)


class Prices:
    """Costs of steps: `each` seconds a token, `pair` seconds a pair of query and key, and a second for each step."""

    known = True

    def __init__(self, each: float, pair: float = 0.0) -> None:
        self.each, self.pair = each, pair

    def seconds(self, size: StepSize) -> float:
        return 1 + self.each * size.tokens + self.pair * size.pairs


def decoding(count: int, generated: list[int], max_tokens: int = 100) -> list[GenerationSequence]:
    """Sequences with the same prompt that have written the same tokens."""
    leaves = leaves_of(request(row, PROMPT, max_tokens) for row in range(count))
    return [
        GenerationSequence(
            window=0, place=(i, 1), parent=None, start=0, table=[], computed=len(PROMPT) + len(generated) - 1, leaf=leaf,
            index=i, stops=None, generated=list(generated), state=State.DECODING,
        )
        for i, leaf in enumerate(leaves)
    ]  # fmt: skip


def speculator(each: float = 0.001, forced: tuple[int, ...] = (), rows: int = 0, **payoff: Any) -> Speculator:
    """A speculator that knows from steps of `rows` sequences that steps cost what is estimated."""
    prices = Prices(each)
    found = Speculator(lambda _: forced, Payoff(prices, **payoff))  # type: ignore[arg-type]
    plain(found, rows, prices.seconds(size(rows)))
    return found


def size(rows: int, drafts: int = 0) -> StepSize:
    return StepSize(rows + drafts, rows + drafts, 0, 0)


def plain(found: Speculator, rows: int, seconds: float) -> None:
    """Runs as many steps of so many sequences as there are before drafts."""
    for _ in range(MEASURED_FIRST if rows else 0):
        found.propose(decoding(rows, [1, 2]), alone=True)
        found.ran(size(rows), seconds)


def proposed(found: Speculator, sequences: list[GenerationSequence]) -> list[list[int]]:
    drafts = found.propose(sequences, alone=True)
    return [list(drafts.get(seq, ())) for seq in sequences]


def step_of(found: Speculator, step: list[GenerationSequence], plain: float, each: float, right: bool = True) -> int:
    """Runs a step that takes `plain` seconds and `each` for every draft token. All of these are right, or none. Returns their number."""
    drafts = proposed(found, step)
    for seq, draft in zip(step, drafts, strict=True):
        if draft:
            found.verified(seq, len(draft), right * len(draft))
    count = sum(map(len, drafts))
    found.ran(size(len(step), count), plain + each * count)
    return count


def test_a_completion_that_copies_its_prompt_is_drafted_from_it():
    assert [d[:5] for d in proposed(speculator(rows=2), decoding(2, PROMPT[4:12]))] == [PROMPT[12:17]] * 2


@pytest.mark.parametrize(("max_tokens", "drafts"), [(5, [106, 107]), (3, [])])
def test_a_draft_is_no_longer_than_the_completion_may_become(max_tokens, drafts):
    assert proposed(speculator(rows=1), decoding(1, [104, 105], max_tokens)) == [drafts]


def test_text_that_a_grammar_forces_comes_before_everything_else():
    assert proposed(speculator(forced=(1, 2, 107), rows=1), decoding(1, [104, 105]))[0][:3] == [1, 2, 107]


def test_rows_are_drafted_from_what_others_have_written_and_from_finished_ones():
    found = speculator(rows=2)
    first, second, third = decoding(3, [1, 2, 3, 4, 5, 6, 7])
    second.generated[2:] = third.generated[:] = []
    assert proposed(found, [first, second])[1][:4] == [3, 4, 5, 6]
    first.generated += [8, 9]
    found.finished(first)
    third.generated += [9, 6, 7]
    assert proposed(found, [third])[0][:2] == [8, 9]


@pytest.mark.parametrize(("group", "draft"), [(0, 3), (1, 4), (2, 4)])
def test_rows_are_drafted_from_those_below_the_same_node_before_others(group, draft):
    rows = decoding(3, [1, 2])
    for seq, node, tokens in zip(rows, (0, 1, group), ([3], [4], []), strict=True):
        seq.parent = SimpleNamespace(node=SimpleNamespace(index=node))  # type: ignore[assignment]
        seq.generated += tokens
    found = speculator(rows=3)
    assert proposed(found, rows)[2] == [draft]
    found.verified(rows[2], 1, 1)
    assert found.accepted == {"outputs": 1}


def test_nothing_is_drafted_where_a_token_more_costs_as_much_as_it_gives():
    step = decoding(20, PROMPT[4:12])
    none, few, many = (sum(map(len, proposed(speculator(each, rows=20), step))) for each in (10.0, 0.01, 0.0001))
    assert none == 0 < few < many <= 20 * LONGEST


@pytest.mark.parametrize(("pair", "pays"), [(0.0001, True), (1.0, False)])
def test_a_draft_token_has_the_price_of_the_keys_that_it_reads(pair, pays):
    payoff, step = Payoff(Prices(0.0, pair)), decoding(8, [1, 2])  # type: ignore[arg-type]
    keys = sum(seq.end for seq in step)
    load = StepSize(8, 8, keys, keys)
    assert payoff.is_possible(load) == pays
    assert bool(payoff.admitted(load, 0.0, {step[0]: [DraftToken(3, KIND, 0.9)]})) == pays


def test_the_likeliest_drafts_are_admitted_first():
    step, prices = decoding(4, [104, 105]), Prices(0.2)
    found = Speculator(lambda seq: (1, 2, 3) if seq is step[1] else (), Payoff(prices))  # type: ignore[arg-type]
    plain(found, 4, prices.seconds(size(4)))
    assert proposed(found, step) == [[], [1, 2, 3], [], []]


def test_what_steps_really_take_is_measured_first_in_steps_without_drafts():
    found, step = speculator(), decoding(4, PROMPT[4:12])
    for _ in range(3):
        assert found.propose(step, alone=False)  # what else the step runs would hide what drafts add
        found.ran(size(4), 9.0)
    for drafted in (*[False] * MEASURED_FIRST, True, True):
        assert any(proposed(found, step)) == drafted
        found.ran(size(4, 2 * drafted), 1.0)


def test_drafts_that_cost_more_than_estimated_become_fewer_and_rest_until_that_is_forgotten():
    """Draft tokens cost eight times as much as estimated, and more than they give."""
    found, step = speculator(0.03, rows=8), decoding(8, PROMPT[4:12])
    counts = [step_of(found, step, 1.24, 0.25) for _ in range(10 * MAX_REST)]
    first, later = counts[:REMEMBERED], counts[REMEMBERED:]
    assert first[0] > 40
    assert 0 < sum(later) < len(later) / 2


def test_drafts_go_on_where_they_cost_what_is_estimated():
    found, step = speculator(0.01, rows=8), decoding(8, PROMPT[4:12])
    assert min(step_of(found, step, 1.08, 0.01) for _ in range(30)) > 20
    few = decoding(8, PROMPT[4:12], max_tokens=11)
    assert {step_of(found, few, 1.08, 0.01) for _ in range(30)} == {16}


def test_drafts_that_all_fail_together_stop_before_each_kind_is_known_to_fail():
    found, step = speculator(0.05, rows=8, forced=tuple(range(LONGEST))), decoding(8, PROMPT[4:12])
    counts = [step_of(found, step, 1.4, 0.05, right=False) for _ in range(40)]
    assert counts[0] > 40
    assert not any(counts[4:])


def test_tokens_that_run_again_after_a_wrong_draft_have_their_price():
    step = decoding(8, PROMPT[4:12])
    without, again = (
        sum(map(len, proposed(speculator(0.02, rows=8, replays=replays), step))) for replays in (False, True)
    )
    assert 0 < again < without


def test_drafts_that_fail_are_given_up_and_tried_again_later():
    chances = Chances()
    first = chances.of(KIND)
    for _ in range(40):
        chances.note(KIND, False)
    assert chances.of(KIND) < 0.1 < chances.of(KIND._replace(context=8))
    for _ in range(500):
        chances.fade()
    assert chances.of(KIND) == pytest.approx(first, abs=0.01)
    for _ in range(1000):
        chances.note(KIND, True)
    assert chances.of(KIND) > 0.98


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "blue"]},
        "note": {"type": "string", "maxLength": 4},
        "count": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["kind", "note", "count"],
}
ROWS = [{"prompt": f"The same beginning, again. {i % 4}", "n": i} for i in range(12)]


JOBS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "schema": ("llama", {}, {"json_schema": json.dumps(SCHEMA)}),
    "three samples": ("llama", {}, {"temperature": 0.3, "n": 3, "logprobs": 1}),
    "greedy": ("llama", {}, {"frequency_penalty": 0.1}),
    "int8": ("llama", {"quantize": "int8"}, {"temperature": 0.3, "seed": 4}),
    "stop strings": ("llama", {}, {"stop": ["a", "e"]}),
    "recurrent layers": ("qwen3_5_text", {}, {"temperature": 0.3, "n": 3}),
    "recurrent layers, schema": ("qwen3_5_text", {}, {"json_schema": json.dumps(SCHEMA), "temperature": 0.5}),
}
"""By name: the model, its options, and the sampling parameters."""


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    recurrent = tmp_path_factory.mktemp("models") / "recurrent"
    build("qwen3_5_text", vocab_size=260, eos_token_id=EOS_ID).save_pretrained(recurrent)
    save_tiny_tokenizer(recurrent, chat=False)
    return {"llama": tiny_model_dir, "qwen3_5_text": recurrent}


def job(output: Path, model: ModelConfig, speculate: str, sampling: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    source = output.parent / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    engine = EngineConfig(speculate=speculate, debug=True, kv_memory="64MiB")
    report = run_job(
        JobConfig(inputs=source, output=output, model=model, sampling={"max_tokens": 60} | sampling, engine=engine)
    )
    assert report.exit_code == 0
    return output.read_bytes(), dict(report.stats)


@pytest.mark.parametrize("name", slow_but({"schema", "three samples", "recurrent layers"}, JOBS))
def test_a_job_has_the_same_output_with_every_draft_verified(tmp_path, models, name, monkeypatch):
    model, options, sampling = JOBS[name]
    config = ModelConfig(model=str(models[model]), dtype="float32", **options)
    want, off = job(tmp_path / "off.jsonl", config, "off", sampling)
    monkeypatch.setattr("batchgen.engine.engine.Payoff", EveryDraft)
    got, stats = job(tmp_path / "auto.jsonl", config, "auto", sampling)
    assert got == want
    assert stats["steps"] < off["steps"] or stats["mean_decode_batch"] < off["mean_decode_batch"]
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert off["drafted_tokens"] == off["accepted_tokens"] == 0
    for made in ("drafted", "accepted"):
        assert sum(of[made] for of in stats["drafts"].values()) == stats[f"{made}_tokens"]
    assert (stats["drafts"]["grammar"]["accepted"] > 0) == ("json_schema" in sampling)
