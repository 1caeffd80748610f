"""Recognizes code of transformers that kernels can replace, by digests of its syntax tree.

Formatting, comments, docstrings, annotations, decorators, the names of classes, and what is done with a cache of keys and values, which a step does not
have, do not matter. Code of a new version of transformers that differs from what is known runs as it is, only slower. `python -m benchmarks.unknown_code` in a checkout then prints lines for `_KNOWN`.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Mapping
from enum import Enum, auto
from functools import cache
from types import FunctionType
from typing import Any


class Code(Enum):
    """What a function or the forward of a module computes."""

    NORM = auto()
    """Root mean square norm, all in float32."""
    ROUNDED_NORM = auto()
    """The same, rounded to the type of its input before it is multiplied by the weight."""
    NORM_PLUS_ONE = auto()
    """The same in float32, multiplied by the weight plus one."""
    GATE_BEFORE_NORM = auto()
    GATE_AFTER_NORM = auto()
    GATE_AFTER_ROUNDED_NORM = auto()
    ROTARY = auto()
    """`apply_rotary_pos_emb`, of whole heads or of their first elements."""
    ROTARY_KEEPS_TYPE = auto()
    """The same; results have the types of queries and keys, whatever the type of cos and sin."""
    ROTARY_OF_HALVES = auto()
    """`apply_rotary_pos_emb` with cos and sin of half a head, which are those of both halves."""
    ROTARY_OF_ONE = auto()
    """`apply_rotary_pos_emb` of queries or keys alone."""
    ROTARY_OF_PAIRS = auto()
    """`apply_rotary_pos_emb` of neighbours; cos of the pairs are those of the first half."""
    ROTARY_OF_PAIRS_IN_FLOAT32 = auto()
    """The same. Products are not rounded, and results have the types of queries and keys."""
    ROTARY_OF_PAIRS_TWICE_IN_FLOAT32 = auto()
    """The same; cos and sin of each pair come twice, side by side."""
    COS_AND_SIN = auto()
    """The cos and sin of positions."""
    LINEAR = auto()
    """A linear layer, written in another way than torch's."""
    TRANSPOSED_LINEAR = auto()
    """The same, of weights [K, N]."""
    GATED_MLP = auto()
    EXPERTS_GATE = auto()
    """Of experts: the activation of the first half, times the second."""
    CLAMPED_GATE = auto()
    """The same as in gpt-oss, which limits both."""
    LINEAR_OF_EXPERTS = auto()
    """A linear layer of each expert, of rows in the order of their experts."""
    EXPERTS_IN_ONE_WEIGHT = auto()
    """Experts whose weights [E N, K] lie in a module of their own."""
    EXPERTS_WITH_IDENTITIES = auto()
    """Experts of which the last ones return their input."""
    SCALED_INPUTS = auto()
    """A mixture that multiplies the inputs of experts, not their results, by the router's scores, and has an expert for all tokens."""
    ATTENTION = auto()
    """Projections, norms of queries and keys if the module has them, rotary embeddings, the attention function, an output projection."""
    SCALED_ATTENTION = auto()
    """The same; queries are scaled from a position on."""
    GATED_ATTENTION = auto()
    """The same; half of what the projection of queries gives is a gate of the output."""
    SHARING_ATTENTION = auto()
    """The same; values have a norm, and a layer may use the keys and values of an earlier one, which it finds in `shared_kv_states`."""
    GRANITE_ATTENTION = auto()
    """The same; with rotary embeddings if the configuration's `position_embedding_type` says so."""
    ATTENTION_WITH_LATE_NORMS = auto()
    """The same; norms of queries and keys come after rotary embeddings."""
    PLAIN_ATTENTION = auto()
    """The same without rotary embeddings."""
    GATED_DELTA = auto()
    """Projections, a convolution, the gated delta rule, a gated norm, an output projection."""
    MAMBA2 = auto()
    """A projection, a convolution, Mamba2's recurrence, a gated norm, an output projection."""
    ENCODER_LAYER = auto()
    """A layer of an image encoder: norm, attention, sum, norm, MLP, sum. What is added may be multiplied by `lambda_1` and `lambda_2`."""
    ENCODER_ATTENTION = auto()
    """Of an image encoder: q, k and v, norms of q and k if the module has them, attention, an output projection."""
    TURNED_ENCODER_ATTENTION = auto()
    """The same with rotary embeddings."""
    ATTENTION_IN_SEGMENTS = auto()
    """`ENCODER_ATTENTION` where tokens see those of their own segment."""
    TURNED_ATTENTION_IN_SEGMENTS = auto()
    """The same with rotary embeddings in float32."""
    PLAIN_MLP = auto()
    """A linear layer, an activation, a linear layer."""
    LAYER = auto()
    """A decoder layer: norm, attention or a recurrent mixer, sum, norm, MLP, sum. A layer with a `residual_multiplier` multiplies what it adds by it."""
    LAYER_WITH_DROPOUT = auto()
    """The same with dropouts, which do nothing when a model is used."""
    LAYER_OF_FOUR_NORMS = auto()
    """Norms before and after attention and the MLP."""
    GLM_LAYER = auto()
    """The same; its norms have other names."""
    HYPERCLOVA_LAYER = auto()
    """The same; the norms after attention and the MLP may be identities."""
    SCALED_LAYER_OF_FOUR_NORMS = auto()
    """A layer of four norms. Its output is multiplied by `layer_scalar`, after what an input of the layer's own adds if it has one."""
    LAYER_OF_LATE_NORMS = auto()
    """Norms after attention and the MLP."""
    SHORT_CONVOLUTION = auto()
    """A projection to b, c and x; c times a convolution of b x; an output projection."""
    LFM_LAYER = auto()
    """A decoder layer with attention or a short convolution, whose norms have other names."""
    LFM_LAYER_OF_FOUR_NORMS = auto()
    """The same with norms after attention and the MLP, which may be identities."""
    BLOCK = auto()
    """Norm, a mixer of any kind or an MLP, sum."""
    BODY = auto()
    """All of a decoder: embeddings, times `embedding_multiplier` if it has one, their cos and sin, the layers one after the other, a norm."""


