"""``tz.DiLoCo``: sites of two ranks, which are process groups of one job, against sites that one process simulates."""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thunder_zero as tz
from examples.sent_bytes import bytes_on_sockets
from examples.tensor_memory import added_at_peak, bytes_held, parameters_of
from tests.harness.errors import fails
from tests.harness.models import Small, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow
from tests.harness.traced import Chain
from thunder_zero.outer.agreed import Agreed
from thunder_zero.outer.exchange import Messages
from thunder_zero.outer.rounds import Flight
from thunder_zero.sharded.dtensors import local

NAMES = "attic", "lab"
EVERY, STEPS = 3, 7
INPUTS = torch.arange(24).view(8, 3) % 9
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
Update = Callable[[int, Sequence[nn.Module]], object]
BESIDE = 8192  # bytes on sockets beside the messages of an exchange: headers, and small collectives of the site


def batch(step: int, site: int, rank: int) -> Tensor:
    return ((INPUTS + 5 * site + step) % 9).chunk(2)[rank]


def loss_of(model: Any, step: int, site: int, rank: int) -> Tensor:
    return model(batch(step, site, rank)).square().mean()


EQUAL = ((1, 1), (1, 1))  # of the ranks of each site


def simulate(
    make: Callable[[], nn.Module], inner: Any, steps: int = STEPS, shares: Sequence[tuple[int, int]] = EQUAL
) -> list[nn.Module]:
    """Train sites of two ranks in one process: the outer step as in the paper."""
    agreed, sites = fresh(make), [fresh(make) for _ in NAMES]
    outer, optimizers = OUTER(agreed.parameters()), [inner(site.parameters()) for site in sites]
    for step in range(1, steps + 1):
        for number, (site, optimizer) in enumerate(zip(sites, optimizers, strict=True)):
            grads = []
            for rank in range(2):
                site.zero_grad()
                loss_of(site, step, number, rank).backward()
                grads.append([None if param.grad is None else param.grad.clone() for param in site.parameters()])
            first, second = (share * 2 / sum(shares[number]) for share in shares[number])
            for param, *both in zip(site.parameters(), *grads, strict=True):
                param.grad = None if both[0] is None else both[0].mul(first).add(both[1].mul(second)).div(2)
            optimizer.step()
        if step % EVERY == 0:
            with torch.no_grad():
                for param, *each in zip(agreed.parameters(), *(site.parameters() for site in sites), strict=True):
                    if param.requires_grad:
                        param.grad = sum(param - own for own in each).div(len(sites))
            outer.step()
            for site in sites:
                site.load_state_dict(agreed.state_dict())
    return sites


@contextmanager
def counted() -> Iterator[list[int]]:
    """Collect the bytes that this rank sends to other sites."""
    sent, trade = list[int](), Messages.trade

    def count(self: Messages, outgoing: Any, incoming: Any) -> None:
        sent.append(sum(tensor.nbytes for tensors in outgoing.values() for tensor in tensors))
        trade(self, outgoing, incoming)

    with mock.patch.object(Messages, "trade", count):
        yield sent


@contextmanager
def noted_changes() -> Iterator[list[weakref.ref[Tensor]]]:
    """Collect what this rank offers to other sites, without keeping it."""
    noted, changes = list[weakref.ref[Tensor]](), Agreed.changes

    def note(self: Agreed, vectors: Any) -> list[Tensor]:
        offered = changes(self, vectors)
        noted.extend(map(weakref.ref, offered))
        return offered

    with mock.patch.object(Agreed, "changes", note):
        yield noted


def sites_of_two(rank: int) -> tuple[int, Any]:
    """Return this rank's site, 0 or 1, and its group."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return rank // 2, groups[rank // 2]


def address() -> str:
    """Return a free address, equal on all ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        values = [f"127.0.0.1:{probe.getsockname()[1]}"]
    dist.broadcast_object_list(values, 0)
    return values[0]


def train(model: Any, optimizer: Any, outer: tz.DiLoCo, site: int, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, site, rank).backward()
        optimizer.step()
        outer.step()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tz.full_state_dict(model).items()}


