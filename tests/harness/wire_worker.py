"""A rank of test_wire_bytes.py: trains a model under several policies and counts the bytes its interface sends.

Start it as ``python -m tests.harness.wire_worker`` with the environment variables of ``torch.distributed``. It writes
a JSON object: for each name in ``RUNS``, the result of :func:`count`.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from examples.bench.network import bytes_sent
from tests.harness.models import fresh, sharded

ROWS = (1001, 767, 1535, 257)  # rows of the weights; 2, 3 and 4 ranks do not divide them
WIDTH = 509
WARM_UP, STEPS = 2, 3
NOT_AGAIN = {
    "embed.weight",
    *(f"layers.{number}.bias" for number in range(len(ROWS) - 1)),
}  # backward does not read them

RUNS: dict[str, tz.Policy] = {
    "ddp": tz.DDP,
    "zero1": tz.ZERO1,
    "zero2": tz.ZERO2,
    "zero3": replace(tz.ZERO3, reshard_after_forward=True),
    "zero3 with its last units kept unsharded": tz.ZERO3,
}
WHOLE = {"zero1": 2, "zero3": 3}  # policies also stepped by tz.whole: how often rows travel to owners and back


class Net(nn.Module):
    """A model of about 10 MB, so that headers, acknowledgements and the barrier are below 1 % of a step's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS[0], WIDTH)
        self.layers = nn.ModuleList([nn.Linear(n, m) for n, m in pairwise((WIDTH, *ROWS[1:]))])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed.forward(tokens)
        for layer in self.layers:
            x = torch.tanh(layer.forward(x))
        return x


def bytes_of_a_step(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Return the fewest bytes that a step sends. TCP may send a segment twice on a busy machine."""
    tokens = torch.arange(8) + 8 * dist.get_rank()
    counts = []
    for _ in range(WARM_UP + STEPS + 1):
        dist.barrier()  # so that all messages of a step have been sent
        counts.append(bytes_sent(os.environ["GLOO_SOCKET_IFNAME"]))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return min(after - before for before, after in pairwise(counts[WARM_UP:]))


def count(name: str) -> dict[str, Any]:
    """Return the bytes sent in a step, also with ``tz.whole``; the planned bytes; and the parameters kept unsharded."""
    model = sharded(fresh(Net), RUNS[name])
    counts: dict[str, Any] = {"sent": bytes_of_a_step(model, torch.optim.SGD(model.parameters(), 0.01))}
    if name in WHOLE:
        counts["whole"] = bytes_of_a_step(model, tz.whole(torch.optim.Adafactor, model.parameters(), lr=0.01))
    traces = tz.traces_of(model)
    foreseen = sum(traces.timeline.traffic(op).sent for op in traces.timeline.ops)
    return {**counts, "foreseen": foreseen, "kept": traces.plan.kept_unsharded}


def main() -> None:
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that libraries' output stays out of the reply
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    json.dump({name: count(name) for name in RUNS}, reply)
    reply.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
