"""Gathered parameters that an accumulation reads again instead of gathering them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.comm.transport import Transport
from thunder_zero.plan import Param
from thunder_zero.runtime.digests import digests_of
from thunder_zero.runtime.versions import Versions


class HeldOver:
    """ZeRO-2's gathered parameters between micro-batches (``policy.gather_once_per_accumulation``)."""

    def __init__(self, shards: Mapping[str, Tensor], versions: Versions) -> None:
        self._held: dict[str, Tensor] = {}
        self._shards = shards
        self._versions = versions
        self._digests: dict[str, Tensor] = {}  # of shards, when they were gathered

    def require_unwritten(self) -> None:
        """Raise if a shard changed behind PyTorch's back since it was gathered.

        Raises:
            RuntimeError: another rank, whose rows may be as they were, would not gather again.
        """
        paths = [path for path in self._held if not self._versions.changed(path)]
        if not paths:
            return
        before = torch.stack([self._digests[path] for path in paths])
        written = before != digests_of([self._shards[path] for path in paths])
        if written.any():
            path = paths[int(written.int().argmax())]
            raise RuntimeError(
                f"parameter {path!r} was written to in the middle of an accumulation, in a way that PyTorch does not "
                f"see (.data, numpy, a kernel), and gather_once_per_accumulation still holds its old values; write to "
                f"it after the last micro-batch, outside of no_sync"
            )

    def gather(
        self, shards: Sequence[Tensor], params: Sequence[Param], transport: Transport, *, last: bool
    ) -> Waitable:
        """Gather the parameters that no earlier micro-batch left; the last one, which reduces, leaves none."""
        self.drop(filter(self._versions.changed, tuple(self._held)))
        found = {param.path: self._held.get(param.path) for param in params}
        missing = [at for at, param in enumerate(params) if found[param.path] is None]
        handle = None
        if missing:
            rows = [shards[at] for at in missing]
            handle = transport.all_gather(rows, [params[at] for at in missing])
            if not last:
                self._digests.update(zip((params[at].path for at in missing), digests_of(rows).unbind(), strict=True))
        if last:
            self.drop(found)
        else:
            self._versions.note(found)

        def wait() -> tuple[Tensor, ...]:
            arrived = iter(() if handle is None else handle.wait())
            full = {path: next(arrived) if held is None else held for path, held in found.items()}
            if not last:
                self._held.update(full)
            return tuple(full.values())

        return WaitsBy(wait)

    def drop(self, paths: Iterable[str]) -> None:
        """Let go of these parameters."""
        for path in paths:
            self._held.pop(path, None)

    def clear(self) -> None:
        """Let go of all parameters."""
        self._held.clear()
