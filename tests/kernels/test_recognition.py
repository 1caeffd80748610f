"""Code of transformers is recognized by a digest of its syntax tree, whatever it is called and however it is formatted."""

import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from batchgen.kernels import recognition
from batchgen.kernels.recognition import Code, code_digest, code_of, unknown_code


class Scaled:
    """A module whose forward calls a method of its own."""

    def half(self, x):
        return x / 2

    def forward(self, x, by=2):
        return self.half(x) * by


class Annotated(Scaled):
    @torch.inference_mode()
    def forward(self, x: torch.Tensor, by: int = 2) -> torch.Tensor:
        """The same."""
        # with a comment,
        return (
            self.half(x)  # on more lines
            * by
        )


class OtherBody(Scaled):
    def forward(self, x, by=2):
        return self.half(x) + by


class OtherDefault(Scaled):
    def forward(self, x, by=3):
        return self.half(x) * by


class OtherMethod(Scaled):
    def half(self, x):
        return x / 3


def test_annotations_docstrings_decorators_and_layout_do_not_matter():
    assert code_digest(Annotated.forward, Annotated) == code_digest(Scaled.forward, Scaled)


@pytest.mark.parametrize("kind", [OtherBody, OtherDefault, OtherMethod])
def test_other_code_has_another_digest(kind):
    assert code_digest(kind.forward, kind) != code_digest(Scaled.forward, Scaled)


def test_a_digest_is_the_same_in_every_version_of_python():
    """The syntax tree of this version is compared with the digest as another version computed it."""
    assert code_digest(Scaled.forward, Scaled) == "4f66c50f112d73b0"


def test_a_function_without_source_is_not_known():
    names = {}
    exec("def forward(self, x): return x", names)
    assert [code_of(one) for one in (names["forward"], len, lambda x: x, None)] == [None] * 4


@pytest.mark.parametrize(
    ("module", "name", "code"),
    [
        (modeling_llama, "LlamaRMSNorm", Code.ROUNDED_NORM),
        (modeling_llama, "LlamaMLP", Code.GATED_MLP),
        (modeling_llama, "LlamaRotaryEmbedding", Code.COS_AND_SIN),
        (modeling_llama, "LlamaAttention", Code.ATTENTION),
        (modeling_llama, "LlamaDecoderLayer", Code.LAYER),
        (modeling_llama, "LlamaForCausalLM", None),
        (modeling_qwen3, "Qwen3Attention", Code.ATTENTION),
        (modeling_phi3, "Phi3DecoderLayer", Code.LAYER_WITH_DROPOUT),
        (modeling_gemma2, "Gemma2RMSNorm", Code.NORM_PLUS_ONE),
        (modeling_gemma2, "Gemma2DecoderLayer", Code.LAYER_OF_FOUR_NORMS),
        (modeling_olmo2, "Olmo2RMSNorm", Code.NORM),
        (modeling_olmo2, "Olmo2DecoderLayer", Code.LAYER_OF_LATE_NORMS),
        (modeling_qwen3_5, "Qwen3_5Attention", Code.GATED_ATTENTION),
        (modeling_qwen3_5, "Qwen3_5DecoderLayer", Code.HYBRID_LAYER),
        (modeling_qwen3_5_moe, "Qwen3_5MoeDecoderLayer", Code.HYBRID_LAYER),
        (modeling_qwen3_next, "Qwen3NextRMSNormGated", Code.GATE_AFTER_ROUNDED_NORM),
        (modeling_qwen3_next, "Qwen3NextDecoderLayer", Code.HYBRID_LAYER),
        (modeling_granitemoehybrid, "GraniteMoeHybridRMSNormGated", Code.GATE_BEFORE_NORM),
        (modeling_granitemoehybrid, "GraniteMoeHybridDecoderLayer", Code.GRANITE_LAYER),
    ],
)
def test_classes_of_transformers_are_known(module, name, code):
    kind = getattr(module, name)
    assert code_of(kind.forward, kind) == code


def test_unknown_code_is_listed_with_the_names_that_have_it(monkeypatch):
    made = code_digest(modeling_llama.LlamaMLP.forward, modeling_llama.LlamaMLP)
    monkeypatch.delitem(recognition._KNOWN, made)
    assert unknown_code([modeling_llama, modeling_qwen3]) == {made: ["LlamaMLP", "Qwen3MLP"]}
