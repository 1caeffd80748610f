"""The multimodal checkpoints of the parity tests: a tiny language model, and everything else as large as transformers' defaults.

`TEXTS` has the `model_type` and the settings of the language model by the wrapper's `model_type`, `OWN` the settings of the wrapper itself.
"""

import copy
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.activations import XIELUActivation
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from batchgen.model.multimodal import model_class
from batchgen.prompts.tokenizer import language_config
from support.models import randomize
from support.shapes import (
    COMMON,
    EXPERTS,
    FIRST_DENSE,
    GROUPS,
    INDEXER,
    KDA,
    MIXED,
    MLA,
    PLAIN_ROPE,
    ROUTED,
    SHAPES,
    SLIDING_WINDOW,
    TOKENS,
    VOCAB,
    family_config,
)

# The multimodal forward of Llama 4 in transformers 5.24 fails without this attribute, which its language model's output lacks.
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    MoeCausalLMOutputWithPast.image_outputs = None

Text = tuple[str, dict[str, Any]]


def _sections(*sizes: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": PLAIN_ROPE | {"mrope_section": list(sizes)} | more}


MROPE = _sections(2, 3, 3)
HALF = _sections(1, 2, 1, partial_rotary_factor=0.5)
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
LLAMA, QWEN2, QWEN3, GRANITE = ("llama", {}), ("qwen2", {}), ("qwen3", {}), ("granite", SHAPES["granite"])
GEMMA3 = ("gemma3_text", SHAPES["gemma3_text"])
COHERE2 = ("cohere2", SHAPES["cohere2"])
QWEN_MOE = EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [0], "norm_topk_prob": True}

QWEN35 = ("qwen3_5_text", SHAPES["qwen3_5_text"])

