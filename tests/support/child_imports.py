"""Imports what the command imports, once, in the process that forks the runs of `harness.py`."""

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
import batchgen.stats
import batchgen_cli.app
import batchgen_cli.summary

batchgen.stats.versions()
# numpy imports it at the first median. A process that is forked meanwhile would wait for the end of that import for ever.
importlib.import_module("numpy.ma")
pyarrow.array([0])  # imports pandas, if it is installed
_ = (batchgen_cli, transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
gc.freeze()  # what is imported stays, in every child