CACHES = ("cache", "past_key_values", "cache_params")
"""The names that an argument for a cache of keys, values and states has in versions of transformers."""
_KNOWN = {
    "247dc60ab2130246": Code.ROUNDED_NORM,  # Llama, Mistral, Qwen, Granite, Phi-3 and most others
    "a6b9698234f0af85": Code.NORM,  # OLMo 2 and 3, GPT-OSS
    "796209c6185891ad": Code.NORM,  # Helium, Nemotron-H
    "357455ec6654d51e": Code.NORM,  # Gemma 3n and 4
    "876a58b0a75fb3cb": Code.NORM_PLUS_ONE,  # Gemma, Gemma 2 and 3, Qwen3-Next, Qwen 3.5
    "ebc3ce897991a92e": Code.GATE_BEFORE_NORM,  # Mamba2, Bamba, Granite 4 H, Nemotron-H, Zamba2
    "068efd66f93ca1b0": Code.GATE_BEFORE_NORM,  # the first three in transformers 5.17: one group
    "bc9b39af40108015": Code.GATE_AFTER_NORM,  # Kimi Linear, Bailing
    "e2cb9ca384daa673": Code.GATE_AFTER_ROUNDED_NORM,  # Qwen3-Next, Qwen 3.5, OLMo-hybrid
    "4075f51d9bf95434": Code.ROTARY,  # Llama and most others
    "03068fedcbc8f885": Code.ROTARY,  # GPT-NeoX, GLM 4 MoE, Qwen 3.5
    "8a9c4dda911b3a41": Code.ROTARY,  # Phi-3
    "962edf66cd3a7332": Code.ROTARY_OF_HALVES,  # gpt-oss
    "11ef5357eb0ee968": Code.ROTARY_OF_ONE,  # Gemma 3n and 4
    "1c77ffd1b7f6ae23": Code.ROTARY_KEEPS_TYPE,  # OLMo, LFM3
    "b7c516d727c5b669": Code.ROTARY_OF_PAIRS,  # GLM 4
    "41e2302ccfbda791": Code.ROTARY_OF_PAIRS,  # Helium
    "b096d1edd081670f": Code.ROTARY_OF_PAIRS_IN_FLOAT32,  # ERNIE 4.5
    "a106bfb485a1986a": Code.ROTARY_OF_PAIRS_TWICE_IN_FLOAT32,  # Command R
    "a2172e70c3b28987": Code.COS_AND_SIN,  # most models
    "4ec9f0ed160cc55b": Code.COS_AND_SIN,  # most models in transformers 5.17
    "f25cb967b8d1cb98": Code.COS_AND_SIN,  # Qwen 3, Gemma 2 and others in transformers 5.17
    "f544c44ce68aee85": Code.LINEAR,  # Falcon
    "c0246627321531d3": Code.TRANSPOSED_LINEAR,  # GPT and GPT-2
    "050261bc2de46fa2": Code.GATED_MLP,  # Llama and most others
    "b7d7ed32b4483a85": Code.GATED_MLP,  # the image encoders of Qwen 2.5 VL and GLM 4V
    "9d1ad9a4368c1a42": Code.GATED_MLP,  # Phi-3, GLM 4: gate and up in one layer
    "2eef89ea1651ff27": Code.GATED_MLP,  # Granite's mixtures of experts
    "50ca76d8ca1dabf2": Code.GATED_MLP,  # LFM2, also in mixtures, LFM3
    "d9223df13b8f446a": Code.GATED_MLP,  # Llama 4
    "b2803eba794ae74d": Code.GATED_MLP,  # Seed-OSS
    "aca701b0816c8279": Code.GATED_MLP,  # RecurrentGemma
    "6aa2f77a83a62b34": Code.EXPERTS_GATE,  # Mixtral, Qwen, DeepSeek and most others
    "bc94e156905e605e": Code.CLAMPED_GATE,  # gpt-oss
    "db1b456f3258afa3": Code.CLAMPED_GATE,  # MiniMax M3
    "d5c21357db088a82": Code.LINEAR_OF_EXPERTS,  # JetMoE
    "5882037cc3427aba": Code.EXPERTS_IN_ONE_WEIGHT,  # DBRX
    "1b91a2cac1a40458": Code.EXPERTS_IN_ONE_WEIGHT,  # DBRX in transformers 5.17
    "2608468f1bce0039": Code.EXPERTS_WITH_IDENTITIES,  # LongCat
    "f90e40e49694bbd3": Code.SCALED_INPUTS,  # Llama 4
    "fa0e90a75b25ff48": Code.ATTENTION,  # Llama, Granite, Gemma
    "97acd339d020cb25": Code.ATTENTION,  # Qwen 2, Ministral
    "93e1f694cf0a1a5c": Code.ATTENTION,  # Mistral, Mixtral
    "c26a5c04f255ff3d": Code.ATTENTION,  # Qwen 2 VL and 2.5 VL
    "07b9d4c95c909d3c": Code.ATTENTION,  # Qwen 3
    "db68633bdfbf0fbb": Code.ATTENTION,  # Qwen 3 VL
    "d5ba715e26aad3ab": Code.ATTENTION,  # Apertus, Hunyuan 3
    "a7fbcb6197e40819": Code.ATTENTION,  # Gemma 2
    "86cacf6bb8bd5139": Code.ATTENTION,  # Gemma 3
    "f5bfa988c276becb": Code.ATTENTION,  # OLMo 2, MiniMax M2
    "673ca7ba0f6e00f1": Code.ATTENTION,  # OLMo 3
    "15da3eacdd4a5163": Code.ATTENTION,  # Phi-3
    "295cbb2988ee1cc4": Code.ATTENTION,  # GLM 4 MoE
    "134c55d649ec9a01": Code.ATTENTION,  # SmolLM3, without rotary embeddings in some layers
    "d200ffd74459cd5f": Code.ATTENTION,  # EXAONE 4, likewise
    "8ac463cb9dee6731": Code.ATTENTION,  # gpt-oss
    "64adb394eda65245": Code.SCALED_ATTENTION,  # Ministral 3
    "19d6949e09c1a15a": Code.SCALED_ATTENTION,  # Ministral 3 in transformers 5.17
    "c88a3ba18e7e705f": Code.GATED_ATTENTION,  # Qwen3-Next, Qwen 3.5
    "e2881e848e511484": Code.SHARING_ATTENTION,  # Gemma 4
    "82199718afd60307": Code.SHARING_ATTENTION,  # Gemma 4 in transformers 5.17
    "2c2da6422818ded6": Code.GATED_DELTA,  # Qwen 3.5
    "3c21e029420a7467": Code.GATED_DELTA,  # Qwen 3.5 in transformers 5.17
    "a49ee8dbccfa308a": Code.PLAIN_ATTENTION,  # Nemotron-H
    "81622fb5169e278f": Code.GRANITE_ATTENTION,  # Granite 4 H
    "6c36c43762e8ff7f": Code.ATTENTION,  # LFM2
    "16f114b142a8945a": Code.ATTENTION,  # Seed-OSS
    "01fa234beed2312c": Code.ATTENTION,  # OLMoE, which may clip queries, keys and values
    "cded6ac6a51416a9": Code.ATTENTION_WITH_LATE_NORMS,  # Hunyuan
    "1aa7d6ac64235f2b": Code.SHORT_CONVOLUTION,  # LFM2 and 3
    "34b80dba7de77f1e": Code.SHORT_CONVOLUTION,  # LFM2 in transformers 5.17
    "4034a889e7c987c6": Code.LFM_LAYER,  # LFM2
    "a543f205d630c28a": Code.LFM_LAYER,  # LFM2 in transformers 5.17
    "c196e4e5528348a2": Code.LFM_LAYER_OF_FOUR_NORMS,  # LFM3
    "8cd7daf2f48e1e30": Code.MAMBA2,  # Granite 4 H, Nemotron-H, Bamba, Mamba2, Zamba2
    "ffd565d4ec0a205e": Code.MAMBA2,  # the same in transformers 5.17
    "b39708f4f9507138": Code.ENCODER_LAYER,  # CLIP, SigLIP, Idefics and most others
    "dcfd348014c2cf64": Code.ENCODER_LAYER,  # Qwen 2 VL to 3.5, GLM 4V
    "421ddae78fed1bdc": Code.ENCODER_LAYER,  # PaddleOCR, VideoLLaMA 3
    "48911d49eb758155": Code.ENCODER_LAYER,  # Ovis 2
    "080c47400e7955c3": Code.ENCODER_LAYER,  # Pixtral
    "748416b6ee53eeac": Code.ENCODER_LAYER,  # InternVL
    "ffaa6bc5801104b2": Code.ENCODER_LAYER,  # Qianfan-OCR
    "4c3b8c0a46cc4004": Code.ENCODER_ATTENTION,  # InternVL, Qianfan-OCR
    "4bd5fd7f52a09964": Code.ENCODER_ATTENTION,  # Janus
    "2943fed12d90e533": Code.ATTENTION_IN_SEGMENTS,  # MiniCPM-V and -OCR
    "1302eb51a715d324": Code.ATTENTION_IN_SEGMENTS,  # Hunyuan VL
    "606619f994e58d73": Code.PLAIN_MLP,  # Janus
    "c28ff892c129bed9": Code.ENCODER_ATTENTION,  # SigLIP, Idefics, SmolVLM
    "0d42a4abf72c1936": Code.ENCODER_ATTENTION,  # CLIP
    "15daf1da1a75d61f": Code.TURNED_ATTENTION_IN_SEGMENTS,  # Qwen 2 VL to 3.5, GLM 4V
    "040e68eba468a042": Code.TURNED_ATTENTION_IN_SEGMENTS,  # Qwen 2.5 Omni
    "f6a6e0d7a9d82f2c": Code.TURNED_ATTENTION_IN_SEGMENTS,  # GLM-OCR
    "92105b36e692b8bf": Code.TURNED_ATTENTION_IN_SEGMENTS,  # EXAONE 4.5
    "6d0f8ed61531e352": Code.TURNED_ATTENTION_IN_SEGMENTS,  # PaddleOCR, VideoLLaMA 3
    "2a62d31991dc93a7": Code.TURNED_ENCODER_ATTENTION,  # Pixtral
    "dacfc5ae86c578fd": Code.PLAIN_MLP,  # CLIP, SigLIP and most others
    "9ca1650479416716": Code.PLAIN_MLP,  # Qwen 3 VL and 3.5
    "4e3e6f59926d6c5c": Code.PLAIN_MLP,  # Qwen 2 VL
    "93d662d105ce35eb": Code.LAYER,  # Llama, Mistral, Qwen 2 and 3 and most others
    "bc2f9c95094d14e2": Code.LAYER,  # Mixtral, MiniMax M2
    "2ac17ef6547413b2": Code.LAYER,  # gpt-oss
    "43a8ddae3485c461": Code.LAYER,  # Qwen 3 VL
    "a8ac7c75040156b4": Code.LAYER_WITH_DROPOUT,  # Phi-3
    "f8a1ca7b615c612e": Code.LAYER_OF_FOUR_NORMS,  # Gemma 2 and 3
    "8b90ebb0ec7ea417": Code.GLM_LAYER,  # GLM 4
    "7b7aa53fab525a89": Code.HYPERCLOVA_LAYER,  # HyperCLOVA X
    "2e0f8e1722d87214": Code.SCALED_LAYER_OF_FOUR_NORMS,  # Gemma 4
    "f1d1b172e280c62b": Code.SCALED_LAYER_OF_FOUR_NORMS,  # Gemma 4 without encoders
    "d69009bb0c0eab31": Code.LAYER_OF_LATE_NORMS,  # OLMo 2 and 3
    "13de1827d0dbf462": Code.LAYER,  # Granite
    "bd41a97847f3519d": Code.LAYER,  # Granite's mixtures
    "57bb54dddf63c3cf": Code.LAYER,  # Granite's mixtures with an expert for all tokens
    "a1068c443353aaa9": Code.LAYER,  # Qwen 3.5 before transformers 5.24
    "0c0efce5e58c007c": Code.LAYER,  # Qwen 3.5
    "97d6a6daa7df04a2": Code.LAYER,  # Qwen3-Next, and Qwen 3.5 with experts
    "1f24de0c49f00178": Code.LAYER,  # Granite 4 H
    "f51411616131b2d5": Code.BLOCK,  # Nemotron-H
    "4ad3f03adad4fc64": Code.BODY,  # Llama, OLMo 2 and most others
    "c0a062d39e2ed409": Code.BODY,  # Mistral, Ministral 3, Phi-3
    "a8716c6a30cc27f3": Code.BODY,  # Qwen 2 and 3
    "a680fcc09ec23f2f": Code.BODY,  # Gemma
    "0ed0ab74f3a9164a": Code.BODY,  # Gemma 2
    "c8f0079c0ac6b832": Code.BODY,  # Ministral
    "137aea7d45a92d1a": Code.BODY,  # LFM2
    "bd8b85b32611a1d9": Code.BODY,  # Granite, HyperCLOVA X
    "618316a80bb4f5b1": Code.BODY,  # Granite 4 H
}


