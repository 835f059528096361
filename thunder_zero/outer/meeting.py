"""Who takes part in an exchange: signs of life, announcements, and turns that close.

Sites share a store. Its turn "15.0" is the 16th exchange, first attempt. In each turn, the leader (rank 0) of each site
announces itself, and one of them closes the turn with a compare-and-set, so that all sites agree on its members::

    claims          what all sites have in common, a sentence each line
    names           all sites that have come, separated by spaces
    owner/a         the life of site a: of the job that leads it
    alive/LIFE      counts up while this job lives           every site watches all counts
    turn            "15.0" -> "15.1" after a failure, "16.0" after a success
    version/LIFE    the version of this job
    timeout         that of all sites, in seconds
    15.0/here/a     {"version": 15, ...}                     an announcement
    15.0/closed     [the announcements of all members]       set once
    15.0/progress   counts up while rows arrive
    15.0/arrived    number of ranks that have all rows
    15.0/outcome    "arrived" if all ranks have, else a reason: set once

A turn closes when all living sites have announced themselves, or when the time-out has passed. A site that has missed
an exchange does not close a turn while a site that has not is alive: it waits for that site's next exchange.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from time import monotonic, sleep

from torch.distributed import DistError, TCPStore

from thunder_zero.comm.handle import EXIT_SECONDS
from thunder_zero.outer.store import NotReached, Sites, connect, host_store

POLL_SECONDS = 0.02  # between two looks at a key
PATIENCE = 3  # time-outs without a step or a message, after which a job hangs
BEATS = 8  # signs of life of a site within the time-out
ARRIVED = "arrived"  # the outcome of an exchange that succeeded


class Unsettled(NotReached):
    """It is unknown whether the exchange succeeded."""


@dataclass(frozen=True)
class Announcement:
    """What a site says of itself in a turn."""

    name: str
    life: str  # the job that leads the site
    version: int  # the number of exchanges whose changes its agreed parameters have
    state: str  # equal at sites with equal agreed parameters: the last exchange, or a digest before the first
    met: bool  # whether it has met the others in this life, so that its change since then counts
    fragment: int  # the fragment of its change
    rates: str  # the learning rates of its outer optimizer, one of each group


@dataclass(frozen=True)
class Members:
    """The sites that take part in one attempt of an exchange, in the order of their names."""

    turn: str
    all: tuple[Announcement, ...]

    @property
    def reference(self) -> Announcement:
        """The site whose agreed parameters and learning rates all members take: the first that has most exchanges."""
        return max(self.all, key=lambda site: (site.version, site.met))  # max returns the first of equals

    @property
    def receivers(self) -> tuple[str, ...]:
        """The sites that take the reference's rows."""
        return tuple(site.name for site in self.all if site.state != self.reference.state)

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
        """The version after the exchange: a meeting without changes is no progress."""
        return self.reference.version + bool(self.contributors)


