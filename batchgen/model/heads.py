"""Models without a language head: the output after a token is its hidden state, or the logits of a classification head."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification
from transformers.modeling_outputs import CausalLMOutput

from batchgen.errors import ModelError
from batchgen.model.architectures import is_multimodal
from batchgen.model.multimodal import model_class
from batchgen.parsers.heads import OutputHead

LANGUAGE_HEADS = ("lm_head", "embed_out")
"""The names of the linear layer that makes logits, in transformers' decoders."""
SCORE = "score"
"""The name of the linear layer that classifies, in transformers' decoders."""


def class_for(head: OutputHead | None, config: Any) -> Any:
    """Returns the class of transformers whose `from_pretrained` loads a model with this head (None: the language head). Raises `ModelError`."""
    if head is None or (head.task == "embed" and is_multimodal(config)):
        return model_class(config)
    if is_multimodal(config):
        raise ModelError(
            "--classify is for models of text alone, and this one is multimodal",
            "use transformers for it, or a classifier without vision and audio",
        )
    return AutoModel if head.task == "embed" else AutoModelForSequenceClassification


def without_language_head(module: Any, head: OutputHead) -> Headed:
    """Returns the loaded model with the outputs of `head` in place of logits. Raises `ModelError` if the model has another kind of head."""
    body = getattr(module, "base_model", module)
    if head.task == "embed":
        return Headed(body, None)
    score = getattr(module, SCORE, None)
    if not isinstance(score, torch.nn.Linear) or body is module:
        raise ModelError(
            f"--classify: the head of {type(module).__name__} is not one linear layer on the last token's hidden state"
        )
    return Headed(body, score)


class Headed(torch.nn.Module):
    """The body of a model and a small head. It is called like a causal language model, and its `logits` are the head's outputs."""

    def __init__(self, body: Any, score: torch.nn.Linear | None) -> None:
        """`score`: the layer that classifies; None for hidden states."""
        super().__init__()
        self.body = body
        self.score = score

    @property
    def config(self) -> Any:
        return self.body.config

    def get_input_embeddings(self) -> Any:
        return self.body.get_input_embeddings()

    def set_attn_implementation(self, name: str) -> None:
        self.body.set_attn_implementation(name)

    def forward(self, logits_to_keep: Any, **inputs: Any) -> CausalLMOutput:
        """Returns `logits` [1, N, width]: the outputs after the tokens at these places."""
        hidden = self.body(**inputs).last_hidden_state[:, logits_to_keep]
        return CausalLMOutput(logits=hidden if self.score is None else self.score(hidden))
