"""The command line: its commands, `--version`, and messages about wrong command lines. Imports neither torch nor transformers."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from batchgen.errors import OutputError
from batchgen.version import __version__
from batchgen_cli.merge import merge_shards
from batchgen_cli.models import models
from batchgen_cli.options import Command, CommandGroup, similar
from batchgen_cli.plan import PlanCommand, plan
from batchgen_cli.report import report
from batchgen_cli.run import run
from batchgen_cli.status import status
from batchgen_cli.stderr import drop_unwritten, exit_code_of, say, wants_json

app = typer.Typer(
    name="batchgen",
    cls=CommandGroup,
    help="Offline batch generation: a file of prompts in, a file of completions out, every shared prefix run once.",
    epilog="batchgen run prompts.jsonl --model ./model    (writes prompts.out.jsonl)",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command(
    cls=Command,
    short_help="Generate a completion for every row of INPUT, or label or score it.",
    epilog="batchgen run prompts.jsonl --model ./model -o answers.jsonl --max-tokens 64",
)(run)
app.command(
    cls=PlanCommand,
    short_help="Show what a run would share and the memory it needs.",
    epilog="batchgen plan prompts.jsonl --model ./model",
)(plan)
app.command(
    cls=Command,
    short_help="Show how far a running, stopped, dead or finished job is.",
    epilog="batchgen status answers.jsonl",
)(status)
app.command(
    cls=Command,
    short_help="Write a report of a job: a page with its prefix tree, speed, lengths and errors.",
    epilog="batchgen report answers.jsonl -o answers.html",
)(report)
app.command(
    "merge",
    cls=Command,
    short_help="Write the output of a job that ran in shards (run --shard I/N).",
    epilog="batchgen merge answers.jsonl",
)(merge_shards)
app.command(
    cls=Command,
    short_help="Show which models are verified, and whether MODEL would run.",
    epilog="batchgen models Qwen/Qwen3-0.6B",
)(models)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchgen {__version__}")
        raise typer.Exit


@app.callback()
def _main_options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None: ...


_WRITTEN_BY_TYPER = {"--help", "-h", "--version", "--show-completion"}
"""Options whose text is not written by `process.stdout`."""


def run_command(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits with its code. A wrong command line is reported in one line."""
    _wait_asleep()
    arguments = _with_values(sys.argv[1:] if arguments is None else list(arguments))
    as_json = wants_json(arguments)

    def command() -> int:
        try:
            code = parser()(args=arguments, prog_name="batchgen", standalone_mode=False)
        except typer.Abort:
            raise KeyboardInterrupt from None
        except OSError as e:
            if isinstance(e, BrokenPipeError) or _WRITTEN_BY_TYPER.isdisjoint(arguments):
                raise
            raise OutputError(f"standard output cannot be written: {e.strerror or e}") from e
        except Exception as e:
            # Typer's own errors (an unknown option, a missing argument), whose classes differ between its versions.
            if not hasattr(e, "format_message"):
                raise
            say(_misuse(e, arguments), 2, as_json=as_json)
            return 2
        return code if isinstance(code, int) else 0

    code = exit_code_of(command, as_json=as_json)
    drop_unwritten()
    sys.exit(code)


@cache
def parser() -> Any:
    """The commands and their options as Typer's own command object."""
    return typer.main.get_command(app)


_ALONE = {
    "--ray": (re.compile(r"auto|local|ray://.*|[^/\s-][^/\s]*:\d+"), "auto"),
    "--measure": (re.compile(r"\d+"), "32"),
}
"""Options that may stand alone: what their value looks like, and the value that they have then."""


def _with_values(arguments: list[str]) -> list[str]:
    """Gives the options of `_ALONE` that stand alone their values."""
    found: list[str] = []
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        value, default = _ALONE.get(argument, (None, ""))
        found.append(argument if value is None or value.fullmatch(following) else f"{argument}={default}")
    return found


def _wait_asleep() -> None:
    """Makes idle threads of torch's OpenMP sleep early, unless the user has chosen how they wait.

    By default they spin for milliseconds, time that other threads need on a busy machine. torch reads the setting when it is imported.
    """
    if os.environ.keys().isdisjoint(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _misuse(error: Any, arguments: Sequence[str]) -> str:
    """Returns what is wrong with the command line, what may have been meant, and where the help is."""
    ctx = getattr(error, "ctx", None)
    message, meant = error.format_message(), ""
    if type(error).__name__ == "NoSuchOption":
        message = f"no such option: {error.option_name}"
        known = [opt for p in ctx.command.get_params(ctx) for opt in (*p.opts, *p.secondary_opts)] if ctx else []
        meant = " or ".join(similar(error.option_name, [opt for opt in known if opt.startswith("--")]))
    elif unknown := re.match(r"No such command '(.*?)'", message):
        message, word = f"no such command: {unknown[1]}", unknown[1]
        meant = f"batchgen run {word}" if Path(word).suffix or Path(word).exists() else ""
        meant = meant or " or ".join(similar(word, list(parser().commands), cutoff=0.6))
    hint = f"; did you mean {meant}?" if meant else ""
    named = arguments[0] if arguments and arguments[0] in parser().commands else ""
    path = ctx.command_path if ctx else f"batchgen {named}".rstrip()
    return f"{message[:1].lower()}{message[1:].rstrip('.')}{hint}; see {path} --help"
