"""The start of the process `batchgen` (or `python -m batchgen_cli`). From here on, Ctrl-C gives one line, also while modules are imported."""

import sys


def main() -> None:
    """Runs the command line of this process and exits."""
    try:
        from batchgen.lean_imports import allow_lean_imports
        from batchgen_cli.app import main as run

        allow_lean_imports()
        run()
    except KeyboardInterrupt:
        sys.stderr.write("batchgen: error: interrupted by SIGINT\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
