"""The context ends where a row's positions or attention would begin to depend on the other rows of a batch."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from transformers import CONFIG_MAPPING

from batchgen.config import JobConfig, ModelConfig
from batchgen.dry_run import plan_job
from batchgen.model.architectures import context_note
from batchgen.prompts import load_tokenizer
from support.progress import Recorder

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

PHI3 = {"model_type": "phi3", "hidden_size": 64, "num_attention_heads": 4, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"rope_parameters": LONGROPE | {"original_max_position_embeddings": 48}}, 48),
        (PHI3 | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 40}, 40),
        ({"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64}}, 64),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, 64),
    ],
)
def test_the_context_ends_before_positions_depend_on_the_batch(tools, tmp_path, config, length):
    folder = tools.save_model(tmp_path, config=config)
    assert load_tokenizer(ModelConfig(model=str(folder))).context_length == length


QSA = {"indexer_n_heads": 1, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_compress_ratio": 4}
BLOCKS = {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2, "index_block_size": 16}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deepseek_v32", "index_topk": 96},
        {"model_type": "minimax_m3_vl_text", "index_topk_blocks": 6} | BLOCKS,
        {"model_type": "qwen4_exp_text", "indexer_budget": 96, "head_dim": 64} | QSA,
    ],
    ids=lambda config: config["model_type"],
)
def test_an_indexer_ends_the_context_where_it_begins_to_leave_out_keys(tools, tmp_path, config):
    if config["model_type"] not in CONFIG_MAPPING:
        pytest.skip("the installed transformers does not have it")
    config = config | {"max_position_embeddings": 512}
    tokenizer = load_tokenizer(ModelConfig(model=tools.save_model(tmp_path, config=config)))
    assert tokenizer.context_length == 96
    assert context_note(tokenizer.hf_config) == (
        "the context ends at 96 tokens: beyond that the model's indexer chooses which keys a query sees"
    )


def test_the_user_is_told_that_longrope_ends_the_context(tools, tmp_path):
    config = PHI3 | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 40, "max_position_embeddings": 512}
    tokenizer = load_tokenizer(ModelConfig(model=tools.save_model(tmp_path, config=config)))
    said = "the context ends at 40 tokens: beyond that LongRoPE changes the positions of all rows that run together"
    assert context_note(tokenizer.hf_config) == said
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a" * 50}))
    told = Recorder()
    job = JobConfig(inputs=(str(tmp_path / "rows.jsonl"),), model=ModelConfig(model=str(tmp_path)))
    assert plan_job(job, told).rows_failed == 1
    assert said in told.notes


def test_the_user_is_told_that_chunked_attention_ends_the_context(tools, tmp_path):
    config = {"model_type": "llama4_text", "attention_chunk_size": 40, "max_position_embeddings": 512}
    tokenizer = load_tokenizer(ModelConfig(model=tools.save_model(tmp_path, config=config)))
    assert tokenizer.context_length == 40
    assert context_note(tokenizer.hf_config) == (
        "the context ends at 40 tokens: beyond that some layers see only a chunk of the text"
    )


def test_an_indexer_without_a_budget_does_not_end_the_context():
    config = SimpleNamespace(model_type="qwen4_exp_text", max_position_embeddings=512, indexer_budget=None)
    assert context_note(config) is None
