"""The command `batchgen`: parses, calls the package `batchgen`, prints. No logic of its own."""

import sys

import batchgen

if "run_job" not in getattr(batchgen, "__all__", ()):
    sys.exit(
        f"batchgen: error: {batchgen.__file__} is another project's package of the name batchgen; "
        "run: pip uninstall -y batchgen && pip install --force-reinstall --no-deps batchgen-llm"
    )
