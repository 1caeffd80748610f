"""The types of pandas and datasets come back from a Parquet output."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.late import late
from support.records import opened, with_results, write_output

datasets, pd = late("datasets"), late("pandas")


@pytest.fixture
def written(tmp_path):
    """Writes the output of some input files, and returns its path."""

    def write(*names, in_order=True, **form):
        source = opened(*(tmp_path / name for name in names))
        options = {"schema": source.schema, "in_order": in_order}
        return write_output(tmp_path / "o.parquet", with_results(source), **options, **form)

    return write


def frame(**index):
    columns = {
        "number": pd.array([1, None, 3], dtype="Int32"),
        "kind": pd.Categorical(["x", None, "x"], categories=["y", "x"], ordered=True),
        "text": pd.array([True, None, False], dtype="boolean"),
    }
    return pd.DataFrame(columns, **index)


def as_read(expected, out):
    """Compares the columns of the input in an output, where `text` has another name."""
    expected = expected.rename(columns={"text": "input_text"})
    pd.testing.assert_frame_equal(out[["number", "kind", "input_text"]], expected, check_freq=False)


def test_the_index_and_the_types_of_pandas_come_back(tmp_path, written):
    for index in (
        pd.Index(["a", "b", "c"], name="key"),
        pd.Index([1.5, 2.5, 3.5]),
        pd.date_range("2026-01-01", periods=3, name="text2"),
        pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)], names=["k", None]),
        pd.RangeIndex(10, 16, 2, name="place"),
    ):
        table = frame(index=index)
        table.to_parquet(tmp_path / "i.parquet")
        out = pd.read_parquet(written("i.parquet"))
        as_read(table, out)
        assert list(out.columns) == [
            "id", "number", "kind", "input_text", "text", "finish_reason", "usage", "truncated", "error",
        ]  # fmt: skip
        assert out["text"].tolist() == ["t"] * 3


def test_an_index_column_that_is_renamed_or_left_out_is_treated_like_any_other(tmp_path, written):
    table = frame(index=pd.Index([4, 5, 6], name="error"))
    table.to_parquet(tmp_path / "i.parquet")
    as_read(table.rename_axis("input_error"), pd.read_parquet(written("i.parquet")))
    as_read(table.reset_index(drop=True), pd.read_parquet(written("i.parquet", keep=("number", "kind", "text"))))


def test_a_range_as_index_is_left_out_if_rows_have_another_order_or_number(tmp_path, written):
    table = frame(index=pd.RangeIndex(10, 13))
    table.to_parquet(tmp_path / "i.parquet")
    as_read(table.reset_index(drop=True), pd.read_parquet(written("i.parquet", in_order=False)))
    twice = pd.concat([table, table], ignore_index=True)
    as_read(twice, pd.read_parquet(written("i.parquet", "i.parquet")))


FEATURES = {
    "label": lambda: datasets.ClassLabel(names=["neg", "pos"]),
    "text": lambda: datasets.ClassLabel(names=["u"]),
    "image": lambda: datasets.Image(),
    "pairs": lambda: datasets.List({"role": datasets.ClassLabel(names=["user"])}),
    "gone": lambda: datasets.Value("int8"),
}


def write_dataset(path, **changed):
    features = datasets.Features({name: make() for name, make in FEATURES.items()} | changed)
    values = {
        "label": [0, 1],
        "text": [0, 0],
        "image": [{"bytes": b"x", "path": None}, None],
        "pairs": [[{"role": 0}], []],
        "gone": [1, 2],
    }
    datasets.Dataset(pa.table(values, schema=features.arrow_schema)).to_parquet(path)
    return features


def test_the_features_of_datasets_come_back_for_the_columns_that_are_there(tmp_path, written):
    features = write_dataset(tmp_path / "d.parquet")
    path = written("d.parquet", "d.parquet", keep=("label", "text", "image", "pairs"))
    found = datasets.Features.from_arrow_schema(pq.read_schema(path))
    names = {"label": "label", "text": "input_text", "image": "image", "pairs": "pairs"}
    assert {new: found[new] for new in names.values()} == {new: features[old] for old, new in names.items()}
    assert found["text"] == datasets.Value("string")
    assert found["usage"] == {"prompt_tokens": datasets.Value("int64"), "completion_tokens": datasets.Value("int64")}
    assert set(json.loads(pq.read_schema(path).metadata[b"huggingface"])["info"]["features"]) == set(names.values())


def test_files_whose_features_differ_give_columns_without_features(tmp_path, written):
    write_dataset(tmp_path / "a.parquet")
    write_dataset(tmp_path / "b.parquet", label=datasets.ClassLabel(names=["pos", "neg"]))
    found = datasets.Features.from_arrow_schema(pq.read_schema(written("a.parquet", "b.parquet")))
    assert found["label"] == datasets.Value("int64")


@pytest.mark.parametrize("damaged", [b"{", b"[]", b"{}", b'{"info": null}', b'{"columns": [1]}'])
def test_metadata_that_cannot_be_understood_is_left_out(tmp_path, written, damaged):
    metadata = {b"pandas": damaged, b"huggingface": damaged, b"mine": b"\xff"}
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(metadata), tmp_path / "i.parquet")
    assert pq.read_schema(written("i.parquet")).metadata == {b"mine": b"\xff"}
