"""Tiny tokenizers whose ids can be worked out by hand, and prompt builders that use them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from batchgen.config import PromptConfig
from batchgen.parsers.tool_calls import tool_format
from batchgen.prompts import LoadedTokenizer, PromptBuilder
from batchgen.records.rows import Row
from batchgen.sampling_params import SamplingParams

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = len(SPECIAL) + 256
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


OPEN = "<|im_start|>assistant\n"
"""How CHATML begins an answer."""
CHAT, RAW = "/v1/chat/completions", "/v1/completions"


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **more}


def turn(role: str, text: str) -> str:
    """A message as CHATML writes it."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def asks(url: str, **body: Any) -> dict[str, Any]:
    """A request in OpenAI's Batch form."""
    return {"custom_id": "r1", "method": "POST", "url": url, "body": body}


USER = says("user", "a")


def byte_ids(text: str) -> list[int]:
    """The ids that `byte_tokenizer` gives a text: 0 to 3 for the special tokens, 4 + byte for everything else."""
    out: list[int] = []
    while text:
        for i, token in enumerate(SPECIAL):
            if text.startswith(token):
                out.append(i)
                text = text[len(token) :]
                break
        else:
            out += [len(SPECIAL) + b for b in text[0].encode()]
            text = text[1:]
    return out


def byte_tokenizer(*, bos: bool = True, eos: bool = False, chat_template: Any = None, **options: Any) -> Any:
    """Byte-level BPE without merges. `bos` and `eos` say whether these tokens are put around a text."""
    vocab = {token: i for i, token in enumerate(SPECIAL)} | {c: len(SPECIAL) + b for b, c in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    around = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=around, pair=None, special_tokens=[("<s>", 0), ("</s>", 1)]),
    ])  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat_template, **options
    )


def loaded(tokenizer: Any, *, context: int = 1000, vocab_size: int | None = None) -> LoadedTokenizer:
    return LoadedTokenizer(
        hf_tokenizer=tokenizer,
        tool_format=tool_format(tokenizer),
        hf_config=LlamaConfig(max_position_embeddings=context),
        context_length=context,
        eos_token_ids=(1,),
        vocab_size=vocab_size or len(tokenizer),
    )


def builder(
    *,
    chat_template: Any = None,
    context: int = 1000,
    bos: bool = True,
    sampling: SamplingParams | None = None,
    **prompts: Any,
) -> PromptBuilder:
    """A prompt builder for the byte tokenizer. `chat_template` is the model's own, and `prompts` are the user's options."""
    tokenizer = loaded(byte_tokenizer(bos=bos, chat_template=chat_template), context=context)
    return PromptBuilder(tokenizer, PromptConfig(**prompts), sampling or SamplingParams())


def rows(*columns: dict[str, Any]) -> list[Row]:
    return [Row(number=i, columns=c, error=None, source=f"in.jsonl:{i + 1}") for i, c in enumerate(columns)]


def one(columns: dict[str, Any], **options: Any) -> Any:
    """The request or result that `builder(**options)` makes from one row."""
    (out,) = builder(**options).build(rows(columns))
    return out


def text_of(request: Any) -> str:
    """The prompt of a request as text, with its special tokens."""
    assert not hasattr(request, "error_type"), request
    return str(byte_tokenizer().decode(request.tokens.tolist(), skip_special_tokens=False))


def error_of(result: Any) -> tuple[str, str]:
    """The error type and message of a failed row."""
    assert hasattr(result, "error_type"), result
    assert result.finish_reason == "error"
    return result.error_type, result.error_message


def save_model(
    folder: Path, *, tokenizer: Any = None, config: dict[str, Any] | None = None, generation: Any = None
) -> str:
    """Saves a model folder without weights. For another `model_type`, `max_position_embeddings` is left at its default."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    values = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": VOCAB_SIZE, "eos_token_id": 1}
    if config and "model_type" in config:
        del values["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(values | (config or {})))
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (folder / "generation_config.json").write_text(text)
    return str(folder)
