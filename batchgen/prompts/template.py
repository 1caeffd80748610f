"""`--template`: a prompt's text from a row's columns, by sandboxed Jinja. Knows nothing of chats and tokens.

Another process renders it (`process/templates.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.errors import RowError, UsageError
from batchgen.process.templates import TemplateFailure, template_process

_WHOLE_ROW = "row"


class RowTemplate:
    """A Jinja template over a row's columns; `row` is all of them, for names such as `row["my column"]`."""

    def __init__(self, source: str) -> None:
        """Raises `UsageError` if the source is not valid Jinja."""
        self.source = source
        (names,) = template_process().render("names", source, [None])
        if isinstance(names, TemplateFailure):
            if names.kind == "syntax":
                raise UsageError(
                    f"--template is not valid Jinja (line {names.line}): {names.message.rstrip('.')}",
                    "correct the template",
                )
            raise UsageError("--template is nested too deeply, or too long", f"make it simpler ({names.message})")
        self.whole = _WHOLE_ROW in names
        """Whether it uses all columns at once."""
        self.columns: frozenset[str] = names - {_WHOLE_ROW}
        """The columns that the template uses."""

    def input(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the part of a row that the template may use."""
        return {name: value for name, value in columns.items() if self.whole or name in self.columns}

    def text(self, columns: Mapping[str, Any], answer: str | TemplateFailure) -> str:
        """Returns the text of a row. Raises `RowError("template_error")` if there is none; it names a missing column."""
        if isinstance(answer, str):
            return answer
        message = answer.message
        if answer.kind == "null":
            message = self._null(columns)
        elif answer.kind == "undefined":
            message = self._undefined(columns, message)
        raise RowError("template_error", f"template: {message}")

    def _undefined(self, columns: Mapping[str, Any], message: str) -> str:
        for name in self.columns - columns.keys():
            if message == f"{name!r} is undefined":
                return f"the row has no column {name!r}"
        return message

    def _null(self, columns: Mapping[str, Any]) -> str:
        nulls = [name for name in sorted(self.columns) if columns.get(name, "") is None]
        which, value = (f"column {nulls[0]!r}", nulls[0]) if len(nulls) == 1 else ("a value", "…")
        return f"{which} is null; write `({value} or '')` instead to allow that"
