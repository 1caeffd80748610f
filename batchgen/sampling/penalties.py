"""Repetition, presence and frequency penalties, and the tokens of each sequence that they need, on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.kernels.build import DTYPES
from batchgen.kernels.ops import penalize
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

    def __init__(self, vocab_size: int, device: torch.device, *, own_kernels: bool = False) -> None:
        self._vocab_size, self._device, self._own_kernels = vocab_size, device, own_kernels
        self._marks = {
            "seen": VocabularyRows(vocab_size, torch.bool, device),
            "counts": VocabularyRows(vocab_size, torch.int32, device),
        }

    def add(self, record: Any, params: SamplingParams, prompt: TokenArray, generated: Sequence[int]) -> None:
        """Takes the rows that a sequence needs, and writes their numbers into its record."""
        if params.repetition_penalty == 1 and not params.presence_penalty and not params.frequency_penalty:
            return
        sampled = np.asarray(generated, dtype=np.int64)
        if params.repetition_penalty != 1:
            ids = np.unique(np.concatenate([prompt, sampled]))
            ids = ids[ids < self._vocab_size]  # a prompt may hold ids that the model has no logits for
            row = record["seen"] = self._marks["seen"].take()
            self._marks["seen"].rows[row].index_fill_(0, put(ids, self._device), True)
        if params.presence_penalty or params.frequency_penalty:
            row = record["counts"] = self._marks["counts"].take()
            if sampled.size:
                ids, counts = np.unique(sampled, return_counts=True)
                self._marks["counts"].rows[row].index_copy_(
                    0, put(ids, self._device), put(counts.astype(np.int32), self._device)
                )

    def remove(self, records: NDArray[Any]) -> None:
        """Gives the rows of some sequences back. The next owner writes them only after the last step of these, because the device works in the order of the launches."""
        for name, rows in self._marks.items():
            rows.give_back(records[name][records[name] >= 0].tolist())

    def applied(self, logits: torch.Tensor, step_params: StepParams) -> torch.Tensor:
        """Returns a float32 copy of the logits [N, V] with the penalties applied."""
        records = step_params.records
        if self._own_kernels and logits.dtype in DTYPES:
            return penalize(logits, records, *(self._table(name, step_params) for name in self._marks))
        scores = logits.to(torch.float32, copy=True)
        if (has := np.flatnonzero(records["seen"] >= 0)).size:
            some, at = step_params.part(has)
            part, penalty = scores[at], some.column("repetition_penalty")
            scores[at] = torch.where(
                self._marks_of("seen", some), torch.where(part < 0, part * penalty, part / penalty), part
            )
        if (has := np.flatnonzero(records["counts"] >= 0)).size:
            some, at = step_params.part(has)
            part, counts = scores[at], self._marks_of("counts", some)
            less = part - some.column("frequency_penalty") * counts - some.column("presence_penalty")
            scores[at] = torch.where(counts != 0, less, part)
        return scores

    def _marks_of(self, name: str, step_params: StepParams) -> torch.Tensor:
        """Returns a copy of the marks [n, V] of rows that all have some, with their drafts."""
        marks, drafts = self._marks[name].rows[step_params.rows(name)], step_params.drafts()
        if drafts is not None:
            rows, ids = (part[drafts[1] < self._vocab_size] for part in drafts)  # drafts come from prompts too
            marks.index_put_((rows, ids), torch.ones_like(ids, dtype=marks.dtype), accumulate=name == "counts")
        return marks

    def _table(self, name: str, step_params: StepParams) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Returns marks [.., V] and which of their rows each row of the step has, -1 for none. Nothing is copied without drafts."""
        rows = step_params.records[name].copy()
        has = np.flatnonzero(rows >= 0)
        if not has.size or step_params.drafts() is None:
            return self._marks[name].rows, rows
        rows[has] = np.arange(len(has))
        return self._marks_of(name, step_params.part(has)[0]), rows

    def note(self, tokens: torch.Tensor, step_params: StepParams) -> None:
        """Remembers the tokens [N] that were sampled. A sequence may have several."""
        for name, marks in self._marks.items():
            has = np.flatnonzero(step_params.records[name] >= 0)
            if has.size:
                some, at = step_params.part(has)
                ids = tokens[at]
                # A Python number would be copied to the device, and the host would wait for that.
                ones = torch.ones_like(ids, dtype=marks.rows.dtype)
                marks.rows.index_put_((some.rows(name), ids), ones, accumulate=name == "counts")
