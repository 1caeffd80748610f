"""`--classify` gives the labels and numbers of a model's classification or reward head, equal to those of transformers."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from batchgen import LLM, PromptConfig
from support.embedders import save_classifier
from support.records import json_rows

SHARED = "All of these reviews begin with the same long sentence, and then they differ: "
PROMPTS = [f"{SHARED}{what} {i % 5}" for i, what in enumerate(("good", "bad", "fair", "odd") * 3)]
PROMPTS += ["Another one", "Another one", SHARED, "ends with padding<|pad|><|pad|>", "<|pad|>"]
LABELS = ["red", "green", "blue"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return save_classifier(tmp_path_factory.mktemp("models") / "classifier")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return save_classifier(tmp_path_factory.mktemp("models") / "reward", labels=("LABEL_0",))


def logits_of(folder, texts, *, special=True):
    """The logits [texts, labels] that transformers gives, in float64."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32")
    with torch.inference_mode():
        rows = [
            model(**tokenizer(text, return_tensors="pt", add_special_tokens=special)).logits[0].double().numpy()
            for text in texts
        ]
    return np.array(rows)


def test_rows_get_the_label_and_the_probabilities_of_the_head(cli, classifier, write_jsonl, tmp_path):
    path, stats = write_jsonl([{"prompt": p} for p in PROMPTS]), tmp_path / "stats.json"
    assert cli("run", path, "-m", classifier, "--classify", "--stats", stats, "-q").code == 0
    rows = json_rows(tmp_path / "prompts.out.jsonl")
    want = torch.tensor(logits_of(classifier, PROMPTS)).softmax(-1).numpy()
    for row, probs in zip(rows, want, strict=True):
        assert list(row["choice_probs"]) == LABELS
        assert list(row["choice_probs"].values()) == pytest.approx(probs, abs=1e-5)
        assert sum(row["choice_probs"].values()) == pytest.approx(1, abs=1e-12)
        assert (row["text"], row["finish_reason"]) == (LABELS[int(probs.argmax())], "stop")
    assert len({row["text"] for row in rows}) > 1
    figures = json.loads(stats.read_text())
    assert figures["prefill_tokens"] == figures["prefill_tokens_min"] < figures["prompt_tokens"] / 2
    assert figures["finish_reasons"]["stop"] == len(PROMPTS)


def test_a_head_with_one_number_gives_a_reward(cli, reward_model, write_jsonl, tmp_path):
    path = write_jsonl([{"prompt": p} for p in PROMPTS])
    assert cli("run", path, "-m", reward_model, "--classify", "-q").code == 0
    rows = json_rows(tmp_path / "prompts.out.jsonl")
    assert [row["reward"] for row in rows] == pytest.approx(logits_of(reward_model, PROMPTS)[:, 0], abs=1e-5)
    assert {(row["text"], row["finish_reason"]) for row in rows} == {(None, None)}
    assert "nothing to do" in cli("run", path, "-m", reward_model, "--classify").err
    write_jsonl([{"prompt": p} for p in [*PROMPTS, "One more"]])
    again = cli("run", path, "-m", reward_model, "--classify")
    assert f"1 done, {len(PROMPTS)} kept from an earlier run" in again.err
    compared = cli("run", path, "-m", reward_model, "--classify", "--expect", "prompt", "-o", tmp_path / "o.jsonl")
    assert (compared.code, "--expect compares texts, and the model's head gives rewards" in compared.err) == (2, True)


def test_multi_label_probabilities_are_independent(tmp_path):
    folder = save_classifier(tmp_path / "m", problem_type="multi_label_classification")
    with LLM(folder, task="classify") as llm:
        results = llm.classify(PROMPTS)
    want = 1 / (1 + np.exp(-logits_of(folder, PROMPTS)))
    for result, probs in zip(results, want, strict=True):
        assert list(result.choice_probs.values()) == pytest.approx(probs, abs=1e-5)
        assert result.text == LABELS[int(probs.argmax())]


def test_a_conversation_goes_through_the_chat_template(reward_model):
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    with LLM(reward_model, task="classify") as llm:
        judged, raw = llm.classify([talk, "Hello"])
    assert judged.reward == pytest.approx(logits_of(reward_model, [text], special=False)[0, 0], abs=1e-5)
    assert raw.reward == pytest.approx(logits_of(reward_model, ["Hello"])[0, 0], abs=1e-5)


