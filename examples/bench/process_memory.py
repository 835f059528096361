"""Measures the most memory that a process of a training run has, each contestant in processes of its own.

    python -m examples.bench.process_memory                 # 3 minutes on two cores
    python -m examples.bench.process_memory --model llama ddp zero3

Two ranks over loopback, one thread each, ten steps of the bench's model; the number is the largest ``ru_maxrss`` of a
rank, with Python, torch and what compiling took.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from examples.bench.contestants import contestants
from examples.bench.model import SIZES, make_batch

STEPS = 10
NAMES = ("ddp", "ddp+tc", "zero0", "zero0+tc", "zero2", "zero2+tc", "zero3", "zero3+tc")
PEERS = tuple(f"fsdp2-{kind}-fair{compiled}" for kind in ("keep", "reshard") for compiled in ("", "+tc"))


def train(rank: int, name: str, model: str, folder: str) -> None:
    """One rank, which writes what it took."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    size = SIZES[model]
    _, step = contestants()[name].build(size)
    for _ in range(STEPS):
        step(*make_batch(size, rank))
    dist.barrier()
    (Path(folder) / f"rank{rank}").write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestants", nargs="*", default=[*NAMES, *PEERS])
    parser.add_argument("--model", choices=SIZES, default="gpt")
    options = parser.parse_args()
    print("| | process, MiB |\n|---|---:|")
    for name in options.contestants:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(train, (name, options.model, folder), 2)
            most = max(int((Path(folder) / f"rank{rank}").read_text()) for rank in range(2))
        print(f"| {name} | {most / 1024:.0f} |", flush=True)


if __name__ == "__main__":
    main()
