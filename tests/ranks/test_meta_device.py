"""Modules built on the meta device: their values equal those of construction, and no rank holds much at once.

Bytes are those of allocations, as torch's profiler sees them. Refusals on one rank: ``tests/one``.
"""

from __future__ import annotations

from collections.abc import Callable
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

import thunder


class Gated(nn.Module):
    """A module with parameters of its own, drawn after those of its parts, one of them not contiguous, and a buffer."""

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
    """A module whose constructor applies ``style``, and ties the input to the output; so ``style`` draws for both, in
    turn."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.embed.weight = self.head.weight
        self.scale = nn.Parameter(torch.empty(11))
        self.apply(style)


def on_meta(build: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return build()


def ordinary(build: Callable[[], nn.Module], seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return build()


def jit(module: nn.Module, stage: int = 3, **arguments: Any) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(stage=stage, **arguments)])


def assert_like(model: Any, right: nn.Module, case: Any) -> None:
    """Check that a materialised model has the values of an ordinary module, all of them real."""
    tensors = [*model.parameters(), *model.buffers(), *model._model.parameters(), *model._model.buffers()]
    assert not any(tensor.is_meta for tensor in tensors), case
    assert differing(tz.full_state_dict(model), right.state_dict()) == [], case
    assert differing(dict(model.named_buffers()), dict(right.named_buffers())) == [], case


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
    """Compare layers of torch, and models, with those that were constructed; tests/one/test_interface.py trains one."""
    for name, build in BUILT.items():
        for stage in (0, 1, 3) if build in (Net, Styled) else (3,):
            right, next_number = ordinary(build), torch.rand(())
            torch.manual_seed(7)
            model = jit(on_meta(build), stage, init=style if build is Styled else None)
            assert torch.equal(torch.rand(()), next_number), (name, stage, "the generator")
            assert_like(model, right, (name, stage))


@pytest.mark.parametrize("world_size", [3, *slow(1)])
def test_the_values_are_those_of_construction(ranks_pool: RanksPool, world_size: int) -> None:
    ranks_pool.run(world_size, construct)


# From a state dict, and from a rank


def load(rank: int, world_size: int, folder: Path) -> None:
    """Load from a saved file, which one rank or all read; a partly real module takes all its values from the file,
    too."""
    right = ordinary(Net, seed=9)
    path = folder / f"{rank}.pt"
    torch.save(right.state_dict(), path)
    weights = torch.load(path, mmap=True)
    untied = {name: value for name, value in weights.items() if name != "head.weight"}  # as safetensors has it
    files = folder / f"{rank}"  # one with the blocks, one with the rest
    files.mkdir()
    for part in (True, False):
        names = [name for name in untied if name.startswith("blocks") is part]
        save_file({name: untied[name].contiguous() for name in names}, files / f"{part}.safetensors")
    some: Any = on_meta(Net)
    some.norm = nn.BatchNorm1d(7)
    nn.init.constant_(some.norm.running_mean, 5.0)
    sources: list[tuple[nn.Module, dict[str, Any]]] = [
        (on_meta(Net), {"weights": weights, "stage": 0}),
        (on_meta(Net), {"weights": untied, "stage": 1}),
        (some, {"weights": untied}),
        (on_meta(Net), {"weights": files}),
        (on_meta(Net), {"weights": weights if rank == 0 else None, "broadcast_from": 0}),
    ]
    for number, (module, arguments) in enumerate(sources):
        assert_like(jit(module, **arguments), right, number)


@pytest.mark.parametrize("world_size", [3, *slow(1)])
def test_the_values_of_a_state_dict(ranks_pool: RanksPool, world_size: int, tmp_path: Path) -> None:
    ranks_pool.run(world_size, load, tmp_path)


def take(rank: int, world_size: int, source: int) -> None:
    """Take values from the source, which has a real module or draws one; the generators of other ranks have other
    seeds."""
    for is_real in (True, False):
        for stage in (0, 3):
            right = ordinary(Styled)
            module = right if is_real and rank == source else on_meta(Styled)
            torch.manual_seed(7 if rank == source else rank)
            assert_like(jit(module, stage, init=style, broadcast_from=source), ordinary(Styled), (is_real, stage))


@pytest.mark.parametrize(("world_size", "source"), [(3, 2), *slow((1, 0))])
def test_the_values_of_a_rank(ranks_pool: RanksPool, world_size: int, source: int) -> None:
    ranks_pool.run(world_size, take, source)


def mix(rank: int, world_size: int) -> None:
    """Check that real tensors stay as they are, with ``init`` or without; each rank keeps its own ignored
    parameters."""
    right = ordinary(Net)
    module = on_meta(Net)
    module.blocks[1], module.head.bias = ordinary(Net).blocks[1], nn.Parameter(torch.full((11,), 3.0))
    torch.manual_seed(7 + rank)
    model = jit(module, init=style, ignored=("blocks",), broadcast_from=0)
    state = tz.full_state_dict(model)
    torch.manual_seed(7 + rank)
    own: Any = Net().get_submodule("blocks.0.inner")
    assert torch.equal(state["blocks.1.inner.weight"], right.blocks[1].inner.weight)
    assert (state["head.bias"] == 3).all()
    assert torch.equal(state["blocks.0.inner.bias"], own.bias), "each rank's own"
    assert model.blocks[0].inner.bias is dict(model.named_parameters())["blocks.0.inner.bias"]
    assert (state["norm.weight"] == 0.5).all(), "init has scaled it"


def test_real_tensors_and_ignored_parameters(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, mix)


# Memory

WIDTH, LAYERS = 128, 8
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
FEW = 4096  # bytes: flags, indices
MESSAGES = 16384  # bytes: small messages, of all threads


def deep_mlp() -> nn.Module:
    return Mlp(WIDTH, LAYERS)


def peaks(rank: int, world_size: int, path: Path) -> None:
    """Return the most bytes that are alive while a model is made, beside those at rest after it."""
    cpu, weights, kept = torch.device("cpu"), torch.load(path, mmap=True), []
    sources: list[dict[str, Any]] = [{}, {"init": style}, {"stage": 1}, {"weights": weights}]
    for arguments in sources:
        torch.manual_seed(0)
        module = on_meta(deep_mlp)
        peak = added_at_peak(lambda module=module, arguments=arguments: kept.append(jit(module, **arguments)), cpu)  # type: ignore[misc]
        at_rest = bytes_held(parameters_of(kept[-1]))
        assert "stage" in arguments or at_rest <= LAYERS * (LAYER_BYTES / world_size + FEW), (arguments, at_rest)
        assert peak - at_rest <= LAYER_BYTES + FEW + MESSAGES, (arguments, peak, at_rest)
    in_full = added_at_peak(lambda: kept.append(jit(ordinary(deep_mlp))), cpu)
    assert in_full > LAYERS * LAYER_BYTES, "construction holds all of it"


def send(rank: int, world_size: int, path: Path) -> None:
    """Count how many of the parameters that a rank sends or receives are alive at once.

    The profiler does not see gloo's threads free them.
    """
    seen, alive = [], []

    def counted(tensor: Tensor, *arguments: Any) -> None:
        seen.append(StorageWeakRef(tensor.untyped_storage()))
        broadcast(tensor, *arguments)
        alive.append(sum(not storage.expired() for storage in seen))

    weights = torch.load(path, mmap=True) if rank == 0 else None
    with mock.patch("thunder_zero.sharded.initial_values.broadcast", counted):
        jit(on_meta(deep_mlp), broadcast_from=0, weights=weights)
    assert len(alive) == 2 * LAYERS, alive
    assert max(alive) <= 3, "this one, and one for each thread of gloo"


def test_no_rank_holds_more_than_its_shards_and_a_unit(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Parameters that one rank reads are sent one by one."""
    torch.save(deep_mlp().state_dict(), tmp_path / "mlp.pt")
    for fn in (peaks, send):
        ranks_pool.run(3, fn, tmp_path / "mlp.pt")


