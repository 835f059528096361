"""Counts what this rank sends: each message where it is handed to torch, each line of a trace, and bytes on sockets.

::

    with counted_lines() as lines: ...      compile and train in the block
    SentLine("zero_all_gather", ("w",), messages=1, nbytes=1024, on_sockets=1168)
"""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_zero.comm import pairwise
from thunder_zero.comm.handle import WaitsBy
from thunder_zero.sharded.runtime import ModelRuntime

# Of Linux's struct tcp_info: bytes written that no packet has yet, bytes in packets, those of packets sent again.
TCP_INFO = struct.Struct("@144xI52xQQ")


@contextmanager
def counted_sends() -> Iterator[Counter[torch.dtype]]:
    """Collect the bytes of the messages that this rank sends inside the block, by their dtype.

    Only messages of floats count: parameters and gradients. Ranks send the integers by which they agree separately.
    Between CPUs (gloo) every message is a send of thunder_zero, or of torch's ``isend``. NCCL's collectives send by
    themselves and are not seen.
    """
    sent: Counter[torch.dtype] = Counter()

    def counting(send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_floating_point():
                sent[tensor.dtype] += tensor.nbytes
            return send(tensor, *args, **kwargs)

        return counted

    with ExitStack() as stack:
        for of, name in ((pairwise, "send"), (dist, "isend")):
            stack.enter_context(mock.patch.object(of, name, counting(getattr(of, name))))
        yield sent


@dataclass(frozen=True, slots=True)
class SentLine:
    """What a line of a trace has sent.

    Attributes:
        line: the name of its symbol.
        params: paths of the parameters that travelled.
        messages: how many messages of parameters or gradients were handed to gloo.
        nbytes: their bytes.
        on_sockets: bytes that this process wrote to TCP sockets meanwhile: the messages, gloo's headers, and the tag of
            the phase, if the line is the phase's first launch.
    """

    line: str
    params: tuple[str, ...]
    messages: int
    nbytes: int
    on_sockets: int


@runtime_checkable
class _Launched(Protocol):
    def wait(self) -> tuple[Tensor, ...]: ...


@contextmanager
def counted_lines() -> Iterator[list[SentLine]]:
    """Collect what each line sends of the traces that are compiled and run inside the block, in the order of the lines.

    Each launch is waited for at once, so that nothing else is in flight. Lines that are no launch count only if they
    send something. This works between CPUs (gloo), on Linux.
    """
    lines: list[SentLine] = []
    sent: list[int] = []
    send, function_of = pairwise.send, ModelRuntime.function

    def counted_send(message: Tensor, *args: Any) -> Any:
        sent.append(message.nbytes)
        return send(message, *args)

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            sent.clear()
            before = bytes_on_sockets()
            result = function(*args, **kwargs)
            launched = isinstance(result, _Launched)
            if launched:
                arrived = result.wait()
                result = WaitsBy(lambda: arrived)
            if launched or sent:
                params = args[1] if isinstance(args[1], tuple) else (args[1],)
                lines.append(SentLine(name, params, len(sent), sum(sent), bytes_on_sockets() - before))
            return result

        return counted

    def counting_function(runtime: ModelRuntime, name: str) -> Callable[..., Any]:
        return counting(name, function_of(runtime, name))

    with (
        mock.patch.object(pairwise, "send", counted_send),
        mock.patch.object(ModelRuntime, "function", counting_function),
    ):
        yield lines


def bytes_on_sockets(*, but_port: int = 0) -> int:
    """Return how many bytes this process has written to the TCP sockets that it has now, but for those to a port.

    Packets sent again count once.
    """
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as one:
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                if is_tcp and not (but_port and one.getpeername()[1] == but_port):
                    unsent, sent, again = TCP_INFO.unpack(
                        one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
                    )
                    total += unsent + sent - again
        except OSError:  # closed meanwhile
            continue
    return total
