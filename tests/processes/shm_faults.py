#!/usr/bin/env python3
"""Jobs over shared memory that meet faults: shm_faults.py SHM_RANKS CASE"""
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

LIMIT = 60  # seconds until a job counts as hanging


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Job:
    """Ranks of one job; `prefix` gives a rank another command line, `env` other variables."""

    def __init__(self, program, world, *arguments, env=None, prefix=None):
        port = free_port()
        self.ranks, self.files = [], []
        for rank in range(world):
            variables = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                             LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                             OMP_NUM_THREADS="1", FSDP_BACKEND="shm")
            variables.update(env or {})
            self.files.append(tempfile.TemporaryFile("w+"))
            command = (prefix or {}).get(rank, []) + [program, *map(str, arguments)]
            self.ranks.append(subprocess.Popen(command, env=variables, stdout=self.files[-1],
                                               stderr=subprocess.STDOUT))

    def text(self, rank):
        self.files[rank].seek(0)
        return self.files[rank].read()

    def wait_for_text(self, rank, text):
        deadline = time.monotonic() + LIMIT
        while text not in self.text(rank):
            assert time.monotonic() < deadline, f"rank {rank} never said '{text}':\n{self.text(rank)}"
            time.sleep(0.02)

    def finish(self):
        """Exit statuses; all are killed when one hangs."""
        deadline = time.monotonic() + LIMIT
        try:
            return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.ranks]
        finally:
            for p in self.ranks:
                if p.poll() is None:
                    p.kill()
                    p.wait()

    def expect(self, statuses):
        got = self.finish()
        assert got == statuses, f"exit statuses {got}, expected {statuses}\n" + "\n".join(
            f"rank {r}: {self.text(r)}" for r in range(len(self.ranks)))


def left_behind():
    return sorted(os.listdir("/dev/shm"))


def killed_peer(program):
    """At many points of many operations: the survivors say who died, soon, and nothing stays behind."""
    before = left_behind()
    for world, victim, delay in [(2, 1, 0.0), (2, 1, 0.013), (2, 1, 0.151), (3, 2, 0.037), (4, 1, 0.071), (4, 3, 0.2)]:
        job = Job(program, world, "loop", 50, 600)
        job.wait_for_text(victim, "running")
        time.sleep(delay)
        began = time.monotonic()
        job.ranks[victim].send_signal(signal.SIGKILL)
        job.expect([-signal.SIGKILL if r == victim else 3 for r in range(world)])
        assert time.monotonic() - began < 30, "the survivors noticed late"
        for r in range(world):
            if r != victim:
                assert f"rank {victim} has died" in job.text(r), f"rank {r}: {job.text(r)}"
    assert left_behind() == before


def stopped_peer(program):
    """SIGSTOP: alive but silent, so the timeout ends it and names it."""
    job = Job(program, 2, "loop", 50, 3)
    job.wait_for_text(1, "running")
    job.ranks[1].send_signal(signal.SIGSTOP)
    job.ranks[0].wait(LIMIT)
    assert job.ranks[0].returncode == 3 and "rank 1 within 3000 ms" in job.text(0), job.text(0)
    job.ranks[1].send_signal(signal.SIGCONT)
    job.expect([3, 3])
    assert "rank 1 within 3000 ms" in job.text(1), job.text(1)


def two_jobs(program):
    """Side by side on one host, twice oversubscribed: each sees its own data only."""
    jobs = [Job(program, 2, "loop", 2), Job(program, 3, "loop", 2)]
    for job in jobs:
        job.expect([0] * len(job.ranks))
        assert "backend shm" in job.text(0) and int(re.search(r"rounds (\d+)", job.text(0)).group(1)) > 1


def eight_ranks(program):
    job = Job(program, 8, "loop", 3)
    job.expect([0] * 8)


def forked_child(program):
    job = Job(program, 2, "fork")
    job.expect([0, 0])
    for r in range(2):
        assert "child 0\n" in job.text(r), job.text(r)


def another_container(program):
    """Rank 1 in a namespace of processes of its own: gloo by itself, an error on request."""
    unshare = next((c for c in (["unshare", "--pid", "--fork"], ["unshare", "-Ur", "--pid", "--fork"])
                    if subprocess.run(c + ["true"], capture_output=True).returncode == 0), None)
    if unshare is None:
        print("skipped: unshare is not allowed here")
        sys.exit(77)
    job = Job(program, 2, "loop", 0.2, env={"FSDP_BACKEND": "auto"}, prefix={1: unshare})
    job.expect([0, 0])
    assert "backend gloo" in job.text(0) and "backend gloo" in job.text(1), job.text(0)
    job = Job(program, 2, "loop", 0.2, prefix={1: unshare})
    job.expect([5, 5])
    for r in range(2):
        assert "rank 1 does not run on the host of rank 0" in job.text(r), job.text(r)


CASES = {f.__name__: f for f in (killed_peer, stopped_peer, two_jobs, eight_ranks, forked_child, another_container)}

if __name__ == "__main__":
    CASES[sys.argv[2]](sys.argv[1])
