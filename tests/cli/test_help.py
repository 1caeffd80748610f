"""Help and version: quick, complete, and without torch."""

import inspect
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from batchgen.config import EngineConfig, JobConfig, ModelConfig, PromptConfig
from batchgen.sampling_params import SamplingParams
from batchgen_cli.plan import plan
from batchgen_cli.run import run

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
def test_help_and_version_import_neither_torch_nor_transformers_and_are_quick(
    arguments: list[str], command_environment: dict[str, str]
) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr))\n"
        "from batchgen_cli.app import main\n"
        f"main({arguments})\n"
    )
    seconds = []
    for _ in range(3):  # the best of three, in processor time: the machine may be busy
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], env=command_environment, capture_output=True, text=True, timeout=60
        )
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime)
        assert (done.returncode, done.stderr) == (0, "[]\n")
        if seconds[-1] < 0.5:
            break
    assert min(seconds) < 0.5


def test_run_has_exactly_the_options_of_the_contract(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = cli("run", "--help").out
    assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*(?=\s)", shown.split("Arguments")[1].split("Example:")[0])) == set(
        CONTRACT.split()
    )
    panels = re.findall(r"╭─ (\w+) ─", shown)
    assert [p for p in panels if p not in ("Arguments", "Options")] == [
        "Model", "Prompts", "Sampling", "Constraints", "Engine", "Job",
    ]  # fmt: skip
    assert "Example: batchgen run prompts.jsonl --model ./model" in shown


def test_every_option_has_a_help_text(cli: Callable[..., Any]) -> None:
    for command in (run, plan):
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            (option,) = parameter.annotation.__metadata__
            assert option.help, name


def test_the_defaults_shown_are_those_of_the_configuration() -> None:
    shown = {name: p.default for name, p in inspect.signature(run).parameters.items()}
    renamed = {"stop_token_ids": "stop_token_id"}
    words = {"keep": "all", "batch_size": "auto", "max_batch_tokens": "auto", "max_prefill_tokens": "auto"}
    empty = {"stop": None, "stop_token_ids": None, "row_params": None, "chat_template_kwargs": None, "choices": None}
    for config in (
        SamplingParams(),
        EngineConfig(),
        PromptConfig(),
        ModelConfig(model="m"),
        JobConfig(inputs=("x",), model=ModelConfig(model="m")),
    ):
        for f in fields(config):
            if f.name in ("inputs", "model", "prompts", "sampling", "engine", "processes"):
                continue
            expected = words.get(f.name, empty.get(f.name, getattr(config, f.name)))
            assert shown[renamed.get(f.name, f.name)] == expected, f.name


def test_plan_takes_the_same_options_with_the_same_defaults() -> None:
    of_run = inspect.signature(run).parameters
    for name, parameter in inspect.signature(plan).parameters.items():
        if name != "as_json":
            assert (parameter.annotation, parameter.default) == (of_run[name].annotation, of_run[name].default)


def test_the_version_is_one_line(cli: Callable[..., Any]) -> None:
    from batchgen.stats import version_of

    outcome = cli("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"batchgen {version_of('batchgen')}\n", "")


def test_python_m_batchgen_cli_is_the_command(command: list[str], command_environment: dict[str, str]) -> None:
    done = subprocess.run([*command, "--version"], env=command_environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout[:9]) == (0, "batchgen ")
