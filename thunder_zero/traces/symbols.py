"""The symbols of our lines in a trace (``zero_all_gather``, ...), and the shapes that they return.

Each program has its own executor, so a line of a trace needs no process group and no state. Its arguments are only
tensors and paths of parameters::

    q4 = zero_encode(t_h_0_w, 'h.0.w')                    # a cast, a copy or bytes, if planned
    t5 = zero_all_gather(q4, 'h.0.w')                     # launch
    q6 = zero_wait(t5)                                    # the full parameter, or its bytes
    h_0_w = zero_decode(q6, 'h.0.w')                      # the full parameter, if sent as bytes
    t9 = zero_reduce_scatter_coalesced((g0, g1), ('h.0.w', 'h.0.b'))
    (s0, s1) = zero_wait_coalesced(t9)

``zero_synchronize(t_h_0_w, 'h.0.w')`` and ``zero_reduce(g, 'h.0.w')`` stand for these lines until ``lower.py`` writes
them. ``sharded/runtime.py`` has the functions that the lines call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from keyword import iskeyword
from math import prod
from operator import floordiv, mod
from typing import Any, NoReturn

import torch

from thunder_zero.plan.mesh import REPLICATE, SHARD, TENSOR
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.traffic import part_bytes, payload_bytes
from thunder_zero.schedule.ops import Gather, Launch

import thunder.core.dtypes as dtypes
from thunder.core import prims
from thunder.core.devices import Device, to_device
from thunder.core.proxies import FutureTensorProxy, NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, get_tracectx
from thunder.extend import OperatorExecutor


@dataclass(frozen=True)
class SymbolicShape:
    """A shape with symbolic sizes: an expression for each size, and the proxy of each symbol's number."""

    sizes: tuple[str, ...]
    numbers: Mapping[str, NumberProxy]

    def of(self, *numbers: int) -> list[int]:
        """Return the sizes for given values of the symbols."""
        known = dict(zip(self.numbers, numbers, strict=True))
        return [int(eval(size, FUNCTIONS, known)) for size in self.sizes]


TAKEN = frozenset(  # names that Thunder's traces use
    ("torch", "thunder", "Tensor", "C0", "C1", "saved_for_backward", "cotangents", "slice", "float", "complex")
)
FUNCTIONS = {"Max": max, "Min": min, "Mod": mod, "FloorDiv": floordiv, "PythonMod": mod}  # as torch writes them


@dataclass(frozen=True)
class Facts:
    """Facts about the traces of one program that their lines do not contain."""

    executor: ZeroExecutor  # the symbols of our lines
    inputs: Mapping[str, str]  # a mapping from inputs of the trace to the paths of parameters of the plan
    synced: bool  # True if gradients are reduced, False if they are deferred
    # the shapes of all other inputs. A dynamic size is represented by the name of the input that holds its value
    input_shapes: Mapping[str, tuple[int | str, ...]]
    symbolic_shapes: Mapping[str, SymbolicShape]  # the shapes of values that have symbolic sizes
    constants: Mapping[str, torch.Tensor]  # the constant tensors of the user's code, by the inputs of the trace

    def named(self, phase: str) -> str:
        """Return the name of a phase of the program. Ranks compare names, and may run different graphs."""
        return phase + " under no_sync" * (not self.synced)


@dataclass(frozen=True, eq=False)
class JointTrace:
    """A trace of forward, and of backward if there is one, before it is scheduled."""

    trace: TraceCtx
    facts: Facts


