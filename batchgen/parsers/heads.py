"""What a model gives instead of text: an embedding of each prompt, or the labels or the reward of a classification head. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """How a prompt's result is made from the model's output: `embed` pools hidden states, `classify` reads the logits of a head."""

    task: str
    """embed or classify"""
    pooling: str = "last"
    """last: the output after the prompt's last token. mean: the mean of the outputs after all of its tokens."""
    normalize: bool = False
    """Whether an embedding is scaled to length 1."""
    labels: tuple[str, ...] = ()
    """The names of the head's logits. One label alone is a reward: a number, not a probability."""
    independent: bool = False
    """Whether labels do not exclude each other: each then has a probability of its own (sigmoid), instead of its part of 1 (softmax)."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """By name: texts to put before raw prompts, of config_sentence_transformers.json."""
    prompt_name: str | None = None
    """The name of the text that is used unless the user names another; None for none."""
    chat: bool = False
    """Whether a text is a user message of the chat template, and the text before it a system message; otherwise both are raw."""
    pad_token_id: int | None = None
    """A classification head reads the last token that is not this one, as in transformers."""

    @property
    def result_name(self) -> str:
        """The field of a row that holds the result: `embedding`, `choice_probs` or `reward`."""
        return "embedding" if self.task == "embed" else "choice_probs" if len(self.labels) > 1 else "reward"

    def result_of(self, output: NDArray[np.float32]) -> dict[str, Any]:
        """Returns the fields of a `Result` for the model's output [width]: pooled hidden states, or logits. Their numbers are finite."""
        import numpy as np

        if self.task == "embed":
            length = float(np.sqrt(np.square(output, dtype=np.float64).sum())) if self.normalize else 1.0
            return {"text": None, "finish_reason": None, "embedding": (output / max(length, 1e-12)).astype(np.float32)}
        logits = output.astype(np.float64)
        if len(logits) == 1:
            return {"text": None, "finish_reason": None, "reward": float(logits[0])}
        if self.independent:
            probs = np.exp(-np.logaddexp(0.0, -logits))
        else:
            weights = np.exp(logits - logits.max())
            probs = weights / weights.sum()
        return {
            "text": self.labels[int(logits.argmax())],
            "finish_reason": "stop",
            "choice_probs": dict(zip(self.labels, probs.tolist(), strict=True)),
        }
