"""Under ``thunder.jit`` each call gets the program of its form; code that no program can repeat is refused."""

from __future__ import annotations

import math
import random
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from gc import collect
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.tiers import slow
from thunder_zero.compat.thunder.guards import form_of
from thunder_zero.frontends.zero_module import ZeroModule

import thunder

X, T = torch.arange(8.0).view(2, 4), torch.full((4,), 3.0)
pytestmark = pytest.mark.usefixtures("group")
stages = pytest.mark.parametrize("stage", [*slow(0), 3])


@dataclass
class Data:
    mask: Any = None


class Box:
    def __init__(self, mask: Any = None) -> None:
        self.mask = mask


class Slots:
    __slots__ = ("mask",)

    def __init__(self, mask: Any) -> None:
        self.mask = mask


class Hashed:
    def __init__(self, number: Any) -> None:
        self.number = number

    def __hash__(self) -> int:
        return id(self)


def factorial() -> Callable[[int], int]:
    def call(number: int) -> int:
        return number * call(number - 1) if number else 1

    return call


class Color(Enum):
    RED = 1
    BLUE = 2


Pair = namedtuple("Pair", "mask number")


def amount(value: Any) -> Any:
    """Return a number that differs from form to form: branch on types, truth, lengths and None."""
    if value is None:
        return 1
    if isinstance(value, Tensor | bool | int | float):
        return value if not isinstance(value, bool) else (20 if value else 30)
    if isinstance(value, dict | UserDict):
        return 2 if not value else 3 + 5 * sum(amount(value[key]) * len(key) for key in value)
    if isinstance(value, list | tuple):
        return len(value) + (6 if isinstance(value, list) else 7) + sum([amount(item) for item in value])
    if isinstance(value, Data | Box | Slots):
        return 8 + amount(value.mask)
    if isinstance(value, Color | torch.dtype):
        return 41 if value is Color.RED or value is torch.float32 else 43
    if isinstance(value, set):
        return 51 if "a" in value else 53
    return len(value) * 10  # a string


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mask: Any = None
        self.items: list[Any] = []
        self.options: dict[str, Any] = {}
        self.box, self.bound, self.slots = Box(), 2.0, Slots(None)
        self.large: list[Any] = [None] * 200
        self.act: Callable[..., Any] = torch.relu
        self.call = forward

    def scaled(self, x: Tensor) -> Tensor:
        return 3 * x

    def forward(self, x: Tensor, value: Any = None) -> Tensor:
        y: Tensor = self.layer(x)
        return y * amount(value) if self.call is None else self.call(self, y, value)


FORMS: tuple[Any, ...] = (
    *(None, T, {}, {"m": T}, {"nn": T}, {"m": T, "nn": 2 * T}, {"nn": 2 * T, "m": T}, {"m": None}, OrderedDict(m=T)),
    *([], [T], [None], [T, T], (), (T,), (None,), Pair(T, 1), Pair(None, 1), UserDict(), UserDict(m=T)),
    *(1, 2, 1.5, True, False, "a", "bb", Data(), Data(T), Data([T]), Box(), Box(T), Slots(None), Slots(T)),
    *(Color.RED, Color.BLUE, torch.float32, torch.float64, {"a"}, {"b"}),
)


def every_pair(count: int) -> Iterator[int]:
    """Yield numbers below ``count`` in an order in which each number follows every other number."""
    for step in range(1, count):
        seen: set[int] = set()
        for start in range(count):
            index = start
            while index not in seen:
                seen.add(index)
                yield index
                index = (index + step) % count


def shard(module: nn.Module, stage: int = 3) -> ZeroModule:
    model: ZeroModule = thunder.jit(module, transforms=[tz.ZeroTransform(stage=stage)])
    return model


