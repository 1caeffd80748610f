"""The input of a job: files, folders, globs, URLs or standard input, as one stream of rows, never read whole."""

from __future__ import annotations

import difflib
import glob
import importlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.config import INPUT_FORMATS, JobConfig
from batchgen.errors import InputCorrupt, RowError, UsageError, first_line
from batchgen.records.dataset_files import find_dataset
from batchgen.records.files import ANY_FORMAT, BROKEN, InputFile, in_job_folder, is_lost_link, split_name
from batchgen.records.jsonl import Record
from batchgen.records.output import INPUT_FILE, RESULT_NAMES, job_path
from batchgen.records.parquet_types import clean, safe_limit
from batchgen.records.remote import StoreError, file_matcher, info_of, is_url, look_again, plain_name, reaching, remote
from batchgen.records.rows import Row, RowStream
from batchgen.records.schema_metadata import common_metadata
from batchgen.records.tables import BROKEN_TABLE, OnHeader, numbers_within, parquet_schema

DONE_WINDOW_ROWS = 50_000
PIPE_WINDOW_ROWS = 4_096
_MODEL_REPO = re.compile(r"hf://((?!(?:datasets|spaces|buckets|models)/)[^/]+/[^/@]+)")
_UNPACKERS = {".xz": "xz -d", ".bz2": "bzip2 -d", ".zip": "unzip"}
_OTHER_COMPRESSIONS = {*_UNPACKERS, ".7z", ".br", ".deflate", ".gzip", ".lz4", ".lzma", ".snappy", ".z", ".zstd"}
_PERMISSIONS = "check its permissions, and those of the folders it is in"
_PARTITIONS = re.compile(r"(?:^|/)([^/=?]+)=[^/]*(?=/)")
"""The names of columns in folders as Hive, Spark and pyarrow write them: data/lang=de/part-0.parquet."""
CHECKED_ROWS = 1_000
"""If none of these first rows has a column that the command names, the command is refused."""


def open_input(config: JobConfig, output: str | None) -> Input:
    """Returns the input that a command names. The files are checked to be there; only their first bytes are read.

    A dataset (`dataset_files.find_dataset`) stands for the files of the configuration and the split that are asked for; another folder for its
    files with known suffixes (those of `--input-format`, if it is given), sorted, without its sub-folders; a glob for its files, sorted. Outputs
    of batchgen among them (there is a job folder beside each), and `output` itself (the command's, if it names one and writes it), are left
    out; `Input.notes` says so. Raises `UsageError` if something is missing, of an unknown format, not what its name says, or both input and
    output, and if the current folder is gone.
    """
    try:
        Path.cwd()
    except FileNotFoundError:  # Intel's MKL, in torch, would end the whole process at the first product
        raise UsageError("the current folder no longer exists", "change to another one with cd") from None
    input_format, chosen = config.input_format, config.dataset_config is not None or config.split is not None
    inputs = [plain_name(name) for name in config.inputs]
    if "" in inputs:
        raise UsageError("an input has an empty name", "name a file, a folder, a glob or - for standard input")
    output = output and plain_name(output)
    if "-" in inputs:
        if len(inputs) > 1:
            raise UsageError(
                "- (standard input) cannot be read together with other inputs", "name files only, or - alone"
            )
        _check_chosen(chosen, 0, "-")
        return Input((_input_file("-", input_format or "jsonl", config.encoding),), [], config.id_column)
    is_output = file_matcher(output)
    files: list[InputFile] = []
    notes: list[str] = []
    datasets = 0
    for name in inputs:
        try:
            dataset = find_dataset(name, chosen=chosen)
            many, found = (True, []) if dataset else _find(name, input_format)
        except PermissionError as e:
            raise UsageError(f"{name} cannot be read: permission denied", _PERMISSIONS) from e
        if dataset is not None:
            datasets += 1
            found, note = dataset.data_files(config.dataset_config, config.split, input_format)
            notes.append(note)
        else:
            notes += [*_unread_folders(name, input_format), *_unread_files(name, input_format)] if many else []
        if many:
            ours = dict.fromkeys(f for f in found if is_output(f) or _has_job(f))
            notes += [f"{f} is an output of batchgen: left out of the input" for f in ours]
            found = [f for f in found if f not in ours]
            if not found:
                raise UsageError(f"{name} has only outputs of batchgen", "name these files themselves to read them")
        elif is_output(name):
            raise UsageError(
                f"{output} is both an input and the output",
                "name another output with -o, or put a glob in quotes, so that batchgen leaves outputs out",
            )
        files += [_input_file(f, input_format, config.encoding) for f in found]
    for file in files:
        file.check_start()
    _check_chosen(chosen, datasets, inputs[0])
    if hollow := [file.name for file in files if file.is_hollow()]:
        more = f" (and so have {len(hollow) - 1:,} more)" if len(hollow) > 1 else ""
        notes.append(f"{hollow[0]} has 0 bytes and so no rows{more}: was it copied or written to its end?")
    return Input(tuple(files), notes, config.id_column)


