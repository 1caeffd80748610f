"""Embeddings and classes equal those of transformers' own forward of one prompt, whatever the batch, the memory and the tree."""

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from batchgen.config import ModelConfig
from batchgen.model.adapter import prepare
from batchgen.model.heads import without_language_head
from batchgen.model.loader import load_model
from batchgen.parsers.heads import OutputHead
from batchgen.request import NO_TEXT
from support.models import WAYS, engine_for, kernels, make_requests, randomize, run, tiny_tokenizer
from support.params import slow_but
from support.shapes import COMMON, SHAPES, VOCAB, family_config, tree_tokens
from support.wrappers import text_model, whole_model

rng = np.random.default_rng(7)


def numbers(count):
    return rng.integers(0, VOCAB, count).tolist()


def cases():
    root = numbers(45)
    groups = [root + numbers(n) for n in (33, 20, 6)]
    prompts = [group + numbers(int(rng.integers(1, 25))) for group in groups for _ in range(3)]
    return [*prompts, groups[0], groups[0], root, root[:20], [5], [5], numbers(70)]


PROMPTS = cases()
TREE_TOKENS = tree_tokens(PROMPTS)
LABELS = ("red", "green", "blue")
LAST = OutputHead(task="embed", pooling="last", normalize=True)
MEAN = OutputHead(task="embed", pooling="mean", normalize=False)
CLASSES = OutputHead(task="classify", labels=LABELS)
ENGINES = WAYS | {
    "memory short": {"blocks": 4},
    "memory short, a step ahead": {"blocks": 5, "ahead": True},
}


@cache
def reference(name, auto, **changes):
    settings = COMMON | SHAPES[name] | {"id2label": dict(enumerate(LABELS)), "num_labels": 3} | changes
    config = family_config(name, **settings)
    torch.manual_seed(0)
    return randomize(auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval())


def packed(name, head, dtype=torch.float32, **changes):
    auto = AutoModel if head.task == "embed" else AutoModelForSequenceClassification
    module = copy.deepcopy(reference(name, auto, **changes)).to(dtype)
    return prepare(without_language_head(module, head), kernels=kernels())


def requests_of(prompts):
    return make_requests(prompts, texts=[NO_TEXT] * len(prompts))


@torch.inference_mode()
def hidden_states(model, prompt):
    return model(input_ids=torch.tensor([prompt])).last_hidden_state[0]


def embedding(model, head, prompt):
    hidden = hidden_states(model, prompt)
    vector = hidden[-1] if head.pooling == "last" else hidden.mean(0)
    return (torch.nn.functional.normalize(vector, dim=0) if head.normalize else vector).numpy()


FAMILIES = ["llama", "qwen2", "qwen3", "mistral/sliding_window", "gemma2", "phi3", "gpt2", "opt"]
RECURRENT = ["qwen3_5_text", "nemotron_h", "lfm2", "mamba2"]


@pytest.mark.parametrize(
    ("name", "head"),
    slow_but(
        [("llama", LAST), ("lfm2", MEAN)], [(name, head) for name in FAMILIES + RECURRENT for head in (LAST, MEAN)]
    ),
)
def test_an_embedding_equals_that_of_the_prompt_run_alone(name, head):
    want = [embedding(reference(name, AutoModel), head, prompt) for prompt in PROMPTS]
    model = packed(name, head)
    for how, options in ENGINES.items():
        engine = engine_for(model, head=head, **options)
        results = run(engine, requests_of(PROMPTS))
        for result, vector in zip(results, want, strict=True):
            np.testing.assert_allclose(result.embedding, vector, atol=1e-4, rtol=1e-4, err_msg=how)
            assert result.embedding.dtype == np.float32
            assert (result.text, result.finish_reason, result.completion_tokens) == (None, None, 0)
        assert engine.stats.prefill_tokens == TREE_TOKENS or "blocks" in options, how
        assert engine.stats.scored_tokens == 0


@pytest.mark.parametrize("head", [LAST, MEAN, CLASSES], ids=["last", "mean", "classes"])
def test_outputs_that_are_not_numbers_fail_only_their_own_rows(head):
    bad = VOCAB - 1
    prompts = [[*range(40), i, bad] if i % 2 else [*range(40), i, 1] for i in range(6)] + [[bad], [2, 3]]
    want = run(engine_for(packed("llama", head), head=head), requests_of(prompts))
    model = packed("llama", head)
    with torch.no_grad():
        model.module.get_input_embeddings().weight[bad] = float("nan")
    results = run(engine_for(model, head=head, batch_size=3), requests_of(prompts))
    for prompt, result, whole in zip(prompts, results, want, strict=True):
        if bad in prompt:
            said = ("numerical_error", "the model's outputs for the prompt are not numbers")
            assert (result.error_type, result.error_message) == said
        elif head is CLASSES:
            assert result.choice_probs == pytest.approx(whole.choice_probs, abs=1e-6)
        else:
            np.testing.assert_allclose(result.embedding, whole.embedding, atol=1e-6)


@pytest.mark.parametrize("name", slow_but({"llama"}, [*FAMILIES, "qwen3_5_text"]))
def test_classes_have_the_probabilities_that_transformers_gives(name):
    written = reference(name, AutoModelForSequenceClassification)
    with torch.inference_mode():
        want = [written(input_ids=torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    model = packed(name, CLASSES)
    for how, options in ENGINES.items():
        engine = engine_for(model, head=CLASSES, **options)
        results = run(engine, requests_of(PROMPTS))
        for result, logits in zip(results, want, strict=True):
            probs = logits.double().softmax(-1).tolist()
            assert list(result.choice_probs) == list(LABELS)
            assert list(result.choice_probs.values()) == pytest.approx(probs, abs=1e-5), how
            assert result.text == LABELS[int(logits.argmax())]
            assert result.finish_reason == "stop"
        assert engine.stats.prefill_tokens == TREE_TOKENS or "blocks" in options, how


@pytest.mark.parametrize("head", [LAST, MEAN], ids=["last", "mean"])
@pytest.mark.parametrize("name", slow_but({"gemma3"}, ["gemma3", "mistral3", "qwen2_5_vl"]))
def test_a_multimodal_checkpoint_embeds_text_with_its_language_model(name, head, tmp_path):
    written = text_model(name)
    written.save_pretrained(tmp_path)
    body = whole_model(written).base_model
    want = [embedding(body, head, prompt) for prompt in PROMPTS]
    tokenizer = replace(tiny_tokenizer(), hf_config=AutoConfig.from_pretrained(tmp_path), head=head)
    model = load_model(ModelConfig(model=str(tmp_path), device="cpu", dtype="float32", embed=True), tokenizer)
    for result, vector in zip(run(engine_for(model, head=head), requests_of(PROMPTS)), want, strict=True):
        np.testing.assert_allclose(result.embedding, vector, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", [LAST, MEAN], ids=["last", "mean"])
def test_a_later_window_reuses_the_prefixes_of_an_earlier_one(head):
    root = numbers(64)
    windows = [[root + numbers(n) for n in (5, 9, 30)] for _ in range(3)]
    engine = engine_for(packed("llama", head), head=head)
    for window in windows:
        for result, prompt in zip(run(engine, requests_of(window)), window, strict=True):
            vector = embedding(reference("llama", AutoModel), head, prompt)
            np.testing.assert_allclose(result.embedding, vector, atol=1e-4, rtol=1e-4)
    assert engine.stats.prefill_tokens == 64 + 3 * (5 + 9 + 30)
    assert all(node.source is None for node in engine.block_manager.cached)
