"""What each line of a trace sends: by the plan, in its messages, and on the sockets of this process. Linux.

    python examples/bench/lines.py                 # the figures of docs/performance.md, "Each line and its bytes"

Trains a small GPT under each policy, each copy of the model on two ranks. Each launch is waited for at once, so that
the sockets have nothing else meanwhile (``examples/sent_bytes.py``). Sockets also have gloo's headers, 144 bytes a
message, and for each phase a tag of 256 bytes to each rank.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from examples.bench.model import Size, loss_of, make_batch, make_model
from examples.sent_bytes import SentLine, counted_lines

SIZE = Size(blocks=2, width=128, vocabulary=512)
HALF = tz.MixedPrecision(torch.bfloat16, reduce_dtype=torch.bfloat16)
FORMATS = {"gather_format": tz.Int8(), "reduce_format": tz.Int8()}
POLICIES = {
    "stage 0": tz.DDP,
    "stage 0, bfloat16": replace(tz.DDP, mixed_precision=HALF),
    "stage 1": tz.ZERO1,
    "stage 2, int8": replace(tz.ZERO2, **FORMATS),
    "stage 2, owned": replace(tz.ZERO2, owned=("*.weight",)),
    "stage 3": replace(tz.ZERO3, reshard_after_forward=True),
    "stage 3, bfloat16": replace(tz.ZERO3, mixed_precision=HALF),
    "stage 3, bfloat16, int8": replace(tz.ZERO3, mixed_precision=HALF, reshard_after_forward=True, **FORMATS),
}
IN_FULL = "stage 3, bfloat16"  # printed line by line
COPIED = ("stage 3", IN_FULL, "stage 3, bfloat16, int8")  # also on two copies of the model


def lines_of(
    module: nn.Module, policy: tz.Policy, copies: int, size: Size
) -> tuple[tz.schedule.Timeline, list[SentLine]]:
    """Return the timeline of a training step, and what each of its launches has sent; all ranks call it."""
    shape, rank = (copies, dist.get_world_size() // copies), dist.get_rank()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if copies > 1 else None
    tokens, targets = make_batch(size, rank)
    with counted_lines() as lines:
        model = tz.compile(module, policy, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):  # the first one compiles
            lines.clear()
            loss_of(model(tokens).float(), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tz.traces_of(model).timeline, list(lines)


def run(rank: int, copies: int, store: str) -> None:
    """One rank of all runs with so many copies of the model; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2 * copies)
    full = ""
    for name in POLICIES if copies == 1 else COPIED:
        timeline, lines = lines_of(make_model(SIZE), POLICIES[name], copies, SIZE)
        if rank == 0:
            foreseen = [timeline.traffic(op).sent for op in timeline.launches.values()]
            print(row(name if copies == 1 else f"{name}, {copies} copies", lines, foreseen), flush=True)
            if name == IN_FULL and copies > 1:
                full = in_full(lines, foreseen)
        dist.barrier()
    print(full, end="", flush=True)
    dist.destroy_process_group()


def row(name: str, lines: list[SentLine], foreseen: list[int]) -> str:
    """Return the row of a policy: sums over the lines of a step."""
    apart = max(abs(line.nbytes - plan) for line, plan in zip(lines, foreseen, strict=True))
    sums = sum(foreseen), sum(line.nbytes for line in lines), sum(line.on_sockets for line in lines)
    messages = sum(line.messages for line in lines)
    return f"| {name} | {len(lines)} | {sums[0]:,} | {sums[1]:,} | {apart} | {sums[2]:,} | {messages} |"


def in_full(lines: list[SentLine], foreseen: list[int]) -> str:
    """Return the table of a policy, line by line, as Markdown."""
    rows = ["", "| line | of | by the plan | in messages | on sockets |", "|---|---|---|---|---|"]
    for line, plan in zip(lines, foreseen, strict=True):
        first, *others = line.params
        of = f"{first}, {len(others)} more" if others else first
        rows.append(f"| `{line.line}` | {of} | {plan:,} | {line.nbytes:,} | {line.on_sockets:,} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    print("| policy | lines | by the plan | in messages | most apart in a line | on sockets | messages |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for copies in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (copies, str(Path(folder) / "store")), 2 * copies)


if __name__ == "__main__":
    main()