def equals_simulation(rank: int, world_size: int, stage: int, shares: Sequence[tuple[int, int]]) -> None:
    site, group = sites_of_two(rank)
    where = tz.sites(address(), name=NAMES[site], timeout=20)
    inner = partial(torch.optim.SGD, lr=0.3, momentum=0.5)
    expected = simulate(Small, inner, shares=shares)[site]
    model = sharded(fresh(Small), tz.Policy(stage, shares=shares[site]), process_group=group)
    outer = tz.DiLoCo(model, where, sync_every=EVERY, outer_optimizer=partial(OUTER, lr=(0.7, 0.1)[site]))
    with (
        noted_changes() as noted,
        counted() as sent,
        mock.patch("thunder_zero.plan.outer.PIECE_BETWEEN_SITES", 9),
    ):  # several pieces a vector
        train(model, inner(model.parameters()), outer, site, rank % 2, range(1, STEPS + 1))
        planned = outer.outer.sent(outer.outer.vectors_of(model.state.plan)[0], 2)
    assert sum(sent) == STEPS // EVERY * planned, (sent, planned)
    assert outer.optimizer.param_groups[0]["lr"] == 0.7, "it is not that of the first site"
    assert noted, "nothing was offered"
    assert not any(change() is not None for change in noted), "changes live between exchanges"
    for name, value in weights(model).items():
        assert torch.equal(value, expected.state_dict()[name]), name
    outer.leave()
    fails(outer.step, f"site {NAMES[site]!r} has left", "make a new DiLoCo")


@pytest.mark.parametrize(
    ("stage", "shares"), [(3, EQUAL), *slow((0, EQUAL), (1, EQUAL), (2, EQUAL), (3, ((2, 1), (1, 3))))]
)
def test_equals_a_simulation_bit_for_bit(ranks_pool: RanksPool, stage: int, shares: Sequence[tuple[int, int]]) -> None:
    ranks_pool.run(4, equals_simulation, stage, shares)


def agree(outer: tz.DiLoCo, model: Any, world_size: int = 4) -> None:
    """Check that all ranks of the job have equal parameters, agreed parameters and momentum."""
    states = {kind: {name: local(row) for name, row in rows.items()} for kind, rows in outer.saved().items()}
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, (weights(model), states, outer.counts.version))
    for place in range(2):
        (full, mine, version), (other, theirs, others_version) = everyone[place], everyone[place + 2]
        assert version == others_version, (version, others_version)
        assert all(torch.equal(full[name], other[name]) for name in full), "parameters differ"
        for kind, rows in mine.items():
            assert all(torch.equal(row, theirs[kind][name]) for name, row in rows.items()), kind


def await_name(where: str, name: str) -> None:
    """Wait until a site has come to the store."""
    host, _, port = where.partition(":")
    store = dist.TCPStore(host, int(port), wait_for_workers=False)
    while name not in store.get("names").decode().split():
        time.sleep(0.05)


