"""A tiny random Llama and requests for it."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from batchgen.config import EngineConfig
from batchgen.engine.engine import Engine
from batchgen.model.adapter import prepare
from batchgen.prompts import LoadedTokenizer
from batchgen.request import Request
from batchgen.sampling_params import SamplingParams
from support.fakes import planned
from support.models import Numbers

VOCAB = 97
BLOCK = 32
TOKEN = 256  # bytes of KV
AHEAD = None
"""Whether engines launch a step before the tokens of the previous one are known. None is the default of the device."""


def build(poison=None, layers=2):
    """A random Llama. The embedding of the token `poison` is NaN."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.1, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).float().eval()
    if poison is not None:
        module.model.embed_tokens.weight.data[poison] = float("nan")
    return prepare(module)


def engine_of(model, eos=(), blocks=None, **config):
    tokenizer = LoadedTokenizer(
        hf_tokenizer=Numbers(), hf_config=None, context_length=2048, eos_token_ids=eos, vocab_size=VOCAB
    )
    options = {
        "kv_memory": f"{blocks * BLOCK * TOKEN}B" if blocks else "64MiB",
        "debug": True,
        "speculate": "off",
    } | config
    engine = Engine(model, tokenizer, EngineConfig(**options))
    if AHEAD is not None:
        engine.loop.ahead = AHEAD
    return engine


def run(engine, requests, stop=None):
    """Runs requests. Returns the results by row, and checks that each row has one."""
    results = {}

    def on_result(result):
        assert result.row not in results
        results[result.row] = result

    engine.add(*planned(requests), on_result)
    engine.run(stop)
    return results


def mixed_requests(rng, count):
    """Requests of all kinds under shared prefixes, some of which end at a node; texts to score and labels among them."""
    group = [rng.randrange(VOCAB) for _ in range(24)]
    kinds = [
        {},
        {"temperature": 1.0, "seed": rng.randrange(9), "logprobs": 0},
        {"temperature": 1.4, "top_k": 20, "repetition_penalty": 1.3},
        {"frequency_penalty": 0.6, "presence_penalty": 0.2, "logprobs": 2},
        {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02, "n": 3, "logprobs": 0},
        {"ignore_eos": True},
        {"stop": (f" {rng.randrange(VOCAB)} ", f"{rng.randrange(VOCAB)} {rng.randrange(VOCAB)}")},
        {"stop_token_ids": tuple(rng.randrange(VOCAB) for _ in range(6))},
        {"choices": ("a", "b"), "temperature": rng.choice([0, 1.0])},
        {"choices": ("a",)},
    ]
    requests = []
    for row in range(count):
        prompt = group[: rng.choice([0, 9, 24])] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))] or [1]
        params = dict(kinds[(row + count) % len(kinds)])
        texts = [
            np.array([rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))], dtype=np.int32)
            for _ in params.get("choices", ())
        ]
        if len(texts) == 1:
            del params["choices"]  # a text to score
        most = rng.randint(1, 24)
        requests.append(
            Request(
                row=row, tokens=np.array(prompt, dtype=np.int32), params=SamplingParams(max_tokens=most, **params), max_tokens=most,
                key=rng.randbytes(16), texts=tuple(texts), priority=rng.choice([0.0, 0.0, 1.0]),
            )
        )  # fmt: skip
    return requests


def rounded(results):
    """Returns results by row that can be compared: log-probabilities depend a little on what else is in the batch."""

    def completion(c):
        logprobs = [(t.token, pytest.approx(t.logprob, abs=1e-4)) for t in c.logprobs or ()]
        return c.token_ids, c.text, c.finish_reason, logprobs

    found = {}
    for row, r in results.items():
        probs = {text: pytest.approx(p, abs=1e-4) for text, p in (r.choice_probs or {}).items()}
        score = r.score and pytest.approx(r.score.logprob, abs=1e-4)
        completions = [completion(c) for c in r.completions]
        found[row] = (r.text, r.token_ids, r.finish_reason, r.error_type, completions, probs, score)
    return found
