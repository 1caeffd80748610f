"""Quantized checkpoints: transformers loads them, and the engine runs them unchanged."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen import LLM, SamplingParams
from batchgen.config import EngineConfig

PROMPTS = ["the same beginning of every text, and then " + end for end in ("a", "another", "a third one", "")] + [
    "else"
]
COUNT = 20


@pytest.fixture(scope="module")
def quantized(tiny_model_dir, tmp_path_factory):
    """The tiny Llama with int8 linear weights, saved by torchao and transformers."""
    pytest.importorskip("torchao")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao warns of its parts for other machines
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import AutoTokenizer, TorchAoConfig

    folder = tmp_path_factory.mktemp("quantized")
    how = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(tiny_model_dir, quantization_config=how).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    assert (folder / "model.safetensors").stat().st_size < 0.7 * (tiny_model_dir / "model.safetensors").stat().st_size
    return folder


@torch.inference_mode()
def test_the_output_of_a_quantized_model_is_that_of_generate(quantized, tiny_model_dir):
    llm = LLM(str(quantized), device="cpu", engine=EngineConfig(kv_memory="16MiB", debug=True))
    assert type(llm.engine.runner.model.module.model.layers[0].self_attn.q_proj.weight).__name__ == "Int8Tensor"
    assert {pool.dtype for pool in llm.engine.runner.cache.keys.values()} == {torch.float32}
    seen = []
    llm.engine.runner.model.module.register_forward_hook(lambda module, args, out: seen.extend(out.logits[0]))
    results = llm.generate(PROMPTS, SamplingParams(max_tokens=COUNT, ignore_eos=True))

    reference = AutoModelForCausalLM.from_pretrained(quantized)
    reference.generation_config.eos_token_id = None
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    apart = 0.0
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([llm.tokenizer.hf_tokenizer(prompt)["input_ids"]])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False)
        assert list(result.token_ids) == out[0, ids.shape[1] :].tolist()
        want, without = (m(out[:, :-1]).logits[0, ids.shape[1] - 1 :] for m in (reference, plain))
        assert max(min(float((row - s).abs().max()) for s in seen) for row in want) < 1e-4
        apart = max(apart, float((without - want).abs().max()))
    assert apart > 1e-2  # the model is quantized
