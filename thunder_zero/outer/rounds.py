"""Runs an exchange in a thread: meets, exchanges, and tries again with who is left.

::

    Flight(offer)     members -> exchange -> settle: "" ?  -> Exchanged
                                                else the next attempt, without the silent sites
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from torch.distributed import TCPStore

from thunder_zero.comm.handle import EXIT_SECONDS
from thunder_zero.compat.torch.groups import wait_for_a_core
from thunder_zero.outer.exchange import Exchanged, Offer, Peers
from thunder_zero.outer.meeting import PATIENCE, Meeting, Presence
from thunder_zero.outer.store import NotReached, Sites, connect, host_store, reaching

ATTEMPTS = 4  # of one exchange; each loses at least one site, or takes a time-out
TELL_SECONDS = 0.5  # between two signs of progress for the other sites


class SiteLink:
    """This rank's way to the other sites: connections that outlive an exchange."""

    def __init__(self, address: Sites, rank: int, ranks: int, make_peers: Callable[[], Peers]) -> None:
        self.address, self.ranks, self._rank, self._make_peers = address, ranks, rank, make_peers
        self._hosted: TCPStore | None = None  # the store, if this process runs it
        self._presence = Presence(address) if rank == 0 else None
        self._last: Flight | None = None
        self._peers = make_peers()
        self._flights = 0  # equal on all ranks of a site
        self.has_left = False

    def touch(self) -> None:
        """Note that this job does not hang."""
        if self._presence is not None:
            self._presence.touched = monotonic()

    def fly(self, offer: Offer) -> Flight:
        """Launch an exchange."""
        self._flights += 1
        if self._last is not None and self._last.is_alive():  # abandoned: it may still use its peers
            self._peers = self._make_peers()
        number, peers = self._flights, self._peers

        def run(sign: Callable[[], None]) -> Exchanged:
            try:
                with reaching(self.address):
                    return self._run(f"{offer.me.life}/{number}", offer, peers, sign)
            except BaseException:
                peers.drop()
                raise

        self._last = Flight(run, PATIENCE * self.address.timeout)
        return self._last

    def _run(self, key: str, offer: Offer, peers: Peers, sign: Callable[[], None]) -> Exchanged:
        if self._rank == 0:
            self._hosted = host_store(self.address) or self._hosted
        store = connect(self.address, 0.0 if offer.me.met else self.address.timeout)
        meeting, failure, last = Meeting(self.address, store, self._presence, sign), "", 0.0
        for attempt in range(ATTEMPTS):
            members, failure = meeting.members(f"{key}/{attempt}", offer.me, offer.claims), ""

            def tell(turn: str = members.turn) -> None:
                nonlocal last
                sign()
                self.touch()
                if monotonic() - last > TELL_SECONDS:  # the others wait for whoever makes progress
                    last = monotonic()
                    store.add(f"{turn}/progress", 1)

            try:
                exchanged = peers.exchange(members, store, offer, tell)
            except (RuntimeError, OSError) as error:
                failure = f"site {self.address.name!r}: {str(error).partition(chr(10))[0]}"
            failure = meeting.settle(members, self.ranks, failure)
            if not failure:
                return exchanged
            peers.drop()
        raise NotReached(f"{ATTEMPTS} attempts failed, the last one with {failure}")

    def leave(self) -> None:
        """Tell the others that this site ends, and close the connections. A thread in torch would abort an exit."""
        self.has_left = True
        if self._last is not None:
            self._last.abandon()
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
        self._is_abandoned = False
        self.start()

    def run(self) -> None:
        wait_for_a_core(threading.get_native_id())
        try:
            self._result = self._call(self._sign)
        except Exception as error:
            self._error = error
        finally:
            del self._call  # it has the changes that were offered

    def land(self) -> Exchanged:
        """Wait for the result. Raise :class:`NotReached` if the thread gives no sign of life for long."""
        while self.is_alive():
            self.join(self._patience / 10)
            if self.is_alive() and monotonic() - self._last_sign > self._patience:
                self.abandon(0.0)
                raise NotReached("a message to another site hangs")
        result, error, self._result, self._error = self._result, self._error, None, None  # their rows are freed
        if error is not None:
            raise error
        assert result is not None, "the thread has ended, and lands once"
        return result

    def abandon(self, seconds: float = EXIT_SECONDS) -> None:
        """Let the thread end at its next sign of life. Wait for it this long."""
        self._is_abandoned = True
        if self.is_alive():
            self.join(seconds)

    def _sign(self) -> None:
        if self._is_abandoned:
            raise NotReached("nobody waits for this exchange any more")
        self._last_sign = monotonic()
