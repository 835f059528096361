"""Reduces the gradients of a bucket, with the gradients that ``no_sync`` has deferred.

A program under ``no_sync`` has ``zero_defer_reduction`` in place of each reduction (``passes.defer``). After
``no_sync``, the next backward reduces the sums::

    with model.no_sync():
        loss(model(x0)).backward()      zero_defer_reduction(g0, 'w')     holds g0          no reduction, no .grad
        loss(model(x1)).backward()      zero_defer_reduction(g1, 'w')     holds g0 + g1
    loss(model(x2)).backward()          zero_reduce_scatter(g2, 'w')      reduces g0 + g1 + g2 into .grad
                                        zero_reduce_deferred(('b',))      reduces sums of other parameters

The arguments of backward are known only while it runs, so :func:`refuse_wrong_backward` runs at its start.
:class:`Rows` writes the means to ``.grad``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from thunder_zero.comm.backends import require_reducible
from thunder_zero.comm.collective_tags import CollectiveTag, doing
from thunder_zero.comm.handle import Waitable
from thunder_zero.plan.mesh import OF_MEANS
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.outside import accumulates
from thunder_zero.sharded.param import ShardedParam
from thunder_zero.sharded.state import LocalState, State
from thunder_zero.sharded.wire import OnTheWire


class ReduceBucket:
    """The parameters whose gradients, or intra-replica means, one collective averages over an axis."""

    def __init__(self, state: LocalState, paths: Sequence[str], over: str) -> None:
        self._state, self._wire, self._over = state, state.wire, over
        self._params = tuple(state.params[path] for path in paths)
        self._planned = tuple(param.planned for param in self._params)
        self.is_first = over not in OF_MEANS  # False if it averages the means of another reduction
        self._is_encoded = state.plan.encodes_gradient(over, *self._planned)

    def encode(self, grads: Sequence[Tensor]) -> Sequence[OnTheWire]:
        return self._wire.encode_grad(self._add_deferred(grads), self._planned, self._over)

    def launch(self, sent: Sequence[OnTheWire]) -> Waitable:
        if self.is_first:
            self._state.must_agree = True
            self._state.release_gathered()  # backward does not gather kept parameters
        if not self._is_encoded:
            sent = self._add_deferred(cast(Sequence[Tensor], sent))
        return self._wire.reduce(sent, self._planned, self._over)

    def decode(self, arrived: Sequence[OnTheWire]) -> Sequence[Tensor]:
        return self._wire.decode_grad(arrived, self._planned, self._over)

    def _add_deferred(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self.is_first:
            return grads
        return [param.add_deferred(grad) for grad, param in zip(grads, self._params, strict=True)]


def reduce_deferred(state: LocalState, paths: Sequence[str]) -> None:
    """Reduce the deferred gradients of these parameters, and add the means to ``.grad``.

    Ranks agree, by one small collective, on the parameters with a deferred gradient on any rank. These are reduced one
    at a time, and a rank without a deferred gradient sends zeros.
    """
    state.must_agree = True
    means = {}
    for path in state.on_any_rank(paths, [param.path for param in state.deferred]):
        param = state.params[path]
        zeros = torch.zeros((), dtype=param.planned.reduce_dtype, device=state.device).expand(param.planned.shape)
        full = zeros if param.deferred is None else param.take_deferred()
        (means[path],) = state.wire.average_now([full], [param.planned])
    wait_offloaded(state)
    if means and state.plan.policy.check_gradients:
        check_finite(state, list(means.values()), list(means))
    for path, mean in means.items():
        param = state.params[path]
        grad = param.gradient(mean)
        param.give(grad)
        torch.autograd.backward(param.shard, grad)  # which calls the hooks of the shard with it


def check_finite(state: LocalState, grads: Sequence[Tensor], paths: Sequence[str]) -> None:
    """Raise RuntimeError on all ranks if a gradient on any rank has NaN or Inf (policy ``check_gradients``)."""
    with doing("policy check_gradients", state.name):
        flags = torch.stack([(~grad.isfinite().all()).to(state.device) for grad in grads])
        bad = state.on_any_rank(paths, flags=flags)
    if bad:
        state.drop_deferred()
        raise RuntimeError(
            f"the gradient of parameter {bad[0]!r} is NaN or Inf, and policy check_gradients stops here: "
            f"no .grad was changed, the gradients that no_sync deferred are dropped; lower the learning rate, "
            f"scale the loss or look at this batch"
        )


def wait_offloaded(state: LocalState) -> None:
    if state.device.type == "cuda":
        torch.cuda.current_stream(state.device).synchronize()


def follow_requires_grad(state: State) -> None:
    """Plan anew if ``requires_grad`` of a shard has changed since the last forward.

    This is a collective only if ``no_sync`` holds gradients of a parameter that was frozen. Ranks that freeze different
    parameters learn of it by the tags of their next launches.
    """
    params = state.params.values()
    changed = [param for param in params if param.shard.requires_grad is not param.planned.requires_grad]
    if not changed:
        return
    new_plan = state.plan.training({param.path for param in params if param.shard.requires_grad})
    require_reducible(new_plan, state.transport.averages)
    state.take_plan(new_plan)
    for param in changed:
        with torch.DisableTorchFunctionSubclass():
            param.placeholder.requires_grad_(param.planned.requires_grad)
    if state.grew and (frozen := [param for param in changed if not param.planned.requires_grad]):
        _reduce_now(state, frozen)


def _reduce_now(state: State, frozen: Sequence[ShardedParam]) -> None:
    """Reduce what ``no_sync`` has deferred of frozen parameters, as no later backward will; a collective."""
    paths = [param.path for param in frozen]
    activity = f"a forward of {state.name}{state.refrozen}"
    with doing("a forward", state.name):
        state.transport.enter(CollectiveTag(activity, repr(paths)))
        for param in frozen:
            param.shard.requires_grad_(True)  # autograd adds to .grad, and calls hooks
        try:
            reduce_deferred(state, paths)
        finally:
            for param in frozen:
                param.shard.requires_grad_(False)


class Rows(torch.autograd.Function):
    """An autograd function from shards to the rows that a program reads. One call takes all parameters of a program."""

    @staticmethod
    def forward(ctx: Any, state: LocalState, params: Sequence[ShardedParam], *shards: Tensor) -> tuple[Tensor, ...]:
        """Return the padded rows. A tied parameter may occur twice in ``params``."""
        ctx.set_materialize_grads(False)  # grads of unused parameters stay None
        ctx.params = params
        rows = tuple(param.rows.detach() for param in params)
        if state.plan.frozen:
            pairs = zip(rows, params, strict=True)
            ctx.mark_non_differentiable(*(tensor for tensor, param in pairs if not param.planned.requires_grad))
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return gradients of the shards; None for a gradient that is deferred, missing, or already in ``.grad``.

        A gradient is written to ``.grad`` here, as in FSDP2, since autograd would copy it or create another DTensor.
        Then the hooks of ``outside.py`` only get gradients from outside of programs.
        """
        params: Sequence[ShardedParam] = ctx.params
        writes_grads = accumulates(leaf for leaf, _ in ctx.next_functions if leaf)
        shard_grads: list[Tensor | None] = []
        for rows, param in zip(grads, params, strict=True):
            grad, shard = None if rows is None else param.gradient(rows), param.shard
            # Single rows are excluded: autograd may later add to .grad in place, and DTensor would broadcast the row.
            is_single = param.planned.sharded and param.planned.shape[0] == 1
            trains = shard.requires_grad  # it may have been frozen since forward
            writes = trains and writes_grads and not is_single and not param.is_hooked
            if grad is not None and writes and _write(grad, shard):
                grad = None
            if grad is not None and trains:
                param.give(grad)
            shard_grads.append(grad)
        return None, None, *shard_grads


