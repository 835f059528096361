"""``tz.sites``: the store where sites meet, who runs it, and how ranks reach it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic, sleep
from uuid import uuid4

from torch.distributed import DistError, TCPStore

RETRY_SECONDS = 0.2
ANSWER_SECONDS = 3.0  # for which an exchange tries to connect, in an outage of any length
PORTS = 1 << 16


class NotReached(RuntimeError):
    """The other sites, or the store, do not answer. The site trains on."""


@dataclass(frozen=True)
class Sites:
    """Where sites meet, and the name of this one. :func:`sites` makes it."""

    address: str
    name: str
    timeout: float
    expected: int
    life: str = field(default_factory=lambda: uuid4().hex[:12], compare=False, repr=False)  # of this job

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+:\d+", str(self.address)) or not 0 < self.port < PORTS:
            raise ValueError(f"address is {self.address!r}; give 'host:port' of the store, such as '10.0.0.1:29400'")
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name is {self.name!r}; give this site a name of letters and digits, such as 'attic'")
        for name, kind in {"timeout": int | float, "expected": int}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value!r}; give a number above 0")

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def sites(address: str, *, name: str, timeout: float = 60.0, expected: int = 2) -> Sites:
    """Return where the sites of one training meet: all give the same address, and each its own name.

    >>> sites = tz.sites("10.0.0.1:29400", name="attic")
    >>> outer = tz.DiLoCo(model, sites, sync_every=32)

    A store answers at ``address``, "host:port". The command ``thunder-zero sites HOST:PORT`` runs it, so that it
    outlives every site. Otherwise rank 0 of a site on that host does. While no store answers, sites train on alone.
    Ranks connect to each other on the interface that leads to the host. Nothing is encrypted, and whoever reaches the
    port can change the training: use a VPN or a firewall.

    Args:
        timeout: seconds that an exchange waits for a site, and after which a site without a sign of life is dead. It
            should exceed the difference between the times that sites need for ``sync_every`` steps.
        expected: number of sites that the first exchange waits for, up to the time-out.
    """
    return Sites(address, name, timeout, expected)


def host_store(address: Sites) -> TCPStore | None:
    """Start a store, if the host is this machine and no other process has the port."""
    with suppress(OSError, RuntimeError), socket.socket() as probe:
        probe.bind((address.host, 0))  # raises if the address is another machine's
        if not _answers(address):
            return TCPStore(address.host, address.port, is_master=True, wait_for_workers=False)
    return None


def connect(address: Sites, patience: float = 0.0) -> TCPStore:
    """Return a connection to the store, for which this may wait. Raise :class:`NotReached`."""
    end = monotonic() + patience
    while not _answers(address):
        if monotonic() > end:
            raise NotReached(f"no store answers at {address.address}")
        sleep(RETRY_SECONDS)
    timeout = timedelta(seconds=address.timeout)
    with reaching(address):
        return TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=timeout)


def _answers(address: Sites) -> bool:
    try:
        socket.create_connection((address.host, address.port), timeout=min(address.timeout, ANSWER_SECONDS)).close()
    except OSError:
        return False
    return True


@contextmanager
def reaching(address: Sites) -> Iterator[None]:
    """Raise :class:`NotReached` in place of the store's errors."""
    try:
        yield
    except DistError as error:
        reason = str(error).partition("\n")[0]
        raise NotReached(f"the store at {address.address} does not answer: {reason}") from None


def own_address(address: Sites) -> str:
    """Return this machine's address on the interface that leads to the store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(address.host), address.port))  # sends nothing
        return str(probe.getsockname()[0])
