"""Plans of module trees on the meta device have the right units, ties, lifetimes and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import cache, partial

import pytest
import torch
from torch import nn

from thunder_zero.plan.make_plan import make_plan, repeated_blocks
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import ROOT, Plan
from thunder_zero.plan.policy import DDP, ZERO1, ZERO2, ZERO3, Policy
from thunder_zero.plan.precision import MixedPrecision
from thunder_zero.plan.traffic import bucket_traffic, gather_traffic, reduce_traffic


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 16), nn.Linear(16, 4)


def tree(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def gpt(tied: bool = True) -> nn.Module:
    embeddings = {"wte": nn.Embedding(10, 4), "wpe": nn.Embedding(6, 4)}
    blocks = nn.ModuleList(Block() for _ in range(3))
    head = nn.Linear(4, 10, bias=False)
    if tied:
        head.weight = embeddings["wte"].weight
    return tree(transformer=nn.ModuleDict({**embeddings, "h": blocks, "ln_f": nn.LayerNorm(4)}), lm_head=head)


def resnet() -> nn.Module:
    stages = {f"layer{number}": nn.Sequential(Block(), Block()) for number in (1, 2)}
    return tree(conv1=nn.Conv2d(3, 4, 7), bn1=nn.BatchNorm2d(4), **stages, fc=nn.Linear(4, 10))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


linear = partial(on_meta, lambda: nn.Linear(4, 4))


def parameter(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Module:
    return on_meta(lambda: nn.ParameterDict({"p": nn.Parameter(torch.zeros(shape, dtype=dtype))}))


@cache
def plan_gpt(tied: bool = True) -> Plan:
    return make_plan(on_meta(lambda: gpt(tied)), ZERO3, Mesh.of(2))


@pytest.mark.parametrize(
    ("build", "units"),
    [
        (gpt, ("transformer.h.0", "transformer.h.1", "transformer.h.2")),
        (resnet, ("layer1.0", "layer1.1", "layer2.0", "layer2.1")),
        (lambda: nn.Sequential(Block(), nn.ReLU(), Block()), ("0", "2")),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), ("0", "2")),
        (lambda: nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), ()),
    ],
    ids=["gpt", "resnet", "blocks", "layers", "nothing repeats"],
)
def test_the_default_rule_finds_the_repeated_blocks(build: Callable[[], nn.Module], units: tuple[str, ...]) -> None:
    assert repeated_blocks(on_meta(build)) == units


def test_a_parameter_belongs_to_one_unit_or_to_the_root_unit() -> None:
    plan = plan_gpt()
    assert plan.by_name["transformer.h.1.up.weight"].unit == "transformer.h.1"
    outside = ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")
    assert {param.path for param in plan.params if param.unit == ROOT} == {f"transformer.{name}" for name in outside}
    assert plan.units == (ROOT, "transformer.h.0", "transformer.h.1", "transformer.h.2"), (
        "units have the module's order"
    )


def test_the_innermost_unit_of_a_custom_rule_wins() -> None:
    policy = replace(ZERO3, unit_of=lambda module: ("transformer", "transformer.h.1"))
    params = make_plan(on_meta(gpt), policy, Mesh.of(2)).by_name
    assert params["transformer.h.1.norm.weight"].unit == "transformer.h.1"
    assert params["transformer.h.0.norm.weight"].unit == "transformer"
    blocks = make_plan(on_meta(lambda: nn.ModuleList([Block() for _ in range(11)])), ZERO3, Mesh.of(2))
    assert blocks.by_name["10.norm.weight"].unit == "10", "unit 1 does not contain module 10"


def test_the_last_override_that_fits_decides() -> None:
    half, single = MixedPrecision(torch.bfloat16), MixedPrecision(torch.float32)
    policy = replace(ZERO3, mixed_precision=MixedPrecision(overrides={"transformer.*": half, "*.norm": single}))
    params = make_plan(on_meta(gpt), policy, Mesh.of(2)).by_name
    assert params["transformer.h.1.norm.weight"].compute_dtype is torch.float32
    assert params["transformer.h.1.up.weight"].compute_dtype is torch.bfloat16


def test_a_tied_parameter_is_one_parameter_with_two_names() -> None:
    tied = plan_gpt().by_name["lm_head.weight"]
    assert tied.names == ("transformer.wte.weight", "lm_head.weight")
    assert plan_gpt().by_name["transformer.wte.weight"] is tied
    assert len(plan_gpt(tied=False).params) == len(plan_gpt().params) + 1


@pytest.mark.parametrize(
    ("policy", "sharded", "resident", "kept"),
    [(DDP, False, False, True), (ZERO1, True, True, True), (ZERO2, True, False, True), (ZERO3, True, False, False)],
)
def test_stages_shard_and_keep_parameters_as_in_their_table(
    policy: Policy, sharded: bool, resident: bool, kept: bool
) -> None:
    for param in make_plan(linear(), policy, Mesh.of(4)).params:
        assert (param.sharded, param.resident, param.kept_unsharded) == (sharded, resident, kept)
    per_unit = make_plan(linear(), replace(policy, gather_per_unit=True), Mesh.of(2)).by_name["weight"]
    assert per_unit.gather_per_unit == (policy is ZERO3), "only parameters that are freed"
    assert not make_plan(linear(), policy, Mesh.of(2)).by_name["weight"].gather_per_unit


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 0)])
def test_zero_dimensional_and_empty_parameters_are_always_replicated(shape: tuple[int, ...]) -> None:
    for stage in range(4):
        (param,) = make_plan(parameter(shape), Policy(stage=stage), Mesh.of(4)).params
        assert (param.sharded, param.resident, param.kept_unsharded) == (False, False, True)


def test_owned_matrices_are_whole_and_shared_by_work_among_owners() -> None:
    module = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for _ in range(2))
    plan = make_plan(module, Policy(stage=2, owned=("*",)), Mesh.of(3, 1))
    weights = [param for param in plan.params if param.path.endswith("weight")]
    assert [param.owner for param in weights] == [0, 1, 2] * 2
    assert not any(param.sharded or plan.geometry(param).padding for param in weights)
    assert all(param.sharded and param.owner is None for param in plan.params if param not in weights)
    assert make_plan(module, Policy(stage=2, owned=("*",)), Mesh.of(3)).params == plan.params
    mine, theirs = (reduce_traffic(plan, weights[owner]) for owner in (1, 0))
    assert (mine.sent, mine.received, theirs.sent, theirs.received) == (0, 2 * 64, 64, 0)
    bucket = bucket_traffic(plan, tuple(param.path for param in weights[:3]), "shard")
    assert (bucket.sent, bucket.received, bucket.busiest) == (2 * 64, 2 * 64, 2 * 64)


def test_a_parameter_has_the_shapes_dtypes_and_bytes_of_arithmetic() -> None:
    module = parameter((5, 3), torch.bfloat16)
    plan = make_plan(module, ZERO3, Mesh.of(4, 2))
    (param,) = plan.params
    assert (param.shape, param.dtype, param.full_bytes) == ((5, 3), torch.bfloat16, 30)
    assert plan.shard_shape(param) == (2, 3)  # ceil(5 / 4) rows
    assert gather_traffic(plan, param).sent == 1 * 3 * 2 * 3  # rank 2 owns row 4 and sends it to 3 peers
    assert reduce_traffic(plan, param).sent == 4 * 3 * 2  # the 4 rows that peers own
    replicated = make_plan(module, DDP, Mesh.of(4, 2))
    assert replicated.shard_shape(replicated.params[0]) == (5, 3)
    assert gather_traffic(replicated, replicated.params[0]).sent == 0
    assert reduce_traffic(replicated, replicated.params[0]).sent == 46  # ceil(2 * 3 / 4 * 15 elements) * 2 bytes
    assert plan.params == make_plan(module, ZERO3, Mesh.of(4)).params, "all ranks have equal params"
    frozen = make_plan(parameter((5, 3)).requires_grad_(False), ZERO3, Mesh.of(4)).params[0]
    assert (param.requires_grad, frozen.requires_grad) == (True, False)


def test_a_slice_counts_as_a_parameter() -> None:
    module = parameter((8, 3), torch.bfloat16)
    plan = make_plan(module, replace(ZERO3, replicate_below_bytes=25), Mesh.of(2, 1, slices=2), {"p": 0})
    (param,) = plan.params
    assert (param.shape, param.sliced, param.sharded) == ((4, 3), 0, False), "24 bytes are below replicate_below_bytes"
    plan = make_plan(module, ZERO3, Mesh.of(2, 1, slices=2), {"p": 0})
    (param,) = plan.params
    assert (param.shape, plan.whole_shape(param), plan.shard_shape(param)) == ((4, 3), (8, 3), (2, 3))
    sent = gather_traffic(plan, param).sent, reduce_traffic(plan, param).sent
    assert (param.full_bytes, *sent) == (24, 12, 12)
    assert plan.ranks == 4
    columns = make_plan(parameter((3, 8)), ZERO3, Mesh.of(2, 1, slices=4, part=1), {"p": 1})
    assert (columns.params[0].shape, columns.shard_shape(columns.params[0])) == ((3, 2), (2, 2))


@pytest.mark.parametrize(
    ("width", "blocks", "policy", "expected"),
    [
        (1 << 10, 2, ZERO3, 16 << 20),  # two of the largest units, of 8 MiB
        (1 << 11, 2, ZERO3, 32 << 20),  # the most
        (1 << 5, 2, ZERO3, 4 << 20),  # the least
        (1 << 10, 2, Policy(in_flight_bytes=7), 7),
    ],
)
def test_the_bytes_in_flight_follow_the_largest_units_or_the_policy(
    width: int, blocks: int, policy: Policy, expected: int
) -> None:
    with torch.device("meta"):
        module = nn.Module()
        module.head = nn.Linear(width, 2 * width, bias=False)
        module.blocks = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(blocks))
    plan = make_plan(module, policy, Mesh.of(2))
    assert plan.sizes.in_flight_bytes == expected
    assert plan.sizes.ahead_bytes == (expected if policy.in_flight_bytes else expected - 1)


def test_policies_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        ZERO3.stage = 2  # type: ignore[misc]


def test_a_policy_shows_only_changed_fields_and_few_paths() -> None:
    assert repr(Policy(prefetch=0)) == "Policy(stage=3, prefetch=0)"
    policy = Policy(stage=2, ignored=tuple(f"blocks.{number}" for number in range(200)))
    assert repr(policy).endswith("'blocks.3', ... 196 more))")
    assert "prefetch" not in repr(policy)


def test_a_plan_shows_a_summary_on_one_line() -> None:
    module = nn.Sequential(*(Block() for _ in range(100)))
    shown = repr(make_plan(module, Policy(stage=2, replicated=("*.norm",)), Mesh.of(4, 1, replicas=2)))
    assert len(shown) < 200
    assert "\n" not in shown
    for words in ("ZeRO-2", "rank 1 of 4", "2 copies", "600 parameters", "400 of them sharded", "100 units"):
        assert words in shown