# Refused on all ranks


class Bare(nn.Module):
    """A module with a weight that only ``init`` gives values."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def fails_on_the_last(module: nn.Module) -> None:
    if dist.get_rank() == dist.get_world_size() - 1 and isinstance(module, nn.Linear | Bare):
        raise ValueError("init fails here; try another")
    if isinstance(module, Bare):
        nn.init.ones_(module.weight)
    style(module)


ONES = torch.ones(11, 7)
TWO_VALUES = ("weights has unlike values for 'embed.weight' and 'head.weight', which this module ties",)


def differ(rank: int, world_size: int) -> None:
    """Check that every rank raises, and that the module and the group can still be used."""
    last = rank == world_size - 1
    right = ordinary(Net).state_dict()
    short = {name: value for name, value in right.items() if name != "norm.bias" or not last}
    unlike = {**right, "head.weight": right["head.weight"] + torch.eye(*right["head.weight"].shape)} if last else right
    module = ordinary(Net) if last else on_meta(Net)
    weight = nn.Parameter(torch.empty(5, 3, device="meta"))
    tied = nn.Sequential(Bare(weight), Bare(weight))
    net, differs = partial(on_meta, Net), "initial value of parameter 'embed.weight' differs"
    torch.manual_seed(rank)
    rows: list[tuple[nn.Module, dict[str, Any], tuple[str, ...]]] = [
        (net(), {}, (differs, "seed every rank alike before the transform")),
        (net(), {"init": style}, (differs, "broadcast_from=0", "rank 1")),
        (net(), {"init": style if last else None}, ("the argument init differs", "rank 0 has None", "on every rank")),
        (net(), {"init": fails_on_the_last}, ("differs between ranks", "seed every rank alike")),
        # The others gather the weight for its second owner before they hear of it.
        (tied, {"init": fails_on_the_last}, ("init fails here; try another",)),
        (net(), {"weights": short}, ("weights has no 'norm.bias'", "give the state dict of a Net")),
        (net(), {"weights": unlike, "stage": 0}, (*TWO_VALUES, "at [0, 0]", "leave one of the two names out")),
        (net(), {"weights": unlike}, TWO_VALUES),
        (net(), {"weights": None if last else {**right, "head.weight": ONES}, "broadcast_from": 0}, TWO_VALUES),
        (module, {}, ("'embed.weight' = 'head.weight' differs", "on the meta device", "build the same module")),
    ]
    for number, (given, arguments, words) in enumerate(rows):
        said = error_of(partial(jit, given, **arguments))
        assert [word for word in (*words, "; ") if word not in said] == [], (number, said)
        assert "\n" not in said, said
    torch.manual_seed(7)
    assert_like(jit(net()), ordinary(Net), "after all")


def test_ranks_that_differ(ranks_pool: RanksPool) -> None:
    ranks_pool.run(3, differ)
