"""The traces that run are the proved operations, one after another; planted faults are refused by the proof or seen by
the reader of traces.

====================================  =========================================================================
a fault                               is found by
====================================  =========================================================================
of operations (:data:`OF_OPERATIONS`)  ``verify.check``, which each compilation calls
of lines (:data:`OF_LINES`)            the reader (``tests/harness/read_traces.py``) alone: the package proves no lines
====================================  =========================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thunder_zero as tz
from tests.harness.errors import error_of
from tests.harness.models import LENGTH, WIDTH, Block, GptShape, Mlp, Patterns, Small, Zoo, fresh, sharded
from tests.harness.read_traces import require_written
from tests.harness.tiers import deep, slow
from tests.harness.traced import traced
from thunder_zero.schedule import Free, Gather, Op, Reduce, Return, Timeline, Wait, check, ends
from thunder_zero.schedule.ops import Compute, Exchange, Launch, reading

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import from_trace

TOKENS, FLOATS = ((2, LENGTH), torch.int64), torch.float32
MODELS: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {  # Halves is two graphs
    **dict.fromkeys((GptShape, Patterns, Small), TOKENS),
    **{Zoo: ((4, 9), FLOATS), Mlp: ((2, 7), FLOATS), Block: ((2, LENGTH, WIDTH), FLOATS)},
}
FREED = replace(tz.ZERO3, bucket_bytes=0, reshard_after_forward=True)
INT8 = replace(tz.ZERO3, gather_format=tz.Int8(16), reduce_format=tz.Int8(16))
UNITS = replace(FREED, gather_per_unit=True, recompute="units")
CHECKED = replace(tz.ZERO3, cpu_offload=True, check_gradients=True)
POLICIES = (tz.DDP, tz.ZERO1, tz.ZERO2, tz.ZERO3, FREED, INT8, UNITS, CHECKED)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"replicas": 2}, {"synced": False}, {"fused": True})
PAIRS = [  # each two of a model, a policy and an option occur together
    (model, policy, OPTIONS[(row + column) % len(OPTIONS)])
    for row, model in enumerate(MODELS)
    for column, policy in enumerate(POLICIES)
]
TRIPLES = [(model, policy, options) for model in MODELS for policy in POLICIES for options in OPTIONS]


@pytest.mark.parametrize(
    ("model", "policy", "options"),
    [
        (Mlp, tz.DDP, {}),
        (Mlp, tz.ZERO1, {"synced": False}),
        (Mlp, replace(INT8, bucket_bytes=0), {"replicas": 2}),
        (Mlp, replace(INT8, shares=(1, 2, 3, 4)), {"replicas": 2}),
        (Small, CHECKED, {"fused": True}),
        (Small, UNITS, {"replicas": 2}),
        *slow(*PAIRS),
        *deep(*TRIPLES),
    ],
)
def test_each_operation_is_written(model: Any, policy: tz.Policy, options: dict[str, Any]) -> None:
    shape, dtype = MODELS[model]
    require_written(traced(model, shape, policy, dtype=dtype, **options))


class Heads(nn.Module):
    """A frozen layer and two outputs, one of which reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return (y := self.a(x)), torch.sin(self.b(x) * y)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (replace(FREED, frozen_format=tz.NF4()), {}),
        *slow(*((policy, options) for policy in POLICIES for options in OPTIONS)),
    ],
)
def test_a_backward_without_some_tangents_is_written(policy: tz.Policy, options: dict[str, Any]) -> None:
    traces = traced(Heads, (2, 16), policy, **options)
    require_written(traces)
    for tangent in sorted(traces.timeline.tangents):
        pruned = traces.without([tangent])
        assert pruned.timeline.tangents == traces.timeline.tangents - {tangent}
        require_written(pruned)


@pytest.mark.parametrize("policy", [INT8, *slow(*POLICIES)])
def test_forward_alone_is_written(policy: tz.Policy) -> None:
    with torch.no_grad():
        traces = tz.trace(fresh(Mlp), torch.zeros(2, 7), policy=policy, world_size=2)
    assert traces.backward is None
    require_written(traces)


