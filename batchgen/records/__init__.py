"""Rows in and results out: input formats, the output row, the job's folder. No torch, no tokens, no prompts."""

from batchgen.records.inputs import Input, open_input, window_rows
from batchgen.records.job_folder import JobFolder, open_job
from batchgen.records.output import RESULT_NAMES, RowForm, default_output, job_path, output_row, row_form
from batchgen.records.progress_file import ProgressFile
from batchgen.records.rows import Row, windows
from batchgen.records.stdout_job import StdoutJob

__all__ = [
    "RESULT_NAMES",
    "Input",
    "JobFolder",
    "ProgressFile",
    "Row",
    "RowForm",
    "StdoutJob",
    "default_output",
    "job_path",
    "open_input",
    "open_job",
    "output_row",
    "row_form",
    "window_rows",
    "windows",
]
