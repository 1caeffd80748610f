"""What generates: an engine in this process, or one in a process for each of several devices. Whoever uses it need not know which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from batchgen.prefix import PrefixPlan
from batchgen.request import Leaf, Request
from batchgen.result import Result
from batchgen.stats import EngineStats

OnResult = Callable[[Result], None]
OnToken = Callable[[int, int, int], None]


class AnyEngine(Protocol):
    """Requests and their plan in, results out as the rows finish (`Engine`)."""

    notes: list[str]
    """What the user should hear; grows."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def attention(self) -> str: ...
    @property
    def waiting(self) -> int:
        """Leaves that are not done and do not run."""
        ...

    @property
    def unfinished(self) -> int:
        """Rows that have no result yet."""
        ...

    def add(
        self, leaves: Sequence[Leaf], plan: PrefixPlan, on_result: OnResult, on_token: OnToken | None = None
    ) -> None: ...
    def run(self, stop: Callable[[], str | None] | None = None) -> None: ...
    def cancel(self, request: Request) -> None: ...
    def close(self) -> None:
        """Gives processes back, if it has any; it cannot be used any more."""
        ...
