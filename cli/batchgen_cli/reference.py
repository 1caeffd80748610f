"""Makes the reference page and the man page of the command from its options: `python -m batchgen_cli.reference markdown|man`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from batchgen.options import GROUPS
from batchgen_cli.app import parser
from batchgen_cli.options import default_text, names_of, shown_params

EXIT_CODES = {
    "0": "Every row has a result.",
    "1": "The job failed. Finished rows are kept.",
    "2": "The command cannot run as given. Nothing was changed.",
    "3": "The job is finished, and some rows failed.",
    "75": "Another run holds the output.",
    "129, 130, 143": "Interrupted by SIGHUP, SIGINT or SIGTERM. The same command continues.",
    "141": "Standard output was closed.",
}


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


def man() -> str:
    """Returns the page batchgen(1), in the man macros of roff."""
    lines = [
        '.TH BATCHGEN 1 "" "batchgen" "User Commands"',
        ".SH NAME",
        "batchgen \\- offline batch generation with language models",
        ".SH SYNOPSIS",
    ]
    for name, command in parser().commands.items():
        arguments = " ".join(p.metavar for p in command.params if p.param_type_name == "argument")
        lines += [f".B batchgen {name}", f"[\\fIOPTIONS\\fR] {_roff(arguments)}", ".br"]
    lines += [".SH DESCRIPTION", _roff(parser().help)]
    for name, command in parser().commands.items():
        lines += [f".SH BATCHGEN {name.upper()}", _roff(_paragraphs(command.help)).replace("\n\n", "\n.PP\n")]
        for group, rows in _option_rows(command):
            lines += [f".SS {group}"]
            for names, text, default in rows:
                more = " Required." if default == "required" else f" Default: {default}." if default else ""
                lines += [".TP", f".B {_roff(names)}", _roff(text + more)]
        lines += [".SS Example", ".EX", _roff(command.epilog), ".EE"]
    lines += [".SH EXIT STATUS"]
    for code, meaning in EXIT_CODES.items():
        lines += [".TP", f".B {code}", meaning]
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


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("-", "\\-").replace("…", "...").replace("`", "")
    return re.sub(r"(?m)^([.'])", r"\\&\1", escaped)


if __name__ == "__main__":
    sys.stdout.write({"markdown": markdown, "man": man}[sys.argv[1]]())