@pytest.mark.parametrize(("policy", "options"), [(tz.ZERO3, {}), *slow((INT8, {}), (tz.ZERO2, {"synced": False}))])
def test_slices_are_written(policy: tz.Policy, options: dict[str, Any]) -> None:
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    with torch.device("meta"):
        module, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.empty(2, 8)
    with tz.tools.fake_mesh((2, 2)) as mesh:
        traces = tz.trace(parallelize_module(module, mesh["tp"], styles), x, policy=policy, mesh=mesh, **options)
    assert any(isinstance(op, Compute) and isinstance(op.work, Exchange) for op in traces.timeline.ops)
    require_written(traces)


# Faults of operations

WEIGHT = "layers.1.weight"
Change = Callable[[Timeline], Timeline]


def pair(t: Timeline, kind: type[Launch] = Reduce) -> tuple[Launch, Wait]:
    """Return the launch and the wait of the collective that carries only one parameter."""
    return next((op.launch, op) for op in t.ops if ends(op, kind) and op.params == (WEIGHT,))


def without(t: Timeline, *ops: Op) -> Timeline:
    return t.with_ops(op for op in t.ops if op not in ops)


def returning(t: Timeline, swap: dict[str, str | None]) -> Timeline:
    """Replace returned gradients. None returns no gradient."""
    *ops, end = t.ops
    assert isinstance(end, Return)
    results = tuple(swap.get(name or "", name) for name in end.results)
    pairs = ((path, swap.get(name, name)) for path, name in t.gradients)
    gradients = tuple((path, name) for path, name in pairs if name is not None)
    return replace(t.with_ops([*ops, replace(end, results=results)]), gradients=gradients)


def unreduced(t: Timeline) -> Timeline:
    launch, wait = pair(t)
    return returning(t, {wait.writes[0]: launch.reads[0]})


def lost_reduction(t: Timeline) -> Timeline:
    return returning(without(t, *pair(t)), {pair(t)[1].writes[0]: None})


def lost_wait(t: Timeline) -> Timeline:
    return returning(without(t, pair(t)[1]), {pair(t)[1].writes[0]: None})


def missing_from_its_bucket(t: Timeline) -> Timeline:
    """Return the gradient of one parameter of a bucket for another parameter as well."""
    first, second = next(op.writes for op in t.ops if ends(op, Reduce) and len(op.writes) > 1)[:2]
    return returning(t, {first: second})


def lost_free(t: Timeline) -> Timeline:
    return without(t, next(op for op in t.ops if isinstance(op, Free) and WEIGHT in op.params))


def lost_gather(t: Timeline) -> Timeline:
    return without(t, *pair(t, Gather))


def read_shard_instead(t: Timeline) -> Timeline:
    """Read the shard instead of the gathered parameter."""
    launch, wait = pair(t, Gather)
    reader = next(op for op in t.ops if wait.writes[0] in op.reads)
    instead = reading(reader, {wait.writes[0]: launch.reads[0]})
    return lost_gather(t.with_ops(instead if op is reader else op for op in t.ops))


NO_REDUCTION = r"returns \w+ as the gradient of layers\.\d\.\w+, but no reduction of layers\.\d\.\w+ writes it"
OF_OPERATIONS: list[tuple[Change, str]] = [
    (unreduced, NO_REDUCTION),
    (lost_reduction, r"no gradient of layers\.1\.weight, which is trained"),
    (lost_wait, r"\(reduce layers\.1\.weight\) is never waited for"),
    (lost_free, r"gathers layers\.1\.weight as \w+, which is never freed"),
    (lost_gather, r"reads \w+, which is neither an input nor written by any operation"),
    (read_shard_instead, r"reads t_layers_1_weight, the shard of layers\.1\.weight, not the gathered parameter"),
]


