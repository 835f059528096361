"""Bad input on several ranks: every rank raises before a time-out and names the difference; then the group still works.

One process: ``tests/one/test_bad_input.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import raised_as
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from thunder_zero.runtime.placeholders import Placeholder

import thunder


class Net(nn.Module):
    """Two layers, whose rows are not divisible by 2 and 3, and a buffer; ``skip`` leaves out the second layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 5)
        self.register_buffer("scale", torch.ones(3, 1))
        self.skip = False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x)) * self.scale
        return y if self.skip else self.b(y)


def rename(net: Net) -> None:
    net.c = net.b
    del net.b


def swap(net: Net) -> None:
    first = net.a
    del net.a
    net.a = first


def drop(net: Net) -> None:
    net.b.bias = None  # type: ignore[assignment]


def add(net: Net) -> None:
    net.c = nn.Linear(2, 2)


def cast(net: Net) -> None:
    net.b.bfloat16()


def freeze(net: Net) -> None:
    net.b.weight.requires_grad_(False)


def extend(net: Net) -> None:
    net.b.more = nn.Parameter(torch.ones(5))


def tie(net: Net) -> None:
    net.b.weight = net.a.weight


def empty(net: Net) -> None:
    del net.a, net.b


def to_meta(net: Net) -> None:
    net.to("meta")


def transform(net: Net) -> None:
    alone = [dist.new_group([rank], use_local_synchronization=True) for rank in [dist.get_rank()]]
    thunder.jit(net, transforms=[tz.ZeroTransform(process_group=alone[0])])


def wider(net: Net) -> None:
    net.b = nn.Linear(6, 5)


def nudge(net: Net) -> None:
    with torch.no_grad():
        net.b.weight[4, 3] += 1e-6


def longer_buffer(net: Net) -> None:
    net.scale = torch.ones(4, 1)


def nothing(net: Net) -> None:
    pass


def shard(module: nn.Module, **arguments: Any) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(**arguments)])


def norm(model: Any) -> float:
    """Norm of all full parameters; the same on all ranks."""
    return float(torch.stack([value.float().norm() for value in tz.full_state_dict(model).values()]).norm())