class Presence:
    """Signs of life of all sites, in a thread of each site's leader.

    A site is alive if its count has changed within the time-out. The count of a job that hangs stops, so that nobody
    waits for what it has. A site is absent from when it has missed a turn until it announces itself.
    """

    def __init__(self, address: Sites) -> None:
        self._address, self._seen = address, dict[str, tuple[str, int, float]]()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.absent, self.touched = set[str](), monotonic()  # when the job last took a step or sent a message

    def start(self, store: TCPStore, claims: str) -> None:
        """Give signs of life, and take the name of this site, once. Raise ValueError if another living job has it, or
        if living sites train something else."""
        if self._thread is not None:
            return
        others = store.compare_set("claims", "", claims).decode()
        if others != claims and not self._hears(store, partial(self._other_lives, store)):
            others = store.compare_set("claims", others, claims).decode()  # those of sites that have ended
        if others != claims:
            raise ValueError(
                f"site {self._address.name!r} differs from the sites at {self._address.address}: it has "
                f"{_unlike(claims.splitlines(), others.splitlines())}; train the same at all sites, or end the others"
            )
        store.set("timeout", f"{self._address.timeout}")
        self._take_name(store)
        names = store.compare_set("names", "", self._address.name).decode()
        while self._address.name not in names.split():  # another site may register at the same time
            names = store.compare_set("names", names, f"{names} {self._address.name}").decode()
        self._thread = threading.Thread(target=self._give_signs, name="thunder_zero presence", daemon=True)
        self._thread.start()

    def _take_name(self, store: TCPStore) -> None:
        owner, own = f"owner/{self._address.name}", self._address.life
        other = store.compare_set(owner, "", own).decode()
        if other != own and self._hears(store, lambda: [other]):
            raise ValueError(
                f"another job is site {self._address.name!r} at {self._address.address}, and it is alive; give this "
                f"one another name in tz.sites, or end the other job, such as by the leave() of its DiLoCo"
            )
        store.set(owner, own)

    def _hears(self, store: TCPStore, lives: Callable[[], Iterable[str]]) -> bool:
        """Return whether one of these jobs, or a new one, gives a sign of life within the time-out."""
        counts, end = {life: store.add(f"alive/{life}", 0) for life in lives()}, monotonic() + self._address.timeout
        while monotonic() < end:
            store.add(f"alive/{self._address.life}", 1)
            if any(store.add(f"alive/{life}", 0) != counts.get(life) for life in lives()):
                return True
            sleep(POLL_SECONDS)
        return False

    def require_name(self, store: TCPStore) -> None:
        """Raise ValueError if another job has taken the name, since this one was silent for long."""
        if store.compare_set(f"owner/{self._address.name}", "", self._address.life).decode() != self._address.life:
            raise ValueError(f"another job has taken the name of site {self._address.name!r}; end one of them")

    def end(self) -> None:
        """Leave, so that the others do not wait for this site."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(EXIT_SECONDS)
        owner = f"owner/{self._address.name}"
        with suppress(NotReached, DistError):
            store = connect(self._address)
            if not store.compare_set(owner, self._address.life, ""):
                store.delete_key(owner)

    def alive(self, within: float | None = None) -> list[str]:
        """Return the names of the sites that are alive, this one included, in order. ``within`` seconds (default: the
        time-out) they have given a sign of life."""
        since = monotonic() - (self._address.timeout if within is None else within)
        return sorted(name for name, (_, _, last) in tuple(self._seen.items()) if last > since)

    def has(self, site: Announcement) -> bool:
        """Return whether this life of a site is alive."""
        return site.name in self.alive() and self._seen[site.name][0] == site.life

    def newest(self, store: TCPStore, within: float | None = None) -> int:
        """Return the highest version of a living site."""
        keys = (f"version/{self._seen[name][0]}" for name in self.alive(within))
        return max((int(store.compare_set(key, "", "0")) for key in keys), default=0)

    def look(self, store: TCPStore) -> None:
        """Look which sites have given a sign of life since the last look."""
        for name, life in self._lives(store).items():
            count = store.add(f"alive/{life}", 0) if life else 0
            if not life:
                self._seen.pop(name, None)  # it has left
            elif self._seen.get(name, ("", 0, 0.0))[:2] != (life, count):
                self._seen[name] = life, count, monotonic()

    def _lives(self, store: TCPStore) -> dict[str, str]:
        """Return the job that leads each site, by the site's name; "" if it has left."""
        names = store.get("names").decode().split() if store.check(["names"]) else ()
        owners = {name: f"owner/{name}" for name in names}
        return {name: store.get(key).decode() if store.check([key]) else "" for name, key in owners.items()}

    def _other_lives(self, store: TCPStore) -> set[str]:
        return {*self._lives(store).values()} - {"", self._address.life}

    def _give_signs(self) -> None:
        store: TCPStore | None = None
        while True:
            try:
                store = store or connect(self._address)
                if monotonic() - self.touched < PATIENCE * self._address.timeout:
                    store.add(f"alive/{self._address.life}", 1)
                self.look(store)
            except (NotReached, DistError):
                store = None  # connect again: the store may come back
            if self._ended.wait(self._address.timeout / BEATS):
                return


