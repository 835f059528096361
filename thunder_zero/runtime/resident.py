"""ZeRO-1's resident parameters: full buffers at rest, whose stale rows are gathered again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor

from thunder_zero.comm.handle import Waitable
from thunder_zero.comm.transport import Transport
from thunder_zero.plan import Param
from thunder_zero.runtime.versions import Versions

AnyRank = Callable[[Sequence[str], Collection[str]], list[str]]  # which of the first any rank has among the second


class ResidentParameters:
    """The full parameters, padded; their own rows are the shards, or copies of them, cast or offloaded.

    Attributes:
        shared: paths of the buffers whose own rows are the shards themselves, not copies.
    """

    def __init__(self, buffers: Mapping[str, Tensor], shared: tuple[str, ...], versions: Versions) -> None:
        self._buffers = buffers
        self.shared = shared
        self._versions = versions
        self._stale: set[str] = set()  # paths whose rows changed on this rank or, once ranks agreed, on any
        self._may_step = False  # gradients were reduced since ranks last agreed, so an optimizer may have stepped
        versions.note(buffers)

    def expect_step(self) -> None:
        """Gradients were reduced: an optimizer may step before the next forward, on some ranks or on all."""
        self._may_step = True

    def mark_stale(self, paths: Iterable[str]) -> None:
        """These parameters changed: their next gather refreshes the other ranks' rows."""
        self._stale.update(self._buffers.keys() & set(paths))

    def agree_on_stale(self, on_any_rank: AnyRank) -> None:
        """Let all ranks refresh the parameters that changed on any.

        Ranks agree after each backward, since then an optimizer may have stepped on some of them and not on others (a
        scaler that found an Inf), and after other changes here: loaded, initialised or updated in place. One small
        collective; none while nothing can have changed. Such other changes must be made on all ranks, as with any
        replicated parameter: a rank without them would not take part.
        """
        self._stale.update(filter(self._versions.changed, self._buffers))
        if self._buffers and (self._may_step or self._stale):
            self._stale = set(on_any_rank(tuple(self._buffers), self._stale))
            self._may_step = False

    def gather(self, shards: Sequence[Tensor], params: Sequence[Param], transport: Transport) -> Waitable:
        """Refresh the stale parameters; the handle gives all of them."""
        paths = [param.path for param in params]
        buffers = [self._buffers[path] for path in paths]
        stale = [at for at, path in enumerate(paths) if path in self._stale]
        refresh = None
        if stale:
            refresh = transport.all_gather(
                [shards[at] for at in stale], [params[at] for at in stale], into=[buffers[at] for at in stale]
            )
            self._stale.difference_update(paths)  # not before: if the launch fails, the rows are still out of date
        full = tuple(buffer[: param.shape[0]] for buffer, param in zip(buffers, params, strict=True))
        return Refreshed(full, refresh, lambda: self._versions.note(paths))


class Refreshed:
    """The handle of resident parameters, some of which may be refreshed in place."""

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
