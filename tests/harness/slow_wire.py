"""A wire on a GPU that is late by a known time: collectives run in their own stream, behind a sleep.

It does to streams and memory what NCCL does, and makes each race certain: from launch to the end of its sleep an
output is NaN; a wait orders streams, not the host; memory that is freed too early is overwritten by what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.harness.late import replace_collectives

CYCLES = 20_000_000  # about 10 ms


class SlowWire:
    """Takes the place of torch's calls in ``comm/native.py`` for one rank, whose collectives are copies.

    Attributes:
        launched: number of buckets.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._calls: list[tuple[Tensor, ...]] | None = None
        self.launched = 0

    @contextmanager
    def launch(self, group: object) -> Iterator[SlowWire]:
        """Instead of ``one_launch``."""
        calls: list[tuple[Tensor, ...]] = []
        self._calls = calls
        yield self
        self._calls = None
        self.launched += 1
        copies = [(call[0], call[1] if len(call) == 2 else self._kept(call[0])) for call in calls]
        for output, given in copies:
            if output.is_floating_point() and output.data_ptr() != given.data_ptr():  # not a gather into a buffer
                output.fill_(torch.nan)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(CYCLES)
            for output, given in copies:
                output.copy_(given)

    def _kept(self, tensor: Tensor) -> Tensor:
        """A copy of what a collective works on in place, which lives until the stream has read it."""
        copy = tensor.clone()
        copy.record_stream(self._stream)
        return copy

    def wait(self) -> None:
        """As NCCL's: the current stream waits, the host does not."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def slow(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Queues a collective of a launch; others run at once."""

        def call(*tensors: Any, **options: Any) -> Any:
            if self._calls is None:
                return collective(*tensors, **options)
            self._calls.append(tensors)
            return None

        return call


@contextmanager
def slow_wire() -> Iterator[SlowWire]:
    """The NCCL transport of one rank sends through a slow wire inside of the block."""
    wire = SlowWire()
    with replace_collectives(wire.launch, wire.slow):
        yield wire
