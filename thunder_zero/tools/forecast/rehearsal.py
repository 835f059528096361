"""Makes a model's state out of meta tensors, with a wire that sends nothing, to run lines on it.

::

    rehearsal of rank 0 of 8    gather    allocates full parameters, and the transport's buffers; no message
                                wait      returns the full parameters at once, without values

Of the transports only the calls to the backend are replaced, so forecasts include all their buffers.
``torch.distributed`` need not be initialised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroup
from torch.utils._pytree import tree_iter

from thunder_zero.comm.collective_tags import TaggedTransport
from thunder_zero.comm.handle import BucketPart, Result
from thunder_zero.comm.native import CoalescedNccl, PerTensor, keep_alive
from thunder_zero.comm.pairwise import AwaitMessage, GlooBucket, PairwiseGloo, StartMessage
from thunder_zero.comm.transport import PeerBuffers, SingleRank, Transport
from thunder_zero.compat.private import disable_current_modes
from thunder_zero.encodings.encoding import PIECE, PIECE_ON_GPU
from thunder_zero.encodings.int8 import weyl
from thunder_zero.encodings.nf4 import pairs_on
from thunder_zero.plan.mesh import ALL, REPLICATE, SHARD, TENSOR
from thunder_zero.plan.outer import Outer, row_bytes
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.policy import STAGES
from thunder_zero.sharded.digests import digests_of
from thunder_zero.sharded.param import ShardedParam
from thunder_zero.sharded.state import LocalState
from thunder_zero.sharded.wire import Wire
from thunder_zero.tools.forecast.figures import EXCHANGE, Holds, Storage
from thunder_zero.tools.forecast.run_lines import empty_like
from thunder_zero.tools.forecast.watch import META, Layout, NoForecast, Placed, Watch, WithoutValues, needs_no_values
from thunder_zero.traces.compiled import Traces

from thunder.core.proxies import NumberProxy, TensorProxy

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
MAKE_OPTIMIZER = (
    "give a class, such as torch.optim.AdamW, or a function from parameters to an optimizer: "
    "lambda params: torch.optim.SGD(params, 0.1)"
)


def _make_optimizer(make: MakeOptimizer, shards: Iterable[Tensor]) -> torch.optim.Optimizer:
    if isinstance(make, torch.optim.Optimizer) or not callable(make):
        raise TypeError(f"optimizer is of type {type(make).__name__}; {MAKE_OPTIMIZER}")
    try:
        optimizer = make(shards)
    except TypeError as error:
        raise TypeError(f"optimizer= was called with the parameters and raised {error}; {MAKE_OPTIMIZER}") from error
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise NoForecast(
            f"cannot forecast the optimizer: the step of {type(optimizer).__name__} needs a closure, which runs "
            f"forward and backward again; leave out optimizer=, and give its bytes as reserve="
        )
    return optimizer


def take_step(
    optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor], shards: Mapping[str, nn.Parameter]
) -> None:
    """Step the optimizer with gradients keyed by path, like ``shards``, and drop the gradients."""
    for path, gradient in gradients.items():
        shards[path].grad = gradient
    optimizer.step()
    optimizer.zero_grad()


class Rehearsal(LocalState):
    """A model's state, made of meta tensors, for :class:`thunder_zero.sharded.runtime.ModelRuntime`.

    The rehearsed step follows an optimizer's step. So ZeRO-1 refreshes all parameters, and parameters that stay
    unsharded after a micro-batch (``reshard_after_backward=False``) are gathered again.
    """

    def __init__(self, traces: Traces, backend: str, make: MakeOptimizer | None, *, accumulating: bool) -> None:
        plan = traces.plan
        with disable_current_modes():
            digests_of([torch.empty(1, device=META)])  # allocate constants that stay in the process
            wire = UnsentWire(plan, backend)
        with WithoutValues():  # rows on the host are meta tensors as well
            tensors = {
                param.path: torch.empty(
                    plan.geometry(param).in_compute if param.resident else plan.shard_shape(param),
                    dtype=param.rest_dtype,
                    device=META,
                )
                for param in plan.params
            }
            super().__init__(plan, META, "the model", wire, tensors, {})
            self.synced = traces.facts.synced
            self.expire(self.params.values())
        trained = [param for param in self.params.values() if param.planned.requires_grad]
        on_device = [param for param in trained if not plan.rests_on_host(param.planned)]
        # The shards whose optimizer state is on the device, keyed by path. The optimizer, if any, steps them.
        here = (None, plan.mesh.shard.place)
        self.shards = {param.path: param.shard for param in on_device if param.planned.owner in here}
        # The storages of this state, of the optimizer and of the inputs; None in host memory. Slot ~0 is the first.
        self.at_rest: list[Storage | None] = []
        self.slots: dict[int, int] = {}  # keyed by address
        self._tensors: list[Tensor] = []  # keeps these addresses
        for path, param in self.params.items():
            self._add(param.rows, Holds.PARAMETER, path, counts=not plan.rests_on_host(param.planned))
        for param in self.resident:
            self._add(param.full_value(), Holds.PARAMETER, param.path)
        on_cuda = backend == "nccl" and not STAGES[plan.policy.stage].sharded
        self.optimizer = self._stepped_once(make, foreach=on_cuda) if make is not None and self.shards else None
        deferred = trained if accumulating else []  # before the step
        self.before = {param.path: self._add(full_gradient(param), Holds.DEFERRED, param.path) for param in deferred}
        self.exchanges: list[int] = []  # the bytes of the buffers of each fragment's exchange, without a delay
        if traces.outer is not None:
            self._add_outer(traces, traces.outer, [param.planned for param in on_device], on_gpu=backend == "nccl")
        self.inputs = dict(self._inputs(traces))

    def _add(self, tensor: Tensor, kind: Holds, name: str, *, counts: bool = True) -> int:
        """Add a storage, and return its slot. A storage that was added before gets the new name."""
        storage = tensor.untyped_storage()
        slot = self.slots.setdefault(storage._cdata, ~len(self.at_rest))
        self.at_rest[~slot : ~slot + 1] = [Storage(kind, storage.nbytes(), name) if counts else None]
        self._tensors.append(tensor)
        return slot

    def _add_outer(self, traces: Traces, outer: Outer, params: Iterable[Param], *, on_gpu: bool) -> None:
        """Add the agreed parameters, the states of the outer optimizer, and buffers that stay while a step computes."""
        kinds = [] if outer.cpu_offload else ["agreed", *(f"outer state {number}" for number in range(outer.states))]
        for param in params:
            nbytes = row_bytes(self.plan, param)
            self.at_rest += [Storage(Holds.OUTER, nbytes, f"{param.path}: {kind}") for kind in kinds]
        buffers = [outer.buffers(self.plan, vectors, on_gpu=on_gpu) for vectors in outer.vectors_of(self.plan)]
        if outer.delay and not on_gpu:
            self.at_rest.append(Storage(Holds.IN_FLIGHT, max(buffers), EXCHANGE))
        if traces.exchanges:
            self.exchanges = [0] * len(buffers) if outer.delay and not on_gpu else buffers

    def _stepped_once(self, make: MakeOptimizer, *, foreach: bool) -> torch.optim.Optimizer:
        """Return the optimizer of the shards, whose state a first step has allocated.

        ``foreach`` is True if torch chooses foreach by default for the shards: plain tensors on CUDA, not DTensors.
        """
        action = "leave out fused=True, or give its bytes as reserve="
        with Watch(self.slots) as watch, needs_no_values(lambda: "the optimizer: it", action):
            optimizer = _make_optimizer(make, self.shards.values())
            for group in optimizer.param_groups:
                if foreach and group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True  # torch's default depends on the device, which is META here
            take_step(optimizer, {path: torch.empty_like(shard) for path, shard in self.shards.items()}, self.shards)
        states = [
            (f"{path}: {name}", tensor)  # such as "blocks.0.up.weight: exp_avg"
            for path, shard in self.shards.items()
            for name, value in optimizer.state.get(shard, {}).items()
            for tensor in tree_iter(value)
            if isinstance(tensor, Tensor)
        ]
        names, nbytes = {watch.record(tensor): name for name, tensor in reversed(states)}, dict(watch.taken())
        for address, slot in watch.alive().items():
            self.slots[address] = ~len(self.at_rest)
            self.at_rest.append(Storage(Holds.OPTIMIZER, nbytes[slot], names.get(slot, "all parameters")))
        return optimizer

    def _inputs(self, traces: Traces) -> Iterator[tuple[str, Placed]]:
        for proxy in traces.forward.args:
            if isinstance(proxy, NumberProxy):
                yield proxy.name, (None, proxy.value)
            elif path := traces.timeline.inputs.get(proxy.name):
                tensor = self.params[path].rows
                yield proxy.name, (self.slots[tensor.untyped_storage()._cdata], Layout.of(tensor))
            elif isinstance(proxy, TensorProxy):
                tensor, buffer = empty_like(proxy), traces.others.get(proxy.name)
                slot = self._add(tensor, Holds.BUFFER if buffer else Holds.INPUT, buffer or proxy.name)
                yield proxy.name, (slot, Layout.of(tensor))


def full_gradient(param: ShardedParam) -> Tensor:
    return torch.empty(param.planned.shape, dtype=param.planned.reduce_dtype, device=META)


class _UnsentBucket(GlooBucket):
    """A gloo bucket that sends no messages. Each wait keeps the tensor of its message alive."""

    def _begin_to_post(self) -> Callable[[], object]:
        """Post on this thread, so that a forecast does not depend on the time at which another thread ends."""
        self._post()
        return lambda: None

    def start_all(self, start: StartMessage, tensors: dict[int, Tensor], tag: int) -> list[AwaitMessage]:
        """Return a wait for each tensor, which keeps the tensor alive."""
        return [keep_alive(tensor) for tensor in tensors.values() if tensor.numel()]


class _UnsentPairwiseGloo(PairwiseGloo):
    """Gloo's transport without its messages and threads."""

    def _average_in_background(self, start: Callable[[], Result]) -> Callable[[], Result]:
        """Return ``start`` unchanged, to compute the average in the wait instead of on a thread."""
        return start

    def _bucket(self) -> GlooBucket:
        return _UnsentBucket(self._group, self._tag)


