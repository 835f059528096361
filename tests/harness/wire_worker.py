"""One rank of test_wire_bytes.py: trains a model under several policies and counts the bytes its interface sends.

Start it as ``python -m tests.harness.wire_worker`` with the environment variables of ``torch.distributed``. It writes
one JSON line: for each name in ``RUNS`` and ``WHOLE``, the bytes that this rank sent in a step, and those that its
timeline predicts.
It takes the step with the fewest bytes: on a busy machine TCP sometimes sends a segment twice.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from examples.bench.network import bytes_sent
from tests.harness.models import fresh, sharded
from thunder_zero.runtime.calls import Calls

ROWS = (1001, 767, 1535, 257)  # of the weights; 2 and 4 do not divide them
WIDTH = 509
WARM_UP, STEPS = 2, 4
SKIPPED = "layers.0.weight"  # a sixth of the model
NOT_AGAIN = {"embed.weight", *(f"layers.{number}.bias" for number in range(len(ROWS) - 1))}

RUNS: dict[str, tz.Policy] = {
    "ddp": tz.DDP,
    "zero1": tz.ZERO1,
    "zero2": tz.ZERO2,
    "zero3": replace(tz.ZERO3, gather_last_units_once=False),
    "zero3 with its last units gathered once": tz.ZERO3,
    "a reduction is missing": replace(tz.ZERO2, bucket_bytes=0),
}
WHOLE: dict[str, tuple[tz.Policy, int]] = {  # stepped by tz.whole; how often rows travel to their owners and back
    "whole zero1": (tz.ZERO1, 2),
    "whole zero3": (RUNS["zero3"], 3),
}


class Net(nn.Module):
    """About 10 MB, so that headers, acknowledgements and the barrier stay below 1 % of a step's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS[0], WIDTH)
        widths = (WIDTH, *ROWS[1:])
        self.layers = nn.ModuleList([nn.Linear(n, m) for n, m in pairwise(widths)])

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class OnItsOwn:
    """A reduction that sends nothing: this rank's rows of its own gradient."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def wait(self) -> tuple[Tensor, ...]:
        return (self.rows,)


@contextlib.contextmanager
def missing_reduction() -> Iterator[None]:
    """Make every rank omit the reduction of one parameter."""
    reduce = Calls.reduce

    def without_one(calls: Calls, grads: Sequence[Tensor], paths: Sequence[str]) -> Any:
        if tuple(paths) != (SKIPPED,):
            return reduce(calls, grads, paths)
        plan = calls._state.plan
        rows, _ = plan.shard_shape(plan.by_name[SKIPPED])
        return OnItsOwn(grads[0][:rows].clone())

    with mock.patch.object(Calls, "reduce", without_one):
        yield


def rows(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def whole(params: Any) -> torch.optim.Optimizer:
    return tz.whole(torch.optim.Adafactor, params, lr=0.01)


def bytes_of_a_step(policy: tz.Policy, make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, int]:
    model = sharded(fresh(Net), policy)
    optimizer = make(model.parameters())
    tokens = torch.arange(8) + 8 * dist.get_rank()

    def step() -> None:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    counts = []
    for _ in range(STEPS + 1):
        dist.barrier()  # so that messages still on their way count
        counts.append(bytes_sent(os.environ["GLOO_SOCKET_IFNAME"]))
        step()
    timeline = tz.traces_of(model).timeline
    sent = min(after - before for before, after in pairwise(counts))
    return {"sent": sent, "foreseen": sum(map(timeline.bytes_sent, timeline.ops))}


def main() -> None:
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that output of libraries does not get into the reply
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for name, policy in RUNS.items():
        with missing_reduction() if name == "a reduction is missing" else contextlib.nullcontext():
            results[name] = bytes_of_a_step(policy, rows)
    for name, (policy, _) in WHOLE.items():
        results[name] = bytes_of_a_step(policy, whole)
    json.dump(results, reply)
    reply.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
