#!/usr/bin/env python3
"""train_gpt stopped and resumed against train_gpt in one go, and its files read by Python.

  resume.py TRAIN_GPT
"""
import json
import os
import struct
import sys
import tempfile

import numpy

from launcher import launch


def main():
    program = sys.argv[1]
    small = ["--dim", "32", "--layers", "2", "--length", "32", "--batch", "2", "--sample", "0", "--warmup", "2"]
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text")
        with open(text, "w") as f:
            f.write("".join(f"{n} squared is {n * n}.\n" for n in range(2000)))

        def run(name, world, *options):
            out = os.path.join(folder, name)
            launch([program, "--data", text, "--steps", "8", "--out", out] + small + list(options), world)
            with open(os.path.join(out, "loss.jsonl")) as f:
                return {record["step"]: record["loss"] for record in map(json.loads, f)}

        saves = os.path.join(folder, "saves")
        whole = run("whole", 2, "--strategy", "zero3", "--save", saves, "--save-every", "4")
        assert sorted(os.listdir(saves)) == ["step-4", "step-8"], os.listdir(saves)
        assert sorted(whole) == list(range(8)), whole
        for strategy in ["zero3", "ddp", "zero2"]:
            resumed = run(strategy, 2, "--strategy", strategy, "--resume", os.path.join(saves, "step-4"))
            assert sorted(resumed) == [4, 5, 6, 7], resumed
            worst = max(abs(resumed[step] - whole[step]) for step in resumed)
            assert worst <= 2e-6, f"{strategy}: {worst}"
            print(f"ok   resumed as {strategy}: largest difference {worst:.1e}")
        run("more", 3, "--strategy", "zero1", "--resume", os.path.join(saves, "step-4"))

        # Each rank's file is a safetensors file: the pieces of a tensor are where the manifest says.
        step = os.path.join(saves, "step-8")
        with open(os.path.join(step, "manifest.json")) as f:
            manifest = json.load(f)
        assert manifest["notes"] == {"step": "8"}, manifest["notes"]
        entry = manifest["tensors"]["tok.weight"]
        assert entry["shape"] == [256, 32] and entry["dtype"] == "F32", entry
        rows = []
        for name, begin, end, offset in entry["pieces"]:
            assert begin == len(rows), entry
            with open(os.path.join(step, name), "rb") as f:
                data = f.read()
            (length,) = struct.unpack("<Q", data[:8])
            own = json.loads(data[8:8 + length])["module/tok.weight"]
            assert own["shape"] == [end - begin, 32], own
            assert 8 + length + own["data_offsets"][0] == offset, (own, offset)
            rows.extend(numpy.frombuffer(data, numpy.float32, (end - begin) * 32, offset).reshape(-1, 32))
        values = numpy.stack(rows)
        assert values.shape == (256, 32) and 0.005 < values.std() < 0.1, values.std()
        moment = manifest["optimizer"]["tok.weight"]
        assert moment["values"] == {"step": 8} and set(moment["rows"]) == {"exp_avg", "exp_avg_sq"}, moment
        print("ok   the files of a checkpoint, read by Python")


if __name__ == "__main__":
    main()
