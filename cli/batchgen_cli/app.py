"""The command line as a whole: its commands, `--version`, and how misuse is reported. Imports neither torch nor transformers."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from batchgen_cli.options import Group, similar
from batchgen_cli.plan import plan
from batchgen_cli.run import run
from batchgen_cli.status import status
from batchgen_cli.stderr import drop_unwritten, exit_code_of, say, wants_json


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from batchgen.stats import version_of

        click.echo(f"batchgen {version_of('batchgen')}")
        ctx.exit()


app = Group(
    "batchgen",
    help="Offline batch generation: a file of prompts in, a file of completions out, every shared prefix run once.",
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_version,
            help="Show the version and exit.",
        )
    ],
    commands=[run, plan, status],
)
app.example = "batchgen run prompts.jsonl --model ./model    (writes prompts.out.jsonl)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits with its code. Misuse is reported in one line."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    as_json = wants_json(arguments)

    def command() -> int:
        try:
            code: Any = app.main(args=arguments, prog_name="batchgen", standalone_mode=False)
        except click.ClickException as e:
            say(_misuse(e), 2, as_json=as_json)
            return 2
        except click.Abort:
            raise KeyboardInterrupt from None
        return code if isinstance(code, int) else 0

    code = exit_code_of(command, as_json=as_json)
    drop_unwritten()
    sys.exit(code)


def _misuse(error: click.ClickException) -> str:
    """What is wrong with the command line, what may have been meant, and where the help is."""
    ctx = getattr(error, "ctx", None)
    message, meant = error.format_message(), ""
    if isinstance(error, click.NoSuchOption):
        message = f"no such option: {error.option_name}"
        known = [opt for p in ctx.command.get_params(ctx) for opt in (*p.opts, *p.secondary_opts)] if ctx else []
        meant = " or ".join(similar(error.option_name, [opt for opt in known if opt.startswith("--")]))
    elif unknown := re.match(r"No such command '(.*?)'", message):
        message, word = f"no such command: {unknown[1]}", unknown[1]
        meant = f"batchgen run {word}" if Path(word).suffix or Path(word).exists() else ""
        meant = meant or " or ".join(similar(word, sorted(app.commands)))
    hint = f"; did you mean {meant}?" if meant else ""
    return f"{message[:1].lower()}{message[1:].rstrip('.')}{hint}; see {ctx.command_path if ctx else 'batchgen'} --help"