TEXTS: dict[str, Text] = {
    "apertus1p5": ("apertus1p5_text", SHAPES["apertus1p5_text"]),
    "aria": ("aria_text", SHAPES["aria_text"]),
    "aya_vision": COHERE2,
    "cohere2_vision": COHERE2,
    "cohere_compass": ("cohere_compass_text", SHAPES["cohere_compass_text"]),
    "cosmos3_edge": ("cosmos3_edge_text", MROPE),
    "cosmos3_omni": ("qwen3_vl_text", MROPE),
    "deepseek_ocr2": ("deepseek_ocr2_text", ROUTED | MIXED | {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4}),
    "deepseek_vl": LLAMA,
    "deepseek_vl_hybrid": LLAMA,
    "dots3_note": ("dots3_note_text", SHAPES["dots3_note_text"]),
    "ernie4_5_vl_moe": (
        "ernie4_5_vl_moe_text",
        _sections(3, 3, 2) | {
            "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": [32, 16],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "emu3": ("emu3_text_model", {"rope_parameters": PLAIN_ROPE} | TOKENS),
    "exaone4_5": ("exaone4", SHAPES["exaone4"]),
    "fast_vlm": QWEN2,
    "fun_asr_nano": QWEN3,
    "fuyu": ("persimmon", SHAPES["persimmon"]),
    "gemma3": GEMMA3,
    "gemma3n": ("gemma3n_text", SHAPES["gemma3n_text"]),
    "gemma4": ("gemma4_text", SHAPES["gemma4_text"] | {"pad_token_id": 0}),
    "gemma4_unified": ("gemma4_unified_text", SHAPES["gemma4_unified_text"] | {"pad_token_id": 0}),
    "glm46v": ("glm4v_text", HALF),
    "glm4v": ("glm4v_text", HALF),
    "glm4v_moe": ("glm4v_moe_text", ROUTED | GROUPS | FIRST_DENSE | HALF),
    "glm5_next": (
        "glm5_next_text",
        MLA | ROUTED | KDA | INDEXER | {
            "num_hidden_layers": 5, "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"],
            "mlp_layer_types": ["dense"] + ["sparse"] * 4, "qk_rope_head_dim": 0, "indexer_types": ["full"] * 4 + ["shared"],
            "index_kpool": 8, "hc_mult": 2, "num_local_experts": 4,
        },
    ),
    "glm_ocr": ("glm_ocr_text", MROPE),
    "glmasr": LLAMA,
    "glmga": ("glm4v_text", HALF),
    "got_ocr2": QWEN2,
    "granite4_vision": ("granite4_vision_text", SHAPES["granite"]),
    "granite_docling": ("granite_docling_text", {}),
    "granite_speech": GRANITE,
    "granite_speech_plus": GRANITE,
    "hunyuan_vl": ("hunyuan_vl_text", _sections(2, 2, 2, 2)),
    "hy_v4_vl": ("hy_v4_vl_text", SHAPES["hy_v4"] | _sections(2, 1, 1)),
    "hyperclovax_vision_v2": ("hyperclovax", SHAPES["hyperclovax"]),
    "idefics2": ("mistral", SHAPES["mistral/sliding_window"]),
    "idefics3": LLAMA,
    "internvl": QWEN2,
    "janus": LLAMA,
    "kimi_k25": ("deepseek_v3", SHAPES["deepseek_v3/yarn"]),
    "lfm2_vl": ("lfm2", SHAPES["lfm2"]),
    "lfm3_vl": ("lfm3", SHAPES["lfm3"]),
    "lighton_ocr": QWEN3,
    "llama4": ("llama4_text", SHAPES["llama4_text"]),
    "llava": ("mistral", SHAPES["mistral/sliding_window"]),
    "llava_next": LLAMA,
    "llava_next_video": LLAMA,
    "llava_onevision": QWEN2,
    "minimax_m3_vl": ("minimax_m3_vl_text", SHAPES["minimax_m3_vl_text"]),
    "minicpm_ocr": QWEN35,
    "minicpmv4_6": QWEN35,
    "minicpmv4_7": QWEN35,
    "mistral3": ("ministral3", SHAPES["ministral3"]),
    "mistral_large4": (
        "mistral_large4_text",
        MLA | ROUTED | INDEXER | {
            "num_hidden_layers": 5, "mlp_layer_types": ["dense"] + ["sparse"] * 4, "no_rope_layers": [1, 1, 0, 1, 0],
            "kv_source_layers": [0, 0, 2, 3, 2], "indexer_types": ["full", "full", "full", "shared", "full"],
        },
    ),
    "mllama": ("mllama_text_model", {"num_hidden_layers": 4, "cross_attention_layers": [1], "rope_parameters": PLAIN_ROPE} | TOKENS),
    "mistral4": ("", SHAPES["deepseek_v3"] | SHAPES["ministral3"]),
    "molmo2": ("molmo2_text", {}),
    "moss_transcribe_diarize": QWEN3,
    "muse_glimmer": ("muse_glimmer_text", SLIDING_WINDOW),
    "muse_spark": ("muse_spark_text", EXPERTS | SLIDING_WINDOW | {"moe_hidden_size": 48}),
    "nemo_speechlm": ("nemotron_h", SHAPES["nemotron_h"]),
    "nemotron_h_omni": ("nemotron_h", SHAPES["nemotron_h"]),
    "omniasr": LLAMA,
    "ovis2": QWEN2,
    "paddleocr_vl": ("paddleocr_vl_text", MROPE),
    "paligemma": ("gemma2", SHAPES["gemma2"]),
    "perception_lm": LLAMA,
    "phi4_multimodal": ("", {"rope_parameters": PLAIN_ROPE} | TOKENS),
    "pp_chart2table": QWEN2,
    "qianfan_ocr": QWEN3,
    "qwen2_5_omni_thinker": ("qwen2_5_omni_text", MROPE),
    "qwen2_5_vl": ("qwen2_5_vl_text", MROPE),
    "qwen2_audio": QWEN2,
    "qwen2_vl": ("qwen2_vl_text", MROPE),
    "qwen3_5": QWEN35,
    "qwen3_5_moe": ("qwen3_5_moe_text", SHAPES["qwen3_5_moe_text"]),
    "qwen3_asr": QWEN3,
    "qwen3_omni_moe_thinker": ("qwen3_omni_moe_text", QWEN_MOE | MROPE),
    "qwen3_vl": ("qwen3_vl_text", MROPE),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", QWEN_MOE | MROPE),
    "qwen4_exp": ("qwen4_exp_text", SHAPES["qwen4_exp_text/n-grams"]),
    "shieldgemma2": GEMMA3,
    "smolvlm": LLAMA,
    "step3p7": ("step3p5", EXPERTS | SLIDING_WINDOW | TOKENS),
    "vibevoice_asr": QWEN2,
    "video_llama_3": QWEN2,
    "video_llava": LLAMA,
    "vipllava": LLAMA,
    "voxtral": LLAMA,
}  # fmt: skip

OWN: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "vision_config": {"codebook_size": 64}, "audio_config": {"model_type": "wavtokenizer_encoder", "codebook_size": 32},
        "image_token_id": 1, "audio_token_id": 2, "image_token_offset": 50, "audio_token_offset": 114,
    },
    "aya_vision": {"vision_config": SIGLIP | {"image_size": 364}},
    "gemma3": {"vision_config": SIGLIP},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}, "audio_config": {"model_type": "gemma4_audio"}},
    "gemma4_unified": {
        "vision_config": {"model_type": "gemma4_unified_vision"}, "audio_config": {"model_type": "gemma4_unified_audio"},
    },
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 4, "<|visual token 000000|>": 6}},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}},
    "dots3_note": {"vision_config": {"adapter_out_dim": 64}, "audio_config": {"adapter_out_dim": 64}},
    "ovis2": {"hidden_size": 64, "vocab_size": VOCAB},
    "granite4_vision": {"downsample_rate": "4/8", "deepstack_layer_map": [[-19, 1], [-13, 0]], "spatial_target_layers": [1]},
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": 1024}}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
}  # fmt: skip
"""Settings from published checkpoints, for classes whose defaults do not work."""