class Runtime:
    """What runs the lines of a program. Here they refuse to run, and a model's runtime has their functions."""

    @property
    def device(self) -> torch.device | None:
        """The device of compute; None if it is the parameters' device."""
        return None

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function that the lines of a symbol call."""
        return _refuse

    def note_launches(self, schedule: str, launches: Sequence[str]) -> None:
        """Do nothing: the trace does not run."""

    def tell_failure(self, error: Exception) -> None:
        """Do nothing: there is no other rank."""


class ZeroExecutor(OperatorExecutor):
    """The symbols of one model. ``coalesced`` maps symbols for one tensor to symbols for several tensors."""

    def __init__(self, plan: Plan, runtime: Runtime) -> None:
        super().__init__("thunder_zero")
        self.plan = plan
        self.runtime = runtime
        self.effect = cache(partial(self._register, meta=_no_meta, tags=(prims.OpTags.DONT_DCE,)))
        register = self._register
        self.all_gather = register("zero_all_gather", self._gather_meta)
        self.all_reduce = register("zero_all_reduce", self._reduce_meta)
        self.reduce_scatter = register("zero_reduce_scatter", self._reduce_meta)
        self.reduce_to_owner = register("zero_reduce_to_owner", self._reduce_meta)
        self.launches = (self.all_gather, self.all_reduce, self.reduce_scatter, self.reduce_to_owner)
        self.wait = register("zero_wait", _wait_meta)
        self.encode = register("zero_encode", _no_meta)
        self.decode = register("zero_decode", _no_meta)
        self.encode_grad = register("zero_encode_grad", _no_meta)
        self.decode_grad = register("zero_decode_grad", _no_meta)
        codes = (self.encode, self.decode, self.encode_grad, self.decode_grad)
        singles = (*self.launches, self.wait, *codes)
        self.coalesced = {symbol: register(f"{symbol.name}_coalesced", _no_meta) for symbol in singles}
        self.defer = register("zero_defer_reduction", _no_meta)
        self.cast = register("zero_cast", _no_meta)
        self.synchronize = self.register_operator("zero_synchronize", meta=_no_meta, fn=_is_lowered)
        self.reduce = self.register_operator("zero_reduce", meta=_no_meta, fn=_is_lowered)

    def _register(self, name: str, meta: Callable[..., Any], tags: tuple[prims.OpTags, ...] = ()) -> Symbol:
        return self.register_operator(name, meta=meta, fn=self.runtime.function(name), tags=tags)

    def reduction(self, param: Param, axis: str) -> Symbol:
        """Return the symbol that reduces the parameter's gradient over an axis."""
        if axis == SHARD and param.owner is not None:
            return self.reduce_to_owner
        return self.reduce_scatter if param.sharded and axis == SHARD else self.all_reduce

    def gathers(self, shard: TensorProxy, path: str, full: TensorProxy) -> tuple[BoundSymbol, ...]:
        """Return the lines that make the full parameter of its rows."""
        if not self.plan.by_name[path].sharded:
            return (self.cast.bind(shard, path, output=full),)
        handle = self._gather_meta(shard, path)
        return self.all_gather.bind(shard, path, output=handle), self.wait.bind(handle, output=full)

    def reductions(self, grad: TensorProxy, path: str, mean: TensorProxy) -> Iterator[BoundSymbol]:
        """Yield the lines that average a gradient, over one axis after another."""
        param = self.plan.by_name[path]
        *first, last = self.plan.reduced_over(param)
        for axis in (*first, last):
            args = (grad, path, *self.axis(axis))
            handle = self._reduce_meta(*args)
            grad = mean if axis == last else _wait_meta(handle)
            yield self.reduction(param, axis).bind(*args, output=handle)
            yield self.wait.bind(handle, output=grad)

    def rows_of(self, full: TensorProxy, param: Param, name: str) -> TensorProxy:
        """Return the proxy of a parameter's rows at rest."""
        return TensorProxy(
            name,
            shape=self.plan.shard_shape(param),
            device=self.device_at_rest(param) or full.device,
            dtype=dtypes.to_dtype(param.rest_dtype),
            requires_grad=param.requires_grad,
        )

    def mean_of(self, grad: TensorProxy, path: str) -> TensorProxy:
        """Return the proxy of the mean of a gradient: rows in the parameter's dtype."""
        param = self.plan.by_name[path]
        return TensorProxy(
            free_name(f"t_{path}_grad"),
            shape=self.plan.shard_shape(param),
            device=self.device_at_rest(param) or grad.device,
            dtype=dtypes.to_dtype(param.dtype),
            requires_grad=False,
        )

    def axis(self, name: str) -> tuple[str, ...]:
        """Return the trailing arguments of a launch: its axis, or no argument if the axis is the only data axis."""
        return (name,) if self.plan.mesh.replicate.size > 1 or name == TENSOR else ()

    # Shapes, dtypes and devices, for tracing.

    def _gather_meta(self, shard: TensorProxy, path: str, *axis: str) -> FutureTensorProxy:
        param = self.plan.by_name[path]
        dtype = dtypes.to_dtype(param.compute_dtype)
        return FutureTensorProxy(shape=param.shape, device=self._device_of(shard), dtype=dtype)

    def _reduce_meta(self, grad: TensorProxy, path: str, *axis: str) -> FutureTensorProxy:
        name = axis[0] if axis else SHARD  # a default would be written into each line
        param = self.plan.by_name[path]
        shape, device, dtype = self.plan.shard_shape(param), grad.device, param.reduce_dtype
        if name == self.plan.reduced_over(param)[-1]:
            device, dtype = self.device_at_rest(param) or device, param.dtype
        return FutureTensorProxy(shape=shape, device=device, dtype=dtypes.to_dtype(dtype))

    def device_at_rest(self, param: Param) -> Device | None:
        """Return the device of the parameter's shard; None if it is the device of the traced tensors."""
        device = self.runtime.device
        return None if device is None else to_device("cpu" if self.plan.rests_on_host(param) else device)

    def _device_of(self, shard: TensorProxy) -> Device:
        return shard.device if self.runtime.device is None else to_device(self.runtime.device)

    def handle_of(
        self, symbol: Symbol, tensors: Sequence[TensorProxy], paths: Sequence[str], axis: str
    ) -> FutureTensorProxy:
        """Return the handle of a launch. A handle of several tensors is flat, since their shapes differ."""
        handles = [symbol.meta(tensor, path, axis) for tensor, path in zip(tensors, paths, strict=True)]
        if len(handles) == 1:
            return handles[0]
        numel = sum(prod(handle.shape) for handle in handles)
        return FutureTensorProxy(shape=(numel,), device=handles[0].device, dtype=handles[0].dtype)

    def launch_of(self, launch: Launch) -> Symbol:
        """Return the symbol of a launch."""
        if isinstance(launch, Gather):
            return self.all_gather
        return self.reduction(self.plan.by_name[launch.params[0]], launch.over)

    def encoder_of(self, launch: Launch) -> Symbol | None:
        """Return the symbol that encodes the payload of a launch, or None if the launch sends tensors unchanged."""
        bucket = [self.plan.by_name[path] for path in launch.params]
        if isinstance(launch, Gather):
            return self.encode if self.plan.encodes(*bucket) else None
        return self.encode_grad if self.plan.encodes_gradient(launch.over, *bucket) else None

    def decoder_of(self, launch: Launch) -> Symbol | None:
        """Return the symbol that decodes the payload of a launch, or None if nothing is decoded."""
        bucket = [self.plan.by_name[path] for path in launch.params]
        if isinstance(launch, Gather):
            return self.decode if self.plan.decodes(*bucket) else None
        return self.decode_grad if self.plan.decodes_gradient(launch.over, *bucket) else None

    def payloads_of(
        self, tensors: Sequence[TensorProxy], launch: Launch, *, after_wait: bool
    ) -> tuple[TensorProxy, ...]:
        """Return proxies of the payloads that a launch sends, or that its wait returns (``after_wait``)."""
        params = [self.plan.by_name[path] for path in launch.params]
        return tuple(self._payload(*pair, launch, after_wait) for pair in zip(tensors, params, strict=True))

    def _payload(self, tensor: TensorProxy, param: Param, launch: Launch, after_wait: bool) -> TensorProxy:
        plan, axis, peers = self.plan, launch.over, self.plan.ranks_over(launch.over) - 1
        gathers = isinstance(launch, Gather)
        shape, dtype = tensor.shape, param.compute_dtype if gathers else param.reduce_dtype
        if gathers and param.frozen_format:
            shape, dtype = param.rest_shape if after_wait else tensor.shape, param.rest_dtype
        elif gathers and plan.gathers_bytes(param):
            shape, dtype = ((1 + peers * after_wait) * payload_bytes(plan, param),), torch.uint8
        elif not gathers and plan.reduces_bytes(param, axis):
            parts = peers + (after_wait and axis == REPLICATE)
            shape, dtype = (parts * part_bytes(plan, param, axis),), torch.uint8
        device = self._device_of(tensor)
        return TensorProxy(shape=shape, device=device, dtype=dtypes.to_dtype(dtype), requires_grad=False, prefix="q")


