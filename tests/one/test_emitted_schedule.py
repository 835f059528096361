"""The traces that run are proved too: if a line that Thunder emitted is dropped or changed, compilation fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thunder_zero as tz
from tests.harness.models import Mlp, fresh, sharded
from thunder_zero.transform import ZeroTransform

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag, from_trace

Lines = list[BoundSymbol]
Fault = Callable[[Lines], Lines]

POLICIES = [tz.DDP, tz.ZERO1, tz.ZERO2, tz.ZERO3]
UNBUCKETED = [replace(policy, bucket_bytes=0) for policy in (tz.DDP, tz.ZERO3)]  # each collective has a line of its own
X = torch.zeros(2, 7)


@pytest.fixture
def emit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``emit(fault, backward)`` plants a fault in one of the traces that Thunder hands to the transform at the end."""
    hook = ZeroTransform.transform_trace_post_optimization

    def plant(fault: Fault, backward: bool = True) -> None:
        def broken(self: ZeroTransform, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
            if (TraceTag.BACKWARD in trace.tags) is not backward:
                return hook(self, trace, **kwargs)
            new = from_trace(trace)
            new.bound_symbols = fault(list(trace.bound_symbols))
            assert list(map(id, new.bound_symbols)) != list(map(id, trace.bound_symbols))
            return hook(self, new, **kwargs)

        monkeypatch.setattr(ZeroTransform, "transform_trace_post_optimization", broken)

    return plant


def launch(lines: Lines, path: str) -> int:
    """Position of the line that starts to gather, or to reduce, this parameter by itself."""
    return next(at for at, line in enumerate(lines) if line.sym.name.startswith("zero_") and path in line.args[1:])


def wait(lines: Lines, path: str) -> int:
    handle = lines[launch(lines, path)].output.name
    return next(at for at, line in enumerate(lines) if line.sym.name == "zero_wait" and line.args[0].name == handle)


def names(line: BoundSymbol) -> set[str]:
    return {proxy.name for proxy in line.flat_proxy_args}


def without(lines: Lines, *positions: int) -> Lines:
    return [line for at, line in enumerate(lines) if at not in positions]


def returning(lines: Lines, swap: dict[str, Any]) -> Lines:
    """The lines with other gradients returned in place of those of these names."""
    *before, last = lines
    gradients = tuple(swap.get(grad.name, grad) if grad is not None else None for grad in last.args[0])
    return [*before, last.from_bsym(args=(gradients,))]


def lost_reduction(lines: Lines, path: str = "layers.1.weight") -> Lines:
    """The gradient is returned as it is on this rank."""
    start, end = launch(lines, path), wait(lines, path)
    full, mean = lines[start].args[0], lines[end].output
    return without(returning(lines, {mean.name: full}), start, end)


def lost_gradient(lines: Lines, path: str = "layers.1.weight") -> Lines:
    start, end = launch(lines, path), wait(lines, path)
    return without(returning(lines, {lines[end].output.name: None}), start, end)


def ignored_reduction(lines: Lines) -> Lines:
    full, mean = lines[launch(lines, "layers.1.weight")].args[0], lines[wait(lines, "layers.1.weight")].output
    return returning(lines, {mean.name: full})


def swapped_gradients(lines: Lines) -> Lines:
    one, two = (lines[wait(lines, path)].output for path in ("layers.0.weight", "layers.1.weight"))
    return returning(lines, {one.name: two, two.name: one})


def lost_wait(lines: Lines) -> Lines:
    end = wait(lines, "layers.1.weight")
    return without(returning(lines, {lines[end].output.name: None}), end)


def no_gradient_at_all(lines: Lines) -> Lines:
    grads = {grad.name: None for grad in lines[-1].args[0] if grad is not None}
    launches = [at for at, line in enumerate(lines) if line.sym.name in ("zero_all_reduce", "zero_reduce_scatter")]
    handles = {lines[at].output.name for at in launches}
    waits = [at for at, line in enumerate(lines) if handles & names(line)]
    return without(returning(lines, grads), *launches, *waits)


@pytest.mark.parametrize("policy", UNBUCKETED, ids=["ddp", "zero3"])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            lost_reduction,
            r"returns \w+ as the gradient of layers\.1\.weight, but no reduction of layers\.1\.weight writes it",
        ),
        (lost_gradient, r"backward returns no gradient of layers\.1\.weight, which is trained"),
        (ignored_reduction, r"returns \w+ as the gradient of layers\.1\.weight, but no reduction of layers\.1\.weight"),
        (swapped_gradients, r"returns \w+ as the gradient of layers\.0\.weight, but no reduction of layers\.0\.weight"),
        (lost_wait, r"\(reduce layers\.1\.weight\) is never waited for"),
        (no_gradient_at_all, r"backward returns no gradient of layers\.0\.bias, which is trained"),
    ],
)
def test_a_reduction_that_is_missing(policy: tz.Policy, fault: Fault, sentence: str, emit: Callable[..., None]) -> None:
    emit(fault)
    with pytest.raises(tz.ScheduleError, match=sentence):
        tz.trace(fresh(Mlp), X, policy=policy, world_size=2)