@pytest.mark.parametrize(("stage", "by_keyword"), [(3, False), *slow((0, True))])
def test_each_form_of_a_call_gets_its_own_program(stage: int, by_keyword: bool) -> None:
    plain = Net()
    model = shard(Net(), stage)
    model.load_original_state_dict(plain.state_dict())

    def call(module: nn.Module, value: Any) -> Tensor:
        result: Tensor = module(X, value=value) if by_keyword else module(X, value)
        return result

    expected = [call(plain, value).detach() for value in FORMS]
    for index in every_pair(len(FORMS)):
        assert torch.allclose(call(model, FORMS[index]), expected[index]), FORMS[index]
    assert len(model.graphs()[0]) == len(FORMS), "no form was compiled twice"


def added(number: Any) -> Callable[[Any], Any]:
    return lambda x: x + number


def test_forms_are_equal_where_a_program_may_serve_again() -> None:
    shared = [T]
    for value, same, different in (
        (Box(T), Box(2 * T), Box()),
        (Data(1), Data(2), Data("a")),
        (float("nan"), 1.0, 1),
        (1, 2, True),
        (added(1), added(1), added(1.0)),
        (added(Box()), added(Box()), lambda x: x),
        (Hashed(1).__hash__, Hashed(2).__hash__, Hashed("a").__hash__),
        ([1, [2]], [2, [3]], [1, [2.0]]),
        (slice(1), slice(2), slice(None)),
        (np.float32(1), np.float32(1), np.float32(2)),
        ({"a": "x"}, {"a": "y"}, {"b": "x"}),
        ({"x"}, {"x"}, {"y"}),
        (deque([1]), deque([1]), deque([2])),
        (Hashed(1), Hashed(2), Hashed("a")),
        (np.ones(2), np.zeros(3), None),
        (T, 2 * T, Tensor),
        (factorial(), factorial(), None),
    ):
        assert form_of(value) == form_of(same) != form_of(different)
    assert form_of([shared, shared]) != form_of([[T], [T]]), "two parts may be the same object"
    first, second = object(), object()
    assert form_of(first) == form_of(first) != form_of(second)
    assert form_of(first.__repr__) != form_of(second.__repr__)
    cycle: list[Any] = []
    cycle.append(cycle)
    assert form_of(cycle) == form_of(cycle)
    nodes = [Box() for _ in range(40)]
    for node in nodes:
        node.mask = nodes
    form_of(nodes)  # ends: it visits each part at most once, not each path


def test_a_guard_keeps_no_argument_alive() -> None:
    model, refs = shard(Net(lambda self, y, value: y)), []
    for make in (nn.Identity, lambda: added(torch.ones(2)), lambda: Hashed(torch.ones(2)), type("Empty", (), {})):
        argument = make()
        refs.append(ref(argument))
        model(X, argument)
    del argument
    collect()
    assert [reference() for reference in refs] == [None] * 4


NUMBERS: Sequence[
    tuple[Callable[[Any], Any], Callable[[Any], Any]]
] = (  # an argument made from a number, and how forward reads it
    (lambda n: {"n": n}, lambda value: value["n"]),
    (lambda n: [n], lambda value: value[0]),
    (lambda n: Data([{"n": n}]), lambda value: value.mask[0]["n"]),
    (Box, lambda value: value.mask),
    (lambda n: Hashed(n), lambda value: value.number),
    (lambda n: [n], max),
    (lambda n: [n], sum),
    (lambda n: [[n]], lambda value: len(str(value))),
    (lambda n: [n], lambda value: 2 if value == [1] else 3),
    (lambda n: Data(n), lambda value: 2 if value == Data(1) else 3),
    (lambda n: {"n": n}, lambda value: {**value}["n"]),
    (Box, lambda value: vars(value)["mask"]),
    (lambda n: deque([n]), lambda value: value[0]),
    (lambda n: {n}, lambda value: 2 if 1 in value else 3),
    (lambda n: "a" * n, len),
)


def test_only_numbers_and_strings_that_forward_reads_choose_the_program() -> None:
    for make, read in NUMBERS:
        model = shard(Net(lambda self, y, value, read=read: y * read(value)))
        with torch.no_grad():
            first, second, repeated = (model(X, make(number)) for number in (1, 200, 1))
        assert torch.equal(first, repeated)
        assert not torch.equal(first, second)
    model = shard(Net(lambda self, y, value: y * len(value)))
    for number in range(6):
        model(X, {"text": [f"a{number}", "b"], "step": Box(number), "array": np.ones(number)})
    assert len(model.graphs()[0]) == 1


