"""Bad input on several ranks: every rank raises before a time-out and names the difference; then the group still works.

One process: ``tests/one/test_bad_input.py``.
"""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.as_one_process import gather_objects
from tests.harness.errors import kind_and_text, refused
from tests.harness.models import Zoo, is_plain
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.schedule import Times

import thunder

WORLD = 3
X = torch.ones(3, 4)
Row = tuple[str, dict[str, Any], tuple[str, ...]]


class Net(nn.Module):
    """Two layers of rows that 3 ranks cannot divide, and a buffer; ``skip`` leaves out the second layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 5)
        self.register_buffer("scale", torch.ones(3, 1))
        self.skip = False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a.forward(x)) * self.scale
        return y if self.skip else self.b.forward(y)


def shard(module: nn.Module, **arguments: Any) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(**arguments)])


def norm_of(model: Any) -> float:
    """Return the norm of all full parameters."""
    return float(torch.stack([value.float().norm() for value in tz.full_state_dict(model).values()]).norm())


def norm_of_step(model: Any, x: Tensor = X) -> float:
    """Return the norm of all full parameters after one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    return norm_of(model)


def assert_all_have(value: Any) -> None:
    values = gather_objects(value)
    assert values == [value] * len(values), values


def assert_state(model: Any, expected: dict[str, Tensor]) -> None:
    """Check the full parameters and buffers, bit for bit."""
    torch.testing.assert_close(dict(tz.full_state_dict(model)), expected, rtol=0, atol=0)


# One rank differs

BUILD = "build the same module on every rank"
DIFFERENCES: list[Row] = [
    # change of the last rank's module, its arguments, words of all ranks' error
    ("rename", {}, ("the ranks differ", "rank 0 has parameter 'b.weight'", "has parameter 'c.weight'", BUILD)),
    ("swap", {}, ("the ranks differ", "rank 0 has parameter 'a.weight'", "has parameter 'b.weight'", BUILD)),
    ("drop", {}, ("the ranks differ", "rank 0 has parameter 'b.bias'", "has buffer 'scale'", BUILD)),
    ("add", {}, ("the ranks differ", "rank 0 has buffer 'scale'", "has parameter 'c.weight'", BUILD)),
    ("tie", {}, ("the ranks differ", "'a.weight' where", "'a.weight' = 'b.weight'", BUILD)),
    ("widen", {}, ("parameter 'b.weight' differs", "rank 0 has shape (5, 4)", "has shape (5, 6)", BUILD)),
    ("cast", {}, ("parameter 'b.weight' differs", "float32", "has shape (5, 4), torch.bfloat16", BUILD)),
    ("to meta", {}, ("parameter 'a.weight' differs", "unit ''", ", on the meta device", BUILD)),
    ("freeze", {}, ("parameter 'b.weight' differs", "requires_grad=True", "requires_grad=False", BUILD)),
    ("nudge", {}, ("value of parameter 'b.weight' differs", "SHA-256", "seed every rank", "broadcast_from=0")),
    ("longer buffer", {}, ("buffer 'scale' differs", "rank 0 has shape (3, 1)", "has shape (4, 1)", BUILD)),
    ("", {"stage": 2}, ("the policy's stage differs", "rank 0 has 3", "has 2", "the same policy")),
    ("", {"bucket_bytes": 8}, ("the policy's bucket_bytes differs", "has 8", "the same policy")),
    ("", {"prefetch": 7}, ("the policy's prefetch differs", "rank 0 has None", "has 7")),
    (
        "",
        {"times": Times({}, {}, 7)},
        ("the policy's times differs", "rank 0 has None", "bytes_per_second=7.0"),
    ),
    ("", {"broadcast_from": 0}, ("the policy's broadcast_from differs", "rank 0 has None", "has 0")),
    ("", {"shares": (2,) * (WORLD - 1) + (1,)}, ("the policy's shares differs", "rank 0 has ()", "has (2, ")),
    ("", {"check_gradients": True}, ("the policy's check_gradients differs", "has True")),
    ("", {"unit_of": lambda module: ("a",)}, ("parameter 'a.weight' differs", "unit ''", "unit 'a'")),
]
REFUSED_BY_ONE: list[Row] = [
    # change of the last rank's module, its arguments, words of its own error
    ("empty", {}, ("Net has no parameters", "nothing to shard")),
    ("transform", {}, ("Net is already transformed by ZeroTransform",)),
    ("", {"broadcast_from": WORLD}, (f"broadcast_from is {WORLD}", f"ranks 0 to {WORLD - 1}")),
    ("", {"shares": (2, 1) * WORLD}, ("shares is (2, 1, ", f"the model has {WORLD} data-parallel ranks")),
    ("", {"device": "meta"}, ("backend", "supports no meta tensors")),
]
REFUSED_BY_THE_POLICY: list[tuple[dict[str, Any], str]] = [
    ({"stage": 7}, "stage is 7"),
    ({"stage": 3, "gather_format": "int8"}, "gather_format is 'int8'"),
    ({"stage": 3, "fuse": "triton"}, "fuse is 'triton'"),
    ({"stage": 3, "shares": (2, 0)}, "shares is (2, 0)"),
    ({"stage": 3, "shares": (2, -1)}, "shares is (2, -1)"),
    ({"stage": 3, "shares": (float("nan"), 1)}, "shares is (nan, 1)"),
    ({"stage": 3, "shares": [2, 1]}, "shares is [2, 1]"),
]