def test_a_reduction_of_the_wrong_kind(emit: Callable[..., None]) -> None:
    """An all-reduce would give the full mean where the optimizer has rows."""

    def fault(lines: Lines) -> Lines:
        at = launch(lines, "layers.1.weight")
        return [*lines[:at], lines[at].from_bsym(sym=replace(lines[at].sym, name="zero_all_reduce")), *lines[at + 1 :]]

    emit(fault)
    with pytest.raises(tz.ScheduleError, match=r"layers\.1\.weight with zero_all_reduce; .* needs zero_reduce_scatter"):
        tz.trace(fresh(Mlp), X, policy=replace(tz.ZERO2, bucket_bytes=0), world_size=2)


def test_a_reduction_that_is_missing_from_its_bucket(emit: Callable[..., None]) -> None:
    """The gradient of one of two parameters that travel together is returned for the other, too."""

    def fault(lines: Lines) -> Lines:
        first, second = next(line.output for line in lines if line.sym.name == "zero_wait_coalesced")[:2]
        return returning(lines, {first.name: second})

    emit(fault)
    with pytest.raises(tz.ScheduleError, match=r"as the gradient of layers\.\d\.\w+, but no reduction of layers"):
        tz.trace(fresh(Mlp), X, policy=tz.ZERO3, world_size=2)


class Twice(nn.Module):
    """One weight in the first and in the last of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_gradient_that_is_returned_under_both_names_of_a_tied_parameter(emit: Callable[..., None]) -> None:
    """torch would add them up."""
    inputs = [proxy.name for proxy in tz.trace(fresh(Twice), X, world_size=2).forward.args]
    one, two = (inputs.index(f"t_layers_{number}_weight") for number in (0, 2))

    def fault(lines: Lines) -> Lines:
        gradients = list(lines[-1].args[0])
        assert gradients[two] is None
        gradients[two] = gradients[one]
        return [*lines[:-1], lines[-1].from_bsym(args=(tuple(gradients),))]

    emit(fault)
    with pytest.raises(tz.ScheduleError, match=r"a second gradient of layers\.0\.weight, \w+, which torch would add"):
        tz.trace(fresh(Twice), X, world_size=2)


def lost_free(lines: Lines) -> Lines:
    full = lines[wait(lines, "layers.1.weight")].output.name
    at = next(at for at, line in enumerate(lines) if line.sym.id is prims.PrimIDs.DEL and full in names(line))
    left = [proxy for proxy in lines[at].flat_proxy_args if proxy.name != full]
    return [*lines[:at], lines[at].from_bsym(args=tuple(left)), *lines[at + 1 :]]


def lost_gather(lines: Lines) -> Lines:
    return without(lines, launch(lines, "layers.1.weight"), wait(lines, "layers.1.weight"))


def shard_in_its_place(lines: Lines) -> Lines:
    """The shard is read where the gathered parameter was."""
    start, end = launch(lines, "layers.1.weight"), wait(lines, "layers.1.weight")
    swap = {lines[end].output.name: lines[start].args[0]}

    def read_shard(line: BoundSymbol) -> BoundSymbol:
        args = [swap.get(arg.name, arg) if isinstance(arg, Proxy) else arg for arg in line.args]
        return line.from_bsym(args=tuple(args)) if line.sym.id is not prims.PrimIDs.DEL else line

    return [read_shard(line) for at, line in enumerate(lines) if at not in (start, end)]


@pytest.mark.parametrize("training", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (lost_free, r"gathers layers\.1\.weight as \w+, which is never freed|reads forward's"),
        (lost_gather, r"reads \w+, which is neither an input nor written by any operation"),
        (shard_in_its_place, r"reads t_layers_1_weight, the shard of layers\.1\.weight, not the gathered parameter"),
    ],
)
def test_forward_is_proved_with_backward_and_without(
    training: bool, fault: Fault, sentence: str, emit: Callable[..., None]
) -> None:
    policy = replace(tz.ZERO3, bucket_bytes=0, gather_last_units_once=False)
    emit(fault, False)
    with torch.set_grad_enabled(training), pytest.raises(tz.ScheduleError, match=sentence):
        tz.trace(fresh(Mlp), X, policy=policy, world_size=2)


@pytest.mark.parametrize("policy", POLICIES, ids=["ddp", "zero1", "zero2", "zero3"])
def test_frozen_parameters_and_an_input_that_wants_a_gradient(policy: tz.Policy) -> None:
    """Nothing is reduced, but there is a backward, which may read parameters that are gathered once."""
    result = tz.trace(fresh(Mlp).requires_grad_(False), X.clone().requires_grad_(), policy=policy, world_size=2)
    assert result.backward is not None
    assert result.timeline.gradients == ()
    assert not any(op.kind is tz.Kind.REDUCE for op in result.timeline.ops)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_forward_alone_gathers_nothing_once_after_a_step_that_does(alone: None) -> None:
    """Without a backward, a parameter that training gathers once is gathered for each unit."""
    model = sharded(fresh(Twice), replace(tz.ZERO3, gather_per_unit=True))
    model(X).sum().backward()
    once = tz.traces_of(model).plan.gathered_once
    with torch.no_grad():
        model(X)
    paths = [path for op in tz.traces_of(model).timeline.ops if op.kind is tz.Kind.GATHER for path in op.params]
    assert "layers.0.weight" in once
    assert tz.traces_of(model).plan.gathered_once == ()
    model(X).sum().backward()
    assert tz.traces_of(model).plan.gathered_once == once, "the program that ran last was compiled earlier"
    assert paths.count("layers.0.weight") == 2
