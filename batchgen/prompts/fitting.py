"""Whether a prompt fits the model's context beside what comes after it, and what is left of one that is cut."""

from __future__ import annotations

import numpy as np

from batchgen.errors import RowError
from batchgen.prompts.tokenizer import LoadedTokenizer
from batchgen.request import TokenArray


class Fitting:
    """Prompts and a context. `way` is `PromptConfig.on_long_prompt`."""

    def __init__(self, text: LoadedTokenizer, way: str) -> None:
        self._context = text.context_length
        self._bos = text.tokenizer.bos_token_id
        self._way = way

    def with_completion(self, tokens: TokenArray, max_tokens: int) -> TokenArray:
        """The prompt, cut where it leaves no room for a token: then to leave room for `max_tokens`, though never to less than half of the context.

        Room for one token would fit too, and would give completions of one token. Raises `RowError("prompt_too_long")`.
        """
        context = self._context
        if len(tokens) < context:
            return tokens
        error = f"the prompt has {len(tokens)} tokens, and the model's context of {context} tokens must hold it and a completion"
        return self._cut(tokens, max(context - max_tokens, context // 2), error)

    def with_text(self, tokens: TokenArray, text_tokens: int, what: str) -> TokenArray:
        """The prompt, cut where it leaves no room for a text, called `what`, of `text_tokens`. Raises `RowError("prompt_too_long")`."""
        context = self._context
        if len(tokens) + text_tokens <= context:
            return tokens
        error = (
            f"the prompt has {len(tokens)} tokens, and the model's context of {context} tokens must hold it "
            f"and the {what}, of {text_tokens} tokens"
        )
        return self._cut(tokens, context - text_tokens, error)

    def _cut(self, tokens: TokenArray, keep: int, error: str) -> TokenArray:
        """`keep` tokens of the prompt. A leading beginning-of-text token stays."""
        if self._way == "error" or keep < 1:
            raise RowError("prompt_too_long", error)
        if self._way == "truncate-right":
            return tokens[:keep].copy()
        if keep > 1 and tokens[0] == self._bos:
            return np.concatenate((tokens[:1], tokens[len(tokens) - keep + 1 :]))
        return tokens[len(tokens) - keep :].copy()
