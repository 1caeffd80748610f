"""The command line as a whole: its commands, `--version`, and what wrong use looks like. Imports neither torch nor transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from batchgen_cli.failures import say
from batchgen_cli.plan import plan
from batchgen_cli.run import run
from batchgen_cli.status import status
from batchgen_cli.stderr import drop_unwritten, wants_json

app = typer.Typer(
    name="batchgen",
    help="Offline batch generation: a file of prompts in, a file of completions out, every shared prefix run once.",
    epilog="Example: batchgen run prompts.jsonl --model ./model   writes prompts.out.jsonl",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="run", epilog="Example: batchgen run prompts.jsonl --model ./model -o answers.jsonl --max-tokens 64")(
    run
)
app.command(name="plan", epilog="Example: batchgen plan prompts.jsonl --model ./model")(plan)
app.command(name="status", epilog="Example: batchgen status answers.jsonl")(status)


def _version(wanted: bool) -> None:
    if wanted:
        from batchgen.stats import version_of

        typer.echo(f"batchgen {version_of('batchgen')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None: ...


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits with its code; of wrong use it says one line."""
    as_json = wants_json(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=arguments, prog_name="batchgen", standalone_mode=False)
    except Exception as e:
        # Typer's own errors (an unknown option, a missing argument), whose classes differ between its versions.
        if not hasattr(e, "format_message"):
            raise
        message = e.format_message()
        code = 2
        say(f"{message[:1].lower()}{message[1:].rstrip('.')}; see batchgen --help", code, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
        say("interrupted by SIGINT", code, as_json=as_json)
    drop_unwritten()
    sys.exit(code if isinstance(code, int) else 0)
