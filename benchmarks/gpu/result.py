"""The result of the GPU benchmarks: one entry for each case, written at once, merged from several calls and machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.result_file import write_json

SCHEMA = "batchgen.gpu/1"
START = "start"
"""The case of a part that failed before its first case."""


class NotAResult(Exception):
    """A file that cannot be continued."""


def new_result(*, tiny: bool) -> dict[str, Any]:
    name = "gpu-tiny" if tiny else "gpu"
    return {"schema": SCHEMA, "name": name, "tiny": tiny, "machines": [], "figures": [], "failures": []}


def read_result(path: Path) -> dict[str, Any]:
    """Raises `NotAResult`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise NotAResult(f"{path} cannot be read: {e}") from e
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise NotAResult(f"{path} is not a result of gpu.sh ({SCHEMA})")
    return found


class GpuResult:
    """A result and its file. A case is identified by its part and its name; its newest figures count."""

    def __init__(self, path: Path, machine: Mapping[str, Any], source: str, *, tiny: bool) -> None:
        """Continues an existing file. Raises `NotAResult` if only one of the file and this run is a tiny run's."""
        self.path = path
        self.machine = dict(machine)
        self.source = source
        self.json = read_result(path) if path.exists() else new_result(tiny=tiny)
        if self.json["tiny"] != tiny:
            raise NotAResult(f"{path} is {'a tiny' if self.json['tiny'] else 'a real'} run's: name another folder")

    def add(self, part: str, case: str, figures: Mapping[str, Any], seconds: float) -> None:
        """Adds the figures of a case. Its older figures and failures are dropped."""
        self._drop("figures", part, case)
        for failed in (case, START):
            self._drop("failures", part, failed)
        self.json["figures"].append(self._entry(part, case) | {"seconds": round(seconds, 2), "figures": dict(figures)})
        write_json(self.path, self.json)

    def fail(self, part: str, case: str, message: str) -> None:
        """Notes that a case has failed. Its older figures stay."""
        self._drop("failures", part, case)
        self.json["failures"].append(self._entry(part, case) | {"message": message})
        write_json(self.path, self.json)

    def has(self, part: str, case: str) -> bool:
        """Whether there are figures of a case from this code on this kind of machine."""
        return any(
            (e["part"], e["case"], e["source"]) == (part, case, self.source)
            and self.json["machines"][e["machine"]] == self.machine
            for e in self.json["figures"]
        )

    def merge(self, other: Mapping[str, Any]) -> int:
        """Copies newer cases from another result, and returns their number. Raises `NotAResult` if only one of the two is a tiny run's."""
        if other["tiny"] != self.json["tiny"]:
            raise NotAResult("a tiny run's figures and a real one's do not go together")
        taken = 0
        for kind in ("figures", "failures"):
            for entry in other[kind]:
                here = find(self.json, kind, entry["part"], entry["case"])
                measured = find(self.json, "figures", entry["part"], entry["case"])
                if any(e is not None and e["date"] >= entry["date"] for e in (here, measured)):
                    continue
                self._drop(kind, entry["part"], entry["case"])
                if kind == "figures":
                    self._drop("failures", entry["part"], entry["case"])
                place = self._machine(other["machines"][entry["machine"]])
                self.json[kind].append(dict(entry) | {"machine": place})
                taken += 1
        write_json(self.path, self.json)
        return taken

    def _entry(self, part: str, case: str) -> dict[str, Any]:
        date = datetime.now(UTC).isoformat(timespec="microseconds")
        return {
            "part": part,
            "case": case,
            "machine": self._machine(self.machine),
            "source": self.source,
            "date": date,
        }

    def _machine(self, machine: Mapping[str, Any]) -> int:
        machines: list[Any] = self.json["machines"]
        if machine not in machines:
            machines.append(dict(machine))
        return machines.index(machine)

    def _drop(self, kind: str, part: str, case: str) -> None:
        self.json[kind] = [e for e in self.json[kind] if (e["part"], e["case"]) != (part, case)]


def find(result: Mapping[str, Any], kind: str, part: str, case: str) -> dict[str, Any] | None:
    entries: Sequence[dict[str, Any]] = result[kind]
    return next((e for e in entries if (e["part"], e["case"]) == (part, case)), None)