def _check_chosen(chosen: bool, datasets: int, name: str) -> None:
    if chosen and not datasets:
        raise UsageError(
            f"--dataset-config and --split are for datasets, and {name} is not one",
            "leave them out, or name a folder or hf://datasets/OWNER/NAME",
        )


class Input:
    """The rows of some files, in order. Standard input can be read once, files any number of times."""

    def __init__(self, files: tuple[InputFile, ...], notes: list[str], id_column: str | None = None) -> None:
        self.files = files
        self._ids = (id_column, "id", "custom_id")
        self.notes = notes
        """Notes for the user, for example about files that were left out. Grows while the input is read."""
        self.is_stdin = any(f.name == "-" for f in files)
        self.headers: dict[tuple[str, ...], None] = {}
        """The column names of the tables among the files. Grows while the input is read: a table without rows has columns, too."""

    @cached_property
    def schema(self) -> pa.Schema | None:
        """Columns and types of the input if all files are Parquet and their types can be unified, else None.

        int32 and int64 can; for ids, not uint64 and int64. int64 and double can if the files say that no number would change.

        Skips files that cannot be read: `rows` raises the error. Of standard input it is known from the first row on.
        """
        if self.is_stdin or any(f.format != "parquet" for f in self.files):
            return None
        found: list[tuple[InputFile, pa.Schema]] = []
        for file in self.files:
            try:
                with file.open() as stream:
                    schema = parquet_schema(stream)
                    if schema is not None:
                        found.append((file, schema))
            except (*BROKEN, *BROKEN_TABLE):
                continue
        if not found:
            return None
        schemas = [schema for _, schema in found]
        # A column that only some files have must not change how another is renamed in the output.
        names = {n for s in schemas for n in s.names}
        if any(set(s.names) != names for s in schemas) and any(
            f"input_{n}" in names for n in {*RESULT_NAMES, INPUT_FILE}
        ):
            return None
        for kinds in ({s.field(n).type for s in schemas if n in s.names} for n in self._ids):
            if pa.uint64() in kinds and any(map(pa.types.is_signed_integer, kinds)):
                return None
        try:
            unified = pa.unify_schemas(schemas, promote_options="permissive")
            for schema in schemas:
                for field in schema:
                    wider = unified.field(field.name).type
                    if field.type != wider:
                        pa.nulls(1, field.type).cast(wider)  # raises: Arrow cannot cast all that it unifies
        except pa.ArrowException:
            return None
        if not all(_fits(file, schema, unified) for file, schema in found):
            return None
        return unified.with_metadata(common_metadata(schemas))

    def rows(self) -> Iterator[Row]:
        """Yields every row, malformed ones too, numbered over all files.

        Raises `InputCorrupt` where a file breaks off, after the rows before that place.
        """
        number = 0
        for file in self.files:
            name = clean(file.shown)  # a name on disk need not be UTF-8
            typed = not INPUT_FORMATS[file.format].is_text
            folders = _PARTITIONS.findall(name)
            for place, columns, size in _records(file, partial(self._renamed, file.shown), self._see):
                source = name + place
                if isinstance(columns, str):
                    if file.encoding is not None:
                        columns = columns.replace("not UTF-8", f"not {file.encoding}")
                    yield Row(number, {}, RowError("invalid_row", f"{source}: {columns}"), source, size, file.shown)
                else:
                    if folders:
                        self._note_partitions([key for key in folders if key not in columns])
                        folders = []
                    yield Row(number, columns, None, source, size, file.shown, typed)
                number += 1

    def first_rows(self, limit: int | None) -> list[Row]:
        """Up to `CHECKED_ROWS` rows from the start, to look at their columns. Raises nothing if the input breaks off."""
        return RowStream(self.rows()).take(CHECKED_ROWS, limit)

    def rows_to_check(self, window: list[Row], limit: int | None) -> list[Row]:
        """Up to `CHECKED_ROWS` rows from the start. An input that can be read only once gives those of `window`, its first window."""
        if len(window) >= CHECKED_ROWS or self.is_read_once():
            return window[:CHECKED_ROWS]
        return self.first_rows(limit)

    def fingerprint(self) -> list[dict[str, Any]]:
        """Returns what shows whether the input has changed; empty if that cannot be known (a pipe, standard input)."""
        if self.is_stdin:
            return []
        look_again(file.name for file in self.files if file.can_change_in_store())
        prints = [file.fingerprint() for file in self.files]
        return [] if None in prints else [p for p in prints if p is not None]

    def is_read_once(self) -> bool:
        """Whether `fingerprint` is empty. Does not ask a store again that has said it of a file."""
        return self.is_stdin or any(file.is_read_once() for file in self.files)

    def _renamed(self, file: str, name: str, new_name: str) -> None:
        what = f" has more than one column {name!r}: another one is read as {new_name!r}"
        if not any(note.endswith(what) for note in self.notes):  # of a thousand files the first is named
            self.notes.append(file + what)

    def _note_partitions(self, keys: Sequence[str]) -> None:
        """Notes columns that other programs make of folders such as `lang=de`."""
        several = "; input_file has each row's folders" if len(self.files) > 1 else ""
        for key in keys:
            note = f"{key!r} is only in the names of folders ({key}=…) and no column of the rows{several}"
            if note not in self.notes:
                self.notes.append(note)

    def _see(self, names: Sequence[str], schema: pa.Schema | None) -> None:
        self.headers[tuple(names)] = None
        if self.is_stdin:
            self.schema = schema


