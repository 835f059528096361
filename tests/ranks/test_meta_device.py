"""Modules built on the meta device get the values of construction, and no rank holds much at once.

Torch's profiler counts the bytes. ``tests/one`` tests refusals on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import thunder_zero as tz
from examples.tensor_memory import added_at_peak, bytes_held, parameters_of
from tests.harness.checkpoints import differing
from tests.harness.errors import error_of
from tests.harness.models import Mlp
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.comm.small_collectives import broadcast
from thunder_zero.safetensors_files import SafetensorsWeights
from thunder_zero.sharded.dtensors import local
from thunder_zero.tools.models import DecoderSizes, Llama
from thunder_zero.tools.plan.training_plan import MeshShape, PlanRow, code_of

import thunder


class Gated(nn.Module):
    """A module with a buffer and a parameter that is not contiguous, which is drawn after the inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.gate = nn.Parameter(torch.empty(7, 5).t())
        self.register_buffer("turn", torch.empty(7), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate)
        self.turn = torch.linspace(0, 1, 7)  # replaced, as rotary embeddings often are


class Net(nn.Module):
    """A net of torch's layers, with statistics, and an output layer that is tied to the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7, padding_idx=3)
        self.blocks = nn.ModuleList(Gated() for _ in range(2))
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 11)
        if tied:
            self.head.weight = self.embed.weight


def style(module: nn.Module) -> None:
    """Draw weights as GPTs do: ``.data`` raises no version, and the norm is only scaled."""
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.data.normal_(0.0, 0.02)
    if isinstance(module, nn.BatchNorm1d):
        with torch.no_grad():
            module.weight.mul_(0.5)
    if isinstance(module, Styled):
        nn.init.ones_(module.scale)


class Styled(Net):
    """A module that ties the input to the output and applies ``style``, which draws the weight twice."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.embed.weight = self.head.weight
        self.scale = nn.Parameter(torch.empty(11))
        self.apply(style)


def build_on_meta(build: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return build()


def build_ordinary(build: Callable[[], nn.Module], seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return build()


def jit(module: nn.Module, stage: int = 3, **arguments: Any) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(stage=stage, **arguments)])


def assert_like(model: Any, expected: nn.Module, case: Any) -> None:
    """Check that a materialised model has no meta tensor, and has the values of an ordinary module."""
    tensors = [*model.parameters(), *model.buffers(), *model._model.parameters(), *model._model.buffers()]
    assert not any(tensor.is_meta for tensor in tensors), case
    assert differing(tz.full_state_dict(model), expected.state_dict()) == [], case
    assert differing(dict(model.named_buffers()), dict(expected.named_buffers())) == [], case


# The values of construction

BUILT: dict[str, Callable[[], nn.Module]] = {
    "Net": Net,
    "Styled": Styled,
    "Conv": lambda: nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.Conv2d(2, 3, 2), nn.Conv3d(2, 3, 2), nn.ConvTranspose2d(2, 3, 2)
    ),
    "Embedding": lambda: nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.EmbeddingBag(5, 3)),
    "norms": lambda: nn.Sequential(
        nn.GroupNorm(2, 4), nn.LayerNorm(3), nn.RMSNorm(3), nn.InstanceNorm1d(3, affine=True)
    ),
    "statistics": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(3, affine=False)),
    "recurrent": lambda: nn.ModuleList([nn.LSTMCell(3, 5), nn.GRUCell(3, 5), nn.RNNCell(3, 5)]),
    "other": lambda: nn.ModuleList([nn.Bilinear(3, 5, 2), nn.PReLU(3), nn.AdaptiveLogSoftmaxWithLoss(8, 9, [2, 4])]),
    "shared": lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2, nn.Linear(3, 3)),
}


def construct(rank: int, world_size: int) -> None:
    """Compare layers and models with ordinary construction; tests/one/test_interface.py trains a model."""
    for name, build in BUILT.items():
        for stage in (0, 1, 3) if build in (Net, Styled) else (3,):
            expected, next_number = build_ordinary(build), torch.rand(())
            torch.manual_seed(7)
            model = jit(build_on_meta(build), stage, init=style if build is Styled else None)
            assert torch.equal(torch.rand(()), next_number), (name, stage, "the generator")
            assert_like(model, expected, (name, stage))


@pytest.mark.parametrize("world_size", [3, *slow(1)])
def test_the_values_are_those_of_construction(ranks_pool: RanksPool, world_size: int) -> None:
    ranks_pool.run(world_size, construct)


# From a state dict, and from a rank


