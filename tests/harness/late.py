"""A wire that carries messages only when a rank waits for them: NCCL's worst case, on gloo.

It replaces torch's calls in ``comm/native.py``, below the NCCL transport. From launch to wait:

- outputs are NaN, so a read before the wait gets NaN;
- the wire has only weak references, so it is an error if a buffer is freed;
- it is an error if an input is written to.

An output becomes NaN again once it is freed: when only the wire has its memory.

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
    """NCCL's transport for gloo, which has no mean: divides tensors of all dtypes, then sums."""

    means: frozenset[torch.dtype] = frozenset()


class Message:
    """A collective that has not run yet."""

    def __init__(self, collective: Callable[..., Any], tensors: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        output, source = tensors[0], tensors[-1]
        self.name = collective.__name__
        self._collective, self._options = collective, options
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._source = source.clone()
        self._in_place = len(tensors) == 1
        inside = not self._in_place and _address(output) == _address(source)  # a gather into a buffer at rest
        _fill_with_nan(output)
        if inside:
            source.copy_(self._source)

    def run(self) -> Tensor:
        """Run the collective. Return an alias of its output."""
        tensors = [ref() for ref in self._tensors]
        if any(tensor is None for tensor in tensors):
            raise AssertionError(f"{self.name}: a buffer was freed before its wait")
        output, source = tensors[0], tensors[-1]
        assert output is not None
        assert source is not None
        if self._in_place:
            source.copy_(self._source)
        elif not torch.equal(_bytes(source), _bytes(self._source)):
            raise AssertionError(f"{self.name}: its input was written to before its wait")
        on_host = [tensor.cpu() for tensor in tensors if tensor is not None]  # for a CPU tensor this is no copy
        self._collective(*on_host, **self._options)
        if output.device.type != "cpu":
            output.copy_(on_host[0])
        return output.detach()


@dataclass
class Wire:
    """The wire of one process.

    Attributes:
        waiting: number of messages that were launched and not waited for.
        most: the largest ``waiting`` so far.
        poisoned: number of outputs that were freed and are NaN.
    """

    waiting: int = 0
    most: int = 0
    poisoned: int = 0
    _written: list[Tensor] = field(default_factory=list)
    _open: list[Message] | None = None

    @contextmanager
    def launch(self, group: object) -> Iterator[Launched]:
        """Replace ``one_launch``."""
        launched: list[Message] = []
        self._open = launched
        yield Launched(self, launched)
        self._open = None
        self.waiting += len(launched)
        self.most = max(self.most, self.waiting)

    def late(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Queue a collective if it is part of a launch; otherwise run it at once."""

        def call(*tensors: Any, **options: Any) -> Any:
            if self._open is None:
                return collective(*tensors, **options)
            self._open.append(Message(collective, tensors, options))
            return None

        return call

    def end(self, message: Message) -> None:
        """Run a message. Fill the outputs that were freed since the last message with NaN."""
        freed = [tensor for tensor in self._written if _owners(tensor) == ALONE]
        for tensor in freed:
            _fill_with_nan(tensor)
        self._written = [tensor for tensor in self._written if all(tensor is not other for other in freed)]
        self.poisoned += len(freed)
        self._written.append(message.run())
        self.waiting -= 1


@dataclass
class Launched:
    """The result of ``one_launch``."""

    wire: Wire
    messages: list[Message]

    def wait(self) -> None:
        for message in self.messages:
            self.wire.end(message)


@contextmanager
def replace_collectives(
    launch: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace ``one_launch`` in ``comm/native.py`` by ``launch``, and wrap its collectives with ``wrap``."""
    collectives = ((native, "all_gather_single"), (native, "reduce_scatter_single"), (dist, "all_reduce"))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(native, "one_launch", launch))
        for owner, name in collectives:
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield


@contextmanager
def late_wire() -> Iterator[Wire]:
    """Let models sharded inside the block train through the NCCL transport over a late gloo wire."""
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
    """Fill memory with NaN, or with the byte 0x7f for integers. Autograd does not count it as a write."""
    data = tensor.detach()
    _bytes(data).fill_(0x7F) if not data.is_floating_point() else data.data.fill_(torch.nan)
