"""Who takes part in an exchange: signs of life, announcements, and turns that close.

Sites share a store. Its turn "15.0" is exchange 15, first attempt. In each turn, the leader (rank 0) of each site
announces itself, and one of them closes the turn with a compare-and-set, so that all sites agree on its members::

    alive/a         counts up while site a lives             every site watches all counts
    owner/a         the process that leads a                 refuses a second job with this name
    turn            "15.0" -> "15.1" after a failure, "16.0" after a success
    15.0/here/a     {"version": 15, ...}                     an announcement
    15.0/closed     [the announcements of all members]       set once
    15.0/arrived    number of ranks that have all rows
    15.0/outcome    "" if all ranks have arrived, else a reason: set once

A turn closes when all living sites have announced themselves, or when the time-out has passed. A site that has missed
an exchange does not close a turn while a site that has not is alive: it waits for that site's next exchange.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any

from torch.distributed import DistError, TCPStore

from thunder_zero.outer.store import NotReached, Sites, connect, host_store

POLL_SECONDS = 0.02  # between two looks at a key
BEATS = 8  # signs of life of a site within the time-out


@dataclass(frozen=True)
class Announcement:
    """What a site says of itself in a turn."""

    name: str
    life: str  # the process that leads the site
    version: int  # the number of exchanges whose results it has
    digest: str  # of its agreed parameters, if it has not met the others yet
    met: bool  # whether it has met the others in this life
    fragment: int  # the fragment of which it has a change; -1 if it has none


@dataclass(frozen=True)
class Members:
    """The sites that take part in one attempt of an exchange, in the order of their names."""

    turn: str
    all: tuple[Announcement, ...]

    @property
    def reference(self) -> Announcement:
        """The site whose agreed parameters all members take: the first that has most exchanges."""
        return max(self.all, key=lambda site: (site.version, site.met))  # max returns the first of equals

    def takes_rows(self, site: Announcement) -> bool:
        """Return whether a site takes the reference's rows before the exchange."""
        newest = self.reference
        return site.version < newest.version or (not site.met and site.digest != newest.digest)

    @property
    def receivers(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.all if self.takes_rows(site))

    @property
    def contributors(self) -> tuple[str, ...]:
        """The sites whose changes are averaged."""
        return tuple(site.name for site in self.all if site.met and site.fragment == self.fragment)

    @property
    def fragment(self) -> int:
        return self.reference.fragment

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.all)

    @property
    def next_version(self) -> int:
        return max(int(self.turn.partition(".")[0]), self.reference.version) + 1


class Presence:
    """Signs of life of all sites, in a thread of each site's leader.

    A site is alive if its count has changed within the time-out.
    """

    def __init__(self, address: Sites) -> None:
        self._address, self._seen = address, dict[str, tuple[int, float]]()
        self._ended, self._is_started = threading.Event(), False
        self.refusal = ""  # why this site may not take part: another job has its name

    def start(self, store: TCPStore) -> None:
        """Take the name of this site, or raise ValueError if another living job has it. Then give signs of life."""
        if self._is_started:
            return
        owner, own = f"owner/{self._address.name}", self._address.life
        end, other = monotonic() + self._address.timeout, store.compare_set(owner, "", own).decode()
        if other != own:
            self.look(store)
            while not self._is_silent(self._address.name):
                if monotonic() > end:
                    raise ValueError(
                        f"another job is site {self._address.name!r} at {self._address.address}, and it is alive; give "
                        f"this one another name in tz.sites, or end the other job"
                    )
                sleep(POLL_SECONDS)
                self.look(store)
            store.set(owner, own)
        self._register(store)
        self._beat(store)
        self._is_started = True
        threading.Thread(target=self._give_signs, name="thunder_zero presence", daemon=True).start()

    def _register(self, store: TCPStore) -> None:
        names = store.compare_set("names", "", self._address.name).decode()
        while self._address.name not in names.split():  # another site may register at the same time
            names = store.compare_set("names", names, f"{names} {self._address.name}").decode()

    def end(self) -> None:
        """Leave, so that the others do not wait for this site."""
        self._ended.set()
        owner = f"owner/{self._address.name}"
        with suppress(NotReached, DistError):
            store = connect(self._address)
            if self._is_started and not store.compare_set(owner, self._address.life, ""):
                store.delete_key(owner)

    def alive(self) -> list[str]:
        """Return the names of the sites that are alive, this one included, in order."""
        return sorted(name for name in tuple(self._seen) if not self._is_silent(name))

    def _is_silent(self, name: str) -> bool:
        return monotonic() - self._seen.get(name, (0, float("-inf")))[1] > self._address.timeout

    def _give_signs(self) -> None:
        store: TCPStore | None = None
        while not self._ended.wait(self._address.timeout / BEATS):
            try:
                store = store or connect(self._address)
                self._beat(store)
            except (NotReached, DistError):
                store = None  # connect again: the store may come back

    def _beat(self, store: TCPStore) -> None:
        owner = store.compare_set(f"owner/{self._address.name}", "", self._address.life).decode()
        store.add(f"alive/{self._address.name}", int(owner == self._address.life))
        if owner != self._address.life:
            self.refusal = f"another job has taken the name of site {self._address.name!r}; end one of them"
            self._ended.set()
        self.look(store)

    def look(self, store: TCPStore) -> None:
        """Look which sites have given a sign of life since the last look."""
        names = store.get("names").decode().split() if store.check(["names"]) else ()
        for name in dict.fromkeys(names):
            count = store.add(f"alive/{name}", 0)
            if not store.check([f"owner/{name}"]):
                self._seen.pop(name, None)  # it has left
            elif self._seen.get(name, (-1, 0.0))[0] != count:
                self._seen[name] = count, monotonic()


