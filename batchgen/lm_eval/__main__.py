"""The harness's own command, with the model `batchgen`."""

from lm_eval.__main__ import cli_evaluate

cli_evaluate()
