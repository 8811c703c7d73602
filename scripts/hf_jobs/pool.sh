#!/bin/bash
# Worlds of one pool as Hugging Face Jobs (https://huggingface.co/docs/hub/jobs): each job is one world on its own machine.
#
#   bash scripts/hf_jobs/pool.sh NUM_WORLDS model.path=meta-llama/Llama-3.1-8B-Instruct \
#       job.input=hf://datasets/me/rows/rows.jsonl job.output=s3://bucket/answers/part-*.jsonl.zst \
#       job.pool=s3://bucket/answers.pool
#
# The same line starts more of them, at any time. Change by variables: IMAGE (one that has this project in
# /opt/spmd-worker, set up with scripts/setup_env.sh and the extra `remote`), FLAVOR, TIMEOUT and ATTEMPTS. A job has no
# folder that it shares with others, so the pool is in a bucket with conditional writes; HF_TOKEN and the bucket's keys
# are read from the environment and passed as secrets. HF_JOBS_OPTIONS="--dry-run" shows what would be started.
set -euo pipefail

usage="usage: bash scripts/hf_jobs/pool.sh NUM_WORLDS KEY=VALUE... with job.pool=s3://..."
[[ "${1:-}" =~ ^[1-9][0-9]*$ && " $* " == *" job.pool="*"://"* ]] || { echo "$usage" >&2; exit 1; }
num_worlds=$1
shift

flavor=${FLAVOR:-h200x8}
# a100x8: eight; a100-large: one.
num_gpus=$([[ "$flavor" =~ x([0-9]+)$ ]] && echo "${BASH_REMATCH[1]}" || echo 1)
secrets=()
for name in HF_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN; do
  [ -z "${!name:-}" ] || secrets+=(--secrets "$name")
done
for ((world = 0; world < num_worlds; world++)); do
  # shellcheck disable=SC2086  # several options
  hf jobs run --detach --name "spmd-worker-$world" --flavor "$flavor" --timeout "${TIMEOUT:-12h}" \
    --attempts "${ATTEMPTS:-4}" ${secrets[@]+"${secrets[@]}"} ${HF_JOBS_OPTIONS:-} \
    "${IMAGE:-registry.example.com/spmd-worker:latest}" \
    /opt/spmd-worker/.venv/bin/python -m spmd_worker.tools.torchrun --standalone --nproc-per-node "$num_gpus" \
    /opt/spmd-worker/launch.py "parallel.data_parallel_size=$num_gpus" "$@"
done
