#!/usr/bin/env bash
# What needs a GPU: the tests marked gpu, then a short comparison with transformers. Ends with one JSON line.
#
#   bash scripts/gpu_check.sh [arguments of pytest]
#
# Without a CUDA device it says so in one line and exits with 1.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
bash scripts/setup_env.sh --dev
python=$root/.venv/bin/python

"$python" scripts/gpu_compare.py --only-look
"$python" -m pytest -q -m gpu "$@"
"$python" scripts/gpu_compare.py
