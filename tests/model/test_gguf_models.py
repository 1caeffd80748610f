"""Models of GGUF files have the settings and weights of the originals, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batchgen import LLM
from batchgen.config import ModelConfig, PromptConfig
from batchgen.errors import ModelError
from batchgen.kernels.codes import PackedTensor
from batchgen.model.loader import load_model
from batchgen.prompts import load_tokenizer
from support.gguf import write_whole_model

pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore")  # libraries warn of each other
COMMON = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.2, "rms_norm_eps": 0.01, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 24.0, "beta_slow": 2.0,
}  # fmt: skip
YARN_KEYS = {
    "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16, "rope__scaling__yarn_beta_fast": 24.0,
    "rope__scaling__yarn_beta_slow": 2.0,
}  # fmt: skip
HEADS = {"attention__key_length": 16, "attention__value_length": 16}
ROUTERS = ("router.weight", "gate.weight")
IDS = [3, 40, 5, 77, 9, 12, 64, 3, 40, 5]
CASES = [
    ("llama", {"attention_bias": True, "mlp_bias": True}, "llama", {}),
    ("qwen3", {"head_dim": 24}, "qwen3", {"attention__key_length": 24, "attention__value_length": 24}),
    (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "tie_word_embeddings": True},
        "gemma2",
        {"attention__key_length": 16, "attention__value_length": 16, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    ),
    (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        "qwen2moe",
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 5, "rope_parameters": YARN | {"truncate": False}},
        "gpt-oss",
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64, "attention__sliding_window": 5, **HEADS, **YARN_KEYS},
    ),
]  # fmt: skip


def original(model_type: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **COMMON | settings)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1 or "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize(("model_type", "settings", "architecture", "keys"), CASES)
@torch.inference_mode()
def test_log_probabilities_are_those_of_the_original(tmp_path, model_type, settings, architecture, keys):
    module = original(model_type, **settings)
    file = write_whole_model(module, tmp_path / "m.gguf", architecture, **keys)
    expected = module(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])
    assert log_probabilities(file) == pytest.approx(expected[:, 0].tolist(), abs=1e-5)


@pytest.mark.parametrize(("architecture", "kind"), [("gpt-oss", "MXFP4")])
@torch.inference_mode()
def test_weights_stay_packed_and_give_what_their_numbers_give(tmp_path, monkeypatch, architecture, kind):
    monkeypatch.setattr("batchgen.model.loader.free_memory", lambda _: 0)  # so that they stay packed
    model_type, settings, _, keys = next(case for case in CASES if case[2] == architecture)
    module = original(model_type, **settings)
    packed = write_whole_model(module, tmp_path / "packed.gguf", architecture, kind=kind, **keys)
    plain = write_whole_model(module, tmp_path / "plain.gguf", architecture, kind=kind, unpacked=True, **keys)
    assert log_probabilities(packed) == log_probabilities(plain)
    config = ModelConfig(model=packed, device="cpu", dtype="bfloat16", compile="off")
    parameters = load_model(config, load_tokenizer(config)).module.named_parameters()
    plain_ones = [
        name for name, x in parameters if x.dim() > 1 and not isinstance(x, PackedTensor) and not name.endswith("bias")
    ]
    assert all(name.endswith(ROUTERS) for name in plain_ones)


def log_probabilities(file: Path) -> list[float]:
    llm = LLM(file, dtype="float32")
    (result,) = llm.score([IDS[:1]], [IDS[1:]], prompt_options=PromptConfig(prompt_logprobs=True))
    return [token.logprob for token in result.prompt_logprobs]


def test_a_weight_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    module = original("qwen2")
    module.model.layers[1].self_attn.o_proj = torch.nn.Linear(32, 32)
    with torch.no_grad():
        file = write_whole_model(module, tmp_path / "m.gguf", "qwen2")
    with pytest.raises(ModelError) as e:
        LLM(file, dtype="float32")
    assert str(e.value) == (
        f"{file} has a weight that batchgen does not use: blk.1.attn_output.bias; give the model in the format of transformers"
    )
