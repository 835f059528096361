"""Finds which values inside a fused region take memory, and when.

A fuser computes pointwise operations where their results are read, so those take no memory. These do, by the rules of
inductor (``fuse="inductor"``): results of kernels that are not fused (matmuls, say), what such a kernel reads, results
of reductions, and the region's outputs. A pointwise kernel writes into a buffer of the same size that nothing reads
after it. Inputs stay alive until the region ends, since its caller holds them. The order of what takes memory is the
trace's, or another one of a lower peak::

    h = linear(x, w)          takes memory
    a = h * 0.5               inlined
    b = erf(h / 1.41)         inlined
    g = a * b                 takes memory, since linear reads it
    y = linear(g, v)          takes memory
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thunder_zero.compat.private import disable_current_modes
from thunder_zero.schedule.timeline import Work
from thunder_zero.tools.forecast.watch import Unwatched
from thunder_zero.traces.work import work_of

import thunder
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.passes import transform_for_execution
from thunder.executors.torchex import ex as torch_executor

FUSED = (Work.POINTWISE, Work.VIEW, Work.NONE, Work.REDUCTION)
LOOKUPS = ("embedding", "gather", "index_select", "take", "take_along_axis", "take_along_dim")  # pointwise for inductor
NOTHING = frozenset[int]()
Event = tuple[list[int], dict[int, int], list[int]]  # of a step: what its result replaces, new buffers, what it frees


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a region: the keys of storages that it reads, and the bytes of those that it makes, by key."""

    work: Work
    reads: tuple[int, ...]
    makes: Mapping[int, int]


def run_region(region: BoundSymbol, values: dict[str, Any], see: Callable[[Tensor], object]) -> None:
    """Run a fused line; its outputs are added to ``values``, tensors without values by name. ``see`` counts a tensor's
    storage from now on, as long as it is alive."""
    trace = _lowered(region)
    inside = {proxy.name: values[proxy.name] for proxy in region.flat_proxy_args}
    with disable_current_modes(), Unwatched():
        steps = _steps(trace, inside)
    results = [inside[proxy.name] for proxy in trace.bound_symbols[-1].flat_proxy_args]
    outputs = {_key(tensor): tensor for tensor in results if isinstance(tensor, Tensor)}
    inside.clear()
    sizes = {key: size for step in steps for key, size in step.makes.items()}
    held: dict[int, Tensor] = {}
    orders = (memory_of(order, outputs) for order in (steps, freeing_early(steps, set(outputs))))
    for dying, made, dead in min(orders, key=lambda events: highest_of(events, sizes)):
        for key in dying:
            del held[key]
        for key, nbytes in made.items():
            if key in outputs:
                see(outputs[key])
            else:
                held[key] = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        for key in dead:
            del held[key]
    values.update(zip((proxy.name for proxy in region.flat_proxy_outs), results, strict=True))


def highest_of(events: Iterable[Event], sizes: Mapping[int, int]) -> int:
    """The most bytes alive, of what :func:`memory_of` returns."""
    now = highest = 0
    for dying, made, dead in events:
        now += sum(made.values()) - sum(sizes[key] for key in dying)
        highest = max(highest, now)
        now -= sum(sizes[key] for key in dead)
    return highest


def freeing_early(steps: Sequence[Step], outputs: set[int]) -> list[Step]:
    """The steps in another order, as inductor looks for one of a lower peak: of those that can run, always the one that
    leaves least alive. What is inlined comes first."""
    taking = _taking_memory(steps, outputs)
    sources = _sources(steps, taking)
    left = [step for step in steps if not taking.isdisjoint(step.makes)]
    order = [step for step in steps if taking.isdisjoint(step.makes)]
    sizes = {key: size for step in left for key, size in step.makes.items()}
    reads = {id(step): frozenset[int]().union(*(sources.get(key, NOTHING) for key in step.reads)) for step in left}
    waiting = Counter(key for read in reads.values() for key in read)  # steps that still read each
    there: set[int] = set()

    def more(step: Step) -> int:
        freed = sum(sizes[key] for key in reads[id(step)] if waiting[key] == 1 and key not in outputs)
        return sum(step.makes.values()) - freed

    while left:
        step = min((one for one in left if reads[id(one)] <= there), key=more)
        there.update(step.makes)
        waiting.subtract(reads[id(step)])
        left.remove(step)
        order.append(step)
    return order


