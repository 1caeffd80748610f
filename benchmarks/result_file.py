"""The result file of a comparison: written after every measurement, continued by a later run, read as medians."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.programs import OURS, PROGRAMS, ROOT, Case

SCHEMA = "batchgen.benchmarks/2"
SAME_SETTINGS = ("threads", "stand_in", "limit", "sweep", "sweep_rows", "quick")
SAME_MACHINE = ("cpu", "instruction_sets", "cores", "versions")
"""Figures belong to one run only if all of these are equal."""


class OtherRun(Exception):
    """The measurements of the file cannot be continued."""


def new_result(name: str, machine: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "name": name,
        "machine": dict(machine),
        "settings": dict(settings),
        "source": source_digest(),
        "models": {},
        "workloads": {},
        "rooflines": [],
        "sweeps": [],
        "measurements": [],
        "failures": [],
    }


def source_digest() -> str:
    """Returns a digest of batchgen's own code, to which its figures belong."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "batchgen").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class ResultFile:
    """A result and its file."""

    def __init__(self, path: Path, result: dict[str, Any]) -> None:
        self.path = path
        self.result = result

    def take_up(self) -> list[str]:
        """Continues the measurements of an existing file. Returns lines that say which of them are kept.

        Raises `OtherRun` if they were made with other settings or on another machine. Failures are tried again, unless the time was up.
        Figures of an older batchgen are dropped.
        """
        if not self.path.exists():
            return [f"{self.path} is not there yet: a new file is begun"]
        old = json.loads(self.path.read_text(encoding="utf-8"))
        if old.get("schema") != SCHEMA:
            raise OtherRun(f"{self.path} is not a result of compare.py ({SCHEMA})")
        for part, names in (("settings", SAME_SETTINGS), ("machine", SAME_MACHINE)):
            for name in names:
                before, now = old[part].get(name), self.result[part].get(name)
                if before != now:
                    raise OtherRun(f"{self.path} was made with {part} {name} {before}, not {now}; --name another")
        kept = [m for m in old["measurements"] if m["engine"] != OURS or old["source"] == self.result["source"]]
        dropped = len(old["measurements"]) - len(kept)
        self.result |= {name: old[name] for name in ("models", "workloads", "rooflines", "sweeps")}
        self.result["measurements"] = kept
        self.result["settings"]["engine_rows"] = old["settings"]["engine_rows"] | self.result["settings"]["engine_rows"]
        self.result["failures"] = [f for f in old["failures"] if f["timed_out_after"] is not None]
        lines = [f"{self.path}: {len(kept)} measurements are kept"]
        if dropped:
            lines.append(f"{OURS} is not what it was: {dropped} measurements of it are made again")
        return lines

    def find(self, kind: str, case: Case, **more: Any) -> dict[str, Any] | None:
        """Returns the first entry of a kind ("rooflines", "measurements"…) of this case that has these values."""
        wanted = case.names() | more
        entries = (e for e in self.result[kind] if all(e.get(name) == value for name, value in wanted.items()))
        return next(entries, None)

    def add(self, kind: str, case: Case, entry: Mapping[str, Any]) -> None:
        self.result[kind].append(case.names() | dict(entry))
        write_json(self.path, self.result)


def write_json(path: Path, value: Any) -> None:
    """Writes a whole file: a run that is interrupted leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def medians(result: Mapping[str, Any], names: Mapping[str, Any], figure: str = "tokens_per_s") -> dict[str, float]:
    """Returns the median of a figure for each engine that was measured on a case, in the order of `PROGRAMS`."""
    found: dict[str, list[float]] = {}
    for m in result["measurements"]:
        if all(m[key] == value for key, value in names.items()):
            found.setdefault(m["engine"], []).append(m[figure])
    return {engine: statistics.median(found[engine]) for engine in PROGRAMS if engine in found}


def shares(result: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, float]:
    """Returns the share of the roofline by engine: the roofline's seconds over those of the engine's median."""
    for roofline in result["rooflines"]:
        if all(roofline[key] == value for key, value in names.items()):
            least = roofline["seconds"]["total"]
            return {engine: least / wall for engine, wall in medians(result, names, "wall_s").items()}
    return {}
