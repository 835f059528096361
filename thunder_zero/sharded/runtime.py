"""The functions that compiled traces call while they run, bound to one model's state.

:class:`ModelRuntime` implements the lines of a trace, whose arguments are tensors and parameter paths::

    t4 = zero_encode(t_w, 'w')              encode        casts, copies or encodes the rows, if they must be gathered
    t5 = zero_all_gather(t4, 'w')           all_gather    launches a gather, and returns a handle
    t6 = zero_wait(t5)                                    calls the handle's wait
    t7 = zero_decode(t6, 'w')               decode        decodes full parameters from bytes
    t9 = zero_reduce_scatter(g_w, 'w')      reduce        adds the sum that no_sync has deferred, and averages
    t1 = zero_defer_reduction(g_w, 'w')     defer         adds the gradient to the parameter's deferred gradient

``gather.py`` and ``reduce.py`` act on a bucket of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from thunder_zero.comm.handle import Waitable
from thunder_zero.compat.private import at_end_of_backward, running_backward
from thunder_zero.plan.mesh import SHARD
from thunder_zero.sharded import reduce
from thunder_zero.sharded.gather import GatherBucket
from thunder_zero.sharded.reduce import ReduceBucket, Rows
from thunder_zero.sharded.state import LocalState
from thunder_zero.sharded.waits import label_launch
from thunder_zero.sharded.wire import OnTheWire
from thunder_zero.traces.symbols import Runtime


class ModelRuntime(Runtime):
    def __init__(self, state: LocalState) -> None:
        self._state = state
        self._gather = cache(partial(GatherBucket, state))
        self._reduction = cache(partial(ReduceBucket, state))
        self._launches: dict[str, Sequence[str]] = {}  # the launches of a phase, by their digest
        self._compared: set[str] = set()  # names of phases whose launches ranks have compared
        self._at_end_of = -1  # autograd's number of the last backward with a reduction at its end

    @property
    def device(self) -> torch.device:
        return self._state.device

    def function(self, name: str) -> Callable[..., Any]:
        return self.functions[name]

    @cached_property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that the lines of a trace call, by the names of their symbols.

        ``over`` is the axis of a collective. A launch returns a handle whose ``wait()`` returns full parameters, means,
        or payloads for ``decode`` and ``decode_grad``.
        """
        launches = {
            "all_gather": self.all_gather,
            **dict.fromkeys(("all_reduce", "reduce_scatter", "reduce_to_owner"), self.reduce),
        }
        codes = {
            "encode": self.encode,
            "decode": self.decode,
            "encode_grad": self.encode_grad,
            "decode_grad": self.decode_grad,
        }
        return {
            **{f"zero_{name}": _launch_one(launch) for name, launch in launches.items()},
            **{f"zero_{name}": _code_one(code) for name, code in codes.items()},
            **{f"zero_{name}_coalesced": function for name, function in (launches | codes).items()},
            "zero_wait": lambda handle: handle.wait()[0],
            "zero_wait_coalesced": lambda handle: handle.wait(),
            "zero_defer_reduction": self.defer,
            "zero_enter": self.enter,
            "zero_reduce_deferred": self.reduce_deferred_at_end,
            "zero_check_finite": self.check_finite,
            "zero_wait_offloaded": self.wait_offloaded,
            "zero_cast": lambda full, path: full.to(self._state.plan.by_name[path].compute_dtype),
        }

    def enter(self, phase: str, schedule: str) -> None:
        """Set the collective tag of a phase, at its start. Ranks raise if their launches differ.

        Ranks may run different graphs and compile them at different times, but they launch equal collectives. Ranks
        without tags compare the launches of the first phase of each name only: later a rank may be alone with a graph.
        """
        transport, launches = self._state.transport, self._launches.get(schedule, ())
        if not transport.announces and phase not in self._compared:
            self._compared.add(phase)
            self._state.require_same_launches(phase, launches)
        transport.enter_phase(phase, schedule, self._state.training_forwards, launches, self._state.refrozen)

    def take_rows(self, paths: Sequence[str]) -> tuple[Tensor, ...]:
        """Return the rows that a program reads, connected by autograd to the trained shards.

        Under ``no_sync`` the rows of a shard with hooks on its gradient are not connected, since autograd would call
        the hooks with None. The hooks run when the gradient is reduced, as with FSDP2.
        """
        params = [self._state.params[path] for path in paths]
        shards: list[Tensor] = [param.shard for param in params]
        if not self._state.synced:
            shards = [param.shard.detach().requires_grad_() if param.is_hooked else param.shard for param in params]
        rows: tuple[Tensor, ...] = Rows.apply(self._state, params, *shards)  # type: ignore[no-untyped-call]
        return rows

    def encode(self, shards: Sequence[Tensor], paths: Sequence[str], over: str = SHARD) -> Sequence[Tensor]:
        return self._gather(paths).encode(shards)

    def all_gather(self, sent: Sequence[Tensor], paths: Sequence[str], over: str = SHARD) -> Waitable:
        with label_launch("gather", paths):
            handle = self._state.clock.watch(self._gather(paths).launch(sent), paths[0], gather=True)
        return self._state.labels.watch(handle, "gather", paths)

    def decode(self, arrived: Sequence[Tensor], paths: Sequence[str], over: str = SHARD) -> Sequence[Tensor]:
        return self._gather(paths).decode(arrived)

    def encode_grad(self, grads: Sequence[Tensor], paths: Sequence[str], over: str = SHARD) -> Sequence[OnTheWire]:
        return self._reduction(paths, over).encode(grads)

    def reduce(self, sent: Sequence[OnTheWire], paths: Sequence[str], over: str = SHARD) -> Waitable:
        bucket = self._reduction(paths, over)
        with label_launch("reduce", paths, over):
            handle = self._state.clock.watch(bucket.launch(sent), paths[0], gather=False)
        if bucket.is_first:
            self._state.labels.gradients_are_made(paths)
        return self._state.labels.watch(handle, "reduce", paths, over)

    def decode_grad(self, arrived: Sequence[OnTheWire], paths: Sequence[str], over: str = SHARD) -> Sequence[Tensor]:
        return self._reduction(paths, over).decode(arrived)

    def defer(self, grad: Tensor, path: str) -> None:
        self._state.copies.wait()  # this backward does not end with ``wait_offloaded``
        self._state.grew = True
        self._state.params[path].defer(grad)
        self._state.labels.gradients_are_made((path,))

    def reduce_deferred_at_end(self, paths: Sequence[str]) -> None:
        """Reduce the deferred gradients of all parameters at the end of this backward, and add them to ``.grad``.

        Only at the end is it known which parameters this backward has reached. Nothing is sent unless a backward ran
        under ``no_sync``.
        """
        if (backward := running_backward()) != self._at_end_of:
            self._at_end_of = backward
            at_end_of_backward(self._reduce_all_deferred)

    def _reduce_all_deferred(self) -> None:
        grew, self._state.grew = self._state.grew, False
        if grew:
            trained = [param.path for param in self._state.plan.params if param.requires_grad]
            reduce.reduce_deferred(self._state, trained)

    def check_finite(self, grads: Sequence[Tensor], paths: Sequence[str]) -> None:
        reduce.check_finite(self._state, grads, paths)

    def wait_offloaded(self, grads: Sequence[Tensor]) -> None:
        reduce.wait_offloaded(self._state)

    def note_launches(self, schedule: str, launches: Sequence[str]) -> None:
        self._launches[schedule] = launches

    def tell_failure(self, error: Exception) -> None:
        """Let all ranks raise if a compilation failed on this rank alone. The others would wait for its messages.

        Ranks without tags do so only before their first phase. Later they would mix this up with gathers.
        """
        if self._state.transport.announces or not self._compared:
            self._state.require_same_launches(f"a compilation that failed ({type(error).__name__}: {error})", ())


def _launch_one(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a launch as a function of one tensor and one path."""
    return lambda tensor, path, *axis: launch((tensor,), (path,), *axis)


def _code_one(code: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """Return an encoder or decoder as a function of one tensor and one path."""
    return lambda tensor, path, *axis: code((tensor,), (path,), *axis)[0]