class Meeting:
    """One rank's connection to the store, for one exchange at a time."""

    def __init__(self, address: Sites, store: TCPStore, presence: Presence | None, sign: Callable[[], None]) -> None:
        self._address, self.store, self._presence, self._sign = address, store, presence, sign

    def members(self, key: str, me: Announcement) -> Members:
        """Return the members of the next turn in which this site takes part. Other ranks follow their leader."""
        if self._presence is None:
            members, failure = json.loads(self._from_leader(key))
            if failure:
                raise NotReached(failure)
            return _members(*members)
        try:
            members = self._lead(me, self._presence)
        except Exception as error:
            self.store.set(key, json.dumps([None, f"{error}"]))
            raise
        self.store.set(key, json.dumps([[members.turn, [asdict(site) for site in members.all]], ""]))
        return members

    def _lead(self, me: Announcement, presence: Presence) -> Members:
        presence.start(self.store)
        while True:
            if presence.refusal:
                raise ValueError(presence.refusal)
            turn = self.store.compare_set("turn", "", f"{me.version}.0").decode()
            self.store.set(f"{turn}/here/{me.name}", json.dumps(asdict(me)))
            members = self._close(turn, me, presence)
            if me in members.all:
                return members
            # Closed without this site, which now is late: it waits for the next turn.
            while self.store.get("turn").decode() == turn:
                self._pause()

    def _close(self, turn: str, me: Announcement, presence: Presence) -> Members:
        """Close a turn, or wait until another leader has closed it."""
        deadline, version = monotonic() + self._address.timeout, int(turn.partition(".")[0])
        presence.look(self.store)  # it may not know a site yet that has just come
        while not self.store.check([f"{turn}/closed"]):
            alive, is_late = presence.alive(), monotonic() > deadline
            here = [name for name in alive if self.store.check([f"{turn}/here/{name}"])]
            sites = [self.store.get(f"{turn}/here/{name}").decode() for name in here]
            is_enough = me.met or is_late or len(here) >= self._address.expected
            has_current = any(json.loads(site)["version"] >= version for site in sites)
            if (here == alive and is_enough) or (is_late and has_current):
                self.store.compare_set(f"{turn}/closed", "", f"[{', '.join(sites)}]")
            self._pause()
        return _members(turn, json.loads(self.store.get(f"{turn}/closed")))

    def settle(self, members: Members, ranks: int, failure: str) -> str:
        """Tell the others how the exchange went on this rank. Return what all agree on: "", or why it failed."""
        turn, number = members.turn, int(members.turn.partition(".")[2])
        if failure:
            self.store.compare_set(f"{turn}/outcome", "", failure)
        elif self.store.add(f"{turn}/arrived", 1) == ranks * len(members.all):
            self.store.compare_set(f"{turn}/outcome", "", "arrived")
        end = monotonic() + self._address.timeout
        while not self.store.check([f"{turn}/outcome"]):
            if monotonic() > end:
                self.store.compare_set(f"{turn}/outcome", "", "a rank does not say whether it has all rows")
            self._pause()
        outcome = self.store.get(f"{turn}/outcome").decode()
        version, _, _ = turn.partition(".")
        following = f"{members.next_version}.0" if outcome == "arrived" else f"{version}.{number + 1}"
        self.store.compare_set("turn", turn, following)
        return "" if outcome == "arrived" else outcome

    def _from_leader(self, key: str) -> str:
        """Wait for a value of this site's leader, as long as that gives signs of life."""
        last, count = monotonic(), -1
        while not self.store.check([key]):
            if (beats := self.store.add(f"alive/{self._address.name}", 0)) != count:
                last, count = monotonic(), beats
            if monotonic() - last > self._address.timeout:
                raise NotReached(f"rank 0 of site {self._address.name!r} gives no sign of life")
            self._pause()
        return self.store.get(key).decode()

    def _pause(self) -> None:
        self._sign()
        sleep(POLL_SECONDS)


def _members(turn: str, announcements: Sequence[Mapping[str, Any]]) -> Members:
    return Members(turn, tuple(Announcement(**site) for site in announcements))


def serve(address: str) -> None:
    """Run a store until it is interrupted. Print the sites that are alive, and the number of exchanges."""
    own = Sites(address, "store", BEATS, 1)
    if (store := host_store(own)) is None:
        raise ValueError(f"cannot run a store at {address}: give an address of this machine, and a free port")
    presence, last = Presence(own), tuple[str, ...]()
    while True:
        presence.look(store)
        exchanges = store.get("turn").decode().partition(".")[0] if store.check(["turn"]) else 0
        if (alive := tuple(presence.alive())) != last:
            print(f"{', '.join(alive) or 'no site'}, after {exchanges} exchanges", flush=True)
        last = alive
        sleep(1)
