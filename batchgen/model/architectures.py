"""Which architectures are known to be exact, and which are refused by name, because a wrong answer is worse than none.

A type in neither table is checked when a model is loaded (`checks/self_check.py`).
"""

from __future__ import annotations

import copy
import json
from typing import Any

from batchgen.errors import ModelError
from batchgen.prompts.tokenizer import OTHER_PARTS, capped_longrope, indexed_length, language_config, text_config

VERIFIED_ON = ("5.17", "5.24")
"""The oldest and the newest version of transformers with which `VERIFIED` was tested."""

RECURRENT = frozenset({
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "glm5_next_text", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "qwen4_exp_text", "recurrent_gemma", "zamba", "zamba2", "zaya",
})  # fmt: skip
"""The types in `VERIFIED` and `INNER` that have recurrent layers."""

INDEXED = frozenset({
    "axk2", "deepseek_v32", "doge", "dots3_note_text", "glm5_next_text", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text", "minimax_m3_vl_text",
    "mistral_large4_text", "qwen4_exp_text",
})  # fmt: skip
"""The types in `VERIFIED` and `INNER` that have an indexer, which chooses which keys a query sees. Contexts end before it leaves any out."""

INNER = frozenset({
    "cosmos3_edge_text", "deepseek_ocr2_text", "emu3_text_model", "ernie4_5_vl_moe_text", "glm4v_moe_text", "glm4v_text",
    "glm5_next_text", "glm_ocr_text", "granite4_vision_text", "granite_docling_text", "hunyuan_vl_text", "hy_v4_vl_text",
    "mistral_large4_text",
    "mllama_text_model", "molmo2_text", "muse_glimmer_text", "muse_spark_text", "paddleocr_vl_text", "qwen2_5_omni_text",
    "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text", "step3p5",
})  # fmt: skip
"""`model_type`s of language models that exist only inside a multimodal wrapper."""

VERIFIED = frozenset({
    "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe",
    "cohere_compass_text", "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe",
    "exaone", "exaone4", "exaone_moe", "falcon", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2",
    "jetmoe", "kolibri1", "laguna", "llama", "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2",
    "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3",
    "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "sarvam_mla", "sarvam_moe", "seed_oss",
    "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
}) | (RECURRENT | INDEXED) - INNER  # fmt: skip
"""`model_type`s whose greedy output and logits equal those of `generate` (tests/parity)."""

WRAPPERS = frozenset({
    "apertus1p5", "aria", "aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2",
    "deepseek_vl", "deepseek_vl_hybrid", "dots3_note", "emu3", "ernie4_5_vl_moe", "exaone4_5", "fast_vlm", "fun_asr_nano", "fuyu",
    "gemma3", "gemma3n", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmasr", "glmga",
    "got_ocr2", "granite4_vision", "granite_docling", "granite_speech", "granite_speech_plus", "hunyuan_vl", "hy_v4_vl",
    "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "janus", "kimi_k25", "lfm2_vl", "lfm3_vl",
    "lighton_ocr", "llama4", "llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr", "minimax_m3_vl", "minicpmv4_6",
    "minicpmv4_7", "mistral3", "mistral4", "mistral_large4", "mllama", "molmo2", "moss_transcribe_diarize", "muse_glimmer",
    "muse_spark", "nemo_speechlm", "nemotron_h_omni", "omniasr", "ovis2", "paddleocr_vl", "paligemma", "perception_lm", "phi4_multimodal",
    "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5",
    "qwen3_5_moe", "qwen3_asr", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "shieldgemma2", "smolvlm",
    "step3p7", "vibevoice_asr", "video_llama_3", "video_llava", "vipllava", "voxtral",
})  # fmt: skip
"""Multimodal `model_type`s around a language model: text equals that of the wrapper's own `generate` (tests/parity/test_wrappers.py)."""

_BOTH = "they have an encoder and a decoder"
REFUSED = {
    **dict.fromkeys((
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta",
        "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
    ), "they are encoders, in which a token also sees the tokens after it"),
    **dict.fromkeys((
        "blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "kyutai_speech_to_text", "moshi", "pi0",
        "voxtral_realtime",
    ), "they run only with an image or sound"),
    **dict.fromkeys(("florence2", "pix2struct", "pp_formulanet", "trocr", "vision-encoder-decoder"), _BOTH),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "they are draft models, which read the keys and values of another model",
    ),
    **dict.fromkeys(("inkling2", "inkling2_loop", "inkling_mm_model"), "they add their own bias to the scores of attention"),
    "deepseek_v4": "some of their keys and values stand for several tokens each",
    "diffusion_gemma": "they generate blocks of text by diffusion, not token by token",
    "dory": "they run some layers several times, each time with other keys and values",
    "hrm_text": "in their prompts, a token also sees the tokens after it",
    "kosmos-2.5": "their positions depend on the tokens of the whole batch",
    "rwkv": "their recurrence (RWKV) is not implemented",
    "unlimited_ocr": "some of their layers see only the first tokens and a sliding window",
    "xlstm": "their recurrence (mLSTM) is not implemented",
}  # fmt: skip
"""`model_type`s that cannot be exact, and why."""

