"""Ranks of a command as processes, for the tests in Python."""
import os
import socket
import subprocess
import sys
import tempfile

TIMEOUT = 240  # seconds, for one launch


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(command, world):
    """Runs `world` ranks of a command with torchrun's environment; returns what rank 0 wrote, or exits with everything."""
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
    return texts[0]
