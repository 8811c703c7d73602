#!/usr/bin/env bash
# Runs the model that ships on NPROC ranks (default 2; 1, 2 and 4 divide its heads) and counts the right answers.
#
#   bash scripts/demo.sh [overrides, such as cache.block_size=4 cache.num_blocks=64]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
bash scripts/setup_env.sh
python=$root/.venv/bin/python
nproc=${NPROC:-2}

rm -rf runs/demo
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m torch.distributed.run --standalone --nproc-per-node "$nproc" \
  launch.py experiment=demo "parallel.tensor_parallel_size=$nproc" \
  job.run_dir=runs/demo job.output=runs/demo/output.jsonl "$@"
"$python" scripts/demo/score.py runs/demo/output.jsonl --metrics runs/demo/metrics.json --at-least 0.99
