"""Stores the table that transformers makes of its classes at every start, so that its 1,600 source files are read only once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchgen.process.user_cache import cache_folder, replaced

_Table = dict[frozenset[str], dict[str, set[str]]]
"""The names in each module of transformers, by the packages that the module needs."""


def with_stored_table(define: Callable[..., _Table]) -> Callable[..., _Table]:
    """Returns a function that does what `define` does, which reads all files of a folder. The table of the folder `models` is stored."""

    def structure(module_path: Any, prefix: str | None = None) -> _Table:
        folder = Path(module_path)
        folder = folder.parent if folder.suffix == ".py" else folder
        if folder.name != "models":
            return define(str(folder), prefix=prefix)
        if folder not in tables:
            tables[folder] = _stored_table(folder, define)
        before = "" if prefix is None else f"{prefix}."
        return {
            needed: {before + module: set(names) for module, names in modules.items()}
            for needed, modules in tables[folder].items()
        }

    tables: dict[Path, _Table] = {}
    return structure


def _stored_table(folder: Path, define: Callable[..., _Table]) -> _Table:
    """Returns the table that `define` makes of a folder, from the cache if the files are still the same."""
    digest = hashlib.sha256(repr((str(folder), sorted(_files(folder)))).encode()).hexdigest()
    file = None
    with suppress(OSError, ValueError, AttributeError, TypeError):  # it cannot be read, is no JSON, or has another form
        file = cache_folder() / "transformers-tables" / f"{digest[:20]}.json"
        kept: Mapping[str, Mapping[str, list[str]]] = json.loads(file.read_bytes())
        return {
            frozenset(needed.split()): {module: set(names) for module, names in modules.items()}
            for needed, modules in kept.items()
        }
    table = define(str(folder))
    if file is not None:
        _store(file, table)
    return table


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yields all Python files below a folder: path, time of the last change, size in bytes."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _files(Path(entry.path))
        elif entry.name.endswith(".py"):
            stat = entry.stat()
            yield entry.path, stat.st_mtime_ns, stat.st_size


def _store(file: Path, table: _Table) -> None:
    """Writes a table atomically. Removes those of other versions."""
    text = json.dumps({" ".join(needed): {m: sorted(names) for m, names in t.items()} for needed, t in table.items()})
    with suppress(OSError):  # if it cannot be written, the next start makes it again
        file.parent.mkdir(parents=True, exist_ok=True)
        for old in file.parent.glob("*.json"):
            old.unlink(missing_ok=True)
        with replaced(file) as new:
            new.write_text(text)
