"""Compilation checks the traces that run: it fails if a line that Thunder emitted is dropped or changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import thunder_zero as tz
from tests.harness.errors import error_of
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.tiers import slow
from thunder_zero.schedule import Kind
from thunder_zero.traces import pipeline

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

Lines = list[BoundSymbol]
Fault = Callable[[Lines], Lines]

X = torch.zeros(2, 7)
WEIGHT = "layers.1.weight"


def broken(trace: TraceCtx, fault: Fault) -> TraceCtx:
    new = from_trace(trace)
    new.bound_symbols = fault(list(trace.bound_symbols))
    assert list(map(id, new.bound_symbols)) != list(map(id, trace.bound_symbols))
    return new


def require_refused(
    faults: Mapping[Fault, str],
    policy: tz.Policy,
    *,
    model: Callable[[], nn.Module] = Mlp,
    phase: int = -1,
    training: bool = True,
) -> None:
    """Compile once, and require that the check refuses each fault, planted in a trace.

    Args:
        faults: functions that plant a fault -> words of its error.
        phase: index of the trace that has the faults: the first or the last.
        training: True if there is a backward.
    """
    prove, counts = pipeline.prove, []

    def proved(scheduled: pipeline.Scheduled, *traces: TraceCtx | None) -> None:
        present = [trace for trace in traces if trace is not None]
        counts.append(len(present))
        for fault, words in faults.items():
            phases = list(present)
            phases[phase] = broken(phases[phase], fault)
            error = error_of(lambda phases=phases: prove(scheduled, *phases))  # type: ignore[misc]
            assert re.search(f"ScheduleError: .*{words}", error), (words, error)
        prove(scheduled, *traces)

    with torch.set_grad_enabled(training), mock.patch.object(pipeline, "prove", proved):
        tz.trace(fresh(model), X, policy=policy, world_size=2)
    assert counts == [1 + training]


def phases(lines: Lines, path: str = WEIGHT) -> tuple[int, int]:
    """Return the indices of the launch and the wait of the collective that carries only this parameter."""
    start = next(
        index for index, line in enumerate(lines) if line.sym.name.startswith("zero_") and path in line.args[1:]
    )
    handle = lines[start].output.name
    ends = (index for index, line in enumerate(lines) if line.sym.name == "zero_wait" and line.args[0].name == handle)
    return start, next(ends)


def names(line: BoundSymbol) -> set[str]:
    return {proxy.name for proxy in line.flat_proxy_args}


def without(lines: Lines, *positions: int) -> Lines:
    return [line for index, line in enumerate(lines) if index not in positions]


def returning(lines: Lines, swap: dict[str, Any]) -> Lines:
    """Replace returned gradients, by name."""
    *before, last = lines
    gradients = tuple(swap.get(grad.name, grad) if grad is not None else None for grad in last.args[0])
    return [*before, last.from_bsym(args=(gradients,))]


def unreduced(lines: Lines) -> Lines:
    """Return the gradient of this rank without a reduction."""
    start, end = phases(lines)
    return returning(lines, {lines[end].output.name: lines[start].args[0]})


def no_gradient(lines: Lines) -> Lines:
    return returning(lines, {lines[phases(lines)[1]].output.name: None})


def wrong_kind(lines: Lines) -> Lines:
    """Reduce with an all-reduce, which returns the full mean although the optimizer has rows."""
    index, _ = phases(lines)
    return [
        *lines[:index],
        lines[index].from_bsym(sym=replace(lines[index].sym, name="zero_all_reduce")),
        *lines[index + 1 :],
    ]


def missing_from_its_bucket(lines: Lines) -> Lines:
    """Return the gradient of one parameter of a bucket for another parameter as well."""
    first, second = next(line.output for line in lines if line.sym.name == "zero_wait_coalesced")[:2]
    return returning(lines, {first.name: second})


NO_REDUCTION = r"returns \w+ as the gradient of layers\.1\.weight, but no reduction of layers\.1\.weight writes it"
IN_BACKWARD: dict[Fault, str] = {
    unreduced: NO_REDUCTION,
    lambda lines: without(no_gradient(lines), *phases(lines)): r"no gradient of layers\.1\.weight, which is trained",
    lambda lines: without(no_gradient(lines), phases(lines)[1]): r"\(reduce layers\.1\.weight\) is never waited for",
}


def test_a_missing_or_wrong_reduction_is_refused() -> None:
    require_refused(IN_BACKWARD, replace(tz.DDP, bucket_bytes=0))
    wrong_collective: dict[Fault, str] = {
        wrong_kind: r"layers\.1\.weight with zero_all_reduce; .* needs zero_reduce_scatter"
    }
    require_refused({**IN_BACKWARD, **wrong_collective}, replace(tz.ZERO3, bucket_bytes=0))
    lost_from_bucket: dict[Fault, str] = {
        missing_from_its_bucket: r"as the gradient of layers\.\d\.\w+, but no reduction of layers"
    }
    require_refused(lost_from_bucket, tz.ZERO3)


def tied() -> nn.Module:
    """Return a model with one weight in the first and in the last of three layers."""
    layers = [nn.Linear(7, 7) for _ in range(3)]
    layers[2].weight = layers[0].weight
    return nn.Sequential(*layers)


def lost_free(lines: Lines) -> Lines:
    full = lines[phases(lines)[1]].output.name
    index = next(index for index, line in enumerate(lines) if line.sym.id is prims.PrimIDs.DEL and full in names(line))
    kept = [proxy for proxy in lines[index].flat_proxy_args if proxy.name != full]
    return [*lines[:index], lines[index].from_bsym(args=tuple(kept)), *lines[index + 1 :]]


def read_shard_instead(lines: Lines) -> Lines:
    """Read the shard instead of the gathered parameter."""
    start, end = phases(lines)
    swap = {lines[end].output.name: lines[start].args[0]}

    def read_shard(line: BoundSymbol) -> BoundSymbol:
        args = [swap.get(arg.name, arg) if isinstance(arg, Proxy) else arg for arg in line.args]
        return line.from_bsym(args=tuple(args)) if line.sym.id is not prims.PrimIDs.DEL else line

    return [read_shard(line) for index, line in enumerate(lines) if index not in (start, end)]


def coded(lines: Lines) -> dict[str, int]:
    """Return the indices of the lines that encode, send, await and decode a parameter, by their symbols."""
    local = ((index, line) for index, line in enumerate(lines) if line.sym.name.startswith("zero_"))
    positions = {line.sym.name: index for index, line in local if WEIGHT in line.args[1:]}
    return positions | {"zero_wait": phases(lines[positions["zero_all_gather"] :])[1] + positions["zero_all_gather"]}


def reading(lines: Lines, index: int, *args: Any) -> Lines:
    return [*lines[:index], lines[index].from_bsym(args=args), *lines[index + 1 :]]


def sent_without_encoding(lines: Lines) -> Lines:
    index = coded(lines)
    return without(
        reading(lines, index["zero_all_gather"], lines[index["zero_encode"]].args[0], WEIGHT), index["zero_encode"]
    )


def read_without_decoding(lines: Lines) -> Lines:
    index = coded(lines)
    full, payload = (lines[index[name]].output for name in ("zero_decode", "zero_wait"))
    reader = next(
        number for number, line in enumerate(lines) if number > index["zero_decode"] and full.name in names(line)
    )
    args = (payload if isinstance(arg, Proxy) and arg.name == full.name else arg for arg in lines[reader].args)
    return without(reading(lines, reader, *args), index["zero_decode"])


def decoded_twice(lines: Lines) -> Lines:
    index = coded(lines)["zero_decode"]
    return [*lines[: index + 1], lines[index], *lines[index + 1 :]]


def never_sent(lines: Lines) -> Lines:
    index = coded(lines)
    return without(lines, index["zero_all_gather"], index["zero_wait"], index["zero_decode"])


def test_wrong_lines_that_encode_and_decode_are_refused() -> None:
    faults: dict[Fault, str] = {
        sent_without_encoding: r"sends layers\.1\.weight; the plan sends what zero_encode makes of it",
        lambda lines: reading(
            lines, coded(lines)["zero_encode"], lines[coded(lines)["zero_encode"]].args[0], "layers.0.weight"
        ): r"sends layers\.1\.weight; the plan sends what zero_encode makes of it",
        read_without_decoding: r"reads \w+, which is coded",
        decoded_twice: r"decodes \w+, which has not just arrived",
        never_sent: r"encodes layers\.1\.weight, which no launch sends",
    }
    policy = replace(tz.ZERO3, bucket_bytes=0, gather_format=tz.Int8(16), reshard_after_forward=True)
    require_refused(faults, policy, phase=0)


@pytest.mark.parametrize("training", [True, False], ids=["training", "no_grad"])
def test_forward_is_checked_with_and_without_backward(training: bool) -> None:
    faults: dict[Fault, str] = {
        lost_free: r"(gathers layers\.1\.weight as \w+, which is never freed|reads forward's)",
        lambda lines: without(
            lines, *phases(lines)
        ): r"reads \w+, which is neither an input nor written by any operation",
        read_shard_instead: r"reads t_layers_1_weight, the shard of layers\.1\.weight, not the gathered parameter",
    }
    policy = replace(tz.ZERO3, bucket_bytes=0, reshard_after_forward=True)
    require_refused(faults, policy, phase=0, training=training)


@pytest.mark.parametrize("policy", [tz.ZERO3, *slow(tz.DDP, tz.ZERO2)])
def test_frozen_parameters_have_a_backward_without_reductions_if_an_input_needs_a_gradient(policy: tz.Policy) -> None:
    x = X.clone().requires_grad_()
    result = tz.trace(fresh(Mlp).requires_grad_(False), x, policy=policy, world_size=2)
    assert result.backward is not None
    assert result.timeline.gradients == ()
    assert not any(op.kind is Kind.REDUCE for op in result.timeline.ops)


@pytest.mark.usefixtures("group")
def test_inference_gathers_for_each_unit_even_if_training_gathers_once() -> None:
    model = sharded(fresh(tied), replace(tz.ZERO3, gather_per_unit=True))
    model(X).sum().backward()
    kept = tz.traces_of(model).plan.kept_unsharded
    with torch.no_grad():
        model(X)
    paths = [path for op in tz.traces_of(model).timeline.ops if op.kind is Kind.GATHER for path in op.params]
    assert "0.weight" in kept
    assert tz.traces_of(model).plan.kept_unsharded == ()
    model(X).sum().backward()
    assert tz.traces_of(model).plan.kept_unsharded == kept, "the last program was compiled in the first step"
    assert paths.count("0.weight") == 2
