"""Plans of real module trees, on the meta device: units, ties, lifetimes, bytes, and what bad input gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import nn

from thunder_zero.plan import ROOT, Param, Plan, make_plan, repeated_blocks
from thunder_zero.policy import DDP, ZERO1, ZERO2, ZERO3, Policy


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.q, self.k = nn.Linear(dim, dim), nn.Linear(dim, dim)


class Gpt(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(10, 4),
                "wpe": nn.Embedding(6, 4),
                "h": nn.ModuleList([Block(4) for _ in range(3)]),
                "ln_f": nn.LayerNorm(4),
            }
        )
        self.lm_head = nn.Linear(4, 10, bias=False)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(10, 4)
        self.model.layers = nn.ModuleList([Block(4) for _ in range(2)])
        self.model.norm = nn.RMSNorm(4)
        self.lm_head = nn.Linear(4, 10, bias=False)


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.conv_proj = nn.Conv2d(3, 4, 2)
        self.encoder = nn.Module()
        self.encoder.layers = nn.Sequential(*(Block(4) for _ in range(2)))
        self.encoder.ln = nn.LayerNorm(4)
        self.heads = nn.Sequential(nn.Linear(4, 10))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.layer2 = nn.Sequential(Residual(), Residual())
        self.fc = nn.Linear(4, 10)


class MlpLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def by_path(plan: Plan) -> dict[str, Param]:
    return {param.path: param for param in plan.params}


@pytest.mark.parametrize(
    ("build", "units"),
    [
        (Gpt, ("transformer.h.0", "transformer.h.1", "transformer.h.2")),
        (Llama, ("model.layers.0", "model.layers.1")),
        (Vit, ("encoder.layers.0", "encoder.layers.1")),
        (ResNet, ("layer1.0", "layer1.1", "layer2.0", "layer2.1")),
        (lambda: nn.Sequential(MlpLayer(), nn.ReLU(), MlpLayer()), ("0", "2")),
        (lambda: nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), ()),
    ],
    ids=["gpt", "llama", "vit", "resnet", "mlp", "nothing repeats"],
)
def test_the_default_rule_finds_the_repeated_blocks(build: Callable[[], nn.Module], units: tuple[str, ...]) -> None:
    assert repeated_blocks(on_meta(build)) == units


def test_the_default_rule_finds_the_layers_of_a_plain_mlp() -> None:
    assert repeated_blocks(on_meta(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)))) == ("0", "2")


def test_each_parameter_belongs_to_one_unit_and_what_is_outside_to_the_root_unit() -> None:
    params = by_path(make_plan(on_meta(Gpt), ZERO3, 2, 0))
    assert params["transformer.h.1.mlp.0.weight"].unit == "transformer.h.1"
    assert {path for path, param in params.items() if param.unit == ROOT} == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    }


def test_units_keep_the_order_of_the_module() -> None:
    plan = make_plan(on_meta(Gpt), ZERO3, 2, 0)
    assert plan.units == (ROOT, "transformer.h.0", "transformer.h.1", "transformer.h.2")


def test_a_unit_rule_of_ones_own_and_the_innermost_unit_wins() -> None:
    policy = replace(ZERO3, unit_of=lambda module: ("transformer", "transformer.h.1"))
    params = by_path(make_plan(on_meta(Gpt), policy, 2, 0))
    assert params["transformer.h.1.norm.weight"].unit == "transformer.h.1"
    assert params["transformer.h.0.norm.weight"].unit == "transformer"


def test_a_unit_is_no_prefix_of_a_name() -> None:
    blocks = on_meta(lambda: nn.ModuleList([Block(4) for _ in range(11)]))
    assert by_path(make_plan(blocks, ZERO3, 2, 0))["10.norm.weight"].unit == "10"


def test_a_tied_parameter_is_one_parameter_with_two_names() -> None:
    plan = make_plan(on_meta(Gpt), ZERO3, 2, 0)
    tied = plan.by_name["lm_head.weight"]
    assert tied.names == ("transformer.wte.weight", "lm_head.weight")
    assert plan.by_name["transformer.wte.weight"] is tied
    untied = make_plan(on_meta(lambda: Gpt(tied=False)), ZERO3, 2, 0)
    assert len(untied.params) == len(plan.params) + 1


#                      sharded resident kept
STAGES = {0: (False, False, True), 1: (True, True, True), 2: (True, False, True), 3: (True, False, False)}


@pytest.mark.parametrize(("policy", "stage"), [(DDP, 0), (ZERO1, 1), (ZERO2, 2), (ZERO3, 3)])
def test_the_table_of_the_stages(policy: Policy, stage: int) -> None:
    plan = make_plan(on_meta(lambda: nn.Linear(6, 5)), policy, 4, 0)
    assert {(param.sharded, param.resident, param.gathered_once) for param in plan.params} == {STAGES[stage]}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_zero_dimensional_and_empty_parameters_are_always_replicated(stage: int, shape: tuple[int, ...]) -> None:
    module = on_meta(lambda: nn.ParameterDict({"p": nn.Parameter(torch.zeros(shape))}))
    (param,) = make_plan(module, Policy(stage=stage), 4, 0).params
    assert (param.sharded, param.resident, param.gathered_once) == (False, False, True)


def test_shapes_dtypes_and_bytes() -> None:
    module = on_meta(lambda: nn.ParameterDict({"p": nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))}))
    plan = make_plan(module, ZERO3, 4, rank=2)
    (param,) = plan.params
    assert (param.shape, param.dtype, param.full_bytes) == ((5, 3), torch.bfloat16, 30)
    assert plan.shard_shape(param) == (2, 3)  # ceil(5 / 4) rows
    assert plan.gather_bytes(param) == 1 * 3 * 2 * 3  # rank 2 owns row 4, sends it to 3 others
    assert plan.reduce_bytes(param) == 4 * 3 * 2  # the 4 rows that others own
    replicated = make_plan(module, DDP, 4, rank=2)
    assert replicated.shard_shape(replicated.params[0]) == (5, 3)
    assert replicated.gather_bytes(replicated.params[0]) == 0
    assert replicated.reduce_bytes(replicated.params[0]) == 46  # ceil(2 * 3 / 4 * 15 elements) * 2 bytes


def test_frozen_parameters_are_known() -> None:
    module = on_meta(lambda: nn.Linear(4, 4))
    module.get_parameter("bias").requires_grad_(False)
    params = by_path(make_plan(module, ZERO3, 2, 0))
    assert (params["weight"].requires_grad, params["bias"].requires_grad) == (True, False)


def test_regather_is_for_what_is_freed() -> None:
    module = on_meta(lambda: nn.Linear(4, 4))
    assert make_plan(module, replace(ZERO3, gather_per_unit=True), 2, 0).by_name["weight"].gather_per_unit
    for policy in (ZERO3, replace(ZERO1, gather_per_unit=True), replace(DDP, gather_per_unit=True)):
        assert not make_plan(module, policy, 2, 0).by_name["weight"].gather_per_unit


def test_the_plan_is_the_same_for_all_ranks() -> None:
    module = on_meta(Gpt)
    assert make_plan(module, ZERO3, 4, 0).params == make_plan(module, ZERO3, 4, 3).params


@pytest.mark.parametrize(
    ("width", "blocks", "policy", "expected"),
    [
        (1 << 10, 2, ZERO3, 16 << 20),  # two of the largest units, of 8 MiB
        (1 << 11, 2, ZERO3, 32 << 20),  # the most
        (1 << 5, 2, ZERO3, 4 << 20),  # the least
        (1 << 10, 0, ZERO3, 16 << 20),  # a root of 8 MiB alone
        (1 << 10, 2, Policy(in_flight_bytes=7), 7),
    ],
)
def test_the_bytes_in_flight(width: int, blocks: int, policy: Policy, expected: int) -> None:
    with torch.device("meta"):
        module = nn.Module()
        module.head = nn.Linear(width, 2 * width, bias=False)
        module.blocks = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(blocks))
    plan = make_plan(module, policy, 2, 0)
    assert plan.sizes.in_flight_bytes == expected
    assert plan.sizes.ahead_bytes == (expected if policy.in_flight_bytes else expected - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "world_size is 0; give the number of ranks"),
        ((2, 2), "rank is 2; with world_size=2 it must be 0 to 1"),
        ((2, -1), "rank is -1"),
    ],
)
def test_ranks_out_of_range(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(nn.Linear(2, 2, device="meta"), ZERO3, *arguments)


def test_a_module_without_parameters() -> None:
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        make_plan(nn.ReLU(), ZERO3, 2, 0)


def test_a_unit_that_is_no_submodule() -> None:
    with pytest.raises(ValueError, match=r"unit_of names 'h\.7', which is not a submodule of Linear"):
        make_plan(nn.Linear(2, 2, device="meta"), replace(ZERO3, unit_of=lambda module: ("h.7",)), 2, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": 4}, "stage is 4; choose 0"),
        ({"stage": -1}, "stage is -1"),
        ({"bucket_bytes": -1}, "bucket_bytes is -1; give a number of bytes"),
        ({"in_flight_bytes": -5}, "in_flight_bytes is -5"),
        ({"broadcast_from": -1}, "broadcast_from is -1"),
    ],
)
def test_a_policy_out_of_range(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**fields)  # type: ignore[arg-type]


def test_policies_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        ZERO3.stage = 2  # type: ignore[misc]
