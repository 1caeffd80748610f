"""A tiny random Llama on disk, and its tokenizer of bytes."""

from pathlib import Path
from typing import Any

BYTE_COUNT = 256
"""Ids 0 to 255 of the tiny tokenizer are bytes, in the order of its alphabet. The special tokens follow."""
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
BOS_ID, EOS_ID, PAD_ID = BYTE_COUNT, BYTE_COUNT + 1, BYTE_COUNT + 2
CONTEXT_LENGTH = 512

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if not loop.last or add_generation_prompt or m.role != 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% else %}<think>{% endif %}{% endif %}"
)
"""It opens thoughts with `<think>`."""


def byte_tokenizer(special: tuple[str, ...], plain: tuple[str, ...] = ()) -> Any:
    """A tokenizer with one token for each byte and no merges. `special` and `plain` are additional tokens; special ones do not appear in texts."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return tokenizer


def save_tiny_tokenizer(folder: Path, *, chat: bool | str) -> None:
    """Saves a tokenizer of bytes. Like Llama's, it puts a begin token before a prompt. `chat`: its chat template, `CHAT_TEMPLATE` if true."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_tokenizer(SPECIAL_TOKENS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", BOS_ID)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE if chat is True else chat
    fast.save_pretrained(folder)


def tiny_llama(kind: str = "LlamaForCausalLM", seed: int = 0, **config: Any) -> Any:
    """A random Llama of one layer. `initializer_range` keeps greedy margins far above rounding errors."""
    import torch
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": BYTE_COUNT + len(SPECIAL_TOKENS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": 0.1,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": False,
        "dtype": torch.float32,
    }
    torch.manual_seed(seed)
    return getattr(transformers, kind)(transformers.LlamaConfig(**(settings | config))).eval()


def save_tiny_llama(folder: Path, *, chat: bool | str = False, seed: int = 0, **config: Any) -> Path:
    """Saves `tiny_llama` and its tokenizer."""
    tiny_llama(seed=seed, **config).save_pretrained(folder)
    save_tiny_tokenizer(folder, chat=chat)
    return folder
