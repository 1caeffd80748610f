"""What the job's process and those of its devices say to each other. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.config import EngineConfig, ModelConfig
from batchgen.errors import BatchgenError
from batchgen.request import Request
from batchgen.result import Result
from batchgen.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Setup:
    """The first thing a device's process hears: what it is to be."""

    model: ModelConfig
    """Its `device` is the process's own."""
    engine: EngineConfig
    place: int
    """Its number among the processes."""
    processes: int


@dataclass(frozen=True, slots=True)
class Work:
    """Requests to be done, beside those that are not done yet."""

    requests: tuple[Request, ...]
    watched: bool
    """Whether each of their tokens is to be told."""


@dataclass(frozen=True, slots=True)
class Stop:
    """What is not done is dropped: after the rows that run are done ("drain"), or after this step ("now")."""

    wish: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """A row is to end where it stands."""

    row: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    dtype: str
    attention: str
    batch_size: int
    """Most sequences that decode at once."""


@dataclass(frozen=True, slots=True)
class Report:
    """What has happened since the last one."""

    heard: int
    """How many messages were taken in so far, after the first."""
    idle: bool
    """Whether there is nothing left to do."""
    results: tuple[Result, ...]
    tokens: tuple[tuple[int, int, int], ...]
    """Row, number of the completion, token: of rows that are watched, as they were drawn."""
    notes: tuple[str, ...]
    stats: EngineStats
    """Since the beginning."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The process ends because of an error."""

    error: BatchgenError
