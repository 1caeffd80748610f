"""From rows to token ids: templates, chat templates, tokenizing, length checks, a row's own parameters. No weights, no torch."""

from batchgen.prompts.builder import PromptBuilder
from batchgen.prompts.tokenizer import LoadedTokenizer, load_tokenizer

__all__ = ["LoadedTokenizer", "PromptBuilder", "load_tokenizer"]
