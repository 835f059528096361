"""This process's place in a run: the process group that torchrun describes, or a group of one process."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import thunder_zero as tz


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank, the number of ranks, and the device this rank computes on."""

    rank: int
    world_size: int
    device: torch.device

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over ranks, on every rank; float64, on the CPU."""
        summed = values.to(self.device, torch.float64, copy=True)
        dist.all_reduce(summed)
        return summed.cpu() / self.world_size

    def rounded_up(self, rows: int, parts: int = 1) -> int:
        """The rows of a global batch that all ranks can share evenly, each in so many parts; the mean needs that."""
        return rounded_up(rows, self.world_size * parts)

    def rows_of(self, batch: Tensor) -> Tensor:
        """This rank's share of a global batch: consecutive rows, as many on each rank.

        Raises:
            ValueError: the rows cannot be divided among the ranks.
        """
        if len(batch) % self.world_size:
            raise ValueError(
                f"a batch of {len(batch)} rows does not divide among {self.world_size} ranks; give a multiple of it"
            )
        return batch.chunk(self.world_size)[self.rank].to(self.device)

    @property
    def words(self) -> str:
        """Return words such as "4 ranks"."""
        return f"{self.world_size} {'rank' if self.world_size == 1 else 'ranks'}"


def rounded_up(count: int, step: int) -> int:
    """The next multiple of ``step``, or ``count`` if it is one."""
    return -(-count // step) * step


def positive(text: str) -> int:
    """Return the number of an option that counts something.

    Raises:
        argparse.ArgumentTypeError: it is less than 1; argparse ends the script with the sentence.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small; give at least 1")
    return value


def options_parser(doc: str | None, *, stage: int | None = 3, trains: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that the examples share; ``doc`` is the example's own text for ``--help``.

    Args:
        doc: what the example teaches.
        stage: the default of ``--stage``; None leaves the option out.
        trains: adds ``--seed`` and ``--out``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if stage is not None:
        words = f"0: DDP, 1-3: ZeRO-1 to ZeRO-3 ({stage})"
        parser.add_argument("--stage", type=int, choices=range(4), default=stage, help=words)
    if trains:
        parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data (0)")
        parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for pictures and checkpoints (runs)")
    return parser


FORMATS = {"int8": tz.Int8()}


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--gather-format`` and ``--reduce-format``, from stage 1 on."""
    parser.add_argument("--gather-format", choices=FORMATS, help="parameters travel as bytes (as they are)")
    parser.add_argument("--reduce-format", choices=["int8"], help="gradients travel as bytes (as they are)")


def formats_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the options say, as fields of a policy."""
    asked = {"gather_format": options.gather_format, "reduce_format": options.reduce_format}
    return {field: FORMATS.get(name) for field, name in asked.items()}


def stage_name(stage: int) -> str:
    """Return a name such as "ZeRO-3"."""
    return f"ZeRO-{stage}" if stage else "DDP"


@contextmanager
def ranks_of_torchrun(*, on_cpus: bool = False) -> Iterator[Ranks]:
    """The process group that torchrun describes; without torchrun, a group of one process.

    NCCL if each rank on the machine has a GPU, else gloo; ``on_cpus`` asks for gloo anyway.
    """
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = not on_cpus and torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://localhost:0", rank=0, world_size=1)  # any free port
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()