def _sources(steps: Sequence[Step], taking: set[int]) -> dict[int, frozenset[int]]:
    """Of each storage made inside: which storages that take memory are read for it."""
    sources = {key: frozenset((key,)) for key in taking}
    for step in steps:
        read = frozenset[int]().union(*(sources.get(key, NOTHING) for key in step.reads))
        sources.update((key, read) for key in step.makes if key not in taking)
    return sources


def memory_of(steps: Sequence[Step], outputs: Iterable[int]) -> list[Event]:
    """What each step does with memory: buffers that its result replaces, new buffers, buffers that it frees."""
    returned = set(outputs)
    taking = _taking_memory(steps, returned)
    sources = _sources(steps, taking)
    last: dict[int, int] = {}
    for at, step in enumerate(steps):
        if not taking.isdisjoint(step.makes):
            last.update((key, at) for one in step.reads for key in sources.get(one, NOTHING))
    ends: dict[int, list[int]] = {}
    for key, at in last.items():
        if key not in returned:
            ends.setdefault(at, []).append(key)
    nbytes = {key: size for step in steps for key, size in step.makes.items()}
    events = []
    for at, step in enumerate(steps):
        made = {key: size for key, size in step.makes.items() if key in taking}
        dead = ends.get(at, [])
        reused: list[int] = []
        if step.work in FUSED:
            for size in made.values():
                reused += [key for key in dead if nbytes[key] == size and key not in reused][:1]
        unread = [key for key in made if key not in last and key not in returned]
        events.append((reused, made, [key for key in dead if key not in reused] + unread))
    return events


def _taking_memory(steps: Sequence[Step], outputs: set[int]) -> set[int]:
    """The keys of the storages made inside that are not inlined."""
    sizes: dict[int, int] = {}
    taking: set[int] = set()
    for step in steps:
        sizes.update(step.makes)
        if step.work not in FUSED:
            taking.update(step.makes)
            taking.update(key for key in step.reads if key in sizes)
        elif step.work is Work.REDUCTION:
            largest = max((sizes.get(key, 0) for key in step.reads), default=0)
            taking.update(key for key, nbytes in step.makes.items() if nbytes < largest)
    return taking | {key for key in outputs if key in sizes}


def _steps(trace: TraceCtx, inside: dict[str, Any]) -> list[Step]:
    """Run the lines of a region outside of the watch; ``inside`` gets all values, so that no storage is freed."""
    context = trace.python_ctx()
    known = {_key(tensor) for tensor in inside.values() if isinstance(tensor, Tensor)}
    steps = []
    with tracectx(trace):
        for line in trace.bound_symbols[:-1]:
            if line.sym is prims.unpack_trivial:
                continue
            code = "\n".join(line.python(indent=0, print_depth=1))
            exec(code, context | line.object_ctx(), inside)
            read, made = (
                [inside[proxy.name] for proxy in proxies] for proxies in (line.flat_proxy_args, line.flat_proxy_outs)
            )
            new = {_key(one): one.untyped_storage().nbytes() for one in made if isinstance(one, Tensor)}
            new = {key: nbytes for key, nbytes in new.items() if key not in known}
            known.update(new)
            work = Work.POINTWISE if line.sym.name in LOOKUPS else work_of(line)
            steps.append(Step(work, tuple(_key(one) for one in read if isinstance(one, Tensor)), new))
    return steps


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@thunder._with_cache_info_ctx
def _lowered(region: BoundSymbol) -> TraceCtx:
    """The operations of a region as lines that torch runs, as the fuser traces them."""
    defaults = {"default_device": torch.get_default_device(), "default_dtype": torch.get_default_dtype()}
    thunder._get_cache_info().update(defaults)  # symbols ask it, such as full's
    trace = TraceCtx(None)
    given = {proxy.name: proxy for proxy in region.flat_proxy_args}  # once each: repair may give one for two others
    trace.args, trace.kwargs = list(given.values()), {}
    trace._siginfo = SigInfo("region")
    trace._siginfo.args = [(name, None) for name in given]
    with tracectx(trace):
        for name, proxy in given.items():
            trace.add_name(name)
            prims.unpack_trivial(proxy, name=name)
        for name in {proxy.name for line in region.subsymbols for proxy in _made_by(line)} - trace.names:
            trace.add_name(name)
        trace.bound_symbols += [*region.subsymbols, prims.python_return.bind(region.output, output=None)]
    return transform_for_execution(trace, executors_list=(torch_executor,))


def _made_by(line: BoundSymbol) -> Iterable[Any]:
    yield from line.flat_proxy_outs
    for inner in line.subsymbols:
        yield from _made_by(inner)
