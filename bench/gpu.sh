#!/usr/bin/env bash
# On a machine with a GPU: correctness, then the benchmark. Needs torch and triton, nothing installed of this project.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 exec "${PYTHON:-python3}" -m bench.gpu.run "$@"
