"""Lets a rank die or hang in the middle of a collective or a save, and collects the errors of its peers.

``python -m tests.harness.death_worker FOLDER NAME...`` writes the errors of ranks 0 and 2 into ``FOLDER/NAME``.
A case starts when all ranks of the case before have compiled; then the cases wait at once. It is a program, because it
forks ranks, which takes milliseconds, and pytest has threads.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thunder_zero as tz
from tests.harness.models import Mlp, fresh, sharded
from thunder_zero.checkpoint import dcp_write
from thunder_zero.comm import pairwise
from thunder_zero.comm.pairwise import PairwiseGloo

WORLD, VICTIM = 3, 1
TIMEOUT_SECONDS = 10.0  # of the process group; on a busy machine ranks do not finish compiling at the same time
START_SECONDS = 100.0  # until all ranks of a case have taken a complete step
HANG_SECONDS = 60.0  # a process that still runs then is said to hang; two time-outs in a row are usual
Die = Callable[[], None]
Step = Callable[[Any, torch.optim.Optimizer, Path], Any]


def in_transport(method: str) -> Callable[[Die], None]:
    """Let a rank die in a collective of the model, right after it has sent its first message."""

    def arm(die: Die) -> None:
        launch, send = getattr(PairwiseGloo, method), pairwise.send

        def send_and_die(*args: Any) -> Any:
            send(*args)
            die()

        def armed(*args: Any, **kwargs: Any) -> Any:
            pairwise.send = send_and_die  # type: ignore[assignment]
            return launch(*args, **kwargs)

        setattr(PairwiseGloo, method, armed)

    return arm


def in_write(die: Die) -> None:
    """Let a rank die while it writes a checkpoint."""
    dcp_write.write_planned = lambda *args: die()  # type: ignore[assignment]


def train(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()


def save(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    tz.save(folder / "one", model, optimizer)


def save_later(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    tz.save(folder / "one", model, optimizer, wait=False).result()


# name -> signal that the victim gets, moment, step of all ranks
CASES: dict[str, tuple[signal.Signals, Callable[[Die], None], Step]] = {
    "killed in a gather": (signal.SIGKILL, in_transport("all_gather"), train),
    "killed in a reduction": (signal.SIGKILL, in_transport("reduce_scatter"), train),
    "killed in a save": (signal.SIGKILL, in_write, save),
    "hangs in a gather": (signal.SIGSTOP, in_transport("all_gather"), train),
    "hangs in an asynchronous save": (signal.SIGSTOP, in_write, save_later),
}


def run_rank(rank: int, name: str, folder: Path) -> int:
    """Take a complete step, then steps until the victim dies in one. Return the exit code."""
    deadly, arm, step = CASES[name]
    store, timeout = f"file://{folder}/store", timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timeout)
    model = sharded(fresh(Mlp, 7, 1), 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, optimizer, folder)
    (folder / f"stepped{rank}").touch()
    if rank == VICTIM:
        arm(lambda: os.kill(os.getpid(), deadly))
    try:
        while True:  # a rank that has all messages of the victim notices its death only in the next step
            step(model, optimizer, folder)
    except RuntimeError as error:
        (folder / f"said{rank}").write_text(str(error))
        return 1


def start(name: str, folder: Path) -> dict[int, int]:
    """Fork the ranks of a case, and wait until each has taken a step.

    A rank ends as any program does: exit handlers run, and threads are joined.

    Raises:
        SystemExit: in each rank's process, at its end.
    """
    folder.mkdir()
    children = {}
    for rank in range(WORLD):
        children[rank] = os.fork()
        if children[rank] == 0:
            sys.exit(run_rank(rank, name, folder))
    until = time.monotonic() + START_SECONDS
    while not all((folder / f"stepped{rank}").exists() for rank in range(WORLD)) and time.monotonic() < until:
        time.sleep(0.01)
    return children


def collect(cases: dict[str, dict[int, int]]) -> None:
    """Wait until the victim and its peers have ended or were stopped, in each case.

    Raises:
        TimeoutError: a rank hangs.
    """
    try:
        for name, children in cases.items():
            peers = [child for rank, child in children.items() if rank != VICTIM]
            await_end(name, [children[VICTIM]], HANG_SECONDS)
            await_end(name, peers, HANG_SECONDS)
    finally:
        for child in (child for children in cases.values() for child in children.values()):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def await_end(name: str, children: Sequence[int], seconds: float) -> None:
    """Wait until all child processes have ended or were stopped.

    Raises:
        TimeoutError: a child still runs after ``seconds``.
    """
    until = time.monotonic() + seconds
    living = set(children)
    while living:
        living -= {child for child in living if os.waitpid(child, os.WNOHANG | os.WUNTRACED)[0]}
        if time.monotonic() > until:
            raise TimeoutError(f"{name}: {len(living)} of {len(children)} processes still run after {seconds:g} s")
        time.sleep(0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    collect({name: start(name, Path(sys.argv[1]) / name) for name in sys.argv[2:]})
