"""The sampling parameters of the running sequences, by sampler index: records on the host and one table on the device.

On the CPU there is no table: a column of a step's rows is a copy from the host's records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchgen.kernels.transfer import put
from batchgen.sampling_params import SamplingParams

# The record of a sampler index. `seen` and `counts` are rows of the penalty tensors; -1 if the sequence needs none.
_RECORD = np.dtype(
    [
        ("used", "?"),
        ("temperature", "f4"),
        ("top_k", "i8"),  # 0 for off
        ("top_p", "f8"),  # inf for off
        ("min_p", "f4"),
        ("repetition_penalty", "f4"),
        ("presence_penalty", "f4"),
        ("frequency_penalty", "f4"),
        ("seed", "i8"),
        ("key", "u8", 2),
        ("choice", "i8"),
        ("logprobs", "i8"),  # number of likeliest tokens to report; -1 for no log-probabilities
        ("seen", "i8"),
        ("counts", "i8"),
    ]
)
_EMPTY = np.zeros((), dtype=_RECORD)

# The fields that the device needs, and their types there.
_TABLE: dict[str, torch.dtype] = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float64,
    "min_p": torch.float32,
    "repetition_penalty": torch.float32,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
    "seen": torch.int64,
    "counts": torch.int64,
}
_COLUMNS = {name: i for i, name in enumerate((*_TABLE, "u"))}


class StepParams:
    """The rows of a step, or some of them: the record and the uniform number of each."""

    def __init__(
        self,
        records: NDArray[Any],
        u: NDArray[np.float64],
        device: torch.device,
        table: torch.Tensor | None,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`records` and `u` [N] on the host; `table` [N, columns] on the device, None on the CPU. `drafts`: see `Sampler.sample`."""
        self.records = records
        self.u = u
        self._device = device
        self._table = table
        self._drafts = drafts

    def __len__(self) -> int:
        return len(self.records)

    @property
    def penalized(self) -> bool:
        """Whether a row has a penalty."""
        return bool(((self.records["seen"] >= 0) | (self.records["counts"] >= 0)).any())

    def column(self, name: str) -> torch.Tensor:
        """Returns a field of the rows' records [N, 1] on the device; the name `u` gives their uniform numbers."""
        if self._table is None:
            return put((self.u if name == "u" else self.records[name]).copy(), self._device)[:, None]
        at = _COLUMNS[name]
        dtype = _TABLE.get(name, self._table.dtype)
        return self._table[:, at : at + 1].to(self._table.dtype if dtype == torch.float64 else dtype)

    def rows(self, name: str) -> torch.Tensor:
        """Returns `column` as [N]."""
        return self.column(name)[:, 0]

    def drafts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the draft tokens before the rows, each with the row that it comes before [M]; None if there are none."""
        if self._drafts is None:
            return None
        rows = np.repeat(np.arange(len(self)), [len(tokens) for tokens in self._drafts])
        tokens = np.array([token for tokens in self._drafts for token in tokens], dtype=np.int64)
        return put(rows, self._device), put(tokens, self._device)

    def part(self, rows: NDArray[np.int64]) -> tuple[StepParams, torch.Tensor | slice]:
        """Returns these rows, and the index that selects them in tensors that have all rows."""
        if len(rows) == len(self):
            return self, slice(None)
        at = put(rows, self._device)
        table = None if self._table is None else self._table[at]
        drafts = None if self._drafts is None else [self._drafts[row] for row in rows]
        return StepParams(self.records[rows], self.u[rows], self._device, table, drafts), at

    def chunk(self, rows: slice) -> StepParams:
        """Returns a run of adjacent rows."""
        if rows.start == 0 and rows.stop >= len(self):
            return self
        table = None if self._table is None else self._table[rows]
        drafts = None if self._drafts is None else self._drafts[rows]
        return StepParams(self.records[rows], self.u[rows], self._device, table, drafts)


class BatchParams:
    """The records of all sequences in the sampler. There is room for `count` at first; `wide` is the device's widest float type."""

    def __init__(self, vocab_size: int, device: torch.device, wide: torch.dtype, count: int) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._wide = wide
        self._tabled = device.type != "cpu"
        self.records = np.zeros(0, dtype=_RECORD)
        self._params: SamplingParams | None = None
        """The parameters that came last; `_record_of` is the record made of them."""
        self._record_of = _EMPTY
        self._changed: set[int] = set()  # sampler indices whose rows of the table on the device are out of date
        with torch.inference_mode(False):
            self._table = torch.zeros((0, len(_TABLE)), dtype=wide, device=device)
            self.last = torch.zeros(0, dtype=torch.int64, device=device)
        self._make(count)

    def take(self, sampler_index: int, params: SamplingParams, key: bytes, choice: int) -> Any:
        """A sequence takes the index. Returns its record; the caller sets `seen` and `counts` in it. Raises `ValueError` if the index is in use."""
        if sampler_index >= len(self.records):
            self._make(max(sampler_index + 1, 2 * len(self.records)))
        record = self.records[sampler_index]
        if record["used"]:
            raise ValueError(f"sampler index {sampler_index} is in use")
        if params is not self._params:
            self._params, self._record_of = params, self._settings(params)
        self.records[sampler_index] = self._record_of
        record["key"] = np.frombuffer(key, dtype="<u8")
        record["choice"] = choice
        self._changed.add(sampler_index)
        return record

    def free(self, sampler_indices: Sequence[int]) -> NDArray[Any]:
        """Frees the indices and returns the records that they held. Raises `ValueError` if one of them is not in use."""
        records = self.of(sampler_indices)
        self.records[list(sampler_indices)] = _EMPTY
        self._changed.difference_update(sampler_indices)
        return records

    def of(self, sampler_indices: Sequence[int]) -> NDArray[Any]:
        """Returns the records at these indices. Raises `ValueError` if one of them is not in use."""
        records = self.records[np.asarray(sampler_indices, dtype=np.int64)]
        if not records["used"].all():
            raise ValueError(f"sampler indices {np.asarray(sampler_indices)[~records['used']].tolist()} are not in use")
        return records

    def of_step(
        self,
        sampler_indices: Sequence[int],
        records: NDArray[Any],
        u: NDArray[np.float64],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> tuple[StepParams, torch.Tensor]:
        """Returns the rows at these indices, and the indices on the device. Takes one small copy to the device."""
        at = np.asarray(sampler_indices, dtype=np.int64)
        if not self._tabled:
            return StepParams(records, u, self._device, None, drafts), torch.from_numpy(at)
        self._send()
        columns = put(np.stack([at, u]).astype(_numpy(self._wide)), self._device)
        places = columns[0].long()
        return StepParams(
            records, u, self._device, torch.cat([self._table[places], columns[1][:, None]], dim=1), drafts
        ), places

    def _send(self) -> None:
        """Brings the table on the device up to date, in one copy."""
        if not self._changed:
            return
        at = np.fromiter(self._changed, dtype=np.int64)
        self._changed.clear()
        rows = np.stack([at, *(self.records[name][at] for name in _TABLE)], axis=1).astype(_numpy(self._wide))
        sent = put(rows, self._device)
        self._table.index_copy_(0, sent[:, 0].long(), sent[:, 1:])

    def _make(self, count: int) -> None:
        more = count - len(self.records)
        self.records = np.concatenate([self.records, np.zeros(more, dtype=_RECORD)])
        # Not inference tensors even under inference mode: those cannot be changed outside it.
        with torch.inference_mode(False), torch.no_grad():
            self._table = torch.cat([self._table, self._table.new_zeros((more, len(_TABLE)))])
            self.last = torch.cat([self.last, self.last.new_zeros(more)])

    def _settings(self, params: SamplingParams) -> NDArray[Any]:
        """Returns a record with these parameters. It is kept for the next sequence: rows without parameters of their own share one object."""
        record = np.zeros((), dtype=_RECORD)
        for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"):
            record[name] = getattr(params, name)
        record["top_k"] = params.top_k if params.top_k < self._vocab_size else 0
        record["top_p"] = params.top_p if params.top_p < 1 else np.inf
        # It divides differences of logits in float32, and must not become 0 or infinite there.
        record["temperature"] = 0 if params.greedy else min(max(params.temperature, 1e-30), 1e30)
        record["logprobs"] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        record["seen"] = record["counts"] = -1
        record["used"] = True
        return record


def _numpy(dtype: torch.dtype) -> type[np.floating[Any]]:
    return np.float32 if dtype == torch.float32 else np.float64
