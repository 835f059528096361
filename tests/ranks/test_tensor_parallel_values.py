"""What ranks of one batch have in common beside slices: the batch, random numbers, initial values, ties."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import thunder_zero as tz
from tests.harness.errors import fails, refused
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow

Styles = Mapping[str, Any]


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def sliced(module: nn.Module, mesh: DeviceMesh, styles: Styles, policy: Any = tz.ZERO3, **options: Any) -> Any:
    return tz.compile(parallelize_module(module, mesh["tp"], dict(styles)), policy, mesh=mesh, **options)


def from_all(value: Tensor) -> list[Tensor]:
    """The value of each rank."""
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value.detach().contiguous())
    return found


# One batch


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(dropout)

    def forward(self, x: Tensor, batch: Any = None, scale: float = 1.0) -> Tensor:
        x = x if batch is None else x + batch["x"]
        return scale * self.dropout(self.down(self.up(x).relu()))


OF_NET: Styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def batches(rank: int, world_size: int) -> None:
    mesh, tp = mesh_of(world_size // 2, 2), 2
    torch.manual_seed(0)
    model, dropping = (sliced(Net(dropout), mesh, OF_NET) for dropout in (0.0, 0.5))
    ranks = "rank 0 and rank 1" if world_size == 2 else "rank 2 and rank 3"
    index, is_other = rank // tp, rank == world_size - 1  # one rank alone has another batch
    torch.manual_seed(index)
    x = torch.randn(2, 6)
    model(x).sum().backward()  # data-parallel ranks have other batches
    model(x, batch={"x": x}, scale=0.5).sum().backward()
    other = x.clone()
    other[1, 5] += is_other
    with refused(
        RuntimeError, "argument 0 of model", ranks, "(values)", "num_replicas=", "mesh['dp'].get_local_rank()"
    ):
        model(other)
    with refused(RuntimeError, "argument 0 of model", ranks, "shape (2, 6)", "shape (3, 6)"):
        model(torch.cat((x, x[:1])) if is_other else x)
    with refused(RuntimeError, "argument 'batch'['x'] of model", ranks, "(values)"):
        model(x, batch={"x": other})
    with refused(RuntimeError, "argument 'scale' of model", ranks, "(1.0 and 2.0)"):
        model(x, scale=1.0 + is_other)
    with refused(RuntimeError, "the number of arguments of model", ranks, "(1 and 2)"):
        model(*([x, None] if is_other else [x]))
    for _ in range(16):  # of those that follow, one in sixteen is compared
        model(x)
    with refused(RuntimeError, "argument 0 of model", ranks):
        for _ in range(16):
            model(other)

    # generators: of no interest, unless forward draws
    if is_other:
        torch.rand(1)
    model(x)
    dropping.eval()
    dropping(x)
    dropping.train()
    with refused(RuntimeError, "draws random numbers", ranks, "torch.manual_seed(seed + mesh['dp'].get_local_rank())"):
        dropping(x)
    torch.manual_seed(index)
    dropping(x).sum().backward()


def test_ranks_of_one_batch_are_compared(ranks_pool: RanksPool) -> None:
    ranks_pool.run(4, batches, timeout=110)


# Random numbers


class Drops(nn.Module):
    """Drops out what all ranks have, what they have slices of, and parts of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 8)
        self.checks = False

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(self.up(x), 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        shared = F.dropout(x, 0.5)
        part = F.dropout(self.norm(shared), 0.5)
        held = checkpoint(self.inner, part, use_reentrant=False) if self.checks else self.inner(part)
        noise = torch.rand_like(held)
        return shared, part, held, F.dropout(self.down(held), 0.5), noise


ONES = {"up.weight": 0.0, "up.bias": 1.0, "down.weight": 1.0, "down.bias": 1.0, "norm.weight": 0.0, "norm.bias": 1.0}
SLICES: Styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
PARTS: Styles = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
CHUNKS: Styles = {  # each rank takes its part of a sequence without a collective
    **PARTS,
    "norm": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
}


def masks(rank: int, world_size: int, checks: bool, options: dict[str, Any]) -> None:
    mesh = mesh_of(world_size // 2, 2)
    peers = [each for each in range(world_size) if each // 2 == rank // 2]
    for styles in (SLICES,) if options else (SLICES, PARTS, CHUNKS):
        torch.manual_seed(0)
        module = Drops()
        module.checks = checks
        for name, param in module.named_parameters():
            nn.init.constant_(param, ONES[name])
        is_parts = styles is not SLICES
        model = sliced(module, mesh, styles, **options)
        torch.manual_seed(rank // 2)
        outputs = model(torch.ones(2, 128, 8))
        shared, part, held, last, noise = (each.to_local() if isinstance(each, DTensor) else each for each in outputs)
        after = from_all(torch.get_rng_state())
        assert after[peers[0]].equal(after[peers[1]]), "generators went out of step"

        def alike(value: Tensor, same: bool, what: str, is_parts: bool = is_parts) -> None:
            assert 0.35 < (value != 0).float().mean() < 0.65 or what == "noise", what
            found = from_all((value != 0).float() if what != "noise" else value)
            assert found[peers[0]].equal(found[peers[1]]) is same, (what, is_parts)
            if not same:  # independent: half of the elements agree
                assert 0.3 < (found[0] == found[1]).float().mean() < 0.7 or what == "noise", what
            if world_size > 2:
                assert not found[0].equal(found[2]), (what, "of other batches")

        alike(shared, True, "shared")
        alike(part, not is_parts, "part")
        alike(held, False, "held")
        alike(last, not is_parts, "last")
        alike(noise, False, "noise")
        # backward reads the same mask, also where it computes it again
        mask = held.detach() / 1.0
        (held.sum() + 0 * last.sum()).backward()
        grad: Any = model.plain.up.bias.grad
        summed = mask.sum((0, 1))
        dist.all_reduce(summed, group=mesh.get_group("dp"))
        expected = torch.cat([from_all(summed)[each] for each in peers]) / mesh["dp"].size()
        off = (grad.full_tensor() - expected).abs().max().item()
        assert off < 1e-3, (off, is_parts)


@pytest.mark.parametrize(
    ("world_size", "checks", "options"),
    [
        (4, True, {}),
        *slow((2, True, {"fuse": "inductor"}), (2, False, {"recompute": "units"})),
    ],
)
def test_slices_draw_numbers_of_their_own(
    ranks_pool: RanksPool, world_size: int, checks: bool, options: dict[str, Any]
) -> None:
    ranks_pool.run(world_size, masks, checks, options, timeout=110)


class Attends(nn.Module):
    """Attention with dropout, whose weights are equal: what a rank returns says what it dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        return heads, self.o(heads.transpose(1, 2).flatten(2))


def attention(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, 2)
    module = Attends()
    for name, param in module.named_parameters():
        nn.init.constant_(param, 1.0 if name in ("v.bias", "o.weight") else 0.0)
    model = sliced(module, mesh, {**{name: ColwiseParallel() for name in "qkv"}, "o": RowwiseParallel()})
    torch.manual_seed(5)
    heads, y = model(torch.ones(2, 16, 8))
    one, other = from_all(heads)
    assert not one.equal(other), "both heads drop the same"
    first, second = from_all(torch.get_rng_state())
    assert first.equal(second), "generators went out of step"
    heads.sum().backward()  # of a bias: the sum of what was kept
    grad: Any = model.plain.v.bias.grad
    near = grad.full_tensor().chunk(2)[rank] - heads.detach().sum((0, 1, 2))
    assert near.abs().max() < 1e-3, near
    y.sum()


@pytest.mark.slow
def test_heads_drop_weights_of_their_own(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, attention, timeout=110)


def of_symbols(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = sliced(Drops(), mesh_of(1, 2), SLICES, dynamic=True)
    fails(lambda: model(torch.ones(2, 4, 8)), "RuntimeError: cannot trace Drops: RecursionError", "pass dynamic=False")


@pytest.mark.slow
def test_slices_of_sizes_that_are_symbols(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, of_symbols, timeout=110)


def elsewhere(rank: int, world_size: int) -> None:
    """A rank that does something else while others compare batches is named, and nobody waits for ever."""
    torch.manual_seed(0)
    model = sliced(Net(), mesh_of(1, 2), OF_NET)
    fails(
        lambda: tz.full_state_dict(model) if rank else model(torch.ones(2, 6)),
        "RuntimeError: the ranks do different things: rank 0 is in the comparison of the batches",
        "rank 1 is in full_state_dict",
    )


@pytest.mark.slow
def test_a_rank_that_is_elsewhere_is_named(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, elsewhere, timeout=110)


# Initial values


class Drawn(nn.Module):
    """Modules of several kinds, in which a slice's rows are uneven, and a parameter that nobody slices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, 6), nn.LayerNorm(6)
        self.up, self.down, self.head = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.norm(self.embed(tokens))).relu()))


OF_DRAWN: Styles = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def small(module: nn.Module) -> None:
    """Scales what ``reset_parameters`` drew, as initialisers by depth do, and draws biases."""
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.mul_(0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias)


def drawn(rank: int, world_size: int, folder: Path) -> None:
    """On the meta device, values are those of one process, whatever the mesh."""
    for dp, tp, policy in ((world_size // 2, 2, tz.ZERO3), (1, world_size, tz.ZERO1), (world_size, 1, tz.DDP)):
        mesh = mesh_of(dp, tp)
        if world_size % tp or 10 % tp:
            continue
        for init in (None, small):
            torch.manual_seed(1)
            one = Drawn()
            if init is not None:
                one.apply(init)
            torch.manual_seed(1)
            with torch.device("meta"):
                module = Drawn()
            model = sliced(module, mesh, OF_DRAWN, policy, init=init)
            exactly(model, one)
        if rank == 0:
            save_file(one.state_dict(), folder / "model.safetensors")
        dist.barrier()
        for weights in (one.state_dict(), folder):
            with torch.device("meta"):
                module = Drawn()
            exactly(sliced(module, mesh, OF_DRAWN, policy, weights=weights), one)
        exactly(sliced(Drawn(), mesh, OF_DRAWN, policy, weights=one.state_dict()), one)
        model(torch.arange(6).view(2, 3)).sum().backward()

    # what is not right is refused by name, on all ranks
    mesh = mesh_of(1, world_size) if 10 % world_size == 0 else mesh_of(world_size // 2, 2)
    torch.manual_seed(rank)
    with torch.device("meta"):
        module = Drawn()
    with refused(RuntimeError, "the initial value of parameter 'embed.weight' differs between ranks", "seed every"):
        sliced(module, mesh, OF_DRAWN)
    wrong = {**one.state_dict(), "up.weight": torch.zeros(5, 6)}
    with refused(ValueError, "weights has 'up.weight' with shape (5, 6)", "(10, 6)"):
        sliced(Drawn(), mesh, OF_DRAWN, weights=wrong)
    with refused(ValueError, "broadcast_from does not work beside torch's tensor parallelism yet"):
        sliced(Drawn(), mesh, OF_DRAWN, broadcast_from=0)


def exactly(model: Any, one: nn.Module) -> None:
    found, right = tz.full_state_dict(model), one.state_dict()
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert found[name].equal(value), name


@pytest.mark.parametrize("world_size", [2, *slow(4)])
def test_initial_values_are_those_of_one_process(ranks_pool: RanksPool, tmp_path: Path, world_size: int) -> None:
    ranks_pool.run(world_size, drawn, tmp_path, timeout=110)


# What is refused before anything is compiled


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.embed(tokens)).relu()))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:  # two heads of three
        return self.o(self.q(x).unflatten(-1, (-1, 2)).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2))


