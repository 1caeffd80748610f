"""Rows in and rows out: input formats, the output row, output files. No torch, no tokens, no prompts."""

from batchgen.records.inputs import Input, open_input, window_rows
from batchgen.records.output import RowForm, job_path, output_of, row_form
from batchgen.records.rows import Row, RowStream

__all__ = ["Input", "Row", "RowForm", "RowStream", "job_path", "open_input", "output_of", "row_form", "window_rows"]
