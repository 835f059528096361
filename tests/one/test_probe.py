"""The probe finds what an optimizer couples, however rarely it does, and lets those pass that step each row alone."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from thunder_zero.runtime import probe as probe_room
from thunder_zero.runtime.couplings import ELEMENTWISE, look_of, refuse_coupled_parameters
from thunder_zero.runtime.probe import Coupling, Subject, Verdict, capped, probe

pytestmark = pytest.mark.slow
SHAPES = ((9, 4), (5,))
CPU = torch.device("cpu")
NOTHING, ELEMENTS, PARAMETERS, RANDOM, UNKNOWN = Coupling


class Planted(optim.SGD):
    """SGD whose step is scaled by a factor that a test plants."""

    def __init__(self, params: Any, lr: float = 0.1, factor: Callable[..., Any] | None = None, every: int = 1) -> None:
        super().__init__(params, lr)
        self.factor, self.every = factor, every

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        everything = [param.grad for group in self.param_groups for param in group["params"]]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["steps"] = state.get("steps", 0) + 1
                factor = 1.0
                if self.factor is not None and state["steps"] % self.every == 0:
                    factor = self.factor(param, param.grad, state, everything)
                param.sub_(factor * param.grad, alpha=float(group["lr"]))


def of_row(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    """A norm of each row is the same on rows."""
    return 1.0 if grad.ndim < 2 else 1 / grad.norm(dim=1, keepdim=True).clamp_min(1e-9)


def if_large(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    """Clips as nobody does but at the largest gradients: one pattern in one scale."""
    return 1 / max(1.0, float(grad.norm()) / 1e5)


def if_tiny(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    return 2.0 if 0 < grad.abs().max() < 1e-5 else 1.0


def if_wide(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    return 1 / float(grad.norm() + 1) if min(grad.shape) >= 128 else 1.0


def hidden(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    """Measures what it would use later."""
    state["norms"] = [*state.get("norms", []), grad.norm()][-2:]
    return 1.0


def column(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    state["column"] = grad.abs().amax(0) + state.get("column", 0)
    return 1.0


def rows_apart(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    """States by rows, of another shape, and in a vector."""
    state["of rows"], state["flat"] = grad.reshape(len(grad), -1).amax(1), grad.reshape(-1).clone()
    return 1.0


def all_norms(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    return 1 / (1 + sum(float(one.norm()) for one in everything))


def noise(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    return torch.rand(()).item() + random.random()


def noise_and_all_norms(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    return all_norms(param, grad, state, everything) + 1e-3 * torch.rand(()).item()


def summed(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    dist.all_reduce(grad)
    return 1.0


def broken(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    return float("nan")


def still(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    return 0.0


def objects(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    state["iterator"] = iter(())
    return 1.0


def verdict(
    make: Callable[..., optim.Optimizer], shapes: Any = SHAPES, sharded: bool = True, **options: Any
) -> Verdict:
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = make(params, **options)
    before, before_state = [param.detach().clone() for param in params], repr(optimizer.state)
    found = probe(optimizer, [Subject(0, tuple(shape), sharded) for shape in shapes], CPU)
    assert all(map(torch.equal, before, params))
    assert before_state == repr(optimizer.state)
    return found


CASES: dict[str, tuple[Any, Coupling, str]] = {
    "nothing": ({}, NOTHING, ""),
    "rows": ({"factor": of_row}, NOTHING, ""),
    "states by rows": ({"factor": rows_apart}, NOTHING, ""),
    "large": ({"factor": if_large}, ELEMENTS, "step 18 was off by"),
    "tiny": ({"factor": if_tiny}, ELEMENTS, "was off by"),
    "hidden": ({"factor": hidden}, ELEMENTS, "after 32 steps the state 'norms'[0] was another one"),
    "a state of columns": ({"factor": column}, ELEMENTS, "after 32 steps the state 'column' was another one"),
    "late": ({"factor": all_norms, "every": 1000}, PARAMETERS, "with every=4 step 4 was off by"),
    "parameters": ({"factor": all_norms}, PARAMETERS, "step 1 was off by"),
    "random, and parameters": (
        {"factor": noise_and_all_norms},
        UNKNOWN,
        "it draws random numbers, and beside other stand-ins step",
    ),
    "random": ({"factor": noise}, RANDOM, "step 1 was off by"),
    "a collective": ({"factor": summed}, UNKNOWN, "RuntimeError: its step calls the collective c10d"),
    "NaN": ({"factor": broken}, UNKNOWN, "ValueError: stand-ins for parameters become NaN or Inf in step 1"),
    "no move": ({"factor": still}, UNKNOWN, "ValueError: stand-ins for parameters did not move in 32 steps"),
    "an iterator": ({"factor": objects}, UNKNOWN, "the state 'iterator' is of type tuple_iterator, which cannot be"),
    "a warmup that begins with zero": ({"factor": if_large, "lr": 0.0}, ELEMENTS, "step 18 was off by"),
    "a learning rate in a tensor": ({"factor": if_large, "lr": torch.tensor(0.0)}, ELEMENTS, "was off by"),
}


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_what_is_coupled_is_found(name: str) -> None:
    options, coupling, evidence = CASES[name]
    with one_rank():
        states = torch.get_rng_state(), random.getstate()
        found = verdict(Planted, **options)
    assert found.coupling is coupling, found
    assert evidence in found.evidence, found
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_sizes_count_up_to_a_cap() -> None:
    assert verdict(Planted, factor=if_wide).coupling is NOTHING
    assert verdict(Planted, [(130, 4000)], factor=if_wide).coupling is ELEMENTS
    assert verdict(Planted, [(4000, 130)], sharded=False, factor=if_wide).coupling is NOTHING  # nobody has rows
    assert capped((4000, 130), 144) == (144, 130)
    assert capped((4000, 3000, 3, 3), 144) == (36, 72, 3, 3)
    assert capped((), 144) == ()


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=str), ids=lambda kind: kind.__name__)
def test_the_probe_agrees_with_what_is_known(kind: Any) -> None:
    assert verdict(kind) == Verdict(NOTHING)


def test_options_of_a_group_count() -> None:
    params = [nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    subjects = [Subject(0, (4, 3), True), Subject(1, (4, 3), True)]

    class Grouped(Planted):
        """Couples where its group says so; any keyword arguments."""

        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    if group.get("rank"):
                        param.grad.mul_(param.grad.norm())
            super().step()

    for rank, coupling in ((0, NOTHING), (4, ELEMENTS)):
        groups = [{"params": params[:1], "step": 700}, {"params": params[1:], "rank": rank}]
        assert probe(Grouped(groups), subjects, CPU).coupling is coupling, rank


def test_marks_and_names_of_parameters_count() -> None:
    class Asking(Planted):
        """Couples a parameter that is marked, or named so."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param, name in zip(group["params"], group["param_names"], strict=True):
                    if getattr(param, "normed", False) or "head" in name:
                        param.grad.mul_(param.grad.norm())
            super().step()

    cases: list[tuple[str, dict[str, Any], Coupling]] = [
        ("b", {}, NOTHING),
        ("b", {"normed": True}, ELEMENTS),
        ("head", {}, ELEMENTS),
        ("b", {"mask": torch.ones(3)}, UNKNOWN),
    ]
    for name, marks, coupling in cases:
        optimizer = Asking([(of, nn.Parameter(torch.ones(4, 3))) for of in ("a", name, "c")])
        subjects = [Subject(0, (4, 3), True, "a"), Subject(0, (4, 3), True, name, marks), Subject(0, (4, 3), True, "c")]
        assert probe(optimizer, subjects, CPU).coupling is coupling, (name, marks)


