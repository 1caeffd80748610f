"""The names that `import batchgen` offers."""

import pytest

import batchgen
from support.params import slow_but
from support.python_process import run_python


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
def test_importing_batchgen_imports_neither_torch_nor_transformers(statement):
    check = "import sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert run_python(f"{statement}; {check}", check=True).stdout == "[]\n"
