"""Mixed precision computes and sends in one dtype, rests and steps in another, as a process that casts by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.as_one_process import Side, Steps, assert_near, gather_objects, trains_as_one_process
from tests.harness.errors import error_of, fails
from tests.harness.loops import skips_what_overflows
from tests.harness.models import Small, count_sends, fresh, saved, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.schedule import Mesh, make_plan
from thunder_zero.sharded.sharded_model import sharded_model

HALF, FULL = torch.bfloat16, torch.float32
STEPS, ROWS, WIDTH = 3, 6, 9
NORM = tz.MixedPrecision(param_dtype=FULL, output_dtype=HALF)
DOUBLE = tz.MixedPrecision(torch.float64)  # applies to no parameter: the last override that fits decides
OVERRIDES = {"n*": DOUBLE, "*norm": NORM, "router": tz.MixedPrecision()}
MIXED = tz.MixedPrecision(HALF, FULL, FULL, HALF, overrides=OVERRIDES)


class Layers(nn.Module):
    """A model with a norm and a router in float32, a scalar, a frozen row, a buffer, and an input of integers."""

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


class ByHand(Layers):
    """``Layers`` with explicit casts of parameters, of the input, around the norm, and of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", self.get_buffer("offset").to(HALF))

    def forward(self, x: Tensor, *, chosen: Tensor) -> dict[str, Tensor]:
        y = torch.tanh(F.linear(x.to(HALF), self.first.weight.to(HALF), self.first.bias.to(HALF))) + self.offset
        y = self.norm(y.to(FULL)).to(HALF)
        y = torch.tanh(F.linear(y, self.second.weight.to(HALF), self.second.bias.to(HALF))) * self.scale.to(HALF)
        gate = torch.sigmoid(y.float() * self.router)
        return {"y": (y * gate.to(HALF) + self.frozen.to(HALF)).index_select(0, chosen).to(FULL), "chosen": chosen}


def outputs_and_loss(side: Side, step: int) -> tuple[list[Tensor], Tensor]:
    """Return outputs by rank, and their loss. A rank's rows are reversed."""
    (model,) = side.models
    outputs = []
    for x in side.parts(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)), (2, 2, 2)):
        output = model(x, chosen=torch.arange(2).flip(0))
        assert (output["y"].dtype, output["chosen"].dtype) == (FULL, torch.int64), output
        outputs.append(output["y"])
    return outputs, torch.stack([y.square().mean() for y in outputs]).mean()


def train(side: Side) -> Steps:
    (model,) = side.models
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs, loss = outputs_and_loss(side, step)
        loss.backward()
        optimizer.step()
        yield side.gather(torch.cat(outputs))
    assert {value.dtype for entry in optimizer.state.values() for value in entry.values()} == {FULL}


def train_mixed(rank: int, world_size: int, stage: int) -> None:
    """Compare numbers up to the rounding of one bfloat16 operation; check bytes, saved values and dtypes."""
    plain = fresh(ByHand)
    module = fresh(Layers)
    model = sharded(module, tz.Policy(stage=stage, mixed_precision=MIXED, reshard_after_forward=True))
    (weights,) = trains_as_one_process([(model, plain)], train, tolerance=2e-2)
    assert {weight.dtype for name, weight in weights.items() if name != "offset"} == {FULL}
    side = Side([model], rank, world_size)
    model.zero_grad()
    with count_sends() as sent:
        outputs_and_loss(side, 0)[1].backward()
    traces, state = tz.traces_of(model), sharded_model(model).state
    check_bytes(stage, world_size, gather_objects(sum(sent)))
    forecast = sum(traces.timeline.traffic(op).sent for op in traces.timeline.ops)  # rounded up for an all-reduce
    assert 0 <= forecast - sum(sent) <= (8 * 4 if stage == 0 else 4), (forecast, sum(sent))
    uncast = {"norm.weight", "norm.bias", "router"}
    assert {path for path, param in state.params.items() if param.shares_memory} == (uncast if stage == 1 else set())
    if stage != 1:  # ZeRO-1 has full copies at rest
        check_saved_values(traces)
    check_deferred_sums(side)
    load_doubles(model, module)


def check_bytes(stage: int, world_size: int, sent: list[int]) -> None:
    """Check mean bytes: gradients in float32, parameters in bfloat16 except the norm and the router."""
    u = (world_size - 1) / world_size
    square, row = WIDTH * WIDTH, WIDTH  # elements of a weight, of all else
    trained = 2 * (square + row) + 3 * row  # and the scalar, which is all-reduced
    gathered = 2 * (2 * (square + row) + row) + 4 * 3 * row
    again = 2 * square + 4 * 2 * row  # what backward reads: the second weight, the norm's, the router
    of_shards = 4 * trained + (stage > 0) * gathered + (stage == 3) * again
    expected = u * (2 * of_shards + 2 * 4 if stage == 0 else of_shards + 2 * 4)
    assert sum(sent) / world_size == pytest.approx(expected), sent


def check_saved_values(traces: tz.tools.Traces) -> None:
    """Check that forward saves no cast copy of a parameter for backward."""
    casts = {
        proxy.name
        for bsym in traces.forward.bound_symbols
        if bsym.sym.name.startswith(("zero_cast", "zero_wait"))
        for proxy in bsym.flat_proxy_outs
    }
    assert casts
    assert not saved(traces.forward) & casts
    assert {"t_first_weight", "t_second_weight"} & saved(traces.forward)


