"""The names that `import batchgen` offers."""

import subprocess
import sys

import pytest

import batchgen
from support.params import slow_but


def test_exactly_the_public_names_are_exported():
    assert sorted(batchgen.__all__) == sorted(batchgen._HOMES)
    for name in batchgen.__all__:
        assert getattr(batchgen, name).__name__ == name
    assert set(batchgen.__all__) <= set(dir(batchgen))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'batchgen' has no attribute 'generate'"):
        batchgen.generate  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    slow_but(
        ["from batchgen import run_job, plan_job, JobReport, PlanReport, Progress"],
        [
            "import batchgen",
            "from batchgen import JobConfig, ModelConfig, PromptConfig, EngineConfig, SamplingParams, Result, BatchgenError",
            "from batchgen import run_job, plan_job, JobReport, PlanReport, Progress",
        ],
    ),
)
def test_importing_batchgen_imports_neither_torch_nor_transformers(statement, command_environment):
    check = "import sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; {check}"],
        env=command_environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout == "[]\n"
