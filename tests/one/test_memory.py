"""Forecasts of memory (``tz.memory``) on one process: what is counted, and as what. Beside a measurement: tests/ranks.

The bytes in comments are of float32: 4 a number.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz  # before thunder
from tests.harness.errors import raised
from thunder_zero import Holds
from thunder_zero.forecast import figures, replay, watch
from thunder_zero.forecast.regions import Step, memory_of
from thunder_zero.schedule.timeline import Work

import thunder
from thunder.executors.torch_compile import torch_compile_ex

ROWS, WIDTH = 16, 64
WEIGHT, ACTIVATION = WIDTH * WIDTH * 4, ROWS * WIDTH * 4


class Net(nn.Module):
    """Three layers without biases, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.scale)
        return x


@cache
def traces_of(policy: tz.Policy, *, world_size: int = 2, synced: bool = True, fused: bool = False) -> tz.Traces:
    with torch.device("meta"):
        net = Net()
    executors = [torch_compile_ex] if fused else None
    x = torch.empty(ROWS, WIDTH)
    return tz.trace(net, x, policy=policy, world_size=world_size, synced=synced, executors=executors)


def peak_of(kind: Holds, memory: tz.Memory) -> int:
    return max(line.alive.get(kind, 0) for line in memory.lines)


@pytest.mark.slow
def test_the_kinds_of_a_step_by_arithmetic() -> None:
    memory = tz.memory(traces_of(tz.ZERO3), loss=lambda y: y.square().mean(), optimizer=torch.optim.AdamW)
    shards = 3 * WEIGHT // 2
    steps = 3 * 4  # each parameter's number of steps
    assert memory.at_rest == shards + 2 * shards + steps + 4 * WIDTH  # two averages, the buffer
    assert peak_of(Holds.PARAMETER, memory) == shards
    assert peak_of(Holds.OPTIMIZER, memory) == 2 * shards + steps
    assert peak_of(Holds.INPUT, memory) == ACTIVATION
    assert peak_of(Holds.BUFFER, memory) == 4 * WIDTH
    assert peak_of(Holds.GATHERED, memory) == 3 * WEIGHT
    assert peak_of(Holds.FULL_GRADIENT, memory) == 3 * WEIGHT  # all are in flight, in one bucket
    assert peak_of(Holds.REDUCED_GRADIENT, memory) == shards
    assert memory.lines[-1].half == "optimizer step"
    assert memory.optimizer_step is not None
    assert memory.optimizer_step >= memory.at_rest + shards  # the gradients
    assert memory.excluded == ()


@pytest.mark.slow
def test_optimizer_state_has_the_names_of_its_parameter_and_of_the_state() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False, device="meta"))
    traces = tz.trace(net, torch.empty(1, WIDTH), policy=tz.DDP, world_size=2)
    memory = tz.memory(traces, optimizer=torch.optim.AdamW)
    states = [one for one in memory.storages if one.kind is Holds.OPTIMIZER]
    assert [(one.name, one.nbytes) for one in states] == [
        ("0.weight: step", 4),
        ("0.weight: exp_avg", WEIGHT),
        ("0.weight: exp_avg_sq", WEIGHT),
    ]
    assert "  16.0 KiB  optimizer state        0.weight: exp_avg_sq" in str(memory).splitlines()


@pytest.mark.slow
def test_every_row_says_whose_it_is() -> None:
    """Five ranks do not divide 64 rows, so that NCCL's collectives pack gradients into buffers of their own."""
    memory = tz.memory(
        traces_of(tz.ZERO3, world_size=5),
        loss=lambda y: torch.log_softmax(y, -1).mean(),
        optimizer=torch.optim.AdamW,
        backend="nccl",
        accumulating=True,
    )
    count = len(memory.storages)
    with mock.patch.object(figures, "LARGEST", count):
        lines = str(replace(memory, at_peak=memory.storages)).splitlines()
    rows = lines[1 + lines.index(f"the largest of {count} tensors") :][:count]
    pairs = [(one, row[12:].removeprefix(one.kind).strip()) for one, row in zip(memory.storages, rows, strict=True)]
    assert not [one for one, row in pairs if not row or row.startswith(":")]
    shown = {kind: {row for one, row in pairs if one.kind is kind} for kind in Holds}
    paths = {f"layers.{number}.weight" for number in range(3)}
    assert shown[Holds.IN_FLIGHT] == {f"grad {path}" for path in paths}
    assert shown[Holds.GATHERED] == shown[Holds.DEFERRED] == shown[Holds.REDUCED_GRADIENT] == paths
    assert {row.partition(": ")[0] for row in shown[Holds.FULL_GRADIENT]} == paths
    assert shown[Holds.LOSS] == {"loss: the loss and its gradient"}
    assert any(row.startswith("backward: t") for row in shown[Holds.TEMPORARY])  # of the last tanh: no parameter yet