def check_deferred_sums(side: Side) -> None:
    """Check that gradients deferred by ``no_sync`` are summed in the dtype of reductions."""
    (model,) = side.models
    grads = []
    for defers in (True, False):
        model.zero_grad()
        for step in range(STEPS):
            if defers and step < STEPS - 1:
                with model.no_sync():
                    outputs_and_loss(side, step)[1].backward()
            else:
                outputs_and_loss(side, step)[1].backward()
        grads.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    for name, grad in grads[1].items():
        assert_near(grads[0][name], grad, name)


def load_doubles(model: Any, module: nn.Module) -> None:
    """Check that a state dict is cast to the dtype at rest."""
    state = module.state_dict()
    model.load_original_state_dict({name: value.double() for name, value in state.items()})
    full = tz.full_state_dict(model)
    assert all(torch.equal(full[name], value) for name, value in state.items() if name != "offset")


@pytest.mark.parametrize("stage", [3, *slow(0, 1)])
def test_it_trains_as_one_process_that_casts_by_hand(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(3, train_mixed, stage)


# Overflows


class Gate(nn.Module):
    """A layer of four rows, the last of which is on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(4, 4, bias=False), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + self.shift.to(y.dtype)


def overflow(rank: int, world_size: int, policy: tz.Policy) -> None:
    """Overflow on the last rank only, and only in the ignored parameter if there is one."""
    model = sharded(fresh(Gate), policy)
    x = torch.full((2, 4), 1e-3) if policy.ignored else torch.ones(1, 4) * (1 + rank)

    def loss(overflows: bool) -> Tensor:
        out, overflows = model(x), overflows and rank == world_size - 1
        if policy.ignored:  # 16 times 2500 is a finite gradient of each of two rows, and their sum is not
            return out.sum() * (2500.0 if overflows else 1.0)
        return out[:, -1].sum() * 1e5 if overflows else out.sum()  # float16 ends at 65504

    skips_what_overflows(model, loss)


COMPUTED, REDUCED = tz.MixedPrecision(torch.float16, output_dtype=FULL), tz.MixedPrecision(reduce_dtype=torch.float16)
OVERFLOWS: dict[str, Any] = {
    "computed": (3, COMPUTED),
    "reduced": (3, REDUCED),
    "ignored": (2, COMPUTED, ("shift",)),
    "stage 0": (0, COMPUTED),
    "stage 1": (1, COMPUTED),
}


@pytest.mark.parametrize("case", ["computed", "ignored", *slow("reduced", "stage 0", "stage 1")])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks_pool: RanksPool, case: str) -> None:
    stage, precision, *ignored = OVERFLOWS[case]
    policy = tz.Policy(stage=stage, mixed_precision=precision, ignored=ignored[0] if ignored else ())
    ranks_pool.run(2, overflow, policy)


# Overrides and refusals


def make_overrides(**overrides: tz.MixedPrecision) -> tz.Policy:
    return tz.Policy(stage=3, mixed_precision=tz.MixedPrecision(HALF, output_dtype=FULL, overrides=overrides))


def test_a_tied_parameter_has_the_override_of_any_of_its_names() -> None:
    for overrides, dtype in (({"head": tz.MixedPrecision()}, FULL), ({"row": tz.MixedPrecision()}, HALF)):
        plan = make_plan(fresh(Small), make_overrides(**overrides), Mesh.of(2))
        assert plan.by_name["embed.weight"].compute_dtype is dtype


def test_bad_overrides_are_refused() -> None:
    wrong: Any = tz.MixedPrecision
    blocks = tz.Policy(mixed_precision=tz.MixedPrecision(overrides={"blocks.*.norm": NORM}))
    rows: list[tuple[Callable[[], Any], str]] = [
        (lambda: wrong(torch.int32), "param_dtype is torch.int32; give one of torch.float16"),
        (lambda: wrong(overrides={"a": FULL}), "the override of 'a' is torch.float32; give a thunder_zero.Mixed"),
        (lambda: wrong(overrides=["a"]), "overrides is ['a']; give a dict"),
        (
            lambda: make_plan(fresh(Layers), blocks, Mesh.of(2)),
            "overrides 'blocks.*.norm', which fits no parameter and no submodule of Layers",
        ),
        (
            lambda: make_plan(fresh(Small), make_overrides(embed=tz.MixedPrecision(), head=DOUBLE), Mesh.of(2)),
            "different overrides for 'embed.weight' and 'head.weight', which are one tied parameter",
        ),
        (
            lambda: tz.Policy(mixed_precision=HALF),  # type: ignore[arg-type]
            "mixed_precision is torch.bfloat16; give a thunder_zero.MixedPrecision",
        ),
    ]
    for call, words in rows:
        fails(call, words)


def reduce_float8(rank: int, world_size: int) -> None:
    """Refuse a trained parameter in a dtype that no backend sums; accept a frozen one, which is only gathered."""
    errors = []
    for trained in (True, False):
        module = Gate()
        module.extra = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=trained)
        errors.append(error_of(lambda module=module: sharded(module, 3)))  # type: ignore[misc]
    assert "the gradient of parameter 'extra': the backend has no sum of torch.float8_e4m3fn" in errors[0], errors
    assert "mixed_precision with reduce_dtype=torch.float32" in errors[0], errors
    assert errors[1] == "nothing", errors


def test_a_dtype_that_cannot_be_reduced_is_refused_on_all_ranks(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, reduce_float8)