def norm_of_step(model: Any) -> float:
    """After one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return norm(model)


# One rank differs.


def shard_differing(
    rank: int, world_size: int, change: Callable[[Net], None], theirs: dict[str, Any]
) -> tuple[tuple[str, str], bool, float]:
    """The last rank has a changed module or other arguments; afterwards all ranks shard equal modules."""
    net = Net()
    if rank == world_size - 1:
        change(net)
    raised = raised_as(lambda: shard(net, **(theirs if rank == world_size - 1 else {})))
    unharmed = change is transform or not any(isinstance(param, Placeholder) for param in net.parameters())
    return raised, unharmed, norm(shard(Net()))


BUILD = "build the same module on every rank"
DIFFER = [
    (rename, "the ranks differ", "rank 0 has parameter 'b.weight'", "has parameter 'c.weight'", BUILD),
    (swap, "the ranks differ", "rank 0 has parameter 'a.weight'", "has parameter 'b.weight'", BUILD),
    (drop, "the ranks differ", "rank 0 has parameter 'b.bias'", "has buffer 'scale'", BUILD),
    (add, "the ranks differ", "rank 0 has buffer 'scale'", "has parameter 'c.weight'", BUILD),
    (tie, "the ranks differ", "'a.weight' where", "'a.weight' = 'b.weight'", BUILD),
    (wider, "parameter 'b.weight' differs", "rank 0 has shape (5, 4)", "has shape (5, 6)", BUILD),
    (cast, "parameter 'b.weight' differs", "float32", "has shape (5, 4), torch.bfloat16", BUILD),
    (to_meta, "parameter 'a.weight' differs", "unit ''", ", on the meta device", BUILD),
    (freeze, "parameter 'b.weight' differs", "requires_grad=True", "requires_grad=False", BUILD),
    (nudge, "initial value of parameter 'b.weight' differs", "SHA-256", "seed every rank", "broadcast_from=0"),
    (longer_buffer, "buffer 'scale' differs", "rank 0 has shape (3, 1)", "has shape (4, 1)", BUILD),
]


@pytest.mark.parametrize("world_size", of_tier([3], [2, 3]))
@pytest.mark.parametrize("case", DIFFER, ids=lambda case: case[0].__name__)
def test_a_module_that_differs(ranks_pool: RanksPool, world_size: int, case: tuple[Any, ...]) -> None:
    change, *words = case
    assert_all_raise(ranks_pool.run(world_size, shard_differing, change, {}), words)


def assert_all_raise(replies: list[tuple[tuple[str, str], bool, float]], words: list[str]) -> None:
    raised, unharmed, norms = zip(*replies, strict=True)
    assert len(set(raised)) == 1, "all ranks raise the same"
    kind, text = raised[0]
    assert kind == "RuntimeError", text
    assert [word for word in [*words, "rank 0", f"rank {len(replies) - 1}"] if word not in text] == [], text
    assert "\n" not in text
    assert "; " in text, text
    assert all(unharmed), "every module still has its weights"
    assert len(set(norms)) == 1, "the group still works"


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"stage": 2}, ["the policy's stage differs", "rank 0 has 3", "has 2", "the same policy"]),
        ({"bucket_bytes": 8}, ["the policy's bucket_bytes differs", "has 8", "the same policy"]),
        ({"prefetch": 7}, ["the policy's prefetch differs", "rank 0 has None", "has 7"]),
        ({"times": tz.Times({}, {}, 7)}, ["the policy's times differs", "rank 0 has None", "bytes_per_second=7.0"]),
        ({"broadcast_from": 0}, ["the policy's broadcast_from differs", "rank 0 has None", "has 0"]),
        ({"check_gradients": True}, ["the policy's check_gradients differs", "has True"]),
        ({"unit_of": "first_layer"}, ["parameter 'a.weight' differs", "unit ''", "unit 'a'"]),
    ],
)
def test_a_policy_that_differs(ranks_pool: RanksPool, theirs: dict[str, Any], words: list[str]) -> None:
    if "unit_of" in theirs:
        theirs = {"unit_of": first_layer}
    assert_all_raise(ranks_pool.run(2, shard_differing, nothing, theirs), words)


def first_layer(module: nn.Module) -> tuple[str, ...]:
    return ("a",)


@pytest.mark.parametrize(
    ("change", "theirs", "words"),
    [
        (empty, {}, ["Net has no parameters", "nothing to shard"]),
        (transform, {}, ["Net is already transformed by ZeroTransform"]),
        (nothing, {"broadcast_from": 2}, ["broadcast_from is 2", "ranks 0 to 1"]),
        (nothing, {"device": "meta"}, ["no meta tensors"]),
    ],
)
def test_a_module_that_only_one_rank_refuses(
    ranks_pool: RanksPool, change: Callable[[Net], None], theirs: dict[str, Any], words: list[str]
) -> None:
    """Otherwise the other ranks would wait in the first collective."""
    (here, there), unharmed, norms = zip(*ranks_pool.run(2, shard_differing, change, theirs), strict=True)
    assert here[0] == "RuntimeError"
    assert here[1].startswith("rank 1 refused its module, so every rank stops: ")
    assert here[1].endswith(there[1]), "the same message"
    assert [word for word in words if word not in there[1]] == [], there[1]
    assert all(unharmed)
    assert norms[0] == norms[1]


# Weights from one rank.


class Odd(nn.Module):
    """Parameters and buffers of every kind that could break a broadcast."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(4, 4)
        self.tied = self.a.weight
        self.low = nn.Parameter(torch.randn(3).bfloat16())
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.empty(0, 2))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("short", torch.full((3,), seed, dtype=torch.int16))
        self.register_buffer("wave", torch.randn(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.a(x), self.turned) * self.scalar * self.low.float()


def weights_from(rank: int, world_size: int, source: int, stage: int) -> tuple[dict[str, Tensor], float]:
    model = shard(Odd(10 + rank), broadcast_from=source, stage=stage)
    state = tz.full_state_dict(model)
    return state, norm_of_step(model)


@pytest.mark.parametrize("stage", of_tier([0, 3], [0, 1, 3]))
@pytest.mark.parametrize(("world_size", "source"), of_tier([(3, 2)], [(2, 0), (3, 2)]))
def test_weights_of_one_rank_for_all(ranks_pool: RanksPool, world_size: int, source: int, stage: int) -> None:
    expected = Odd(10 + source).state_dict()
    replies = ranks_pool.run(world_size, weights_from, source, stage)
    for state, norm_here in replies:
        assert state.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
        assert [name for name in expected if state[name].dtype is not expected[name].dtype] == []
        assert norm_here == replies[0][1]


def weights_from_a_missing_rank(rank: int, world_size: int) -> tuple[str, str]:
    return raised_as(lambda: shard(Net(), broadcast_from=world_size))


def test_weights_from_a_missing_rank(ranks_pool: RanksPool) -> None:
    for kind, text in ranks_pool.run(3, weights_from_a_missing_rank):
        assert kind == "ValueError"
        assert text.startswith("broadcast_from is 3, "), text
        assert "ranks 0 to 2" in text


# Groups.


def shard_in_part(rank: int, world_size: int, members: list[int]) -> tuple[str, str] | tuple[dict[str, Tensor], float]:
    group = dist.new_group(members)
    if rank not in members:
        return raised_as(lambda: shard(Net(), process_group=group))
    model = shard(Net(seed=rank), process_group=group, broadcast_from=0)
    return tz.full_state_dict(model), norm_of_step(model)


@pytest.mark.parametrize(("world_size", "members"), [(2, [0]), (3, [1, 2])])
def test_a_group_that_a_rank_is_not_in(ranks_pool: RanksPool, world_size: int, members: list[int]) -> None:
    """That rank raises; the others train without it. ``broadcast_from`` is a rank within the group."""
    replies = ranks_pool.run(world_size, shard_in_part, members)
    expected = Net(seed=members[0]).state_dict()
    for rank, (first, second) in enumerate(replies):
        if rank in members:
            assert [name for name in expected if not torch.equal(first[name], expected[name])] == []
            assert second == replies[members[0]][1]
        else:
            assert first == "ValueError", second
            assert second.startswith(f"rank {rank} is not in the given process_group"), second
            assert "; transform the module only on" in second


# Programs that are wrong on every rank.


def step_other_parameters(rank: int, world_size: int, stage: int) -> tuple[tuple[str, str], bool, float]:
    net = Net()
    before = list(net.parameters())
    model = shard(net, stage=stage)
    optimizer = torch.optim.Adam([{"params": list(model.parameters())[:3]}, {"params": before[3:]}])
    model(torch.ones(3, 4)).sum().backward()
    shards = [param.detach().clone() for param in model.parameters()]
    raised = raised_as(optimizer.step)
    same = all(torch.equal(a, b) for a, b in zip(shards, model.parameters(), strict=True)) and not optimizer.state
    model.zero_grad()
    return raised, same, norm_of_step(model)


@pytest.mark.parametrize("stage", of_tier([1, 3], [0, 1, 2, 3]))
def test_an_optimizer_on_other_parameters(ranks_pool: RanksPool, stage: int) -> None:
    replies = ranks_pool.run(2, step_other_parameters, stage)
    for (kind, text), nothing_changed, norm_here in replies:
        assert kind == "RuntimeError"
        assert "Adam holds the plain module's parameter 'b.bias'" in text
        assert "model.parameters()" in text
        assert nothing_changed
        assert norm_here == replies[0][2]


def call_changed(rank: int, world_size: int, change: Callable[[Net], None]) -> tuple[tuple[str, str], float]:
    net = Net()
    model = shard(net)
    weight = net.b.weight
    model(torch.ones(3, 4)).sum().backward()
    change(net)
    raised = raised_as(lambda: model(torch.ones(3, 4)))
    net.b.weight = weight
    net.b._parameters.pop("more", None)
    model.zero_grad()
    return raised, norm_of_step(model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (extend, ["submodule 'b' got the parameter 'more'"]),
        (tie, ["parameter 'b.weight' was replaced"]),
    ],
)
def test_a_model_that_was_changed(ranks_pool: RanksPool, change: Callable[[Net], None], words: list[str]) -> None:
    replies = ranks_pool.run(2, call_changed, change)
    for (kind, text), norm_here in replies:
        assert kind == "RuntimeError"
        assert [word for word in words if word not in text] == [], text
        assert norm_here == replies[0][1]


