"""Imports and reads what the command does in every run, once, in the process that forks the runs of `harness.py`."""

import gc
import importlib

import pyarrow.parquet
import transformers.models.llama.modeling_llama
import transformers.processing_utils

import batchgen.devices.opening
import batchgen.devices.worker
import batchgen.engine.engine
import batchgen.job
import batchgen.model.loader
import batchgen.version
import batchgen_cli.app
import batchgen_cli.summary
from batchgen.kernels.recognition import code_of

batchgen.version.versions()
# numpy imports it at the first median. A process that is forked meanwhile would wait for the end of that import for ever.
importlib.import_module("numpy.ma")
pyarrow.array([0])  # imports pandas, if it is installed
_ = (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
# The first command line makes the commands and imports what reads their options. The first model of its kind reads the code of its classes.
batchgen_cli.app.parser().commands["run"].make_context("run", ["in.jsonl", "-m", "model", "-o", "out.jsonl"])
for part in vars(transformers.models.llama.modeling_llama).values():
    if hasattr(part, "forward"):
        code_of(part.forward, part)
gc.freeze()  # what is imported stays, in every child
