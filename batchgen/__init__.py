"""Offline batch generation: a file of prompts in, a file of completions out, every shared prefix run once.

The names below are imported when they are first used, so `import batchgen` is fast and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchgen.version import __version__ as __version__

if TYPE_CHECKING:
    from batchgen.assembly import JobReport as JobReport
    from batchgen.assembly import merge_job as merge_job
    from batchgen.config import EngineConfig as EngineConfig
    from batchgen.config import JobConfig as JobConfig
    from batchgen.config import ModelConfig as ModelConfig
    from batchgen.config import PromptConfig as PromptConfig
    from batchgen.dry_run import PlanReport as PlanReport
    from batchgen.dry_run import plan_job as plan_job
    from batchgen.errors import BatchgenError as BatchgenError
    from batchgen.job import run_job as run_job
    from batchgen.jobs.status import job_status as job_status
    from batchgen.llm import LLM as LLM
    from batchgen.progress import Progress as Progress
    from batchgen.report import ReportPage as ReportPage
    from batchgen.report import report_job as report_job
    from batchgen.result import Result as Result
    from batchgen.sampling_params import SamplingParams as SamplingParams

_HOMES = {
    "LLM": "llm",
    "BatchgenError": "errors",
    "EngineConfig": "config",
    "JobConfig": "config",
    "JobReport": "assembly",
    "ModelConfig": "config",
    "PlanReport": "dry_run",
    "Progress": "progress",
    "PromptConfig": "config",
    "ReportPage": "report",
    "Result": "result",
    "SamplingParams": "sampling_params",
    "job_status": "jobs.status",
    "merge_job": "assembly",
    "plan_job": "dry_run",
    "report_job": "report",
    "run_job": "job",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
    return getattr(import_module(f"batchgen.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
