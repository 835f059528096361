"""All entries make equal models, and every field of the policy has a visible effect."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import error_of, fails
from tests.harness.models import full
from tests.harness.tiers import slow
from tests.harness.traced import Chain, ResidualBlock, traced
from thunder_zero import Policy
from thunder_zero.comm.native import PerTensor
from thunder_zero.comm.transport import SingleRank, Transport
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.traffic import gather_traffic, reduce_traffic
from thunder_zero.schedule import Compute, Gather, Op, Reduce, Timeline, Wait, ends
from thunder_zero.sharded.sharded_model import sharded_model
from thunder_zero.tools import Traces

import thunder


class Net(nn.Module):
    """Four equal layers of 7 rows, each a unit; the last layer has the first layer's weight. A buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(4)])
        self.layers[3].weight = self.layers[0].weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer.forward(x)) * self.scale
        return x


X = torch.linspace(-1, 1, 14).view(2, 7)


def compiled(module: nn.Module, plugins: Any) -> Any:
    return thunder.compile(module, plugins=plugins, recipe=tz.Recipe())


ENTRIES: dict[str, Callable[..., Any]] = {
    "transform": lambda module, *a, **k: thunder.jit(module, transforms=[tz.ZeroTransform(*a, **k)]),
    "zero": lambda module, *a, **k: tz.zero(thunder.jit(module), *a, **k),
    "plugin": lambda module, *a, **k: compiled(module, tz.Zero(*a, **k)),
    "plugins": lambda module, *a, **k: compiled(module, [tz.Zero(*a, **k)]),
}
NAME = "plugin's name"


