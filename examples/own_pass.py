"""A pass and a transport of your own: fewer, larger buckets for a small model, and the bytes that it sends.

    torchrun --standalone --nproc-per-node 2 examples/own_pass.py

A launch costs the host as much for 10 KB as for 100 KB, and each block of this model has 65 KB. So :func:`merged` lets
reductions of neighbouring units travel together. ``thunder_zero`` proves the result before it runs: a pass that loses a
gradient, or waits for it too early, raises ScheduleError, which names the pass and the operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from ranks import options_parser, positive, ranks_of_torchrun
from torch import Tensor, nn

import thunder_zero as tz
from thunder_zero.comm.pairwise import PairwiseGloo
from thunder_zero.schedule import Kind, Op, Timeline

BYTES = 1 << 20  # of gradients in a launch, at most


def merged(timeline: Timeline) -> Timeline:
    """Start reductions of one dtype together, in the place of the last, and end them in the place of the last wait."""
    ops, values, dropped = list(timeline.ops), dict(timeline.values), set[int]()
    wait_of = {op.reads[0]: index for index, op in enumerate(ops) if op.kind is Kind.WAIT}
    for members in _groups(timeline, wait_of):
        waits = [wait_of[ops[index].writes[0]] for index in members]
        handle = ops[members[0]].writes[0]
        nbytes = sum(values[ops[index].writes[0]].nbytes for index in members)
        values[handle] = replace(values[handle], nbytes=nbytes)
        launch = replace(_joined([ops[index] for index in members]), writes=(handle,))
        wait = replace(_joined([ops[index] for index in waits]), reads=(handle,))
        dropped |= {*members, *waits} - {members[-1], max(waits)}
        ops[members[-1]], ops[max(waits)] = launch, wait
    return timeline.with_ops([op for index, op in enumerate(ops) if index not in dropped], values)


def _groups(timeline: Timeline, wait_of: dict[str, int]) -> list[list[int]]:
    """Return the reductions to merge, by index: one kind, dtype and format, no wait between them, ``BYTES`` at most."""
    groups: list[list[int]] = []
    kind, nbytes, ends = None, 0, 0
    for index, op in enumerate(timeline.ops):
        if op.kind is not Kind.REDUCE:
            continue
        (first, *_), size = timeline.params_of(op), timeline.full_bytes(op)
        this = first.sharded, first.resident, timeline.values[op.reads[0]].dtype, timeline.travels_as(op, first)
        end = wait_of[op.writes[0]]
        if this == kind and nbytes + size <= BYTES and index < ends:
            groups[-1].append(index)
            nbytes, ends = nbytes + size, min(ends, end)
        else:
            groups.append([index])
            kind, nbytes, ends = this, size, end
    return [group for group in groups if len(group) > 1]


def _joined(ops: Sequence[Op]) -> Op:
    """Return one operation with the values, parameters and lines of several."""
    parts: dict[str, Any] = {
        name: tuple(each for op in ops for each in getattr(op, name))
        for name in ("reads", "writes", "params", "source")
    }
    return replace(ops[0], **parts)


class Counting(PairwiseGloo):
    """A gloo transport that counts the bytes of the full gradients that it is given."""

    reduced = 0
    launches = 0

    def reduce_scatter(self, grads: Sequence[Tensor]) -> Any:
        """Count the bytes, and start the reduction."""
        Counting.reduced += sum(grad.nbytes for grad in grads)
        Counting.launches += 1
        return super().reduce_scatter(grads)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train with both; print what was launched."""
    parser = options_parser(__doc__, stage=None, trains=False)
    parser.add_argument("--steps", type=positive, default=3, help="steps of training (3)")
    steps = parser.parse_args(arguments).steps
    with ranks_of_torchrun(on_cpus=True) as ranks:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(8)]
        model = tz.compile(nn.Sequential(*blocks), stage=3, passes=(merged,), transport=Counting, progress=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(ranks.rank))
        for _ in range(steps):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if ranks.rank == 0:
            reductions = [op for op in tz.traces_of(model).timeline.ops if op.kind is Kind.REDUCE]
            print(f"{len(reductions)} launches a step instead of {len(blocks)}, loss {loss.item():.4f}")
            print(f"{Counting.launches} launches in all, of {Counting.reduced >> 10} KiB of gradients")


if __name__ == "__main__":
    main()
