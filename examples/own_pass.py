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
from thunder_zero.schedule import Op, Reduce, Timeline, Wait

BYTES = 1 << 20  # of gradients in a launch, at most


def merged(timeline: Timeline) -> Timeline:
    """Start reductions of one dtype together, in the place of the last, and end them in the place of the last wait."""
    ops, values = list[Op | None](timeline.ops), dict(timeline.values)
    wait_of = {op.launch.handle: index for index, op in enumerate(timeline.ops) if isinstance(op, Wait)}
    for group in _groups(timeline, wait_of):
        first, *_ = reductions = list(group.values())
        launch = replace(
            first,
            reads=tuple(grad for op in reductions for grad in op.reads),
            params=tuple(path for op in reductions for path in op.params),
        )
        waits = [wait_of[op.handle] for op in reductions]
        means = tuple(mean for index in waits for mean in timeline.ops[index].writes)
        nbytes = sum(values[op.handle].nbytes for op in reductions)
        values[launch.handle] = replace(values[launch.handle], nbytes=nbytes)
        for index in (*group, *waits):
            ops[index] = None
        ops[max(group)], ops[max(waits)] = launch, Wait(launch, means)
    return timeline.with_ops((op for op in ops if op is not None), values)


def _groups(timeline: Timeline, wait_of: dict[str, int]) -> list[dict[int, Reduce]]:
    """Return the reductions to merge, by index: one kind, dtype and format, no wait between them, ``BYTES`` at most."""
    groups: list[dict[int, Reduce]] = []
    kind, nbytes, end = None, 0, 0
    for index, op in enumerate(timeline.ops):
        if not isinstance(op, Reduce):
            continue
        (first, *_), size = timeline.params_of(op), timeline.traffic(op).full
        dtype, form = timeline.values[op.reads[0]].dtype, timeline.travels_as(op, first)
        this = op.over, first.sharded, first.resident, dtype, form
        if this != kind or nbytes + size > BYTES or index > end:
            groups.append({})
            kind, nbytes, end = this, 0, wait_of[op.handle]
        groups[-1][index] = op
        nbytes, end = nbytes + size, min(end, wait_of[op.handle])
    return [group for group in groups if len(group) > 1]


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
            reductions = [op for op in tz.traces_of(model).timeline.ops if isinstance(op, Reduce)]
            print(f"{len(reductions)} launches a step instead of {len(blocks)}, loss {loss.item():.4f}")
            print(f"{Counting.launches} launches in all, of {Counting.reduced >> 10} KiB of gradients")


if __name__ == "__main__":
    main()
