"""`python -m batchgen_cli` is `batchgen`."""

from batchgen_cli.app import main

main()