# Ranks that would run different programs.


def take_other_paths(rank: int, world_size: int) -> tuple[str, str]:
    net = Net()
    net.skip = rank == 1
    model = shard(net)
    return raised_as(lambda: model(torch.ones(3, 4)).sum().backward())


def test_a_path_that_differs(ranks_pool: RanksPool) -> None:
    """Only rank 0 uses the second layer: it would wait for shards that rank 1 never sends."""
    replies = ranks_pool.run(2, take_other_paths)
    assert replies[0] == replies[1]
    kind, text = replies[0]
    assert kind == "RuntimeError", text
    assert [word for word in ("different collectives", "rank 0", "rank 1", "b.weight", "; ") if word not in text] == []


# Gradients that are not finite on one rank.


def poison_one_rank(rank: int, world_size: int, stage: int, value: float) -> dict[str, Any]:
    net = Net()
    model = shard(net, stage=stage, check_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    x = torch.ones(3, 4)
    x_bad = x.clone()
    if rank == world_size - 1:
        x_bad[1, 2] = value
    raised = raised_as(lambda: model(x_bad).sum().backward())
    untouched = all(param.grad is None for param in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    return {"raised": raised, "untouched": untouched, "state": tz.full_state_dict(model)}


@pytest.mark.parametrize(
    ("stage", "value"), of_tier([(0, nan), (1, inf), (3, nan)], list(itertools.product(range(4), (nan, inf))))
)
def test_a_gradient_that_is_not_finite_on_one_rank(ranks_pool: RanksPool, stage: int, value: float) -> None:
    """All ranks raise, whichever owns the rows; the next step trains as if it were the first."""
    replies = ranks_pool.run(3, poison_one_rank, stage, value)
    reference = Net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=1.0)
    reference(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    for reply in replies:
        kind, text = reply["raised"]
        assert kind == "RuntimeError", text
        assert text == replies[0]["raised"][1]
        assert "the gradient of parameter 'a.weight' is NaN or Inf" in text or "parameter 'b.weight' is NaN" in text, (
            text
        )
        assert reply["untouched"]
        for name, expected in reference.state_dict().items():
            torch.testing.assert_close(reply["state"][name], expected, rtol=1e-5, atol=1e-6)
