"""Reports on standard error how far a long load has come.

::

    loading Llama: 42 of 147 tensors, 512 MiB of 1.78 GiB, 10 s     every ten seconds, on a terminal each
    loaded Llama: 147 tensors, 1.78 GiB, 18 s                       at the end, if it took five seconds
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from time import monotonic

from torch import Tensor

from thunder_zero.plan.amounts import size

SECONDS = 5  # a load that takes less is not reported
EVERY, EVERY_ON_TERMINAL = 10, 1
CLEAR = "\x1b[K"  # erases the rest of a terminal's line


class Progress:
    """Counts the tensors that have got their values, each once, with the bytes of full values."""

    def __init__(self, name: str, tensors: Collection[Tensor], *, reports: bool) -> None:
        self._name, self._tensors, self._reports = name, tensors, reports
        self._total = sum(tensor.nbytes for tensor in tensors)
        self._done: dict[Tensor, int] = {}
        self._on_terminal = reports and sys.stderr.isatty()
        self._start = self._last = monotonic()

    def advance(self, tensor: Tensor) -> None:
        self._done[tensor] = tensor.nbytes
        now = monotonic()
        if self._reports and now - self._last >= (EVERY_ON_TERMINAL if self._on_terminal else EVERY):
            self._last = now
            counts = f"{len(self._done)} of {len(self._tensors)} tensors"
            self._print("loading", f"{counts}, {size(sum(self._done.values()))} of {size(self._total)}", in_place=True)

    def end(self) -> None:
        has_shown = self._on_terminal and self._last > self._start
        if self._reports and (has_shown or monotonic() - self._start >= SECONDS):
            self._print("loaded", f"{len(self._tensors)} tensors, {size(self._total)}", in_place=False)

    def _print(self, verb: str, amounts: str, *, in_place: bool) -> None:
        text = f"{verb} {self._name}: {amounts}, {monotonic() - self._start:.0f} s"
        end = "\r" if in_place and self._on_terminal else "\n"
        print(text + CLEAR * self._on_terminal, end=end, file=sys.stderr, flush=True)
