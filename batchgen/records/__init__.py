"""Rows in and rows out: input formats, the output row, output files. No torch, no tokens, no prompts."""

from batchgen.records.dataset_files import DatasetChoice
from batchgen.records.inputs import Input, input_of, open_input, window_rows
from batchgen.records.output import RESULT_NAMES, RowForm, default_output, job_path, output_row, row_form
from batchgen.records.rows import Row, RowStream

__all__ = [
    "RESULT_NAMES",
    "DatasetChoice",
    "Input",
    "Row",
    "RowForm",
    "RowStream",
    "default_output",
    "input_of",
    "job_path",
    "open_input",
    "output_row",
    "row_form",
    "window_rows",
]