def come_and_go(rank: int, world_size: int, folder: Path) -> None:
    """A site joins late with other values, another checkpoint is loaded on one rank, both start from old rounds."""
    site, group = sites_of_two(rank)
    where = address()
    options: dict[str, Any] = {"sync_every": EVERY, "wire": tz.Int8(block=16), "fragments": 3}
    own = tz.sites(where, name=NAMES[site], timeout=20, expected=1)
    module = fresh(Small)
    module.head.weight.data.add_(site)
    model = sharded(module, 3, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    outer = tz.DiLoCo(model, own, **options)
    if site == 0:
        train(model, optimizer, outer, site, rank % 2, range(5))
        tz.save(folder / "0/first", model, optimizer, extra={"outer": outer})
        assert outer.counts.version == 4, "alone it exchanges with itself, and met once"
    dist.barrier()
    if site == 0:
        await_name(where, "lab")
    train(model, optimizer, outer, site, rank % 2, range(5, 8))  # the other's first step takes the rows
    assert outer.counts.version == 7, outer
    tz.save(folder / f"{site}/last", model, optimizer, extra={"outer": outer})
    fails(
        lambda: tz.load(folder / f"{site}/last", model), "has an outer step that has begun", "pass its DiLoCo in extra"
    )
    outer.leave()

    alone = dist.new_subgroups(1)[0]
    lone = sharded(fresh(Small), 1, process_group=alone)
    again = tz.DiLoCo(lone, tz.sites(f"{where}0"[:14], name="x"), **options)
    tz.load(folder / f"{site}/last", lone, extra={"outer": again})
    assert again.counts.version == 7, again
    assert not again.counts.met, again
    for kind, rows in outer.saved().items():
        for name, row in rows.items():
            whole = row.full_tensor() if hasattr(row, "full_tensor") else row
            assert torch.equal(whole, local(again.saved()[kind][name])), (kind, name)

    model = sharded(module, 3, process_group=group)  # both sites restart: one of them from an old checkpoint
    outer = tz.DiLoCo(model, tz.sites(where, name=NAMES[site], timeout=20), **options)
    tz.load(folder / ("0/first", "1/last")[site], model, extra={"outer": outer})
    train(model, torch.optim.SGD(model.parameters(), 0.0), outer, site, rank % 2, range(4))
    assert outer.counts.version == 10, outer  # they met after 7, and exchanged each fragment once
    agree(outer, model)
    outer.leave()


def test_sites_come_and_go(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(4, come_and_go, tmp_path)


def refuse(rank: int, world_size: int) -> None:
    """Refuse other models, a second job with a name, and outer optimizers that are not elementwise."""
    site, group = sites_of_two(rank)
    where = address()

    def outer_of(module: nn.Module, name: str, timeout: float = 20, **options: Any) -> tuple[Any, tz.DiLoCo]:
        model = sharded(module, 2, process_group=group)
        return model, tz.DiLoCo(model, tz.sites(where, name=name, timeout=timeout, expected=1), sync_every=2, **options)

    def first_step(module: nn.Module, name: str, **options: Any) -> None:
        model, outer = outer_of(module, name, **options)
        train(model, torch.optim.SGD(model.parameters(), 0.1), outer, site, rank % 2, range(1))

    class Other(Small):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.randn(6))

    small = fresh(Small)
    fails(lambda: outer_of(small, "lab", outer_optimizer=torch.optim.LBFGS), "outer_optimizer failed on a small matrix")
    fails(lambda: outer_of(small, "lab", outer_optimizer=torch.optim.Muon), "steps parts of a matrix otherwise")
    fails(lambda: outer_of(small, "lab", fragments=2, delay=1), "delay is 1, and a fragment is exchanged every 1 steps")
    fails(lambda: outer_of(small, "lab", wire=torch.int32), "wire is Encoding(dtype=torch.int32")
    fails(lambda: outer_of(small, "lab", wire=tz.NF4()), "wire is NF4", "give torch.float32, torch.bfloat16")
    model = sharded(small, 2, process_group=group)
    next(iter(model.parameters())).requires_grad_(False)
    fails(lambda: tz.DiLoCo(model, tz.sites(where, name="lab")), "trained when the model was compiled, and is frozen")
    model, outer = None, None
    if site == 0:
        model, outer = outer_of(small, "attic")
        train(model, torch.optim.SGD(model.parameters(), 0.1), outer, site, rank % 2, range(1))
    dist.barrier()
    if site == 1:
        fails(lambda: first_step(fresh(Other), "lab"), "differs from the sites at", "'unused' of shape (6,)", "(5,)")
        fails(lambda: first_step(small, "lab", wire=torch.bfloat16), "every 2 steps in bfloat16, and the others have")
        fails(lambda: first_step(small, "lab", alpha=0.25), "it has alpha 0.25, and the others have alpha 0.5")
        fails(lambda: first_step(small, "lab", timeout=30), "a time-out of 30 s, and the others have a time-out of 20")
        fails(lambda: first_step(small, "attic"), "another job is site 'attic' at", "give this one another name")
    dist.barrier()
    if outer is not None:
        outer.leave()


def test_wrong_sites_are_refused(ranks_pool: RanksPool) -> None:
    ranks_pool.run(4, refuse)


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)])

    def forward(self, x: Tensor) -> Tensor:
        norm, up, down = self.layers
        return down(up(norm(x)).relu())


