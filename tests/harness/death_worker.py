"""Lets ranks die or hang in the middle of a collective or a save, and collects the errors of the others.

``python -m tests.harness.death_worker FOLDER NAME...`` writes the errors of ranks 0 and 2 into ``FOLDER/NAME``.
A case starts when the ranks of the one before have compiled; from then on all wait at once. It runs in its own process
because it forks, which starts ranks in milliseconds, and pytest has threads.
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
TIMEOUT_SECONDS = 10.0  # of the process group; ranks compile a step first, on a busy machine not at the same time
START_SECONDS = 100.0  # until all ranks of a case have taken a complete step
HANG_SECONDS = 60.0  # a process that still runs then hangs; two time-outs, one after the other, are usual
Die = Callable[[], None]
Step = Callable[[Any, torch.optim.Optimizer, Path], Any]


def in_transport(method: str) -> Callable[[Die], None]:
    """Dies in this collective of the model, right after its first message was sent."""

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
    """Dies while it writes a checkpoint."""
    dcp_write.write_planned = lambda *args: die()  # type: ignore[assignment]


def train(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()


def save(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    tz.save(folder / "one", model, optimizer)


def save_later(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    tz.save(folder / "one", model, optimizer, wait=False).result()


# name -> signal, moment at which the victim gets it, step of all ranks
CASES: dict[str, tuple[signal.Signals, Callable[[Die], None], Step]] = {
    "killed in a gather": (signal.SIGKILL, in_transport("all_gather"), train),
    "killed in a reduction": (signal.SIGKILL, in_transport("reduce_scatter"), train),
    "killed in a save": (signal.SIGKILL, in_write, save),
    "hangs in a gather": (signal.SIGSTOP, in_transport("all_gather"), train),
    "hangs in an asynchronous save": (signal.SIGSTOP, in_write, save_later),
}


def rank_of(rank: int, name: str, folder: Path) -> int:
    """One rank: a complete step, then steps until the victim dies in one."""
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
        while True:  # a rank that needs nothing more from the victim ends the step, and notices in the next
            step(model, optimizer, folder)
    except RuntimeError as error:
        (folder / f"said{rank}").write_text(str(error))
        return 1


def start(name: str, folder: Path) -> dict[int, int]:
    """Fork the ranks of a case, which end as any program does: exit handlers run, threads are joined; wait until each
    has taken a step.

    Raises:
        SystemExit: in each rank's process, at its end.
    """
    folder.mkdir()
    children = {}
    for rank in range(WORLD):
        children[rank] = os.fork()
        if children[rank] == 0:
            sys.exit(rank_of(rank, name, folder))
    until = time.monotonic() + START_SECONDS
    while not all((folder / f"stepped{rank}").exists() for rank in range(WORLD)) and time.monotonic() < until:
        time.sleep(0.01)
    return children


def collect(cases: dict[str, dict[int, int]]) -> None:
    """Wait until all others of each case have ended.

    Raises:
        TimeoutError: a rank hangs.
    """
    try:
        for name, children in cases.items():
            others = [child for rank, child in children.items() if rank != VICTIM]
            await_end(name, [children[VICTIM]], HANG_SECONDS)
            await_end(name, others, HANG_SECONDS)
    finally:
        for child in (child for children in cases.values() for child in children.values()):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def await_end(name: str, children: Sequence[int], seconds: float) -> None:
    """Wait until all have ended or were stopped.

    Raises:
        TimeoutError: some have not after ``seconds``.
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