@pytest.mark.slow
def test_what_a_forecast_lacks_is_said() -> None:
    backward = "backward: the traces (of a model: those that ran last) have none; run or trace it with gradients"
    with torch.no_grad():
        memory = tz.memory(tz.trace(Net(), torch.empty(ROWS, WIDTH), world_size=2), loss=Tensor.sum)
    assert memory.excluded == (backward,)
    assert str(memory).splitlines()[-1] == f"left out: {backward}"
    assert tz.memory(tz.trace(Net().requires_grad_(False), torch.empty(ROWS, WIDTH), world_size=2)).excluded == ()
    on_cuda = tz.memory(traces_of(tz.ZERO3), backend="nccl", loss=Tensor.sum, optimizer=torch.optim.AdamW)
    (what,) = on_cuda.excluded
    assert what.startswith(
        "what CUDA computes otherwise: the traces are of a run on CPUs; trace a module that is on a "
    )


@pytest.mark.slow
def test_a_model_that_ran_last_under_no_grad_is_forecast_as_forward_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: Any = thunder.jit(Net(), transforms=[tz.ZeroTransform(stage=3)])
        model(torch.ones(ROWS, WIDTH)).sum().backward()
        assert tz.memory(model).lines[-1].half == "backward"
        with torch.no_grad():
            model(torch.ones(ROWS, WIDTH))
        forward = tz.memory(model)
        assert forward.lines[-1].half == "forward"
        assert forward.excluded[0].startswith("backward: the traces (of a model: those that ran last) have none; ")
        model(torch.ones(ROWS, WIDTH))
        assert tz.memory(model).lines[-1].half == "backward"
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_forecast_cannot_be_changed_and_can_be_compared_hashed_and_sent() -> None:
    first, second = tz.memory(traces_of(tz.ZERO3)), tz.memory(traces_of(tz.ZERO3))
    for counts in (first.by_kind, first.peak_line.alive):
        with pytest.raises(TypeError, match="does not support item assignment"):
            counts[Holds.SAVED] = 0
        assert counts == dict(counts)
        assert hash(counts) == hash(type(counts)(tuple(sorted(counts.items()))))
    assert first == second == pickle.loads(pickle.dumps(first))
    assert hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)).by_kind == first.by_kind
    assert first.by_kind != tz.memory(traces_of(tz.DDP)).by_kind
    with pytest.raises(KeyError):
        first.by_kind[Holds.OPTIMIZER]
    units = tz.memory(traces_of(replace(tz.ZERO3, unit_of=lambda module: ("layers.0",))))
    assert pickle.loads(pickle.dumps(units)) == units


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "message"),
    [
        ({"world_size": "4"}, "world_size is '4'; give the number of ranks, at least 1"),
        ({"world_size": 2.0}, "world_size is 2.0; give the number of ranks, at least 1"),
        ({"world_size": 0}, "world_size is 0; give the number of ranks, at least 1"),
        ({"world_size": 4, "rank": 4}, "rank is 4; with world_size=4 it must be 0 to 3"),
        ({"world_size": 4, "rank": "0"}, "rank is '0'; with world_size=4 it must be 0 to 3"),
        ({"replicas": 0}, "replicas is 0; give the number of copies of the sharded model, at least 1"),
        ({"replicas": "2"}, "replicas is '2'; give the number of copies of the sharded model, at least 1"),
    ],
)
def test_a_world_that_cannot_be(world: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tz.trace(Net(), torch.empty(ROWS, WIDTH), **world)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_the_figures_agree_with_each_other(stage: int) -> None:
    memory = tz.memory(traces_of(tz.Policy(stage)))
    assert sum(memory.by_kind.values()) == memory.peak == max(memory.curve) == memory.peak_line.highest
    assert [one.nbytes for one in memory.at_peak] == sorted((one.nbytes for one in memory.at_peak), reverse=True)
    assert all(sum(line.alive.values()) == line.total <= line.highest for line in memory.lines)
    full = stage < 2  # DDP and ZeRO-1 hold the model in full
    assert memory.at_rest == (3 * WEIGHT if full else 3 * WEIGHT // 2) + 4 * WIDTH
    left = [one for one in memory.storages if one.freed is None and one.kind is Holds.REDUCED_GRADIENT]
    assert {one.name for one in left} == {f"layers.{number}.weight" for number in range(3)}
    assert {one.module for one in memory.storages if one.kind is Holds.SAVED} <= {f"layers.{n}" for n in range(3)}
    assert memory.excluded == (
        "the loss outside of the model: give loss=",
        "the optimizer's state and step: give optimizer=",
    )
    reserved = tz.memory(traces_of(tz.Policy(stage)), reserve=1000)
    assert (reserved.peak, reserved.at_rest) == (memory.peak + 1000, memory.at_rest + 1000)


@pytest.mark.slow
def test_the_loss_holds_the_output_no_longer_than_it_reads_it() -> None:
    """log_softmax saves its result alone: its gradient needs the result, the mean's gradient, and a place."""
    with torch.device("meta"):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
    traces = tz.trace(layer, torch.empty(ROWS, WIDTH), policy=tz.DDP, world_size=2)
    memory = tz.memory(traces, loss=lambda y: torch.log_softmax(y, -1).mean())
    (at,) = (number for number, line in enumerate(memory.lines) if line.half == "loss")
    without_output = memory.lines[at - 1].total - ACTIVATION
    assert 3 * ACTIVATION <= memory.lines[at].highest - without_output <= 3 * ACTIVATION + 64  # and scalars


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, None])
def test_the_caller_holds_the_inputs_until_the_optimizer_steps(optimizer: Any) -> None:
    memory = tz.memory(traces_of(tz.ZERO3), loss=lambda y: y.square().mean(), optimizer=optimizer)
    (given,) = (one for one in memory.storages if one.kind is Holds.INPUT)
    assert given.freed == (None if optimizer is None else len(memory.lines) - 1)  # the last line is the optimizer's
    (buffer,) = (one for one in memory.storages if one.kind is Holds.BUFFER)
    assert buffer.freed is None


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_of_targets_are_not_counted(device: str) -> None:
    targets = torch.zeros(ROWS, WIDTH, device=device)

    def bce(views: int) -> tz.Memory:
        def loss(y: Tensor) -> Tensor:
            kept = [targets.view(-1) for _ in range(views)] + list(targets.chunk(views) if views else ())
            given = (y.view(-1), kept[0]) if views else (y, targets)
            return nn.functional.binary_cross_entropy_with_logits(*given)

        return tz.memory(traces_of(tz.DDP), loss=loss)

    plain, views = bce(0), bce(4)
    assert views.curve == plain.curve
    assert views.by_kind == plain.by_kind


