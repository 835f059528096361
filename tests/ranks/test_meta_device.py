"""Modules built on the meta device: their values equal those of construction, and no rank holds much at once.

Bytes are those of allocations, as torch's profiler sees them. Refusals on one rank: ``tests/one``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from examples.tensor_memory import added_at_peak, bytes_held
from tests.harness.errors import raised
from tests.harness.models import Mlp
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from thunder_zero.comm import agree

import thunder

BOTH_FRONT_ENDS = True

WORLDS = of_tier((1, 3), (1, 2, 3))
STAGES = of_tier((0, 1, 3), (0, 1, 2, 3))
TOKENS = torch.arange(12).view(6, 2) % 11


class Gated(nn.Module):
    """Parameters of its own, drawn after those of its parts, one of them not contiguous, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.gate = nn.Parameter(torch.empty(7, 5).t())
        self.register_buffer("turn", torch.empty(7), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate)
        self.turn = torch.linspace(0, 1, 7)  # replaced, as rotary embeddings often are

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) * self.gate.sum(0) + self.turn)


class Net(nn.Module):
    """Torch's layers, statistics, and an output layer that is tied to the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7, padding_idx=3)
        self.blocks = nn.ModuleList(Gated() for _ in range(3))
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 11)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).sum(1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(self.norm(x)))


def style(module: nn.Module) -> None:
    """As GPTs do it; ``.data`` raises no version, and the norm is only scaled."""
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.data.normal_(0.0, 0.02)
    if isinstance(module, nn.BatchNorm1d):
        with torch.no_grad():
            module.weight.mul_(0.5)
    if isinstance(module, Styled):
        nn.init.ones_(module.scale)


class Styled(Net):
    """Its constructor applies ``style``, and ties the input to the output; so ``style`` draws for both, in turn."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.embed.weight = self.head.weight
        self.scale = nn.Parameter(torch.empty(11))
        self.apply(style)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


def on_meta(build: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return build()


def ordinary(build: Callable[[], nn.Module], seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return build()


def jit(module: nn.Module, stage: int = 3, **arguments: Any) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(stage=stage, **arguments)])


def same(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)


def differences(model: Any, right: nn.Module) -> list[str]:
    """The ways in which a materialised model differs from an ordinary module."""
    tensors = [*model.parameters(), *model.buffers(), *model._model.parameters(), *model._model.buffers()]
    found = {
        "values": same(tz.full_state_dict(model), right.state_dict()),
        "buffers": same(dict(model.named_buffers()), dict(right.named_buffers())),
        "real": not any(tensor.is_meta for tensor in tensors),
    }
    return [name for name, agrees in found.items() if not agrees]


# The values of construction.


def construct(rank: int, world_size: int, build: Callable[[], nn.Module], init: Any) -> dict[int, list[str]]:
    found = {}
    for stage in STAGES:
        right, next_number = ordinary(build), torch.rand(())
        torch.manual_seed(7)
        model = jit(on_meta(build), stage, init=init)
        moved = [] if torch.equal(torch.rand(()), next_number) else ["the generator"]
        found[stage] = moved + differences(model, right)
    return found


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("build", "init"), [(Net, None), (Styled, style)])
def test_the_values_are_those_of_construction(
    ranks_pool: RanksPool, build: Callable[[], nn.Module], init: Any, world_size: int
) -> None:
    assert ranks_pool.run(world_size, construct, build, init) == [{stage: [] for stage in STAGES}] * world_size


