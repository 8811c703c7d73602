#!/usr/bin/env bash
# What needs a GPU: correctness parts side by side, then speeds one at a time. At most 240 s; correctness alone 90 s.
#
#   bash scripts/gpu_check.sh                          on a GPU
#   bash scripts/gpu_check.sh --correctness            no speeds (or --speeds: nothing else)
#   bash scripts/gpu_check.sh --only matmul,experts    parts by a word of their names (--list has them)
#   bash scripts/gpu_check.sh --out RESULTS.jsonl      appends one JSON line a part
#   bash scripts/gpu_check.sh --dry                    the same code without a GPU: interpreted, small, on the CPU
#
# Ends with a table and one JSON line. PYTHON names the interpreter, whose torch is used as it is (default python3):
# nothing is installed into it, and no registry is needed. What it lacks may lie as wheels in the folder that WHEELS names,
# or in wheels/ beside this script; they are unpacked beside it for this run. Parts that need more are named and left out,
# and the check is not ok then.
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
  '') if [ -d "$root/scripts/wheels" ]; then wheels=$root/scripts/wheels; fi ;;
  /*) ;;
  *) wheels=$PWD/$wheels ;;
esac
command -v "$python" >/dev/null || {
  printf 'gpu_check.sh: no %s found: set PYTHON to the interpreter that has torch\n' "$python" >&2
  exit 1
}

if [ -n "$wheels" ]; then
  beside=$(mktemp -d)
  trap 'rm -rf "$beside"' EXIT
  mapfile -t lacking < <("$python" "$root/scripts/gpu_check.py" --lacking "$wheels")
  if [ "${#lacking[@]}" -gt 0 ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$beside" "${lacking[@]}"
    export PYTHONPATH="$beside${PYTHONPATH:+:$PYTHONPATH}"
  fi
fi
"$python" "$root/scripts/gpu_check.py" "$@"
