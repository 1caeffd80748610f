"""Writes docs/will-my-model-run.md: yes or no, and why, for the families of models that are downloaded most.

Run it after a change to batchgen/model/architectures.py: python docs/make_families_page.py
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

PAGE = Path(__file__).resolve().parent / "will-my-model-run.md"
TEXT = """# Will my model run?

Look for the family below, or ask the program: `batchgen models NAME` says whether the model would run, how long its context is (and why, if that is less than its configuration says), and how large it is. It reads the configuration and the tokenizer, never the weights.

**Yes** means verified: for random models of the architecture, batchgen gives the tokens and the logits of transformers' `generate` in float32, also with shared prefixes, little memory and preemption. Fine-tunes, merges and distilled models of a family have its
architecture and run as it does. An architecture that is in neither table of [models.md](models.md) is checked when it is loaded, with a small model of the same kind (this takes a second or two). It is refused if a single logit differs.
The table does not say whether the model fits your machine: `batchgen models NAME` does ([memory](memory.md)).

The families are those of the generative models that were downloaded most from the Hugging Face Hub in 2026. {yes} of these {count} run.

| family | for example | `model_type` | runs |
| --- | --- | --- | --- |
{rows}

- **Images and sound.** A multimodal checkpoint runs on text: its language model is loaded, and nothing else is read from the disk. [Some are shown images](images.md); their encoder is loaded for the first row with an image. A row that holds sound, video, or an image for another model fails alone with `unsupported_content`.
- **Quantized checkpoints** (FP8, MXFP4, AWQ, GPTQ, bitsandbytes, GGUF, MLX, …): see [quantized.md](quantized.md).
- **Adapters** (LoRA): `--lora` merges an adapter into the weights while they are loaded; beside those of a quantized checkpoint, which stay packed, it runs as it is.
- [models.md](models.md) lists all architectures by name, and what was tested of each.