def test_a_model_without_the_head_that_the_command_needs_is_refused(cli, classifier, tiny_model_dir, write_jsonl):
    path = write_jsonl([{"prompt": "a"}])
    for command in ("run", "plan"):
        plain = cli(command, path, "-m", classifier)
        assert plain.code == 1
        assert (
            "is a classifier or reward model (LlamaForSequenceClassification), not a model that writes text"
            in plain.err
        )
        assert "; classify the rows with batchgen run --classify, or in Python with task='classify'" in plain.err
        headless = cli(command, path, "-m", tiny_model_dir, "--classify")
        assert headless.code == 1
        assert "has no classification head (its architecture is LlamaForCausalLM)" in headless.err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"problem_type": "regression"}, "gives 3 numbers that are not probabilities (problem_type regression)"),
        ({"id2label": {"0": "a", "1": "a", "2": "b"}}, "two labels of the model"),
        ({"id2label": {"0": "a", "1": "b"}}, "score.weight has shape [3, 64], and the configuration says [2, 64]"),
    ],
)
def test_a_head_that_cannot_be_read_is_refused(cli, write_jsonl, tmp_path, settings, said):
    folder = save_classifier(tmp_path / "m")
    given = json.loads((folder / "config.json").read_text()) | settings
    given.pop("label2id", None)
    (folder / "config.json").write_text(json.dumps(given))
    refused = cli("run", write_jsonl([{"prompt": "a"}]), "-m", folder, "--classify")
    assert refused.code == 1
    assert said in refused.err


def test_a_head_of_another_kind_is_refused():
    from types import SimpleNamespace

    from batchgen.errors import ModelError
    from batchgen.model.heads import without_language_head
    from batchgen.parsers.heads import OutputHead

    module = SimpleNamespace(base_model=torch.nn.Identity(), score=torch.nn.Sequential(torch.nn.Linear(4, 2)))
    with pytest.raises(ModelError, match="is not one linear layer on the last token's hidden state"):
        without_language_head(module, OutputHead(task="classify", labels=("a", "b")))


def test_a_multimodal_classifier_is_refused():
    from batchgen.errors import ModelError
    from batchgen.model.heads import class_for
    from batchgen.parsers.heads import OutputHead
    from support.wrappers import config_of

    said = "^--classify is for models of text alone, and this one is multimodal; use transformers for it, or a classifier without vision and audio$"
    with pytest.raises(ModelError, match=said):
        class_for(OutputHead(task="classify", labels=("a", "b")), config_of("gemma3"))


# -- rerankers


PAGE = Path(__file__).parents[1] / "docs" / "embed-classify.md"
PAIRS = [
    {"query": q, "document": d} for q in ("capital of France", "largest city") for d in ("Paris.", "Berlin is large.")
]


def test_the_score_equals_that_of_the_model_cards(tiny_model_dir):
    template = re.search(r'^```jinja title="rerank.jinja"\n(.*?)^```$', PAGE.read_text("utf-8"), re.M | re.S)[1]
    options = PromptConfig(template=template, chat=False)
    with LLM(tiny_model_dir) as llm:
        results = llm.generate(PAIRS, {"choices": ["y", "n"]}, prompt_options=options)
        shared = llm.stats.prefill_tokens
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    yes, no = (tokenizer(text, add_special_tokens=False).input_ids[0] for text in "yn")
    texts = []
    for pair, result in zip(PAIRS, results, strict=True):
        text = template.replace("{{ query }}", pair["query"]).replace("{{ document }}", pair["document"])
        texts.append(text.removesuffix("\n"))
        assert texts[-1].endswith("</think>\n\n")
        with torch.inference_mode():
            logits = model(**tokenizer(texts[-1], return_tensors="pt")).logits[0, -1].double()
        score = torch.stack([logits[no], logits[yes]]).softmax(0)[1].item()
        assert result.choice_probs["y"] == pytest.approx(score, abs=1e-5)
    assert shared < sum(r.prompt_tokens for r in results) / 2
    assert np.ptp([r.choice_probs["y"] for r in results]) > 0
