#!/bin/bash
# Submits a job in shards, and a second job that merges their outputs into job.output when all have ended well.
#
#   bash scripts/slurm/submit_shards.sh NUM_SHARDS model.path=/models/M job.input=/shared/rows.jsonl \
#       job.output=/shared/answers.jsonl
#
# SBATCH_* variables apply to both, as to any sbatch. Prints the numbers of the two jobs.
set -euo pipefail

usage="usage: bash scripts/slurm/submit_shards.sh NUM_SHARDS KEY=VALUE... with job.output=FILE"
[[ "${1:-}" =~ ^[1-9][0-9]*$ ]] || { echo "$usage" >&2; exit 1; }
num_shards=$1
shift
output=
for override in "$@"; do
  case "$override" in
    job.output=*) output=${override#job.output=} ;;
    job.shard=* | job.pool=* | job.run_dir=*)
      echo "error: $override is not for shards that are merged, which get their own names: leave it out" >&2
      exit 1
      ;;
  esac
done
[ -n "$output" ] || { echo "$usage" >&2; exit 1; }

home=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
project=${SPMD_WORKER_HOME:-$PWD}
# Run directories of remote outputs are in the working directory. Found when it runs: answers-00003-of-00007.jsonl.run
# and the others, of parts part-00003-of-00007.jsonl.run.
run=$output
[[ "$output" == *://* ]] && run=${output##*/}
mark="?????-of-$(printf '%05d' "$num_shards")"
if [[ "$run" == *'*'* ]]; then
  run_dirs="$(printf '%q' "${run%%'*'*}")$mark$(printf '%q' "${run#*'*'}").run"
else
  run_dirs="$(printf '%q' "$(sed -E 's/\.(jsonl|parquet)(\.[a-z0-9]+)?$//' <<<"$run")")-$mark.*.run"
fi

shards=$(sbatch --parsable --array="0-$((num_shards - 1))" "$home/scripts/slurm/array.sbatch" "$@")
echo "shards: job $shards"
merge="$(printf '%q' "$project/.venv/bin/python") -m spmd_worker.tools.collect --merge $run_dirs --output $(printf '%q' "$output")"
merge_job=$(sbatch --parsable --job-name=spmd-worker-merge --dependency="afterok:${shards%%;*}" --kill-on-invalid-dep=yes \
  --nodes=1 --ntasks=1 --output=%x-%j.log --wrap "$merge")
echo "merge: job $merge_job"