def _write(grad: Tensor, shard: nn.Parameter) -> bool:
    """Set or add to ``.grad``. Return False if autograd must add, since ``.grad`` is placed in another way."""
    held = shard.grad
    if held is None:
        shard.grad = grad
    elif isinstance(held, DTensor) and isinstance(grad, DTensor) and held.placements != grad.placements:
        return False
    else:
        local(held).add_(local(grad))
    return True


LEAF = "torch::autograd::AccumulateGrad"  # the node that adds to the .grad of a parameter or input
ROWS: Any = Rows._backward_cls  # of the nodes that it puts into graphs


def refuse_wrong_backward(
    node: Node, tangents: Sequence[Any], model: str, state: LocalState, *, was_synced: bool
) -> None:
    """Raise RuntimeError before the first collective of a backward that would be wrong:

    - with a DTensor among ``tangents``, the gradients of plain outputs, since backward computes with plain tensors;
    - with ``create_graph=True``, since the compiled backward has no graph, and a gradient penalty would be ignored;
    - with ``torch.autograd.grad`` or ``inputs=``, if gradients are deferred in this backward or were deferred before.
      Gradients of parameters that are not among the inputs would be added to the deferred gradients, or lost.
    """
    if any(isinstance(tangent, DTensor) for tangent in tensors_in(tangents)):
        raise RuntimeError(
            f"the loss combines an output of {model} with a DTensor, a number computed from parameters outside of "
            f"forward; add the number as number.full_tensor(), called on all ranks, and compute in forward what "
            f"multiplies the loss or depends on the batch, whose mean full_tensor() does not give"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"cannot differentiate the backward of {model} (create_graph=True, as a gradient penalty or a Hessian "
            f"needs): it is compiled without a graph, so this part of the gradient would be lost; leave create_graph "
            f"out, or call torch.func.grad inside of forward"
        )
    if not (was_synced and not state.deferred) and not accumulates(_leaves_of(node)):
        raise RuntimeError(
            f"torch.autograd.grad, or backward(inputs=...), through {model} in the middle of an accumulation: no_sync "
            f"defers the gradients of all its parameters, so they would be added or lost; call it outside of no_sync "
            f"and before the accumulation begins"
        )


def tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from tensors_in(item)
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def _leaves_of(node: Node) -> Iterator[Node]:
    """Yield the leaf nodes of the forward's inputs. The node of the rows leads to the nodes of the parameters."""
    for source in {source: None for source, _ in node.next_functions if source is not None}:
        candidates = (leaf for leaf, _ in source.next_functions) if isinstance(source, ROWS) else (source,)
        yield from (leaf for leaf in candidates if leaf is not None and leaf.name() == LEAF)