@pytest.mark.slow
def test_what_the_loss_makes_itself_is_counted() -> None:
    """A tensor from a list of numbers, and a copy of the targets, as long as the gradient needs them."""
    targets, numbers = torch.zeros(ROWS, WIDTH), [[0.0] * WIDTH] * ROWS
    plain = tz.memory(traces_of(tz.DDP), loss=lambda y: (y * targets).sum())
    copied = tz.memory(traces_of(tz.DDP), loss=lambda y: (y * targets.clone()).sum())
    listed = tz.memory(traces_of(tz.DDP), loss=lambda y: (y * torch.tensor(numbers)).sum())
    highest = [next(line.highest for line in memory.lines if line.half == "loss") for memory in (plain, copied, listed)]
    assert highest == [highest[0], highest[0] + ACTIVATION, highest[0] + ACTIVATION]


@pytest.mark.slow
def test_no_sync_holds_full_gradients() -> None:
    first = tz.memory(traces_of(tz.ZERO3, synced=False))
    second = tz.memory(traces_of(tz.ZERO3, synced=False), accumulating=True)
    last = tz.memory(traces_of(tz.ZERO3), accumulating=True)
    assert peak_of(Holds.DEFERRED, first) == peak_of(Holds.DEFERRED, second) == 3 * WEIGHT
    assert first.lines[0].alive.get(Holds.DEFERRED, 0) == 0
    assert second.lines[0].alive[Holds.DEFERRED] == last.lines[0].alive[Holds.DEFERRED] == 3 * WEIGHT
    assert first.lines[-1].alive[Holds.DEFERRED] == second.lines[-1].alive[Holds.DEFERRED] == 3 * WEIGHT
    assert Holds.DEFERRED not in last.lines[-1].alive  # added to the gradients that were reduced


