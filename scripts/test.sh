#!/usr/bin/env bash
# Everything that a change must pass: ruff, mypy, pytest. Ends with pytest's closing line.
#
#   bash scripts/test.sh                            without the slow matrices
#   bash scripts/test.sh --slow                     with them
#   bash scripts/test.sh tests/kv_cache -k eviction  further arguments are pytest's
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root" || exit 1
bash scripts/setup_env.sh --dev || exit 1
bin=$root/.venv/bin

markers="not slow and not gpu"
arguments=()
for argument in "$@"; do
  case $argument in
    --slow) markers="not gpu" ;;
    *) arguments+=("$argument") ;;
  esac
done

failed=()
check() {
  printf '$ %s\n' "$*"
  "$bin/$1" "${@:2}" || failed+=("$*;")
}
check ruff check --output-format concise
check ruff format --check
check mypy
# Said before the tests run, so that pytest's closing line stays the last one.
[ ${#failed[@]} -eq 0 ] || printf 'FAILED: %s the tests run all the same, and the exit code will not be 0\n' "${failed[*]}"

"$bin/python" -m pytest -q -m "$markers" ${arguments[@]+"${arguments[@]}"}
code=$?
[ $code -ne 0 ] || [ ${#failed[@]} -eq 0 ] || code=1
exit $code
