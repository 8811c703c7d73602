#!/usr/bin/env bash
# What a change must pass: ruff, mypy, pytest. Ends with pytest's closing line.
#
#   bash scripts/test.sh                             what a change must pass
#   bash scripts/test.sh --matrix                    and correctness in all layouts, sizes and instruction sets: .ci/run
#   bash scripts/test.sh --stress                    only what is timed, repeated, fuzzed at length or killed at random,
#                                                    drawn from TESTS_SEED (1); last figures: docs/lab/reliability.md.
#                                                    Two runs of pytest: three tests at a time, then the timed ones alone
#   bash scripts/test.sh tests/kv_cache -k eviction  further arguments are pytest's
#
# Each prints its ten slowest tests and how long it took; --stress the seconds of each file too.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root" || exit 1
bin=$root/.venv/bin
# Tests start many interpreters, which would compile the packages each time.
unset PYTHONDONTWRITEBYTECODE

# More processes than cores: many tests wait, for a timeout or for a process. A file's tests stay in one process, because
# they share what takes long to make. The order is tests/conftest.py's: pytest-xdist's own would begin the longest last.
processes=(-n 3 --dist loadfile --no-loadscope-reorder)
markers="not matrix and not stress and not gpu"
arguments=()
is_stress=
for argument in "$@"; do
  case $argument in
    --matrix) markers="not stress and not gpu" ;;
    --stress)
      is_stress=yes
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
# pip takes one core: beside it the libraries are compiled, and beside mypy the test modules, for which each process that
# collects the tests would wait.
is_matrix=
[ "$markers" != "not stress and not gpu" ] || is_matrix=yes
[ -z "$is_matrix" ] || PYTHONPATH=$root "${PYTHON:-python3}" tests/support/compile_libraries.py 2>/dev/null &
bash scripts/setup_env.sh --dev || exit 1
types= compiled=
if [ -n "$is_matrix" ]; then
  "$bin/python" tests/support/compile_tests.py &
  compiled=$!
  if [ ${#arguments[@]} -eq 0 ]; then
    # All tests take longer than mypy, which says what it found among their dots, in one piece.
    (said=$("$bin/mypy" 2>&1); code=$?; printf '\n$ mypy\n%s\n' "$said"; exit $code) &
    types=$!
  fi
fi
check ruff check --output-format concise
check ruff format --check
[ -n "$types" ] || check mypy
if [ -z "$is_matrix" ]; then
  printf '$ python scripts/structure_figures.py\n'
  "$bin/python" scripts/structure_figures.py
fi
# Said before the tests run, so that pytest's closing line stays the last one.
[ ${#failed[@]} -eq 0 ] || printf 'FAILED: %s the tests run all the same, and the exit code will not be 0\n' "${failed[*]}"

[ -z "$compiled" ] || wait "$compiled"
run_tests() {  # MARKERS ARGUMENT...: run pytest on what has them
  "$bin/python" -m pytest -q -m "$1" "${@:2}" ${arguments[@]+"${arguments[@]}"}
}

if [ -z "$is_stress" ]; then
  run_tests "$markers" "${processes[@]}"
  code=$?
  [ -z "$types" ] || wait "$types" || failed+=("mypy;")
else
  # One test at a time to whoever is free, the longest first: tests/support/stress_tier.py. A file's tests may be many and long.
  beside=(-n 3 --dist load --maxschedchunk 1 --no-loadscope-reorder)
  report=$(mktemp) || exit 1
  trap 'rm -f "$report"' EXIT
  code=0 nothing=0 sums= closings=()
  for pass in "three at a time" "timed, alone"; do
    printf '$ pytest: %s\n' "$pass"
    if [ "$pass" = "timed, alone" ]; then
      # Figures are taken with nothing beside them.
      run_tests "stress and timed and not gpu" | tee "$report"
    else
      run_tests "stress and not timed and not gpu" "${beside[@]}" | tee "$report"
    fi
    codes=(${PIPESTATUS[@]})
    # 5: of what was asked for nothing is in this pass.
    if [ "${codes[0]}" -eq 5 ]; then nothing=$((nothing + 1)); elif [ "${codes[0]}" -ne 0 ]; then code=${codes[0]}; fi
    closing=$(tail -n 1 "$report")
    closings+=("$closing")
    printf '%s: exit code %s\n' "$pass" "${codes[0]}"
    sums+="  $pass: exit code ${codes[0]}, $closing"$'\n'
  done
  # Where no test is found at all that is what pytest says of both.
  [ $nothing -lt 2 ] || code=5
  printf 'stress tier, seed %s:\n%s' "$TESTS_SEED" "$sums"
  printf '%s\n' "${closings[@]}" | awk '
    { for (i = 1; i < NF; i++) if ($(i + 1) ~ /^(passed|failed|error|errors|skipped|xfailed|xpassed),?$/) {
        word = $(i + 1); sub(/,$/, "", word); sub(/^errors$/, "error", word); count[word] += $i }
      if (match($0, / in [0-9.]+s/)) seconds += substr($0, RSTART + 4, RLENGTH - 5) }
    END { printf "  together: %d passed, %d failed, %d errors, %d skipped in %d:%02d:%02d\n", count["passed"],
        count["failed"], count["error"], count["skipped"], seconds / 3600, seconds % 3600 / 60, seconds % 60 }'
fi
[ $code -ne 0 ] || [ ${#failed[@]} -eq 0 ] || code=1
exit $code