def require_refused(timeline: Timeline, plant: Change, words: str) -> None:
    trained = [path for path, _ in timeline.gradients]
    check(timeline, trained)
    error = error_of(lambda: check(plant(timeline), trained))
    assert re.search(f"ScheduleError: .*{words}", error), (words, error)


@pytest.mark.parametrize(("plant", "words"), OF_OPERATIONS)
def test_faults_of_operations_are_refused(plant: Change, words: str) -> None:
    require_refused(traced(Mlp, (2, 7), FREED).timeline, plant, words)
    reductions = (unreduced, lost_reduction, lost_wait)
    if plant in reductions:
        require_refused(traced(Mlp, (2, 7), replace(tz.DDP, bucket_bytes=0)).timeline, plant, words)
    else:
        with torch.no_grad():
            inference = tz.trace(fresh(Mlp), torch.zeros(2, 7), policy=FREED, world_size=2)
        require_refused(inference.timeline, plant, words)


def test_a_gradient_that_is_missing_from_its_bucket_is_refused() -> None:
    require_refused(traced(Mlp, (2, 7)).timeline, missing_from_its_bucket, NO_REDUCTION)


# Faults of lines

Lines = list[BoundSymbol]
Fault = Callable[[Lines], Lines]


def ours(lines: Lines, launch: str = "zero_all_gather") -> dict[str, int]:
    """Return the indices of the lines of the collective that carries only one parameter, by their symbols."""
    local = ((index, line) for index, line in enumerate(lines) if line.sym.name.startswith("zero_"))
    positions = {line.sym.name: index for index, line in local if WEIGHT in line.args[1:]}
    handle = lines[positions[launch]].output.name
    waits = (index for index, line in enumerate(lines) if line.sym.name == "zero_wait" and names(line) == {handle})
    return {**positions, "launch": positions[launch], "zero_wait": next(waits)}


def names(line: BoundSymbol) -> set[str]:
    return {proxy.name for proxy in line.flat_proxy_args}


def drop(lines: Lines, *positions: int) -> Lines:
    return [line for index, line in enumerate(lines) if index not in positions]


def calling(lines: Lines, index: int, *args: Any) -> Lines:
    return [*lines[:index], lines[index].from_bsym(args=args), *lines[index + 1 :]]


def wrong_kind(lines: Lines) -> Lines:
    """Reduce with an all-reduce, which returns the full mean although the optimizer has rows."""
    index = ours(lines, "zero_reduce_scatter")["launch"]
    wrong = replace(lines[index].sym, name="zero_all_reduce")
    return [*lines[:index], lines[index].from_bsym(sym=wrong), *lines[index + 1 :]]


def returned_unreduced(lines: Lines) -> Lines:
    index = ours(lines, "zero_reduce_scatter")
    mean, local = lines[index["zero_wait"]].output.name, lines[index["launch"]].args[0]
    grads = tuple(local if grad is not None and grad.name == mean else grad for grad in lines[-1].args[0])
    return calling(lines, len(lines) - 1, grads)


def sent_without_encoding(lines: Lines) -> Lines:
    index = ours(lines)
    tensor = lines[index["zero_encode"]].args[0]
    return drop(calling(lines, index["launch"], tensor, WEIGHT), index["zero_encode"])


def encoded_as_another(lines: Lines) -> Lines:
    index = ours(lines)["zero_encode"]
    return calling(lines, index, lines[index].args[0], "layers.0.weight")


def read_without_decoding(lines: Lines) -> Lines:
    index = ours(lines)
    full, payload = (lines[index[name]].output for name in ("zero_decode", "zero_wait"))
    after = range(index["zero_decode"] + 1, len(lines))
    reader = next(number for number in after if full.name in names(lines[number]))
    args = (payload if isinstance(arg, Proxy) and arg.name == full.name else arg for arg in lines[reader].args)
    return drop(calling(lines, reader, *args), index["zero_decode"])


def decoded_twice(lines: Lines) -> Lines:
    index = ours(lines)["zero_decode"]
    return [*lines[: index + 1], *lines[index:]]


def never_sent(lines: Lines) -> Lines:
    index = ours(lines)
    return drop(lines, index["launch"], index["zero_wait"], index["zero_decode"])