def load_weights(rank: int, world_size: int, folder: Path) -> None:
    """Load from files, which all ranks or a single rank reads; a partly real module takes all values from the file."""
    expected = build_ordinary(Net, seed=9)
    path = folder / f"{rank}.pt"
    torch.save(expected.state_dict(), path)
    weights = torch.load(path, mmap=True)
    untied = {name: value for name, value in weights.items() if name != "head.weight"}  # as in safetensors files
    files = folder / f"{rank}"  # a file of the blocks, and a file of the rest
    files.mkdir()
    for part in (True, False):
        names = [name for name in untied if name.startswith("blocks") is part]
        save_file({name: untied[name].contiguous() for name in names}, files / f"{part}.safetensors")
    partly_real: Any = build_on_meta(Net)
    partly_real.norm = nn.BatchNorm1d(7)
    nn.init.constant_(partly_real.norm.running_mean, 5.0)
    sources: list[tuple[nn.Module, dict[str, Any]]] = [
        (build_on_meta(Net), {"weights": weights, "stage": 0}),
        (build_on_meta(Net), {"weights": untied, "stage": 1}),
        (partly_real, {"weights": untied}),
        (build_on_meta(Net), {"weights": files}),
        (build_on_meta(Net), {"weights": weights if rank == 0 else None, "broadcast_from": 0}),
    ]
    for number, (module, arguments) in enumerate(sources):
        assert_like(jit(module, **arguments), expected, number)
    read_only_rows(folder / f"mlp{rank}")


def read_only_rows(folder: Path) -> None:
    """From a folder, each rank reads its own rows, and the rows that all ranks compare."""
    folder.mkdir()
    expected = build_ordinary(partial(nn.Linear, 64, 300))
    save_file(dict(expected.state_dict()), folder / "model.safetensors")
    read, rows_of = list[int](), SafetensorsWeights.rows

    def counted(*args: Any) -> Tensor:
        rows = rows_of(*args)
        read.append(rows.nbytes)
        return rows

    with mock.patch.object(SafetensorsWeights, "rows", counted):
        model = jit(build_on_meta(partial(nn.Linear, 64, 300)), weights=folder)
    assert_like(model, expected, "rows")
    own = sum(real.nbytes for real in (local(param) for param in model.parameters()))  # 300 rows have no padding
    assert sum(read) == own + 3 * 4 * (64 + 1), "the first row, a middle one and the last, of the weight and the bias"


@pytest.mark.parametrize("world_size", [3, *slow(1)])
def test_the_values_are_those_of_a_state_dict(ranks_pool: RanksPool, world_size: int, tmp_path: Path) -> None:
    ranks_pool.run(world_size, load_weights, tmp_path)


def take_from_source(rank: int, world_size: int, source: int) -> None:
    """Take the values of one rank, which has a real module or draws them; other ranks have other seeds."""
    for is_real in (True, False):
        for stage in (0, 3):
            source_module = build_ordinary(Styled)
            module = source_module if is_real and rank == source else build_on_meta(Styled)
            torch.manual_seed(7 if rank == source else rank)
            assert_like(jit(module, stage, init=style, broadcast_from=source), build_ordinary(Styled), (is_real, stage))


@pytest.mark.parametrize(("world_size", "source"), [(3, 2), *slow((1, 0))])
def test_the_values_are_those_of_a_rank(ranks_pool: RanksPool, world_size: int, source: int) -> None:
    ranks_pool.run(world_size, take_from_source, source)


def mix_real_and_meta(rank: int, world_size: int) -> None:
    """Check that real tensors keep their values, and that each rank keeps its own ignored parameters."""
    drawn = build_ordinary(Net)
    module = build_on_meta(Net)
    module.blocks[1], module.head.bias = build_ordinary(Net).blocks[1], nn.Parameter(torch.full((11,), 3.0))
    torch.manual_seed(7 + rank)
    model = jit(module, init=style, ignored=("blocks",), broadcast_from=0)
    state = tz.full_state_dict(model)
    torch.manual_seed(7 + rank)
    inner: Any = Net().get_submodule("blocks.0.inner")
    assert torch.equal(state["blocks.1.inner.weight"], drawn.blocks[1].inner.weight)
    assert (state["head.bias"] == 3).all()
    assert torch.equal(state["blocks.0.inner.bias"], inner.bias), "each rank's own"
    assert model.blocks[0].inner.bias is dict(model.named_parameters())["blocks.0.inner.bias"]
    assert (state["norm.weight"] == 0.5).all(), "init has scaled it"


def test_real_tensors_and_ignored_parameters_keep_their_values(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, mix_real_and_meta)


# Memory

WIDTH, LAYERS = 128, 8
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
FEW = 4096  # bytes: flags, indices
MESSAGES = 16384  # bytes: small messages, of all threads


def make_deep_mlp() -> nn.Module:
    return Mlp(WIDTH, LAYERS)


