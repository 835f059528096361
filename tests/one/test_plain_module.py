"""Changes of the plain module after sharding take effect, or are refused at once or before the next forward."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

import thunder_zero as tz
from tests.harness.as_one_process import assert_near
from tests.harness.errors import refused
from tests.harness.tiers import slow
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.placeholders import set_tensor

import thunder

X = torch.arange(12.0).view(3, 4).sin()
pytestmark = pytest.mark.usefixtures("group")


class Net(nn.Module):
    """A module with a method beside forward, scalar and ignored parameters, and buffers at two levels."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale, self.ignored = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.zeros(4))
        self.bound = 2.0

    def features(self, x: Tensor) -> Tensor:
        return self.first.forward(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.features(x))
        self.offset = self.offset + 1
        return y * self.ignored * self.bound + self.offset


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def shard(module: nn.Module, stage: int = 3) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(stage=stage, ignored=("ignored",))])


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.25)


Attempt = Callable[[Any, Any], Any]  # called with the plain module and the sharded one

# Attempts to compute with DTensors and plain tensors, without a gather
MIXES: dict[str, Attempt] = {
    "a method of the sharded model": lambda plain, model: model.features(X),
    "a method of the plain module": lambda plain, model: plain.features(X),
    "a submodule": lambda plain, model: model.get_submodule("first")(X),
    "the plain module": lambda plain, model: plain(X),
    "an operator": lambda plain, model: X @ plain.first.weight,
    "a list": lambda plain, model: torch.cat([X, plain.first.weight]),
    ".data.copy_": lambda plain, model: plain.first.weight.data.copy_(torch.ones(4, 4)),
    "load_state_dict of the plain module": lambda plain, model: plain.load_state_dict(Net().state_dict()),
    "torch.jit.trace": lambda plain, model: torch.jit.trace(plain.first, X),
}

# Writes that the next forward reads
WRITES: dict[str, Attempt] = {
    "apply": lambda plain, model: model.apply(initialise),
    "apply to the plain module": lambda plain, model: plain.apply(initialise),
    "fill_": lambda plain, model: plain.first.weight.detach().fill_(0.25),
    ".data.fill_": lambda plain, model: plain.first.weight.data.fill_(0.25),
    "foreach": lambda plain, model: torch._foreach_mul_([plain.first.weight.data], 0.25 / 7),
    "load_state_dict": lambda plain, model: model.load_state_dict(
        {**model.state_dict(), "first.weight": full_like(plain, 0.25)}
    ),
    "load_state_dict of full tensors": lambda plain, model: model.load_state_dict(
        {**Net().state_dict(), "first.weight": torch.full((4, 4), 0.25)}
    ),
    "the local tensor": lambda plain, model: plain.first.weight.to_local().detach().fill_(0.25),
}

AFTERWARDS: list[tuple[Attempt, str]] = [
    (
        lambda plain, model: setattr(plain.first, "weight", nn.Parameter(torch.ones(4, 4))),
        "parameter 'first.weight' was replaced",
    ),
    (lambda plain, model: setattr(plain, "ignored", nn.Parameter(torch.zeros(4))), "parameter 'ignored' was replaced"),
    (
        lambda plain, model: setattr(plain.first, "extra", nn.Parameter(torch.ones(4))),
        "parameter 'first.extra' was added after",
    ),
    (
        lambda plain, model: plain.first.register_parameter("extra", nn.Parameter(torch.ones(4))),
        "parameter 'first.extra' was added after",
    ),
    (lambda plain, model: plain.first.add_module("extra", nn.Linear(2, 2)), "parameter 'first.extra.weight' was added"),
    (lambda plain, model: setattr(model, "first", nn.Linear(4, 4)), "parameter 'first.weight' was replaced"),
    (lambda plain, model: setattr(model, "first", None), "parameter 'first.weight' was replaced"),
    (lambda plain, model: setattr(model, "extra", nn.Linear(2, 2)), "parameter 'extra.weight' was added after"),
    (lambda plain, model: setattr(model, "extra", nn.Parameter(torch.ones(4))), "parameter 'extra' was added after"),
    (
        lambda plain, model: model.register_parameter("extra", nn.Parameter(torch.ones(4))),
        "parameter 'extra' was added after",
    ),
    (lambda plain, model: delattr(plain, "scale"), "parameter 'scale' was replaced"),
    (lambda plain, model: plain.load_state_dict(Net().state_dict(), assign=True), "was replaced"),
    (lambda plain, model: setattr(plain.scale, "data", plain.scale.data * 2), "memory of parameter 'scale'"),
    (lambda plain, model: setattr(plain.first.weight, "data", full_like(plain, 1)), "memory of parameter 'first.weig"),
    (lambda plain, model: parametrizations.weight_norm(plain.first), "parameter 'first.weight' was replaced"),
]


