"""Waits for copies from host memory to the device, so that the host may write to what was copied."""

from __future__ import annotations

import torch


class HostCopies:
    """The copies of one model's offloaded shards, which run in the stream of compute while the host goes on.

    Args:
        device: where compute is; only copies to a GPU are asynchronous.
        offloaded: whether any shard rests in host memory; if not, the host never waits.
    """

    def __init__(self, device: torch.device, *, offloaded: bool) -> None:
        self._device = device
        self._are_asynchronous = offloaded and device.type == "cuda"
        self._last: torch.cuda.Event | None = None  # in the stream after the last copy

    def note(self) -> None:
        """Copies were started."""
        if self._are_asynchronous:
            self._last = torch.cuda.Event()
            self._last.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Make the host wait for all copies; not for the compute after them."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None
