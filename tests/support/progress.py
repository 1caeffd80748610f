"""A progress that records what the user is told."""

from __future__ import annotations

from batchgen.progress import Silent


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
