"""Adds the operations of the loss and of the optimizer to a timeline::

    digests (ZeRO-1) | forward | loss and its gradient | backward | optimizer step

Each torch operator that runs between the phases becomes an operation, with the bytes read and written.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from thunder_zero.plan.amounts import name_of
from thunder_zero.schedule.ops import Compute, Work
from thunder_zero.schedule.timeline import Timeline, Value
from thunder_zero.sharded.digests import digests_of
from thunder_zero.tools.forecast.figures import Holds, Memory
from thunder_zero.tools.forecast.for_loss import for_loss
from thunder_zero.tools.forecast.memory import backend_of, begin_replay, excluded_from, run_step
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.forecast.replay import Loss, Replay
from thunder_zero.tools.forecast.watch import Watch
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.operators import work_of_operator

ALLOCATORS = ("empty", "new_empty")  # prefixes of operators that do not touch memory


def memory_and_timeline(
    traces: Traces, *, loss: Loss | None = None, optimizer: MakeOptimizer | None = None
) -> tuple[Memory, Timeline]:
    """Return the results of :func:`thunder_zero.tools.memory` and ``whole_step`` from one rehearsal."""
    backend, operators = backend_of(traces), _Around()
    with Watch(Holds.PARAMETER) as watch:
        replay = begin_replay(traces, backend, optimizer, watch, contexts=(operators.loss, operators.optimizer))
        memory = run_step(replay, loss, tuple(excluded_from(traces, loss, optimizer, backend)))
        is_alone = traces.backward is None or (loss is None and optimizer is None)
        return memory, traces.timeline if is_alone else operators.timeline(replay)


def whole_step(traces: Traces, loss: Loss | None, optimizer: MakeOptimizer | None) -> Timeline:
    """Return the timeline of a step, including the loss and the optimizer's step, without running the phases."""
    traces = for_loss(traces, loss) if loss else traces
    operators = _Around()
    with Watch(Holds.PARAMETER) as watch:
        contexts = operators.loss, operators.optimizer
        replay = begin_replay(traces, backend_of(traces), optimizer, watch, contexts=contexts)
        replay.run_without_phases(loss)
        return operators.timeline(replay)


def loss_traffic(traces: Traces, loss: Loss) -> int:
    """Return the bytes that the operators of the loss and its gradient read and write in eager torch."""
    operators = Operators("loss")
    with Watch(Holds.PARAMETER) as watch:
        begin_replay(traces, "gloo", None, watch, contexts=(operators, nullcontext())).run_without_phases(loss)
    return sum(value.nbytes for value in operators.values.values())


class Operators(TorchDispatchMode):
    """Records each operator of torch that runs inside the block as an operation.

    Attributes:
        ops: the operations. Every read and every write of a value gets a new name.
        values: the sizes and dtypes of values.
    """

    def __init__(self, name: str, *, backward: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Compute] = []
        self.values: dict[str, Value] = {}
        self._name, self._backward = name, backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [item for item in tree_iter((args, kwargs)) if isinstance(item, Tensor)]
        outputs = [item for item in tree_iter(result) if isinstance(item, Tensor)]
        outputs += [
            item for item in inputs if not outputs and func._schema.is_mutable
        ]  # foreach operators return nothing
        if not func._schema.is_mutable and _are_views(outputs, inputs):
            return result
        name = func.overloadpacket.__name__
        if name.startswith(ALLOCATORS):
            return result
        flops = flop_registry.get(func.overloadpacket)
        op = Compute(self._names(inputs), self._names(outputs), backward=self._backward, work=_work_of(func))
        self.ops.append(replace(op, flops=flops(*args, **kwargs, out_val=result)) if flops else op)
        return result

    def _names(self, tensors: list[Tensor]) -> tuple[str, ...]:
        names = tuple(f"{self._name} {len(self.values) + index}" for index in range(len(tensors)))
        for name, tensor in zip(names, tensors, strict=True):
            nbytes = min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
            self.values[name] = Value(nbytes, name_of(tensor.dtype))
        return names


@dataclass
class _Around:
    """The operators that run around the phases of a step."""

    loss: Operators = field(default_factory=lambda: Operators("loss"))
    optimizer: Operators = field(default_factory=lambda: Operators("optimizer", backward=True))

    def timeline(self, replay: Replay) -> Timeline:
        """Return the timeline of a replayed step, including the operators around its phases."""
        plan, timeline, digests = replay.traces.plan, replay.traces.timeline, Operators("digests")
        # ZeRO-1 begins with digests of this rank's rows, which show the ranks which parameters to refresh.
        rows = [param.rows for param in replay.rehearsal.resident]
        if rows and plan.mesh.shard.size > 1:
            with digests:
                torch.cat(digests_of(rows))
        ops, border = timeline.ops, timeline.backward_start
        all_ops = (*digests.ops, *ops[:border], *self.loss.ops, *ops[border:-1], *self.optimizer.ops, ops[-1])
        return timeline.with_ops(all_ops, digests.values | self.loss.values | self.optimizer.values)


def _are_views(outputs: list[Tensor], inputs: list[Tensor]) -> bool:
    """Return whether all results of an operator are views of its inputs."""
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return bool(outputs) and all(tensor.untyped_storage()._cdata in storages for tensor in outputs)


def _work_of(operator: Any) -> Work:
    """Return the class of work of a torch operator. ``_foreach_mul_`` counts as ``mul``."""
    name = operator.overloadpacket.__name__.removeprefix("_foreach").strip("_")
    packet = getattr(torch.ops.aten, name, operator.overloadpacket)
    return work_of_operator(getattr(packet, packet.overloads()[0]))
