"""Help and version: complete, and without torch."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click
import pytest

from batchgen.config import EngineConfig, JobConfig, ModelConfig, PromptConfig
from batchgen.sampling_params import SamplingParams
from batchgen_cli.options import ConfigOption, job_config
from batchgen_cli.plan import plan
from batchgen_cli.run import run
from batchgen_cli.status import status

CONTRACT = """
    --model -m --revision --dtype --device --device-map --trust-remote-code
    --prompt-column --messages-column --id-column --template --prefix --chat --no-chat --system --chat-template
    --chat-template-kwargs --on-long-prompt
    --max-tokens --temperature --top-p --top-k --min-p --repetition-penalty --presence-penalty --frequency-penalty
    --stop --stop-token-id --ignore-eos --seed --n -n --logprobs --token-ids --row-params
    --choices --regex --json-schema --score --completion-column
    --chunk-size --batch-size --max-batch-tokens --max-prefill-tokens --max-kv-read --kv-memory --host-kv-memory
    --policy --priority-column --window --share --no-share --compile --debug
    --output -o --output-format --input-format --limit --order --overwrite --retry-errors --max-errors --row-timeout --keep --flush-every --grace --work-dir --stats
    --progress --no-progress --log-format --quiet -q --verbose -v --help -h
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["plan", "--help"]])
def test_help_and_version_import_nothing_that_is_slow(
    arguments: list[str], command_environment: dict[str, str]
) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sorted({'torch', 'transformers', 'tokenizers', 'pyarrow', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr))\n"
        "from batchgen_cli.app import main\n"
        f"main({arguments})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=command_environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_run_has_exactly_the_options_of_the_contract(cli: Callable[..., Any]) -> None:
    shown = cli("run", "--help").out
    terms = [line for line in shown.splitlines() if re.match(r"  -", line)]
    names = {word.rstrip(",") for line in terms for word in line.split("  ")[1].split() if word.startswith("-")}
    assert names == set(CONTRACT.split())
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == [
        "Arguments", "Model", "Prompts", "Sampling", "Constraints", "Engine", "Job", "Options", "Example",
    ]  # fmt: skip
    assert shown.endswith("Example:\n  batchgen run prompts.jsonl --model ./model -o answers.jsonl --max-tokens 64\n")


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_help_is_whole_at_every_width(columns: int, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = cli("run", "--help").out
    assert "…" not in shown.replace("COL,…", "").replace("[:N,…]", "")
    assert {opt for p in run.params if isinstance(p, ConfigOption) for opt in p.opts} <= set(
        re.findall(r"--?[a-z][a-z-]*", shown)
    )
    assert not [line for line in shown.splitlines() if re.search(r"\w-$", line)]
    if columns == 80:
        assert max(map(len, shown.splitlines())) <= 80


def test_every_option_has_a_help_text_that_is_a_sentence(cli: Callable[..., Any]) -> None:
    for command in (run, plan, status):
        for p in command.params:
            if isinstance(p, click.Option):
                assert p.help is not None
                assert p.help[0].isupper() or p.help.startswith("auto "), p.name
                assert p.help.split("  [")[0].endswith("."), p.name


def test_the_defaults_shown_are_those_of_the_configuration() -> None:
    shown = {p.name: p.default_text for p in run.params if isinstance(p, ConfigOption)}
    assert shown["temperature"] == "0"
    assert shown["max_tokens"] == "256"
    assert shown["share"] == "--share"
    assert shown["batch_size"] == "auto"
    assert shown["debug"] == ""
    config = job_config({p.name: None for p in run.params} | {"inputs": ("x",), "model": "m"})
    assert config == JobConfig(inputs=("x",), model=ModelConfig(model="m"))


def test_every_field_of_the_configuration_is_an_option_but_these() -> None:
    fields_of = {
        f.name
        for config in (SamplingParams, EngineConfig, PromptConfig, ModelConfig, JobConfig)
        for f in fields(config)
        if "option" not in f.metadata
    }
    assert fields_of == {"inputs", "model", "prompts", "sampling", "engine", "processes"}


def test_plan_takes_every_option_of_run() -> None:
    assert {p.name for p in plan.params} == {p.name for p in run.params} | {"as_json"}


def test_the_version_is_one_line(cli: Callable[..., Any]) -> None:
    from batchgen.stats import version_of

    outcome = cli("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"batchgen {version_of('batchgen')}\n", "")


def test_python_m_batchgen_cli_is_the_command(command: list[str], command_environment: dict[str, str]) -> None:
    done = subprocess.run([*command, "--version"], env=command_environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout[:9]) == (0, "batchgen ")
