"""The metadata of a Parquet file's schema, for a table with other columns: what pandas and datasets write there to get their own types back.

pandas names the columns of the index and the dtype of every column, datasets the feature of every column (`ClassLabel`, `Image`). Columns
without an entry have the type that Arrow gives them. Other programs' metadata stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

_PANDAS, _DATASETS = b"pandas", b"huggingface"
_TEXT = ("unicode", "string", "empty")
"""pandas' names for labels of columns that are text."""


def common_metadata(schemas: Sequence[pa.Schema]) -> dict[bytes, bytes]:
    """Returns the metadata that all schemas have. That of pandas is the first schema's: it differs in the number of rows."""
    others = [schema.metadata or {} for schema in schemas[1:]]
    return {
        key: value
        for key, value in (schemas[0].metadata or {}).items()
        if all(key in other if key == _PANDAS else other.get(key) == value for other in others)
    }


def carried_metadata(
    schema: pa.Schema, written: pa.Schema, names: Mapping[str, str], *, in_order: bool
) -> dict[bytes, bytes]:
    """Returns the metadata of `schema` for a table of the columns `written`.

    `names` holds the new name of each column that is carried. A column that has another type now has no entry. `in_order`: the rows are
    in the order of the input; otherwise an index that is only a range of numbers is left out. So is metadata that cannot be understood.
    """
    metadata = dict(schema.metadata or {})
    same = {old: new for old, new in names.items() if written.field(new).type == schema.field(old).type}
    for key in metadata.keys() & {_PANDAS, _DATASETS}:
        try:
            value = json.loads(metadata.pop(key))
            value = _of_datasets(value, same) if key == _DATASETS else _of_pandas(value, same, in_order)
            metadata[key] = json.dumps(value).encode()
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return metadata


def class_names(schema: pa.Schema | None, column: str) -> list[str]:
    """Returns the names of the numbers in a column of classes (`ClassLabel`); empty for any other column."""
    try:
        metadata = {} if schema is None else schema.metadata
        feature = json.loads(metadata[_DATASETS])["info"]["features"][column]
        return list(map(str, feature["names"])) if feature["_type"] == "ClassLabel" else []
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _of_datasets(value: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    features = value["info"]["features"]
    return {"info": {"features": {names[old]: of for old, of in features.items() if old in names}}}


def _of_pandas(value: Mapping[str, Any], names: Mapping[str, str], in_order: bool) -> dict[str, Any]:
    columns = []
    for column in value["columns"]:
        field = column.get("field_name", column["name"])
        if field in names:
            shown = names[field] if column["name"] == field else column["name"]  # a level of an index may have no name
            columns.append({**column, "name": shown, "field_name": names[field]})
    index = [names.get(i) if isinstance(i, str) else i if in_order else None for i in value["index_columns"]]
    labels = value.get("column_indexes") or [{}]
    text = len(labels) == 1 and labels[0].get("pandas_type") in _TEXT  # the names of results are text
    return {
        **value,
        "columns": columns,
        "index_columns": [i for i in index if i is not None],
        "column_indexes": labels if text else [],
    }
