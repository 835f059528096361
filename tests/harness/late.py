"""A wire that carries messages only when they are waited for: the worst that NCCL may do, on gloo.

It takes the place of torch's calls in ``comm/native.py``, below the NCCL transport itself. From launch to wait:

- outputs are NaN, so whoever reads one before its wait reads NaN;
- the wire has weak references only, so a buffer that nobody keeps alive for it is an error;
- an input that was written to is an error.

What it has written becomes NaN again once it is freed: when nobody but the wire has its memory.

Tensors on a GPU travel through host memory, so that gloo carries them between processes on one GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_zero.comm import backends, native
from thunder_zero.comm.native import CoalescedNccl

PLACES = (("cpu", "gloo"), ("cuda", "gloo"))


class CoalescedSums(CoalescedNccl):
    """NCCL's transport for gloo, which has no mean: all dtypes are divided and added up."""

    means: frozenset[torch.dtype] = frozenset()


class Message:
    """One collective, not yet run."""

    def __init__(self, collective: Callable[..., Any], tensors: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        output, given = tensors[0], tensors[-1]
        self.name = collective.__name__
        self._collective, self._options = collective, options
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._given = given.clone()
        self._in_place = len(tensors) == 1
        inside = not self._in_place and _address(output) == _address(given)  # a gather into a buffer at rest
        _fill_with_nan(output)
        if inside:
            given.copy_(self._given)

    def run(self) -> Tensor:
        """Run it, a collective; returns an alias of its output."""
        tensors = [ref() for ref in self._tensors]
        if any(tensor is None for tensor in tensors):
            raise AssertionError(f"{self.name}: a buffer was freed before its wait")
        output, given = tensors[0], tensors[-1]
        assert output is not None
        assert given is not None
        if self._in_place:
            given.copy_(self._given)
        elif not torch.equal(_bytes(given), _bytes(self._given)):
            raise AssertionError(f"{self.name}: its input was written to before its wait")
        on_host = [tensor.cpu() for tensor in tensors if tensor is not None]  # on the CPU the tensors themselves
        self._collective(*on_host, **self._options)
        if output.device.type != "cpu":
            output.copy_(on_host[0])
        return output.detach()


@dataclass
class Wire:
    """The wire of one process.

    Attributes:
        waiting: messages that were launched and not waited for.
        most: the largest number of them so far.
        poisoned: outputs that were freed and are NaN.
    """

    waiting: int = 0
    most: int = 0
    poisoned: int = 0
    _written: list[Tensor] = field(default_factory=list)
    _open: list[Message] | None = None

    @contextmanager
    def launch(self, group: object) -> Iterator[Launched]:
        """Instead of ``one_launch``."""
        launched: list[Message] = []
        self._open = launched
        yield Launched(self, launched)
        self._open = None
        self.waiting += len(launched)
        self.most = max(self.most, self.waiting)

    def late(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Queues a collective of a launch; others run at once."""

        def call(*tensors: Any, **options: Any) -> Any:
            if self._open is None:
                return collective(*tensors, **options)
            self._open.append(Message(collective, tensors, options))
            return None

        return call

    def end(self, message: Message) -> None:
        """Run a message; what was freed since the last one becomes NaN."""
        freed = [tensor for tensor in self._written if _owners(tensor) == ALONE]
        for tensor in freed:
            _fill_with_nan(tensor)
        self._written = [tensor for tensor in self._written if all(tensor is not other for other in freed)]
        self.poisoned += len(freed)
        self._written.append(message.run())
        self.waiting -= 1


@dataclass
class Launched:
    """What ``one_launch`` gives."""

    wire: Wire
    messages: list[Message]

    def wait(self) -> None:
        for message in self.messages:
            self.wire.end(message)


@contextmanager
def replace_collectives(
    launch: Callable[..., Any], queued: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """The calls in ``comm/native.py``: ``launch`` is its ``one_launch``, ``queued`` wraps collectives."""
    collectives = ((native, "all_gather_single"), (native, "reduce_scatter_single"), (dist, "all_reduce"))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(native, "one_launch", launch))
        for owner, name in collectives:
            stack.enter_context(mock.patch.object(owner, name, queued(getattr(owner, name))))
        yield


@contextmanager
def late_wire() -> Iterator[Wire]:
    """Models that are sharded inside of the block train through the NCCL transport, on gloo and late."""
    wire = Wire()
    gloo = mock.patch.dict(backends.BACKENDS, dict.fromkeys(PLACES, CoalescedSums))
    with gloo, replace_collectives(wire.launch, wire.late):
        yield wire


def _owners(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


ALONE = _owners(torch.empty(1))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@torch.inference_mode(False)
@torch.no_grad()
def _fill_with_nan(tensor: Tensor) -> None:
    """NaN, or for integers the byte 0x7f. Not a write that autograd counts: memory is what changes."""
    data = tensor.detach()
    _bytes(data).fill_(0x7F) if not data.is_floating_point() else data.data.fill_(torch.nan)