_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
# Of families in `RECURRENT`: elsewhere the names may stand for something else.
_RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "moe", "mlp"})
# "dynamic" changes with the longest sequence of a batch, but not below the length to which the context is capped
# (prompts/tokenizer.py); the factors of "longrope" are chosen for each request (long_rope.py).
_ROPES = frozenset({"default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope"})


def is_verified(config: Any) -> bool:
    """Whether the model type of this configuration is verified. Does not check its settings; see `refusal`."""
    inner = text_config(config)
    wrapper = _model_type(language_config(config))
    if wrapper in WRAPPERS:
        # transformers 5.17 gives the language model inside of hunyuan_vl the wrapper's name
        return inner is config or _model_type(inner) in VERIFIED | INNER | {wrapper}
    return inner is config and _model_type(inner) in VERIFIED


def is_multimodal(config: Any) -> bool:
    """Whether the language model is one part of several."""
    return text_config(config) is not config or any(getattr(config, part, None) is not None for part in OTHER_PARTS)


def refusal(config: Any) -> str | None:
    """Why models of this configuration cannot be exact, if that is known without running one; a clause about "they"."""
    wrapper = language_config(config)
    parts = {id(part): part for part in (config, wrapper, causal_text_config(wrapper))}
    return next((reason for part in parts.values() if (reason := _refusal(part)) is not None), None)


def causal_text_config(wrapper: Any) -> Any:
    """Returns the configuration of the language model. That of PaliGemma says that tokens see those after them: only those of a prompt with images do,
    which the plan of attention knows (`Image.prompt`), so what is returned does not say it."""
    text = text_config(wrapper)
    if _model_type(wrapper) == "paligemma":
        text = copy.copy(text)
        text.use_bidirectional_attention = False
    return text


def check_architecture(config: Any) -> None:
    """Raises `ModelError` for a configuration that is refused by name."""
    reason = refusal(config)
    if reason is not None:
        kind = _model_type(config)
        if reason.startswith("this one "):
            raise ModelError(f"this model of type {kind!r} is not supported: it {reason.removeprefix('this one ')}")
        raise ModelError(f"models of type {kind!r} are not supported: {reason}")


def _refusal(config: Any) -> str | None:
    reason = REFUSED.get(_model_type(config))
    if reason is not None:
        return reason
    if getattr(config, "is_encoder_decoder", None) is True:
        return _BOTH
    for name, values in (("use_bidirectional_attention", (True, "all")), ("is_causal", (False,))):
        value = getattr(config, name, None)
        if value in values:
            return f"this one is an encoder ({name} is {json.dumps(value)}), in which a token also sees the tokens after it"
    if _model_type(config) == "doge" and getattr(config, "is_moe", False):
        return "the experts of a token depend on the other tokens of the batch"
    layers = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if _model_type(config) == "llama4_text":  # as full attention up to the chunk's length, where the context ends
        layers -= {"chunked_attention"}
    if _model_type(config) in INDEXED:
        # The second is the older name.
        layers -= {"indexed_attention", "qwen_sparse_attention", "deepseek_sparse_attention", "minimax_m3_sparse"}
        if getattr(config, "index_kpool_always_select_tail", True) is False:
            return "this one has an indexer that leaves out the newest tokens, whatever the length of the text"
    if _model_type(config) in RECURRENT:
        layers -= _RECURRENT_LAYERS
    if layers:
        return f"this one has layers of type {', '.join(sorted(layers))}"
    ropes = _rope_types(config) - _ROPES
    if ropes:
        return f"this one has rotary embeddings of type {', '.join(sorted(ropes))}"
    return None


def context_note(config: Any) -> str | None:
    """The sentence for the user about a context that ends earlier than the model's, for the sake of exactness; None for other models."""
    text = text_config(config)
    longest = getattr(text, "max_position_embeddings", 0)
    indexed = indexed_length(text) if _model_type(text) in INDEXED else longest
    if 0 < indexed < longest:
        return (
            f"the context ends at {indexed:,} tokens: beyond that the model's indexer chooses which keys a query sees"
        )
    chunked = "chunked_attention" in (getattr(text, "layer_types", None) or ())
    if chunked and text.attention_chunk_size < longest:
        return f"the context ends at {text.attention_chunk_size:,} tokens: beyond that some layers see only a chunk of the text"
    scaled = capped_longrope(text)
    if 0 < scaled < longest:
        return f"the context ends at {scaled:,} tokens: beyond that LongRoPE changes the positions of all rows that run together"
    return None


def _rope_types(config: Any) -> set[str]:
    """Of all layers: the parameters are one mapping, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, dict):
        return set()
    kinds = {r.get("rope_type", r.get("type")) for r in (rope, *rope.values()) if isinstance(r, dict)}
    return {str(kind) for kind in kinds if kind is not None}


def _model_type(config: Any) -> str:
    return str(getattr(config, "model_type", "unknown"))
