"""Counts what the loss and the optimizer compute, as operations of a timeline."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from thunder_zero.compat.thunders_work import WORK
from thunder_zero.frontends.compiled import Traces
from thunder_zero.plan.amounts import name_of
from thunder_zero.schedule.timeline import Kind, Op, Timeline, Value, Work
from thunder_zero.sharded.writes import digests_of
from thunder_zero.tools.forecast.figures import Holds
from thunder_zero.tools.forecast.memory import begun
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.forecast.replay import Loss
from thunder_zero.tools.forecast.watch import Watch

NOTHING = ("empty", "new_empty")  # operators that begin so only allocate


def whole_step(traces: Traces, loss: Loss | None, optimizer: MakeOptimizer | None) -> Timeline:
    """The timeline of a step with the loss and its gradient between the phases, and the optimizer's step at the end.
    ZeRO-1 begins with the digests of this rank's rows, by which ranks know what to refresh."""
    of_loss, of_optimizer, of_digests = Operators("loss"), Operators("optimizer", backward=True), Operators("digests")
    plan = traces.plan
    with Watch(Holds.PARAMETER, on_cpu=True) as watch:
        replay = begun(traces, "gloo", optimizer, watch, accumulating=False)
        replay.step_outside(loss, (of_loss, of_optimizer))
        digested = [replay.share.rows[param.path] for param in plan.params if param.resident]
        if digested and plan.mesh.shard.size > 1:
            with of_digests:
                digests_of(digested)
    timeline = traces.timeline
    ops, border = timeline.ops, timeline.backward_start
    found = (*of_digests.ops, *ops[:border], *of_loss.ops, *ops[border:-1], *of_optimizer.ops, ops[-1])
    return timeline.with_ops(found, of_digests.values | of_loss.values | of_optimizer.values)


def loss_traffic(traces: Traces, loss: Loss) -> int:
    """Bytes of memory that the loss and its gradient read and write, operator by operator, as eager torch computes
    them."""
    operators = Operators("loss")
    with Watch(Holds.PARAMETER) as watch:
        begun(traces, "gloo", None, watch, accumulating=False).step_outside(loss, (operators, nullcontext()))
    return sum(value.nbytes for value in operators.values.values())


class Operators(TorchDispatchMode):
    """Notes torch's operators that run inside the block: an operation for each, and what they read and write, each time
    under a name of its own."""

    def __init__(self, name: str, *, backward: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self._name, self._backward = name, backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        written = [each for each in tree_iter(out) if isinstance(each, Tensor)]
        written += [each for each in read if not written and func._schema.is_mutable]  # foreach returns nothing
        if not func._schema.is_mutable and _view_of(read, written):
            return out
        name = func.overloadpacket.__name__
        if name.startswith(NOTHING):
            return out
        count = flop_registry.get(func.overloadpacket)
        op = Op(Kind.COMPUTE, self._names(read), self._names(written), backward=self._backward, work=_work_of(name))
        self.ops.append(replace(op, flops=count(*args, **kwargs, out_val=out)) if count else op)
        return out

    def _names(self, tensors: list[Tensor]) -> tuple[str, ...]:
        names = tuple(f"{self._name} {len(self.values) + at}" for at in range(len(tensors)))
        for name, tensor in zip(names, tensors, strict=True):
            stored = min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
            self.values[name] = Value(stored, name_of(tensor.dtype))
        return names


def _view_of(read: list[Tensor], written: list[Tensor]) -> bool:
    there = {each.untyped_storage()._cdata for each in read}
    return bool(written) and all(each.untyped_storage()._cdata in there for each in written)


def _work_of(name: str) -> Work:
    """The class of an operator of torch: ``_foreach_mul_`` is ``mul``, ``_log_softmax`` is ``log_softmax``."""
    return WORK.get(name.removeprefix("_foreach").strip("_"), Work.OTHER)