def test_a_warning_names_an_argument_whose_form_keeps_changing() -> None:
    model = shard(Net(lambda self, y, value: y if self.items is None else 2 * y))
    for count in range(3):
        model(X, value=[0] * count)
    with pytest.warns(UserWarning, match=r"compiled for 4 forms of argument 'value', and each costs a compilation"):
        model(X, value=[0] * 3)
    model = shard(Net(lambda self, y, value: y if self.items is None else 2 * y))
    for _ in range(3):
        model.plain.items.append(0)
        model(X)
    model.plain.items.append(0)
    with pytest.warns(UserWarning, match=r"compiled for 4 forms of 'items', which forward reads"):
        model(X)


def test_values_that_change_unnoticed_are_refused_when_read() -> None:
    model = shard(Net(lambda self, y, value: y * float(next(iter(value)))))
    for value in (np.ones(2), iter([1.0]), (item for item in "12")):
        with refused(NotImplementedError, f"reads a value of type {type(value).__name__}", "thunder_zero.compile"):
            model(X, value)
    model = shard(Net(lambda self, y, value: y * next(self.numbers)))
    model.plain.numbers = iter([1.0, 2.0])  # type: ignore[assignment]
    with refused(NotImplementedError, "reads a value of type list_iterator", "thunder_zero.compile"):
        model(X)


LIMIT: Any = None
CONFIG: dict[str, Any] = {"mask": None}


def set_global(value: Any) -> None:
    global LIMIT
    LIMIT = value


class Settings:
    mask: Any = None


def twice(x: Tensor) -> Tensor:
    return 2 * x


def by_default(numbers: list[int] = []) -> int:  # noqa: B006 (the test changes the default)
    return 3 + len(numbers)


def cell() -> tuple[Callable[[], Any], Callable[[Any], None]]:
    value: Any = None

    def change(new: Any) -> None:
        nonlocal value
        value = new

    return lambda: value, change


read_cell, set_cell = cell()
CHANGES: Sequence[tuple[str, Callable[..., Any], Callable[[Net], Any]]] = (
    ("None", lambda self, y, _: y * amount(self.mask), lambda module: setattr(module, "mask", T)),
    ("list", lambda self, y, _: y * amount(self.items), lambda module: module.items.append(T)),
    ("dict", lambda self, y, _: y * amount(self.options), lambda module: module.options.update(m=T)),
    ("object", lambda self, y, _: y * amount(self.box), lambda module: setattr(module.box, "mask", T)),
    ("replaced", lambda self, y, _: y * amount(self.box), lambda module: setattr(module, "box", Box(T))),
    ("absent", lambda self, y, _: y * (2 if hasattr(self, "other") else 3), lambda module: setattr(module, "other", 1)),
    ("default", lambda self, y, _: y * getattr(self, "other", 3), lambda module: setattr(module, "other", 1)),
    ("number", lambda self, y, _: y * self.bound, lambda module: setattr(module, "bound", 3.0)),
    ("submodule", lambda self, y, _: y * (2 if self.layer.training else 3), lambda module: module.layer.eval()),
    ("global", lambda self, y, _: y * amount(LIMIT), lambda module: set_global(T)),
    ("function", lambda self, y, _: self.act(y), lambda module: setattr(module, "act", torch.sin)),
    ("method", lambda self, y, _: self.scaled(y), lambda module: setattr(module, "scaled", torch.cos)),
    ("forward", lambda self, y, _: y, lambda module: setattr(module.layer, "forward", lambda x: 5 * x)),
    ("slot", lambda self, y, _: y * amount(self.slots.mask), lambda module: setattr(module.slots, "mask", T)),
    ("large", lambda self, y, _: y * amount(self.large[150]), lambda module: module.large.__setitem__(150, T)),
    ("class global", lambda self, y, _: y * amount(Settings.mask), lambda module: setattr(Settings, "mask", T)),
    ("function global", lambda self, y, _: twice(y), lambda module: globals().update(twice=torch.sin)),
    ("closure global", lambda self, y, _: y * amount(read_cell()), lambda module: set_cell(T)),
    ("default global", lambda self, y, _: y * by_default(), lambda module: by_default.__defaults__[0].append(2)),
    ("global dict", lambda self, y, _: y * amount(CONFIG["mask"]), lambda module: CONFIG.update(mask=T)),
)


