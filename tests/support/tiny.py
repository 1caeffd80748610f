"""A tiny random Llama and requests for it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from batchgen.config import EngineConfig
from batchgen.engine.engine import Engine
from batchgen.model.adapter import prepare
from batchgen.prefix import plan_prefixes
from batchgen.prompts import LoadedTokenizer
from batchgen.request import leaves_of
from support.models import Numbers, make_requests

VOCAB = 97
BLOCK = 32
TOKEN = 256  # bytes of KV
requests_of = make_requests
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


def planned(requests):
    leaves = leaves_of(requests)
    return leaves, plan_prefixes([leaf.tokens for leaf in leaves], 16)
