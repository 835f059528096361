"""The ways in are the same thing, and every field of the policy changes something that can be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import raised
from thunder_zero import Kind, Op, Policy, Traces
from thunder_zero.comm.transport import Alone
from thunder_zero.plan import make_plan
from thunder_zero.policy import RECOMPUTE
from thunder_zero.runtime import registry
from thunder_zero.runtime.sharded_model import sharded_model

import thunder


class Net(nn.Module):
    """Four equal layers, each a unit; the last one shares the first one's weight. A buffer; 4 x 7 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(4)])
        self.layers[3].weight = self.layers[0].weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


X = torch.linspace(-1, 1, 14).view(2, 7)
ROW_BYTES = 7 * 4


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module, plugins: Any) -> Any:
    return thunder.compile(module, plugins=plugins, recipe=tz.Recipe())


WAYS: dict[str, Callable[[nn.Module, int], Any]] = {
    "transform": lambda module, stage: thunder.jit(module, transforms=[tz.ZeroTransform(stage=stage)]),
    "zero": lambda module, stage: tz.zero(thunder.jit(module), stage=stage),
    "plugin": lambda module, stage: compiled(module, [tz.Zero(stage=stage)]),
    "plugin's name": lambda module, stage: compiled(module, f"zero{stage}"),
}


