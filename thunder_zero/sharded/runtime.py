"""The functions that compiled traces call while they run, bound to one model's state.

:class:`ModelRuntime` implements the lines of a trace, whose arguments are tensors and parameter paths::

    t4 = zero_encode(t_w, 'w')              encode        casts, copies or encodes the rows, if they must be gathered
    t5 = zero_all_gather(t4, 'w')           all_gather    launches a gather, and returns a handle
    t6 = zero_wait(t5)                                    calls the handle's wait
    t7 = zero_decode(t6, 'w')               decode        decodes full parameters from bytes
    t9 = zero_reduce_scatter(g_w, 'w')      reduce        adds the sum that no_sync has deferred, and averages
    t1 = zero_defer_reduction(g_w, 'w')     defer         adds the gradient to the sum in accumulation.py

In: this rank's rows, or full gradients. Out: handles, whose ``wait`` returns full parameters, or this rank's rows of
the mean gradients. The mean gradient of a replicated parameter has all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from thunder_zero.comm.collective_tags import doing
from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.compat.torch.autograd import at_end_of_backward, running_backward
from thunder_zero.plan.mesh import OF_MEANS, SHARD
from thunder_zero.plan.params import Param
from thunder_zero.sharded.dtensors import Rows
from thunder_zero.sharded.resident import StayingParameters
from thunder_zero.sharded.state import LocalState
from thunder_zero.sharded.waits import label_launch
from thunder_zero.sharded.wire import OnTheWire
from thunder_zero.traces.symbols import Runtime


class ModelRuntime(Runtime):
    """The runtime of one model's traces (:class:`thunder_zero.traces.symbols.Runtime`)."""

    def __init__(self, state: LocalState) -> None:
        self._state, self._plan, self._wire = state, state.plan, state.wire
        self._accumulation = state.accumulation
        self._launches: dict[str, Sequence[str]] = {}  # the launches of a phase, by their digest
        self._compared: set[str] = set()  # names of phases whose launches ranks have compared
        self._at_end_of = -1  # autograd's number of the last backward with a reduction at its end
        self._buckets: dict[Sequence[str], tuple[Param, ...]] = {}  # the parameters of a bucket, by their paths
        self._encoded: dict[tuple[Sequence[str], str], bool] = {}  # True if a line encodes the gradients of a bucket

    @property
    def device(self) -> torch.device:
        """Return the device that computes."""
        return self._state.device

    @property
    def synced(self) -> bool:
        """True outside of ``no_sync``: the gradients of the current forward will be reduced."""
        return self._accumulation.synced

    def enter(self, phase: str, schedule: str) -> None:
        """Set the collective tag of a phase, at its start. Ranks raise if their launches differ.

        Ranks may run different graphs and compile them at different times, but they launch equal collectives. Ranks
        without tags compare the launches of the first phase of each name only: later a rank may be alone with a graph.
        """
        transport, launches = self._wire.transport, self._launches.get(schedule, ())
        if not transport.announces and phase not in self._compared:
            self._compared.add(phase)
            self._state.require_same_launches(phase, launches)
        transport.enter_phase(phase, schedule, self._state.training_forwards, launches, self._state.refrozen)

    def encode(self, shards: Sequence[Tensor], paths: Sequence[str], over: str = SHARD) -> Sequence[Tensor]:
        """Return the payloads of the gather of these shards."""
        params = self._params_of(paths)
        keeper = self._keeper_of(params)
        if keeper is None:
            return self._wire.encode(shards, params)
        sent, due = list(shards), keeper.due(params)
        if due:
            for index, encoded in zip(due, self._wire.encode(*keeper.select(due, shards, params)), strict=True):
                sent[index] = encoded
        return sent

    def all_gather(self, sent: Sequence[Tensor], paths: Sequence[str], over: str = SHARD) -> Waitable:
        """Launch the gather of a bucket, and return the handle.

        ZeRO-1 sends only the parameters that an optimizer has changed since the last gather. ZeRO-2 with
        ``policy.reshard_after_backward=False`` sends only the parameters that this accumulation has not gathered yet.
        """
        with label_launch("gather", paths):
            handle = self._state.clock.watch(self._gather(sent, self._params_of(paths)), paths[0], gather=True)
        return self._state.labels.watch(handle, "gather", paths)

    def _gather(self, sent: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Gather the parameters that are due. The handle returns all parameters of the bucket."""
        keeper = self._keeper_of(params)
        if keeper is None:
            return self._wire.gather(sent, params)
        due, last = keeper.due(params), self.synced
        full = {index: keeper.full(param) for index, param in enumerate(params) if index not in due}
        handle = self._wire.gather(*keeper.select(due, sent, params)) if due else None
        keeper.launched(params, due, last=last)

        def wait() -> tuple[Tensor, ...]:
            arrived = full | dict(zip(due, handle.wait() if handle else (), strict=True))
            results = tuple(arrived[index] for index in range(len(params)))
            if not self._plan.decodes(*params):
                keeper.arrived(params, results, last=last)
            return results

        return WaitsBy(wait)

    def decode(self, arrived: Sequence[Tensor], paths: Sequence[str], over: str = SHARD) -> Sequence[Tensor]:
        """Return full parameters: decode parameters that arrived as bytes, and return other parameters unchanged."""
        params = self._params_of(paths)
        keeper = self._keeper_of(params)
        if keeper is None:
            return self._wire.decode(arrived, params)
        due = [index for index, tensor in enumerate(arrived) if tensor.dtype is torch.uint8]
        results = list(arrived)
        if due:
            for index, full in zip(due, self._wire.decode(*keeper.select(due, arrived, params)), strict=True):
                results[index] = full
        keeper.arrived(params, results, last=self.synced)
        return results

    def _keeper_of(self, params: Sequence[Param]) -> StayingParameters | None:
        """Return the object that keeps these parameters in full; None if full parameters are freed after use."""
        if params[0].resident:
            return self._state.resident
        keeps = not self._plan.policy.reshard_after_backward and params[0].kept_unsharded
        return self._state.kept_unsharded if keeps else None

    def _params_of(self, paths: Sequence[str]) -> tuple[Param, ...]:
        """Return the parameters of a bucket, from a cache, since a program always has the same paths."""
        if paths not in self._buckets:
            self._buckets[paths] = tuple(self._plan.by_name[path] for path in paths)
        return self._buckets[paths]

    def encode_grad(self, grads: Sequence[Tensor], paths: Sequence[str], over: str = SHARD) -> Sequence[OnTheWire]:
        """Return the payloads of the reduction of gradients, or of intra-replica means."""
        params = self._params_of(paths)
        return self._wire.encode_grad(self._sums(grads, params, over), params, over)

    def _sums(self, grads: Sequence[Tensor], params: Sequence[Param], over: str) -> Sequence[Tensor]:
        """Return gradients plus deferred gradients, in the dtype of the reduction. Return means unchanged."""
        if over in OF_MEANS:
            return grads
        add = self._with_deferred if self._accumulation.paths else sum_and_cast
        return [add(grad, param) for grad, param in zip(grads, params, strict=True)]

    def reduce(self, sent: Sequence[OnTheWire], paths: Sequence[str], over: str = SHARD) -> Waitable:
        """Launch the average of gradients plus deferred gradients, or of intra-replica means, over an axis."""
        params = self._params_of(paths)
        if over not in OF_MEANS:
            self._state.resident.expect_step()
            self._state.kept_unsharded.clear()  # backward does not gather kept parameters
        if (paths, over) not in self._encoded:
            self._encoded[paths, over] = self._plan.encodes_gradient(over, *params)
        if not self._encoded[paths, over]:
            sent = self._sums(cast(Sequence[Tensor], sent), params, over)
        with label_launch("reduce", paths, over):
            handle = self._state.clock.watch(self._wire.reduce(sent, params, over), paths[0], gather=False)
        if over not in OF_MEANS:
            self._state.labels.gradients_are_made(paths)
        return self._state.labels.watch(handle, "reduce", paths, over)

    def decode_grad(self, arrived: Sequence[OnTheWire], paths: Sequence[str], over: str = SHARD) -> Sequence[Tensor]:
        """Return the mean gradients from the results of a reduction."""
        return self._wire.decode_grad(arrived, self._params_of(paths), over)

    def _with_deferred(self, grad: Tensor, param: Param) -> Tensor:
        """Remove the parameter's deferred gradient, and return its sum with ``grad``."""
        deferred = self._accumulation.take(param.path)
        grad = sum_and_cast(grad, param)
        return grad if deferred is None else deferred.add_(grad)

    def take_rows(self, shards: Sequence[Tensor], paths: Sequence[str]) -> tuple[Tensor, ...]:
        """Return the rows that a program reads, connected by autograd to the trained shards.

        Under ``no_sync`` the rows of a shard with hooks on its gradient are not connected, since autograd would call
        the hooks with None. The hooks run when the gradient is reduced, as with FSDP2.
        """
        if not self.synced:
            is_hooked = self._state.outside.is_hooked
            pairs = zip(shards, paths, strict=True)
            shards = [shard.detach().requires_grad_() if is_hooked(path) else shard for shard, path in pairs]
        rows: tuple[Tensor, ...] = Rows.apply(self._state, paths, *shards)  # type: ignore[no-untyped-call]
        return rows

    def defer(self, grad: Tensor, path: str) -> None:
        """Add a full gradient to the parameter's deferred gradient."""
        self._state.copies.wait()  # this backward does not end with ``wait_offloaded``
        self._accumulation.defer(sum_and_cast(grad, self._plan.by_name[path]), path)
        self._state.labels.gradients_are_made((path,))

    def reduce_deferred(self, paths: Sequence[str]) -> None:
        """Reduce the deferred gradients of all parameters at the end of this backward, and add them to ``.grad``.

        Only at the end is it known which parameters this backward has reached. Nothing is sent unless a backward ran
        under ``no_sync``. Then ranks agree, by one small collective, on the parameters with a deferred gradient on any
        rank. These are reduced one at a time, and a rank without a deferred gradient sends zeros.
        """
        if (backward := running_backward()) != self._at_end_of:
            self._at_end_of = backward
            at_end_of_backward(self._reduce_all_deferred)

    def _reduce_all_deferred(self) -> None:
        if self._accumulation.has_grown():
            self.reduce_sums([param.path for param in self._plan.params if param.requires_grad])

    def reduce_sums(self, paths: Sequence[str]) -> None:
        """Reduce the deferred gradients of these parameters, and add the means to ``.grad``. This is a collective."""
        self._state.resident.expect_step()
        means = {}
        for path in self._state.on_any_rank(paths, self._accumulation.paths):
            param = self._plan.by_name[path]
            total = self._accumulation.take(path)
            zeros = torch.zeros((), dtype=param.reduce_dtype, device=self.device).expand(param.shape)
            full = zeros if total is None else total
            (means[path],) = self._wire.average_now([full], [param])
        self.wait_offloaded(list(means.values()))
        if means and self._plan.policy.check_gradients:
            self.check_finite(list(means.values()), list(means))
        for path, mean in means.items():
            grad = self._state.gradient(mean, path)
            self._state.outside.give(path, grad)
            torch.autograd.backward(self._state.shards[path], grad)  # which calls the hooks of the shard with it

    def check_finite(self, grads: Sequence[Tensor], paths: Sequence[str]) -> None:
        """Raise RuntimeError on all ranks if a gradient on any rank has NaN or Inf (policy ``check_gradients``)."""
        with doing("policy check_gradients", self._state.name):
            flags = torch.stack([(~grad.isfinite().all()).to(self.device) for grad in grads])
            first_bad = self._state.first_on_any_rank(flags)
        if first_bad is not None:
            self._state.drop_deferred()
            raise RuntimeError(
                f"the gradient of parameter {paths[first_bad]!r} is NaN or Inf, and policy check_gradients stops here: "
                f"no .grad was changed, the gradients that no_sync deferred are dropped; lower the learning rate, "
                f"scale the loss or look at this batch"
            )

    def wait_offloaded(self, grads: Sequence[Tensor]) -> None:
        """Wait until these reduced gradients are in host memory (policy ``cpu_offload``)."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def note_launches(self, schedule: str, launches: Sequence[str]) -> None:
        """Note the launches of a phase that is compiled now, by their digest, for :meth:`enter`."""
        self._launches[schedule] = launches

    def tell_failure(self, error: Exception) -> None:
        """Let all ranks raise if a compilation failed on this rank alone. The others would wait for its messages.

        Ranks without tags do so only before their first phase. Later they would mix this up with gathers.
        """
        if self._wire.transport.announces or not self._compared:
            self._state.require_same_launches(f"a compilation that failed ({type(error).__name__}: {error})", ())


def sum_and_cast(grad: Tensor, param: Param) -> Tensor:
    """Return a full gradient in the parameter's shape and in the dtype of the reduction."""
    return grad if grad.dtype is param.reduce_dtype else grad.to(param.reduce_dtype)