class _NotLaunched:
    """A mixin that launches no collective, for transports over the backend's collectives."""

    def _launch(self, collective: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[BucketPart]:
        return [BucketPart((lambda: calls,))]

    def _start_messages(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> list[BucketPart]:
        return [BucketPart((lambda: (outgoing, incoming),))]


class _UnsentCoalescedNccl(_NotLaunched, CoalescedNccl):
    """NCCL's transport without its collectives."""


class _UnsentPerTensor(_NotLaunched, PerTensor):
    """The transport for all other backends, without its collectives."""


TRANSPORTS: Mapping[str, Callable[[ProcessGroup], Transport]] = {
    "gloo": _UnsentPairwiseGloo,
    "nccl": _UnsentCoalescedNccl,
    "mpi": _UnsentPerTensor,
}


class UnsentWire(Wire):
    """A wire without peers, for the plan's rank. Tensors for host memory are on the meta device, too."""

    def __init__(self, plan: Plan, backend: str) -> None:
        axes = {over: plan.mesh.over(over) for over in (SHARD, REPLICATE, ALL, TENSOR)}
        groups = {over: ProcessGroup(HashStore(), axis.place, axis.size) for over, axis in axes.items()}
        transports = {
            over: SingleRank() if group.size() == 1 else TRANSPORTS[backend](group) for over, group in groups.items()
        }
        super().__init__(TaggedTransport(transports, "the model", groups[ALL], announces=False), plan, META)
        self._piece = PIECE if backend == "gloo" else PIECE_ON_GPU
        # Build the encodings' tables now, so that no forecast counts them: they stay in the process.
        for block in {param.reduce_format.block for param in plan.params if param.reduce_format}:
            weyl(max(self._piece, block), META)
        pairs_on(META)

    def _on_device(self, shard: Tensor, param: Param) -> Tensor:
        return shard.detach().clone() if self._plan.rests_on_host(param) else shard.detach()