MIDDLE: Styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
HEAD: Styles = {"head": ColwiseParallel(output_layouts=Replicate())}
BOTH: Styles = {**MIDDLE, **HEAD, "embed": RowwiseParallel(input_layouts=Replicate())}


def refusals(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, 2)

    def tied(styles: Styles) -> Any:
        torch.manual_seed(3)
        return parallelize_module(Tied(), mesh["tp"], dict(styles))

    for styles in (HEAD, BOTH, {"embed": BOTH["embed"]}, {"embed": ColwiseParallel(), **HEAD}):
        with refused(ValueError, "parameters 'embed.weight' and 'head.weight' were tied", "has made two of them"):
            tz.compile(tied(styles), tz.ZERO3, mesh=mesh)
    # sliced alike, and tied again: one parameter, which trains as in one process
    module = tied(BOTH)
    module.head.weight = module.embed.weight
    torch.manual_seed(3)
    model, one = tz.compile(module, tz.ZERO3, mesh=mesh), Tied()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, one)]
    for step in range(3):
        tokens = torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(step))
        for each, optimizer in zip((model, one), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
    found = tz.full_state_dict(model)
    for name, value in one.state_dict().items():
        assert (found[name] - value).abs().max() < 1e-5, name
    assert found["head.weight"].equal(found["embed.weight"])

    config = LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    llama = parallelize_module(llama, mesh["tp"], {"lm_head": HEAD["head"]})
    with refused(ValueError, "'model.embed_tokens.weight' and 'lm_head.weight' were tied"):
        tz.compile(llama, tz.ZERO3, mesh=mesh, init=lambda part: None)

    model = sliced(Heads(), mesh, {"q": ColwiseParallel(), "o": RowwiseParallel()})
    with refused(RuntimeError, "cannot trace Heads", "unflatten", "(now 2) that divides the heads"):
        model(torch.ones(1, 2, 6))

    names = ("dp", "tp") if rank == 0 else ("dp", "cp")
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
    part = parallelize_module(Net(), other[names[1]], dict(OF_NET))
    with refused(RuntimeError, "the mesh's dimensions differs between ranks", "('dp', 'cp')"):
        tz.compile(part, tz.ZERO3, mesh=other)


def test_what_is_refused_before_a_step(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, refusals, timeout=110)
