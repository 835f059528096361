"""Adds the operations of the loss and of the optimizer to a timeline::

    digests (ZeRO-1) | forward | loss and its gradient | backward | optimizer step

Each torch operator that runs between the phases becomes an operation, with the bytes read and written.
"""

from __future__ import annotations

from dataclasses import replace
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
from thunder_zero.tools.forecast.figures import Memory
from thunder_zero.tools.forecast.fold import Fold
from thunder_zero.tools.forecast.for_loss import Loss, for_loss
from thunder_zero.tools.forecast.lines import empty_like
from thunder_zero.tools.forecast.memory import backend_of, memory_of
from thunder_zero.tools.forecast.recorder import Recorder
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.forecast.watch import Layout
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.operators import work_of_operator

ALLOCATORS = ("empty", "new_empty")  # prefixes of operators that do not touch memory


def memory_and_timeline(
    traces: Traces, *, loss: Loss | None = None, optimizer: MakeOptimizer | None = None
) -> tuple[Memory, Timeline]:
    """Return the results of :func:`thunder_zero.tools.memory` and :func:`whole_step`, from one recorder."""
    of_loss, of_optimizer = _operators()
    recorder = Recorder(traces, backend_of(traces), loss, optimizer, around=(of_loss, of_optimizer))
    memory = memory_of(Fold(recorder, traces.timeline).run())
    is_alone = traces.backward is None or (loss is None and optimizer is None)
    return memory, traces.timeline if is_alone else _with(recorder, of_loss, of_optimizer)


def whole_step(traces: Traces, loss: Loss | None, optimizer: MakeOptimizer | None) -> Timeline:
    """Return the timeline of a step, including the loss and the optimizer's step."""
    if traces.backward is None or (loss is None and optimizer is None):
        return traces.timeline
    traces = for_loss(traces, loss) if loss else traces
    of_loss, of_optimizer = _operators()
    recorder = Recorder(traces, backend_of(traces), loss, optimizer, around=(of_loss, of_optimizer))
    recorder.loss(_outputs_of(traces))
    if recorder.rehearsal.optimizer is not None and traces.facts.synced:
        recorder.optimizer_step()
    return _with(recorder, of_loss, of_optimizer)


def loss_traffic(traces: Traces, loss: Loss) -> int:
    """Return the bytes that the operators of the loss and its gradient read and write in eager torch."""
    of_loss, of_optimizer = _operators()
    Recorder(traces, "gloo", loss, around=(of_loss, of_optimizer)).loss(_outputs_of(traces))
    return sum(value.nbytes for value in of_loss.values.values())


def _operators() -> tuple[Operators, Operators]:
    return Operators("loss"), Operators("optimizer", backward=True)


def _with(recorder: Recorder, of_loss: Operators, of_optimizer: Operators) -> Timeline:
    """Return the timeline of a step, including the operators around its phases."""
    plan, timeline, digests = recorder.plan, recorder.traces.timeline, Operators("digests")
    # ZeRO-1 begins with digests of this rank's rows, which show the ranks which parameters to refresh.
    rows = [param.rows for param in recorder.rehearsal.resident]
    if rows and plan.mesh.shard.size > 1:
        with digests:
            torch.cat(digests_of(rows))
    ops, border = timeline.ops, timeline.backward_start
    all_ops = (*digests.ops, *ops[:border], *of_loss.ops, *ops[border:-1], *of_optimizer.ops, ops[-1])
    return timeline.with_ops(all_ops, digests.values | of_loss.values | of_optimizer.values)


def _outputs_of(traces: Traces) -> dict[str, Any]:
    """Return contiguous layouts of forward's outputs, keyed by name."""
    proxies = traces.forward.bound_symbols[-1].flat_proxy_args
    values = {proxy.name: empty_like(proxy) for proxy in proxies}
    return {name: Layout.of(value) if isinstance(value, Tensor) else value for name, value in values.items()}


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


def _are_views(outputs: list[Tensor], inputs: list[Tensor]) -> bool:
    """Return whether all results of an operator are views of its inputs."""
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return bool(outputs) and all(tensor.untyped_storage()._cdata in storages for tensor in outputs)


def _work_of(operator: Any) -> Work:
    """Return the class of work of a torch operator. ``_foreach_mul_`` counts as ``mul``."""
    name = operator.overloadpacket.__name__.removeprefix("_foreach").strip("_")
    packet = getattr(torch.ops.aten, name, operator.overloadpacket)
    return work_of_operator(getattr(packet, packet.overloads()[0]))
