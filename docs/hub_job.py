# /// script
# requires-python = ">=3.11"
# dependencies = ["batchgen-llm[structured]"]
# ///
"""Generates a completion for every row of a dataset of the Hub, and pushes the rows as a dataset. For a machine of the Hub:

    hf jobs uv run --flavor l4x1 --secrets HF_TOKEN hub_job.py OWNER/PROMPTS OWNER/ANSWERS --split test --model Qwen/Qwen3-0.6B

All other options are those of `batchgen run`. To try it on your own machine, INPUT may be a file or a folder and OUTPUT a .parquet or .jsonl
file, which is then not pushed: uv run hub_job.py prompts.jsonl answers.parquet --model ./model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

FILES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")


def command_of(arguments: list[str]) -> list[str]:
    """Returns the arguments of `batchgen` for those of this script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "input", metavar="INPUT", help="a dataset of the Hub (OWNER/NAME, also with @REVISION), a file or a folder"
    )
    parser.add_argument("output", metavar="OUTPUT", help="the dataset to push to (OWNER/NAME), or a file")
    if arguments[:1] not in (["-h"], ["--help"]) and any(word.startswith("-") for word in arguments[:2]):
        parser.error("INPUT and OUTPUT come before the options")
    given, options = parser.parse_known_args(arguments)
    here = "://" in given.input or Path(given.input).exists()
    command = ["run", given.input if here else f"hf://datasets/{given.input}"]
    if given.output.endswith(FILES):
        return [*command, "-o", given.output, *options]
    file = given.output.rstrip("/").rpartition("/")[2] + ".parquet"
    return [*command, "-o", file, "--push", given.output, *options]


if __name__ == "__main__":
    from batchgen_cli.app import run_command

    run_command(command_of(sys.argv[1:]))