def stream(rank: int, world_size: int, kind: str) -> None:
    """Train with fragments, a delay and int8: DDP, in slices, in bfloat16 with an offloaded outer step."""
    site, group = sites_of_two(rank)
    where = tz.sites(address(), name=NAMES[site], timeout=20)
    x = torch.arange(24.0).view(4, 6).sin() + site
    module: nn.Module = fresh(Sliced)
    if kind == "slices":
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("site", "dp", "tp"))["dp", "tp"]
        parallelize_module(module, mesh["tp"], {"layers.1": ColwiseParallel(), "layers.2": RowwiseParallel()})
        model = tz.compile(module, stage=3, mesh=mesh)
    else:
        model = tz.compile(module.bfloat16() if kind == "bfloat16" else module, stage=0, process_group=group)
        x = x.to(next(model.parameters()).dtype)
    options: dict[str, Any] = {"cpu_offload": kind == "bfloat16", "fragments": 3, "delay": 1}
    outer = tz.DiLoCo(model, where, sync_every=6, wire=tz.Int8(block=16), alpha=0.25, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    before = [local(param).clone() for param in model.parameters()]
    for _ in range(9):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        outer.step()
    assert outer.counts.version == 4, outer  # met after step 1, launched after steps 2, 4, 6 and 8
    assert not any(torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True))
    digests: list[Any] = [None] * world_size
    dist.all_gather_object(digests, outer.digest())
    assert len(set(digests)) == 1, "the sites differ"
    for name, row in outer.agreed.rows.items():  # equal rows of a site stay equal, though each rank rounds at random
        assert local(row).dtype is torch.float32, name
        if kind != "slices" or name.startswith("layers.0"):
            everyone: list[Any] = [None] * world_size
            dist.all_gather_object(everyone, local(row).clone())
            assert all(torch.equal(everyone[0], other) for other in everyone), name
    outer.leave()


@pytest.mark.parametrize("kind", ["slices", *slow("replicas", "bfloat16")])
def test_fragments_are_exchanged_beside_compute(ranks_pool: RanksPool, kind: str) -> None:
    ranks_pool.run(4, stream, kind)


