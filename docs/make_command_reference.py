"""Makes docs/reference/commands.md from the options of the command: `make reference`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from batchgen.options import GROUPS
from batchgen_cli.app import parser
from batchgen_cli.options import default_text, names_of, shown_params


def markdown() -> str:
    """Returns the page docs/reference/commands.md."""
    lines = [
        "# Commands",
        "",
        "<!-- Made by `make reference` from the options; edit batchgen/config.py instead. -->",
        "",
        "`batchgen COMMAND --help` shows the same. `batchgen --install-completion` installs completion for bash, zsh or fish.",
        "Exit codes and the errors of rows: [Results and errors](results.md#exit-codes).",
    ]
    for name, command in parser().commands.items():
        lines += [
            "",
            f"## batchgen {name}",
            "",
            _paragraphs(command.help),
            "",
            "```console",
            f"$ {command.epilog}",
            "```",
        ]
        for group, rows in _option_rows(command):
            lines += ["", f"### {group}" if group in GROUPS else f"### {group} of {name}", ""]
            lines += ["| option | meaning | default |", "| --- | --- | --- |"]
            lines += [
                f"| `{_escaped_cell(names)}` | {_escaped_cell(text)} | {_escaped_cell(default)} |"
                for names, text, default in rows
            ]
    return "\n".join([*lines, ""])


def _option_rows(command: Any) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yields each group of arguments and options of a command: names, meaning, default."""
    for group, params in shown_params(command, command.params).items():
        defaults = ("required" if p.required else default_text(p) for p in params)
        yield group, [(names_of(p), p.help or "", default) for p, default in zip(params, defaults, strict=True)]


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _escaped_cell(text: str) -> str:
    return re.sub(r"([|<])", r"\\\1", text)


if __name__ == "__main__":
    sys.stdout.write(markdown())