def kept(lines: Lines, name: str) -> Lines:
    """Drop the line that deletes only this value."""
    (index,) = (index for index, line in enumerate(lines) if line.sym.id is prims.PrimIDs.DEL and names(line) == {name})
    return drop(lines, index)


def kept_handle(lines: Lines) -> Lines:
    return kept(lines, lines[ours(lines)["launch"]].output.name)


def kept_payload(lines: Lines) -> Lines:
    return kept(lines, lines[ours(lines)["zero_encode"]].output.name)


def lost_computation(lines: Lines) -> Lines:
    (index,) = [index for index, line in enumerate(lines) if line.sym.name == "tanh"][:1]
    return drop(lines, index)


def not_entered(lines: Lines) -> Lines:
    return [line for line in lines if line.sym.name != "zero_enter"]


ENCODED = r"sends layers\.1\.weight; the plan sends what zero_encode makes of it"
OF_LINES: list[tuple[str, Fault, str]] = [
    ("backward", wrong_kind, r"layers\.1\.weight.* with zero_all_reduce; the plan needs zero_reduce_scatter"),
    ("backward", returned_unreduced, r"returns the gradients"),
    ("forward", sent_without_encoding, ENCODED),
    ("forward", encoded_as_another, ENCODED),
    ("forward", read_without_decoding, r"reads \w+, which is coded"),
    ("forward", decoded_twice, r"decodes \w+, which has not just arrived"),
    ("forward", never_sent, r"encodes \['layers\.1\.weight'\], which no launch sends"),
    ("forward", kept_handle, "no line deletes"),
    ("forward", kept_payload, "no line deletes"),
    ("forward", lost_computation, "the timeline has"),
    ("forward", not_entered, "launches before zero_enter"),
]


@pytest.mark.parametrize(("phase", "plant", "words"), OF_LINES)
def test_faults_of_lines_are_seen(phase: str, plant: Fault, words: str) -> None:
    traces = traced(Mlp, (2, 7), replace(FREED, gather_format=tz.Int8(16)))
    trace = getattr(traces, phase)
    bad = from_trace(trace)
    bad.bound_symbols = plant(list(trace.bound_symbols))
    error = error_of(lambda: require_written(replace(traces, **{phase: bad})))
    assert re.search(f"AssertionError: .*{words}", error), (words, error)


@pytest.mark.parametrize("policy", [tz.ZERO3, *slow(tz.DDP, tz.ZERO2)])
def test_frozen_parameters_have_a_backward_without_reductions_if_an_input_needs_a_gradient(policy: tz.Policy) -> None:
    x = torch.zeros(2, 7, requires_grad=True)
    result = tz.trace(fresh(Mlp).requires_grad_(False), x, policy=policy, world_size=2)
    assert result.backward is not None
    assert result.timeline.gradients == ()
    assert not any(isinstance(op, Reduce) for op in result.timeline.ops)
    require_written(result)


def tied() -> nn.Module:
    """Return a model with one weight in the first and in the last of three layers."""
    layers = [nn.Linear(7, 7) for _ in range(3)]
    layers[2].weight = layers[0].weight
    return nn.Sequential(*layers)


@pytest.mark.usefixtures("group")
def test_inference_gathers_for_each_unit_even_if_training_gathers_once() -> None:
    model, x = sharded(fresh(tied), replace(tz.ZERO3, gather_per_unit=True)), torch.zeros(2, 7)
    model(x).sum().backward()
    kept = tz.traces_of(model).plan.kept_unsharded
    with torch.no_grad():
        model(x)
    paths = [path for op in tz.traces_of(model).timeline.ops if isinstance(op, Gather) for path in op.params]
    assert "0.weight" in kept
    assert tz.traces_of(model).plan.kept_unsharded == ()
    model(x).sum().backward()
    assert tz.traces_of(model).plan.kept_unsharded == kept, "the last program was compiled in the first step"
    assert paths.count("0.weight") == 2
