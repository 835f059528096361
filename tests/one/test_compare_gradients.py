"""``tz.tools.compare_gradients`` gives no alarm for right programs, and names the error of each wrong one."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import thunder_zero as tz
from tests.harness import steps_of_transformers as transformers
from tests.harness.steps import CopyToSlices, SumOfSlices
from thunder_zero.compat.plans_of_transformers import apply_plan
from thunder_zero.tools import compare_gradients

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
Parallelize = Callable[[Any, DeviceMesh], Any]
TP, DP = {"tp": 2}, {"dp": 2}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(3, 32, (4, 8), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": torch.arange(8).expand(4, 8)}


class Net(nn.Module):
    """An MLP with a buffer, a frozen parameter and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(8), nn.Linear(16, 8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x * self.frozen + self.shift)
        return self.down(F.relu(self.up(x)))


def llama(kind: str = "Llama") -> Any:
    pytest.importorskip("transformers")
    return transformers.model(kind)


# right programs


def fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh["dp"])


def sliced(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def llama_sliced_and_sharded(model: Any, mesh: DeviceMesh) -> None:
    transformers.slice_tensors(model, mesh)
    transformers.shard(model, mesh)


def by_hand(divisor: float = 2.0) -> Parallelize:
    """Return DDP by hand: gradients are summed and divided."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        group = mesh.get_group("dp")

        def reduce(grad: Tensor) -> Tensor:
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
            return grad / divisor

        for param in model.parameters():
            if param.requires_grad:
                param.register_hook(reduce)

    return parallelize


@pytest.mark.parametrize(
    ("build", "parallelize", "mesh"),
    [
        pytest.param(Net, fsdp, DP, id="FSDP2"),
        pytest.param(Net, by_hand(), DP, id="DDP by hand"),
        pytest.param(Net, lambda model, mesh: tz.compile(model, stage=3), DP, id="ours"),
        pytest.param(Net, sliced, TP, id="TP"),
        pytest.param(llama, llama_sliced_and_sharded, {"dp": 2, "tp": 2}, id="FSDP2 and TP"),
        pytest.param(llama, transformers.slice_sequence, TP, id="SP"),
        pytest.param(llama, lambda model, mesh: apply_plan(model, mesh["tp"], None), TP, id="transformers' plan"),
    ],
)
def test_a_right_program_gives_no_alarm(build: Callable[[], nn.Module], parallelize: Any, mesh: dict[str, int]) -> None:
    comparison = compare_gradients(build, parallelize, X if build is Net else TEXT, mesh)
    assert comparison.right, str(comparison)
    assert str(comparison).endswith("against one process: all values right") or comparison.notes
    module = build()
    params = [name for name, _ in module.named_parameters()]
    names = ["loss", *params, *["total norm"] * (not comparison.notes)]
    assert [row.name for row in comparison.rows] == names
    assert max(row.error for row in comparison.rows) < 1e-6


# slices by hand


def megatron(*, bias_on_each: bool = False, copied: bool = True, wrong_gather: bool = False) -> Parallelize:
    """Return tensor parallelism by hand, with faults."""

    def parallelize(model: Net, mesh: DeviceMesh) -> None:
        group, rank = mesh.get_group("tp"), mesh.get_local_rank("tp")
        up, down = model.up, model.down
        for linear, name, dim in ((up, "weight", 0), (up, "bias", 0), (down, "weight", 1)):
            if not (wrong_gather and linear is down):
                part = getattr(linear, name).detach().chunk(2, dim)[rank].clone()
                setattr(linear, name, nn.Parameter(part))

        def forward(x: Tensor) -> Tensor:
            x = model.norm(x * model.frozen + model.shift)
            hidden = F.relu(F.linear(CopyToSlices.apply(x, group) if copied else x, up.weight, up.bias))
            if wrong_gather:
                parts = [torch.zeros_like(hidden) if index != rank else hidden for index in range(2)]
                return down(SumOfSlices.apply(torch.cat(parts, 0), group).reshape(len(x), -1))  # dimension 1 is right
            if bias_on_each:
                return SumOfSlices.apply(F.linear(hidden, down.weight, down.bias), group)
            return SumOfSlices.apply(F.linear(hidden, down.weight), group) + down.bias

        model.forward = forward  # type: ignore[method-assign]

    return parallelize


def clip(count_whole_once: bool) -> Callable[[Any, float], Tensor]:
    """Return a function that clips the norm of slices. Parameters that are whole on each rank must count once."""

    def clip(model: Any, max_norm: float) -> Tensor:
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        grads = {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
        sliced = [name for name in grads if not count_whole_once or name in ("up.weight", "up.bias", "down.weight")]
        square = torch.stack([grads[name].square().sum() for name in sliced]).sum()
        dist.all_reduce(square)
        square += sum(grads[name].square().sum() for name in grads.keys() - {*sliced})
        for grad in grads.values():
            grad *= max_norm / square.sqrt()
        return square.sqrt()

    return clip


def errors(
    parallelize: Parallelize, mesh: dict[str, int] = TP, build: Any = Net, batch: Any = X, **options: Any
) -> dict[str, str]:
    """Return the sentences of wrong values by name."""
    comparison = compare_gradients(build, parallelize, batch, mesh, **options)
    assert not comparison.right
    return {row.name: row.sentence for row in comparison.wrong}


def hooked(name: str, hook: Callable[[Tensor], Tensor]) -> Parallelize:
    """Return a function that changes the gradient of a parameter."""
    return lambda model, mesh: model.get_parameter(name).register_hook(hook) and None


def unchanged(model: nn.Module, mesh: DeviceMesh) -> None:
    pass


SHARE = "one rank's share: the sum over tp is the true value; it is not reduced over tp"
LAYERS = [f"model.layers.{index}" for index in (0, 1)]
NORMS = [f"{layer}.{name}_layernorm.weight" for layer in LAYERS for name in ("input", "post_attention")]
TRAINED = [f"{layer}.{name}" for layer in ("up", "norm", "down") for name in ("weight", "bias")]


def test_slices_by_hand_are_right_with_a_norm_of_their_own() -> None:
    comparison = compare_gradients(Net, megatron(), X, TP, clip=clip(True))
    assert comparison.right, str(comparison)
    assert comparison.rows[-1].name == "total norm"
    assert [*errors(megatron())] == ["total norm"]  # torch's function takes slices for parameters
    whole = "counts parameters that are whole on each rank of tp 2 times"
    assert errors(megatron(), clip=clip(False)) == {"total norm": whole}
    assert errors(sliced, clip=clip(False)) == {"total norm": whole}  # of DTensors


def test_a_gradient_that_is_not_reduced_is_a_share_of_each_rank() -> None:
    no_norms = partial(transformers.slice_sequence, norms=False)
    assert errors(no_norms, build=llama, batch=TEXT) == dict.fromkeys(NORMS, SHARE)
    heads = [f"{layer}.self_attn.{name}_norm.weight" for layer in LAYERS for name in "qk"]
    assert errors(transformers.slice_tensors, build=partial(llama, "Qwen3"), batch=TEXT) == dict.fromkeys(heads, SHARE)
    no_f = errors(megatron(copied=False), clip=clip(True))
    assert no_f.items() >= {"norm.weight": SHARE, "norm.bias": SHARE}.items()
    own = "one rank's own value: the mean over dp is the true value; it is not averaged over dp"
    batches = errors(unchanged, DP)
    assert {sentence for name, sentence in batches.items() if name != "total norm"} == {own}


def test_a_bias_that_counts_twice() -> None:
    wrong = errors(megatron(bias_on_each=True), clip=clip(True))
    assert next(iter(wrong.items())) == (
        "loss",
        "'down.bias' counts 2 times: a bias added on each rank of tp; forward differs, so gradients do",
    )

    def parallelize(model: Net, mesh: DeviceMesh) -> None:
        sliced(model, mesh)
        model.down.bias.register_hook(lambda grad: 2 * grad)

    (row,) = compare_gradients(Net, parallelize, X, TP).wrong
    assert (row.name, row.sentence) == ("down.bias", "2 times the true value: counted once on each rank of tp")
    assert row.factor == pytest.approx(2)


def test_a_mean_divided_twice_and_a_sum_that_is_not_divided() -> None:
    twice = "1/2 of the true value: divided by the size of dp once too often"
    never = "2 times the true value: counted once on each rank of dp"
    assert errors(by_hand(4), DP) == dict.fromkeys([*TRAINED, "total norm"], twice)
    assert errors(by_hand(1), DP) == dict.fromkeys([*TRAINED, "total norm"], never)


def test_a_loss_divided_by_each_rank_s_own_count() -> None:
    labels = TOKENS.clone()
    labels[0, :5] = -100
    means = "the mean of means over the parts of dp: each rank divides by its own count, and counts differ"
    local = errors(transformers.shard, DP, llama, {**TEXT, "labels": labels})
    assert local.pop("loss") == f"{means}; forward differs, so gradients do"
    assert {sentence for name, sentence in local.items() if name != "total norm"} == {means}
    own = "each rank's value is that of its own part of the batch; it is not averaged over dp"
    assert errors(unchanged, DP, llama, {**TEXT, "labels": labels})["model.norm.weight"] == own


def test_a_loss_may_be_the_sum_over_ranks_and_axes_may_have_any_names() -> None:
    def share(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum() / X.numel()

    comparison = compare_gradients(Net, by_hand(1), X, DP, loss=share)
    assert comparison.right, str(comparison)
    order: list[tuple[Any, Tensor]] = []

    def parallelize(model: Net, mesh: DeviceMesh) -> None:
        model.register_forward_hook(lambda module, args, output: order.append((mesh.get_coordinate(), args[0])))

    compare_gradients(Net, parallelize, X, {"b": 2, "tp": 1, "a": 2}, data_axes=["b", "a"])
    parts = sorted((tuple(coordinates), part.tolist()) for coordinates, part in order)
    assert [coordinates for coordinates, _ in parts] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert [part for _, part in parts] == X.double()[:, None].tolist()


def test_a_gather_along_the_wrong_dimension() -> None:
    forward = errors(megatron(wrong_gather=True))
    assert next(iter(forward)) == "loss"
    assert forward["loss"].endswith("times the true value; forward differs, so gradients do")

    def gather(grad: Tensor) -> Tensor:
        parts = [torch.empty(8, 8, dtype=grad.dtype) for _ in range(2)]
        dist.all_gather(parts, grad.chunk(2)[dist.get_rank()].contiguous())
        return torch.cat(parts, 1).reshape(16, 8)

    order = "the true value with its rows along dimension 0 in another order"
    assert errors(hooked("up.weight", gather)) == {"up.weight": order}


# what parameters may be


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.embed.weight @ x.T).T)


def test_tied_parameters_have_one_row_and_must_stay_tied() -> None:
    right = compare_gradients(Tied, fsdp, X, DP)
    assert right.right
    assert [row.name for row in right.rows] == ["loss", "embed.weight", "total norm"]

    def untie(model: Tied, mesh: DeviceMesh) -> None:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())

    assert errors(untie, build=Tied)["embed.weight"] == "tied to head.weight in the plain module, but no longer"


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, lambda part: torch.compile(part, backend="eager")])
def test_wrappers_leave_the_names_of_parameters(wrap: Any) -> None:
    assert compare_gradients(Net, lambda model, mesh: setattr(model, "up", wrap(model.up)), X, {"tp": 1}).right
    whole = errors(lambda model, mesh: nn.Sequential(wrap(model)), {"tp": 1})
    assert whole["up.weight"] == "the parallel model has no such parameter on rank 0"
    assert whole["0.up.weight"] == "the plain module has no parameter of this name"


def test_a_missing_gradient_and_a_surplus_one_are_errors() -> None:
    def freeze_and_thaw(model: Net, mesh: DeviceMesh) -> None:
        model.norm.weight.requires_grad_(mesh.get_local_rank() == 0)
        model.frozen.requires_grad_()

    wrong = errors(freeze_and_thaw)
    assert wrong["norm.weight"] == "no gradient on rank 1; the plain module has one"
    assert wrong["frozen"] == "not zero, as the true value is"
    assert wrong.keys() == {"norm.weight", "frozen", "total norm"}

    def drop(model: Net, mesh: DeviceMesh) -> None:  # a gradient in slices that only one rank has is not gathered
        sliced(model, mesh)
        if mesh.get_local_rank() == 1:
            model.up.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))

    assert errors(drop) == {"up.weight": "no gradient on rank 1; the plain module has one"}


def test_zeros_hide_no_error_but_a_gradient_that_is_zero_but_for_rounding_is_right() -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.shift = nn.Linear(8, 2), nn.Linear(2, 8), nn.Parameter(torch.ones(1))
            nn.init.zeros_(self.outer.weight)  # the gradients of inner are zero

        def forward(self, x: Tensor) -> Tensor:
            # like a bias of keys, shift changes nothing but rounding
            return F.softmax(10 * self.outer(self.inner(x)) + self.shift / 3, -1)

    wrong = errors(hooked("inner.weight", lambda grad: 3 * grad), build=Adapter)
    assert wrong["inner.weight"] == "3 times the true value"

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        by_hand()(model, mesh)
        hooked("shift", lambda grad: grad + 1e-18)(model, mesh)  # on some CPUs the rounding errors are equal

    comparison = compare_gradients(Adapter, parallelize, X, DP)
    assert comparison.right, str(comparison)
    (error,) = (row.error for row in comparison.rows if row.name == "shift")
    assert error > 0.01  # of about 1e-18


def test_a_value_that_differs_before_the_step_is_named() -> None:
    def parallelize(model: Net, mesh: DeviceMesh) -> None:
        with torch.no_grad():
            model.up.bias.mul_(2)
        model.unused = nn.Parameter(torch.ones(3))

    wrong = errors(parallelize)
    twice = "2 times the true value: counted once on each rank of tp"
    assert wrong["up.bias"] == f"not the gradient, but its value before the step is wrong: {twice}"
    shapes = "the shape is (3,) on ranks and (8,) in the plain module, and ranks have no equal slices of it"
    assert wrong["unused"] == shapes


def test_dropout_is_off_and_other_chance_is_refused() -> None:
    class Chance(nn.Module):
        def __init__(self, p: float = 0.5) -> None:
            super().__init__()
            self.linear, self.drop, self.dropout_prob, self.p = nn.Linear(8, 8), nn.Dropout(0.5), 0.5, p

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(self.drop(self.linear(x)), self.dropout_prob, self.training)
            return F.dropout(x, self.p)

    comparison = compare_gradients(lambda: Chance(0.0), by_hand(), X, DP)
    assert comparison.right
    assert comparison.notes == ("dropout is set to 0 in 2 modules, such as ''",)
    with pytest.raises(ValueError, match=r"the plain module's loss is random: [\d.]+, then [\d.]+; turn that off"):
        compare_gradients(Chance, by_hand(), X, DP)


# the process


class Pair(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def test_arguments_are_checked() -> None:
    none: Any = None
    on_meta: Any = {"build": lambda: Net().to("meta")}
    cases: dict[str, dict[str, Any]] = {
        r"mesh_shape is None; give the sizes of axes by name": {"mesh": none},
        r"axis 'dp' has the size 0; give a positive number of ranks": {"mesh": {"dp": 0}},
        r"shape \(4, 8\), which 3 ranks with different parts cannot divide": {"mesh": {"dp": 3}},
        r"build returns Tensor; return the plain nn.Module": {"build": lambda: X},
        r"'frozen' is on the meta device; let build\(\) return a plain module with values": on_meta,
        r"the model returns tuple; give a function of model and batch as loss=": {"build": Pair},
        r"does axis 'ranks' cut the batch\? Give the axes that do as data_axes=": {"mesh": {"ranks": 2}},
        r"the plain module gives no finite values: the loss": {"batch": X / 0},
        r"data_axes has 'x', which mesh_shape lacks; its axes are dp": {"data_axes": ["x"]},
        r"the loss is torch.Size\(\[4, 8\]\); return a tensor with one element": {"loss": lambda model, x: model(x)},
    }
    for match, arguments in cases.items():
        with pytest.raises((TypeError, ValueError), match=match):
            errors(by_hand(), **{"mesh": DP, **arguments})


def one_rank_calls(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)
    if mesh.get_local_rank() == 0:
        dist.all_reduce(torch.ones(1), group=mesh.get_group())


def two_orders(model: nn.Module, mesh: DeviceMesh) -> None:
    groups = [mesh.get_group(), dist.new_group([0, 1])]
    for group in groups if mesh.get_local_rank() == 0 else groups[::-1]:
        dist.all_reduce(torch.ones(1), group=group)


def one_rank_makes_a_group(model: nn.Module, mesh: DeviceMesh) -> None:
    if mesh.get_local_rank() == 1:
        dist.new_group([0, 1])


def one_rank_raises(model: nn.Module, mesh: DeviceMesh) -> None:
    if mesh.get_local_rank() == 1:
        raise KeyError("weights")
    dist.all_reduce(torch.ones(1))


def one_rank_runs_forever(model: nn.Module, mesh: DeviceMesh) -> None:
    while mesh.get_local_rank() == 0:
        time.sleep(0.01)


ALL = "every rank must call the same collectives of a group in the same order"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (one_rank_calls, f"rank 0, rank 1 wait for ranks that do not come; {ALL}"),
        (two_orders, f"rank 0, rank 1 wait for ranks that do not come; {ALL}"),
        (one_rank_makes_a_group, f"rank 0, rank 1 still run after 4 s; {ALL}"),
        (one_rank_runs_forever, f"rank 0, rank 1 still run after 4 s; {ALL}"),
        (one_rank_raises, r"rank 1 of 2 raised KeyError: 'weights'"),
    ],
)
def test_a_fault_of_ranks_ends_with_an_error_and_without_threads(fault: Parallelize, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as raised:
        compare_gradients(Net, fault, X, TP, timeout=4 if "still run" in message else 60)
    cause = "".join(traceback.format_exception(raised.value.__cause__))
    assert f"in {fault.__name__}\n" in cause  # its line
    assert "on rank 1\n" in cause
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")] == []
    assert compare_gradients(Net, by_hand(), X, DP).right  # another call works


def sum_in_another_thread(group: Any) -> Tensor:
    """Look the group up in another thread, which fails if torch has a registry for each thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(funcol.all_reduce, torch.ones(2), "sum", group).result()


@pytest.mark.usefixtures("group")
def test_the_process_stays_as_it_is() -> None:
    group: Any = dist.group.WORLD
    module = Net()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    hook, random = sys.excepthook, torch.get_rng_state()
    parallelizations: tuple[Parallelize, ...] = (fsdp, one_rank_raises)
    for parallelize in parallelizations:
        with contextlib.suppress(RuntimeError):
            assert compare_gradients(lambda: module, parallelize, X, DP).right
        assert dist.group.WORLD is group
        assert dist.get_world_size() == 1
        assert sys.excepthook is hook
        assert torch.equal(torch.get_rng_state(), random)
        assert torch._C._is_multithreading_enabled()
        assert torch.equal(sum_in_another_thread(group), torch.ones(2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(param.grad is None for param in module.parameters())


def test_a_comparison_inside_of_another_is_refused() -> None:
    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        compare_gradients(Net, by_hand(), X, DP)

    with pytest.raises(
        RuntimeError, match="ranks already run as threads of this process; run one comparison at a time"
    ):
        compare_gradients(Net, parallelize, X, DP)


def test_the_result_prints_each_error_with_its_values() -> None:
    wrong = compare_gradients(llama, unchanged, TEXT, DP)
    lines = str(wrong).splitlines()
    assert lines[0] == "dp=2 against one process: 22 of 23 values wrong"
    assert lines[1] == "one rank's own value: the mean over dp is the true value; it is not averaged over dp"
    assert re.fullmatch(r"  \d\.\de[+-]\d\d  model.embed_tokens.weight", lines[2])
    assert lines[8] == "  and 15 more: .wrong has them"
    assert max(map(len, lines)) <= 100
    assert repr(wrong) == "<GradientComparison: dp=2 against one process: 22 of 23 values wrong>"
    assert wrong.as_dicts()[0] == {"name": "loss", "error": wrong.rows[0].error, "factor": None, "sentence": ""}
    assert wrong.mesh_shape == {"dp": 2}
    with pytest.raises(AttributeError):
        wrong.rows = ()  # type: ignore[misc]