def measure_peaks(rank: int, world_size: int, path: Path) -> None:
    """Check the most bytes that are alive while a model is made, beyond those at rest."""
    cpu, weights, models = torch.device("cpu"), torch.load(path, mmap=True), []
    sources: list[dict[str, Any]] = [{}, {"init": style}, {"stage": 1}, {"weights": weights}]
    for arguments in sources:
        torch.manual_seed(0)
        module = build_on_meta(make_deep_mlp)
        peak = added_at_peak(lambda module=module, arguments=arguments: models.append(jit(module, **arguments)), cpu)  # type: ignore[misc]
        at_rest = bytes_held(parameters_of(models[-1]))
        assert "stage" in arguments or at_rest <= LAYERS * (LAYER_BYTES / world_size + FEW), (arguments, at_rest)
        assert peak - at_rest <= LAYER_BYTES + FEW + MESSAGES, (arguments, peak, at_rest)
    in_full = added_at_peak(lambda: models.append(jit(build_ordinary(make_deep_mlp))), cpu)
    assert in_full > LAYERS * LAYER_BYTES, "construction holds all of it"


def send_parameters(rank: int, world_size: int, path: Path) -> None:
    """Check how many sent or received parameters are alive at once; the profiler does not see gloo's threads."""
    storages, alive = [], []

    def broadcast_and_count(tensor: Tensor, *arguments: Any) -> None:
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        broadcast(tensor, *arguments)
        alive.append(sum(not storage.expired() for storage in storages))

    weights = torch.load(path, mmap=True) if rank == 0 else None
    with mock.patch("thunder_zero.sharded.initial_values.broadcast", broadcast_and_count):
        jit(build_on_meta(make_deep_mlp), broadcast_from=0, weights=weights)
    assert len(alive) == 2 * LAYERS, alive
    assert max(alive) <= 3, "this parameter, and one for each thread of gloo"


