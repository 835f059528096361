"""Mixed precision: one dtype in compute and on the wire, another at rest and in the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_zero as tz
from examples.gpt import GPT, GPTConfig
from tests.harness.errors import raised
from tests.harness.models import count_sends, error, fresh, saved, sharded, whole
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from thunder_zero.runtime.sharded_model import sharded_model

import thunder
from thunder.core.dtypes import to_torch_dtype

BOTH_FRONT_ENDS = True

HALF, FULL = torch.bfloat16, torch.float32
STAGES, STEPS, ROWS, WIDTH = of_tier((1, 3), (0, 1, 2, 3)), 3, 6, 9
NORM = tz.MixedPrecision(param_dtype=FULL, output_dtype=HALF)
MIXED = tz.MixedPrecision(HALF, FULL, FULL, HALF, overrides={"*norm": NORM, "router": tz.MixedPrecision()})


class Layers(nn.Module):
    """Linear layers, a norm and a router that stay in float32, a scalar, a frozen row, a buffer, an input of ints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x: Tensor, *, chosen: Tensor) -> dict[str, Tensor]:
        y = torch.tanh(self.first(x)) + self.offset
        y = torch.tanh(self.second(self.norm(y))) * self.scale
        gate = torch.sigmoid(y.float() * self.router)
        return {"y": (y * gate.to(y.dtype) + self.frozen).index_select(0, chosen), "chosen": chosen}


class Reference:
    """One process that does mixed precision by hand, with torch alone: a copy in the dtypes of compute, its
    gradients averaged over the ranks' parts in float32, and float32 parameters that are stepped."""

    def __init__(self) -> None:
        self.master = fresh(Layers)
        self.master.offset = self.master.offset.to(HALF)

    def backward(self, world_size: int, step: int) -> None:
        parts = []
        for rank in range(world_size):
            copy = deepcopy(self.master)
            for module in (copy.first, copy.second):
                module.to(HALF)
            copy.scale.data, copy.frozen.data = copy.scale.data.to(HALF), copy.frozen.data.to(HALF)
            copy.norm.register_forward_pre_hook(lambda _, args: (args[0].to(FULL),))
            copy.norm.register_forward_hook(lambda _, args, out: out.to(HALF))
            x, chosen = inputs(step, rank, world_size)
            copy(x.to(HALF), chosen=chosen)["y"].to(FULL).square().mean().backward()
            parts.append({name: param.grad for name, param in copy.named_parameters() if param.grad is not None})
        for name, param in self.master.named_parameters():
            if name in parts[0]:
                param.grad = torch.stack([part[name].to(FULL) for part in parts]).mean(0)


def inputs(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).tensor_split(world_size)[rank]
    return x, torch.arange(len(x)).flip(0)


def train(rank: int, world_size: int) -> dict[int, Any]:
    """By stage: the weights after some steps, the bytes that a step sends, and dtypes observed on the way."""
    found = {}
    for stage in STAGES:
        model = sharded(fresh(Layers), tz.Policy(stage=stage, mixed_precision=MIXED, gather_last_units_once=False))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, chosen = inputs(step, rank, world_size)
            with count_sends() as sent:
                out = model(x, chosen=chosen)
                out["y"].square().mean().backward()
            grads = {name: param.grad for name, param in model.named_parameters()}
            optimizer.step()
        traces, state = tz.traces_of(model), sharded_model(model).state
        kept = {proxy for proxy in saved(traces.forward) if proxy in named_inputs(traces)}
        found[stage] = {
            "weights": tz.full_state_dict(model),
            "grads": grads,
            "sent": sum(sent),
            "plan": traces.plan,
            "sends": sum(map(traces.timeline.bytes_sent, traces.timeline.ops)),
            "dtypes": {value.dtype for entry in optimizer.state.values() for value in entry.values()},
            "returned": (out["y"].dtype, out["chosen"].dtype),
            "saved parameters": kept,
            "shares memory": {path for path in state.shards if path in state.resident.shared},
        }
    return found


def named_inputs(traces: tz.Traces) -> dict[str, Any]:
    return {proxy.name: proxy for proxy in traces.forward.args}


@pytest.fixture(scope="module")
def ranks(ranks_pool: RanksPool) -> list[dict[int, Any]]:
    return ranks_pool.run(3, train, timeout=110)


