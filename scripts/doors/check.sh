#!/usr/bin/env bash
# Doors into other tools' pipelines, with the tools themselves: makes an environment for each below FOLDER, on top of
# .venv, and runs its stress tests there. Kills actors, workers, ranks and servers, and compares every answer with a job's.
#
#   bash scripts/doors/check.sh [FOLDER] [ray|datatrove|daft|spark]...    FOLDER is /tmp/spmd-worker-doors, all by default
#
# Spark needs a Java runtime.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
folder=${1:-/tmp/spmd-worker-doors}
doors=("${@:2}")
[ ${#doors[@]} -gt 0 ] || doors=(ray datatrove daft spark)
declare -A packages=(
  [ray]='ray[data]'
  # Its extra "inference" would bring two other engines.
  [datatrove]='datatrove[io] aiofiles aiosqlite'
  [daft]='daft'
  [spark]='dask[dataframe] pyspark'
)
declare -A tests=([ray]=test_ray_data [datatrove]=test_datatrove [daft]=test_daft [spark]=test_spark_and_dask)

failed=()
for door in "${doors[@]}"; do
  bin=$folder/$door/bin
  if [ ! -x "$bin/pip" ]; then
    "$(readlink -f "$root/.venv/bin/python")" -m venv "$folder/$door"
    # Everything of .venv is there, and is not installed again.
    "$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
      > "$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/spmd_worker_venv.pth"
  fi
  read -ra names <<< "${packages[$door]}"
  "$bin/pip" install --quiet "${names[@]}"
  printf '$ %s\n' "$door"
  PYTHONPATH=$root OMP_NUM_THREADS=1 "$bin/python" -m pytest -q -m stress "$root/tests/integrations/${tests[$door]}.py" \
    || failed+=("$door")
done
[ ${#failed[@]} -eq 0 ] || { printf 'FAILED: %s\n' "${failed[*]}"; exit 1; }
