"""Sites meet at a store: who closes a turn, who takes whose rows, and what happens when sites die, hang or restart."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial

import pytest
from torch.distributed import TCPStore

from tests.harness.errors import fails
from thunder_zero.outer.meeting import Announcement, Meeting, Members, Presence, who_lives
from thunder_zero.outer.store import Sites, connect, sites

TIMEOUT = 3.0  # longer than a busy machine takes to connect, or to give a sign of life


class Site:
    """The leader of a site, without a model."""

    def __init__(self, port: int, name: str, version: int = 0, state: str = "start", *, met: bool = False) -> None:
        self.address = sites(f"127.0.0.1:{port}", name=name, timeout=TIMEOUT, expected=2)
        self.me = Announcement(name, self.address.life, version, state, met, 0, "0.7")
        self.presence, self.flights = Presence(self.address), 0

    def meet(self, claims: str = "a model") -> Members:
        store, self.flights = connect(self.address), self.flights + 1
        self.meeting = Meeting(self.address, store, self.presence, lambda: None)
        return self.meeting.members(f"{self.me.life}/{self.flights}", self.me, claims)

    def exchange(self) -> Members:
        """Meet, and say that all rows have arrived."""
        members = self.meet()
        assert self.meeting.settle(members, 1, "") == ""
        self.me = replace(self.me, version=members.next_version, state=members.turn, met=True)
        return members

    def exchange_with(self, name: str) -> Members:
        """Exchange until this other site takes part."""
        while name not in (members := self.exchange()).names:
            time.sleep(TIMEOUT / 10)
        return members

    def die(self) -> None:
        self.presence._ended.set()  # like a killed process, it does not say that it leaves


def at_once(*calls: Callable[[], Members]) -> list[Members]:
    """Call functions at the same time. Return their results in order."""
    results: dict[int, Members] = {}
    threads = [
        threading.Thread(target=lambda index=index, call=call: results.update({index: call()}), daemon=True)
        for index, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20 * TIMEOUT)
    assert len(results) == len(calls), "a site still waits"
    return [results[index] for index in range(len(calls))]


@pytest.fixture
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def test_sites_exchange_with_who_is_there_and_the_others_take_rows(port: int) -> None:
    a, b = Site(port, "a"), Site(port, "b")
    assert [each.names for each in at_once(a.exchange, b.exchange)] == [("a", "b")] * 2
    (members, _) = at_once(a.exchange, b.exchange)
    assert (members.contributors, members.receivers, members.next_version) == (("a", "b"), (), 1)
    b.die()
    assert a.exchange().names == ("a",), "the first one waits until b is silent"
    begun = time.monotonic()
    assert a.exchange().names == ("a",)
    assert time.monotonic() - begun < TIMEOUT, "nobody waits for a site that is known to be dead"
    again = Site(port, "b", 1, "from a checkpoint")
    members, _ = at_once(lambda: a.exchange_with("b"), again.exchange)
    assert (members.reference.name, members.receivers, members.contributors) == ("a", ("b",), ("a",))
    assert a.me == replace(again.me, name="a", life=a.me.life)


def test_a_site_from_scratch_does_not_outrank_one_that_was_silent(port: int) -> None:
    a = Site(port, "a", 12, "trained", met=True)
    a.exchange()
    a.die()
    b = Site(port, "b")
    for _ in range(3):
        b.exchange()
    assert b.me.version == 2, "its first meeting averaged nothing"
    a.presence = Presence(a.address)  # a thread that was stopped
    members, _ = at_once(a.exchange, lambda: b.exchange_with("a"))
    assert (members.reference.name, members.receivers) == ("a", ("b",))


def test_a_turn_whose_members_died_ends(port: int) -> None:
    a, b = Site(port, "a"), Site(port, "b")
    for _ in range(2):
        at_once(a.exchange, b.exchange)
    at_once(a.meet, b.meet)  # closed, and neither settles
    a.die()
    b.die()
    new = [Site(port, name) for name in "ab"]
    assert [each.names for each in at_once(*(site.exchange for site in new))] == [("a", "b")] * 2
    new[1].presence.touched = float("inf")  # it takes steps, and comes late
    (members,) = at_once(new[0].exchange)
    assert members.names == ("a",), "it does not wait for the exchanges of the dead"


def test_a_name_is_taken_from_a_dead_job_only(port: int) -> None:
    a = Site(port, "a")
    a.exchange()
    fails(lambda: Site(port, "a").meet(), "another job is site 'a'", "it is alive")
    fails(lambda: Site(port, "b").meet("another model"), "it has another model, and the others have a model")
    a.die()
    for _ in range(2):
        new = Site(port, "a")
        assert new.exchange().names == ("a",)
        new.die()
    fails(lambda: a.meet(), "another job has taken the name of site 'a'")


def test_another_model_takes_the_place_of_dead_sites_only(port: int) -> None:
    """The first site has set its claims, and registers while the second one looks whether it lives."""
    TCPStore("127.0.0.1", port, wait_for_workers=False).set("claims", "a model")
    a, b = Site(port, "a"), Site(port, "b")
    register = threading.Timer(TIMEOUT / 3, a.exchange)
    register.start()
    fails(lambda: b.meet("another model"), "it has another model, and the others have a model", "end the others")
    register.join()
    a.die()
    assert b.meet("another model").names == ("b",)
    b.die()


def test_the_store_tells_who_lives_and_how_often_they_exchanged(port: int) -> None:
    """It waits as long as the sites do, which give signs of life less often than its own time-out."""
    store, watched = connect(sites(f"127.0.0.1:{port}", name="x")), Presence(Sites(f"127.0.0.1:{port}", "x", 1e-9, 1))
    assert who_lives(store, watched) == ([], 0)
    a = Site(port, "a", 12, "trained", met=True)
    a.exchange()
    assert who_lives(store, watched) == (["a"], 13)
    a.presence.end()
    assert who_lives(store, watched) == ([], 0)


def test_a_site_that_hangs_costs_one_time_out(port: int) -> None:
    a, b = Site(port, "a"), Site(port, "b")
    at_once(a.exchange, b.exchange)
    assert a.exchange().names == ("a",), "b lives and does not come"
    begun = time.monotonic()
    a.exchange()
    assert time.monotonic() - begun < TIMEOUT
    at_once(lambda: a.exchange_with("b"), b.exchange)  # it comes late, waits for the next turn, and is waited for again
    assert [each.names for each in at_once(a.exchange, b.exchange)] == [("a", "b")] * 2


def test_nobody_waits_for_what_a_site_has_that_hangs(port: int) -> None:
    """Its thread still gives signs of life, but it has taken no step for long."""
    a = Site(port, "a", 12, "trained", met=True)
    a.exchange()
    a.presence.touched = float("-inf")
    begun = time.monotonic()
    assert Site(port, "b").exchange().names == ("b",)
    assert time.monotonic() - begun < 3 * TIMEOUT


def test_announcements_are_plain_data() -> None:
    site = Announcement("a", "life", 3, "state", True, 0, "0.7 0.1")
    assert Announcement(**json.loads(json.dumps(asdict(site)))) == site
    for address, name in (("http://x:1", "a"), ("[::1]:29400", "a"), ("x:0", "a"), ("x:29400", "a b"), ("x:29400", "")):
        fails(partial(Sites, address, name, 1.0, 1), "ValueError", "give ")
