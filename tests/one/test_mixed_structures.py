"""Mixed precision casts tensors in structures of all kinds at the borders of submodules, and keeps the structures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.models import full
from tests.harness.tiers import slow

import thunder

HALF, FULL = torch.bfloat16, torch.float32
PRECISION = tz.MixedPrecision(HALF, output_dtype=FULL, overrides={"inner": tz.MixedPrecision()})
pytestmark = pytest.mark.usefixtures("group")


class Named(NamedTuple):
    t: Any
    label: str = "label"


@dataclass(frozen=True)
class Data:
    t: Any
    steps: int = 1


Put = Callable[[Any], Any]


def nested(t: Any) -> Any:
    return {"a": OrderedDict(b=[Named((t, None))])}


def taken(structure: Any) -> Any:
    return structure["a"]["b"][0].t[0]


class Inner(nn.Module):
    """Computes in float32."""

    def __init__(self, put: Put, take: Put) -> None:
        super().__init__()
        self.layer, self.put, self.take = nn.Linear(4, 4), put, take

    def forward(self, structure: Any, *, by_name: Data) -> Any:
        assert type(by_name) is Data
        return self.put(self.layer.forward(self.take(structure) + by_name.t))


class Outer(nn.Module):
    """Computes in bfloat16 around an inner module in float32."""

    def __init__(self, put: Put, take: Put) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Inner(put, take), nn.Linear(4, 4)
        self.put, self.take, self.by_hand = put, take, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first.forward(x)
        if self.by_hand:
            x = x.float()
        y = self.take(self.inner(self.put(x), by_name=Data(x)))
        return self.last.forward(y.to(HALF) if self.by_hand else y)


def by_hand(module: Outer) -> Outer:
    copy = deepcopy(module)
    copy.by_hand = True
    copy.first.to(HALF)
    copy.last.to(HALF)
    return copy


def shard(module: nn.Module, precision: tz.MixedPrecision = PRECISION) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(stage=3, mixed_precision=precision)])


@pytest.mark.parametrize(("put", "take"), [(Named, lambda structure: structure.t), *slow((nested, taken))])
def test_a_model_computes_as_a_module_that_casts_by_hand(put: Put, take: Put) -> None:
    # Equal up to the rounding of one bfloat16 operation. FSDP2 casts these tensors as well.
    torch.manual_seed(0)
    module, x = Outer(put, take), torch.randn(3, 4)
    cast_by_hand, model = by_hand(module), shard(module)
    result, expected = model(x), cast_by_hand(x.to(HALF)).float()
    assert result.dtype is FULL
    for loss in (result.square().mean(), expected.square().mean()):
        loss.backward()
    assert torch.allclose(result, expected, atol=1e-2)
    for (name, param), eager in zip(model.named_parameters(), cast_by_hand.parameters(), strict=True):
        assert param.grad.dtype is FULL
        assert torch.allclose(full(param.grad), eager.grad.float(), atol=1e-2), name


@dataclass
class Derived:
    t: Any
    doubled: Any = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.t * 2


class Items(dict[str, Any]):
    pass


@pytest.mark.parametrize("put", slow(Derived, lambda t: Items(t=t)))
def test_a_structure_that_cannot_be_rebuilt_is_refused(put: Put) -> None:
    type_name = type(put(torch.ones(()))).__name__
    with refused(
        TypeError, f"cannot cast the tensors in a {type_name}, which inner takes or returns", "use a tuple, list"
    ):
        shard(Outer(put, taken))(torch.randn(3, 4))


class Gives(nn.Module):
    def __init__(self, give: Put) -> None:
        super().__init__()
        self.layer, self.give = nn.Linear(4, 4), give

    def forward(self, inputs: Any) -> Any:
        return self.give(self.layer.forward(inputs if isinstance(inputs, Tensor) else inputs.t))


class Two(NamedTuple):
    t: Any
    u: Any


class One(NamedTuple):
    t: Any


def wrong(t: Tensor) -> Any:
    raise TypeError("the user's own words")


@pytest.mark.parametrize(
    ("put", "dtype"),
    slow((Named, FULL), (One, HALF), (lambda x: Two(x, 3), HALF), (lambda x: Two(x, x), HALF), (Data, HALF)),
)
def test_forward_takes_named_tuples_and_dataclasses(put: Put, dtype: torch.dtype) -> None:
    x, module = torch.randn(3, 4), Gives(Data)
    expected = module(x).t
    result = shard(module, tz.MixedPrecision(dtype, output_dtype=FULL))(put(x)).t
    assert result.dtype is FULL
    assert torch.equal(result, expected) is (dtype is FULL), "forward computes in this dtype"
    assert torch.allclose(result, expected, atol=5e-2)


@pytest.mark.slow
def test_a_type_error_of_the_user_keeps_its_words() -> None:
    with pytest.raises(TypeError, match=r"^the user's own words$"):
        shard(Gives(wrong), tz.MixedPrecision())(Named(torch.randn(3, 4)))


RETURNED: list[tuple[Put, str]] = [
    (lambda t: Two(t, t + 1), "a named tuple, Two"),
    (One, "a named tuple, One"),
    (Named, "a named tuple, Named"),  # with a default
    (lambda t: [Two(t, t + 1)], "a named tuple, Two"),
    (lambda t: {"a": Two(t, t + 1)}, "a named tuple, Two"),
    (lambda t: OrderedDict(t=t), "another structure than tuples, lists, dicts and dataclasses"),
]