LAYERS_OF_TORCH: dict[str, Callable[[], nn.Module]] = {
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


def construct_layers(rank: int, world_size: int) -> dict[str, list[str]]:
    found = {}
    for name, build in LAYERS_OF_TORCH.items():
        right = ordinary(build)
        torch.manual_seed(7)
        found[name] = differences(jit(on_meta(build)), right)
    return found


def test_the_layers_of_torch(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, construct_layers) == [{name: [] for name in LAYERS_OF_TORCH}] * 2


def state_after_a_step(model: Any) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    return tz.full_state_dict(model)


def step(rank: int, world_size: int) -> bool:
    right = ordinary(Styled)
    torch.manual_seed(7)
    return same(state_after_a_step(jit(on_meta(Styled), init=style)), state_after_a_step(jit(right)))


def test_a_step_is_that_of_an_ordinary_model(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, step) == [True, True]


# From a state dict, and from a rank.


def load(rank: int, world_size: int, folder: Path) -> list[list[str]]:
    """From a saved file, which one rank or all read; a partly real module takes all its values from the file, too."""
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
    return [differences(jit(module, **arguments), right) for module, arguments in sources]


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_values_of_a_state_dict(ranks_pool: RanksPool, world_size: int, tmp_path: Path) -> None:
    assert ranks_pool.run(world_size, load, tmp_path) == [[[]] * 5] * world_size


def take(rank: int, world_size: int, source: int) -> list[list[str]]:
    """The source has a real module, or draws one; the others' random generators have other seeds."""
    found = []
    for is_real in (True, False):
        for stage in (0, 3):
            right = ordinary(Styled)
            module = right if is_real and rank == source else on_meta(Styled)
            torch.manual_seed(7 if rank == source else rank)
            found.append(differences(jit(module, stage, init=style, broadcast_from=source), ordinary(Styled)))
    return found


@pytest.mark.parametrize(("world_size", "source"), of_tier([(3, 2)], [(1, 0), (2, 0), (3, 2)]))
def test_the_values_of_a_rank(ranks_pool: RanksPool, world_size: int, source: int) -> None:
    assert ranks_pool.run(world_size, take, source) == [[[]] * 4] * world_size


def mix(rank: int, world_size: int) -> list[str]:
    """Real tensors stay as they are, with ``init`` or without; ignored parameters are each rank's own."""
    right = ordinary(Net)
    module = on_meta(Net)
    module.blocks[1], module.head.bias = ordinary(Net).blocks[1], nn.Parameter(torch.full((11,), 3.0))
    torch.manual_seed(7 + rank)
    model = jit(module, init=style, ignored=("blocks",), broadcast_from=0)
    state = tz.full_state_dict(model)
    torch.manual_seed(7 + rank)
    own: Any = Net().get_submodule("blocks.0.inner")
    found = {
        "real module": torch.equal(state["blocks.1.inner.weight"], right.blocks[1].inner.weight),
        "real parameter": bool((state["head.bias"] == 3).all()),
        "bias of its own": torch.equal(state["blocks.0.inner.bias"], own.bias),
        "one parameter": model.blocks[0].inner.bias is dict(model.named_parameters())["blocks.0.inner.bias"],
        "scaled": bool((state["norm.weight"] == 0.5).all()),
    }
    return [name for name, holds in found.items() if not holds]


def test_real_tensors_and_ignored_parameters(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, mix) == [[], []]


# Memory.

WIDTH, LAYERS = 128, 8
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
FEW = 4096  # bytes: flags, indices
MESSAGES = 16384  # bytes: small messages, of all threads


def spread(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


def peaks(rank: int, world_size: int, path: Path) -> dict[str, tuple[int, int]]:
    """The most bytes that were alive while a model was made, and those at rest after it."""
    cpu, kept, found = torch.device("cpu"), [], {}
    weights = torch.load(path, mmap=True)
    sources: dict[str, dict[str, Any]] = {
        "reset_parameters": {},
        "init": {"init": spread},
        "ZeRO-1": {"stage": 1},
        "weights": {"weights": weights},
    }
    for how, arguments in sources.items():
        torch.manual_seed(0)
        module = on_meta(lambda: Mlp(WIDTH, LAYERS))
        peak = added_at_peak(lambda module=module, arguments=arguments: kept.append(jit(module, **arguments)), cpu)  # type: ignore[misc]
        found[how] = (peak, bytes_held(kept[-1].parameters()))
    peak = added_at_peak(lambda: kept.append(jit(ordinary(lambda: Mlp(WIDTH, LAYERS)))), cpu)
    found["construction"] = (peak, bytes_held(kept[-1].parameters()))
    return found


@pytest.mark.parametrize("world_size", of_tier([3], [2, 3]))
def test_no_rank_holds_more_than_its_shards_and_a_unit(ranks_pool: RanksPool, world_size: int, tmp_path: Path) -> None:
    torch.save(Mlp(WIDTH, LAYERS).state_dict(), tmp_path / "mlp.pt")
    for found in ranks_pool.run(world_size, peaks, tmp_path / "mlp.pt"):
        in_full, _ = found.pop("construction")
        assert in_full > LAYERS * LAYER_BYTES
        for how, (peak, at_rest) in found.items():
            beside = peak - at_rest
            assert how == "ZeRO-1" or at_rest <= LAYERS * (LAYER_BYTES / world_size + FEW)
            assert beside <= LAYER_BYTES + FEW + MESSAGES, (how, beside, LAYER_BYTES)


def count_sent(rank: int, world_size: int, path: Path) -> int:
    """How many of the parameters that a rank sends or receives are alive at once; the profiler does not see gloo's
    threads free them."""
    seen, alive = [], []
    send = agree.broadcast

    def counted(tensor: Tensor, *arguments: Any) -> None:
        seen.append(StorageWeakRef(tensor.untyped_storage()))
        send(tensor, *arguments)
        alive.append(sum(not storage.expired() for storage in seen))

    weights = torch.load(path, mmap=True) if rank == 0 else None
    with mock.patch.object(agree, "broadcast", counted):
        jit(on_meta(lambda: Mlp(WIDTH, LAYERS)), broadcast_from=0, weights=weights)
    assert len(alive) == 2 * LAYERS
    return max(alive)


def test_parameters_that_one_rank_reads_are_sent_one_by_one(ranks_pool: RanksPool, tmp_path: Path) -> None:
    torch.save(Mlp(WIDTH, LAYERS).state_dict(), tmp_path / "mlp.pt")
    assert max(ranks_pool.run(3, count_sent, tmp_path / "mlp.pt")) <= 3, "this one, and one for each thread of gloo"


# Refused on all ranks.


class Bare(nn.Module):
    """A weight that only ``init`` gives values."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def tied() -> nn.Module:
    weight = nn.Parameter(torch.empty(5, 3))
    return nn.Sequential(Bare(weight), Bare(weight))


def fails_on_the_last(module: nn.Module) -> None:
    if dist.get_rank() == dist.get_world_size() - 1 and isinstance(module, nn.Linear | Bare):
        raise ValueError("init fails here; try another")
    if isinstance(module, Bare):
        nn.init.ones_(module.weight)
    style(module)


def refuse(rank: int, world_size: int) -> list[str]:
    last = rank == world_size - 1
    right = ordinary(Net).state_dict()
    short = {name: value for name, value in right.items() if name != "norm.bias" or not last}
    module = ordinary(Net) if last else on_meta(Net)
    torch.manual_seed(rank)
    answers = [
        raised(lambda: jit(on_meta(Net))),
        raised(lambda: jit(on_meta(Net), init=style)),
        raised(lambda: jit(on_meta(Net), init=style if last else None)),
        raised(lambda: jit(on_meta(Net), init=fails_on_the_last)),
        raised(lambda: jit(on_meta(tied), init=fails_on_the_last)),
        raised(lambda: jit(on_meta(Net), weights=short)),
        raised(lambda: jit(module)),
    ]
    torch.manual_seed(7)
    return [*answers, *differences(jit(on_meta(Net)), ordinary(Net))]


REFUSED = [
    ("initial value of parameter 'embed.weight' differs", "seed every rank alike before the transform"),
    ("initial value of parameter 'embed.weight' differs", "broadcast_from=0", "rank 1"),
    ("the argument init differs", "rank 0 has None", "give init on every rank"),
    ("differs between ranks", "seed every rank alike"),
    ("init fails here; try another",),  # the others gather the weight for its second owner before they hear of it
    ("weights has no 'norm.bias'", "give the state dict of a Net"),
    ("parameter 'embed.weight' = 'head.weight' differs", "on the meta device", "build the same module on every rank"),
]


def test_ranks_that_differ(ranks_pool: RanksPool) -> None:
    """Every rank raises; the module and the group can still be used."""
    for answers in ranks_pool.run(3, refuse):
        assert len(answers) == len(REFUSED), answers
        for answer, words in zip(answers, REFUSED, strict=True):
            assert [word for word in words if word not in answer] == [], answer
            assert "\n" not in answer
