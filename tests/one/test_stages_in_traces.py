"""Traces show what each stage saves for backward, and when it gathers and frees parameters.

Dependencies are computed from Thunder's lines, not from the package's timeline.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import thunder_zero as tz
from tests.harness.models import (
    LENGTH,
    PATTERNS_AGAIN,
    GptShape,
    Patterns,
    fresh,
    from_parameters_alone,
    names,
    parameter_inputs,
    saved,
)
from tests.harness.tiers import slow
from thunder_zero.schedule.lifetimes import gathered_bytes

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

WORLD_SIZE = 3  # no row count of the models is divisible by it
TEXTBOOK = replace(tz.ZERO3, reshard_after_forward=True, prefetch=1)
TOKENS = torch.zeros((2, LENGTH), dtype=torch.long)
COLLECTIVES = {
    f"zero_{name}{suffix}"
    for name in ("all_gather", "all_reduce", "reduce_scatter", "wait")
    for suffix in ("", "_coalesced")
}


@cache
def trace_model(kind: type[nn.Module], policy: tz.Policy, autocast: bool = False) -> tz.tools.Traces:
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        return tz.trace(fresh(kind), TOKENS, policy=policy, world_size=WORLD_SIZE)


def launches_of(trace: TraceCtx | None) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the symbol and parameters of every launch, in order. Fail if one of our symbols has an unknown name."""
    assert trace is not None
    for bsym in trace.bound_symbols:
        if bsym.sym.name in ("zero_enter", "zero_reduce_deferred"):
            continue  # a marker; a reduction only after an accumulation
        if bsym.sym.name.startswith("zero_"):
            assert bsym.sym.name in COLLECTIVES
            if not is_wait(bsym):
                paths = (bsym.args[1],) if isinstance(bsym.args[1], str) else tuple(bsym.args[1])
                assert bsym.sym.name.endswith("_coalesced") == (len(paths) > 1)
                yield bsym.sym.name.removesuffix("_coalesced"), paths


def collectives_of(trace: TraceCtx | None) -> list[tuple[str, str]]:
    """Return the symbol and the parameter of each collective, one entry for each parameter."""
    return [(name, path) for name, paths in launches_of(trace) for path in paths]


@pytest.mark.parametrize(
    ("kind", "policy", "autocast"),
    [(GptShape, TEXTBOOK, False), (Patterns, TEXTBOOK, False), (Patterns, TEXTBOOK, True), (Patterns, tz.ZERO2, False)],
)
def test_zero3_saves_only_shards(kind: type[nn.Module], policy: tz.Policy, autocast: bool) -> None:
    """ZeRO-2 saves full parameters, or what is computed from them."""
    result = trace_model(kind, policy, autocast)  # type: ignore[arg-type]
    parameters = parameter_inputs(result)
    # GptShape reads its tied weight under both names and does not use two parameters.
    assert len(parameters) == len(result.plan.params) - (2 if kind is GptShape else 0)
    derived = from_parameters_alone(result.forward, parameters)
    assert len(derived) > len(parameters)  # gathered parameters, and what is computed from them
    assert bool(saved(result.forward) & derived) == (policy == tz.ZERO2)
    crossing = tree_iter(result.forward.bound_symbols[-1].args[1])
    shapes = {proxy.name: tuple(proxy.shape) for proxy in crossing if isinstance(proxy, TensorProxy)}
    for param in result.plan.params:
        shard = result.plan.shard_shape(param)
        assert shapes.get(f"t_{param.path.replace('.', '_')}", shard) == shard


