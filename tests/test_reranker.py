"""The recipe of docs/embed-classify.md for rerankers that answer yes or no: the score is the probability of yes against no."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchgen import LLM, PromptConfig

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
