"""Gathered parameters that an accumulation reads again instead of gathering them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from thunder_zero.comm.handle import Waitable
from thunder_zero.comm.transport import Transport
from thunder_zero.plan import Param
from thunder_zero.runtime.versions import Versions


class HeldOver:
    """ZeRO-2's gathered parameters between micro-batches (``policy.gather_once_per_accumulation``)."""

    def __init__(self, versions: Versions) -> None:
        self._held: dict[str, Tensor] = {}
        self._versions = versions

    def gather(
        self, shards: Sequence[Tensor], params: Sequence[Param], transport: Transport, *, last: bool
    ) -> Waitable:
        """Gather the parameters that no earlier micro-batch left; the last one, which reduces, leaves none."""
        self.drop(filter(self._versions.changed, tuple(self._held)))
        found = {param.path: self._held.get(param.path) for param in params}
        missing = [at for at, param in enumerate(params) if found[param.path] is None]
        handle = None
        if missing:
            handle = transport.all_gather([shards[at] for at in missing], [params[at] for at in missing])
        if last:
            self.drop(found)
            return Joined(found, handle, None)
        self._versions.note(found)
        return Joined(found, handle, self._held)

    def drop(self, paths: Iterable[str]) -> None:
        """Let go of these parameters."""
        for path in paths:
            self._held.pop(path, None)

    def clear(self) -> None:
        """Let go of all parameters."""
        self._held.clear()


class Joined:
    """Handle of parameters, some of them held over; if ``held`` is given, the others are added to it."""

    def __init__(
        self, found: dict[str, Tensor | None], handle: Waitable | None, held: dict[str, Tensor] | None
    ) -> None:
        self._found, self._handle, self._held = found, handle, held

    def wait(self) -> tuple[Tensor, ...]:
        """The full, unpadded parameters."""
        arrived = iter(() if self._handle is None else self._handle.wait())
        full = {path: next(arrived) if found is None else found for path, found in self._found.items()}
        if self._held is not None:
            self._held.update(full)
        return tuple(full.values())