@pytest.mark.parametrize(
    ("kind", "policy", "autocast"),
    [
        (GptShape, TEXTBOOK, False),
        *((Patterns, policy, False) for policy in (tz.DDP, tz.ZERO2, TEXTBOOK)),
        (Patterns, TEXTBOOK, True),
        *slow((Patterns, tz.ZERO1, False), (GptShape, tz.DDP, False)),
    ],
)
def test_backward_gathers_what_it_needs_and_reduces_once(
    kind: type[nn.Module], policy: tz.Policy, autocast: bool
) -> None:
    """Tied parameters are reduced under their first name, 0-dim ones and DDP by all-reduces, unused ones never."""
    result = trace_model(kind, policy, autocast)  # type: ignore[arg-type]
    read = {param.path for param in result.plan.params} - {"unused", "empty"}
    trained = read - {"frozen"}
    assert "head.weight" not in read
    gathered = read - {"scale"} if policy.stage else ()
    assert Counter(collectives_of(result.forward)) == Counter(("zero_all_gather", path) for path in gathered)
    backward = collectives_of(result.backward)
    all_reduced = {"scale"} if policy.stage else trained
    assert Counter(item for item in backward if item[0] != "zero_all_gather") == Counter(
        ("zero_all_reduce" if path in all_reduced else "zero_reduce_scatter", path) for path in trained
    )
    if kind is Patterns:
        again = [path for name, path in backward if name == "zero_all_gather"]
        assert Counter(again) == Counter(PATTERNS_AGAIN if policy.stage == 3 else ())


@pytest.mark.parametrize(
    ("policy", "autocast"), [(tz.ZERO2, False), (TEXTBOOK, False), (TEXTBOOK, True), (tz.ZERO3, False)]
)
def test_gathered_parameters_are_freed_after_their_last_use(policy: tz.Policy, autocast: bool) -> None:
    """What depends only on gathered parameters is deleted after its last reader (in backward, if forward saves it)."""
    result = trace_model(Patterns, policy, autocast)
    inputs = parameter_inputs(result)
    crossing = saved(result.forward) & from_parameters_alone(result.forward, inputs)
    assert bool(crossing) == (policy is not TEXTBOOK)
    freed = from_parameters_alone(result.forward, inputs) - crossing
    assert find_late_deletions(result.forward.bound_symbols, freed) == {}
    assert result.backward is not None
    shards = names(result.backward.args) | saved(result.forward)
    waits = filter(is_wait, result.backward.bound_symbols)
    again = {name for bsym in waits for name in names(bsym.flat_proxy_outs) if name.endswith("_again")}  # no gradients
    assert again.isdisjoint(shards)
    assert find_late_deletions(result.backward.bound_symbols, again | crossing) == {}
    assert gathered_bytes(result.timeline)[-1] == 0


def is_wait(bsym: BoundSymbol) -> bool:
    return bsym.sym.name.startswith("zero_wait")


def find_late_deletions(bsyms: Sequence[BoundSymbol], values: set[str]) -> dict[str, int]:
    """Return by how many lines each value is deleted after its last reader, if not at once (-1: never deleted)."""
    last: dict[str, int] = {}
    deleted: dict[str, int] = {}
    for index, bsym in enumerate(bsyms):
        if bsym.sym.id is prims.PrimIDs.DEL:
            deleted.update(dict.fromkeys(names(bsym.flat_proxy_args) & values, index))
        else:
            last.update(dict.fromkeys((names(bsym.flat_proxy_args) | names(bsym.flat_proxy_outs)) & values, index))
    late = {name: deleted.get(name, index - 1) - index for name, index in last.items()}
    return {name: lines for name, lines in late.items() if lines != 1}


@pytest.mark.parametrize("prefetch", [1, *slow(0, 2)])
def test_gathers_are_spread_over_forward(prefetch: int) -> None:
    """While a unit is awaited, at most ``prefetch`` other units are in flight."""
    result = trace_model(Patterns, replace(TEXTBOOK, prefetch=prefetch))
    for trace in (result.forward, result.backward):
        assert trace is not None
        handles: set[str] = set()
        ended = 0
        computes_between: list[int] = [0]
        for bsym in trace.bound_symbols:
            if bsym.sym.name.startswith("zero_all_gather"):
                handles.add(bsym.output.name)
                assert len(handles) - ended <= max(1, prefetch)
                computes_between.append(0)
            elif is_wait(bsym) and bsym.args[0].name in handles:
                ended += 1
            elif not bsym.sym.name.startswith("zero_") and bsym.sym.id is not prims.PrimIDs.DEL:
                computes_between[-1] += 1
        assert len(handles) == ended > prefetch + 1
        assert sum(count > 0 for count in computes_between[1:]) > ended // 2
