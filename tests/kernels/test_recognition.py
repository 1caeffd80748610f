"""Code of transformers is recognized by a digest of its syntax tree, whatever it is called and however it is formatted."""

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from batchgen.kernels import recognition
from batchgen.kernels.recognition import code_digest, code_of
from benchmarks.unknown_code import unknown_code


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


def test_unknown_code_is_listed_with_the_names_that_have_it(monkeypatch):
    made = code_digest(modeling_llama.LlamaMLP.forward, modeling_llama.LlamaMLP)
    monkeypatch.delitem(recognition._KNOWN, made)
    assert unknown_code([modeling_llama, modeling_qwen3]) == {made: ["LlamaMLP", "Qwen3MLP"]}
