"""Tensor-parallel ranks share the batch, random numbers, initial values and ties; each slice draws its own masks."""

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

import thunder_zero as tz
from tests.harness.errors import fails, refused
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow

Styles = Mapping[str, Any]


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def compile_sliced(module: nn.Module, mesh: DeviceMesh, styles: Styles, policy: Any = tz.ZERO3, **options: Any) -> Any:
    return tz.compile(parallelize_module(module, mesh["tp"], dict(styles)), policy, mesh=mesh, **options)


def gather(value: Tensor) -> list[Tensor]:
    """Gather the values of all ranks."""
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.detach().contiguous())
    return values


# One batch


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(dropout)

    def forward(self, x: Tensor, batch: Any = None, scale: float = 1.0) -> Tensor:
        x = x if batch is None else x + batch["x"]
        return scale * self.dropout(self.down(self.up(x).relu()))


SLICED: Styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def compare_batches(rank: int, world_size: int) -> None:
    mesh, tp = mesh_of(world_size // 2, 2), 2
    torch.manual_seed(0)
    model, dropping = (compile_sliced(Net(dropout), mesh, SLICED) for dropout in (0.0, 0.5))
    ranks = "rank 0 and rank 1" if world_size == 2 else "rank 2 and rank 3"
    index, is_last = rank // tp, rank == world_size - 1  # the last rank has another batch
    torch.manual_seed(index)
    x = torch.randn(2, 6)
    model(x).sum().backward()  # data-parallel ranks have their own batches
    model(x, batch={"x": x}, scale=0.5).sum().backward()
    other = x.clone()
    other[1, 5] += is_last
    with refused(
        RuntimeError, "argument 0 of model", ranks, "(values)", "num_replicas=", "mesh['dp'].get_local_rank()"
    ):
        model(other)
    with refused(RuntimeError, "argument 0 of model", ranks, "shape (2, 6)", "shape (3, 6)"):
        model(torch.cat((x, x[:1])) if is_last else x)
    with refused(RuntimeError, "argument 'batch'['x'] of model", ranks, "(values)"):
        model(x, batch={"x": other})
    with refused(RuntimeError, "argument 'scale' of model", ranks, "(1.0 and 2.0)"):
        model(x, scale=1.0 + is_last)
    with refused(RuntimeError, "the number of arguments of model", ranks, "(1 and 2)"):
        model(*([x, None] if is_last else [x]))
    for _ in range(16):  # from here on, one batch in sixteen is compared
        model(x)
    with refused(RuntimeError, "argument 0 of model", ranks):
        for _ in range(16):
            model(other)

    # generators matter only if forward draws
    if is_last:
        torch.rand(1)
    model(x)
    dropping.eval()
    dropping(x)
    dropping.train()
    with refused(RuntimeError, "draws random numbers", ranks, "torch.manual_seed(seed + mesh['dp'].get_local_rank())"):
        dropping(x)
    torch.manual_seed(index)
    dropping(x).sum().backward()


@pytest.mark.parametrize("world_size", [2, *slow(4)])
def test_ranks_of_one_batch_are_compared(ranks_pool: RanksPool, world_size: int) -> None:
    ranks_pool.run(world_size, compare_batches)


# Random numbers


class Drops(nn.Module):
    """A module that drops out what all ranks have, slices, and parts of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 8)
        self.checks = False

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(self.up(x), 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        shared = F.dropout(x, 0.5)
        part = F.dropout(self.norm(shared), 0.5)
        sliced = checkpoint(self.inner, part, use_reentrant=False) if self.checks else self.inner(part)
        noise = torch.rand_like(sliced)
        return shared, part, sliced, F.dropout(self.down(sliced), 0.5), noise


VALUES = {"up.weight": 0.0, "up.bias": 1.0, "down.weight": 1.0, "down.bias": 1.0, "norm.weight": 0.0, "norm.bias": 1.0}
SEQUENCE: Styles = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
CHUNKED: Styles = {  # each rank takes its part of a sequence without a collective
    **SEQUENCE,
    "norm": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
}


def compare_masks(rank: int, world_size: int, checks: bool, options: dict[str, Any]) -> None:
    mesh = mesh_of(world_size // 2, 2)
    peers = [peer for peer in range(world_size) if peer // 2 == rank // 2]
    for styles in (SLICED,) if options else (SLICED, SEQUENCE, CHUNKED):
        torch.manual_seed(0)
        module = Drops()
        module.checks = checks
        for name, param in module.named_parameters():
            nn.init.constant_(param, VALUES[name])
        module.norm.requires_grad_(styles is not CHUNKED)  # nothing would sum the gradients of its parts
        is_parts = styles is not SLICED
        model = compile_sliced(module, mesh, styles, **options)
        torch.manual_seed(rank // 2)
        outputs = model(torch.ones(2, 128, 8))
        shared, part, sliced, last, noise = (y.to_local() if isinstance(y, DTensor) else y for y in outputs)
        after = gather(torch.get_rng_state())
        assert after[peers[0]].equal(after[peers[1]]), "generators went out of step"

        def compare(value: Tensor, same: bool, name: str, is_parts: bool = is_parts) -> None:
            assert 0.35 < (value != 0).float().mean() < 0.65 or name == "noise", name
            kept = gather((value != 0).float() if name != "noise" else value)
            assert kept[peers[0]].equal(kept[peers[1]]) is same, (name, is_parts)
            if not same:  # independent masks agree in half of the elements
                assert 0.3 < (kept[0] == kept[1]).float().mean() < 0.7 or name == "noise", name
            if world_size > 2:
                assert not kept[0].equal(kept[2]), (name, "of other batches")

        compare(shared, True, "shared")
        compare(part, not is_parts, "part")
        compare(sliced, False, "sliced")
        compare(last, not is_parts, "last")
        compare(noise, False, "noise")
        # backward reads the same mask, even if it recomputes it
        mask = sliced.detach() / 1.0
        (sliced.sum() + 0 * last.sum()).backward()
        grad: Any = model.plain.up.bias.grad
        summed = mask.sum((0, 1))
        dist.all_reduce(summed, group=mesh.get_group("dp"))
        expected = torch.cat([gather(summed)[peer] for peer in peers]) / mesh["dp"].size()
        error = (grad.full_tensor() - expected).abs().max().item()
        assert error < 1e-3, (error, is_parts)


@pytest.mark.parametrize(
    ("world_size", "checks", "options"),
    [
        (2, False, {"recompute": "units"}),
        *slow((4, True, {}), (2, True, {"fuse": "inductor"}), (2, True, {"dynamic": True})),
    ],
)
def test_slices_draw_their_own_random_numbers(
    ranks_pool: RanksPool, world_size: int, checks: bool, options: dict[str, Any]
) -> None:
    ranks_pool.run(world_size, compare_masks, checks, options)


class Attends(nn.Module):
    """Attention with dropout and equal weights, so that the output shows what was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        return heads, self.o(heads.transpose(1, 2).flatten(2))


def compare_attention(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, 2)
    module = Attends()
    for name, param in module.named_parameters():
        nn.init.constant_(param, 1.0 if name in ("v.bias", "o.weight") else 0.0)
    model = compile_sliced(module, mesh, {**{name: ColwiseParallel() for name in "qkv"}, "o": RowwiseParallel()})
    torch.manual_seed(5)
    heads, y = model(torch.ones(2, 16, 8))
    first_heads, second_heads = gather(heads)
    assert not first_heads.equal(second_heads), "both heads drop the same"
    first, second = gather(torch.get_rng_state())
    assert first.equal(second), "generators went out of step"
    heads.sum().backward()  # the bias's gradient is the sum of what was kept
    grad: Any = model.plain.v.bias.grad
    error = grad.full_tensor().chunk(2)[rank] - heads.detach().sum((0, 1, 2))
    assert error.abs().max() < 1e-3, error
    y.sum()


@pytest.mark.slow
def test_heads_drop_their_own_weights(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, compare_attention)


def call_something_else(rank: int, world_size: int) -> None:
    """Call something else on rank 1 while rank 0 compares batches: both raise instead of waiting."""
    torch.manual_seed(0)
    model = compile_sliced(Net(), mesh_of(1, 2), SLICED)
    fails(
        lambda: tz.full_state_dict(model) if rank else model(torch.ones(2, 6)),
        "RuntimeError: the ranks do different things: rank 0 is in the comparison of the batches",
        "rank 1 is in full_state_dict",
    )


@pytest.mark.slow
def test_a_rank_that_is_elsewhere_is_named(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, call_something_else)


# Initial values


class Drawn(nn.Module):
    """A module with uneven rows in a slice, uneven slices, and a parameter that is not sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.up, self.down, self.head = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.norm(self.embed(tokens))).relu()))


DRAWN_STYLES: Styles = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def scale_and_draw(module: nn.Module) -> None:
    """Scale what ``reset_parameters`` drew, as initialisers by depth do, and draw biases."""
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.mul_(0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias)


def compare_initial(rank: int, world_size: int, folder: Path) -> None:
    """Check on several meshes that a module from the meta device gets the values of one process."""
    for dp, tp, policy in ((world_size // 2, 2, tz.ZERO3), (1, world_size, tz.ZERO1), (world_size, 1, tz.DDP)):
        mesh = mesh_of(dp, tp)
        if world_size % tp or 10 % tp:
            continue
        for init in (None, scale_and_draw):
            torch.manual_seed(1)
            plain = Drawn()
            if init is not None:
                plain.apply(init)
            torch.manual_seed(1)
            with torch.device("meta"):
                module = Drawn()
            model = compile_sliced(module, mesh, DRAWN_STYLES, policy, init=init)
            assert_equal(model, plain)
        if rank == 0:
            save_file(plain.state_dict(), folder / "model.safetensors")
        dist.barrier()
        for weights in (plain.state_dict(), folder):
            with torch.device("meta"):
                module = Drawn()
            assert_equal(compile_sliced(module, mesh, DRAWN_STYLES, policy, weights=weights), plain)
        assert_equal(compile_sliced(Drawn(), mesh, DRAWN_STYLES, policy, weights=plain.state_dict()), plain)
        model(torch.arange(6).view(2, 3)).sum().backward()

    # wrong values are refused by name, on all ranks
    mesh = mesh_of(1, world_size) if 10 % world_size == 0 else mesh_of(world_size // 2, 2)
    torch.manual_seed(rank)
    with torch.device("meta"):
        module = Drawn()
    with refused(RuntimeError, "the initial value of parameter 'embed.weight' differs between ranks", "seed every"):
        compile_sliced(module, mesh, DRAWN_STYLES)
    wrong = {**plain.state_dict(), "up.weight": torch.zeros(5, 6)}
    with refused(ValueError, "weights has 'up.weight' with shape (5, 6)", "(10, 6)"):
        compile_sliced(Drawn(), mesh, DRAWN_STYLES, weights=wrong)
    with refused(ValueError, "broadcast_from does not work beside torch's tensor parallelism yet"):
        compile_sliced(Drawn(), mesh, DRAWN_STYLES, broadcast_from=0)


def assert_equal(model: Any, plain: nn.Module) -> None:
    actual, expected = tz.full_state_dict(model), plain.state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].equal(value), name


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_initial_values_are_those_of_one_process(ranks_pool: RanksPool, tmp_path: Path, world_size: int) -> None:
    ranks_pool.run(world_size, compare_initial, tmp_path)


# Refusals, before anything is compiled


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


HEAD_STYLES: Styles = {"head": ColwiseParallel(output_layouts=Replicate())}
ALL_STYLES: Styles = {**SLICED, **HEAD_STYLES, "embed": RowwiseParallel(input_layouts=Replicate())}


def refuse_before_a_step(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, 2)

    def slice_tied(styles: Styles) -> Any:
        torch.manual_seed(3)
        return parallelize_module(Tied(), mesh["tp"], dict(styles))

    rows, columns = {"embed": ALL_STYLES["embed"]}, {"embed": ColwiseParallel(), **HEAD_STYLES}
    for styles in (HEAD_STYLES, ALL_STYLES, rows, columns):
        with refused(ValueError, "parameters 'embed.weight' and 'head.weight' were tied", "has made two of them"):
            tz.compile(slice_tied(styles), tz.ZERO3, mesh=mesh)
    # sliced alike and tied again, it is one parameter, which trains as in one process
    module = slice_tied(ALL_STYLES)
    module.head.weight = module.embed.weight
    torch.manual_seed(3)
    model, plain = tz.compile(module, tz.ZERO3, mesh=mesh), Tied()
    optimizers = [torch.optim.AdamW(trained.parameters(), lr=1e-2) for trained in (model, plain)]
    for step in range(3):
        tokens = torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(step))
        for trained, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(trained(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
    actual = tz.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert (actual[name] - value).abs().max() < 1e-5, name
    assert actual["head.weight"].equal(actual["embed.weight"])

    model = compile_sliced(Heads(), mesh, {"q": ColwiseParallel(), "o": RowwiseParallel()})
    with refused(RuntimeError, "cannot trace Heads", "unflatten", "(now 2) that divides the heads"):
        model(torch.ones(1, 2, 6))

    names = ("dp", "tp") if rank == 0 else ("dp", "cp")
    named_differently = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
    part = parallelize_module(Net(), named_differently[names[1]], dict(SLICED))
    with refused(RuntimeError, "the mesh's dimensions differs between ranks", "('dp', 'cp')"):
        tz.compile(part, tz.ZERO3, mesh=named_differently)


@pytest.mark.slow
def test_wrong_ties_heads_and_meshes_are_refused_before_a_step(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, refuse_before_a_step)


def refuse_a_tied_llama(rank: int, world_size: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    mesh = mesh_of(1, 2)
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    llama = parallelize_module(llama, mesh["tp"], {"lm_head": HEAD_STYLES["head"]})
    with refused(ValueError, "'model.embed_tokens.weight' and 'lm_head.weight' were tied"):
        tz.compile(llama, tz.ZERO3, mesh=mesh, init=lambda part: None)


@pytest.mark.slow
def test_a_tied_llama_of_which_one_weight_is_sliced_is_refused(ranks_pool: RanksPool) -> None:
    pytest.importorskip("transformers")
    ranks_pool.run(2, refuse_a_tied_llama)