def train(model: Any, steps: int = 2) -> list[Tensor]:
    """Train some steps with AdamW. Return the losses and the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(param.detach() for param in model.parameters())]


def fill(module: nn.Module) -> None:
    """Initialize the buffer, which has no ``reset_parameters``."""
    if isinstance(module, Net):
        module.scale.fill_(2.0)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("entry", "stage"), [(NAME, 3), ("zero", 1), *slow(("transform", 2), ("plugin", 1), (NAME, 2))]
)
def test_all_entries_make_equal_models(entry: str, stage: int) -> None:
    torch.manual_seed(0)
    module = Net()
    fill(module)
    if entry == NAME:
        model = compiled(deepcopy(module), f"zero{stage}")
    else:
        with torch.device("meta"):
            filled, module_on_meta = Net(), Net()
        torch.manual_seed(0)
        values = tz.full_state_dict(ENTRIES[entry](filled, stage, init=fill))
        assert [name for name, value in module.state_dict().items() if not torch.equal(value, values[name])] == []
        model = ENTRIES[entry](module_on_meta, stage, weights=module.state_dict())
    assert isinstance(model, tz.ZeroModule)
    for local, expected in zip(train(model), train(deepcopy(module)), strict=True):
        torch.testing.assert_close(full(local), expected, rtol=1e-5, atol=1e-6)
    traces = tz.traces_of(model)
    assert traces.plan.policy == Policy(stage=stage)
    tz.schedule.check(traces)
    assert tz.full_state_dict(model).keys() == module.state_dict().keys()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_accept_a_policy_a_stage_and_fields(entry: str) -> None:
    for args, kwargs, policy in [
        ((), {}, tz.ZERO3),
        ((tz.ZERO2,), {}, tz.ZERO2),
        ((), {"policy": tz.DDP}, tz.DDP),
        ((0,), {}, tz.DDP),
        ((), {"stage": 1}, tz.ZERO1),
        ((tz.ZERO2,), {"stage": 2}, tz.ZERO2),
        ((tz.ZERO1,), {"bucket_bytes": 5, "prefetch": 0}, Policy(1, bucket_bytes=5, prefetch=0)),
        ((), {"stage": 2, "check_gradients": True}, Policy(2, check_gradients=True)),
        ((replace(tz.ZERO2, bucket_bytes=8),), {}, Policy(2, bucket_bytes=8)),
    ]:
        assert sharded_model(ENTRIES[entry](Net(), *args, **kwargs)).state.plan.policy == policy  # type: ignore[arg-type]


@pytest.mark.usefixtures("group")
def test_one_recipe_and_one_plugin_for_two_modules() -> None:
    # Thunder's recipes keep their plugins: the second module must get only its own plugin.
    recipe, plugin = tz.Recipe(), tz.Zero(stage=2)
    models = [
        thunder.compile(Net(), plugins="zero1", recipe=recipe),
        thunder.compile(Net(), plugins=[plugin], recipe=recipe),
        thunder.compile(Net(), plugins=[plugin], recipe=tz.Recipe()),
    ]
    assert [sharded_model(model).state.plan.policy.stage for model in models] == [1, 2, 2]
    models[1](X)
    assert tz.traces_of(models[1]).plan.policy == tz.ZERO2


# What each field of the policy changes, in the traces or the plan of rank 0 of 4


def wide() -> nn.Module:
    """Build two units of two linear layers, with a product between them whose factors backward reads."""
    return Chain(*(ResidualBlock(7, lambda h: h.exp() * h) for _ in range(2)))


def traces(policy: Policy, make: Callable[[], nn.Module] = Net) -> Traces:
    return traced(make, (2, 7), policy, world_size=4)


def launches(policy: Policy, kind: type[Op], backward: bool = False) -> list[Op]:
    return [op for op in traces(policy).timeline.ops if isinstance(op, kind) and op.backward is backward]


def gathers(policy: Policy, backward: bool = False) -> list[tuple[str, ...]]:
    """Return the parameters of each gather of a phase."""
    return [op.params for op in launches(policy, Gather, backward)]


regathers = partial(gathers, backward=True)


def gathered_and_reduced(policy: Policy) -> tuple[int, int, bool, bool]:
    """Count the gathers of forward and of backward. Return also whether gradients are reduced in full, and in rows."""
    backward = str(traces(policy).backward)
    in_full, rows = ("zero_all_reduce" in backward, "zero_reduce_scatter" in backward)
    return len(gathers(policy)), len(regathers(policy)), in_full, rows


def travelling(policy: Policy) -> list[set[str]]:
    """Return the parameters gathered in forward, and the parameters whose gradients are reduced."""
    ops = launches(policy, Gather), launches(policy, Reduce, backward=True)
    return [{path for op in phase for path in op.params} for phase in ops]


def sharded(policy: Policy) -> set[str]:
    return {param.path for param in make_plan(Net(), policy, Mesh.of(4)).params if param.sharded}


def most_ahead(policy: Policy) -> int:
    """Return the largest number of gathers in flight while forward computes."""
    flying, most = 0, 0
    for op in traces(policy).forward_timeline.ops:
        flying += isinstance(op, Gather) - isinstance(op, Wait)
        if isinstance(op, Compute):
            most = max(most, flying)
    return most


def bytes_of_layer_1(policy: Policy) -> list[int]:
    """Return the bytes that rank 0, with two of seven rows, sends to gather and to reduce the second layer."""
    ops = launches(policy, Gather), launches(policy, Reduce, backward=True)
    return [
        sum(traces(policy).timeline.traffic(op).sent for op in phase if "layers.1.bias" in op.params) for phase in ops
    ]


def bytes_of_weights(policy: Policy) -> list[int]:
    """Return the bytes that rank 0 sends to gather the second weight, and to reduce its gradient.

    Rank 0 has two of seven rows. Encoded, 14 elements take 16 bytes, and 4 bytes for their scale.
    """
    param = traces(policy).plan.by_name["layers.1.weight"]
    return [gather_traffic(traces(policy).plan, param).sent, reduce_traffic(traces(policy).plan, param).sent]


def bytes_of_frozen_weight(policy: Policy) -> int:
    """Return the bytes that rank 0, with two of seven rows, sends to gather a frozen weight.

    Encoded, a row has 4 bytes for its scale and 4 for its seven elements of 4 bits.
    """
    plan = make_plan(Net().requires_grad_(False), policy, Mesh.of(4))
    return gather_traffic(plan, plan.by_name["layers.1.weight"]).sent


def count_recomputed(policy: Policy) -> list[int]:
    """Count the ``exp`` and the linear layers that backward computes."""
    trace = traces(policy, wide).backward
    assert trace is not None
    names = [line.sym.name for line in trace.bound_symbols]
    return [names.count(name) for name in ("exp", "addmm")]


def sent_to_owners(policy: Policy) -> set[str]:
    text = "\n".join(line for line in str(traces(policy).backward).splitlines() if "zero_reduce_to_owner" in line)
    return {path for path in PATHS if f"'{path}'" in text or f'"{path}"' in text}


def checked(policy: Policy) -> set[str]:
    """Return the parameters whose gradients backward checks."""
    text = "\n".join(line for line in str(traces(policy).backward).splitlines() if "zero_check_finite" in line)
    return {path for path in PATHS if f'"{path}"' in text}


def ended_at_once(timeline: Timeline) -> Timeline:
    """Wait for each reduction right after its launch. A pass."""
    waits = {op.launch.handle: op for op in timeline.ops if ends(op, Reduce)}
    pairs = [(op, waits[op.handle]) if isinstance(op, Reduce) else (op,) for op in timeline.ops]
    return timeline.with_ops(op for pair in pairs for op in pair if len(pair) > 1 or op not in waits.values())


def without_first_wait(timeline: Timeline) -> Timeline:
    """Drop the first wait for a reduction. A wrong pass."""
    lost = next(op for op in timeline.ops if ends(op, Reduce))
    return timeline.with_ops(op for op in timeline.ops if op is not lost)


def reductions_at_once(policy: Policy) -> int:
    """Return the largest number of reductions in flight."""
    flying, most = set[str](), 0
    for op in traces(policy).timeline.ops:
        flying |= set(op.writes) if isinstance(op, Reduce) else set()
        flying -= set(op.reads) if isinstance(op, Wait) else set()
        most = max(most, len(flying))
    return most


def measured(bytes_per_second: float) -> tz.schedule.Times:
    seconds = dict.fromkeys(PATHS, 1.0)
    return tz.schedule.Times(seconds, seconds, bytes_per_second)


TEXTBOOK = replace(tz.ZERO3, reshard_after_forward=True)
LAYERS = [(f"layers.{number}.weight", f"layers.{number}.bias") for number in range(3)] + [("layers.3.bias",)]
PATHS = {path for layer in LAYERS for path in layer}
WEIGHTS = {path for path in PATHS if path.endswith("weight")}
WEIGHT = 7 * 7 * 4  # bytes; with its bias more
REGATHERED = [
    ("layers.0.weight",),
    ("layers.2.weight",),
    ("layers.1.weight",),
]  # in the order in which backward reads them
KEPT = {"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.3.bias"}
HALF = tz.MixedPrecision(torch.bfloat16, overrides={"layers.1": tz.MixedPrecision(torch.bfloat16, torch.float64)})
# field -> policy with its other fields, what to look at, and the result for some values
SEEN: dict[str, tuple[Policy, Callable[[Policy], Any], list[tuple[Any, Any]]]] = {
    "stage": (
        TEXTBOOK,
        gathered_and_reduced,
        [(0, (0, 0, True, False)), (1, (4, 0, False, True)), (2, (4, 0, False, True)), (3, (4, 3, False, True))],
    ),
    "unit_of": (TEXTBOOK, gathers, [(None, LAYERS), (lambda module: (), [sum(LAYERS, ())])]),
    "ignored": (TEXTBOOK, travelling, [((), [PATHS, PATHS]), (("layers.1", "layers.2.bias"), [KEPT, KEPT])]),
    "replicated": (TEXTBOOK, sharded, [((), PATHS), (("*.bias", "layers.1"), WEIGHTS - {"layers.1.weight"})]),
    "owned": (TEXTBOOK, sent_to_owners, [((), set()), (("*.weight",), WEIGHTS)]),
    "replicate_below_bytes": (TEXTBOOK, sharded, [(WEIGHT, WEIGHTS), (WEIGHT + 1, set())]),
    "mixed_precision": (  # 16 elements to each of 3 ranks; 40 of others
        tz.ZERO2,
        bytes_of_layer_1,
        [(tz.MixedPrecision(), [3 * 16 * 4, 40 * 4]), (HALF, [3 * 16 * 2, 40 * 8])],
    ),
    "bucket_bytes": (
        TEXTBOOK,
        lambda policy: [len(paths) for paths in gathers(policy)],
        [(None, [2, 2, 2, 1]), (0, [1] * 7), (WEIGHT, [1] * 7)],
    ),
    "prefetch": (TEXTBOOK, most_ahead, [(0, 0), (1, 1), (3, 3)]),
    "in_flight_bytes": (replace(TEXTBOOK, prefetch=3), most_ahead, [(0, 0), (8 * 28, 1), (9 * 8 * 28, 3)]),
    "times": (replace(TEXTBOOK, prefetch=0), most_ahead, [(None, 0), (measured(1e9), 1), (measured(1.0), 3)]),
    "gather_per_unit": (
        TEXTBOOK,
        lambda policy: [paths for paths in gathers(policy) if "layers.0.weight" in paths],
        [(False, LAYERS[:1]), (True, [LAYERS[0], ("layers.0.weight",)])],
    ),
    # At the peak three units are alive, so three of backward's units are kept unsharded.
    "reshard_after_forward": (tz.ZERO3, regathers, [(None, []), (True, REGATHERED)]),
    # Recompute nothing; or all but linear layers; or all but the last layer.
    "recompute": (tz.ZERO3, count_recomputed, [("none", [0, 0]), ("cheap", [2, 0]), ("units", [2, 1])]),
    # The second of two units is recomputed, except for its last layer.
    "recompute_units": (replace(tz.ZERO3, recompute="none"), count_recomputed, [((), [0, 0]), (("1",), [1, 1])]),
    "keep_unsharded": (TEXTBOOK, regathers, [((), REGATHERED), (("layers.1",), REGATHERED[:2])]),
    "cpu_offload": (
        TEXTBOOK,
        lambda policy: "zero_wait_offloaded" in str(traces(policy).backward),
        [(False, False), (True, True)],
    ),
    "check_gradients": (TEXTBOOK, checked, [(False, set()), (True, PATHS)]),
    "gather_format": (TEXTBOOK, bytes_of_weights, [(None, [3 * 14 * 4, 3 * 14 * 4 - 28]), (tz.Int8(), [60, 140])]),
    "reduce_format": (TEXTBOOK, bytes_of_weights, [(None, [3 * 14 * 4, 3 * 14 * 4 - 28]), (tz.Int8(), [168, 60])]),
    "frozen_format": (TEXTBOOK, bytes_of_frozen_weight, [(None, 3 * 14 * 4), (tz.NF4(), 3 * 2 * 8)]),
    "shares": (
        TEXTBOOK,
        lambda policy: ("zero_encode_grad" in str(traces(policy).backward), traces(policy).plan.weight),
        [((), (False, 1.0)), ((3, 3, 3, 3), (False, 1.0)), ((5, 1, 1, 1), (True, 2.5))],
    ),
    "passes": (TEXTBOOK, reductions_at_once, [((), 4), ((ended_at_once,), 1)]),
}


@pytest.mark.parametrize("field", SEEN)
def test_a_field_of_the_policy_changes_something(field: str) -> None:
    policy, look, cases = SEEN[field]
    for value, expected in cases:
        assert look(replace(policy, **{field: value})) == expected, (field, value)


def test_every_field_of_the_policy_changes_something() -> None:
    unseen = {field.name for field in fields(Policy)} - SEEN.keys()
    tests = {"reshard_after_backward", "broadcast_from", "transport", "materialize_grads"}
    assert unseen == tests, "a field without a visible effect cannot ship; show here what it changes"
    assert all(f"test_{field}" in globals() for field in tests)


@pytest.mark.usefixtures("group")
def test_reshard_after_backward() -> None:
    # Here: whether the second micro-batch of an accumulation gathers. Bytes: tests/ranks/test_accumulation.py.
    counts: list[int] = []
    gather = SingleRank.all_gather
    for keeps in (False, True):
        model = ENTRIES["transform"](Net(), replace(tz.ZERO2, reshard_after_backward=not keeps))
        weight = model.get_parameter("layers.1.weight")
        with model.no_sync():
            for _ in range(2):
                with mock.patch.object(SingleRank, "all_gather", autospec=True, side_effect=gather) as gathers:
                    before = model(X)
                counts.append(gathers.call_count)
            weight.data.add_(1)
            text = error_of(lambda model=model: model(X))  # type: ignore[misc]
            assert ("'layers.1.weight' was written to in the middle of an accumulation" in text) is keeps, text
            with torch.no_grad():
                weight.add_(1)  # gathered again
            plain = Net()
            plain.load_state_dict(tz.full_state_dict(model))
            assert torch.equal(model(X), plain(X))
            assert not torch.equal(model(X), before)
    assert counts[0] == counts[1] == counts[2] > 0
    assert counts[3] == 0


class TwoHeads(Net):
    """Two layers that read the input, of which the loss may leave one out."""

    def forward(self, x: Tensor) -> Any:
        return self.layers[1](x), self.layers[2](x)


@pytest.mark.usefixtures("group")
def test_materialize_grads() -> None:
    # Here: what gets a gradient. Ranks that leave out different outputs: tests/ranks/test_left_out_outputs.py.
    for materializes in (False, True):
        model = ENTRIES["transform"](TwoHeads(), materialize_grads=materializes)
        model(X)[0].sum().backward()
        grads = {name for name, param in model.named_parameters() if param.grad is not None}
        assert ("layers.2.weight" in grads) is materializes
        assert "layers.1.weight" in grads


@pytest.mark.usefixtures("group")
def test_broadcast_from() -> None:
    # Here: whether weights and buffers travel. What arrives: tests/ranks/test_bad_input.py.
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        ENTRIES["transform"](Net())
        assert not broadcast.called
        ENTRIES["transform"](Net(), broadcast_from=0)
    assert [call.args[0].nbytes for call in broadcast.call_args_list] == [WEIGHT, 28] * 3 + [28, 4]


def test_transport() -> None:
    # Here: which transport a model gets. What a user's transport sends: tests/ranks/test_transport.py.
    calls: list[tuple[int, int]] = []

    def make(group: dist.ProcessGroup, role: int) -> Transport:
        calls.append((group.size(), role))
        return PerTensor(group, role)

    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        tz.compile(Net(), 3, transport=make)(X)
        assert set(calls) == {(2, 0)}
        fails(lambda: tz.compile(Net(), 3, transport=lambda group, role: group), "Policy.transport made a ProcessGroup")
        fails(
            lambda: tz.compile(Net(), 3, transport=int), "Policy.transport raised TypeError", "a function of a process"
        )
    finally:
        dist.destroy_process_group()


def test_a_users_pass_is_checked() -> None:
    fails(
        lambda: traces(replace(TEXTBOOK, passes=(without_first_wait,))),
        "ScheduleError: after the pass without_first_wait of Policy.passes",
        "is never waited for",
    )
    fails(lambda: traces(replace(TEXTBOOK, passes=(str,))), "TypeError: the pass str returned str")
