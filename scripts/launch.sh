#!/usr/bin/env bash
# Runs N ranks of a program on this machine: scripts/launch.sh N program arguments...
# What torchrun does, without Python; stops all ranks when one fails.
set -euo pipefail
n=$1
shift
export WORLD_SIZE=$n LOCAL_WORLD_SIZE=$n MASTER_ADDR=127.0.0.1
export MASTER_PORT=${MASTER_PORT:-$((20000 + RANDOM % 20000))}
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
