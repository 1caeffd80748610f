"""Whether the regular expressions and JSON schemas of a job can be used, before anything runs."""

from __future__ import annotations

from batchgen.engine.grammars import Vocabulary
from batchgen.errors import RowError, UsageError
from batchgen.prompts import Draft, LoadedTokenizer
from batchgen.result import Result
from batchgen.sampling_params import SamplingParams


class GrammarCheck:
    """Checks grammars against a model's tokenizer; costs nothing where there are none."""

    def __init__(self, text: LoadedTokenizer) -> None:
        self._vocabulary = Vocabulary(text.tokenizer, text.vocab_size)

    def of_command(self, params: SamplingParams) -> None:
        """Raises `UsageError` for a grammar that cannot be used, or where there can be none."""
        fault = self._vocabulary.grammar(params).fault if params.constrained else ""
        if fault:
            name, _, rest = fault.partition(" ")
            raise UsageError(f"--{name.replace('_', '-')} {rest}")

    def of_row(self, draft: Draft) -> Draft | Result:
        """The draft, or the result of a row whose grammar cannot be used."""
        fault = self._vocabulary.grammar(draft.params).fault if draft.params.constrained else ""
        if fault:
            return Result.failed(draft.row, RowError("constraint_error", fault), len(draft.tokens))
        return draft
