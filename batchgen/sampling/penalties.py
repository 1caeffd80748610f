"""Repetition, presence and frequency penalties, and the tokens of each sequence that they need, on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.kernels.transfer import put
from batchgen.request import TokenArray
from batchgen.sampling.batch_params import StepParams
from batchgen.sampling_params import SamplingParams


class VocabularyRows:
    """A tensor [rows, V] on the device whose rows sequences take and give back. It grows when no row is free."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.rows = torch.zeros((0, width), dtype=dtype, device=device)
        self._free: list[int] = []

    def take(self) -> int:
        """Returns a free row, set to zeros."""
        if not self._free:
            old = len(self.rows)
            self._free = list(range(2 * old + 7, old - 1, -1))
            # Not an inference tensor even under inference mode: those cannot be changed outside it.
            with torch.inference_mode(False), torch.no_grad():
                self.rows = torch.cat([self.rows, self.rows.new_zeros((old + 8, self.rows.shape[1]))])
        row = self._free.pop()
        self.rows[row].zero_()
        return row

    def give_back(self, rows: Iterable[int]) -> None:
        self._free += rows


class Penalties:
    """The penalties of all sequences. The fields `seen` and `counts` of a sequence's record are rows here; -1 for none."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._few = device.type == "cpu"
        self._seen = VocabularyRows(vocab_size, torch.bool, device)
        self._counts = VocabularyRows(vocab_size, torch.int32, device)

    def add(self, record: Any, params: SamplingParams, prompt: TokenArray, generated: Sequence[int]) -> None:
        """Takes the rows that a sequence needs, and writes their numbers into its record."""
        if params.repetition_penalty == 1 and not params.presence_penalty and not params.frequency_penalty:
            return
        sampled = np.asarray(generated, dtype=np.int64)
        if params.repetition_penalty != 1:
            ids = np.unique(np.concatenate([prompt, sampled]))
            ids = ids[ids < self._vocab_size]  # a prompt may hold ids that the model has no logits for
            row = record["seen"] = self._seen.take()
            self._seen.rows[row].index_fill_(0, put(ids, self._device), True)
        if params.presence_penalty or params.frequency_penalty:
            row = record["counts"] = self._counts.take()
            if sampled.size:
                ids, counts = np.unique(sampled, return_counts=True)
                self._counts.rows[row].index_copy_(
                    0, put(ids, self._device), put(counts.astype(np.int32), self._device)
                )

    def remove(self, records: NDArray[Any]) -> None:
        """Gives the rows of some sequences back. The next owner writes them only after the last step of these, because the device works in the order of the launches."""
        for name, rows in (("seen", self._seen), ("counts", self._counts)):
            rows.give_back(records[name][records[name] >= 0].tolist())

    def applied(self, logits: torch.Tensor, step_params: StepParams) -> torch.Tensor:
        """Returns a float32 copy of the logits [N, V] with the penalties applied."""
        repetition, counted = (np.flatnonzero(step_params.records[name] >= 0) for name in ("seen", "counts"))
        scores = logits.to(torch.float32, copy=True)
        if repetition.size:
            some, at = step_params.part(repetition)
            seen = self._seen.rows[some.rows("seen")]
            drafts = some.drafts()
            if drafts is not None:
                seen[drafts] = True
            marked = _PenalizedScores(scores, at, seen, self._few)
            part, penalty = marked.scores, marked.of(some.column("repetition_penalty"))
            marked.replace(torch.where(part < 0, part * penalty, part / penalty))
        if counted.size:
            some, at = step_params.part(counted)
            counts = self._counts.rows[some.rows("counts")]
            drafts = some.drafts()
            if drafts is not None:
                counts.index_put_(drafts, torch.ones_like(drafts[1], dtype=counts.dtype), accumulate=True)
            marked = _PenalizedScores(scores, at, counts, self._few)
            part = marked.scores - marked.of(some.column("frequency_penalty")) * marked.marks
            marked.replace(part - marked.of(some.column("presence_penalty")))
        return scores

    def note(self, tokens: torch.Tensor, step_params: StepParams) -> None:
        """Remembers the tokens [N] that were sampled. A sequence may have several."""
        for name, state in (("seen", self._seen), ("counts", self._counts)):
            has = np.flatnonzero(step_params.records[name] >= 0)
            if has.size:
                some, at = step_params.part(has)
                ids = tokens[at]
                # A Python number would be copied to the device, and the host would wait for that.
                ones = torch.ones_like(ids, dtype=state.rows.dtype)
                state.rows.index_put_((some.rows(name), ids), ones, accumulate=name == "counts")


class _PenalizedScores:
    """The scores of the tokens that have a mark. With `few`, for the CPU, the other tokens are not computed, which are nearly all."""

    def __init__(self, all_scores: torch.Tensor, at: torch.Tensor | slice, marks: torch.Tensor, few: bool) -> None:
        """`marks` [n, V], of any type, are those of the rows `at` of `all_scores` [N, V]."""
        self._all, self._at, self._few = all_scores, at, few
        if self._few:
            row, token = map(torch.from_numpy, np.divmod(np.flatnonzero(marks.numpy()), marks.shape[1]))
            self._row, self._place = row, (row if isinstance(at, slice) else at[row], token)
            self.marks, self.scores = marks[row, token], all_scores[self._place]
        else:
            self.marks, self.scores = marks, all_scores[at]

    def of(self, column: torch.Tensor) -> torch.Tensor:
        """Returns a column [n, 1] of the rows so that it goes with `scores`."""
        return column[self._row, 0] if self._few else column

    def replace(self, scores: torch.Tensor) -> None:
        """Replaces the scores of the tokens that have a mark."""
        if self._few:
            self._all[self._place] = scores.to(self._all.dtype)
        else:
            self._all[self._at] = torch.where(self.marks != 0, scores, self.scores).to(self._all.dtype)
