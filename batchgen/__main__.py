"""`python -m batchgen` is the command `batchgen`."""

import runpy

runpy.run_module("batchgen_cli", run_name="__main__")  # by name: the package does not import its command