def _fits(file: InputFile, schema: pa.Schema, unified: pa.Schema) -> bool:
    """Whether no number of a Parquet file changes in the columns of a unified schema, as far as its footer says."""
    limits = {field.name: safe_limit(field.type, unified.field(field.name).type) for field in schema}
    limited = {name: limit for name, limit in limits.items() if limit is not None}
    if not limited:
        return True
    try:
        with file.open() as stream:
            return numbers_within(stream, limited)
    except (*BROKEN, *BROKEN_TABLE):
        return False


def window_rows(config: JobConfig, source: Input) -> int | None:
    """Number of rows in a window; None if the whole input is put in prefix order.

    Raises `UsageError` if `--window all` is asked for and not possible.
    """
    once = source.is_read_once()
    if config.shard is None and config.window is None:
        if once or config.output == "-":
            return PIPE_WINDOW_ROWS
        return DONE_WINDOW_ROWS if config.order == "done" else None
    if config.shard is None and config.window != "all":
        return config.window
    name, others = (
        ("--window all", "use --window ROWS, or a file") if config.shard is None else ("--shard", "use a file")
    )
    if once:
        raise UsageError(f"{name} reads the input twice, which {source.files[0].shown} does not allow", others)
    if config.output == "-":
        raise UsageError(f"{name} writes no row before all rows are done", "name an output with -o")
    if config.order == "done":
        raise UsageError("--window all cannot be combined with --order done", "use --window ROWS")
    return None