def train(model: Any, steps: int = 3) -> list[Tensor]:
    """Losses and what is trained, after some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(param.detach() for param in model.parameters())]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_ways_in_are_the_same(stage: int) -> None:
    torch.manual_seed(0)
    module = Net()
    expected = train(deepcopy(module))
    for way, make in WAYS.items():
        model = make(deepcopy(module), stage)
        for ours, theirs in zip(train(model), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=way)
        assert tz.traces_of(model).plan.policy == Policy(stage=stage), way
        assert tz.full_state_dict(model).keys() == module.state_dict().keys(), way


def fill(module: nn.Module) -> None:
    """What reset_parameters does not write: the buffer."""
    if isinstance(module, Net):
        module.scale.fill_(2.0)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("with_weights", [False, True])
def test_all_ways_in_take_a_module_on_the_meta_device(with_weights: bool) -> None:
    torch.manual_seed(0)
    module = Net()
    fill(module)
    arguments: dict[str, Any] = {"weights": module.state_dict()} if with_weights else {"init": fill}
    for make in (
        lambda meta: thunder.jit(meta, transforms=[tz.ZeroTransform(**arguments)]),
        lambda meta: tz.zero(thunder.jit(meta), **arguments),
        lambda meta: compiled(meta, [tz.Zero(**arguments)]),
    ):
        torch.manual_seed(0)
        with torch.device("meta"):
            meta = Net()
        model = make(meta)  # type: ignore[no-untyped-call]
        assert torch.equal(model(X), module(X))
        values = tz.full_state_dict(model)
        assert [name for name, value in module.state_dict().items() if not torch.equal(value, values[name])] == []


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "make",
    [
        lambda *a, **k: thunder.jit(Net(), transforms=[tz.ZeroTransform(*a, **k)]),
        lambda *a, **k: tz.zero(thunder.jit(Net()), *a, **k),
        lambda *a, **k: compiled(Net(), tz.Zero(*a, **k)),
        lambda *a, **k: compiled(Net(), [tz.Zero(*a, **k)]),
    ],
    ids=["transform", "zero", "plugin", "plugins"],
)
@pytest.mark.parametrize(
    ("args", "kwargs", "policy"),
    [
        ((), {}, tz.ZERO3),
        ((tz.ZERO2,), {}, tz.ZERO2),
        ((), {"policy": tz.DDP}, tz.DDP),
        ((0,), {}, tz.DDP),
        ((), {"stage": 1}, tz.ZERO1),
        ((tz.ZERO2,), {"stage": 2}, tz.ZERO2),
        ((tz.ZERO1,), {"bucket_bytes": 5, "prefetch": 0}, Policy(1, bucket_bytes=5, prefetch=0)),
        ((), {"stage": 2, "check_gradients": True}, Policy(2, check_gradients=True)),
        ((replace(tz.ZERO2, bucket_bytes=8),), {}, Policy(2, bucket_bytes=8)),
    ],
)
def test_the_policy_that_is_meant(make: Callable[..., Any], args: Any, kwargs: Any, policy: Policy) -> None:
    assert sharded_model(make(*args, **kwargs)).state.plan.policy == policy


def test_the_ready_made_policies() -> None:
    assert [policy.stage for policy in (tz.DDP, tz.ZERO1, tz.ZERO2, tz.ZERO3)] == [0, 1, 2, 3]
    assert Policy(stage=2) == tz.ZERO2
    changed = replace(tz.ZERO2, bucket_bytes=123)
    assert (changed.stage, changed.bucket_bytes) == (2, 123)
    assert tz.ZERO2.bucket_bytes == Policy().bucket_bytes
    with pytest.raises(ValueError, match="bucket_bytes is -1"):
        replace(tz.ZERO2, bucket_bytes=-1)


@pytest.mark.usefixtures("group")
def test_one_recipe_and_one_plugin_for_two_modules() -> None:
    """Thunder's recipes keep their plugins: the second module must get its own, and only that."""
    recipe = tz.Recipe()
    torch.manual_seed(0)
    module = Net()
    expected = train(deepcopy(module))
    first = thunder.compile(deepcopy(module), plugins="zero1", recipe=recipe)
    plugin = tz.Zero(stage=2)
    second = thunder.compile(deepcopy(module), plugins=[plugin], recipe=recipe)
    third = thunder.compile(deepcopy(module), plugins=[plugin], recipe=tz.Recipe())
    for model, stage in ((first, 1), (second, 2), (third, 2), (first, 1)):
        model(X)
        assert tz.traces_of(model).plan.policy.stage == stage
    for model in (first, second, third):
        torch.testing.assert_close(train(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("group")
def test_the_recipe_brings_thunders_default_executors() -> None:
    model = compiled(Net(), "zero2")
    names = [executor.name for executor in thunder.compile_data(model).executors_list if executor is not None]
    defaults = [executor.name for executor in thunder.get_default_executors()]
    assert [name for name in names if name in defaults] == defaults


# Every field of the policy.


def traced(policy: Policy, world_size: int = 4) -> Traces:
    return tz.trace(Net(), X, policy=policy, world_size=world_size)


def launches(traces: Traces, kind: Kind, backward: bool = False) -> list[tuple[str, ...]]:
    """The parameters of each launch."""
    return [op.params for op in traces.timeline.ops if op.kind is kind and op.backward is backward]


def most_ahead(traces: Traces) -> int:
    """The most gathers that are under way while a line of forward computes."""
    flying, most = 0, 0
    for op in traces.forward_timeline.ops:
        flying += (op.kind is Kind.GATHER) - (op.kind is Kind.WAIT)
        if op.kind is Kind.COMPUTE:
            most = max(most, flying)
    return most


def stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gathered, and when again."""
    counts = []
    for policy in (tz.DDP, tz.ZERO1, tz.ZERO2, replace(tz.ZERO3, gather_last_units_once=False)):
        traces = traced(policy)
        counts.append([len(launches(traces, Kind.GATHER, backward)) for backward in (False, True)])
    # seven parameters in four units; ZeRO-3 gathers again what backward reads: three weights, in three units
    assert counts == [[0, 0], [4, 0], [4, 0], [4, 3]]
    collectives = {op.split("(")[0] for op in str(traced(tz.DDP).backward).split() if op.startswith("zero_all_reduce")}
    assert collectives, "DDP all-reduces"
    assert "zero_reduce_scatter" in str(traced(tz.ZERO1).backward)


def unit_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """What travels together."""
    assert traced(tz.ZERO2).plan.units == ("layers.0", "layers.1", "layers.2", "layers.3")
    one = traced(replace(tz.ZERO2, unit_of=lambda module: ()))
    assert one.plan.units == ("",)
    assert len(launches(one, Kind.GATHER)) == 1
    assert len(launches(one, Kind.REDUCE, backward=True)) == 1


def ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the plan, and travels; what it trains to: tests/ranks/test_excluded_parameters.py."""
    result = traced(replace(tz.ZERO2, ignored=("layers.1", "layers.2.bias")))
    planned = {param.path for param in result.plan.params}
    assert planned == {"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.3.bias"}
    for kind, backward in ((Kind.GATHER, False), (Kind.REDUCE, True)):
        assert {path for paths in launches(result, kind, backward=backward) for path in paths} == planned


def replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sharded: patterns fit paths of parameters, and of submodules with all of theirs."""
    params = traced(replace(tz.ZERO2, replicated=("*.bias", "layers.1"))).plan.params
    assert {param.path for param in params if not param.sharded} == {"layers.0.bias", "layers.1.weight"} | {
        f"layers.{number}.bias" for number in (1, 2, 3)
    }


def replicate_below_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sharded: here weights only, and from one byte more not even those."""
    for limit, is_sharded in ((7 * ROW_BYTES, {"weight"}), (7 * ROW_BYTES + 1, set())):
        params = traced(replace(tz.ZERO2, replicate_below_bytes=limit)).plan.params
        assert {param.path.rpartition(".")[2] for param in params if param.sharded} == is_sharded


def mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which dtypes parameters and gradients travel; what it trains to: tests/ranks/test_mixed_precision.py."""
    kept = {"layers.1": tz.MixedPrecision(torch.bfloat16, torch.float64)}
    result = traced(replace(tz.ZERO2, mixed_precision=tz.MixedPrecision(torch.bfloat16, overrides=kept)))
    dtypes = {param.path: (param.dtype, param.compute_dtype, param.reduce_dtype) for param in result.plan.params}
    assert dtypes["layers.0.weight"] == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert dtypes["layers.1.weight"] == (torch.float32, torch.bfloat16, torch.float64)
    gathers, reductions = (
        {op.params[0]: result.timeline.bytes_sent(op) for op in result.timeline.ops if op.kind is kind}
        for kind in (Kind.GATHER, Kind.REDUCE)
    )
    own, others = 2 * (7 + 1), 5 * (7 + 1)  # elements of rank 0's two of seven rows, weight and bias, and of the rest
    assert (gathers["layers.2.weight"], gathers["layers.1.weight"]) == (3 * own * 2, 3 * own * 2)
    assert {path: sent for path, sent in reductions.items() if path.startswith(("layers.2", "layers.1"))} == {
        "layers.2.bias": others * 2,
        "layers.1.bias": others * 8,
    }


def bucket_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much of a unit is launched at once; 0 is each parameter by itself."""
    together = launches(traced(tz.ZERO2), Kind.GATHER)
    assert Counter(map(len, together)) == {2: 3, 1: 1}
    alone = launches(traced(replace(tz.ZERO2, bucket_bytes=0)), Kind.GATHER)
    assert Counter(map(len, alone)) == {1: 7}
    weight = 7 * ROW_BYTES  # a weight and its bias are more than this
    assert launches(traced(replace(tz.ZERO2, bucket_bytes=weight)), Kind.GATHER) == alone


def prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many buckets are under way while an earlier one computes."""
    assert [most_ahead(traced(replace(tz.ZERO3, prefetch=buckets))) for buckets in (0, 1, 2, 3)] == [0, 1, 2, 3]


def in_flight_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many bytes are under way."""
    unit = 8 * ROW_BYTES  # a weight and its bias
    policies = [replace(tz.ZERO3, prefetch=3, in_flight_bytes=size) for size in (0, unit, 2 * unit, 9 * unit)]
    assert [most_ahead(traced(policy)) for policy in policies] == [0, 1, 2, 3]


def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """How late a gather may start; ``prefetch`` has no say then."""
    seconds = {f"layers.{number}.{name}": 1.0 for number in range(4) for name in ("weight", "bias")}
    measured = [tz.Times(seconds, seconds, bytes_per_second) for bytes_per_second in (1e9, 1.0)]
    assert [most_ahead(traced(replace(tz.ZERO3, prefetch=2, times=times))) for times in measured] == [1, 3]
    assert [most_ahead(traced(replace(tz.ZERO3, prefetch=0, times=times))) for times in measured] == [1, 3]


def gather_per_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the tied weight is gathered for each of its units (it need not be while it is kept)."""
    freed = replace(tz.ZERO3, gather_last_units_once=False)
    times = [
        sum("layers.0.weight" in paths for paths in launches(traced(replace(freed, gather_per_unit=each)), Kind.GATHER))
        for each in (False, True)
    ]
    assert times == [1, 2]


def gather_last_units_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether backward's first units are gathered again: at the peak three are alive, and so the last three are kept
    that backward reads (of the fourth, its tied weight)."""
    usual, textbook = traced(tz.ZERO3), traced(replace(tz.ZERO3, gather_last_units_once=False))
    assert usual.plan.gathered_once == tuple(
        f"layers.{number}.{name}" for number in range(3) for name in ("weight", "bias")
    )
    assert textbook.plan.gathered_once == ()
    assert launches(usual, Kind.GATHER, backward=True) == []
    assert launches(textbook, Kind.GATHER, backward=True) == [(f"layers.{number}.weight",) for number in (0, 2, 1)]


def recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What backward computes again: nothing, or all but linear layers, or all but the last layer."""

    assert [again(recompute=policy) for policy in RECOMPUTE] == [[0, 0], [2, 0], [2, 1]]


def again(**fields: Any) -> list[int]:
    """How many exp and how many linear layers backward computes."""
    trace = tz.trace(Wide(), X, policy=replace(tz.ZERO3, **fields), world_size=4).backward
    assert trace is not None
    names = [line.sym.name for line in trace.bound_symbols]
    return [names.count(name) for name in ("exp", "linear")]


def recompute_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two units is computed again, from what the first linear layer gives: the border is there."""
    assert again(recompute="none", recompute_units=("layers.1",)) == [2, 1]


def keep_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that is kept is not gathered again."""
    textbook = replace(tz.ZERO3, gather_last_units_once=False)
    kept = traced(replace(textbook, keep_units=("layers.1",)))
    assert ("layers.1.weight",) in launches(traced(textbook), Kind.GATHER, backward=True)
    assert ("layers.1.weight",) not in launches(kept, Kind.GATHER, backward=True)
    assert "layers.1.weight" in kept.plan.gathered_once


class Wide(nn.Module):
    """Two units; backward reads both factors of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = x + h.exp() * h
        return x


def thunder_free(model: Any) -> nn.Module:
    """A plain module with the model's values."""
    plain = Net()
    plain.load_state_dict(tz.full_state_dict(model))
    return plain


def gather_once_per_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the second micro-batch of an accumulation gathers; the bytes: tests/ranks/test_accumulation.py."""
    gathers: list[int] = []
    real = Alone.all_gather
    monkeypatch.setattr(Alone, "all_gather", lambda self, *args: (gathers.append(0), real(self, *args))[1])
    counts, told, same = [], [], []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for hold in (False, True):
            model: Any = thunder.jit(
                Net(), transforms=[tz.ZeroTransform(replace(tz.ZERO2, gather_once_per_accumulation=hold))]
            )
            with model.no_sync():
                model(X).sum().backward()
                first = len(gathers)
                model(X).sum().backward()
                counts.append((len(gathers) - first) / first)
                weight = model.get_parameter("layers.1.weight")
                weight.data.add_(1)
                told.append(raised(lambda model=model: model(X)))  # type: ignore[misc]
                with torch.no_grad():
                    weight.add_(1)  # gathered again
                same.append(torch.equal(model(X), thunder_free(model)(X)))
            gathers.clear()
    finally:
        dist.destroy_process_group()
    assert counts == [1, 0]
    assert same == [True, True]
    assert told[0] == "nothing"
    assert "'layers.1.weight' was written to in the middle of an accumulation, in a way that PyTorch" in told[1]


def cpu_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for at backward's end; on a CPU it says that it changes nothing. On a GPU: tests/gpu."""
    lines = [str(traced(replace(tz.ZERO3, cpu_offload=offload)).backward) for offload in (False, True)]
    assert ["zero_land" in text for text in lines] == [False, True]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.warns(UserWarning, match="cpu_offload changes nothing: the model is on the CPU"):
            model: Any = thunder.jit(Net(), transforms=[tz.ZeroTransform(cpu_offload=True)])
        model(X).sum().backward()
        assert all(param.grad.device.type == "cpu" for param in model.parameters())
    finally:
        dist.destroy_process_group()


def broadcast_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether weights and buffers travel; what arrives: tests/ranks/test_bad_input.py."""
    sent: list[int] = []
    real = dist.broadcast
    monkeypatch.setattr(dist, "broadcast", lambda tensor, **k: (sent.append(tensor.nbytes), real(tensor, **k)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        thunder.jit(Net(), transforms=[tz.ZeroTransform()])
        assert sent == []
        thunder.jit(Net(), transforms=[tz.ZeroTransform(broadcast_from=0)])
        weight, bias = 7 * ROW_BYTES, ROW_BYTES
        assert sent == [weight, bias, weight, bias, weight, bias, bias, 4]
    finally:
        dist.destroy_process_group()


def check_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether backward looks at what it returns; what it then does: test_bad_input.py."""
    assert "zero_check_finite" not in str(traced(tz.ZERO3).backward)
    (line,) = (
        line
        for line in str(traced(replace(tz.ZERO3, check_gradients=True)).backward).splitlines()
        if "zero_check_finite" in line
    )
    paths = {name for unit in traced(tz.ZERO3).plan.params for name in [unit.path]}
    assert {path for path in paths if f'"{path}"' in line} == paths


def trust_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether another optimizer than torch's elementwise ones may step rows; on ranks: test_optimizers.py."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: Any = thunder.jit(Net(), transforms=[tz.ZeroTransform()])
        for trusted, told in ((True, "nothing"), (False, "RuntimeError: torch.optim.Adafactor couples elements")):
            plan = make_plan(Net(), replace(tz.ZERO3, trust_optimizer=trusted), 2, 0)
            owner = SimpleNamespace(plan=plan), plan.params[0]
            monkeypatch.setattr(registry, "owners_of", lambda params, owner=owner: [owner for _ in params])
            assert raised(torch.optim.Adafactor(model.parameters()).step).startswith(told)
    finally:
        dist.destroy_process_group()


SEEN = {
    case.__name__: case
    for case in (
        stage,
        unit_of,
        ignored,
        replicated,
        replicate_below_bytes,
        mixed_precision,
        bucket_bytes,
        prefetch,
        in_flight_bytes,
        times,
        gather_per_unit,
        gather_last_units_once,
        gather_once_per_accumulation,
        recompute,
        recompute_units,
        keep_units,
        cpu_offload,
        broadcast_from,
        check_gradients,
        trust_optimizer,
    )
}


@pytest.mark.parametrize("field", [field.name for field in fields(Policy)])
def test_every_field_of_the_policy_changes_something(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert field in SEEN, "a field without a visible effect cannot ship; show here what it changes"
    SEEN[field](monkeypatch)


def test_traces_differ_where_policies_do() -> None:
    """The same policy gives the same timeline, so that what differs above comes from the field."""
    one, two = traced(tz.ZERO3), traced(replace(tz.ZERO3))
    assert [shape(op) for op in one.timeline.ops] == [shape(op) for op in two.timeline.ops]


def shape(op: Op) -> tuple[Any, ...]:
    return op.kind, op.params, op.backward
