#!/usr/bin/env bash
# The benchmarks on one GPU: benchmarks/gpu.sh [OUTPUT FOLDER]; benchmarks/gpu.sh --help says how to divide them.
# PYTHON names the interpreter (default python3) that has torch, transformers and what batchgen needs.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root:$root/cli${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