@pytest.mark.parametrize("name", [name for name, *_ in CHANGES])
def test_attributes_and_globals_that_change_are_read_again(name: str) -> None:
    ((forward, change),) = ((forward, change) for case, forward, change in CHANGES if case == name)
    set_global(None)
    CONFIG["mask"] = Settings.mask = None
    set_cell(None)
    inner, plain = Net(forward), Net(forward)
    model = shard(inner)
    model.load_original_state_dict(plain.state_dict())
    for _ in range(2):
        torch.testing.assert_close(model(X).detach(), plain(X).detach())
    assert len(model.graphs()[0]) == 1
    change(inner)
    if "global" not in name:
        change(plain)
    for _ in range(2):
        torch.testing.assert_close(model(X).detach(), plain(X).detach())
    assert len(model.graphs()[0]) == 2


def count_up(y: Tensor) -> int:
    steps = 0
    while y.sum().item() > steps:
        steps += 1
    return steps


def hide_the_refusal(y: Tensor) -> int:
    try:
        return 2 if y.sum().item() > 0 else 3
    except Exception:
        return 3


GENERATOR = random.Random(0)
DECIDE_BY_A_NUMBER: Sequence[Callable[..., Any]] = (
    lambda self, y, _: y * (2 if y.sum().item() > 0 else 3),
    lambda self, y, _: y * (2 if 0 < y.sum().item() < 9 else 3),
    lambda self, y, _: y * (2 if not y.sum().item() else 3),
    lambda self, y, _: y * (y.sum().item() and 2),
    lambda self, y, _: y * min(y.max().item(), 1.5),
    lambda self, y, _: y * max(1.5, y.max().item()),
    lambda self, y, _: y * sorted([y.max().item(), 0.5])[0],
    lambda self, y, _: y * count_up(y),
    lambda self, y, _: y * len(f"{y.sum().item()}"),
    lambda self, y, _: y * int(y.sum().item()),
    lambda self, y, _: y * math.exp(y.max().item()),
    lambda self, y, _: y * (2 if torch.rand(()).item() < 0.5 else 3),
    lambda self, y, _: y * max(row.sum().item() for row in y),
    lambda self, y, _: y * max([1.0, 2.0], key=lambda each: each * y.sum().item()),
    lambda self, y, _: y * {True: 2, False: 3}[y.sum().item() > 0],
    lambda self, y, _: y * {0: 1.0}.get(y.argmax().item(), 2.0),
    lambda self, y, _: y * (2 if y.argmax().item() in {0, 1} else 3),
    lambda self, y, _: y * (2 if (y.sum().item() > 0) is True else 3),
    lambda self, y, _: y * hide_the_refusal(y),
    lambda self, y, _: y * [1, 2][y.argmax().item()],
    lambda self, y, _: y[:, : y.argmax().item()],
    lambda self, y, _: y * float(f"{y.sum().item():.2f}"),
    lambda self, y, _: y * float("%.2f" % y.sum().item()),  # noqa: UP031 (another way to read a number)
    lambda self, y, _: y * round(y.sum().item()),
    lambda self, y, _: y * torch.ones(y.argmax().item()).sum(),
    lambda self, y, _: y * torch.tensor(y.sum().item()),
)
DRAW: Sequence[Callable[..., Any]] = (
    lambda self, y, _: y * random.random(),
    lambda self, y, _: y * random.choice([1.0, 2.0]),
    lambda self, y, _: y if random.uniform(0, 1) < 0.5 else 2 * y,
    lambda self, y, _: y * GENERATOR.random(),
    lambda self, y, _: y * np.random.rand(),
    lambda self, y, _: y * float(np.random.uniform()),
    lambda self, y, _: y * np.random.default_rng(0).random(),
    lambda self, y, _: y * next(map(lambda _: random.random(), [0])),
    lambda self, y, _: y * sorted([1.0, 2.0], key=lambda _: np.random.rand())[0],
)


