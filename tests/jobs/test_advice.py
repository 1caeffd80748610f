"""Advice names the change that would save the most prompt tokens of the job's own rows, and what it saves."""

import time
from pathlib import Path

import numpy as np
import pytest

from batchgen import JobConfig, ModelConfig, SamplingParams, plan_job, run_job
from batchgen.config import PromptConfig
from batchgen.errors import OutputError
from batchgen.jobs.order.advice import Advice, advise, best_order
from support.progress import Recorder, interrupt
from support.records import json_rows

pytestmark = pytest.mark.usefixtures("loaded_once")

INSTRUCTION = "Say whether the review is good or bad, and be strict about it. " * 4
ROWS = [{"review": f"{i * 7919 % 1000} words of review {i}", "product": f"product {i % 3} and its long text", "page": f"{INSTRUCTION} page {i}"} for i in range(40)]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "best"),
    [
        ("{{review}}\n\n" + INSTRUCTION, INSTRUCTION + "\n\n{{review}}"),
        ("{{review}}\n" + INSTRUCTION, INSTRUCTION + "\n{{review}}"),
        ("{{review}}\n\n{{product}}\n\n" + INSTRUCTION, INSTRUCTION + "\n\n{{product}}\n\n{{review}}"),
        ("{{review}}\n\n" + INSTRUCTION + "\n\nAnswer:\n", INSTRUCTION + "\n\n{{review}}\n\nAnswer:"),
        (INSTRUCTION + "\n\n{{product}}\n\n{{review}}", INSTRUCTION + "\n\n{{product}}\n\n{{review}}"),
        ("Review: {{review}}\n\nProduct: {{product}}", "Product: {{product}}\n\nReview: {{review}}"),
        ("{{review}}\n\n{{page}}", "{{page}}\n\n{{review}}"),  # pages are all different, but begin with the same text
        (
            "{{review}}\n\n" + "\n\n".join(f"Rule {i}" for i in range(8)),  # the last one stays last, as a cue does
            "\n\n".join(f"Rule {i}" for i in range(7)) + "\n\n{{review}}\n\nRule 7",
        ),
        ("{% for x in review %}{{x}}{% endfor %}\n\n" + INSTRUCTION, None),
        ("Review: {{review}}", None),
        ("{{missing}}\n\n" + INSTRUCTION, None),
    ],
)  # fmt: skip
def test_parts_that_are_equal_in_more_rows_come_first_and_the_cue_stays_last(template, best):
    assert best_order(template, ROWS) == best


def advice_on(texts, template=None, better=None):
    """`better`: the texts with any other template. Each character is a token."""
    as_tokens = lambda texts: [np.array([ord(c) for c in text], dtype=np.int64) for text in texts]  # noqa: E731
    return advise(
        template,
        ROWS,
        lambda other: as_tokens(texts if other is None else better),
        lambda ids: "".join(map(chr, ids)),
    )


def test_a_template_in_another_order_is_compared_by_the_tokens_of_whole_prompts():
    template = "{{review}}\n\n" + INSTRUCTION
    now = [row["review"] + "\n\n" + INSTRUCTION for row in ROWS]
    found = advice_on(now, template, [INSTRUCTION + "\n\n" + row["review"] for row in ROWS])
    assert (found.kind, found.template) == ("template", INSTRUCTION + "\n\n{{review}}")
    assert found.prefill_tokens > 38 * len(INSTRUCTION)
    assert found.prefill_tokens_after < len(INSTRUCTION) + sum(len(row["review"]) for row in ROWS) + 2
    assert found.prompt_tokens == sum(map(len, now))


def test_what_differs_before_common_text_is_shown():
    stamps = [f"2026-11-{i % 9} {i * 7919 % 10007}" for i in range(40)]
    texts = [f"[{stamp}] {INSTRUCTION}" for stamp in stamps]
    found = advice_on(texts)
    assert (found.kind, found.rows, found.template) == ("placement", 40, None)
    assert found.prefill_tokens_after < 2 * len(INSTRUCTION) + 40 * 20 < found.prefill_tokens
    excerpt = found.text.split("“")[1].split("…")[0]
    assert any(excerpt in text for text in texts)


@pytest.mark.parametrize(
    "texts",
    [
        [INSTRUCTION + row["review"] for row in ROWS],  # shared already
        [str(7**50 * i * i) for i in range(40)],  # nothing in common
        [INSTRUCTION],
        [],
    ],
)
def test_there_is_no_advice_where_nothing_would_be_saved(texts):
    assert advice_on(texts, None) is None


def plan(model, source, template, **options):
    return plan_job(JobConfig(inputs=(str(source),), model=ModelConfig(model=str(model)), prompts=PromptConfig(template=template)), **options)  # fmt: skip


def test_a_plan_writes_the_template_that_saves_what_it_says(tiny_model_dir, write_jsonl, tmp_path):
    source, best = write_jsonl(ROWS), tmp_path / "best.jinja"
    first = plan(tiny_model_dir, source, "{{review}}\n\n" + INSTRUCTION, write_template=str(best))
    again = plan(tiny_model_dir, source, best.read_text())
    assert first.advice.prefill_tokens == first.figures["prefill_tokens_min"]
    assert (
        first.advice.prefill_tokens_after
        == again.figures["prefill_tokens_min"]
        < first.figures["prefill_tokens_min"] / 5
    )
    assert again.advice is None
    assert first.as_dict()["advice"]["template"] == best.read_text()
    if Path("/dev/full").exists():
        with pytest.raises(
            OutputError, match=r"^--write-template /dev/full cannot be written: No space left on device"
        ):
            plan(tiny_model_dir, source, "{{review}}\n\n" + INSTRUCTION, write_template="/dev/full")


def test_no_template_is_written_where_none_is_better(tiny_model_dir, write_jsonl, tmp_path):
    source, best = write_jsonl(ROWS), tmp_path / "best.jinja"
    plan(tiny_model_dir, source, INSTRUCTION + "\n\n{{review}}", write_template=str(best))
    assert not best.exists()


@pytest.fixture
def shares_little(tiny_chat_model_dir, tmp_path, write_jsonl):
    """A job that advice is sought for."""
    source = write_jsonl([{"review": f"{i * 7919 % 1000}"} for i in range(256)])
    return JobConfig(
        inputs=(str(source),),
        output=str(tmp_path / "o.jsonl"),
        model=ModelConfig(model=str(tiny_chat_model_dir)),
        prompts=PromptConfig(template="{{review}}\n\n" + INSTRUCTION),
        sampling=SamplingParams(max_tokens=1),
    )


def test_a_run_that_shares_little_ends_with_the_advice(shares_little):
    notes = Recorder()
    run_job(shares_little, notes)
    assert [note for note in notes.notes if "in another order" in note] != []


def test_a_signal_after_the_last_row_ends_the_search_for_advice_and_the_job_is_finished(shares_little, monkeypatch):
    def advise_late(*_):
        interrupt()
        time.sleep(0)  # let Python run the handler
        return Advice("placement", "too late", 256, 1, 1, 1)

    monkeypatch.setattr("batchgen.jobs.order.advice.advise", advise_late)
    notes = Recorder()
    report = run_job(shares_little, notes)
    assert (report.exit_code, len(json_rows(shares_little.output))) == (0, 256)
    assert "too late" not in notes.notes