class Meeting:
    """One rank's part in the turns of one exchange. Other ranks follow their leader, which has the presence."""

    def __init__(self, address: Sites, store: TCPStore, presence: Presence | None, sign: Callable[[], None]) -> None:
        self._address, self.store, self._presence, self._sign = address, store, presence, sign

    def members(self, key: str, me: Announcement, claims: str) -> Members:
        """Return the members of the next turn in which this site takes part."""
        if self._presence is None:
            turn, _, failure = self._from_leader(key).partition(" ")
            if failure:
                raise NotReached(failure)
            return self._closed(turn)
        try:
            self._presence.start(self.store, claims)
            members = self._lead(me, self._presence)
        except Exception as error:
            self.store.set(key, f"no {error}")
            raise
        self.store.set(key, members.turn)
        return members

    def _closed(self, turn: str) -> Members:
        sites = json.loads(self.store.get(f"{turn}/closed"))
        return Members(turn, tuple(Announcement(**site) for site in sites))

    def _lead(self, me: Announcement, presence: Presence) -> Members:
        while True:
            presence.require_name(self.store)
            turn = self.store.compare_set("turn", "", "0.0").decode()
            self.store.set(f"version/{me.life}", f"{me.version}")
            self.store.set(f"{turn}/here/{me.name}", json.dumps(asdict(me)))
            members = self._close(turn, me, presence)
            if me in members.all:
                return members
            # Closed without this site, which now is late: it waits for the next turn, or for the end of its members.
            while self.store.get("turn").decode() == turn:
                presence.look(self.store)
                if not any(map(presence.has, members.all)):
                    self._end(members, "its members have ended")
                self._pause()

    def _close(self, turn: str, me: Announcement, presence: Presence) -> Members:
        """Close a turn, or wait until another leader has closed it."""
        deadline = monotonic() + self._address.timeout
        presence.look(self.store)  # it may not know a site yet that has just come
        while not self.store.check([f"{turn}/closed"]):
            alive, newest, is_late = presence.alive(), presence.newest(self.store), monotonic() > deadline
            here = [name for name in alive if self.store.check([f"{turn}/here/{name}"])]
            presence.absent -= {*here}
            sites = [self.store.get(f"{turn}/here/{name}").decode() for name in here]
            is_enough = me.met or is_late or len(here) >= self._address.expected
            has_current = any(json.loads(site)["version"] >= newest for site in sites)
            missing = {*alive} - {*here} - (presence.absent if has_current else set())
            if (not missing and is_enough) or (is_late and has_current):
                presence.absent |= missing
                self.store.compare_set(f"{turn}/closed", "", f"[{', '.join(sites)}]")
            self._pause()
        return self._closed(turn)

    def settle(self, members: Members, ranks: int, failure: str) -> str:
        """Tell the others how the exchange went on this rank. Return what all agree on: "", or why it failed."""
        turn, progress = members.turn, -1
        end = monotonic() + self._address.timeout
        try:
            if not failure and self.store.add(f"{turn}/arrived", 1) == ranks * len(members.all):
                self._end(members, ARRIVED)
            while not self.store.check([f"{turn}/outcome"]):
                if (now := self.store.add(f"{turn}/progress", 0)) != progress:
                    progress, end = now, monotonic() + self._address.timeout
                if failure or monotonic() > end:
                    self._end(members, failure or "a rank does not say whether it has all rows")
                self._pause()
            outcome = self.store.get(f"{turn}/outcome").decode()
            if outcome == ARRIVED:
                self.store.set(f"version/{self._address.life}", f"{members.next_version}")
            self._end(members, outcome)
        except DistError as error:
            raise Unsettled(f"the store was lost at the end of an exchange: {error}".partition("\n")[0]) from None
        return "" if outcome == ARRIVED else outcome

    def _end(self, members: Members, outcome: str) -> None:
        """End a turn with this outcome, or with that of another rank, and begin the next. Idempotent."""
        outcome = self.store.compare_set(f"{members.turn}/outcome", "", outcome).decode()
        number, _, attempt = members.turn.partition(".")
        following = f"{int(number) + 1}.0" if outcome == ARRIVED else f"{number}.{int(attempt) + 1}"
        self.store.compare_set("turn", members.turn, following)

    def _from_leader(self, key: str) -> str:
        """Wait for a value of this site's leader, as long as that gives signs of life."""
        last, count = monotonic(), -1
        while not self.store.check([key]):
            if (beats := self.store.add(f"alive/{self._address.life}", 0)) != count:
                last, count = monotonic(), beats
            if monotonic() - last > self._address.timeout:
                raise NotReached(f"rank 0 of site {self._address.name!r} gives no sign of life")
            self._pause()
        return self.store.get(key).decode()

    def _pause(self) -> None:
        self._sign()
        if self._presence is not None:
            self._presence.touched = monotonic()
        sleep(POLL_SECONDS)


def _unlike(claims: Sequence[str], others: Sequence[str]) -> str:
    """Return the first claims in which two sites differ, as "this, and the others have that"."""
    pairs = zip_longest(claims, others, fillvalue="nothing more")
    return next(f"{mine}, and the others have {theirs}" for mine, theirs in pairs if mine != theirs)


def serve(address: str) -> None:
    """Run a store until it is interrupted. Print the sites that are alive, and the number of exchanges."""
    own = Sites(address, "store", BEATS, 1)
    if (store := host_store(own)) is None:
        raise ValueError(f"cannot run a store at {address}: give an address of this machine, and a free port")
    presence, last = Presence(own), ["nothing was printed"]
    while True:
        alive, newest = who_lives(store, presence)
        if alive != last:
            print(f"{', '.join(alive)}, after {newest} exchanges" if alive else "no site", flush=True)
        last = alive
        sleep(1)


def who_lives(store: TCPStore, presence: Presence) -> tuple[list[str], int]:
    """Return the sites that are alive by their own time-out, and the number of their exchanges."""
    presence.look(store)
    timeout = float(store.get("timeout")) if store.check(["timeout"]) else None
    return presence.alive(timeout), presence.newest(store, timeout)
