"""A wire on a GPU that is late by a known time: collectives run in their own stream, behind a sleep.

It treats streams and memory as NCCL does, and makes each race certain. An output is NaN from launch to the end of the
sleep. A wait orders streams, not the host. Memory that is freed too early is overwritten by a later tensor.
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
    """A replacement of torch's calls in ``comm/native.py`` for one rank, whose collectives are copies.

    Attributes:
        launched: number of launched buckets.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._calls: list[tuple[Tensor, ...]] | None = None
        self.launched = 0

    @contextmanager
    def launch(self, group: object) -> Iterator[SlowWire]:
        """Replace ``one_launch``."""
        calls: list[tuple[Tensor, ...]] = []
        self._calls = calls
        yield self
        self._calls = None
        self.launched += 1
        copies = [(call[0], call[1] if len(call) == 2 else self._kept(call[0])) for call in calls]
        for output, source in copies:
            if output.is_floating_point() and output.data_ptr() != source.data_ptr():  # not a gather into a buffer
                output.fill_(torch.nan)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(CYCLES)
            for output, source in copies:
                output.copy_(source)

    def _kept(self, tensor: Tensor) -> Tensor:
        """Copy the input of a collective in place. The copy lives until the stream has read it."""
        copy = tensor.clone()
        copy.record_stream(self._stream)
        return copy

    def wait(self) -> None:
        """Let the current stream wait, but not the host, as NCCL does."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def slow(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Queue a collective if it is part of a launch; otherwise run it at once."""

        def call(*tensors: Any, **options: Any) -> Any:
            if self._calls is None:
                return collective(*tensors, **options)
            self._calls.append(tensors)
            return None

        return call


@contextmanager
def slow_wire() -> Iterator[SlowWire]:
    """Let the NCCL transport of one rank send through a slow wire inside the block."""
    wire = SlowWire()
    with replace_collectives(wire.launch, wire.slow):
        yield wire