def free_name(name: str) -> str:
    """Return an identifier for a name or path, different from the names of values and of our symbols."""
    name = re.sub(r"\W", "_", name)
    name = name if name.isidentifier() and not name.startswith("zero_") else f"_{name}"
    return first_free(name, get_tracectx().names)


def first_free(name: str, names: Collection[str]) -> str:
    """Return the name, with a number if it is in ``names``, is a keyword, or is used by Thunder's traces."""
    candidates = (name if number == 0 else f"{name}_{number}" for number in count())
    return next(free for free in candidates if free not in names and free not in TAKEN and not iskeyword(free))


def _refuse(*args: Any) -> NoReturn:
    raise RuntimeError(
        "cannot run this trace: thunder_zero.trace made it without a process group, only to be read; to run the model, "
        "jit the module with ZeroTransform and call it"
    )


def _is_lowered(tensor: Any, path: str) -> NoReturn:
    raise AssertionError(f"{path}: a trace with this line is only read; the lines in its place run")


def _wait_meta(handle: FutureTensorProxy) -> TensorProxy:
    return TensorProxy(shape=handle.shape, device=handle.device, dtype=handle.dtype, requires_grad=False)


def _no_meta(*args: Any) -> None:
    return None


@cache
def dtype_name(dtype: dtypes.dtype) -> str:
    """Return the name of a dtype of Thunder, weak or strong, such as ``"float32"``."""
    return str(dtypes.to_torch_dtype(dtype)).removeprefix("torch.")
