"""Shortcuts in Thunder's interpreter change no trace and no guard, and save most frames."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.harness.models import fresh
from tests.harness.tiers import slow
from thunder_zero.compat.thunder import shortcuts
from thunder_zero.compat.thunder.patches import replaced

import thunder
from thunder.core import interpreter

SETTINGS: dict[str, float] = {}
global_len = len


class CallsBuiltins(nn.Module):
    """A module that tests truth and emptiness, and calls builtins and other functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.extra = nn.ModuleList()

    def forward(self, x: Tensor, parts: dict[str, Tensor], flags: tuple[int, ...] = (), name: str = "") -> Tensor:
        scale = len(parts) + sum(flags) if flags else max(1, global_len(parts))
        if parts and not SETTINGS and not self.extra:
            x = x + parts["a"] if "a" in parts else x - 1
        results: list[Tensor] = []
        if not results and bool(x.shape) and isinstance(scale, int):
            results.append(self.layer(x) * scale)
        return results[0] if results and not name else x


class Sized:
    """An object whose truth value is its length."""

    def __len__(self) -> int:
        return 0


class WithOthers(nn.Module):
    """A module with a sized object, a hook, and a local function that hides a builtin."""

    def __init__(self) -> None:
        super().__init__()
        self.sized, self.norm = Sized(), nn.LayerNorm(3)
        self.norm.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: Tensor) -> Tensor:
        def len(value: Any) -> int:
            return 5

        return self.norm(x) * len(x) if not self.sized and range(2) and "yes" and 0.5 else x


X = torch.arange(6.0).view(2, 3)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "an input of a dict": (CallsBuiltins, (X, {"a": X})),
    "an empty dict": (CallsBuiltins, (X, {})),
    "flags": (CallsBuiltins, (X, {"b": X}, (1, 2), "name")),
    "others": (WithOthers, (X,)),
    "layers of torch": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.0), nn.Linear(3, 2)), (X,)),
}


def trace_case(name: str) -> tuple[list[str], Tensor, int]:
    """Return the traces of a case as text, with guards, its output, and how many frames were interpreted."""
    make, inputs = CASES[name]
    jitted = thunder.jit(fresh(make))
    with mock.patch.object(interpreter, "_run_frame", wraps=interpreter._run_frame) as run:
        out = jitted(*inputs)
    traces = thunder.last_prologue_traces(jitted)[-1], thunder.last_traces(jitted)[0], thunder.last_traces(jitted)[-1]
    return [re.sub(r"took \d+ \w+", "", str(trace)) for trace in traces], out, run.call_count


@pytest.mark.parametrize("name", ["an input of a dict", "others", *slow("an empty dict", "flags", "layers of torch")])
def test_traces_and_guards_are_those_of_thunder_alone(name: str) -> None:
    with replaced(shortcuts.PATCHES):
        traces, out, frames = trace_case(name)
    thunders, expected, all_frames = trace_case(name)
    assert traces == thunders
    assert torch.equal(out, expected)
    assert 2 * frames < all_frames


def test_a_global_that_hides_a_builtin_is_called() -> None:
    def return_seven(value: Any) -> int:
        return 7

    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * len(x)

    with replaced(shortcuts.PATCHES):
        names = {**globals(), "len": return_seven}
        Hidden.forward = FunctionType(Hidden.forward.__code__, names)  # type: ignore[method-assign]
        assert torch.equal(thunder.jit(Hidden())(X), X * 7)
        del names["len"]
        assert torch.equal(thunder.jit(Hidden())(X), X * 2)
        names["__builtins__"] = {"len": lambda value: 9}
        assert torch.equal(thunder.jit(Hidden())(X), X * 9)
