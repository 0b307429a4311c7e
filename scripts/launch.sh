#!/usr/bin/env bash
# Runs N ranks of a program on this machine: scripts/launch.sh N program arguments...
# What torchrun does, without Python; stops all ranks when one fails, and exits with its status.
set -euo pipefail
if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 N program arguments..." >&2
  exit 2
fi
n=$1
shift
export WORLD_SIZE=$n LOCAL_WORLD_SIZE=$n MASTER_ADDR=127.0.0.1
# Below the ports that the system gives to outgoing connections. Two launches that draw the same one see it by the id.
export MASTER_PORT=${MASTER_PORT:-$((20000 + RANDOM % 12000))}
export TORCHELASTIC_RUN_ID=${TORCHELASTIC_RUN_ID:-launch-$$}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT INT TERM
for ((r = 0; r < n; ++r)); do
  RANK=$r LOCAL_RANK=$r "$@" &
  pids+=($!)
done
for ((r = 0; r < n; ++r)); do
  wait -n || { status=$?; echo "launch: a rank failed with status $status" >&2; exit "$status"; }
done
