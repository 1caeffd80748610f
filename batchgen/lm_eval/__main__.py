"""The harness's own command, with the model `batchgen`."""

import sys

from lm_eval.__main__ import cli_evaluate

from batchgen.errors import BatchgenError

try:
    cli_evaluate()
except BatchgenError as e:
    sys.exit(f"batchgen: error: {e}")