# Values of attributes that forward reads, set on the sharded model one after another
ATTRIBUTES: list[tuple[str, Any]] = [
    ("bound", 3.0),
    ("bound", torch.full((4,), 0.5)),
    ("offset", torch.ones(4)),  # a buffer
    ("shift", 2),  # a class attribute
    ("mode", "doubled"),
    ("config", {"factor": 2.0}),
    ("bias", torch.ones(4)),
    ("bias", None),
]


class Attributes(Net):
    """A module whose forward reads attributes of many types."""

    shift = 0

    def __init__(self) -> None:
        super().__init__()
        self.mode, self.config = "", {"factor": 1.0}
        self.bias: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.config["factor"] + self.shift
        y = 2 * y if self.mode == "doubled" else y
        return y if self.bias is None else y + self.bias


def test_an_attribute_of_the_model_is_one_of_the_plain_module() -> None:
    plain = Attributes()
    eager = deepcopy(plain)
    model, names = shard(plain), set(vars(plain))
    for name, value in ATTRIBUTES:
        setattr(model, name, value)
        setattr(eager, name, value)
        assert getattr(model, name) is getattr(plain, name) is value
        assert_near(model(X).detach(), eager(X).detach(), f"{name} = {value}")
    model.new, model.training = 1, False
    assert set(vars(plain)) - names == {"new", "shift"}
    assert not plain.training
    for name in ("new", "shift"):
        delattr(model, name)
    assert set(vars(plain)) == names
    assert (model.shift, hasattr(model, "new")) == (0, False)
    model.extra = nn.Tanh()
    del model.extra
    assert not hasattr(model, "extra")


def full_like(plain: Any, value: float) -> Tensor:
    return torch.full_like(plain.first.weight.detach(), value)


def assert_unchanged(model: Any) -> None:
    """Run the checks before a forward, which raise if the module was changed."""
    for hook in model._forward_pre_hooks.values():
        hook(model, (), {})


@pytest.mark.parametrize("stage", [3, *slow(1, 2)])
def test_computing_with_rows_is_refused(stage: int) -> None:
    """Nothing has changed, and the next forward works."""
    for attempt in MIXES.values():
        plain = Net()
        model = shard(plain, stage)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            attempt(plain, model)
        assert_unchanged(model)


@pytest.mark.parametrize("stage", [3, *slow(0, 1, 2)])
def test_forward_reads_what_was_written(stage: int) -> None:
    plain = Net()
    with torch.no_grad():
        plain.first.weight.fill_(7)
    model = shard(plain, stage)
    before = deepcopy(model.state_dict())
    for name, write in WRITES.items():
        if stage == 0 and name == "the local tensor":
            continue
        model.load_state_dict(before)
        with torch.no_grad():
            model(X)
        model(X).sum().backward()  # ZeRO-1 refuses a write through .data without one
        with torch.no_grad():
            write(plain, model)
            assert (local(plain.first.weight) == 0.25).all(), name
            model(X)
        full = tz.full_state_dict(model)["first.weight"]
        assert torch.equal(full, torch.full((4, 4), 0.25)), name


# Additions that do not train
ADDED: dict[str, Attempt] = {
    "no parameter": lambda plain, model: setattr(model, "loss", nn.MSELoss()),
    "a frozen module": lambda plain, model: setattr(model, "teacher", nn.Linear(4, 4).requires_grad_(False)),
    "another name": lambda plain, model: setattr(model, "alias", plain.first),
}


@pytest.mark.parametrize("stage", range(4))
def test_full_tensors_are_loaded(stage: int) -> None:
    """All values are loaded or none, ignored parameters and buffers as well, and copied even with ``assign=True``."""
    model, full = shard(Net(), stage), {name: value + 1 for name, value in Net().state_dict().items()}
    assert model.load_state_dict(full) == ([], [])
    assert differing(tz.full_state_dict(model), full) == []
    with refused(ValueError, "'first.bias' has shape (3,) in the state dict and (4,) in the model"):
        model.load_state_dict({**Net().state_dict(), "first.bias": torch.ones(3)})
    with pytest.raises(RuntimeError, match=r'Missing key.*"scale"'):
        model.load_state_dict({name: value for name, value in full.items() if name != "scale"})
    assert differing(tz.full_state_dict(model), full) == []
    params, changed = dict(model.named_parameters()), {name: value + 1 for name, value in full.items()}
    model.load_state_dict(changed, assign=True)
    assert differing(tz.full_state_dict(model), changed) == []
    assert all(param is params[name] for name, param in model.named_parameters())