def matrix(param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
    return 1.0 if grad.ndim < 2 else 1 / grad.norm().clamp_min(1e-9)


def test_a_few_of_many_shapes_are_tried_with_each_number_of_dimensions() -> None:
    vectors = [(length,) for length in range(probe_room.KINDS, 2 * probe_room.KINDS + 1)]
    assert verdict(Planted, vectors, factor=matrix).coupling is NOTHING
    assert verdict(Planted, [*vectors, (2, 2)], factor=matrix).coupling is ELEMENTS


def test_whole_parameters_are_stepped_apart_unless_they_are_coupled() -> None:
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for factor in (None, if_large, noise):
        refuse_coupled_parameters(Planted(params, factor=factor), CPU)
    sentence = (
        r"test_probe\.Planted couples parameters \(beside other stand-ins step 1 was off by .*\), and each rank steps "
        r"only some of them; use an optimizer that steps every parameter alone, or stage=0 without"
    )
    with pytest.raises(RuntimeError, match=sentence):
        refuse_coupled_parameters(Planted(params, factor=all_norms), CPU)
    with pytest.raises(RuntimeError, match=r"Planted may couple parameters, and cannot be probed \(it draws random"):
        refuse_coupled_parameters(Planted(params, factor=noise_and_all_norms), CPU)


def test_copies_of_the_model_draw_no_numbers_of_their_own() -> None:
    for shapes in (SHAPES, SHAPES[:1]):
        params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        refuse_coupled_parameters(Planted(params, factor=if_large), CPU, copies=2)
        refuse_coupled_parameters(Planted(params, factor=all_norms), CPU, ranks=1, copies=2)
        with pytest.raises(
            RuntimeError, match=r"Planted draws random numbers \(.*\), and the 2 copies of the model would"
        ):
            refuse_coupled_parameters(Planted(params, factor=noise), CPU, ranks=1, copies=2)


def test_a_class_is_tried_once_for_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []
    of_class = probe_room._Probe.verdict
    monkeypatch.setattr(probe_room._Probe, "verdict", lambda self: tries.append(self) or of_class(self))

    class Once(Planted):
        """Of this test alone."""

    for _ in range(2):
        verdict(Once)
    assert len(tries) == 1
    verdict(Once, factor=of_row)
    assert len(tries) == 2


def test_a_package_of_optimizers() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    expected = {
        "Lion": NOTHING,
        "ScheduleFreeAdamW": NOTHING,
        "Ranger": NOTHING,  # centralises gradients row by row
        "Lamb": ELEMENTS,
        "Shampoo": ELEMENTS,
        "SOAP": ELEMENTS,
        "SWATS": ELEMENTS,  # switches to SGD by a product of whole vectors, after many steps
        "ScalableShampoo": ELEMENTS,  # computes nothing in its first 999 steps
        "AdaGC": PARAMETERS,
        "Prodigy": PARAMETERS,
        "DAdaptAdaGrad": PARAMETERS,
        "Kron": RANDOM,
        "SophiaH": UNKNOWN,  # needs gradients of gradients
    }
    assert {name: verdict(getattr(package, name)).coupling for name in expected} == expected


def test_the_page_has_a_row_for_every_class() -> None:
    pytest.importorskip("pytorch_optimizer")
    from examples.bench.optimizers import PAGE, classes, versions

    page = PAGE.read_text()
    if f"\n{versions()}\n" not in page:
        pytest.skip(f"the page is of other versions than {versions()}")
    rows = re.findall(r"^\| `(torch\.optim\.\w+|pytorch_optimizer\.\w+)`", page, re.MULTILINE)
    assert rows == [name for name, _ in classes([])]
    assert "WRONG" not in page
    assert {f"torch.optim.{kind.__name__}" for kind in ELEMENTWISE} == set(
        re.findall(r"^\| `(torch\.optim\.\w+)` \| exact", page, re.MULTILINE)
    )


class Clip:
    """Options in an object."""

    def __init__(self, norm: float = 0.0) -> None:
        self.norm = norm

    def __call__(self, param: Tensor, grad: Tensor, state: Any, everything: Any) -> Any:
        return self.norm / grad.norm() if self.norm else 1.0


class Configured(Planted):
    """Takes such an object, or makes its own."""

    def __init__(self, params: Any, lr: float = 0.1, clip: Any = None) -> None:
        super().__init__(params, lr)
        self.clip = clip or Clip()
        self.factor = self.clip if isinstance(clip, Clip) else clip


class WithTensors:
    """Something that may have to do with parameters."""

    def __init__(self) -> None:
        self.values = torch.ones(4)


def clip_by(param: Tensor, grad: Tensor, state: Any, everything: Any, norm: float) -> Any:
    return norm / grad.norm() if norm else 1.0


@pytest.mark.parametrize("clip", [Clip, lambda norm: partial(clip_by, norm=norm)], ids=["object", "partial"])
def test_the_users_objects_are_tried_and_not_the_defaults(clip: Callable[[float], Any]) -> None:
    assert verdict(Configured).coupling is NOTHING
    assert verdict(Configured, clip=clip(0.0)).coupling is NOTHING
    assert verdict(Configured, clip=clip(0.5)).coupling is ELEMENTS


def test_an_argument_that_cannot_be_copied_is_not_left_out() -> None:
    found = verdict(Configured, clip=WithTensors())
    assert found.coupling is UNKNOWN
    assert "its argument 'clip' is a WithTensors, which cannot be copied for another optimizer" in found.evidence


class Kept(Planted):
    """Keeps what its arguments ask for in attributes of other names, which are no plain values."""

    def __init__(self, params: Any, how: str = "", norm: bool = False) -> None:
        super().__init__(params)
        self._normed: set[int] = set()
        self._update: Any = self._by_norm if how == "a method" and norm else self._as_it_is
        self._shares = torch.tensor([float(norm), 1.0]) if how == "a tensor" else None

    def _by_norm(self, grad: Tensor) -> Tensor:
        return grad / (1 + grad.norm())

    def _as_it_is(self, grad: Tensor) -> Tensor:
        return grad

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            normed = id(param) in self._normed or (self._shares is not None and bool(self._shares[0]))
            param.grad = (self._by_norm if normed else self._update)(param.grad)
        super().step()


class ById(Kept):
    """Knows its matrices by their ids."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._normed = {id(param) for group in self.param_groups for param in group["params"] if param.ndim > 1}


class Lost(Planted):
    """Keeps its argument in tensors like the parameters."""

    def __init__(self, params: Any, norm: bool = False) -> None:
        super().__init__(params)
        everything = [param for group in self.param_groups for param in group["params"]]
        self.held = [torch.full_like(param, float(norm)) for param in everything]


def test_methods_tensors_and_ids_in_attributes_are_the_users() -> None:
    for how, coupling in {"a method": ELEMENTS, "a tensor": ELEMENTS, "": NOTHING}.items():
        assert verdict(Kept, how=how, norm=True).coupling is coupling, how
    assert verdict(ById).coupling is ELEMENTS
    lost = verdict(Lost, norm=True)
    assert lost.coupling is UNKNOWN
    assert "its attribute 'held' cannot be copied, and may be what its argument 'norm' has become" in lost.evidence


def test_a_new_function_where_a_freed_one_was_is_tried() -> None:
    class WithFunction(Planted):
        """Of this test alone."""

    addresses: set[int] = set()
    for number in range(200):
        factor: Any = (lambda *_: 1.0) if number % 2 == 0 else (lambda param, grad, *_: 1 / (1 + grad.norm()))
        seen = id(factor) in addresses
        addresses.add(id(factor))
        if seen or number < 2:
            assert verdict(WithFunction, factor=factor).coupling is (ELEMENTS if number % 2 else NOTHING)
        if seen and number % 2:
            return
        del factor


class Mode(Enum):
    """A kind of option."""

    PLAIN = 1
    NORM = 2


def test_every_kind_of_option_that_changes_is_seen() -> None:
    optimizer = Planted([nn.Parameter(torch.ones(2, 2))], factor=of_row)
    optimizer.param_groups[0] |= {"mode": Mode.PLAIN, "kw": {"norm": False}, "fn": of_row, "share": torch.zeros(2)}
    kept = look_of(optimizer, ())
    assert look_of(optimizer, ()) == kept
    changes = {"mode": Mode.NORM, "kw": {"norm": True}, "fn": if_large, "share": torch.ones(2)}
    for name, value in changes.items():
        before, optimizer.param_groups[0][name] = optimizer.param_groups[0][name], value
        assert look_of(optimizer, ()) != kept, name
        assert look_of(optimizer, (name,)) == look_of(optimizer, (name,))
        optimizer.param_groups[0][name] = before
    assert look_of(optimizer, ()) == kept
    optimizer.factor = if_large
    assert look_of(optimizer, ()) != kept


def test_options_that_cannot_be_copied_are_named_and_hooks_of_the_user_are_not_called() -> None:
    calls: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        for value in (threading.Lock(), nn.Linear(2, 2)):
            optimizer = Planted([{"params": [nn.Parameter(torch.ones(4, 3))], "held": value}])
            found = probe(optimizer, [Subject(0, (4, 3), True)], CPU)
            assert found.coupling is UNKNOWN
            assert f"the option 'held' of a group is a {type(value).__name__}, and is not copied" in found.evidence
        verdict(Planted, factor=of_row)
        assert calls == []
        optim.SGD([nn.Parameter(torch.ones(2))], 0.1).step()
        assert calls == [1]
    finally:
        handle.remove()
