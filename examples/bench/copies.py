"""Copies that the transport for gloo still makes in a step of the bench's GPT, and the memory of its buffers. Linux.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 examples/bench/copies.py

Prints tables: for stages 2 and 3, the transport's tensor operations on the computing thread, and how much of its
buffers' memory was new from the kernel; and the time that weight gradients would save if matmuls wrote them into
existing memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import thunder_zero  # noqa: F401  # before thunder
from examples.bench.contestants import contestants
from examples.bench.model import Size, make_batch
from thunder_zero.comm.handle import Handle
from thunder_zero.comm.pairwise import PairwiseGloo

MiB = 1 << 20
STAGES = (2, 3)
WARM_UP, STEPS = 4, 10
OTHER_SEQUENCES = 3  # per batch of the steps in between
FRESH_MiB = 64  # above 32 MiB, which glibc may keep for reuse: always new from the kernel
PLACES = ((PairwiseGloo, "all_gather"), (PairwiseGloo, "reduce_scatter"), (Handle, "settle"))
ROWS = {  # where, operation -> words in the table
    ("all_gather", "aten.cat"): "small shards packed",
    ("all_gather", "aten.copy_"): "own rows into the gathered parameter",
    ("reduce_scatter", "aten.clone"): "gradients made contiguous",
    ("reduce_scatter", "aten.cat"): "small gradients packed",
    ("settle", "aten.copy_"): "packed messages unpacked",
    ("settle", "aten.add"): "the mean: sum",
    ("settle", "aten.add_"): "the mean: further sums",
    ("settle", "aten.div_"): "the mean: division",
}
LIBC = ctypes.CDLL(None, use_errno=True)


class Watch(TorchDispatchMode):
    """Records bytes and seconds of each operation that runs inside it, and the memory of new buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ""
        self.done: defaultdict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
        self.given = self.absent = 0  # bytes of buffers; of those, bytes that the kernel still had to provide

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = op(*args, **(kwargs or {}))
        seconds = time.perf_counter() - start
        if isinstance(result, Tensor):
            name = str(op.overloadpacket)
            self.done[self.place, name].append((result.nbytes, seconds))
            if name == "aten.empty":
                self.given += result.nbytes
                self.absent += absent_bytes(result)
        return result


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Watch the operations of the transport."""

    def inside(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            watch.place = name
            with watch:
                return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in PLACES:
            stack.enter_context(patch.object(owner, name, inside(name, getattr(owner, name))))
        yield


def absent_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor's memory without a page yet; the first write to each page costs a page fault."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = tensor.data_ptr() + tensor.nbytes - start
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    if nbytes and LIBC.mincore(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), pages):
        raise OSError(ctypes.get_errno(), "mincore failed; run this on Linux")
    return bytes(pages).count(0) * mmap.PAGESIZE


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def of_stage(stage: int, size: Size) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of the tables: copies of a step; memory of its buffers, with and without other steps in between."""
    rank = dist.get_rank()
    batch, other = (make_batch(Size(sequences=n), rank) for n in (size.sequences, OTHER_SEQUENCES))
    model, step = contestants()[f"zero{stage}"].build(size)
    for tokens in (*[batch] * WARM_UP, *[other] * WARM_UP, *[batch] * WARM_UP):
        step(*tokens)
    seconds = median(seconds_of(lambda: step(*batch)) for _ in range(STEPS))
    watch = Watch()
    with watching(watch):
        for _ in range(STEPS):
            step(*batch)
    head = f"stage {stage}, {seconds * 1e3:.0f} ms a step"
    copies = [[head, *copy_row(words, watch.done[key], seconds)] for key, words in ROWS.items() if watch.done[key]]
    alone, watch = watch, Watch()
    for _ in range(STEPS):
        step(*other)
        with torch.no_grad():
            model(batch[0])
        with watching(watch):
            step(*batch)
    between = "another step and an evaluation in between"
    return copies, [[head, *memory_row("step after step", alone)], [head, *memory_row(between, watch)]]


def copy_row(words: str, done: Sequence[tuple[int, float]], step_seconds: float) -> list[str]:
    nbytes, seconds = (sum(column) / STEPS for column in zip(*done, strict=True))
    share = f"{seconds / step_seconds:.2%}"
    return [words, f"{len(done) / STEPS:.0f}", f"{nbytes / MiB:.2f}", f"{seconds * 1e3:.2f}", share]


def memory_row(words: str, watch: Watch) -> list[str]:
    return [words, f"{watch.given / STEPS / MiB:.1f}", f"{watch.absent / STEPS / MiB:.2f}"]


def first_touch() -> float:
    """Milliseconds by which the first write to a MiB of new memory takes longer than the second."""
    found = []
    for _ in range(STEPS):
        fresh = torch.empty(FRESH_MiB * MiB, dtype=torch.uint8)
        first, again = (seconds_of(fresh.zero_) for _ in range(2))
        found.append((first - again) * 1e3 / FRESH_MiB)
    return median(found)


def weight_gradients(size: Size) -> tuple[float, float]:
    """Milliseconds of all matmuls of weight gradients in a step: with results in new memory, and with ``out=``."""
    width, tokens = size.width, size.sequences * size.tokens
    block = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    shapes = [*block * size.blocks, (size.vocabulary, width)]
    factors = {shape: (torch.randn(tokens, shape[0]).t(), torch.randn(tokens, shape[1])) for shape in shapes}
    existing = [torch.zeros(shape) for shape in shapes]
    made = [
        lambda: [torch.mm(*factors[shape]) for shape in shapes],
        lambda: [torch.mm(*factors[shape], out=out) for shape, out in zip(shapes, existing, strict=True)],
    ]
    rounds = [[seconds_of(make) * 1e3 for make in made] for _ in range(WARM_UP + 3 * STEPS)]
    new, out = (median(column) for column in zip(*rounds[WARM_UP:], strict=True))
    return new, out


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = Size()
    of_stages = [of_stage(stage, size) for stage in STAGES]
    copies, memory = ([row for rows in tables for row in rows] for tables in zip(*of_stages, strict=True))
    touch, (new, out) = first_touch(), weight_gradients(size)
    if dist.get_rank() == 0:
        print(f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, Python {platform.python_version()}, ", end="")
        print(f"{os.cpu_count()} cores, one thread a rank, W = {dist.get_world_size()}; means of {STEPS} steps")
        print(table(["", "copy", "calls", "MiB", "ms", "of a step"], copies))
        print(table(["", "buffers", "MiB made", "MiB new"], memory))
        print(f"\nThe first write to new memory takes {touch:.3f} ms per MiB longer than the second.")
        print(f"All weight gradients of a step take {new:.1f} ms into new tensors, {out:.1f} ms with out=.")
    dist.destroy_process_group()


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
