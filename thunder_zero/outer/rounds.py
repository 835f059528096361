"""Runs an exchange in a thread: meets, exchanges, and tries again with who is left.

::

    Flight(link, me, changes, rows)     members -> exchange -> settle: "" ?  -> Exchanged
                                                                 else the next attempt, without the silent sites
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import zip_longest
from time import monotonic

from torch import Tensor
from torch.distributed import DistError, TCPStore

from thunder_zero.compat.torch.groups import wait_for_a_core
from thunder_zero.encodings.encoding import Encoding
from thunder_zero.outer.exchange import Change, Exchanged, Peers
from thunder_zero.outer.meeting import Announcement, Meeting, Presence
from thunder_zero.outer.store import NotReached, Sites, connect, host_store, reaching
from thunder_zero.plan.outer import Vector

ATTEMPTS = 4  # of one exchange; each loses at least one site, or takes a time-out
CLAIMS = "claims"


class SiteLink:
    """This rank's way to the other sites: connections that outlive an exchange."""

    def __init__(
        self,
        address: Sites,
        rank: int,
        ranks: int,
        wire: Encoding,
        fragments: Sequence[Sequence[Vector]],
    ) -> None:
        self.address, self.ranks = address, ranks
        self._rank = rank
        self._hosted: TCPStore | None = None  # the store, if this process runs it
        self._presence = Presence(address) if rank == 0 else None
        self._peers = Peers(address, rank, wire, fragments)
        self._flights = 0  # equal on all ranks of a site

    def fly(self, me: Announcement, claims: str, changes: Sequence[Change], rows: Sequence[Tensor]) -> Flight:
        """Launch an exchange. The first has ``claims``, which must be equal at all sites."""
        self._flights += 1
        number = self._flights
        return Flight(lambda sign: self._run(number, me, claims, changes, rows, sign), 3 * self.address.timeout)

    def _run(
        self,
        number: int,
        me: Announcement,
        claims: str,
        changes: Sequence[Change],
        rows: Sequence[Tensor],
        sign: Callable[[], None],
    ) -> Exchanged:
        if self._rank == 0:
            self._hosted = host_store(self.address) or self._hosted
        store = connect(self.address, 0.0 if me.met else self.address.timeout)
        meeting, failure = Meeting(self.address, store, self._presence, sign), ""
        with reaching(self.address):
            self._compare(store, claims)
            for attempt in range(ATTEMPTS):
                members = meeting.members(f"{me.life}/{number}/{attempt}", me)
                failure = ""
                try:
                    exchanged = self._peers.exchange(members, store, changes, rows, sign)
                except (RuntimeError, OSError) as error:
                    failure = f"site {me.name!r}: {str(error).partition(chr(10))[0]}"
                failure = meeting.settle(members, self.ranks, failure)
                if not failure:
                    return exchanged
                self._peers.drop()
        raise NotReached(f"{ATTEMPTS} attempts failed, the last one with {failure}")

    def _compare(self, store: TCPStore, claims: str) -> None:
        """Raise ValueError if another model meets at the store."""
        others = store.compare_set(CLAIMS, "", claims).decode() if claims else ""
        if others != claims:
            raise ValueError(
                f"site {self.address.name!r} differs from the sites at {self.address.address}: it has "
                f"{_unlike(claims.splitlines(), others.splitlines())}; train the same on all sites, or start the "
                f"store anew"
            )

    def leave(self) -> None:
        """Tell the others that this site ends, and close the connections."""
        if self._presence is not None:
            self._presence.end()
        self._peers.drop()


class Flight(threading.Thread):
    """An exchange that runs beside compute."""

    def __init__(self, call: Callable[[Callable[[], None]], Exchanged], patience: float) -> None:
        super().__init__(name="thunder_zero sites", daemon=True)
        self._call, self._patience, self._last_sign = call, patience, monotonic()
        self._result: Exchanged | None = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        wait_for_a_core(threading.get_native_id())
        try:
            self._result = self._call(self._sign)
        except DistError as error:
            self._error = NotReached(str(error).partition("\n")[0])
        except Exception as error:
            self._error = error

    def land(self) -> Exchanged:
        """Wait for the result. Raise :class:`NotReached` if the thread gives no sign of life for long."""
        while self.is_alive():
            self.join(self._patience / 10)
            if self.is_alive() and monotonic() - self._last_sign > self._patience:
                raise NotReached("a message to another site hangs")
        if self._error is not None:
            raise self._error
        assert self._result is not None, "the thread has ended"
        return self._result

    def _sign(self) -> None:
        self._last_sign = monotonic()


def _unlike(claims: Sequence[str], others: Sequence[str]) -> str:
    """Return the first claims in which two sites differ, as "this, and the others have that"."""
    pairs = zip_longest(claims, others, fillvalue="nothing more")
    return next(f"{mine}, and the others have {theirs}" for mine, theirs in pairs if mine != theirs)
