"""A transport that announces its place before it sends, and compares it with the peers'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from thunder_zero.comm import places
from thunder_zero.comm.handle import Result, Waitable, WaitsBy
from thunder_zero.comm.lost_ranks import at_place
from thunder_zero.comm.places import Meeting, Place
from thunder_zero.comm.transport import PeerBuffers, Transport
from thunder_zero.plan import Param


class Placed:
    """The transport of one model. See :class:`thunder_zero.comm.transport.Transport`.

    Args:
        inner: carries the messages.
        model: completes the texts of places: ``"model 0 (Net)"``.
        group: all ranks that train the model.
        announces: whether to announce places; if not, ``inner`` alone works.
    """

    def __init__(self, inner: Transport, model: str, group: ProcessGroup, *, announces: bool) -> None:
        self.averages = inner.averages
        self._inner, self._model, self._group, self._announces = inner, model, group, announces
        self._counts: Counter[str] = Counter()
        self._place = Place(model)
        self._next: Callable[[], Place] | None = None  # where this rank is, until it is announced
        self._meeting: Meeting | None = None
        self._there = inner  # sends under the key of the place
        self._launches = 0

    def enter(self, place: Place) -> None:
        """From now on this rank is there; peers hear of it if it sends anything there."""
        self._next = lambda: place

    def enter_half(self, half: str, schedule: str, training_forwards: int) -> None:
        """The same for a half of a step, such as ``"backward"``, with the digest of its launches.

        Its place has two numbers: how many halves of its kind have sent anything, and after how many forwards in
        training, which may send nothing. The second one differs where a rank has left out a backward.
        """

        def place() -> Place:
            self._counts[half] += 1
            number = f"{half} number {self._counts[half]} of {self._model}"
            forwards = "training forward" if training_forwards == 1 else "training forwards"
            return Place(f"{number} after {training_forwards} {forwards}", schedule)

        self._next = place

    def all_gather(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None
    ) -> Waitable:
        """See :meth:`thunder_zero.comm.transport.Transport.all_gather`."""
        return self._confirmed(self._announced().all_gather(shards, params, into))

    def reduce_scatter(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """See :meth:`thunder_zero.comm.transport.Transport.reduce_scatter`."""
        return self._confirmed(self._announced().reduce_scatter(grads, params))

    def all_reduce(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """See :meth:`thunder_zero.comm.transport.Transport.all_reduce`."""
        return self._confirmed(self._announced().all_reduce(grads, params))

    def trade(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Waitable:
        """See :meth:`thunder_zero.comm.transport.Transport.trade`."""
        return self._confirmed(self._announced().trade(outgoing, incoming))

    def run_after(self, start: Callable[[], Result]) -> Callable[[], Result]:
        """See :meth:`thunder_zero.comm.transport.Transport.run_after`."""
        return self._inner.run_after(start)

    def with_tag(self, tag: int) -> Transport:
        """See :meth:`thunder_zero.comm.transport.Transport.with_tag`."""
        return self._inner.with_tag(tag)

    @property
    def in_flight(self) -> bool:
        """See :attr:`thunder_zero.comm.transport.Transport.in_flight`."""
        return self._inner.in_flight

    def drain(self) -> None:
        """See :meth:`thunder_zero.comm.transport.Transport.drain`.

        Raises:
            RuntimeError: the ranks differ, or failed at different points.
        """
        places.require_same_so_far(self._group)
        if self._meeting is not None and self._inner.in_flight:
            failed = Place(f"the call after {self._place.text} failed", f"after {self._launches} launches")
            if (meeting := places.announce(failed, self._group)) is not None:
                meeting.confirm()
        self._inner.drain()

    def _announced(self) -> Transport:
        """The transport under the key of this place, which was announced."""
        if self._next is not None and self._announces:
            self._place = self._next()
            self._meeting = places.announce(self._place, self._group)
            self._there = self._inner.with_tag(self._place.key)
            self._next, self._launches = None, 0
        self._launches += 1
        return self._there

    def _confirmed(self, handle: Waitable) -> Waitable:
        """A handle that compares places before it waits."""
        if (meeting := self._meeting) is None:
            return handle

        def wait() -> tuple[Tensor, ...]:
            meeting.confirm()
            with at_place(meeting.place.text):
                return handle.wait()

        return WaitsBy(wait)