def change(net: Net, kind: str) -> None:
    match kind:
        case "rename":
            net.c = net.b
            del net.b
        case "swap":
            first = net.a
            del net.a
            net.a = first
        case "drop":
            net.b.bias = None  # type: ignore[assignment]
        case "add":
            net.c = nn.Linear(2, 2)
        case "tie":
            net.b.weight = net.a.weight
        case "widen":
            net.b = nn.Linear(6, 5)
        case "cast":
            net.b.bfloat16()
        case "to meta":
            net.to("meta")
        case "freeze":
            net.b.weight.requires_grad_(False)
        case "nudge":
            net.b.weight.data[4, 3] += 1e-6
        case "longer buffer":
            net.scale = torch.ones(4, 1)
        case "empty":
            del net.a, net.b
        case "transform":
            shard(net, process_group=dist.new_group([dist.get_rank()], use_local_synchronization=True))
        case _:
            assert kind == "", kind


def shard_differing(kind: str, args: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each rank's error if the last rank has a changed module or other arguments."""
    is_last, net = dist.get_rank() == WORLD - 1, Net()
    if is_last:
        change(net, kind)
    error = kind_and_text(lambda: shard(net, **(args if is_last else {})))
    assert is_plain(net) or (is_last and kind == "transform"), (kind, args)
    return gather_objects(error)


def compile_differing(args: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each rank's error if the last rank gives ``tz.compile`` other arguments."""
    arguments = args if dist.get_rank() == WORLD - 1 else {"stage": 3}
    return gather_objects(kind_and_text(lambda: tz.compile(Net(), **arguments)))


def all_stop_if_one_differs(rank: int, world_size: int) -> None:
    for change_kind, args, words in DIFFERENCES:
        errors = shard_differing(change_kind, args)
        kind, text = errors[0]
        assert errors == [("RuntimeError", text)] * WORLD, (change_kind, args, errors)
        expected = (*words, "rank 0", f"rank {WORLD - 1}", "; ")
        assert [word for word in expected if word not in text or "\n" in text] == [], (change_kind, args, text)
    # Otherwise the other ranks would wait in the first collective.
    alone = [(shard_differing(change_kind, args), words) for change_kind, args, words in REFUSED_BY_ONE]
    alone += [(compile_differing(args), (word,)) for args, word in REFUSED_BY_THE_POLICY]
    for ((kind, text), *_, (_, last_error)), words in alone:
        assert kind == "RuntimeError", (last_error, text)
        assert text == f"rank {WORLD - 1} refused its module, so every rank stops: {last_error}"
        assert [word for word in words if word not in last_error] == [], last_error
    assert_all_have(norm_of(shard(Net())))


def test_a_module_or_a_policy_that_differs(ranks_pool: RanksPool) -> None:
    ranks_pool.run(WORLD, all_stop_if_one_differs)


def differ_in_path(rank: int, world_size: int, announces: bool, words: tuple[str, ...]) -> None:
    """Use the second layer on rank 0 alone, which would wait for shards that rank 1 never sends."""
    net = Net()
    net.skip = rank == 1
    model = shard(net)
    model.state.transport.announces = announces  # without tags, as with NCCL, ranks compare launches once
    error = kind_and_text(lambda: model(X).sum().backward())
    assert_all_have(error)
    kind, text = error
    assert [word for word in words if word not in f"{kind}: {text}"] == [], text


def test_a_path_that_differs(ranks_pool: RanksPool) -> None:
    both = ("RuntimeError", "rank 0", "rank 1", "b.weight", "; ")
    ranks_pool.run(2, differ_in_path, True, ("are both in forward number 1", "(launch 1: all_gather", *both))
    ranks_pool.run(2, differ_in_path, False, ("launch 1 of forward differs between ranks", *both))


# Weights from one rank, and groups


class Odd(Zoo):
    """A model whose parameters and buffers have shapes and dtypes that could break a broadcast."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))  # Zoo's does not depend on the seed
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("short", torch.full((3,), seed, dtype=torch.int16))
        self.register_buffer("wave", torch.randn(2, dtype=torch.complex64))


def broadcast_weights(rank: int, world_size: int, source: int) -> None:
    for stage in (0, 1, 3):
        model = shard(Odd(10 + rank), broadcast_from=source, stage=stage)
        assert_state(model, Odd(10 + source).state_dict())
    assert_all_have(norm_of_step(model, torch.randn(3, 9, generator=torch.Generator().manual_seed(0))))


@pytest.mark.parametrize(("world_size", "source"), [(2, 0), *slow((3, 2))])
def test_weights_of_one_rank_for_all(ranks_pool: RanksPool, world_size: int, source: int) -> None:
    ranks_pool.run(world_size, broadcast_weights, source)


def shard_in_groups(rank: int, world_size: int) -> None:
    """Check that a rank outside of the group raises, and that the group trains without it."""
    for members in ([0], [1, 2]):
        group = dist.new_group(members)
        if rank in members:
            model = shard(Net(seed=rank), process_group=group, broadcast_from=0)  # a rank within the group
            assert_state(model, Net(seed=members[0]).state_dict())
        else:
            with refused(ValueError, f"rank {rank} is not in the given process_group", "; transform the module only"):
                shard(Net(), process_group=group)
    norms = gather_objects(norm_of_step(model))
    assert norms[1] == norms[2], norms


def test_a_group_that_a_rank_is_not_in(ranks_pool: RanksPool) -> None:
    ranks_pool.run(3, shard_in_groups)


# Gradients that are not finite on one rank


def poison_one_rank(rank: int, world_size: int, stage: int) -> None:
    """Check that all ranks raise, and that the next step trains as if it were the first."""
    model = shard(Net(), stage=stage, check_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for value in (nan, inf):
        x = X.clone()
        if rank == world_size - 1:
            x[1, 2] = value
        kind, text = kind_and_text(lambda x=x: model(x).sum().backward())  # type: ignore[misc]
        assert_all_have((kind, text))
        assert kind == "RuntimeError", text
        assert "the gradient of parameter " in text, text
        assert "weight' is NaN or Inf" in text, text
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    model(X).sum().backward()
    optimizer.step()
    expected = Net()
    expected(X).sum().backward()
    torch.optim.SGD(expected.parameters(), lr=1.0).step()
    torch.testing.assert_close(dict(tz.full_state_dict(model)), expected.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [3, *slow(0)])
def test_a_gradient_that_is_not_finite_on_one_rank(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(3, poison_one_rank, stage)
