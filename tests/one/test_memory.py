"""Forecasts of memory count each tensor under its kind, also for other shapes than those that were traced.

Comparisons with measurements are in tests/ranks. A number of float32 has 4 bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from itertools import combinations
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import thunder_zero as tz
from examples.llama import Llama, LlamaConfig
from tests.harness.errors import all_refused, error_of
from tests.harness.tiers import slow
from tests.harness.traced import mean_square, traced
from thunder_zero.plan.amounts import itemsize
from thunder_zero.schedule.lifetimes import bytes_alive, lifetimes
from thunder_zero.schedule.ops import Compute
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.tools import Holds
from thunder_zero.tools.forecast import figures
from thunder_zero.tools.forecast.run_lines import run_region
from thunder_zero.tools.forecast.watch import NoForecast

import thunder
from thunder.core.proxies import variableify

ROWS, WIDTH = 16, 64
WEIGHT, ACTIVATION = WIDTH * WIDTH * 4, ROWS * WIDTH * 4
ADAM = torch.optim.AdamW
PATHS = {f"layers.{number}.weight" for number in range(3)}


class Net(nn.Module):
    """Three layers without biases, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer.forward(x) * self.scale)
        return x


def layer() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def traces_of(policy: tz.Policy | int, **options: Any) -> tz.tools.Traces:
    return traced(Net, (ROWS, WIDTH), policy, **options)


def peak_of(kind: Holds, memory: tz.tools.Memory) -> int:
    return max(alive.get(kind, 0) for alive in memory.alive)


def mean_log_softmax(y: Tensor) -> Tensor:
    return torch.log_softmax(y, -1).mean()