This page is written by `docs/make_families_page.py`; a test compares the two.
"""
Q = "checkpoints of this family are published quantized: see [quantized.md](quantized.md)"
INDEXED = f"contexts end at 2,048 tokens, because beyond that its indexer chooses which keys a query sees; {Q}"
FAMILIES: list[tuple[str, str, str, str, str]] = [
    # family, example, model_type, model_type of the language model inside, remark
    ("Qwen 3", "Qwen/Qwen3-8B", "qwen3", "", ""),
    ("Qwen 3 MoE", "Qwen/Qwen3-30B-A3B", "qwen3_moe", "", ""),
    ("Qwen 2.5, QwQ", "Qwen/Qwen2.5-7B-Instruct", "qwen2", "", ""),
    ("Qwen 3.5, 3.6", "Qwen/Qwen3.6-27B", "qwen3_5", "qwen3_5_text", ""),
    ("Qwen 3.5, 3.6 MoE", "Qwen/Qwen3.6-35B-A3B", "qwen3_5_moe", "qwen3_5_moe_text", ""),
    ("Qwen 3 Next, Coder Next", "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", "", ""),
    ("Qwen 3.8 Flash Next", "Qwen/Qwen3.8-Flash-Next-FP8", "qwen4_exp", "qwen4_exp_text", INDEXED),
    ("Qwen 3 VL", "Qwen/Qwen3-VL-2B-Instruct", "qwen3_vl", "qwen3_vl_text", ""),
    ("Qwen 3 VL MoE", "Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3_vl_moe", "qwen3_vl_moe_text", ""),
    ("Qwen 2.5 VL", "Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", "qwen2_5_vl_text", ""),
    ("Qwen 2.5 Omni", "Qwen/Qwen2.5-Omni-7B", "qwen2_5_omni_thinker", "qwen2_5_omni_text", "only the part that generates text is loaded"),
    ("Gemma 4", "google/gemma-4-31B-it", "gemma4", "gemma4_text", ""),
    ("Gemma 4 12B", "google/gemma-4-12B-it", "gemma4_unified", "gemma4_unified_text", ""),
    ("Gemma 3", "google/gemma-3-4b-it", "gemma3", "gemma3_text", ""),
    ("Gemma 3n", "google/gemma-3n-E4B-it", "gemma3n", "gemma3n_text", ""),
    ("Gemma 2", "google/gemma-2-9b-it", "gemma2", "", ""),
    ("Llama 3, 3.1, 3.2, 3.3", "meta-llama/Llama-3.1-8B-Instruct", "llama", "", ""),
    ("Llama 3.2 Vision", "meta-llama/Llama-3.2-11B-Vision-Instruct", "mllama", "mllama_text_model", ""),
    ("Llama 4", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4", "llama4_text", "contexts end at 8,192 tokens, because beyond that some layers see only a chunk of the text"),
    ("Llama 2, TinyLlama, Vicuna", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "llama", "", ""),
    ("gpt-oss", "openai/gpt-oss-20b", "gpt_oss", "", Q),
    ("DeepSeek R1 distilled", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2", "", ""),
    ("DeepSeek V3, R1", "deepseek-ai/DeepSeek-R1-0528", "deepseek_v3", "", Q),
    ("DeepSeek V2, Coder V2", "deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek_v2", "", ""),
    ("DeepSeek V3.2", "deepseek-ai/DeepSeek-V3.2", "deepseek_v32", "", INDEXED),
    ("DeepSeek V4", "deepseek-ai/DeepSeek-V4-Flash", "deepseek_v4", "", ""),
    ("Kimi K2.5 to K2.7", "moonshotai/Kimi-K2.6", "kimi_k25", "deepseek_v3", Q),
    ("Kimi Linear", "moonshotai/Kimi-Linear-48B-A3B-Instruct", "kimi_linear", "", ""),
    ("GLM 4.5 to 4.7", "zai-org/GLM-4.7", "glm4_moe", "", ""),
    ("GLM 4.7 Flash", "zai-org/GLM-4.7-Flash", "glm4_moe_lite", "", ""),
    ("GLM 4.5V, 4.6V", "zai-org/GLM-4.5V", "glm4v_moe", "glm4v_moe_text", ""),
    ("GLM 5", "zai-org/GLM-5.2", "glm_moe_dsa", "", INDEXED),
    ("MiniMax M2", "MiniMaxAI/MiniMax-M2", "minimax_m2", "", Q),
    ("Mistral 7B", "mistralai/Mistral-7B-Instruct-v0.3", "mistral", "", ""),
    ("Mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral", "", ""),
    ("Mistral Small 3, Ministral 3, Magistral, Devstral", "mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral3", "mistral", ""),
    ("Phi 3, 3.5, 4", "microsoft/phi-4", "phi3", "", ""),
    ("Nemotron 3, Nemotron H", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_h", "", ""),
    ("Granite 4", "ibm-granite/granite-4.0-h-small", "granitemoehybrid", "", ""),
    ("Granite 3", "ibm-granite/granite-3.3-8b-instruct", "granite", "", ""),
    ("LFM 2", "LiquidAI/LFM2-1.2B", "lfm2", "", ""),
    ("SmolLM 3", "HuggingFaceTB/SmolLM3-3B", "smollm3", "", ""),
    ("SmolVLM", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", "smolvlm", "llama", ""),
    ("OLMo 3", "allenai/Olmo-3-7B-Instruct", "olmo3", "", ""),
    ("Command A, Command R7B", "CohereLabs/c4ai-command-r7b-12-2024", "cohere2", "", ""),
    ("InternVL 3, 3.5", "OpenGVLab/InternVL3_5-8B-HF", "internvl", "qwen3", ""),
    ("LLaVA", "llava-hf/llava-1.5-7b-hf", "llava", "llama", ""),
    ("GPT-2", "openai-community/gpt2", "gpt2", "", ""),
    ("OPT", "facebook/opt-125m", "opt", "", ""),
    ("T5, Flan-T5", "google/flan-t5-base", "t5", "", ""),
]  # fmt: skip


def verdict(model_type: str, inner: str, remark: str) -> str:
    """The last column: yes or no, and why."""
    from batchgen.model.architectures import is_verified, refusal
    from batchgen.prompts.tokenizer import text_config

    config: Any = SimpleNamespace(model_type=model_type)
    if inner:
        config.text_config = SimpleNamespace(model_type=inner)
    if model_type == "t5":
        return "no: it has an encoder, and batchgen runs decoder-only models"
    reason = refusal(config)
    if reason is not None:
        return f"no: {reason}"
    assert is_verified(config), (model_type, text_config(config).model_type)
    return f"**yes**; {remark}" if remark else "**yes**"


def page() -> str:
    """The whole of docs/will-my-model-run.md."""
    rows = [
        f"| {family} | `{example}` | `{model_type}` | {verdict(model_type, inner, remark)} |"
        for family, example, model_type, inner, remark in FAMILIES
    ]
    return TEXT.format(rows="\n".join(rows), count=len(rows), yes=sum("**yes**" in row for row in rows))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
