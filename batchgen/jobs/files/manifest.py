"""The manifest of a job: the settings that made its results, the request of the last run, and which file is its output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError
from batchgen.jobs.files.disk import json_digest, write_json

SCHEMA = "batchgen.job/3"
DIGEST = "digest"
LIMIT = "max_tokens"
FIRST_LIMIT = "first_max_tokens"
"""The setting that remembers the first `max_tokens` of a job in which `--retry length` has raised it. The rows' keys are made with it."""
_LONGEST = 60
_BEFORE = 24
"""Characters that are shown before the first difference of long texts."""
_MAX_DIFFERENCES = 6
_MAX_FILES = 2
MODEL_FILE = "model file "
"""The beginning of the names of settings that are files of the model."""
_NO_VALUE = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    state: str = "running"
    """`running` (started and not finished, whether a process works on it or not) or `finished`"""
    output: str = ""
    """The output's absolute path when the job was started."""
    settings: dict[str, Any]
    """Everything that changes results (`identity.job_settings`), a flat dictionary. A job continues only with equal settings."""
    mentions: dict[str, Any]
    """Versions, which may change results slightly. A difference is only noted."""
    request: dict[str, Any]
    """Everything that may change without losing results: input files, limit, order, columns (`opening.request_of`, and the fields of `RowForm`)."""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    """The identity (`target`) of each file that may be at the output's place: the one before this job, and the one that it wrote."""
    keys: str = ""
    """Digest of the file of keys of the finished output, also while that is being put in its place."""
    stats: str = ""
    """Digest of `stats.json` of a finished job."""
    command: str = ""
    """`identity.command_digest` of the run that began or finished the job: if a later run has the same command, all of the above is equal. Empty where it
    cannot be known."""

    def save(self, path: Path) -> None:
        value = asdict(self)
        write_json(path, {"schema": SCHEMA, DIGEST: json_digest(value), **value})


def load_manifest(path: Path) -> Manifest | None:
    """Reads a manifest; None if there is none. Raises `UsageError` if it is damaged or of another version."""
    hint = "use --overwrite to start again, or another -o"
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise UsageError(f"{path} is damaged", hint) from e
    if not isinstance(value, dict) or value.pop("schema", None) != SCHEMA:
        raise UsageError(f"{path} was written by another version of batchgen", hint)
    if value.pop(DIGEST, None) != json_digest(value) or value.keys() != {f.name for f in fields(Manifest)}:
        raise UsageError(f"{path} is damaged", hint)
    return Manifest(**value)


def as_stored(value: dict[str, Any]) -> dict[str, Any]:
    """Returns `value` as it would be read from a manifest, so that the two can be compared."""
    stored: dict[str, Any] = json.loads(json.dumps(value))
    return stored


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describes what differs: `temperature was 0, is 0.7; max_tokens was 256, is 64`. Empty if nothing does. Names at most six settings and two files of the model.

    A missing setting is not set, so that a job continues with a version that has more options.
    """
    changed = []
    for name in dict.fromkeys((*new, *old)):
        was, now = old.get(name, _NO_VALUE), new.get(name, _NO_VALUE)
        if was != now and not (_is_unset(was, now) and _is_unset(now, was)):
            changed.append((name, _words(was, now), _words(now, was)))
    said = []
    files = [name.removeprefix(MODEL_FILE) for name, _, _ in changed if name.startswith(MODEL_FILE)]
    if len(files) > _MAX_FILES:
        changed = [change for change in changed if not change[0].startswith(MODEL_FILE)]
        said.append(f"{len(files)} files of the model differ ({', '.join(files[:_MAX_FILES])}, …)")
    said += [f"{name} was {a}, is {b}" for name, a, b in changed]
    more = len(said) - _MAX_DIFFERENCES
    return "; ".join(said if more <= 0 else [*said[:_MAX_DIFFERENCES], f"and {more} more"])


def _is_unset(value: Any, other: Any) -> bool:
    return value is None or value is False or value is _NO_VALUE or (value == [] and other is _NO_VALUE)


def is_larger_limit(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the only difference of these settings is a larger `max_tokens`."""
    was, now = old.get(LIMIT), new.get(LIMIT)
    if not isinstance(was, int) or not isinstance(now, int) or now <= was:
        return False
    return not differences({**old, LIMIT: now, FIRST_LIMIT: None}, {**new, FIRST_LIMIT: None})


def _words(value: Any, other: Any) -> str:
    """Returns a value that differs from another one as text: of long texts the part around their first difference."""
    if value is None or value is _NO_VALUE:
        return "not set"
    if isinstance(value, float):
        return f"{value:.12g}"
    text, its = (v if isinstance(v, str) else json.dumps(v, ensure_ascii=False, default=str) for v in (value, other))
    if max(len(text), len(its)) > _LONGEST:
        same = next((i for i, (a, b) in enumerate(zip(text, its, strict=False)) if a != b), min(len(text), len(its)))
        text = text if same <= _BEFORE else f"…{text[same - _BEFORE :]}"
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) else text


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return digest_of(file)


def digest_of(file: Any) -> str:
    """Returns the digest of a binary file that is open at its start."""
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
