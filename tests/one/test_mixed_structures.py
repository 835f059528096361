"""Mixed precision at the borders of submodules: tensors in structures of all kinds, which keep their types."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.tiers import only

import thunder

HALF, FULL = torch.bfloat16, torch.float32
PRECISION = tz.MixedPrecision(HALF, output_dtype=FULL, overrides={"inner": tz.MixedPrecision()})


class Named(NamedTuple):
    t: Any
    label: str = "label"


@dataclass(frozen=True)
class Data:
    t: Any
    steps: int = 1


@dataclass
class Derived:
    t: Any
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.t * 2


class Items(dict[str, Any]):
    pass


Put = Callable[[Any], Any]
KINDS: dict[str, tuple[Put, Put]] = {  # put a tensor into a structure, and take it out of it
    "all of them, nested": (
        lambda t: {"a": OrderedDict(b=[Named((Data(t), None))])},
        lambda s: s["a"]["b"][0].t[0].t,
    ),
    "tuple": (lambda t: (t, 1), lambda s: s[0]),
    "dict": (lambda t: {"t": t}, lambda s: s["t"]),
    "named tuple": (Named, lambda s: s.t),
}
REFUSED: dict[str, Put] = {
    "Derived": Derived,
    "Items": lambda t: Items(t=t),
    "defaultdict": lambda t: defaultdict(list, t=t),
}


class Inner(nn.Module):
    """Computes in float32."""

    def __init__(self, put: Put, take: Put) -> None:
        super().__init__()
        self.layer, self.put, self.take = nn.Linear(4, 4), put, take

    def forward(self, given: Any, *, by_name: Any) -> Any:
        assert type(given) is type(by_name) is type(self.put(0.0))
        return self.put(self.layer(self.take(given) + self.take(by_name)))


class Outer(nn.Module):
    """Computes in bfloat16, around a part in float32; takes and returns a dataclass."""

    def __init__(self, put: Put, take: Put) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Inner(put, take), nn.Linear(4, 4)
        self.put, self.take, self.by_hand = put, take, False

    def forward(self, given: Data) -> Data:
        x = self.first(given.t)
        if self.by_hand:
            x = x.float()
        y = self.take(self.inner(self.put(x), by_name=self.put(x)))
        return Data(self.last(y.to(HALF) if self.by_hand else y))


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by_hand(module: Outer) -> Outer:
    copy = deepcopy(module)
    copy.by_hand = True
    copy.first.to(HALF)
    copy.last.to(HALF)
    return copy


def shard(module: nn.Module, precision: tz.MixedPrecision = PRECISION) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(stage=3, mixed_precision=precision)])


@pytest.mark.parametrize("kind", only(("named tuple",), KINDS))
def test_it_computes_as_a_module_that_casts_by_hand(kind: str) -> None:
    """FSDP2 casts the same tensors. Equal up to the rounding of one bfloat16 operation."""
    torch.manual_seed(0)
    module, x = Outer(*KINDS[kind]), torch.randn(3, 4)
    one, model = by_hand(module), shard(module)
    found, expected = model(Data(x)).t, one(Data(x.to(HALF))).t.float()
    assert found.dtype is FULL
    for loss in (found.square().mean(), expected.square().mean()):
        loss.backward()
    assert torch.allclose(found, expected, atol=1e-2)
    for (name, param), eager in zip(model.named_parameters(), one.parameters(), strict=True):
        assert param.grad.dtype is FULL
        assert torch.allclose(param.grad, eager.grad.float(), atol=1e-2), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_a_structure_that_cannot_be_made_anew(kind: str) -> None:
    with refused(TypeError, f"cannot cast the tensors in a {kind}, which inner takes or returns", "use a tuple, list"):
        shard(Outer(REFUSED[kind], lambda s: s))(Data(torch.randn(3, 4)))


class Gives(nn.Module):
    def __init__(self, give: Put) -> None:
        super().__init__()
        self.layer, self.give = nn.Linear(4, 4), give

    def forward(self, given: Any) -> Any:
        return self.give(self.layer(given if isinstance(given, Tensor) else given.t))


class Two(NamedTuple):
    t: Any
    u: Any


class One(NamedTuple):
    t: Any


def wrong(t: Tensor) -> Any:
    raise TypeError("the user's own words")


RETURNED: dict[str, tuple[Put, str]] = {
    "two fields": (lambda t: Two(t, t + 1), "a named tuple, Two"),
    "one field": (One, "a named tuple, One"),
    "a default": (Named, "a named tuple, Named"),
    "in a list": (lambda t: [Two(t, t + 1)], "a named tuple, Two"),
    "in a dict": (lambda t: {"a": Two(t, t + 1)}, "a named tuple, Two"),
    "OrderedDict": (lambda t: OrderedDict(t=t), "another structure than tuples, lists, dicts and dataclasses"),
}


@pytest.mark.slow
@pytest.mark.parametrize("given", [One, Named, lambda x: Two(x, 3), lambda x: Two(x, x)])
def test_forward_takes_named_tuples(given: Put) -> None:
    """Whose tensors are cast as others are; a TypeError of the user's keeps its words."""
    x, module = torch.randn(3, 4), Gives(lambda t: t)
    expected = module(x)
    assert torch.allclose(shard(deepcopy(module), tz.MixedPrecision())(given(x)), expected)
    half = shard(module, tz.MixedPrecision(HALF))(given(x))
    assert half.dtype is HALF
    assert torch.allclose(half.float(), expected, atol=5e-2)
    with pytest.raises(TypeError, match=r"^the user's own words$"):
        shard(Gives(wrong), tz.MixedPrecision())(given(x))


@pytest.mark.parametrize("what", only(("two fields",), RETURNED))
def test_what_thunder_cannot_return(what: str) -> None:
    give, words = RETURNED[what]
    with refused(TypeError, "Thunder cannot trace Gives, which returns", words, "use a dict or a dataclass"):
        shard(Gives(give), tz.MixedPrecision())(torch.randn(3, 4))