def differing(state_dict: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, value in expected.items() if not torch.equal(state_dict[name], value)]


def test_other_changes_are_refused_before_the_next_forward() -> None:
    for change, words in AFTERWARDS:
        plain = Net()
        model = shard(plain)
        change(plain, model)
        with refused(RuntimeError, words):
            model(X)
    model = shard(plain := Net())
    prune.identity(plain.first, "weight")
    with refused(RuntimeError, "parameter 'first.weight' was replaced"):
        model(X)
    for name, add in ADDED.items():
        plain = Net()
        model = shard(plain)
        add(plain, model)
        assert_unchanged(model)
        eager = Net()
        add(eager, eager)
        assert model.state_dict().keys() == tz.full_state_dict(model).keys() == eager.state_dict().keys(), name
        if name == "a frozen module":
            model.teacher.requires_grad_(True)
            with refused(RuntimeError, "parameter 'teacher.weight' was added after"):
                model(X)


def test_casts_and_parametrizations_of_shards_are_refused() -> None:
    model = shard(Net())
    with refused(RuntimeError, "cannot be moved or cast", "call .to() on the module before sharding"):
        model.half()
    assert_unchanged(model)
    for attempt in (
        lambda first: first.bfloat16(),
        lambda first: parametrize.register_parametrization(first, "weight", Twice()),
    ):
        with pytest.raises(RuntimeError, match="swap"):  # torch refuses to swap a tensor with other references
            attempt(shard(Net()).plain.first)


def test_reads_copies_and_no_ops_on_the_plain_module_work() -> None:
    """Both modules have the buffer that forward assigns."""
    plain = Net()
    eager = deepcopy(plain)
    model = shard(plain)
    weight: Any = plain.first.weight
    assert isinstance(weight, DTensor)
    assert isinstance(plain.first.weight, nn.Parameter)
    assert weight is model.get_parameter("first.weight")
    assert (weight.shape, weight.dtype, weight.numel(), weight.is_leaf) == ((4, 4), torch.float32, 16, True)
    assert [name for name, _ in model.named_children()] == ["first", "norm"]
    copies: list[Any] = [deepcopy(plain), deepcopy(model), AveragedModel(model).module]
    assert {type(copy) for copy in copies} == {Net}
    for copy in copies:
        assert torch.equal(copy.first.weight.full_tensor(), weight.full_tensor())
        assert copy.first.weight.to_local().data_ptr() != weight.to_local().data_ptr()
        with refused(ValueError, "is a DTensor", "already shards it"):
            shard(copy)
    model.to("cpu").float().train()
    plain.requires_grad_(True).train()
    for _ in range(2):
        output, expected = model(X), eager(X)
        torch.testing.assert_close(output, expected)
        output.sum().backward()
        assert torch.equal(plain.offset, eager.offset)
        assert plain.offset is model.get_buffer("offset")
        assert list(model.state_dict()) == list(eager.state_dict())


class Offset(nn.Module):
    """A module with a buffer that it shares with its parent, and one that may be None."""

    tied: Tensor
    lent: Tensor | None

    def __init__(self, tied: Tensor) -> None:
        super().__init__()
        self.register_buffer("tied", tied)
        self.register_buffer("lent", None)

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * x + self.tied
        return y if self.lent is None else y * self.lent


class Offsets(nn.Module):
    tied: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tied", torch.zeros(4))
        self.first, self.part = nn.Linear(4, 4), Offset(self.tied)
        self.ignored = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(self.first(x) * self.ignored + self.tied)
        self.tied = self.tied + 1  # the part keeps its buffer
        return y


def test_buffers_may_be_replaced() -> None:
    """Forward or others replace them, under any name, with other shapes or dtypes. Thunder never rereads a None."""
    plain = Offsets()
    eager, model = deepcopy(plain), shard(plain)
    replaced = (None, torch.ones(4), torch.ones(1), torch.ones(4, dtype=torch.float64))
    for name, value in product(("tied", "part.tied"), replaced):
        for module in (plain, eager) if value is not None else ():
            set_tensor(module, name, value.clone())
        torch.testing.assert_close(model(X), eager(X))
        assert all(map(torch.equal, plain.buffers(), eager.buffers()))
    plain.part.lent = eager.part.lent = torch.full((4,), 3.0)
    torch.testing.assert_close(model(X), eager(X))