class WholeOuter:
    """The outer step as in the papers, on full tensors in plain torch."""

    def __init__(self, model: Any, outer: tz.Outer) -> None:
        self.model, self.outer = model, outer
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        self.agreed = {name: nn.Parameter(value) for name, value in weights(model).items() if name in trained}
        self.optimizer = OUTER(list(self.agreed.values()))
        self.steps, self.exchanges, self.landing = 0, 0, dict[int, dict[str, Tensor]]()  # means, by step

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        now, everyone = weights(self.model), list[Any]([None]) * dist.get_world_size()
        if self.outer.is_due(self.steps):
            dist.all_gather_object(everyone, now)
            sites = everyone[:: len(everyone) // self.outer.sites]
            paths = self.outer.paths_of(self.model.state.plan)[self.exchanges % self.outer.fragments]
            means = {path: sum(self.agreed[path] - own[path] for own in sites).div(len(sites)) for path in paths}
            self.landing[self.steps + self.outer.delay] = means
            self.exchanges += 1
        for path, mean in self.landing.pop(self.steps, {}).items():
            self.agreed[path].grad = mean
        self.optimizer.step()
        alpha = self.outer.alpha if self.outer.delay else 0.0
        for path, agreed in self.agreed.items():
            if agreed.grad is not None:
                now[path], agreed.grad = torch.lerp(agreed, now[path], alpha), None
        self.model.load_state_dict(now)


def train_as(rank: int, world_size: int, kind: str) -> None:
    """Train sites as ``kind`` says, with ``tz.DiLoCo`` and with a full outer step: equal to the bit."""
    site, group = sites_of_two(rank) if world_size == 4 else (rank, dist.new_subgroups(1)[0])
    where = tz.sites(address(), name=f"site{site}", timeout=60, expected=2 if world_size == 4 else 3)
    options: dict[str, Any] = {"fragments": 2, "delay": 1, "alpha": 0.25} if kind == "muon" else {}
    precision = tz.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
    policy = tz.Policy(2) if kind == "slices" else tz.Policy(3, mixed_precision=precision)

    def make() -> Any:
        module = fresh(Sliced)
        if kind != "slices":
            return tz.compile(module, policy, process_group=group, fuse="inductor" if kind == "fused" else None)
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("site", "dp", "tp"))["dp", "tp"]
        parallelize_module(module, mesh["tp"], {"layers.1": ColwiseParallel(), "layers.2": RowwiseParallel()})
        return tz.compile(module, policy, mesh=mesh)

    def inner(model: Any) -> list[torch.optim.Optimizer]:
        matrices = [param for param in model.parameters() if param.ndim == 2 and kind == "muon"]
        others = [param for param in model.parameters() if all(param is not matrix for matrix in matrices)]
        whole = [tz.whole(torch.optim.Muon, matrices, lr=0.02)] if matrices else []
        return [*whole, torch.optim.AdamW(others, 0.01)]

    def run(model: Any, outer: Any) -> dict[str, Tensor]:
        optimizers, place = inner(model), 0 if kind == "slices" else rank % 2
        for step in range(7):
            x = (torch.arange(24.0).view(2, 2, 6) + step + 5 * site + 3 * place).sin()
            with model.no_sync():
                model(x[0]).square().mean().backward()
            model(x[1]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            outer.step()
        return weights(model)

    model = make()
    outer = tz.DiLoCo(model, where, sync_every=4, outer_optimizer=OUTER, **options)
    with mock.patch("thunder_zero.plan.outer.PIECE_BETWEEN_SITES", 50):
        values = run(model, outer)
    outer.leave()
    assert outer.counts.version == 7 // outer.outer.interval
    model = make()
    expected = run(model, WholeOuter(model, outer.outer))
    for name, value in values.items():
        assert torch.equal(value, expected[name]), (name, (value - expected[name]).abs().max())


@pytest.mark.parametrize("kind", ["muon", *slow("slices", "fused", "three")])
def test_equals_an_outer_step_on_full_tensors(ranks_pool: RanksPool, kind: str) -> None:
    """Muon with fragments and a delay, fused regions, slices, three sites of one rank; all with accumulation."""
    ranks_pool.run(3 if kind == "three" else 4, train_as, kind)


def make_wide() -> nn.Module:
    return Chain(nn.Linear(192, 512), nn.Tanh(), nn.Linear(512, 192))


def compare_outer_step(rank: int, world_size: int, stage: int, outer: tz.Outer) -> None:
    """Compare the rows of an outer step, and its peak, with those of two sites of two ranks."""
    site, group = sites_of_two(rank)
    where, x = tz.sites(address(), name=NAMES[site], timeout=20), torch.randn(4, 192)
    model = sharded(fresh(make_wide), stage, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters())
    diloco = tz.DiLoCo(model, where, sync_every=outer.sync_every, fragments=outer.fragments, wire=outer.wire)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for number in range(1, 2 * outer.sync_every):  # to the second exchange of the last fragment
        step()
        vectors = outer.vectors_of(model.state.plan)[diloco.counts.version % outer.fragments]
        before = bytes_on_sockets(but_port=where.port)
        diloco.step()
        if outer.is_due(number):
            beside = bytes_on_sockets(but_port=where.port) - before - outer.sent(vectors, 2)
            assert 0 < beside < BESIDE, beside
    step()
    forecast = tz.tools.memory(model, loss=lambda y: y.square().mean(), optimizer=torch.optim.AdamW)
    states = [state for values in optimizer.state.values() for state in values.values()]
    rows = [*parameters_of(model), *states, *(row for kind in diloco.saved().values() for row in kind.values())]
    held = bytes_held(rows)
    gradients = bytes_held(param.grad for param in model.parameters() if param.grad is not None)
    in_this_thread = mock.patch.object(Flight, "start", Flight.run)  # the allocator records this thread alone
    with in_this_thread, mock.patch("thunder_zero.outer.rounds.wait_for_a_core"):  # it would stay for later tests
        measured = held + gradients + added_at_peak(diloco.step, torch.device("cpu"))
    diloco.leave()
    assert abs(forecast.at_rest / held - 1) < 0.01, (forecast.at_rest, held)
    assert forecast.outer_step
    assert abs(forecast.outer_step / measured - 1) < 0.01, (forecast.outer_step, measured)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "outer"),
    [(3, tz.Outer(2, wire=tz.Int8(block=64))), *deep((1, tz.Outer(2, fragments=2)))],
)
def test_the_forecast_of_an_outer_step_is_what_the_allocator_counts(
    ranks_pool: RanksPool, stage: int, outer: tz.Outer
) -> None:
    ranks_pool.run(4, compare_outer_step, stage, outer)
