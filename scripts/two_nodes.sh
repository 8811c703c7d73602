#!/usr/bin/env bash
# Two nodes on one machine: network namespaces joined by a cable of their own (a veth pair), a rank in each. Needs root.
#
#   bash scripts/two_nodes.sh             one job on both, tensor parallel, and alone: the tokens must be the same
#   bash scripts/two_nodes.sh --cut       pull the cable in the middle of a job: both sides must end, naming the silent rank
#
# Input and output are in a folder that node 1 cannot see: it has an empty file system in its place. Prints what happened;
# exits with 0 if it was what should happen, with 1 if not, with 77 where the kernel does not allow such namespaces.
# PYTHON (default .venv/bin/python) has the requirements; TIMEOUT_S (default 8) is executor.timeout_s of the cut job, LIMIT_S
# (default 5 more) how many seconds after the cut both ranks must be gone.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-$root/.venv/bin/python}
timeout_s=${TIMEOUT_S:-8}
limit_s=${LIMIT_S:-$((timeout_s + 5))}
model=$root/scripts/demo/model
node0=spmd-node0-$$ node1=spmd-node1-$$
address0=10.213.77.1 address1=10.213.77.2
files=$(mktemp -d) || exit 1
hidden=$(mktemp -d) || exit 1

clean_up() {
  local pids
  pids=$({ ip netns pids "$node0"; ip netns pids "$node1"; } 2>/dev/null)
  # shellcheck disable=SC2086  # one word a process
  [ -z "$pids" ] || kill -9 $pids 2>/dev/null
  ip netns del "$node0" 2>/dev/null
  ip netns del "$node1" 2>/dev/null
  rm -rf "$files" "$hidden" "$hidden.log"
}
trap clean_up EXIT

cannot() {
  printf 'two_nodes.sh: %s\n' "$1" >&2
  exit 77
}

[ "$(id -u)" = 0 ] || cannot "needs root, to make network namespaces"
command -v ip >/dev/null || cannot "needs ip (iproute2)"
{
  ip netns add "$node0" && ip netns add "$node1" &&
    ip link add cable0 netns "$node0" type veth peer name cable1 netns "$node1" &&
    ip -n "$node0" address add "$address0/24" dev cable0 && ip -n "$node1" address add "$address1/24" dev cable1 &&
    ip -n "$node0" link set lo up && ip -n "$node1" link set lo up &&
    ip -n "$node0" link set cable0 up && ip -n "$node1" link set cable1 up
} || cannot "this kernel does not let namespaces be joined by a veth pair"
unshare --pid --fork --mount-proc true || cannot "this kernel does not give processes ids of their own (unshare --pid)"

# node N command...: in that node's network and with its own process ids, as on a machine of its own; node 1 finds another
# file system where the job's files are.
node() {
  local number=$1
  shift
  if [ "$number" = 0 ]; then
    ip netns exec "$node0" unshare --pid --fork --kill-child --mount-proc "$@"
  else
    # shellcheck disable=SC2016  # for the inner shell
    ip netns exec "$node1" unshare --pid --fork --kill-child --mount-proc bash -c 'mount --bind "$0" "$1" && shift && exec "$@"' "$hidden" "$files" "$@"
  fi
}

# ranks N arguments...: torchrun of node N, with its own rendezvous on node 0.
ranks() {
  local number=$1
  shift
  node "$number" env OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --nnodes 2 \
    --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint "$address0:29511" --rdzv-id two-nodes \
    --local-addr "$([ "$number" = 0 ] && echo $address0 || echo $address1)" \
    --rdzv-conf "join_timeout=60,is_host=$([ "$number" = 0 ] && echo true || echo false)" "$root/launch.py" "$@"
}

"$python" - "$files/rows.jsonl" "${1:-}" <<'ROWS' || exit 1
import json
import sys

is_long = sys.argv[2] == "--cut"
with open(sys.argv[1], "w", encoding="utf-8") as rows:
    for index in range(4000 if is_long else 64):
        row = {"prompt": f"add {index} + 7 =", "temperature": 0, "max_tokens": 100 if is_long else 24, "ignore_eos": True}
        rows.write(json.dumps(row) + "\n")
ROWS

common=("model.path=$model" device=cpu model.dtype=float32 cache.num_blocks=512 "job.input=$files/rows.jsonl")
both=("${common[@]}" parallel.tensor_parallel_size=2 "job.output=$files/both.jsonl" "job.run_dir=$files/run")