def _records(file: InputFile, on_rename: Callable[[str, str], None], on_header: OnHeader) -> Iterator[Record]:
    """Yields the records of a file. Raises `InputCorrupt` at the place where it breaks off."""
    last = ""
    try:
        with file.open() as stream:
            module, _, reader = INPUT_FORMATS[file.format].reader.partition(":")
            read = getattr(importlib.import_module(module), reader)
            with closing(read(stream, on_rename=on_rename, on_header=on_header)) as records:  # before the stream is
                for record in records:
                    last = record[0]
                    yield record
    except (*BROKEN, *BROKEN_TABLE) as e:
        place = last.removeprefix(":")
        where = "at its start" if not place else f"after {place if place.startswith('row') else 'line ' + place}"
        repair = "check the connection" if isinstance(e, StoreError) else "put a whole copy in its place"
        if isinstance(e, pa.ArrowNotImplementedError):
            repair = "write it with columns of other types, such as text,"
        raise InputCorrupt(
            f"{file.shown} breaks off {where}: {first_line(e)}",
            f"the rows before that place are kept: {repair} and run the same command again",
        ) from e


def _unread_folders(name: str, format: str | None) -> list[str]:
    """A note about the sub-folders of a folder that hold files which could be inputs too."""
    unread, pattern = _files_below(name, format)
    if not unread:
        return []
    return [f"sub-folders of {name} are not read ({', '.join(unread[:5])}); a glob reads them, such as {pattern}"]


def _unread_files(name: str, format: str | None) -> list[str]:
    """A note about files of a folder that could be inputs too, but are compressed in a way that is not read."""
    path = Path(name)
    if is_url(name) or not path.is_dir():
        return []
    formats = {format} if format else set(INPUT_FORMATS)
    parts = ((n, *os.path.splitext(n)) for n in _visible(path, os.DirEntry.is_file))  # noqa: PTH122 (of many names)
    left_out = [
        n for n, stem, suffix in parts if suffix.lower() in _OTHER_COMPRESSIONS and split_name(stem)[1] in formats
    ]
    if not left_out:
        return []
    more = f" and {len(left_out) - 5:,} more" if len(left_out) > 5 else ""
    shown = f"{', '.join(left_out[:5])}{more}"
    hint = "unpack them, or give those of gzip and zstandard the suffix .gz or .zst"
    return [f"files of {name} are not read because of their suffix ({shown}): {hint}"]


def _files_below(name: str, format: str | None) -> tuple[list[str], str]:
    """Returns the sub-folders of a folder that hold files which could be inputs too, and a glob that reads them."""
    path = Path(name)
    if is_url(name) or not path.is_dir():
        return [], ""
    formats = {format} if format else set(INPUT_FORMATS)
    unread: list[str] = []
    suffix = ""
    for folder in _visible(path, os.DirEntry.is_dir):
        if not folder.endswith(".job"):
            file = next((p for p in (path / folder).rglob("*") if split_name(p.name)[1] in formats), None)
            if file is not None:
                unread.append(folder)
                suffix = suffix or file.name.removeprefix(split_name(file.name)[0])
    return unread, shlex.quote(f"{path}/**/*{suffix}")


