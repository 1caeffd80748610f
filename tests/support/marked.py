"""Byte tokenizers whose marks of thoughts and calls are tokens of a chosen kind, and completions that are read token by token."""

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from batchgen.parsers.thinking import thinking_format
from batchgen.parsers.tool_calls import tool_format
from batchgen.sampling.stopping import Detokenizer, Stopper
from batchgen.sampling_params import SamplingParams
from support.tiny_model import byte_tokenizer

EOS = "<eos>"
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|return|>", "<|call|>")


def make(special: tuple[str, ...] = (), plain: tuple[str, ...] = (), template: str | None = None) -> Any:
    """A tokenizer of bytes; see `byte_tokenizer`."""
    tokenizer = byte_tokenizer((EOS, *special), plain)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, chat_template=template)


def run(tokenizer: Any, prompt: str, completion: str, **options: Any) -> Any:
    """The text, the reasoning, its number of tokens and the finish reason of a completion that is read token by token."""
    stopper = complete(tokenizer, prompt, completion, **options)
    return stopper.text, stopper.reasoning, stopper.reasoning_tokens, stopper.finish_reason


def complete(
    tokenizer: Any,
    prompt: str,
    completion: str,
    *,
    stop: tuple[str, ...] = (),
    max_tokens: int = 1000,
    tools: str = "",
    **params: Any,
) -> Stopper:
    """The stopper after it has read the tokens of a completion up to its end."""
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, thinking_format(tokenizer), tool_format(tokenizer))
    eos = frozenset(
        tokenizer.convert_tokens_to_ids(t) for t in (EOS, "<|return|>", "<|call|>") if t in tokenizer.get_vocab()
    )
    stopper = Stopper(
        SamplingParams(max_tokens=max_tokens, stop=stop, **params),
        max_tokens,
        eos,
        detokenizer,
        np.array(ids, dtype=np.int32),
        tools,
    )
    for token in tokenizer.encode(completion, add_special_tokens=False):
        if stopper.append(token) is not None:
            break
    return stopper
