#!/usr/bin/env bash
# What a change must pass: ruff, mypy, pytest. Ends with pytest's closing line.
#
#   bash scripts/test.sh                             what a change must pass
#   bash scripts/test.sh --matrix                    and correctness in all layouts, sizes and instruction sets: .ci/run
#   bash scripts/test.sh --stress                    only what is timed, repeated, fuzzed at length or killed at random,
#                                                    drawn from TESTS_SEED (1); docs/reliability.md has its last figures
#   bash scripts/test.sh tests/kv_cache -k eviction  further arguments are pytest's
#
# Each prints its ten slowest tests and how long it took.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root" || exit 1
bash scripts/setup_env.sh --dev || exit 1
bin=$root/.venv/bin
# Tests start many interpreters, which would compile the packages each time.
unset PYTHONDONTWRITEBYTECODE

# More processes than cores: many tests wait, for a timeout or for a process. A file's tests stay in one process, because
# they share what takes long to make. The order is tests/conftest.py's: pytest-xdist's own would begin the longest last.
processes=(-n 3 --dist loadfile --no-loadscope-reorder)
markers="not matrix and not stress and not gpu"
arguments=()
for argument in "$@"; do
  case $argument in
    --matrix) markers="not stress and not gpu" ;;
    # Figures are taken with nothing beside them.
    --stress)
      markers="stress and not gpu" processes=()
      export TESTS_SEED=${TESTS_SEED:-1}
      printf 'stress tier, seed %s: TESTS_SEED=%s draws the same again, another number draws others\n' "$TESTS_SEED" "$TESTS_SEED"
      ;;
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
printf '$ python tests/architecture/size_rules.py\n'
"$bin/python" tests/architecture/size_rules.py
# Said before the tests run, so that pytest's closing line stays the last one.
[ ${#failed[@]} -eq 0 ] || printf 'FAILED: %s the tests run all the same, and the exit code will not be 0\n' "${failed[*]}"

"$bin/python" -m pytest -q -m "$markers" ${processes[@]+"${processes[@]}"} ${arguments[@]+"${arguments[@]}"}
code=$?
[ $code -ne 0 ] || [ ${#failed[@]} -eq 0 ] || code=1
exit $code