start_both() {
  ranks 0 "${both[@]}" "$@" >"$files/node0.log" 2>&1 &
  pid0=$!
  # Where node 1 cannot look, and outside of what is hidden from it.
  ranks 1 "${both[@]}" "$@" >"$hidden.log" 2>&1 &
  pid1=$!
}

show() {
  printf -- '--- node %s\n' "$1"
  grep -v '^ *$' "$2" | tail -n "${3:-12}"
}

if [ "${1:-}" != "--cut" ]; then
  start_both
  wait "$pid0"
  code0=$?
  wait "$pid1"
  code1=$?
  show 0 "$files/node0.log"
  show 1 "$hidden.log"
  [ "$code0$code1" = 00 ] || { printf 'two_nodes.sh: exit codes %s and %s\n' "$code0" "$code1" >&2; exit 1; }
  OMP_NUM_THREADS=1 "$python" "$root/launch.py" "${common[@]}" "job.output=$files/alone.jsonl" >"$files/alone.log" 2>&1 ||
    { cat "$files/alone.log"; exit 1; }
  cmp "$files/both.jsonl" "$files/alone.jsonl" || exit 1
  printf 'two nodes and one rank answered the same: %s rows\n' "$(wc -l <"$files/both.jsonl")"
  exit 0
fi

start_both "executor.timeout_s=$timeout_s"
for _ in $(seq 600); do
  [ -e "$files/run/steps.csv" ] && [ "$(wc -l <"$files/run/steps.csv")" -gt 300 ] && break
  kill -0 "$pid0" 2>/dev/null || { show 0 "$files/node0.log"; show 1 "$hidden.log"; exit 1; }
  sleep 0.1
done
is_of_a_rank() {
  tr '\0' '\n' <"/proc/$1/environ" 2>/dev/null | grep -qx TORCHELASTIC_RUN_ID=two-nodes
}
# The process that torchrun gave these variables: its parent has them not, and its children inherit them. Numbers say
# nothing of which came first: a kernel begins anew at its largest.
rank_of() {
  local pid
  for pid in $(ip netns pids "$1"); do
    is_of_a_rank "$pid" && ! is_of_a_rank "$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status")" && printf '%s' "$pid" && return
  done
  printf 'two_nodes.sh: no rank runs in %s\n' "$1" >&2
  return 1
}
rank0=$(rank_of "$node0") && rank1=$(rank_of "$node1") || { show 0 "$files/node0.log"; show 1 "$hidden.log"; exit 1; }
ip -n "$node0" link set cable0 down
cut_at=$(date +%s%N)
printf 'the cable is cut\n'
# When the rank of a node is gone, in milliseconds since the cut. torchrun itself may look for the other node for longer.
until_gone() {
  local pid=$1
  while kill -0 "$pid" 2>/dev/null && ! grep -q '^State:.Z' "/proc/$pid/status" && [ $(($(date +%s%N) - cut_at)) -lt $(((limit_s + 60) * 1000000000)) ]; do
    sleep 0.05
  done
  printf '%s' $((($(date +%s%N) - cut_at) / 1000000))
}
gone0=$files/gone0 gone1=$files/gone1
until_gone "$rank0" >"$gone0" &
watch0=$!
until_gone "$rank1" >"$gone1" &
watch1=$!
wait "$watch0" "$watch1"
ms0=$(cat "$gone0") ms1=$(cat "$gone1")
sleep 1
for number in 0 1; do
  printf -- '--- node %s\n' "$number"
  grep -A 3 'rank status at the last heartbeats' "$([ "$number" = 0 ] && echo "$files/node0.log" || echo "$hidden.log")"
done
printf 'after the cut the rank of node 0 was gone in %s ms, of node 1 in %s ms\n' "$ms0" "$ms1"
code=0
grep -q 'error: .*rank 1 is silent' "$files/node0.log" || { echo "node 0 does not name rank 1" >&2; code=1; }
grep -q 'rank 0 is silent' "$hidden.log" || { echo "node 1 does not name rank 0" >&2; code=1; }
most=$((limit_s * 1000))
[ "$ms0" -le "$most" ] && [ "$ms1" -le "$most" ] || { echo "that took more than $most ms" >&2; code=1; }
exit $code