def _visible(folder: Path, is_kind: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Returns the sorted names in a folder of those entries of a kind (files, folders; links are followed) that are not hidden."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and is_kind(e))


def _find(name: str, format: str | None) -> tuple[bool, list[str]]:
    """Returns whether `name` stands for many files (a folder, a glob), and the files."""
    if is_url(name):
        return _find_remote(name, format)
    path = Path(name)
    if path.is_dir():
        found = [str(path / n) for n in _visible(path, lambda e: e.is_file() or is_lost_link(e.path))]
        return True, _known(name, found, format)
    if path.exists() or path.is_symlink():
        return False, [name]
    if glob.has_magic(name):
        named = glob.glob(name, recursive=True)  # noqa: PTH207 (a pattern may be absolute)
        found = sorted(f for f in named if (Path(f).is_file() or is_lost_link(f)) and not in_job_folder(f))
        if found:
            return True, found
        raise UsageError(f"no file matches {name}", "check the pattern and the folder it starts from")
    near = difflib.get_close_matches(
        path.name, [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else [], 1
    )
    raise UsageError(f"no such file: {name}", f"did you mean {path.with_name(near[0])}?" if near else "check the path")


def _find_remote(url: str, format: str | None) -> tuple[bool, list[str]]:
    fs, path = remote(url)
    with reaching(url):
        fs.invalidate_cache()  # an earlier job of this process may have listed it
        info, failure = None, None
        try:
            info = info_of(fs, path)
        except StoreError as e:
            failure = e  # unless it is a pattern, about which a server need not be asked
        if info is not None and info["type"] != "directory":
            return False, [url]
        if info is not None:
            files = [i["name"] for i in fs.ls(path, detail=True) if i["type"] != "directory"]
            found = _known(url, [f for f in files if not f.rpartition("/")[2].startswith(".")], format)
        else:
            inside = fs.glob(path, detail=True) if glob.has_magic(path) else {}
            found = [f for f, i in inside.items() if i["type"] != "directory"]
        if failure is not None and not found:
            raise failure
    if not found:
        hint = "check the address and your access to it"
        if model := _MODEL_REPO.match(url):
            hint = f"a dataset is hf://datasets/{model[1]}; without datasets/ it is a model's repository"
        raise UsageError(f"no such file: {url}", hint)
    scheme, chained, container = url.partition("::")
    if chained:  # zip://*.jsonl::s3://bucket/a.zip
        return True, [f"{scheme.partition('://')[0]}://{f}::{container}" for f in sorted(found)]
    return True, [fs.unstrip_protocol(f) for f in sorted(found)]


def _known(folder: str, names: Sequence[str], format: str | None) -> list[str]:
    found = [n for n in names if (split_name(n)[1] == format if format else split_name(n)[1])]
    if not found:
        unread, pattern = _files_below(folder, format)
        below = f"its sub-folders have some, which a glob reads: {pattern}"
        hint = below if unread else "name the files, or a glob, with --input-format"
        raise UsageError(f"no {format or ANY_FORMAT} file in the folder {folder}", hint)
    return found


def _input_file(name: str, format: str | None, encoding: str | None) -> InputFile:
    _, by_suffix, compression = split_name(name)
    chosen = format or by_suffix
    if chosen is None:
        hint = _hint_of_suffix(name)
        raise UsageError(f"{name} has an unknown suffix", hint)
    if encoding is not None and not INPUT_FORMATS[chosen].is_text:
        raise UsageError(f"--encoding is for text files, and {name} is {chosen}", "leave it out")
    if name != "-" and not is_url(name) and not os.access(name, os.R_OK):
        if is_lost_link(name):
            raise UsageError(f"{name} is a link to {Path(name).readlink()}, which does not exist", "check the link")
        raise UsageError(f"{name} cannot be read: permission denied", _PERMISSIONS)
    return InputFile(name, chosen, compression, encoding=encoding)


def _hint_of_suffix(name: str) -> str:
    """Returns how to convert a file with an unknown suffix to an input."""
    suffix = "" if is_url(name) else Path(name).suffix.lower()
    quoted, jsonl = shlex.quote(name), shlex.quote(name[: len(name) - len(suffix)] + ".jsonl")
    say = f"say what it is with --input-format {ANY_FORMAT}"
    match suffix:
        case ".json":
            return f"{say}; a JSON array becomes JSONL with: jq -c '.[]' {quoted} > {jsonl}"
        case ".txt":
            return f"{say}; lines of text become prompts with: jq -Rc '{{prompt: .}}' {quoted} > {jsonl}"
        case ".xz" | ".bz2" | ".zip":
            return f"unpack it first: {_UNPACKERS[suffix]} {quoted}"
        case ".arrow" | ".feather":
            return "write it as Parquet first"
        case ".xlsx" | ".xls" | ".ods":
            return "save its sheet as CSV"
    return say


def _has_job(name: str) -> bool:
    """Whether a job's folder is beside a file, which is then an output of batchgen."""
    if not is_url(name):
        return Path(f"{name}.job").is_dir()
    with suppress(UsageError, OSError):  # there is no cache, or it cannot be read
        return (job_path(name, None) / "manifest.json").exists()
    return False