@pytest.fixture(scope="module")
def reference() -> Callable[[int], tuple[dict[str, Tensor], dict[str, Tensor]]]:
    def make(world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        one = Reference()
        optimizer = torch.optim.AdamW(one.master.parameters(), 0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            one.backward(world_size, step)
            grads = {
                name: param.grad.clone() for name, param in one.master.named_parameters() if param.grad is not None
            }
            optimizer.step()
        return one.master.state_dict(), grads

    return make


@pytest.mark.parametrize("stage", STAGES)
def test_it_trains_as_one_process_that_casts_by_hand(ranks: Any, reference: Any, stage: int) -> None:
    """Up to the rounding of one bfloat16 operation: Thunder's decompositions round in other places than eager."""
    weights, grads = reference(len(ranks))
    for found in ranks:
        assert found[stage]["weights"].keys() == weights.keys()
        for name, weight in weights.items():
            assert error(found[stage]["weights"][name], weight) < 2e-2, name
    plan = ranks[0][stage]["plan"]
    for name, right in grads.items():
        parts = [found[stage]["grads"][name] for found in ranks]
        assert {part.dtype for part in parts} == {FULL}
        full = whole(parts, right.shape, sharded=plan.by_name[name].sharded)
        assert error(full, right) < 2e-2, name


@pytest.mark.parametrize("stage", STAGES)
def test_shards_are_float32_and_outputs_have_the_dtypes_asked_for(ranks: Any, stage: int) -> None:
    for found in ranks:
        of_stage = found[stage]
        assert {weight.dtype for name, weight in of_stage["weights"].items() if name != "offset"} == {FULL}
        assert of_stage["weights"]["offset"].dtype is HALF
        assert of_stage["dtypes"] == {FULL}
        assert of_stage["returned"] == (FULL, torch.int64)
        uncast = {"norm.weight", "norm.bias", "router"}
        assert of_stage["shares memory"] == (uncast if stage == 1 else set())


@pytest.mark.parametrize("stage", STAGES)
def test_gathers_travel_in_half_the_bytes(ranks: Any, stage: int) -> None:
    """Gradients in float32; parameters in bfloat16, except the norm and the router. Mean over ranks."""
    world_size = len(ranks)
    u = (world_size - 1) / world_size
    square, row = WIDTH * WIDTH, WIDTH  # elements of a weight, of all else
    trained = 2 * (square + row) + 3 * row  # and the scalar, which is all-reduced
    gathered = 2 * (2 * (square + row) + row) + 4 * 3 * row
    again = 2 * square + 4 * 2 * row  # what backward reads: the second weight, the norm's, the router
    sharded = 4 * trained + (stage > 0) * gathered + (stage == 3) * again
    expected = u * (2 * sharded + 2 * 4 if stage == 0 else sharded + 2 * 4)
    assert sum(found[stage]["sent"] for found in ranks) / world_size == pytest.approx(expected)
    for found in ranks:  # the forecast of an all-reduce is rounded up, once for each parameter
        assert 0 <= found[stage]["sends"] - found[stage]["sent"] <= (8 * 4 if stage == 0 else 4)


def test_no_cast_copy_is_saved_for_backward() -> None:
    """Forward saves parameters for backward as float32 inputs only: shards, or parameters that are full at rest."""
    x, chosen = inputs(0, 0, 1)
    for stage in (0, 3):
        policy = tz.Policy(stage=stage, mixed_precision=MIXED, gather_last_units_once=False)
        result = tz.trace(fresh(Layers), x, chosen=chosen, policy=policy, world_size=3)
        handed = saved(result.forward)
        made = {
            proxy.name
            for bsym in result.forward.bound_symbols
            if bsym.sym.name.startswith(("zero_cast", "zero_wait"))
            for proxy in bsym.flat_proxy_outs
        }
        assert made
        assert not handed & made
        assert {"t_first_weight", "t_second_weight"} & handed


OVERFLOWS = {
    **{f"stage {stage}": (stage, tz.MixedPrecision(torch.float16, output_dtype=FULL), ()) for stage in STAGES},
    "reduced in float16": (3, tz.MixedPrecision(reduce_dtype=torch.float16), ()),
    "ignored": (2, tz.MixedPrecision(torch.float16, output_dtype=FULL), ("shift",)),
}


def overflow(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Steps under torch's own gradient scaler; the second one overflows on the last rank only, and if a parameter is
    ignored, in that parameter only."""
    found = []
    for stage, half, ignored in OVERFLOWS.values():
        model = sharded(fresh(Gate), tz.Policy(stage=stage, mixed_precision=half, ignored=ignored))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=100)
        seen: dict[str, Any] = {"scales": [], "weights": []}
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((2, 4), 1e-3) if ignored else torch.ones(1, 4) * (1 + rank)
            out, overflows = model(x), step == 1 and rank == world_size - 1
            loss = out[:, -1].sum() * 1e5 if overflows else out.sum()  # float16 ends at 65504
            if ignored:  # 16 times 2500 is a finite gradient of each of two rows, and their sum is not
                loss = out.sum() * (2500.0 if overflows else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen["scales"].append(scaler.get_scale())
            seen["weights"].append(tz.full_state_dict(model))
        found.append(seen)
    return found


class Gate(nn.Module):
    """Four rows; the last rank owns the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(4, 4, bias=False), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + self.shift.to(y.dtype)


@pytest.mark.parametrize("world_size", of_tier([2], [1, 2]))
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks_pool: RanksPool, world_size: int) -> None:
    for of_rank in ranks_pool.run(world_size, overflow):
        for seen in of_rank:
            assert seen["scales"] == [16.0, 8.0, 8.0]
            first, second, third = seen["weights"]
            for name in first:
                assert torch.equal(first[name], second[name]), (name, "skipped")
                assert not torch.equal(second[name], third[name]), (name, "goes on")
                assert third[name].isfinite().all()


def deferred(rank: int, world_size: int) -> dict[str, Any]:
    """An accumulation under ``no_sync``, and one without."""
    found: dict[str, Any] = {}
    for way in ("no_sync", "each"):
        model = sharded(fresh(Layers), tz.Policy(stage=2, mixed_precision=MIXED))
        for step in range(STEPS):
            x, chosen = inputs(step, rank, world_size)
            if way == "no_sync" and step < STEPS - 1:
                with model.no_sync():
                    model(x, chosen=chosen)["y"].square().mean().backward()
                found["deferred"] = {grad.dtype for grad in sharded_model(model).state.accumulation._deferred.values()}
            else:
                model(x, chosen=chosen)["y"].square().mean().backward()
        found[way] = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return found


def test_deferred_gradients_add_up_in_the_dtype_in_which_they_are_reduced(ranks_pool: RanksPool) -> None:
    for found in ranks_pool.run(2, deferred):
        assert found["deferred"] == {FULL}
        for name, grad in found["each"].items():
            assert error(found["no_sync"][name], grad) < 1e-5, name


BATCH, CONTEXT, CURVE = 4, 16, 40


def curve(rank: int, world_size: int, precision: tz.MixedPrecision | None) -> list[float]:
    """The losses of the example's GPT, which learns to count; in eager float32 if no precision is given."""
    torch.manual_seed(0)
    model: Any = GPT(GPTConfig(2, 32, 2, CONTEXT, True))
    if precision is not None:
        model = thunder.jit(model, transforms=[tz.ZeroTransform(stage=3, mixed_precision=precision)])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(CURVE):
        windows = (torch.randint(0, 256, (BATCH, 1), generator=generator) + torch.arange(CONTEXT + 1)) % 256
        windows = windows.tensor_split(world_size)[rank]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_the_loss_curve_in_bfloat16_follows_float32(ranks_pool: RanksPool) -> None:
    (eager,) = ranks_pool.run(1, curve, None)
    ranks = ranks_pool.run(2, curve, tz.MixedPrecision(HALF, FULL))
    found = [sum(losses) / 2 for losses in zip(*ranks, strict=True)]
    assert eager[-1] < eager[0] - 1.5
    assert max(abs(ours - right) for ours, right in zip(found, eager, strict=True)) < 0.05


def eighths(rank: int, world_size: int) -> list[str]:
    """A trained parameter in a dtype that no backend sums; a frozen one is only gathered."""
    found = []
    for trained in (True, False):
        module = Gate()
        module.extra = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=trained)
        found.append(raised(lambda module=module: sharded(module, 3)))  # type: ignore[misc]
    return found


def test_a_dtype_that_cannot_be_reduced_is_refused_on_all_ranks(ranks_pool: RanksPool) -> None:
    for trained, frozen in ranks_pool.run(2, eighths):
        assert (
            "cannot reduce the gradient of parameter 'extra': the backend has no sum of torch.float8_e4m3fn" in trained
        )
        assert "mixed_precision with reduce_dtype=torch.float32" in trained
        assert frozen == "nothing"


@dataclass
class Output:
    """A dataclass, as some models return one."""

    y: Tensor
    steps: int


class Borders(nn.Module):
    """A linear router and a norm under overrides, a tied head, and a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.norm = nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Output:
        return Output(self.head(self.norm(self.router(self.embed(tokens)))), 1)


def test_an_empty_override_computes_in_the_dtype_of_the_module() -> None:
    """Its inputs are cast to its own dtype and its outputs back; a tied one has the override of any of its names."""
    kept = {name: tz.MixedPrecision() for name in ("router", "norm", "head")}
    half = tz.MixedPrecision(HALF, output_dtype=FULL, overrides=kept)
    policy = tz.Policy(stage=3, mixed_precision=half)
    plan = tz.make_plan(fresh(Borders), policy, 2, 0)
    assert {param.compute_dtype for param in plan.params} == {FULL}
    del kept["head"]
    half = tz.MixedPrecision(HALF, output_dtype=FULL, overrides=kept)
    policy = tz.Policy(stage=3, mixed_precision=half)
    tokens = torch.zeros(2, dtype=torch.long)
    result = tz.trace(fresh(Borders), tokens, policy=policy, world_size=2)
    assert {p.path: p.compute_dtype for p in result.plan.params if "weight" in p.path} == {
        "embed.weight": HALF,
        "router.weight": FULL,
        "norm.weight": FULL,
    }
    (returned,) = result.forward.bound_symbols[-1].args[0]["flat_output"]
    assert to_torch_dtype(returned.dtype) is FULL
    different = {"embed": tz.MixedPrecision(), "head": tz.MixedPrecision(torch.float64)}
    policy = tz.Policy(mixed_precision=tz.MixedPrecision(HALF, overrides=different))
    assert "different overrides for 'embed.weight' and 'head.weight', which are one tied parameter" in raised(
        lambda: tz.make_plan(fresh(Borders), policy, 2, 0)
    )


def reload(rank: int, world_size: int) -> dict[str, Tensor]:
    """A state dict of another dtype is cast to the shards' dtype."""
    model = sharded(fresh(Gate), tz.Policy(mixed_precision=tz.MixedPrecision(HALF, output_dtype=FULL)))
    model.load_original_state_dict({name: value.double() for name, value in fresh(Gate).state_dict().items()})
    model(torch.ones(1, 4)).sum().backward()
    return tz.full_state_dict(model)


def test_a_state_dict_of_another_dtype_is_cast(ranks_pool: RanksPool) -> None:
    for weights in ranks_pool.run(2, reload):
        assert all(torch.equal(weights[name], value) for name, value in fresh(Gate).state_dict().items())


def test_refused_overrides() -> None:
    assert "param_dtype is torch.int32; give one of torch.float16" in raised(lambda: tz.MixedPrecision(torch.int32))
    assert "the override of 'a' is torch.float32; give a thunder_zero.MixedPrecision" in raised(
        lambda: tz.MixedPrecision(overrides={"a": torch.float32})  # type: ignore[dict-item]
    )
    assert "overrides is ['a']; give a dict" in raised(lambda: tz.MixedPrecision(overrides=["a"]))  # type: ignore[arg-type]
    policy = tz.Policy(mixed_precision=tz.MixedPrecision(overrides={"blocks.*.norm": NORM}))
    assert "overrides 'blocks.*.norm', which fits no parameter and no submodule of Layers" in raised(
        lambda: tz.make_plan(fresh(Layers), policy, 2, 0)
    )
    assert "mixed_precision is torch.bfloat16; give a thunder_zero.MixedPrecision" in raised(
        lambda: tz.Policy(mixed_precision=HALF)  # type: ignore[arg-type]
    )
