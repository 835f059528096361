"""Starts the worker processes of one world size for ``run.py``, and sends them commands."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.bench.network import Seat

ROOT = Path(__file__).parents[2]
PORT = 29500  # in our own namespace every port is free


class RankFailed(RuntimeError):
    """A worker ended, or did not reply in time."""


class CommandFailed(RuntimeError):
    """Every rank has replied, at least one of them with an error."""


class Ranks:
    """One worker per rank; all of them get every command."""

    def __init__(self, workers: list[subprocess.Popen[str]], logs: list[Path]) -> None:
        self._workers, self._logs = workers, logs

    def do(self, what: str, seconds: float = 600.0, **arguments: Any) -> list[dict[str, Any]]:
        """The replies of all ranks to one command, in rank order.

        Raises:
            RankFailed: a rank ended, or did not reply within ``seconds``; the message has the end of its log.
            CommandFailed: the command raised on some rank; the message has its traceback.
        """
        line = json.dumps({"do": what, **arguments}) + "\n"
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(line)
            worker.stdin.flush()
        return self.replies(seconds, line)

    def replies(self, seconds: float, line: str = "the start") -> list[dict[str, Any]]:
        """Read one reply from each rank."""
        end = time.monotonic() + seconds
        found: list[dict[str, Any]] = []
        for worker, log in zip(self._workers, self._logs, strict=True):
            assert worker.stdout is not None
            ready, _, _ = select.select([worker.stdout], [], [], max(end - time.monotonic(), 0))
            text = worker.stdout.readline() if ready else ""
            if not text:
                what = "ended" if ready else f"did not reply within {seconds:g} s"
                raise RankFailed(f"rank {len(found)} {what}, at {line.strip()}:\n{log.read_text()[-3000:]}")
            found.append(json.loads(text))
        for rank, reply in enumerate(found):
            if "error" in reply:
                raise CommandFailed(f"rank {rank} failed at {line.strip()}:\n{reply['error']}")
        return found


@contextmanager
def ranks(seats: list[Seat], logs: Path, *, model: str = "gpt", pinned: bool = False) -> Iterator[Ranks]:
    """Start a worker on each seat, and end them all at exit. ``logs`` is a folder; ``pinned``: each has one core;
    ``model``: a key of ``SIZES``."""
    port = PORT if seats[0].ends else free_port()
    workers: list[subprocess.Popen[str]] = []
    paths = [logs / f"rank{rank}.log" for rank in range(len(seats))]
    try:
        for rank, (seat, path) in enumerate(zip(seats, paths, strict=True)):
            env = environment(rank, seats, port)
            core = ("taskset", "--cpu-list", str(rank % (os.cpu_count() or 1))) if pinned else ()
            command = (*seat.prefix, *core, sys.executable, "-m", "examples.bench.worker", model)
            with path.open("w") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                workers.append(subprocess.Popen(command, cwd=ROOT, env=env, text=True, bufsize=1, **pipes))
        group = Ranks(workers, paths)
        group.replies(120.0)
        yield group
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()


def environment(rank: int, seats: list[Seat], port: int) -> dict[str, str]:
    """The environment variables of one rank."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(seats)),
        "MASTER_ADDR": seats[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": seats[rank].interface,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