ASK_FOR_DEVICE = {"granite_docling", "idefics3"}
"""Their code for text reads the device of the first parameter, which belongs to the vision part."""


def with_text_config() -> set[str]:
    """The multimodal types of the installed transformers whose language model has its own configuration."""
    names = (name for name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
    return {name for name in names if "text_config" in CONFIG_MAPPING[name].sub_configs}


def config_of(name: str) -> Any:
    """The configuration of a checkpoint. For one that also speaks, that of the part that writes text."""
    inner, settings = TEXTS[name]
    if not inner:  # the language model's settings are the checkpoint's own
        return family_config(name, **(COMMON | settings | OWN.get(name, {})))
    text = {"model_type": inner} | COMMON | settings
    return family_config(name, **{"text_config": text, "tie_word_embeddings": False} | OWN.get(name, {}))


def text_model(name: str) -> PreTrainedModel:
    """The random language model of a wrapper as batchgen loads it, with transformers' own attention."""
    config = config_of(name)
    torch.manual_seed(0)
    kind = model_class(config)
    model = kind.from_pretrained(
        None, config=language_config(config), state_dict={}, dtype=torch.float32, attn_implementation="eager"
    )
    for module in model.modules():
        if isinstance(module, XIELUActivation):  # without a checkpoint, transformers leaves them as memory was
            module.beta.fill_(0.5)
            module.eps.fill_(-1e-6)
    return randomize(model.eval())


def whole_model(text: PreTrainedModel) -> Any:
    """The whole wrapper around the same language model. Parts that text does not need are on the meta device."""
    config = copy.deepcopy(text.config)
    with torch.device("meta"):
        whole = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]._from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    if config.model_type in ASK_FOR_DEVICE:
        whole.to_empty(device="cpu")
    whole.load_state_dict(text.state_dict(), strict=False, assign=True)
    buffers = dict(text.named_buffers())
    for path, module in whole.named_modules():
        for name in module._buffers:
            found = buffers.get(f"{path}.{name}" if path else name)
            if found is not None:
                module._buffers[name] = found
    return whole.eval()
