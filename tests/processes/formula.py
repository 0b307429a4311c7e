#!/usr/bin/env python3
"""Losses of train_gpt --formula against PyTorch's FSDP2 in benchmarks/peers/gpt_fsdp2.py: the same run in two programs.

  formula.py TRAIN_GPT PEER WORLD DIM STRATEGY[,STRATEGY...] [options for both programs...]
"""
import json
import os
import socket
import subprocess
import sys
import tempfile

TOLERANCE = 2e-6
TIMEOUT = 240  # seconds, for one launch


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(command, world):
    """Runs `world` ranks of a command with torchrun's environment; returns the JSON object that rank 0 prints last."""
    port = free_port()
    ranks, files = [], []
    for rank in range(world):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        files.append(tempfile.TemporaryFile("w+"))
        ranks.append(subprocess.Popen(command, env=env, stdout=files[-1], stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(TIMEOUT) for process in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read())
    if any(codes):
        sys.exit(f"{' '.join(command)}: exit status per rank {codes}\n" + "\n".join(texts))
    return json.loads([line for line in texts[0].splitlines() if line.startswith("{")][-1])


def main():
    program, peer, world, dim, strategies, *common = sys.argv[1:]
    world = int(world)
    common = ["--dim", dim, "--layers", "2", "--warmup", "0", "--steps", "6", "--micro", "2"] + common
    expected = launch([sys.executable, peer, "--mode", "fsdp"] + common, world)["losses"]
    assert len(expected) == 6 and expected[-1] < expected[0] - 0.01, f"the peer does not learn: {expected}"
    failed = False
    for strategy in strategies.split(","):
        got = launch([program, "--formula", "--strategy", strategy] + common, world)["losses"]
        assert len(got) == len(expected), f"{strategy}: {len(got)} losses, expected {len(expected)}"
        worst = max(abs(a - b) for a, b in zip(got, expected))
        ok = worst <= TOLERANCE
        failed |= not ok
        print(f"{'ok  ' if ok else 'FAIL'} {strategy}, {world} ranks, dim {dim}: largest difference {worst:.1e}")
        if not ok:
            print(f"  FSDP2     {expected}\n  train_gpt {got}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
