#!/usr/bin/env bash
# What needs a GPU: the probe of the kernels, tests marked gpu, the comparison with transformers, benchmarks. Takes less
# than 10 minutes and ends with one JSON line.
#
#   bash scripts/gpu_check.sh           on a GPU
#   bash scripts/gpu_check.sh --dry     the same code without one: interpreted kernels, small models on the CPU
#
# PYTHON names the interpreter, whose torch is used as it is (default python3): nothing is installed into it, and no
# registry is needed. What it lacks of hydra-core, omegaconf and antlr4-python3-runtime may lie as wheels in the folder
# that WHEELS names; they are unpacked beside it for this run. Parts that need more (pytest, pytest-timeout, hypothesis,
# transformers) are named and left out where it is not there, and the check is not ok then.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-python3}
# Paths are the caller's: what has a slash is one, other names are looked up.
case $python in
  /*) ;;
  */*) python=$PWD/$python ;;
esac
wheels=${WHEELS:-}
case $wheels in
  '' | /*) ;;
  *) wheels=$PWD/$wheels ;;
esac
cd "$root"
command -v "$python" >/dev/null || {
  printf 'gpu_check.sh: no %s found: set PYTHON to the interpreter that has torch\n' "$python" >&2
  exit 1
}

if [ -n "$wheels" ]; then
  beside=$(mktemp -d)
  trap 'rm -rf "$beside"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$beside" "$wheels"/*.whl
  export PYTHONPATH="$beside${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" scripts/gpu_check.py "$@"