def code_of(function: Any, owner: Any = None) -> Code | None:
    """Returns what a function computes; None if it is not known. `owner`: the class of which it is a method."""
    return _KNOWN.get(code_digest(function, owner) or "")


def has_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether a forward gets a cache. A step gives none."""
    return any(arguments.get(name) is not None for name in CACHES)


@cache
def code_digest(function: Any, owner: Any = None) -> str | None:
    """Returns the digest of a function and of the methods of `owner` that it calls on itself; None for a function without source."""
    parts, todo = {}, [("", inspect.unwrap(function))]
    for name, part in todo:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
        except (OSError, TypeError, SyntaxError):
            return None
        if not isinstance(tree, ast.FunctionDef):
            return None
        parts[name] = repr((_plain(tree.args), _plain(tree.body[ast.get_docstring(tree) is not None :])))
        attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        called = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"}
        methods = ((name, inspect.getattr_static(owner, name, None)) for name in called - parts.keys())
        todo += [(name, method) for name, method in methods if isinstance(method, FunctionType)]
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:16]


def _plain(node: Any) -> Any:
    """Returns a syntax tree as tuples, without what differs between versions of Python: empty fields, and places in the text."""
    if isinstance(node, list):
        return tuple(_plain(part) for part in node if not _needs_a_cache(part))
    if not isinstance(node, ast.AST):
        return "cache" if node in CACHES else node
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _LEFT_OUT)
    return (type(node).__name__, *((name, _plain(value)) for name, value in fields if value not in (None, [])))


def _needs_a_cache(node: Any) -> bool:
    """Whether a statement runs only with a cache."""
    if not isinstance(node, ast.If) or node.orelse or not isinstance(node.test, ast.Compare):
        return False
    test = node.test
    return isinstance(test.left, ast.Name) and test.left.id in CACHES and isinstance(test.ops[0], ast.IsNot)


_LEFT_OUT = ("annotation", "returns", "decorator_list", "type_comment", "type_params", "kind", "ctx")
