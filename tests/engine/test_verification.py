"""Steps that verify drafts, right and wrong ones, give the results of steps without drafts."""

import json
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from batchgen import LLM, EngineConfig, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.executor import StepExecutor
from batchgen.result import Result
from support.drafters import ForcedDrafter, known
from support.models import engine_for, kernels, make_requests, plain_llama, token_ids
from support.models import run as run_requests
from support.params import slow_but
from support.shapes import VOCAB
from support.tiny_model import THINKING_TEMPLATE, save_tiny_llama
from support.wanted import watch_columns

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
}
CASES = {
    "greedy": SamplingParams(max_tokens=40),
    "greedy, to the end token": SamplingParams(max_tokens=200, temperature=1.3, stop_token_ids=tuple(range(0, 250, 9))),
    "sampled": SamplingParams(max_tokens=40, temperature=0.7, seed=3, top_p=0.9),
    "top-k, three choices, logprobs": SamplingParams(max_tokens=12, temperature=1.0, top_k=9, n=3, logprobs=4),
    "penalties": SamplingParams(
        max_tokens=40, temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.6, min_p=0.01
    ),
    "greedy penalties, logprobs": SamplingParams(max_tokens=40, frequency_penalty=0.8, presence_penalty=0.1, logprobs=0),
    "schema": SamplingParams(max_tokens=120, json_schema=json.dumps(SCHEMA)),
    "schema, sampled, penalties": SamplingParams(
        max_tokens=120, temperature=1.0, json_schema=json.dumps(SCHEMA), frequency_penalty=0.3, n=2, logprobs=1
    ),
    "schema with spaces, cut": SamplingParams(
        max_tokens=25, temperature=1.0, json_schema=json.dumps(SCHEMA), json_whitespace=True
    ),
    "regex": SamplingParams(max_tokens=60, temperature=1.2, regex=r"[a-c]{3,9}(yes|no)\.[0-9]*"),
    "regex that cannot go on": SamplingParams(max_tokens=60, temperature=1.0, regex="(yes|no|maybe)"),
    "stop strings": SamplingParams(max_tokens=150, temperature=1.5, stop=("a", "7", "é", "q.")),
    "regex with a stop token": SamplingParams(max_tokens=60, temperature=1.0, regex="[ab]*", stop_token_ids=(99,)),
    "repetition": SamplingParams(max_tokens=150, max_repeats=3),
    "ignored end token": SamplingParams(max_tokens=30, temperature=1.6, ignore_eos=True, logprobs=2),
    "one token": SamplingParams(max_tokens=1, temperature=1.0),
    "budget of thoughts": SamplingParams(max_tokens=60, temperature=1.0, reasoning_budget=7),
    "budget of thoughts, schema": SamplingParams(
        max_tokens=160, temperature=1.0, reasoning_budget=5, json_schema=json.dumps(SCHEMA)
    ),
    "thoughts as text, regex": SamplingParams(max_tokens=40, temperature=1.0, reasoning="off", regex="[ab]{4,30}"),
}  # fmt: skip
PROMPTS = ["The same beginning. ", "The same beginning. And more"]


def run(
    model: Path,
    drafter: Callable[[Engine], Any] = lambda engine: None,
    cases: Mapping[str, SamplingParams] = CASES,
    **engine: Any,
) -> list[Result]:
    with LLM(model, engine=EngineConfig(kv_memory="16MiB", debug=True, speculate="off", **engine)) as llm:
        assert isinstance(llm.engine, Engine)
        llm.engine.scheduler.drafter = drafter(llm.engine)
        pairs = [(prompt, params) for params in cases.values() for prompt in PROMPTS]
        return llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs])


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    chat = THINKING_TEMPLATE if request.param == "thinking" else False
    return save_tiny_llama(tmp_path_factory.mktemp("models") / request.param, chat=chat)


@pytest.fixture(scope="module")
def without(model: Path) -> list[Result]:
    results = run(model)
    assert any(result.reasoning for result in results) == (model.name == "thinking")
    return results