def test_the_kinds_of_a_step_have_the_bytes_of_arithmetic() -> None:
    memory = tz.tools.memory(traces_of(3), loss=mean_square, optimizer=ADAM)
    shards = 3 * WEIGHT // 2
    steps = 3 * 4  # each parameter's number of steps
    assert memory.at_rest == shards + 2 * shards + steps + 4 * WIDTH  # two averages, the buffer
    expected = {
        Holds.PARAMETER: shards,
        Holds.OPTIMIZER: 2 * shards + steps,
        Holds.INPUT: ACTIVATION,
        Holds.BUFFER: 4 * WIDTH,
        Holds.GATHERED: 3 * WEIGHT,
        Holds.FULL_GRADIENT: 3 * WEIGHT,  # all are in flight, in one bucket
        Holds.REDUCED_GRADIENT: shards,
    }
    assert {kind: peak_of(kind, memory) for kind in expected} == expected
    assert memory.lines[-1].phase == "optimizer step"
    assert memory.optimizer_step is not None
    assert memory.optimizer_step >= memory.at_rest + shards  # the gradients
    assert memory.excluded == ()
    averages = [item for item in memory.storages if item.name == "layers.0.weight: exp_avg_sq"]
    assert [(item.kind, item.nbytes) for item in averages] == [(Holds.OPTIMIZER, WEIGHT // 2)]
    text = str(memory).splitlines()
    assert text[0].startswith("peak ")
    assert any(line.endswith("KiB  full gradients") for line in text)
    assert "  8.00 KiB  optimizer state        layers.0.weight: exp_avg_sq" in text
    # The caller holds the inputs until the optimizer steps.
    freed = {item.kind: item.freed for item in memory.storages if item.kind in (Holds.INPUT, Holds.BUFFER)}
    assert freed == {Holds.INPUT: len(memory.lines) - 1, Holds.BUFFER: None}


def test_the_rows_of_an_outer_step_are_at_rest_and_its_buffers_beside_compute() -> None:
    traces = traces_of(3)
    plain, shards = tz.tools.memory(traces, loss=mean_square, optimizer=ADAM), 3 * WEIGHT // 2
    figures = []
    for options in ({}, {"delay": 2}, {"cpu_offload": True}, {"states": 2}):
        outer = tz.Outer(**options)
        memory = tz.tools.memory(replace(traces, outer=outer), loss=mean_square, optimizer=ADAM)
        figures.append((memory.at_rest - plain.at_rest, memory.peak - plain.peak))
        assert memory.outer_step
        assert memory.outer_step >= memory.at_rest + 5 * shards  # gradients; of one vector: change, parts, sum, mean
    assert figures == [(2 * shards,) * 2, (2 * shards, 6 * shards), (0, 0), (3 * shards,) * 2]
    assert "in an exchange with other sites" in str(memory)
    under_no_sync = tz.tools.memory(replace(traces_of(3, synced=False), outer=outer), loss=mean_square)
    assert under_no_sync.outer_step is None
    alone = tz.trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.ones(2, 4), world_size=4, rank=3)
    turns = replace(alone, outer=tz.Outer(sync_every=2, fragments=2))  # the last rank has no row of the last layer
    assert tz.tools.memory(turns, loss=mean_square, optimizer=ADAM).outer_step


@pytest.mark.parametrize("stage", [3, *slow(0, 1, 2)])
def test_the_figures_agree_with_each_other(stage: int) -> None:
    memory = tz.tools.memory(traces_of(stage))
    most = max(line.highest or 0 for line in memory.lines)
    assert sum(memory.by_kind.values()) == memory.peak == most == memory.peak_line.highest
    assert [item.nbytes for item in memory.at_peak] == sorted((item.nbytes for item in memory.at_peak), reverse=True)
    sums = [(sum(kinds.values()), line) for kinds, line in zip(memory.alive, memory.lines, strict=True)]
    assert all(nbytes == line.alive <= (line.highest or 0) for nbytes, line in sums)
    line_and_work = set()
    for index, line in enumerate(memory.lines):
        for value in line.written.values() if line.kind == "compute" else ():
            storage = memory.storages[value["storage"]]
            line_and_work.add((storage.line < index, line.work == "view"))
            assert prod(value["shape"]) * itemsize(value["dtype"]) == storage.nbytes
        if line.kind == "wait":
            assert [memory.storages[value["storage"]].name for value in line.written.values()] == list(line.params)
    assert line_and_work == {(True, True), (False, False)}
    full = stage < 2  # DDP and ZeRO-1 hold the model in full
    assert memory.at_rest == (3 * WEIGHT if full else 3 * WEIGHT // 2) + 4 * WIDTH
    held = [(item.kind, item.name) for item in memory.storages if item.freed is None]
    assert {name for kind, name in held if kind is Holds.REDUCED_GRADIENT} == PATHS
    assert len({name for kind, name in held if kind is Holds.INPUT}) == 1  # there is no optimizer
    assert {item.module for item in memory.storages if item.kind is Holds.SAVED} <= {f"layers.{n}" for n in range(3)}
    assert lacks(memory) == ["the loss outside of the model", "the optimizer's state and step"]
    reserved = tz.tools.memory(traces_of(stage), reserve=1000)
    assert (reserved.peak, reserved.at_rest) == (memory.peak + 1000, memory.at_rest + 1000)
    assert tz.tools.step_table(traces_of(stage), reserve=1000).memory == reserved
    # Timelines and plans count all bytes but those of inputs, buffers and numbers of steps.
    timeline, plan = traces_of(stage).timeline, traces_of(stage).plan
    assert memory.peak == memory.at_rest + max(bytes_alive(timeline, lifetimes(timeline))) + ACTIVATION  # the input
    stepped = tz.tools.memory(traces_of(stage), optimizer=ADAM)
    gradients = stepped.alive[-1][Holds.REDUCED_GRADIENT]
    left_out = 3 * 4 + 4 * WIDTH  # each parameter's number of steps, the buffer
    views = 3 * WEIGHT // 2 if stage == 1 else 0
    assert stepped.at_rest + gradients == plan.state_bytes - views + left_out


def lacks(memory: tz.tools.Memory) -> list[str]:
    """Return what a forecast leaves out."""
    return [note.partition(":")[0] for note in memory.excluded]


@pytest.mark.slow
def test_every_row_names_its_parameter_or_value() -> None:
    # Five ranks do not divide 64 rows, so NCCL's collectives pack gradients into padded buffers.
    five = traces_of(3, world_size=5)
    memory = tz.tools.memory(five, loss=mean_log_softmax, optimizer=ADAM, backend="nccl", accumulating=True)
    count = len(memory.storages)
    with mock.patch.object(figures, "LARGEST", count):
        lines = str(replace(memory, at_peak=memory.storages)).splitlines()
    rows = lines[1 + lines.index(f"the largest of {count} tensors") :][:count]
    pairs = [(item, row[12:].removeprefix(item.kind).strip()) for item, row in zip(memory.storages, rows, strict=True)]
    assert not [item for item, row in pairs if not row or row.startswith(":")]
    shown = {kind: {row for item, row in pairs if item.kind is kind} for kind in Holds}
    assert shown[Holds.IN_FLIGHT] == {f"grad {path}" for path in PATHS}
    assert shown[Holds.GATHERED] == shown[Holds.DEFERRED] == shown[Holds.REDUCED_GRADIENT] == PATHS
    assert {row.partition(": ")[0] for row in shown[Holds.FULL_GRADIENT]} == PATHS
    assert shown[Holds.LOSS] == {"loss: the loss and its gradient"}
    assert any(row.startswith("backward: t") for row in shown[Holds.TEMPORARY])  # of the last tanh
    # NCCL's collectives need padded buffers, gloo's messages do not.
    padded = 3 * (65 * WIDTH * 4)
    assert peak_of(Holds.GATHERED, memory) == padded
    assert peak_of(Holds.IN_FLIGHT, memory) >= padded  # copies of the gradients, padded
    assert peak_of(Holds.GATHERED, tz.tools.memory(five, backend="gloo")) == 3 * WEIGHT


def test_a_forecast_lists_what_it_leaves_out(group: ProcessGroup) -> None:
    model: Any = thunder.jit(Net(), transforms=[tz.ZeroTransform(stage=3)])
    for enabled in (True, False, True):
        with torch.set_grad_enabled(enabled):
            y = model(torch.ones(ROWS, WIDTH))
        memory = tz.tools.memory(model, loss=Tensor.sum)
        assert memory.lines[-1].phase == ("backward" if enabled else "forward")
        assert lacks(memory) == (["the optimizer's state and step"] if enabled else ["backward"])
        assert f"left out: {memory.excluded[0]}" in " ".join(str(memory).split())
        if enabled:
            y.sum().backward()
    frozen = tz.trace(Net().requires_grad_(False), torch.empty(ROWS, WIDTH), world_size=2)
    assert tz.tools.memory(frozen).excluded == ()
    (note,) = tz.tools.memory(traces_of(3), backend="nccl", loss=Tensor.sum, optimizer=ADAM).excluded
    assert note.startswith("what CUDA computes otherwise: the traces are of a run on CPUs; trace a module that is on")


@pytest.mark.slow
def test_a_forecast_is_immutable_comparable_hashable_and_picklable() -> None:
    first, second = tz.tools.memory(traces_of(3)), tz.tools.memory(traces_of(3))
    first.by_kind[Holds.SAVED] = 0  # a copy
    sent = pickle.loads(pickle.dumps(first))
    assert first == second == sent
    assert hash(first) == hash(second)
    assert sent.by_kind == first.by_kind != tz.tools.memory(traces_of(0)).by_kind
    with pytest.raises(KeyError):
        first.by_kind[Holds.OPTIMIZER]
    units = tz.tools.memory(traced(layer, (1, WIDTH), replace(tz.ZERO3, unit_of=lambda module: ("",))))
    assert pickle.loads(pickle.dumps(units)) == units


@pytest.mark.slow
def test_the_loss_counts_its_own_tensors_but_no_views_of_targets() -> None:
    on_meta, targets = (torch.zeros(ROWS, WIDTH, device=device) for device in ("meta", "cpu"))
    numbers = [[0.0] * WIDTH] * ROWS
    views = [
        *(lambda y, t=t: (y.view(-1) * [t.view(-1), *t.chunk(4)][0]).sum() for t in (on_meta, targets)),
        lambda y: (y * targets).sum(),
    ]
    copies = [lambda y: (y * targets.clone()).sum(), lambda y: (y * torch.tensor(numbers)).sum()]

    def added(loss: Callable[[Tensor], Tensor]) -> int:
        """Return the most bytes that the loss adds to the bytes alive after forward."""
        lines = tz.tools.memory(traced(layer, (ROWS, WIDTH), tz.DDP), loss=loss).lines
        index = [line.phase for line in lines].index("loss")
        return (lines[index].highest or 0) - (lines[index - 1].alive or 0)

    first = added(views[0])
    assert list(map(added, views + copies)) == [first] * 3 + [first + ACTIVATION] * 2
    # log_softmax saves its result, not the output. Its gradient needs the result, the mean's gradient, and memory.
    assert 2 * ACTIVATION <= added(mean_log_softmax) <= 2 * ACTIVATION + 64  # and scalars


@pytest.mark.slow
def test_no_sync_holds_full_gradients() -> None:
    # The last backward adds them to the gradients that were reduced.
    full = 3 * WEIGHT
    cases = {"first": (False, False, [0, full]), "second": (False, True, [full] * 2), "last": (True, True, [full, 0])}
    for name, (synced, accumulating, expected) in cases.items():
        memory = tz.tools.memory(traces_of(3, synced=synced), accumulating=accumulating)
        assert [memory.alive[index].get(Holds.DEFERRED, 0) for index in (0, -1)] == expected, name
        assert synced or peak_of(Holds.DEFERRED, memory) == full, name


@pytest.mark.slow
def test_offloaded_shards_take_no_memory_of_the_device() -> None:
    memory = tz.tools.memory(traces_of(replace(tz.ZERO3, cpu_offload=True)), backend="nccl", optimizer=ADAM)
    assert memory.at_rest == 4 * WIDTH
    assert Holds.PARAMETER not in memory.by_kind
    assert not [item for item in memory.storages if item.kind is Holds.REDUCED_GRADIENT and item.freed is None]


def test_no_thread_takes_part_in_a_forecast() -> None:
    with mock.patch("thunder_zero.comm.pairwise.in_background") as in_background:
        tz.tools.memory(traces_of(3), backend="gloo")
    in_background.assert_not_called()  # it would free what it sends at any time


@pytest.mark.slow
def test_a_fused_region_counts_the_values_inside_it() -> None:
    plain, fused = (tz.tools.memory(traces_of(3, fused=fused)) for fused in (False, True))
    assert any("inductor" in line.code for line in fused.lines)
    for kind in (Holds.SAVED, Holds.GATHERED):
        assert peak_of(kind, fused) == peak_of(kind, plain)
    # Fusion inlines the product with the buffer, and linear's memory becomes tanh's: no temporary outlives a line.
    for memory, temporary in ((plain, 2 * ACTIVATION), (fused, 0)):
        phases = zip(memory.alive, memory.lines, strict=True)
        assert max(kinds.get(Holds.TEMPORARY, 0) for kinds, line in phases if line.phase == "forward") == temporary
        assert peak_of(Holds.TEMPORARY, memory) == 2 * ACTIVATION  # backward passes on a gradient


class ReadsANumber(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sum().item()


@pytest.mark.slow
def test_a_module_that_reads_a_number_is_refused_with_its_line() -> None:
    with pytest.raises(RuntimeError, match=r"reads a number from a tensor at .*test_memory\.py:\d+, where dynamo ends"):
        traced(lambda: ReadsANumber(WIDTH, WIDTH), (ROWS, WIDTH), 3)


def test_a_region_may_have_one_value_as_two_inputs() -> None:
    # As in a schedule where two inputs of a region are one gathered parameter.
    traces = traces_of(3, fused=True)
    assert traces.backward is not None
    lines = [*traces.forward.bound_symbols, *traces.backward.bound_symbols]
    pairs = ((line, *pair) for line in lines if line.sym.is_fusion for pair in combinations(line.flat_proxy_args, 2))
    region, first, second = next(candidate for candidate in pairs if candidate[1].shape == candidate[2].shape)
    merged = region.from_bsym_swap_proxies({variableify(second): first})
    values = {proxy.name: torch.empty(proxy.shape, device="meta") for proxy in merged.flat_proxy_args}
    assert len(values) < len(merged.flat_proxy_args)
    run_region(merged, values, lambda tensor: None)
    assert {proxy.name for proxy in merged.flat_proxy_outs} <= values.keys()


def test_a_value_inside_a_region_lives_until_its_last_reader() -> None:
    # The region computes four values from x and a buffer. At most two are alive at a time.
    fused = tz.tools.memory(traced(Net, (ROWS, WIDTH), tz.DDP, world_size=1, fused=True))
    (region,) = [line for line in fused.lines if "inductor" in line.code and line.phase == "forward"]
    assert region.alive is not None
    assert region.highest is not None
    # mm and the product, or the product and tanh. Results of tanh are saved.
    assert region.highest - region.alive <= ACTIVATION
    assert region.alive - fused.at_rest - ACTIVATION == 3 * ACTIVATION


def forecast(**options: Any) -> Callable[[], object]:
    return lambda: tz.tools.memory(traces_of(3), **options)


def world(**options: Any) -> Callable[[], object]:
    return lambda: tz.trace(Net(), torch.empty(ROWS, WIDTH), **options)


RANKS = "give the number of ranks, at least 1"
REFUSED: list[tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = [
    (world(world_size="4"), ValueError, ("world_size is '4'", RANKS)),
    (world(world_size=2.0), ValueError, ("world_size is 2.0", RANKS)),
    (world(world_size=4, rank="0"), ValueError, ("rank is '0'", "with world_size=4 it must be 0 to 3")),
    (world(replicas="2"), ValueError, ("replicas is '2'", "give the number of copies", "at least 1")),
    (forecast(backend="tcp"), ValueError, ("backend is 'tcp'", "choose one of 'gloo', 'nccl', 'mpi'")),
    (forecast(reserve=-1), ValueError, ("reserve is -1", "give a number of bytes, 0 or more")),
    (forecast(optimizer=torch.optim.SGD([torch.ones(1)])), TypeError, ("optimizer is of type SGD", "give a class")),
    (forecast(optimizer=lambda p: ADAM(p, fused=True)), NoForecast, ("the optimizer", "leave out fused=True")),
    (forecast(optimizer=torch.optim.LBFGS), NoForecast, ("LBFGS needs a closure", "leave out optimizer=")),
    (forecast(optimizer=lambda: None), TypeError, ("optimizer= was called with the parameters", " takes 0 ")),
    *(
        (forecast(loss=loss), TypeError, ("loss= was called with", "'target'", "give a function of that alone"))
        for loss in (nn.functional.cross_entropy, nn.CrossEntropyLoss())
    ),
    (forecast(loss=torch.square), TypeError, ("loss= returned (16, 64)", "return a tensor of one number")),
    (forecast(loss=lambda y: y.sum() * y.sum().item()), NoForecast, ("the loss", "give one that reads no value")),
]


def test_what_cannot_be_forecast_is_refused() -> None:
    all_refused(*REFUSED)
    traces = traces_of(replace(tz.ZERO3, check_gradients=True))
    with mock.patch.object(ModelRuntime, "functions", {"zero_check_finite": reads_a_value}):
        message = error_of(lambda: tz.tools.memory(traces))
        out = StringIO()
        tz.print_trace(traces, file=out)
    assert message.startswith("NoForecast: cannot forecast memory: the line 'zero_check_finite(")
    assert "does not run on tensors without values (" in message
    assert message.endswith("measure the step instead")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("# cannot forecast memory: ")
    assert lines[6].endswith(" sent gathered")


def reads_a_value(means: Any, paths: Any) -> Any:
    return torch.empty((), device="meta").item()


# Resized programs

SIZES = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24)
OTHER_SHAPE = (3, 40)


@cache
def trace_llama(shape: tuple[int, int], policy: Any, *, dynamic: bool) -> tz.tools.Traces:
    torch._dynamo.reset()  # dynamo remembers shapes
    with torch.device("meta"):
        model = Llama(SIZES)
    tokens, labels = torch.zeros(2, *shape, dtype=torch.long)
    return tz.trace(model, tokens, labels=labels, policy=policy, world_size=4, dynamic=dynamic)


def products(traces: tz.tools.Traces) -> list[int]:
    return [op.flops for op in traces.timeline.ops if isinstance(op, Compute) and op.flops]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [tz.ZERO3, tz.Policy(stage=2, recompute="none")], ids=["stage 3", "stage 2"])
def test_a_resized_program_equals_one_traced_for_the_other_shapes(policy: tz.Policy) -> None:
    symbolic, expected = trace_llama((2, 8), policy, dynamic=True), trace_llama(OTHER_SHAPE, policy, dynamic=False)
    shapes = {"input_ids": OTHER_SHAPE}  # the labels follow
    before = tz.tools.memory(symbolic).peak
    assert tz.tools.memory(symbolic, shapes=shapes).peak == tz.tools.memory(expected).peak > before
    note = "other sizes than input_ids (2, 8), labels (2, 8): give shapes="
    assert [note in tz.tools.memory(traces).excluded for traces in (symbolic, expected)] == [True, False]
    resized = tz.tools.resized(symbolic, shapes)
    seconds = [tz.tools.estimate(traces, "h100").seconds for traces in (resized, expected)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)
    assert products(resized) == products(expected)
    assert tz.tools.memory(symbolic).peak == before, "the given traces stay"


def test_shapes_that_a_program_cannot_have_are_refused() -> None:
    def resize(dynamic: bool = True, **shapes: tuple[int, ...]) -> Callable[[], object]:
        return partial(tz.tools.resized, trace_llama((2, 8), tz.ZERO3, dynamic=dynamic), shapes)

    all_refused(
        (resize(False, input_ids=OTHER_SHAPE), ValueError, ("input_ids (3, 40)", "is for (2, 8)", "dynamic=True")),
        (resize(tokens=OTHER_SHAPE), ValueError, ("has tokens (3, 40)", "the program's inputs are input_ids (s")),
        (resize(input_ids=(3,)), ValueError, ("has input_ids (3)", "the program's inputs are")),
        (resize(input_ids=OTHER_SHAPE, labels=(3, 41)), ValueError, ("labels (3, 41)", "one size each")),
        (resize(input_ids=(0, 40)), ValueError, ("does not run", "input_ids (0, 40)")),
    )


def test_the_program_for_a_loss_has_no_gradients_of_other_outputs() -> None:
    """The logits, returned beside the loss, get no gradient."""
    traces = trace_llama((2, 8), tz.ZERO3, dynamic=False)
    pruned = tz.tools.for_loss(traces, lambda output: output.loss)
    backwards = [item.backward for item in (traces, pruned) if item.backward]
    assert [sum(tangent is not None for tangent in trace.args[1]) for trace in backwards] == [2, 1]
    forecast = tz.tools.memory(traces, loss=lambda output: output.loss)
    tz.print_trace(pruned, "backward", memory=forecast, file=StringIO())  # the forecast matches these lines
