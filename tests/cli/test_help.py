"""Help and version: complete, and without torch."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from batchgen_cli.app import app

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
RUN = {p.name: p for p in COMMANDS["run"].params}

CONTRACT = """
    --model -m --revision --lora --dtype --quantize --weights --weight-memory --device --device-map --trust-remote-code
    --prompt-column --messages-column --id-column --template --prefix --chat --no-chat --system --chat-template
    --chat-template-kwargs --on-long-prompt --image-column --image-max-pixels
    --max-tokens --temperature --top-p --top-k --min-p --repetition-penalty --presence-penalty --frequency-penalty
    --stop --stop-token-id --ignore-eos --seed --n -n --logprobs --token-ids --row-params
    --choices --choices-column --top-choices --expect --regex --json-schema --json-whitespace --parse --reasoning --reasoning-budget --max-repeats --sampling-defaults --score --completion-column
    --embed --classify --pooling --normalize --no-normalize --prompt-name --prompt-logprobs
    --chunk-size --batch-size --max-batch-tokens --max-prefill-tokens --kv-memory
    --policy --priority-column --window --share --no-share --speculate --compile --attention --threads --debug
    --shard --merge --ray --workers --cpus-per-worker --ray-working-dir
    --output -o --output-format --input-format --encoding --limit --order --overwrite --retry-errors --retry --prune --max-errors --row-timeout --keep --flush-every --grace --work-dir --stats --report
    --dataset-config --split --push --push-public
    --dry-run --progress --no-progress --log-format --quiet -q --verbose -v --help -h
"""


def test_run_has_exactly_the_options_of_the_contract(cli):
    shown = cli("run", "--help").out
    terms = [line for line in shown.splitlines() if re.match(r"  -", line)]
    names = {word.rstrip(",") for line in terms for word in line.split("  ")[1].split() if word.startswith("-")}
    assert names == set(CONTRACT.split())
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == [
        "Arguments", "Model", "Prompts", "Sampling", "Constraints", "Tasks", "Engine", "Machines", "Job", "Options", "Example",
    ]  # fmt: skip
    assert shown.endswith("Example:\n  batchgen run prompts.jsonl --model ./model -o answers.jsonl --max-tokens 64\n")


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_help_is_whole_at_every_width(columns, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = cli("run", "--help").out
    assert "…" not in shown.replace("COL,…", "").replace("[:N,…]", "")
    assert {opt for p in RUN.values() for opt in p.opts if opt.startswith("-")} <= set(
        re.findall(r"--?[a-z][a-z-]*", shown)
    )
    assert not [line for line in shown.splitlines() if re.search(r"\w-$", line)]
    if columns == 80:
        assert max(map(len, shown.splitlines())) <= 80


def test_plan_takes_every_option_of_run():
    assert {p.name for p in COMMANDS["plan"].params} == {*RUN, "as_json", "measure", "shards", "write_template"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_options_and_their_values(shell):
    def completed(line: str) -> list[str]:
        words = line.split(" ")
        environment = {
            "_BATCHGEN_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_WORD_TO_COMPLETE": words[-1],
        }
        shown = CliRunner().invoke(app, [], env=environment, prog_name="batchgen").stdout
        return re.findall(r"--[a-z-]+|\b(?:bfloat16|float16|float32|auto|status|run|plan)\b", shown)

    assert "--temperature" in completed("batchgen run --temp")
    assert completed("batchgen run --dtype fl") == ["float32", "float16"]
    assert "status" in completed("batchgen st")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["run", "--help"]], ids=" ".join)
def test_help_that_cannot_be_written_is_an_error_in_one_line(arguments):
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "batchgen_cli", *arguments]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    message = "batchgen: error: standard output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, message)


def test_help_is_shown_where_the_encoding_lacks_an_ellipsis(cli, monkeypatch):
    shown = cli("run", "--help").out
    assert "…" in shown
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "latin-1", write_through=True))
    assert cli("run", "--help").code == 0
    assert "COL,..." in written.getvalue().decode("ascii")


@pytest.mark.parametrize(
    ("chosen", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_of_openmp_do_not_spin_for_long_unless_the_user_says_how_they_wait(chosen, spins, cli, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test is over
        monkeypatch.delenv(name)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    cli("--version")
    assert os.environ.get("GOMP_SPINCOUNT") == spins