@pytest.mark.slow
def test_offloaded_shards_take_no_memory_of_the_device() -> None:
    policy = replace(tz.ZERO3, cpu_offload=True)
    memory = tz.memory(traces_of(policy), backend="nccl", optimizer=torch.optim.AdamW)
    assert memory.at_rest == 4 * WIDTH
    assert Holds.PARAMETER not in memory.by_kind
    assert not [one for one in memory.storages if one.kind is Holds.REDUCED_GRADIENT and one.freed is None]


@pytest.mark.slow
def test_backends_have_their_own_buffers() -> None:
    """Three ranks do not divide 64 rows: NCCL's collectives need padded buffers, gloo's messages do not."""
    gloo, nccl = (tz.memory(traces_of(tz.ZERO3, world_size=3), backend=backend) for backend in ("gloo", "nccl"))
    padded = 3 * (66 * WIDTH * 4)
    assert peak_of(Holds.GATHERED, gloo) == 3 * WEIGHT
    assert peak_of(Holds.GATHERED, nccl) == padded
    assert peak_of(Holds.IN_FLIGHT, nccl) >= padded  # copies of the gradients, padded


@pytest.mark.slow
def test_a_fused_region_is_what_is_inside_it() -> None:
    plain, fused = tz.memory(traces_of(tz.ZERO3)), tz.memory(traces_of(tz.ZERO3, fused=True))
    assert any("TorchCompile" in line.code for line in fused.lines)
    assert peak_of(Holds.SAVED, fused) == peak_of(Holds.SAVED, plain)
    # a product with the buffer is inlined, and linear's result is tanh's: a layer's temporary less at least
    assert peak_of(Holds.TEMPORARY, fused) < peak_of(Holds.TEMPORARY, plain)
    assert peak_of(Holds.GATHERED, fused) == peak_of(Holds.GATHERED, plain)


def test_the_memory_of_a_region() -> None:
    """matmul 1, two pointwise (2 inlined, 3 read by the next matmul), matmul 4, a pointwise output 5 in its place."""
    steps = (
        Step(Work.MATMUL, reads=(0,), makes={1: 8}),
        Step(Work.POINTWISE, reads=(1,), makes={2: 8}),
        Step(Work.POINTWISE, reads=(2, 1), makes={3: 8}),
        Step(Work.MATMUL, reads=(3,), makes={4: 4}),
        Step(Work.POINTWISE, reads=(4,), makes={5: 4}),
    )
    assert memory_of(steps, outputs=(5,)) == [
        ([], {1: 8}, []),
        ([], {}, []),
        ([1], {3: 8}, []),  # the last to read 1, of the same size
        ([], {4: 4}, [3]),
        ([4], {5: 4}, []),
    ]


def test_a_reduction_takes_memory_if_its_result_is_smaller() -> None:
    softmax = Step(Work.REDUCTION, reads=(1,), makes={2: 64})
    total = Step(Work.REDUCTION, reads=(2,), makes={3: 4})
    first = Step(Work.MATMUL, reads=(0,), makes={1: 64})
    made = [made for _, made, _ in memory_of((first, softmax, total), outputs=())]
    assert made == [{1: 64}, {}, {3: 4}]


def twice(see: Callable[[watch.Watch, Tensor], Any]) -> Callable[[watch.Watch, Tensor], Any]:
    """Every operation allocates its result twice."""

    def planted(self: watch.Watch, tensor: Tensor) -> Any:
        known = len(self.allocations)
        found = see(self, tensor)
        if len(self.allocations) > known:
            self._count(found.nbytes)
        return found

    return planted


