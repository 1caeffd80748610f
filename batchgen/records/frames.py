"""Tables of Python programs (Arrow, pandas, polars, datasets) as rows, and the same tables with the columns of the results.

The caller's own columns are never converted: they stay as they are, with their types, their index and their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from batchgen.errors import RowError
from batchgen.records.output import RowForm, carried_names, output_row
from batchgen.records.rows import Row
from batchgen.records.tables import batch_columns
from batchgen.records.writers import OPTIONAL_RESULTS, result_array, result_types
from batchgen.result import Result


def rows_of_table(table: Any) -> list[Row]:
    """Returns the rows of a table. A row whose text is not UTF-8 is malformed.

    Raises `TypeError` if `table` is no Arrow table, pandas or polars DataFrame, or `datasets.Dataset`.
    """
    rows: list[Row] = []
    for batch in _arrow_of(table).to_batches():
        for columns in batch_columns(batch):
            source = f"row {len(rows)} of the table"
            if isinstance(columns, str):
                rows.append(Row(len(rows), {}, RowError("invalid_row", f"{source}: {columns}"), source))
            else:
                rows.append(Row(len(rows), columns, None, source))
    return rows


def with_results(table: Any, rows: Sequence[Row], results: Sequence[Result], form: RowForm) -> Any:
    """Returns a new table of the same kind: the caller's columns, then one column for each field of a result.

    A column of the caller's that is called like a field of a result (`text`, say) gets the prefix `input_`.
    """
    names = list(_kind(table).columns(table))
    renamed = {old: new for old, new in carried_names(names, form).items() if new != old}
    out = [output_row(row, result, form) for row, result in zip(rows, results, strict=True)]
    there = {name for row in out for name in row}
    fields = [
        pa.field(name, of) for name, of in result_types(form).items() if name in there or name not in OPTIONAL_RESULTS
    ]
    added = pa.table([result_array(out, field) for field in fields], schema=pa.schema(fields))
    return _kind(table).joined(table, renamed, added)


class _Arrow:
    @staticmethod
    def columns(table: pa.Table) -> list[str]:
        return list(table.schema.names)

    @staticmethod
    def joined(table: pa.Table, renamed: dict[str, str], added: pa.Table) -> pa.Table:
        table = table.rename_columns([renamed.get(name, name) for name in table.schema.names])
        for field, column in zip(added.schema, added.columns, strict=True):
            table = table.append_column(field, column)
        return table


class _Pandas:
    @staticmethod
    def columns(table: Any) -> list[str]:
        return [str(name) for name in table.columns]

    @staticmethod
    def joined(table: Any, renamed: dict[str, str], added: pa.Table) -> Any:
        import pandas as pd

        return pd.concat([table.rename(columns=renamed), added.to_pandas().set_axis(table.index)], axis=1)


class _Polars:
    @staticmethod
    def columns(table: Any) -> list[str]:
        return list(table.columns)

    @staticmethod
    def joined(table: Any, renamed: dict[str, str], added: pa.Table) -> Any:
        import polars as pl

        return pl.concat([table.rename(renamed), pl.from_arrow(added)], how="horizontal")


class _Dataset:
    @staticmethod
    def columns(table: Any) -> list[str]:
        return list(table.column_names)

    @staticmethod
    def joined(table: Any, renamed: dict[str, str], added: pa.Table) -> Any:
        import datasets

        return datasets.concatenate_datasets([table.rename_columns(renamed), datasets.Dataset(added)], axis=1)


_KINDS = {
    "pyarrow": ("Table", _Arrow),
    "pandas": ("DataFrame", _Pandas),
    "polars": ("DataFrame", _Polars),
    "datasets": ("Dataset", _Dataset),
}


def _kind(table: Any) -> Any:
    package = type(table).__module__.partition(".")[0]
    name, kind = _KINDS.get(package, ("", None))
    if kind is None or type(table).__name__ != name:
        raise TypeError(
            "table must be a pyarrow.Table, a DataFrame of pandas or polars, or a datasets.Dataset, "
            f"not {type(table).__module__}.{type(table).__qualname__}"
        )
    return kind


def _arrow_of(table: Any) -> pa.Table:
    kind = _kind(table)
    if kind is _Pandas:
        return pa.Table.from_pandas(table, preserve_index=False)
    if kind is _Dataset:
        return table.with_format("arrow")[:]
    return pa.table(table)
