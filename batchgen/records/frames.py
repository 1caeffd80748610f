"""Tables of Python programs (Arrow, pandas, polars, datasets) as rows, and the same tables with the columns of the results.

The caller's own columns are never converted: they stay as they are, with their types, their index and their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Self

import pyarrow as pa

from batchgen.errors import RowError, UsageError
from batchgen.records.output import RowForm, carried_names, output_row
from batchgen.records.parquet_types import without_maps
from batchgen.records.result_values import CODED_PARTS
from batchgen.records.rows import Row
from batchgen.records.tables import batch_columns
from batchgen.records.writers import fixed_types, result_array, result_types
from batchgen.result import Result


class Frame(ABC):
    """A table of a Python program."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def rows(self) -> list[Row]:
        """Returns the rows of the table. A row whose text is not UTF-8 is malformed."""
        rows: list[Row] = []
        for batch in self._arrow().to_batches():
            for columns in batch_columns(batch):
                source = f"row {len(rows)} of the table"
                if isinstance(columns, str):
                    rows.append(Row(len(rows), {}, RowError("invalid_row", f"{source}: {columns}"), source))
                else:
                    rows.append(Row(len(rows), columns, None, source, typed=True))
        return rows

    def types(self) -> dict[str, Any]:
        """Returns the Arrow types of the columns by name; None for columns of Python objects."""
        return {field.name: field.type for field in type(self)(self._table[:0])._arrow().schema}

    def with_results(self, rows: Sequence[Row], results: Sequence[Result], form: RowForm) -> Any:
        """Returns a new table of the same kind: the caller's columns, then one column for each field of a result.

        A column of the caller's with the name of a result field (such as `text`) gets the prefix `input_`.
        """
        renamed = {old: new for old, new in carried_names(self._columns(), form).items() if new != old}
        out = [output_row(row, result, form, CODED_PARTS) for row, result in zip(rows, results, strict=True)]
        there = {name for row in out for name in row} | fixed_types(form).keys()
        fields = [pa.field(name, of) for name, of in result_types(form).items() if name in there]
        return self._joined(renamed, pa.table([result_array(out, field) for field in fields], schema=pa.schema(fields)))

    def checked(self) -> Self:
        """Returns the frame. Raises `UsageError` if it has two columns of one name: a row could have only one of them."""
        twice = [name for name, times in Counter(self._columns()).items() if times > 1]
        if twice:
            raise UsageError(f"the table has more than one column {twice[0]!r}", "rename or drop all but one")
        return self

    @abstractmethod
    def _columns(self) -> list[str]:
        """The names of the columns."""

    @abstractmethod
    def _arrow(self) -> pa.Table:
        """The table as Arrow, for its values."""

    @abstractmethod
    def _joined(self, renamed: Mapping[str, str], added: pa.Table) -> Any:
        """The table with other names for some columns, and with more columns."""


class _Arrow(Frame):
    def _columns(self) -> list[str]:
        return list(self._table.schema.names)

    def _arrow(self) -> pa.Table:
        return self._table

    def _joined(self, renamed: Mapping[str, str], added: pa.Table) -> Any:
        table = self._table.rename_columns([renamed.get(name, name) for name in self._columns()])
        for field, column in zip(added.schema, added.columns, strict=True):
            table = table.append_column(field, column)
        return table


class _Pandas(Frame):
    """A column of Python objects reaches the rows as these objects: Arrow would guess a type for all of them, and may guess wrong. So does a column of
    a type that Arrow does not have (sparse, complex).
    """

    def rows(self) -> list[Row]:
        rows, names = super().rows(), self._columns()
        for place, name in enumerate(names):
            if name not in self._typed:
                column = self._table.iloc[:, place]
                for row, value, missing in zip(rows, column, column.isna(), strict=True):
                    row.columns[name] = None if missing else python_value(value)
        # In the order of the table, and without the column that stands for none: a template may write them all.
        return [row if row.error else row._replace(columns={name: row.columns[name] for name in names}) for row in rows]

    def types(self) -> dict[str, Any]:
        known = super().types()
        return {name: known.get(name) for name in self._columns()}

    def _columns(self) -> list[str]:
        return [str(name) for name in self._table.columns]

    def _arrow(self) -> pa.Table:
        return pa.table(self._typed or {"": pa.nulls(len(self._table))})  # without columns there would be no rows

    @cached_property
    def _typed(self) -> dict[str, pa.Array]:
        """The columns that have a type of Arrow."""
        typed = {}
        for place, name in enumerate(self._columns()):
            column = self._table.iloc[:, place]
            if column.dtype.name != "object":
                with suppress(pa.ArrowException):
                    typed[name] = pa.Array.from_pandas(column)
        return typed

    def _joined(self, renamed: Mapping[str, str], added: pa.Table) -> Any:
        import pandas as pd

        results = added.to_pandas().set_axis(self._table.index)
        return pd.concat([self._table.rename(columns=renamed), results], axis=1)


def python_value(value: Any) -> Any:
    """Returns a value with lists and numbers of Python in place of those of numpy, which pandas makes of nested columns."""
    if isinstance(value, dict):
        return {key: python_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [python_value(inner) for inner in value]
    if type(value).__module__ != "numpy":
        return value
    found = value.tolist()
    return found if type(found) is type(value) else python_value(found)  # Python has no longdouble


class _Polars(Frame):
    def _columns(self) -> list[str]:
        return list(self._table.columns)

    def _arrow(self) -> pa.Table:
        return self._table.to_arrow()

    def _joined(self, renamed: Mapping[str, str], added: pa.Table) -> Any:
        import polars as pl

        return pl.concat([self._table.rename(renamed), pl.from_arrow(added)], how="horizontal")


class _Datasets(Frame):
    """`datasets` has no maps, so `choice_probs` is a list of `key` and `value`."""

    def types(self) -> dict[str, Any]:
        return {field.name: field.type for field in self._table.features.arrow_schema}

    def _columns(self) -> list[str]:
        return list(self._table.column_names)

    def _arrow(self) -> pa.Table:
        return self._table.with_format("arrow")[:]

    def _joined(self, renamed: Mapping[str, str], added: pa.Table) -> Any:
        import datasets

        added = added.cast(pa.schema([field.with_type(without_maps(field.type)) for field in added.schema]))
        parts = [self._table.rename_columns(renamed), datasets.Dataset(added)]
        if not added.num_rows:  # `concatenate_datasets` would leave out the second
            features = datasets.Features({**parts[0].features, **parts[1].features})
            return datasets.Dataset.from_dict({name: [] for name in features}, features=features)
        return datasets.concatenate_datasets(parts, axis=1)


_KINDS: dict[tuple[str, str], type[Frame]] = {
    ("pyarrow", "Table"): _Arrow,
    ("pandas", "DataFrame"): _Pandas,
    ("polars", "DataFrame"): _Polars,
    ("datasets", "Dataset"): _Datasets,
}


def frame_of(table: Any) -> Frame:
    """Returns a table as a `Frame`. Raises `TypeError` if it is no Arrow table, pandas or polars DataFrame, or `datasets.Dataset`, and `UsageError`
    if a name stands for several columns."""
    for of in type(table).__mro__:
        kind = _KINDS.get((of.__module__.partition(".")[0], of.__name__))
        if kind is not None:
            return kind(table).checked()
    raise TypeError(
        "table must be a pyarrow.Table, a DataFrame of pandas or polars, or a datasets.Dataset, "
        f"not {type(table).__module__}.{type(table).__qualname__}"
    )
