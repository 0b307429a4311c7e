#!/usr/bin/env python3
"""Losses of train_gpt --formula against PyTorch's FSDP2 in benchmarks/peers/gpt_fsdp2.py: the same run in two programs.

  formula.py TRAIN_GPT PEER WORLD DIM STRATEGY[,STRATEGY...] [options for both programs...]
"""
import json
import sys

from launcher import launch

TOLERANCE = 2e-6


def losses(command, world):
    """Those of the JSON line that rank 0 prints last."""
    return json.loads([line for line in launch(command, world).splitlines() if line.startswith("{")][-1])["losses"]


def main():
    program, peer, world, dim, strategies, *common = sys.argv[1:]
    world = int(world)
    common = ["--dim", dim, "--layers", "2", "--warmup", "0", "--steps", "6", "--micro", "2"] + common
    expected = losses([sys.executable, peer, "--mode", "fsdp"] + common, world)
    assert len(expected) == 6 and expected[-1] < expected[0] - 0.01, f"the peer does not learn: {expected}"
    failed = False
    for strategy in strategies.split(","):
        got = losses([program, "--formula", "--strategy", strategy] + common, world)
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
