"""Full parameters that are there already, or in part: ZeRO-1's buffers, and what an accumulation holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from thunder_zero.comm.handle import Waitable
from thunder_zero.plan import Param

Gather = Callable[..., Waitable]  # of shards, their parameters and, as ``into``, buffers of padded shape


class Versions:
    """Which shards something has written to since they were noted.

    Optimizers that are fused do not raise a tensor's version; that they have stepped is heard of by a hook.
    """

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self._shards = shards
        self._noted: dict[str, int] = {}

    def note(self, paths: Iterable[str]) -> None:
        """Take these shards as they are now."""
        self._noted.update((path, self._shards[path]._version) for path in paths)

    def changed(self, path: str) -> bool:
        """Whether a shard was written to since then."""
        return self._shards[path]._version != self._noted[path]


class Buffers:
    """ZeRO-1's full parameters, padded; their own rows are the shards, or copies of them, cast or offloaded.

    Attributes:
        shared: paths of those whose own rows are the shards themselves, and not copies.
        stale: paths of those whose rows changed here or, once ranks agreed, on any rank.
    """

    def __init__(self, buffers: Mapping[str, Tensor], shared: tuple[str, ...], versions: Versions) -> None:
        self._buffers = buffers
        self.shared = shared
        self._versions = versions
        self.stale: set[str] = set()
        versions.note(buffers)

    @property
    def paths(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self._buffers)

    def note_changed(self) -> None:
        """Find out which shards something other than an optimizer has written to."""
        self.stale.update(filter(self._versions.changed, self._buffers))

    def mark_stale(self, paths: Iterable[str]) -> None:
        """These parameters changed: their next gather refreshes the other ranks' rows."""
        self.stale.update(self._buffers.keys() & set(paths))

    def gather(self, shards: Sequence[Tensor], params: Sequence[Param], gather: Gather) -> Waitable:
        """Refresh what is stale, and hand out all."""
        paths = [param.path for param in params]
        buffers = [self._buffers[path] for path in paths]
        stale = [at for at, path in enumerate(paths) if path in self.stale]
        refresh = None
        if stale:
            refresh = gather(
                [shards[at] for at in stale], [params[at] for at in stale], into=[buffers[at] for at in stale]
            )
            self.stale.difference_update(paths)  # not before: if the launch fails, the rows are still out of date
        full = tuple(buffer[: param.shape[0]] for buffer, param in zip(buffers, params, strict=True))
        return Refreshed(full, refresh, lambda: self._versions.note(paths))


class HeldOver:
    """ZeRO-2's gathered parameters that an accumulation goes on with (``policy.gather_once_per_accumulation``)."""

    def __init__(self, versions: Versions) -> None:
        self._held: dict[str, Tensor] = {}
        self._versions = versions

    def gather(self, shards: Sequence[Tensor], params: Sequence[Param], gather: Gather, *, last: bool) -> Waitable:
        """Gather what no earlier micro-batch has left; the last one, which reduces, leaves nothing."""
        self.drop(filter(self._versions.changed, tuple(self._held)))
        found = {param.path: self._held.get(param.path) for param in params}
        missing = [at for at, param in enumerate(params) if found[param.path] is None]
        handle = gather([shards[at] for at in missing], [params[at] for at in missing]) if missing else None
        if last:
            self.drop(found)
            return Joined(found, handle, None)
        self._versions.note(found)
        return Joined(found, handle, self._held)

    def drop(self, paths: Iterable[str] | None = None) -> None:
        """Let go of these parameters, or of all."""
        for path in tuple(self._held) if paths is None else paths:
            self._held.pop(path, None)


class Refreshed:
    """The handle of ZeRO-1's parameters: there already, or being refreshed in place."""

    def __init__(self, full: tuple[Tensor, ...], refresh: Waitable | None, refreshed: Callable[[], None]) -> None:
        self._full = full
        self._refresh = refresh
        self._refreshed = refreshed

    def wait(self) -> tuple[Tensor, ...]:
        """The full, unpadded parameters, as views of their buffers."""
        if self._refresh is not None:
            self._refresh.wait()
            self._refreshed()
        return self._full


class Joined:
    """The handle of parameters of which some are held already: those that arrive are held, too, where ``hold`` is."""

    def __init__(
        self, found: dict[str, Tensor | None], handle: Waitable | None, hold: dict[str, Tensor] | None
    ) -> None:
        self._found, self._handle, self._hold = found, handle, hold

    def wait(self) -> tuple[Tensor, ...]:
        """The full, unpadded parameters."""
        arrived = iter(() if self._handle is None else self._handle.wait())
        full = {path: next(arrived) if found is None else found for path, found in self._found.items()}
        if self._hold is not None:
            self._hold.update(full)
        return tuple(full.values())
