"""Checks that need no tokenizer, made before it is loaded: the model's files, the output's place, the grammar and the first rows.

Every check is repeated later, where its subject is used; here a wrong command only fails sooner. Imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from batchgen.config import JobConfig
from batchgen.errors import UsageError
from batchgen.jobs.files.lease import check_free_here
from batchgen.jobs.files.target import open_target
from batchgen.jobs.opening import check_place
from batchgen.jobs.shards import CLAIMS, check_shard_free
from batchgen.model_files import adapter_folder, check_weight_files, has_chat_template, is_path
from batchgen.process.templates import template_process
from batchgen.prompts.chat_template import chosen_template
from batchgen.prompts.columns import Columns, check_task
from batchgen.prompts.params import RowParams
from batchgen.prompts.template import RowTemplate
from batchgen.push import check_push
from batchgen.records import Input, job_path
from batchgen.records.inputs import window_rows
from batchgen.records.remote import is_url
from batchgen.sampling.grammars import Vocabulary


def check_job(config: JobConfig, source: Input, output: str | None) -> None:
    """Raises what `run_job` would raise later, as far as that can be known without a tokenizer. `output` is None for a plan."""
    if config.model.ray is not None and find_spec("ray") is None:
        raise UsageError("--ray needs the package ray", "install it with pip install 'batchgen-llm[ray]'")
    if config.model.lora is not None:
        _check_adapter(config.model.lora)
    check_weight_files(config.model, needed=output is not None)
    if output is not None and output != "-" and not is_url(output):
        folder = job_path(output, config.work_dir)
        # A finished job may have nothing to write.
        if config.overwrite or not (folder / "manifest.json").exists():
            check_place(output, open_target(output), folder, config.overwrite)
        if config.shard_of is None:
            check_free_here(folder / CLAIMS, output)
        else:  # a run that reads or merges is waited for
            check_shard_free(folder, *config.shard_of, output)
    if output is not None:
        check_push(config, output)
    window_rows(config, source)
    Vocabulary(None, 256).check(config.sampling)  # refuses what no tokenizer could follow
    _check_prompts(config, source)


def _check_adapter(lora: str) -> None:
    if is_path(lora) or Path(lora).is_dir():  # one on the hub is downloaded when the job is opened
        adapter_folder(lora)
    if find_spec("peft") is None:
        raise UsageError("--lora needs the package peft", "install it with pip install 'batchgen-llm[lora]'")


def _check_prompts(config: JobConfig, source: Input) -> None:
    """Checks the options that make prompts, and the columns of the first rows of files on this machine, which can be read twice."""
    prompts = config.prompts
    check_task(prompts, config.sampling, config.model.task)
    template = None if prompts.template is None else RowTemplate(prompts.template)
    RowParams(prompts.row_params, config.sampling)  # refuses names of no parameter
    has_template = has_chat_template(config.model)
    if prompts.chat is False or (has_template is False and prompts.chat_template is None):
        chosen_template(SimpleNamespace(chat_template=None), prompts)
    else:
        template_process().start()  # while the tokenizer is loaded
    chat = prompts.chat_template is not None or has_template
    if chat is None or source.is_read_once() or any(is_url(file.name) for file in source.files):
        return
    columns = Columns(prompts, template, chat=bool(chat) and prompts.chat is not False)
    columns.check(source.first_rows(config.limit), config.named_columns)
