"""Modules that torch's ``parallelize_module`` slices train in our schedule as in one process, on (dp, tp) meshes.

Most tests train a sliced module, and a plain copy of it in one process, in float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from examples.tensor_memory import added_at_peak, bytes_held, parameters_of
from tests.harness.errors import fails, refused
from tests.harness.ranks import LONG, RanksPool
from tests.harness.tiers import deep, slow
from thunder_zero.comm.small_collectives import all_gather_tensor
from thunder_zero.schedule.ops import Compute, Exchange, ends_collective, starts_collective
from thunder_zero.sharded import unsliced

HEADS, WORDS, LENGTH, ROWS, STEPS = 4, 10, 6, 4, 3
TOLERANCE = 1e-9
Styles = Mapping[str, Any]


class Mlp(nn.Module):
    """A perceptron whose slices have uneven rows, between layers that are not sliced."""

    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 3)
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(self.up(self.norm(x)).relu()))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8 // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Uneven(nn.Module):
    """A module with a vocabulary and a width that 2 and 4 ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS + 1, 11), nn.Linear(11, WORDS + 1)
        self.up, self.down = nn.Linear(11, 12), nn.Linear(12, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.embed(tokens)).relu()))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(WORDS, 8), Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


COLUMNS, ROWWISE = ColwiseParallel, RowwiseParallel
MLP_STYLES: Styles = {"up": COLUMNS(), "down": ROWWISE()}
ATTENTION_STYLES: Styles = {f"attention.{name}": COLUMNS() for name in "qkv"}
VOCABULARY_STYLES: Styles = {
    **MLP_STYLES,
    "embed": ROWWISE(input_layouts=Replicate()),
    "head": COLUMNS(output_layouts=Replicate()),
}
WIDTH_STYLES: Styles = {
    **MLP_STYLES,
    "embed": COLUMNS(output_layouts=Replicate()),
    "head": ROWWISE(input_layouts=Replicate()),
}
HIDDEN_STYLES: Styles = {**ATTENTION_STYLES, "attention.o": ROWWISE(), "up": COLUMNS(), "down": ROWWISE()}
SEQUENCE_STYLES: Styles = {
    "embed": ROWWISE(input_layouts=Replicate(), output_layouts=Shard(1)),
    **{f"norms.{number}": SequenceParallel() for number in range(3)},
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **ATTENTION_STYLES,
    "attention.o": ROWWISE(output_layouts=Shard(1)),
    "up": COLUMNS(input_layouts=Shard(1)),
    "down": ROWWISE(output_layouts=Shard(1)),
    "head": COLUMNS(input_layouts=Shard(1), output_layouts=Replicate()),
}
LOSS_STYLES: Styles = {**HIDDEN_STYLES, "head": COLUMNS(output_layouts=Shard(-1), use_local_output=False)}


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def build_plain(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = build().double()
    for param in module.parameters():  # otherwise biases would be zeros
        nn.init.normal_(param, std=0.4)
    return module


def compile_sliced(module: nn.Module, mesh: DeviceMesh, styles: Styles, policy: Any = None, **options: Any) -> Any:
    copy = parallelize_module(deepcopy(module), mesh["tp"], dict(styles))
    return tz.compile(copy, policy, mesh=mesh, **options)


def make_batch(module: nn.Module, step: int, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if not isinstance(module, (Transformer, Uneven)):
        return torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return torch.randint(0, WORDS, (rows, LENGTH), generator=generator)


def loss_of(model: Any, x: Tensor) -> Tensor:
    y = model(x)
    return F.cross_entropy(y.flatten(0, -2), x.flatten() if x.dtype is torch.long else x[:, :3].argmax(-1))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_near(actual: Tensor, expected: Tensor, label: object, limit: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, (label, actual.shape, expected.shape)
    error = (full(actual.detach()) - expected.detach()).abs().max().item() if expected.numel() else 0.0
    assert error <= limit, (label, error)


def assert_same(model: Any, plain: nn.Module, label: object = "", limit: float = TOLERANCE) -> None:
    actual, expected = dict(model.named_parameters()), dict(plain.named_parameters())
    assert actual.keys() == expected.keys()
    for name, param in expected.items():
        assert_near(actual[name], param, (name, label), limit)
        if param.grad is None:
            assert actual[name].grad is None, name
        else:
            assert_near(actual[name].grad, param.grad, (name, "gradient", label), limit)


def train_both(model: Any, plain: nn.Module, tp: int, limit: float = TOLERANCE) -> list[Any]:
    """Take AdamW steps with clipping, ``model`` on this rank's rows and ``plain`` on all; return both optimizers."""
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (model, plain)]
    data, index = dist.get_world_size() // tp, dist.get_rank() // tp
    for step in range(STEPS):
        x = make_batch(plain, step)
        losses = [loss_of(model, x.chunk(data)[index]), loss_of(plain, x)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        mean_loss = losses[0].detach().clone()
        dist.all_reduce(mean_loss)
        assert_near(mean_loss / dist.get_world_size(), losses[1], ("loss", step), limit)
        assert_same(model, plain, ("before step", step), limit)
        norms = tz.clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert_near(norms[0], norms[1], ("norm", step), limit)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(model, plain, "at the end", limit)
    return optimizers


# Training


def train_perceptron(rank: int, world_size: int, dp: int, tp: int, policy: Any) -> None:
    mesh, module = mesh_of(dp, tp), build_plain(Mlp)
    model = compile_sliced(module, mesh, MLP_STYLES, policy)
    train_both(model, module, tp)
    if policy.stage:
        up = model.plain.up.weight  # a slice has 5 rows; the first rank of dp holds 3 of them
        assert (tuple(up.shape), tuple(up.to_local().shape)) == ((10, 6), (-(-5 // dp) if rank < tp else 5 // dp, 6))


@pytest.mark.parametrize("stage", [2, *slow(0, 1, 3)])
def test_a_perceptron_in_slices_trains_as_one_process(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(4, train_perceptron, 2, 2, tz.Policy(stage))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, 0, *deep(1, 2)])
def test_a_mesh_of_slices_only_trains_as_one_process(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, train_perceptron, 1, 2, tz.Policy(stage))


def train_transformer(
    rank: int, world_size: int, dp: int, styles: Styles, policy: Any, options: dict[str, Any]
) -> None:
    mesh, module = mesh_of(dp, 2), build_plain(Transformer)
    model = compile_sliced(module, mesh, styles, policy, **options)
    train_both(model, module, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "styles", "policy"),
    [
        (1, SEQUENCE_STYLES, tz.ZERO3),
        (2, HIDDEN_STYLES, tz.ZERO2),
        (1, HIDDEN_STYLES, tz.DDP),
        (2, SEQUENCE_STYLES, tz.ZERO3),
        *deep((2, HIDDEN_STYLES, tz.ZERO1), (2, SEQUENCE_STYLES, tz.DDP)),
    ],
)
def test_a_transformer_in_slices_trains_as_one_process(
    ranks_pool: RanksPool, dp: int, styles: Styles, policy: tz.Policy
) -> None:
    ranks_pool.run(2 * dp, train_transformer, dp, styles, policy, {}, timeout=LONG)


def train_lengths(rank: int, world_size: int, stage: int) -> None:
    mesh, module = mesh_of(1, 2), build_plain(Mlp)
    model = compile_sliced(module, mesh, MLP_STYLES, tz.Policy(stage))
    for length in (6, 9, 2, 8, 7):
        x = make_batch(module, length, ROWS * length).view(ROWS, length, 6)
        for trained in (model, module):
            trained.zero_grad()
            trained(x).square().mean().backward()
        assert_same(model, module, length)
    # one for the first length, one for all others; dynamo remembers the sizes of an earlier model that changed
    assert len(tz.tools.programs(model)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, *deep(0)])
def test_lengths_that_change_train_as_one_process(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, train_lengths, stage)


def use_loss_parallel(rank: int, world_size: int) -> None:
    mesh, module = mesh_of(1, 2), build_plain(Transformer)
    model, x = compile_sliced(module, mesh, LOSS_STYLES, tz.ZERO3), make_batch(module, 0)
    with loss_parallel():
        loss_of(model, x).backward()
    loss_of(module, x).backward()
    assert_same(model, module)


@pytest.mark.slow
def test_loss_parallel_gives_the_gradients_of_one_process(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, use_loss_parallel)


def train_hybrid(rank: int, world_size: int, shape: tuple[int, int, int], policy: Any) -> None:
    names = ("outer", "inner", "slices")
    mesh, module = init_device_mesh("cpu", shape, mesh_dim_names=names), build_plain(Mlp)
    dims = DataParallelMeshDims(replicate="outer", shard="inner")
    part = parallelize_module(deepcopy(module), mesh["slices"], dict(MLP_STYLES))
    model = tz.compile(part, policy, mesh=mesh, dp_mesh_dims=dims)
    plan = model.state.plan
    sizes = plan.mesh.replicate.size, plan.mesh.shard.size, plan.mesh.tensor.size
    assert (sizes, plan.mesh.batches) == (shape, shape[0] * shape[1])
    train_both(model, module, shape[2])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "policy"), [((2, 1, 2), tz.ZERO2), ((1, 2, 2), tz.ZERO3), ((2, 2, 1), tz.ZERO3)])
def test_hybrid_sharding_of_slices_trains_as_one_process(
    ranks_pool: RanksPool, shape: tuple[int, int, int], policy: tz.Policy
) -> None:
    ranks_pool.run(4, train_hybrid, shape, policy)


# At rest


def save_and_load(rank: int, world_size: int, folder: Path, policy: Any, hidden: int, tp: int) -> None:
    build = partial(Mlp, hidden)
    mesh, module = mesh_of(2, 2), build_plain(build)
    model = compile_sliced(module, mesh, MLP_STYLES, policy)
    optimizer, plain_optimizer = train_both(model, module, 2)
    expected, x = module.state_dict(), make_batch(module, STEPS)

    def assert_resumes(loaded: Any, loaded_optimizer: Any, slices: int = 2) -> None:
        """Check the loaded weights, and that the next step is that of the plain module."""
        copy = deepcopy(module)
        optimizer = torch.optim.AdamW(copy.parameters(), lr=1e-2)
        optimizer.load_state_dict(deepcopy(plain_optimizer.state_dict()))
        assert_values(tz.full_state_dict(loaded), expected)
        rows = x.chunk(4 // slices)[rank // slices]
        for model, its_optimizer, batch in ((loaded, loaded_optimizer, rows), (copy, optimizer, x)):
            its_optimizer.zero_grad()
            loss_of(model, batch).backward()
            its_optimizer.step()
        assert_values(tz.full_state_dict(loaded), copy.state_dict())

    # torch's tools
    loss_of(model, x.chunk(2)[rank // 2]).backward()
    loss_of(module, x).backward()
    norms: list[Any] = [nn.utils.clip_grad_norm_(clipped.parameters(), 0.1) for clipped in (model, module)]
    assert_near(norms[0].full_tensor(), norms[1], "torch's norm")
    assert_same(model, module, "clipped by torch")
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=folder / "dcp")
    loaded, loaded_optimizer = make_other(build, mesh, policy)
    state = {"model": get_model_state_dict(loaded), "optimizer": get_optimizer_state_dict(loaded, loaded_optimizer)}
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_model_state_dict(loaded, state["model"])
    set_optimizer_state_dict(loaded, loaded_optimizer, state["optimizer"])
    assert_resumes(loaded, loaded_optimizer)
    file: dict[str, Any] = {"model": build_plain(build, 1).state_dict()}
    dcp.load(file, checkpoint_id=folder / "dcp")
    assert_values(file["model"], expected)

    # our checkpoints: from this mesh to itself, to other meshes and back
    tz.save(folder / "ours", model, optimizer)
    for slices in (2, tp):
        loaded, loaded_optimizer = make_other(build, mesh_of(4 // slices, slices), policy)
        tz.load(folder / "ours", loaded, loaded_optimizer)
        assert_resumes(loaded, loaded_optimizer, slices)
    unsliced = tz.compile(build_plain(build, 1), policy)
    unsliced_optimizer = torch.optim.AdamW(unsliced.parameters(), lr=1e-2)
    tz.load(folder / "ours", unsliced, unsliced_optimizer)
    assert_resumes(unsliced, unsliced_optimizer, 1)
    tz.load(folder / "ours", unsliced, unsliced_optimizer)
    tz.save(folder / "flat", unsliced, unsliced_optimizer)
    loaded, loaded_optimizer = make_other(build, mesh, policy)
    tz.load(folder / "flat", loaded, loaded_optimizer)
    assert_resumes(loaded, loaded_optimizer)
    loaded.load_state_dict(expected)
    assert_values(tz.full_state_dict(loaded), expected)
    if rank == 0:
        tz.tools.consolidate(folder / "ours", folder / "one.safetensors")
        assert_values(load_file(folder / "one.safetensors"), expected)


def save_uneven(rank: int, world_size: int, folder: Path, policy: Any, styles: Styles) -> None:
    mesh, module = mesh_of(world_size // 2, 2), build_plain(Uneven)
    model = compile_sliced(module, mesh, styles, policy)
    train_both(model, module, 2)
    assert_values(tz.full_state_dict(model), module.state_dict())
    tokens = make_batch(module, STEPS)
    with tz.full_parameters(model, writeback=True) as full_module, torch.no_grad():
        assert_near(full_module(tokens), module(tokens), "in full_parameters")
        for written in (full_module, module):
            for param in written.parameters():
                param.mul_(0 if written is full_module and rank > 1 else 2)  # the first data rank's are taken
    assert_values(tz.full_state_dict(model), module.state_dict())
    if policy.stage:  # torch's placements describe no rows of slices that differ in rows
        embed, up = (model.state.plan.by_name[path] for path in ("embed.weight", "up.weight"))
        assert (embed.sharded, up.sharded) == (embed.sliced == 1, True)
    tz.save(folder, model)
    for other in (
        compile_sliced(build_plain(Uneven, 1), mesh_of(1, world_size), styles, policy),
        tz.compile(build_plain(Uneven, 1), policy),
    ):
        tz.load(folder, other)
        assert_values(tz.full_state_dict(other), module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "policy", "styles"),
    [
        (4, tz.ZERO3, VOCABULARY_STYLES),
        (4, tz.DDP, VOCABULARY_STYLES),
        (4, tz.ZERO3, WIDTH_STYLES),
        *deep((2, tz.ZERO3, VOCABULARY_STYLES)),
    ],
)
def test_uneven_slices_train_and_load_on_other_meshes(
    ranks_pool: RanksPool, tmp_path: Path, world_size: int, policy: Any, styles: Styles
) -> None:
    ranks_pool.run(world_size, save_uneven, tmp_path, policy, styles, timeout=LONG)


def assert_values(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(actual[name], value, name)


def make_other(build: Callable[[], nn.Module], mesh: DeviceMesh, policy: Any) -> tuple[Any, Any]:
    model = compile_sliced(build_plain(build, 1), mesh, MLP_STYLES, policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "hidden", "tp"), [(3, 10, 1), (0, 12, 4), *deep((1, 10, 1), (2, 12, 4))])
def test_slices_load_on_other_meshes(ranks_pool: RanksPool, tmp_path: Path, stage: int, hidden: int, tp: int) -> None:
    ranks_pool.run(4, save_and_load, tmp_path, tz.Policy(stage), hidden, tp, timeout=LONG)


# Traces and forecasts


def exchanging(timeline: tz.schedule.Timeline) -> list[Compute]:
    """Return the collectives of torch's tensor parallelism, and the waits for them."""
    return [op for op in timeline.ops if isinstance(op, Compute) and op.between_slices]


def read_traces(rank: int, world_size: int) -> None:
    """Compare bytes with closed forms: of two ranks, each sends an activation in an all-reduce, half in a gather."""
    mesh, module = mesh_of(2, 2), build_plain(Transformer)
    activation = ROWS // 2 * LENGTH * 8 * 8  # bytes of this rank's rows
    norm_grad = 8 * 8  # gradient of a norm, which each rank computes for its part of the sequence
    for styles, expected in (
        (HIDDEN_STYLES, {activation: 6}),  # forward: outputs of o and down; backward: inputs of q, k, v and up
        # both phases: before attention, up and head, behind embed, o and down; then logits, then norms
        (SEQUENCE_STYLES, {activation // 2: 12, ROWS // 2 * LENGTH * WORDS * 8 // 2: 1, norm_grad: 6}),
    ):
        model = compile_sliced(module, mesh, styles, tz.ZERO3, dynamic=False)
        loss_of(model, make_batch(module, 0).chunk(2)[rank // 2]).backward()
        timeline, text = tz.traces_of(model).timeline, StringIO()
        with torch.device("meta"):  # a trace on the meta device is the program that ran
            part = parallelize_module(Transformer().double(), mesh["tp"], dict(styles))
        x = make_batch(module, 0).chunk(2)[rank // 2]
        assert tz.trace(part, x, policy=tz.ZERO3, mesh=mesh).timeline == timeline
        ops = exchanging(timeline)
        launches, waits = list(filter(starts_collective, ops)), list(filter(ends_collective, ops))
        sent = Counter(timeline.traffic(op).sent for op in launches)
        assert sent == expected, sent
        assert {op.writes for op in launches} == {op.reads for op in waits}
        tz.print_trace(model, file=text)
        total = sum(size * count for size, count in expected.items())
        for line in (
            f"and {len(launches)} of torch's tensor parallelism, which send {total:,} of these bytes",
            "# tensor: a collective of torch's tensor parallelism",
            "rank 0 of 2 of slice 0 of 2",
        ):
            assert rank or line in text.getvalue(), line  # only rank 0 prints


@pytest.mark.slow
def test_a_trace_shows_the_collectives_of_slices(ranks_pool: RanksPool) -> None:
    ranks_pool.run(4, read_traces, timeout=LONG)


class SumsOverData(Mlp):
    """A perceptron that sums a number over the data ranks, as a user's own code may."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.data = mesh.get_group("dp").group_name

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.all_reduce(x.detach().mean(), "sum", self.data)


def label_collectives(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, 2)
    builds = (Mlp, lambda: SumsOverData(mesh))
    models = [compile_sliced(build_plain(build), mesh, MLP_STYLES, tz.ZERO3) for build in builds]
    timelines = []
    for model in models:
        model(torch.ones(ROWS, 6, dtype=torch.float64)).sum().backward()
        timelines.append(tz.traces_of(model).timeline)
    slices, users = ([op.work for op in exchanging(timeline)] for timeline in timelines)
    assert slices == users
    if rank == 0:  # which alone prints
        tz.print_trace(models[1], file=(text := StringIO()))
        launches = sum(isinstance(work, Exchange) for work in users)
        assert text.getvalue().count("_c10d_functional.all_reduce") == launches + 1


@pytest.mark.slow
def test_a_users_own_collective_is_not_counted_as_one_of_slices(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, label_collectives)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(96, 384) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(384, 96) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x


WIDE_STYLES: Styles = {f"{name}.{number}": MLP_STYLES[name] for number in range(2) for name in MLP_STYLES}


def measure_memory(rank: int, world_size: int) -> None:
    def loss(y: Tensor) -> Tensor:
        return y.square().mean()

    for policy in (tz.ZERO3, tz.ZERO2):
        model = compile_sliced(build_plain(Wide), mesh_of(2, 2), WIDE_STYLES, policy)
        x = torch.randn(128, 96, dtype=torch.float64)
        loss(model(x)).backward()
        model.zero_grad()
        at_rest = bytes_held([*parameters_of(model), x])
        step = partial(lambda model, x: loss(model(x)).backward(), model, x)
        # torch frees what a collective holds after it has ended, which may be late.
        measured = at_rest + min(added_at_peak(step, torch.device("cpu")) for _ in range(3))
        forecast = tz.tools.memory(tz.traces_of(model), loss=loss).peak
        assert abs(forecast / measured - 1) < 0.01, (policy.stage, forecast, measured)


@pytest.mark.slow
def test_memory_with_slices_is_forecast(ranks_pool: RanksPool) -> None:
    ranks_pool.run(4, measure_memory)


# Other features


class Features(nn.Module):
    """A module with a frozen slice, a checkpoint, and two unsliced parameters, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(8) for _ in range(2))
        self.blocks[0].up.weight.requires_grad_(False)
        self.blocks[1].last.weight = self.blocks[0].last.weight
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        first = checkpoint(self.blocks[0].forward, x, use_reentrant=False)
        return first + self.blocks[1](x * self.scale)


FEATURES_STYLES: Styles = {f"blocks.{number}.{name}": MLP_STYLES[name] for number in range(2) for name in MLP_STYLES}


def train_features(rank: int, world_size: int, policy: Any, options: dict[str, Any], limit: float) -> None:
    mesh, module = mesh_of(world_size // 2, 2), build_plain(Features)
    model = compile_sliced(module, mesh, FEATURES_STYLES, policy, **options)
    train_both(model, module, 2, limit)


HALF = tz.MixedPrecision(torch.float32, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "policy", "options", "limit"),
    [
        (2, tz.ZERO3, {"recompute": "units"}, TOLERANCE),
        (4, tz.ZERO3, {"mixed_precision": HALF}, 1e-4),
        (2, tz.ZERO1, {"dynamic": True}, TOLERANCE),
        (2, tz.ZERO3, {"fuse": "inductor"}, TOLERANCE),
    ],
)
def test_features_work_with_slices(
    ranks_pool: RanksPool, world_size: int, policy: Any, options: dict[str, Any], limit: float
) -> None:
    ranks_pool.run(world_size, train_features, policy, options, limit, timeout=LONG)


def accumulate_steps(rank: int, world_size: int) -> None:
    """Accumulate under ``no_sync`` with ``global_mean`` and average: ranks of one batch count its items once."""
    mesh, module = mesh_of(2, 2), build_plain(Mlp)
    model = compile_sliced(module, mesh, MLP_STYLES, tz.ZERO3)
    average, plain_average = tz.EMA(model, decay=0.5), AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizers = [torch.optim.SGD(trained.parameters(), 0.1) for trained in (model, module)]
    for step in range(2):
        first, second = make_batch(module, step), make_batch(module, step + 10)
        local = [x.split([1, 3])[rank // 2] for x in (first, second)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        with model.no_sync():
            tz.global_mean(model, model(local[0]).square().sum(), len(local[0])).backward()
        tz.global_mean(model, model(local[1]).square().sum(), len(local[1])).backward()
        for x in (first, second):
            (module(x).square().sum() / ROWS).backward()
        assert_same(model, module, step)
        for optimizer in optimizers:
            optimizer.step()
        average.update()
        plain_average.update_parameters(module)
    with average.applied():
        assert_values(tz.full_state_dict(model), plain_average.module.state_dict())
    assert_values(tz.full_state_dict(model), module.state_dict())


@pytest.mark.slow
def test_slices_accumulate_and_average_as_one_process(ranks_pool: RanksPool) -> None:
    ranks_pool.run(4, accumulate_steps)


# Refusals, before anything is compiled


class Hooked(nn.Module):
    """A module whose first forward registers a hook on a parameter, as Hugging Face's plans do."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.scale, self.hooked = Mlp(), nn.Parameter(torch.ones(6)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.scale.register_post_accumulate_grad_hook(lambda param: None)
            self.hooked = True
        return self.mlp(x * self.scale)


class Heads(nn.Module):
    """A module with a norm of each head; each rank computes the norms of its heads."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.q, self.norm, self.o = nn.Linear(8, 8), nn.LayerNorm(size), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.norm(self.q(x).unflatten(-1, (-1, *self.norm.normalized_shape))).flatten(-2))


def train_heads(rank: int, world_size: int) -> None:
    """Train with ``SequenceParallel`` on the norm, which sums its gradients."""
    mesh, module = mesh_of(1, 2), build_plain(Heads)
    styles = {"q": COLUMNS(), "norm": SequenceParallel(use_local_output=True), "o": ROWWISE()}
    model = compile_sliced(module, mesh, styles, tz.ZERO3)
    optimizers = [torch.optim.AdamW(trained.parameters(), lr=1e-2) for trained in (model, module)]
    for step in range(STEPS):
        for optimizer, trained in zip(optimizers, (model, module), strict=True):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            trained(torch.randn(2, 8, generator=generator, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        assert_same(model, module, step)


@pytest.mark.slow
def test_a_norm_of_each_head_trains_as_one_process(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, train_heads)


def refuse_wrong_uses(rank: int, world_size: int) -> None:
    mesh, cp_mesh = mesh_of(1, 2), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    module = build_plain(Mlp)

    def tries(part: Any, policy: Any = tz.ZERO3, on: Any = mesh, **options: Any) -> Any:
        return lambda: tz.compile(part, policy, mesh=on, **options)

    def sliced(styles: Styles = MLP_STYLES, on: Any = mesh["tp"], build: Any = Mlp) -> nn.Module:
        return parallelize_module(build_plain(build), on, dict(styles))

    fails(tries(module), "ValueError", "dimension 'tp'", "no parameter of Mlp is a DTensor", "parallelize_module")
    fails(tries(sliced(), on=cp_mesh), "ValueError", "parameter 'up.weight'", "'cp' of the given mesh", "mesh['cp']")
    fails(tries(sliced(), on=mesh["dp"]), "ValueError", "parameter 'up.weight' is a DTensor", "('dp', 'tp')")
    narrow = partial(Mlp, 1)
    fails(
        tries(sliced(build=narrow)), "ValueError", "dimension 0 of parameter 'up.weight' is 1 long", "last of 2 ranks"
    )
    for name, value in (("cpu_offload", True), ("broadcast_from", 0)):
        fails(tries(sliced(), **{name: value}), "ValueError", f"{name} does not work beside torch's tensor parallel")
    fails(tries(sliced(), ignored=("up",)), "ValueError", "'up.weight' is a DTensor and the policy ignores it")
    hooked = sliced()
    hooked.last.weight.register_hook(lambda grad: grad)
    fails(tries(hooked), "ValueError", "parameter 'last.weight' has hooks on its gradient")

    cube = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    fails(tries(sliced(on=cube["tp"]), on=cube), "ValueError", "'dp' are data parallel", "one dimension for tensor")
    transposed = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    fails(tries(sliced(on=transposed["tp"]), on=transposed), "ValueError", "('tp', 'dp')", "give those first")
    dims = DataParallelMeshDims(shard=("dp", "cp"))
    fails(tries(sliced(), on=cube, dp_mesh_dims=dims), "ValueError", "name one dimension that shards")
    dims = DataParallelMeshDims(shard="data")
    fails(tries(sliced(), dp_mesh_dims=dims), "ValueError", "dp_mesh_dims names 'data'", "('dp', 'tp')")
    fails(tries(sliced(), dp_mesh_dims="dp"), "TypeError", "dp_mesh_dims is 'dp'")
    fails(tries(sliced(), on=None, dp_mesh_dims=DataParallelMeshDims(shard="dp")), "ValueError", "without a mesh")

    fails(lambda: tz.trace(sliced(), torch.ones(2, 6)), "RuntimeError", "'up.weight' is a DTensor", "mesh=")
    torch.manual_seed(rank)
    differing = parallelize_module(Mlp(), mesh["tp"], dict(MLP_STYLES))
    fails(tries(differing), "RuntimeError", "initial value of parameter 'last.weight' differs between ranks")

    model = tries(sliced())()
    x = torch.ones(2, 6, dtype=torch.float64)
    with mock.patch.object(unsliced, "all_gather_tensor", wraps=all_gather_tensor) as gathers:
        fails(lambda: tz.clip_grad_norm_(model, 1.0), "RuntimeError", "nothing to clip")
        model(x).sum().backward()
        for _ in range(2):
            tz.clip_grad_norm_(model, 1.0)
            torch.optim.SGD(model.parameters(), 0.0).step()
    assert gathers.call_count == 2, "one before there were gradients, one after"
    with refused(ValueError, "rank0_only=True", "sliced"), tz.full_parameters(model, rank0_only=True):
        pass
    fails(lambda: tz.whole(torch.optim.SGD, model.parameters(), lr=0.1), "RuntimeError", "tz.whole knows no slices")
    styles = {"q": COLUMNS(), "o": ROWWISE()}
    partial_gradient = compile_sliced(build_plain(Heads), mesh, styles, tz.ZERO3)
    x_of_heads = torch.randn(2, 8, dtype=torch.float64)
    unsummed = "the gradient of parameter 'norm.weight' is a share of a sum that is never summed"
    fails(lambda: partial_gradient(x_of_heads), "RuntimeError", unsummed, "return self.o(self.norm(")
    # Types cannot tell what one head on each rank is, so its gradients are compared.
    partial_gradient = compile_sliced(build_plain(partial(Heads, 4)), mesh, styles, tz.ZERO3)
    optimizer = torch.optim.SGD(partial_gradient.parameters(), 0.1)
    partial_gradient(x_of_heads).square().sum().backward()
    differs = "the gradient of parameter 'norm.weight' differs between ranks of tensor"
    fails(lambda: tz.clip_grad_norm_(partial_gradient, 1.0), "RuntimeError", differs)
    fails(optimizer.step, "RuntimeError", differs)
    hooking = tries(sliced({f"mlp.{key}": style for key, style in MLP_STYLES.items()}, build=Hooked))()
    fails(lambda: hooking(x), "RuntimeError", "registers a hook on the gradient of parameter 'scale'")


def test_wrong_uses_of_slices_are_refused(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, refuse_wrong_uses)