def test_no_rank_holds_more_than_its_shards_and_a_unit(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Parameters that one rank reads are sent one by one."""
    torch.save(make_deep_mlp().state_dict(), tmp_path / "mlp.pt")
    for fn in (measure_peaks, send_parameters):
        ranks_pool.run(3, fn, tmp_path / "mlp.pt")


LARGE = 512


def make_large_mlp() -> nn.Module:
    return Mlp(LARGE, LAYERS)


def compare_loading(rank: int, world_size: int, folder: Path) -> None:
    """Compare forecasts with the most bytes alive while a model is made.

    The profiler counts the whole file for each mapped row, so rows come from memory here.
    """
    weights, files = torch.load(folder / "mlp.pt"), SafetensorsWeights(folder)
    sources: dict[str, dict[str, Any]] = {
        "weights=folder": {"weights": files},
        "weights=mapping": {"weights": weights},
        "reset_parameters": {},
        "init": {"init": style},
    }

    def compare(name: str, policy: tz.Policy, gloo: int = 0, **arguments: Any) -> None:
        module = build_on_meta(make_large_mlp).requires_grad_(policy.frozen_format is None)
        traces = tz.trace(module, torch.zeros(2, LARGE), policy=policy, world_size=world_size, rank=rank)
        forecast, models = tz.tools.memory(traces).loading[name], list[Any]()
        torch.manual_seed(0)
        counted = added_at_peak(lambda: models.append(tz.compile(module, policy, **arguments)), torch.device("cpu"))
        held = 4 * LARGE * LARGE * gloo  # tensors that gloo's threads may hold
        assert 0.95 * counted - held < forecast < 1.05 * counted, (name, policy, forecast, counted)

    with (
        mock.patch.object(SafetensorsWeights, "rows", lambda self, name, *ends: rows_of(weights[name], *ends)),
        mock.patch.object(SafetensorsWeights, "shape", lambda self, name: weights[name].shape),
    ):
        for policy in (tz.ZERO3, tz.ZERO1, replace(tz.ZERO3, frozen_format=tz.NF4())):
            for name, arguments in sources.items():
                compare(name, policy, **arguments)
        sending = replace(tz.ZERO3, broadcast_from=0)
        if rank == 0:
            compare("weights=mapping", sending, gloo=2, weights=weights)
        else:
            compare("sent by rank 0", sending, gloo=2)


def rows_of(tensor: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    return tensor[start:stop].clone()


def test_the_forecast_of_loading_is_what_the_allocator_counts(ranks_pool: RanksPool, tmp_path: Path) -> None:
    values = make_large_mlp().state_dict()
    torch.save(values, tmp_path / "mlp.pt")
    save_file(values, tmp_path / "mlp.safetensors")
    ranks_pool.run(3, compare_loading, tmp_path)


# Refused on all ranks


class Bare(nn.Module):
    """A module with a weight that only ``init`` gives values."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def fail_on_last_rank(module: nn.Module) -> None:
    if dist.get_rank() == dist.get_world_size() - 1 and isinstance(module, nn.Linear | Bare):
        raise ValueError("init fails here; try another")
    if isinstance(module, Bare):
        nn.init.ones_(module.weight)
    style(module)


ONES = torch.ones(11, 7)
TWO_VALUES = ("weights has unlike values for 'embed.weight' and 'head.weight', which this module ties",)


def let_ranks_differ(rank: int, world_size: int, folder: Path) -> None:
    """Check that every rank raises, and that the module and the group can still be used."""
    last = rank == world_size - 1
    state = build_ordinary(Net).state_dict()
    short = {name: value for name, value in state.items() if name != "norm.bias" or not last}
    unlike = {**state, "head.weight": state["head.weight"] + torch.eye(*state["head.weight"].shape)} if last else state
    others = folder / f"{last}"  # ranks with equal files write the same folder
    if rank in (0, world_size - 1):
        others.mkdir()
        values = {name: (value + last).contiguous() for name, value in state.items() if name != "head.weight"}
        save_file(values, others / "a.safetensors")
    dist.barrier()
    module = build_ordinary(Net) if last else build_on_meta(Net)
    weight = nn.Parameter(torch.empty(5, 3, device="meta"))
    tied = nn.Sequential(Bare(weight), Bare(weight))
    net, differs = partial(build_on_meta, Net), "initial value of parameter 'embed.weight' differs"
    torch.manual_seed(rank)
    rows: list[tuple[nn.Module, dict[str, Any], tuple[str, ...]]] = [
        (net(), {}, (differs, "seed every rank alike before the transform")),
        (net(), {"init": style}, (differs, "broadcast_from=0", "rank 1")),
        (net(), {"init": style if last else None}, ("the argument init differs", "rank 0 has None", "on every rank")),
        (net(), {"init": fail_on_last_rank}, ("differs between ranks", "seed every rank alike")),
        # Other ranks gather the weight for its second owner before they hear of the error.
        (tied, {"init": fail_on_last_rank}, ("init fails here; try another",)),
        (net(), {"weights": others}, ("initial value of parameter", "differs", "give every rank the same weights")),
        (net(), {"weights": short}, ("weights has no 'norm.bias'", "give the state dict of a Net")),
        (net(), {"weights": unlike, "stage": 0}, (*TWO_VALUES, "at [0, 0]", "leave one of the two names out")),
        (net(), {"weights": unlike}, TWO_VALUES),
        (net(), {"weights": None if last else {**state, "head.weight": ONES}, "broadcast_from": 0}, TWO_VALUES),
        (module, {}, ("'embed.weight' = 'head.weight' differs", "on the meta device", "build the same module")),
    ]
    for number, (each_module, arguments, words) in enumerate(rows):
        error = error_of(partial(jit, each_module, **arguments))
        assert [word for word in (*words, "; ") if word not in error] == [], (number, error)
        assert "\n" not in error, error
    torch.manual_seed(7)
    assert_like(jit(net()), build_ordinary(Net), "after all")


def test_ranks_that_differ_all_raise(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(3, let_ranks_differ, tmp_path)


LLAMA = DecoderSizes(blocks=2, width=8, heads=2, key_heads=1, hidden=16, vocabulary=11, length=6)


def run_code_of_plan(rank: int, world_size: int, code: str) -> None:
    """Run a plan's code with a small model. Values are those of construction; no rank has the model in full."""

    def llama() -> Llama:
        module = Llama(LLAMA)
        assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        return module

    names: dict[str, Any] = {"llama": llama}
    with mock.patch.object(dist, "init_process_group") as init:
        exec(code, names)
    init.assert_called_once_with("gloo")
    model, optimizer = names["model"], names["optimizer"]
    torch.manual_seed(0)
    plain = Llama(LLAMA)
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert param.to_local().numel() < param.numel(), name
        assert torch.equal(param.full_tensor(), expected[name]), name
    losses = []
    for _ in range(3):
        loss = model(torch.arange(6).view(1, 6)).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0]
    torch.testing.assert_close(torch.tensor(losses[0]), plain(torch.arange(6).view(1, 6)).square().mean())


@pytest.mark.slow
def test_the_code_of_a_plan_builds_no_values_and_trains(ranks_pool: RanksPool) -> None:
    """The code of a plan with CPUs is that with GPUs, but for the backend and the device."""
    row: dict[str, Any] = dict.fromkeys(field.name for field in fields(PlanRow))
    row |= {"stage": 3, "mesh": MeshShape(1, 2)}
    policy = tz.Policy(3, recompute="none", bucket_bytes=1 << 20, in_flight_bytes=1 << 21, prefetch=1)
    ranks_pool.run(2, run_code_of_plan, code_of(PlanRow(**row), policy, "module = llama()", device="cpu"))