# Of drafts that are right as often as 0.7, some are accepted whole, some in part and some not at all.
QUICK = [("plain", 1.0), ("thinking", 0.7)]


@pytest.mark.parametrize(
    ("model", "right"),
    slow_but(QUICK, product(["plain", "thinking"], [1.0, 0.7, 0.0])),
    indirect=["model"],
    scope="module",
)
def test_every_kind_of_row_has_the_same_result(model, without, right):
    drafters = []

    def drafter(engine: Engine) -> ForcedDrafter:
        results = {result.row: result for result in without}
        drafters.append(ForcedDrafter(known(results), range(engine.sampler._vocab_size), right, longest=9))
        return drafters[-1]

    batch_size, tokens = (5, 17) if right == 0.7 else (64, 4096)
    assert run(model, drafter, batch_size=batch_size, max_batch_tokens=tokens) == without
    assert drafters[0].drafted > 1000
    share = drafters[0].accepted / drafters[0].drafted
    assert share > 0.9 if right == 1 else 0.05 < share < 0.9 if right else share < 0.05


@pytest.fixture
def model_of_1500(tmp_path: Path) -> Path:
    """A model with so many tokens that grammars save logits."""
    return save_tiny_llama(tmp_path, vocab_size=1500)


def test_logits_that_grammars_save_change_no_result(model_of_1500, monkeypatch):
    cases = {name: params for name, params in CASES.items() if params.constrained}
    calls = watch_columns(monkeypatch)
    got = run(model_of_1500, cases=cases)
    assert len(calls) > 20 or kernels() is None
    monkeypatch.setattr(StepExecutor, "_wanted", lambda executor, batch: None)
    assert run(model_of_1500, cases=cases) == got


def test_a_step_may_compute_no_logits_while_grammars_limit_those_that_a_prefix_node_keeps(model_of_1500):
    """The first of two completions of a prompt samples from its node's logits while the step runs a part of the next prompt."""
    cases = {"regex": SamplingParams(max_tokens=9, temperature=1.0, regex="[ab]{4,8}", n=2)}
    assert run(model_of_1500, cases=cases, max_prefill_tokens=4) == run(model_of_1500, cases=cases)


def test_drafts_without_numbers_leave_no_trace():
    """A draft whose keys are NaN lies in a block that the row's next tokens are written to."""
    bad, prompts, lengths = 90, [[*range(20), i] for i in range(5)], [40] * 5
    model = plain_llama(poison=bad)
    want = run_requests(engine_for(model), make_requests(prompts, lengths))
    engine = engine_for(model)
    engine.scheduler.drafter = drafter = ForcedDrafter(known(dict(enumerate(want))), [bad], 0.5)
    got = run_requests(engine, make_requests(prompts, lengths))
    assert token_ids(got) == token_ids(want)
    assert 0 < drafter.accepted < drafter.drafted


def test_a_step_gives_one_token_and_one_more_for_each_right_draft():
    requests = make_requests([[1, 2, 3]], [10])
    want = run_requests(engine_for(plain_llama()), requests)

    class Three:
        """Drafts three tokens, of which the last is wrong."""

        def propose(self, decoding: Any, alone: bool) -> Any:
            seq = decoding[0]
            assert alone
            right = known(dict(enumerate(want)))(seq)[:2]
            return {seq: [*right, (right[-1] + 1) % VOCAB]} if seq.generated and len(right) == 2 else {}

        def verified(self, seq: Any, drafted: int, accepted: int) -> None:
            taken.append((drafted, accepted))

        def finished(self, seq: Any) -> None:
            taken.append(len(seq.generated))

    taken: list[Any] = []
    engine = engine_for(plain_llama())
    engine.scheduler.drafter = Three()
    assert run_requests(engine, requests)[0].token_ids == want[0].token_ids
    # The prompt gives one token, and then three steps three each. In the last one, the fourth token would be too many.
    assert taken == [(3, 2), (3, 2), 10, (2, 2)]
    assert (engine.stats.steps, engine.stats.decode_sequences, engine.stats.completion_tokens) == (4, 4, 10)