def copied(see: Callable[[watch.Watch, Tensor], Any]) -> Callable[[watch.Watch, Tensor], Any]:
    """Every view is a copy."""

    def planted(self: watch.Watch, tensor: Tensor) -> Any:
        if tensor._base is not None:
            self._count(tensor.nbytes)
        return see(self, tensor)

    return planted


@pytest.mark.slow
@pytest.mark.parametrize("plant", [twice, copied])
def test_a_planted_error_is_seen(plant: Callable[[Any], Any]) -> None:
    """The arithmetic of the first test, and the sum over kinds, fail."""
    with mock.patch.object(watch.Watch, "see", plant(watch.Watch.see)):
        memory = tz.memory(traces_of(tz.ZERO3))
    assert memory.peak > 1.03 * tz.memory(traces_of(tz.ZERO3)).peak
    assert memory.peak != sum(memory.by_kind.values())


@pytest.mark.slow
def test_the_text_and_the_printed_trace_show_the_peak() -> None:
    traces = traces_of(tz.ZERO3)
    memory = tz.memory(traces)
    text = str(memory).splitlines()
    assert text[0].startswith("peak ")
    assert any(line.endswith("KiB  full gradients") for line in text)
    assert text[-1] == "left out: the optimizer's state and step: give optimizer="
    out = StringIO()
    tz.print_trace(traces, file=out)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith(" sent gathered    alive")
    (at,) = (number for number, line in enumerate(lines) if line.startswith("# the peak of the step: "))
    assert lines[at - 1].strip()


@pytest.mark.slow
def test_what_cannot_be_forecast_is_refused() -> None:
    traces = traces_of(tz.ZERO3)
    with pytest.raises(ValueError, match="backend is 'tcp'; choose one of 'gloo', 'nccl', 'mpi'"):
        tz.memory(traces, backend="tcp")
    with pytest.raises(ValueError, match="reserve is -1; give a number of bytes, 0 or more"):
        tz.memory(traces, reserve=-1)
    with pytest.raises(TypeError, match=r"optimizer is of type SGD; give a class, such as torch.optim.AdamW"):
        tz.memory(traces, optimizer=torch.optim.SGD([torch.ones(1, requires_grad=True)]))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"cannot forecast the optimizer: .*; leave out fused=True"):
        tz.memory(traces, optimizer=lambda params: torch.optim.AdamW(params, fused=True))
    with pytest.raises(RuntimeError, match=r"the step of LBFGS needs a closure, .*; leave out optimizer=, and"):
        tz.memory(traces, optimizer=torch.optim.LBFGS)
    with pytest.raises(TypeError, match=r"^optimizer= was called with the parameters and raised .* takes 0 "):
        tz.memory(traces, optimizer=lambda: torch.optim.SGD([]))  # type: ignore[arg-type, misc]
    lacks = r"^loss= was called with what forward returns and raised .* argument: 'target'; give a function of that"
    for loss in (nn.functional.cross_entropy, nn.CrossEntropyLoss()):
        with pytest.raises(
            TypeError, match=rf"{lacks} alone, such as lambda output: F.cross_entropy\(output, targets\)$"
        ):
            tz.memory(traces, loss=loss)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"loss= returned \(16, 64\); return a tensor of one number"):
        tz.memory(traces, loss=lambda y: y.square())
    with pytest.raises(RuntimeError, match=r"cannot forecast the loss: .*; give one that reads no value"):
        tz.memory(traces, loss=lambda y: y.sum() * y.sum().item())
    with mock.patch.object(replay, "functions_of", return_value={"zero_enter": reads_a_value}):
        message = raised(lambda: tz.memory(traces)).removeprefix("NoForecast: ")
        out = StringIO()
        tz.print_trace(traces, file=out)
    assert message.startswith("cannot forecast memory: a line does not run on tensors without values, ")
    assert message.endswith("measure the step instead")
    assert out.getvalue().startswith("# cannot forecast memory: ")
    assert out.getvalue().splitlines()[2].endswith(" sent gathered")


def reads_a_value(half: str, schedule: str) -> Any:
    return torch.empty((), device="meta").item()
