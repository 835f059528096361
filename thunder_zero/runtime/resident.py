"""ZeRO-1's resident parameters: full buffers at rest, whose stale rows are gathered again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.comm.transport import Transport
from thunder_zero.plan import Param
from thunder_zero.runtime.digests import digests_of
from thunder_zero.runtime.versions import Versions


class AnyRank(Protocol):
    """See :meth:`thunder_zero.runtime.state.State.on_any_rank`."""

    def __call__(self, paths: Sequence[str], here: Collection[str], also: Tensor | None) -> list[str]:
        """Which of ``paths`` any rank has."""


class ResidentParameters:
    """The full parameters, padded; their own rows are the shards, or copies of them, cast or offloaded.

    Args:
        buffers: the full parameters by path.
        shared: paths of the buffers whose own rows are the shards themselves, not copies.
        versions: tells which shards changed.
        digested: the shards of all buffers, in which writes without a version are looked for, too; or none of them,
            where nothing else holds their values.

    Attributes:
        shared: as given.
    """

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        shared: tuple[str, ...],
        versions: Versions,
        digested: Mapping[str, Tensor],
    ) -> None:
        self._buffers = buffers
        self.shared = shared
        self._versions = versions
        self._digested = digested
        self._digests = self._digests_now()
        self._stale: set[str] = set()  # paths whose rows changed on this rank or, once ranks agreed, on any
        self._may_step = False  # gradients were reduced since ranks last agreed, so an optimizer may have stepped
        versions.note(buffers)

    def expect_step(self) -> None:
        """Gradients were reduced: an optimizer may step before the next forward, on some ranks or on all."""
        self._may_step = True

    def mark_stale(self, paths: Iterable[str]) -> None:
        """These parameters changed: their next gather refreshes the other ranks' rows."""
        self._stale.update(self._buffers.keys() & set(paths))

    def _digests_now(self) -> Tensor | None:
        return digests_of(tuple(self._digested.values())) if self._digested else None

    def agree_on_stale(self, on_any_rank: AnyRank) -> None:
        """Let all ranks refresh the parameters that changed on any.

        Ranks agree after each backward, since then an optimizer may have stepped on some of them and not on others (a
        scaler that found an Inf), and after other changes here: loaded, initialised or updated in place. One small
        collective; none while nothing can have changed. Such other changes must be made on all ranks, as with any
        replicated parameter: a rank without them would not take part.

        Digests find writes that nothing reported, such as a hand-written optimizer's through ``.data``. They count
        where ranks agree anyway; elsewhere another rank, whose rows may be as they were, would not take part.

        Raises:
            RuntimeError: such a write without a backward since ranks last agreed, or ever, and ranks do not agree now.
        """
        if not self._buffers:
            return
        self._stale.update(filter(self._versions.changed, self._buffers))
        before, now = self._digests, self._digests_now()
        written = None if before is None or now is None else before != now
        if self._may_step or self._stale:
            self._stale = set(on_any_rank(tuple(self._buffers), self._stale, written))
            self._may_step, self._digests = False, now
        elif written is not None and written.any():
            path = tuple(self._buffers)[int(written.int().argmax())]
            raise RuntimeError(
                f"parameter {path!r} was written to in a way that PyTorch does not see (.data, numpy, a kernel), with "
                f"no backward since ranks last compared their rows, so ZeRO-1 cannot know whether all ranks did so; "
                f"write in place, as in param.copy_(new) under torch.no_grad(), on every rank"
            )

    def out_of_date(self, paths: Iterable[str]) -> list[bool]:
        """Whether each full parameter may differ from the shards, as far as this rank can tell; parameters that are not
        resident, or whose buffers are copies in another dtype or place, do."""
        before, now = self._digests, self._digests_now()
        written = [False] * len(self._digested) if before is None or now is None else (before != now).tolist()
        unseen = {path for path, was in zip(self._digested, written, strict=True) if was}
        return [
            path not in self.shared or path in self._stale or path in unseen or self._versions.changed(path)
            for path in paths
        ]

    def full(self, param: Param) -> Tensor:
        """The full parameter as it was refreshed last, unpadded: a view."""
        return self._buffers[param.path][: param.shape[0]]

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

        def wait() -> tuple[Tensor, ...]:
            if refresh is not None:
                refresh.wait()
                self._versions.note(paths)
            return full

        return WaitsBy(wait)