def test_a_forward_inside_its_own_forward_is_refused() -> None:
    """The module has placeholders until the outer forward ends, and shards afterwards."""
    model = shard(plain := Net())
    inside = model.state.holding()
    with refused(RuntimeError, "Net was called inside of its own forward"), inside:
        model(X)
    assert isinstance(plain.first.weight, DTensor)
    assert model(X).shape == (3, 4)


class EvaluatesNorm(Net):
    """A module that keeps its norm in evaluation mode, as many do in fine-tuning."""

    def train(self, mode: bool = True) -> EvaluatesNorm:
        super().train(mode)
        self.norm.eval()
        return self


def walk_by_apply(module: nn.Module) -> list[nn.Module]:
    modules: list[nn.Module] = []
    module.apply(modules.append)
    return modules


WALKS: dict[str, Callable[[Any], Any]] = {
    "modules": lambda module: list(module.modules()),
    "named_modules": lambda module: list(module.named_modules()),
    "named_modules of a prefix": lambda module: list(module.named_modules(prefix="net", remove_duplicate=False)),
    "children": lambda module: list(module.children()),
    "named_children": lambda module: list(module.named_children()),
    "parameters": lambda module: list(map(id, module.parameters())),
    "named_parameters": lambda module: [(name, id(param)) for name, param in module.named_parameters("net")],
    "own parameters": lambda module: [name for name, _ in module.named_parameters(recurse=False)],
    "buffers": lambda module: list(map(id, module.buffers())),
    "named_buffers": lambda module: [(name, id(buffer)) for name, buffer in module.named_buffers("net")],
    "get_submodule": lambda module: module.get_submodule("first"),
    "get_parameter": lambda module: id(module.get_parameter("first.weight")),
    "get_buffer": lambda module: id(module.get_buffer("norm.running_mean")),
    "apply": walk_by_apply,
    "train": lambda module: [(part, part.training) for part in module.train().modules()],
    "eval": lambda module: [(part, part.training) for part in module.eval().modules()],
    "training": lambda module: module.train(False).training,
    "weight decay": lambda module: [
        f"{path}.{name}"
        for path, part in module.named_modules()
        for name, _ in part.named_parameters(recurse=False)
        if isinstance(part, nn.BatchNorm1d)
    ],
}


@pytest.mark.parametrize("stage", [3, *slow(0)])
def test_walks_of_the_model_give_the_plain_modules(stage: int) -> None:
    plain = EvaluatesNorm()
    model = shard(plain, stage)
    assert list(WALKS["weight decay"](model)) == ["norm.weight", "norm.bias"]
    for name, walk in WALKS.items():
        assert walk(model) == walk(plain), name
    model.train()
    assert (plain.training, plain.norm.training) == (True, False)


def test_a_call_under_autocast_does_not_change_later_calls() -> None:
    model = thunder.jit(nn.Linear(4, 4), transforms=[tz.ZeroTransform(stage=3)])
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X).dtype == torch.bfloat16
    assert model(X).dtype == torch.float32


class Wrapper(torch.optim.Optimizer):
    """An optimizer that wraps another without ``Optimizer.__init__``, as in pytorch_optimizer."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside, self.defaults = inside, inside.defaults
        self.param_groups, self.state = inside.param_groups, inside.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.step()


def test_a_wrapper_of_an_optimizer_steps() -> None:
    model = shard(Net())
    before = local(model.plain.first.weight).clone()
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), 0.1))
    model(X).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, local(model.plain.first.weight))


def test_a_buffer_registered_later_belongs_to_the_plain_module() -> None:
    model = shard(Net())
    model.register_buffer("later", torch.ones(2))
    assert "later" in model.state_dict()
    assert "later" in dict(model.plain.named_buffers())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(x))
        return y


def test_tied_weights_may_differ_by_rounding_and_nans() -> None:
    values = torch.linspace(-1, 1, 16).view(4, 4)
    pairs = [(values, values.bfloat16()), (values.double(), values), (0 * values, -0.0 * values)]
    for first, second in (*pairs, (values / 0 * 0, values / 0 * 0)):
        weights = {"embed.weight": first, "head.weight": second}
        thunder.jit(Tied(), transforms=[tz.ZeroTransform(stage=3, weights=weights)])
    weights = {"embed.weight": values, "head.weight": values.bfloat16() * 2}
    with refused(ValueError, "unlike values for 'embed.weight' and 'head.weight'"):
        thunder.jit(Tied(), transforms=[tz.ZeroTransform(stage=3, weights=weights)])
