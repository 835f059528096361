"""Links between ranks on one machine: the loopback interface, or network namespaces whose links have a rate.

A rate needs Linux, root, and iproute2's ``ip`` and ``tc``. Each rank gets its own namespace with one interface,
and a bridge in a further namespace connects them::

    rank 0 [r0]--tbf--[b0]\\
    rank 1 [r1]--tbf--[b1]--bridge        tbf: a token bucket at both ends of each link limits both directions
    rank 2 [r2]--tbf--[b2]/
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "loopback"
BURST, LATENCY = "256kb", "50ms"  # of the token bucket: bytes that may leave at once, how long a packet may queue


@dataclass(frozen=True)
class Seat:
    """A rank's place in the network.

    Attributes:
        prefix: the words before its command.
        interface: the network interface that it uses.
        address: its address on that interface.
        ends: both ends of its cable, each a namespace and an interface; none on loopback.
    """

    prefix: tuple[str, ...]
    interface: str
    address: str = "127.0.0.1"
    ends: tuple[tuple[str, str], ...] = ()


def can_limit() -> bool:
    """Whether this process may make namespaces and limit their links."""
    return os.name == "posix" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


@contextmanager
def seats(world_size: int, link: str) -> Iterator[list[Seat]]:
    """A seat for each rank; removes the namespaces afterwards.

    Args:
        world_size: number of ranks.
        link: ``"loopback"``, or a rate in ``tc``'s notation, such as ``"1gbit"``.

    Raises:
        PermissionError: a rate without root, ``ip`` and ``tc``.
        subprocess.CalledProcessError: ``ip`` or ``tc`` failed; see their stderr.
    """
    if link == LOOPBACK:
        interface = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        yield [Seat((), interface)] * world_size
        return
    if not can_limit():
        raise PermissionError(f"a link of {link} needs root, ip and tc (iproute2); measure {LOOPBACK!r} instead")
    with ExitStack() as stack:
        hub = _namespace(stack, f"tz{os.getpid()}hub")
        _in(hub, "ip link add bridge0 type bridge")
        _in(hub, "ip link set bridge0 up")
        yield [_join(stack, hub, rank, link) for rank in range(world_size)]


def set_rate(seat: Seat, rate: str) -> None:
    """Limit both ends of a rank's cable to a rate, in place of an earlier one."""
    for namespace, interface in seat.ends:
        _in(namespace, f"tc qdisc replace dev {interface} root tbf rate {rate} burst {BURST} latency {LATENCY}")


def bytes_sent(interface: str) -> int:
    """Bytes that an interface in this process's namespace has sent, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counters,) = (line.partition(":")[2] for line in lines if line.partition(":")[0].strip() == interface)
    return int(counters.split()[8])


def _join(stack: ExitStack, hub: str, rank: int, rate: str) -> Seat:
    space = _namespace(stack, f"tz{os.getpid()}r{rank}")
    own, other, address = f"r{rank}", f"b{rank}", f"10.77.0.{rank + 1}"
    _call(f"ip link add {own} netns {space} type veth peer name {other} netns {hub}")
    _in(space, f"ip addr add {address}/24 dev {own}")
    _in(space, f"ip link set {own} up")
    _in(space, "ip link set lo up")
    _in(hub, f"ip link set {other} master bridge0 up")
    seat = Seat(("ip", "netns", "exec", space), own, address, ((space, own), (hub, other)))
    set_rate(seat, rate)
    return seat


def _namespace(stack: ExitStack, name: str) -> str:
    _call(f"ip netns add {name}")
    stack.callback(_call, f"ip netns delete {name}")  # this removes its interfaces, too
    return name


def _in(namespace: str, command: str) -> None:
    _call(f"ip netns exec {namespace} {command}")


def _call(command: str) -> None:
    subprocess.run(command.split(), check=True)