@stages
def test_a_branch_that_a_program_would_keep_for_ever_is_refused(stage: int) -> None:
    for calls, words in ((DECIDE_BY_A_NUMBER, "decides by a number"), (DRAW, "draws random numbers")):
        for forward in calls:
            with refused(NotImplementedError, f"Thunder cannot trace Net: forward {words}", "thunder_zero.compile"):
                shard(Net(forward), stage)(X)


def test_a_tensors_number_that_decides_nothing_becomes_a_line() -> None:
    plain = Net(
        lambda self, y, _: (
            (y * y.sum().item() + abs(y.max().item() + 1) * 2)
            * (sum([y.max().item(), y.min().item()]) + y.argmax().item() * 1.5 + (y.sum().item() > 0))
            * (2 if isinstance(y.sum().item(), float) and y.sum().item() is not None else 3)
        )
    )
    model = shard(Net(plain.call))
    model.load_original_state_dict(plain.state_dict())
    for x in (X, -X, X):
        torch.testing.assert_close(model(x).detach(), plain(x).detach())


def remember(self: Net, y: Tensor, _: Any) -> Tensor:
    size = str(len(y))
    if size not in self.options:
        self.options[size] = 2.0
    return y * self.options[size]


def count_calls(self: Net, y: Tensor, _: Any) -> Tensor:
    self.options["calls"] = self.options.get("calls", 0) + 1
    return y


CHANGE_WHAT_THEY_READ: Sequence[tuple[str, Callable[..., Any]]] = (
    ("items", lambda self, y, _: (self.items.append(y.mean()), y)[1]),
    ("items", lambda self, y, _: (self.items.append(1), y)[1]),
    ("options", lambda self, y, _: (self.options.update(y=y), y)[1]),
    ("options", count_calls),
    ("options", lambda self, y, _: y * self.options.setdefault("mask", torch.ones(4))),
    ("CALLS", lambda self, y, _: (CALLS.append(1), y)[1]),
)
CALLS: list[int] = []


def test_a_forward_that_changes_its_own_inputs_in_each_call_is_refused() -> None:
    for name, forward in CHANGE_WHAT_THEY_READ:
        with refused(NotImplementedError, f"forward changes {name!r}, which it reads", "thunder_zero.compile"):
            shard(Net(forward))(X)
    model = shard(Net(remember))
    with torch.no_grad():
        assert torch.equal(model(X), model(X))
        assert len(model.graphs()[0]) == 1
        assert torch.allclose(model(X[:1]), model(X)[:1])


def test_a_failed_trace_leaves_nothing_behind() -> None:
    def forward(self: Net, y: Tensor, _: Any) -> Tensor:
        if self.mask is None:
            raise ValueError("there is no mask; set one")
        return y * self.mask

    model = shard(Net(forward))
    with refused(ValueError, "there is no mask", "set one"):
        model(X)
    model.plain.mask = T
    model(X)
    model(X)
    assert len(model.graphs()[0]) == 1


def test_tz_compile_decides_and_draws_anew_in_each_call() -> None:
    plain = Net(lambda self, y, _: y * (2 if y.sum().item() > 0 else 3) * min(y.max().item(), 1.5))
    model = tz.compile(Net(plain.call), stage=3)
    model.load_original_state_dict(plain.state_dict())
    for x in (X, -X, X):
        torch.testing.assert_close(model(x).detach(), plain(x).detach())
    drawn = tz.compile(Net(lambda self, y, _: y * random.random()), stage=3)
    assert len({drawn(X).sum().item() for _ in range(4)}) == 4
