"""Models of ours have no effect on models of others: what is patched is patched while ours compile, and put back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from threading import Barrier, Thread
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import thunder_zero as tz
from tests.harness.models import fresh
from tests.harness.one_rank import group_of_one
from thunder_zero.compat import thunder as room
from thunder_zero.compat.thunder import patches, tracing
from thunder_zero.compat.torch import optimizers

import thunder
from thunder.core import interpreter, jit_ext, prims, symbol
from thunder.core.proxies import IntegerProxy, NumberProxy

X, TARGET = torch.arange(12.0).view(3, 4).cos(), torch.tensor([1, -100, 2])
HOLDERS = [
    *(jit_ext._general_jit_lookaside_map, jit_ext.general_jit_callbacks, interpreter._default_lookaside_map),
    *(interpreter._default_opcode_handler_map, jit_ext, interpreter, symbol, symbol.Symbol, NumberProxy, IntegerProxy),
    *(thunder, thunder.torch, thunder.extend._executor_map),
]


class Everything(nn.Module):
    """Calls whatever is replaced while a model of ours is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.mask: Tensor | None = None
        self.scale = [2.0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) * max(self.scale)
        for _, param in self.named_parameters():
            x = x + param.view(-1, 4).sum(0)
        return F.cross_entropy(x if self.mask is None else x * self.mask, TARGET, label_smoothing=0.1)


def tables() -> list[dict[Any, int]]:
    """Thunder's tables and functions, as objects."""
    found = []
    for holder in HOLDERS:
        names: Any = holder if isinstance(holder, dict) else vars(holder)
        found.append({name: id(value) for name, value in names.items() if not str(name).startswith("__")})
    return [*found, {"meta": id(prims.convert_element_type.meta)}]


def ours(module: nn.Module) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])


def text_of(jitted: Any) -> str:
    traces = *thunder.last_prologue_traces(jitted)[-1:], *thunder.last_traces(jitted)[::5]
    return re.sub(r"took \d+ \w+|0x\w+|_\d{6,}", "", "\n".join(map(str, traces)))


LASTING = {  # what stays for the life of the process, and leaves models of others alone
    "DTensor's handlers: aten._amp_foreach_non_finite_check_and_unscale_.default",
    "optimizer_global_optimizer_post_hooks: thunder_zero.sharded.optimizers._note_step",
    "optimizer_global_optimizer_pre_hooks: thunder_zero.sharded.optimizers._before_step",
}


def test_nobody_else_notices_that_models_of_ours_train() -> None:
    """In a process of its own: what an earlier test had left there would be equal before and after."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.harness.side_effects"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    changed = json.loads(done.stdout)
    assert {*changed.pop("training")} == LASTING
    assert changed == {key: [] for key in ("torch by itself", "import", "functions", "Thunder", "bits")}


def test_a_trace_enters_the_room_and_a_plain_model_is_traced_as_by_thunder_alone() -> None:
    plain = thunder.jit(fresh(Everything))
    plain(X).backward()
    with group_of_one("cpu"):
        model = ours(fresh(Everything))
        with mock.patch.object(tracing, "replaced", wraps=patches.replaced) as entered:
            model(X).backward()
            assert entered.call_count == 2
            model(X)
        assert entered.call_count == 2  # a program that is there needs no trace
    after = thunder.jit(fresh(Everything))
    after(X).backward()
    assert text_of(plain) == text_of(after)


def test_the_room_is_left_after_an_exception_and_by_overlapping_blocks() -> None:
    before = tables()

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(str(len(self.layer(x).shape)))

    with group_of_one("cpu"):
        with pytest.raises(KeyError, match="2"):
            ours(Fails())(X)
        assert tables() == before
    with patches.replaced(tracing.PATCHES):
        with patches.replaced(tracing.PATCHES):
            inside = tables()
        assert tables() == inside != before
    assert tables() == before


def test_a_thread_that_traces_another_model_meanwhile_is_refused_nothing() -> None:
    """It finds our functions in Thunder's tables, which ask whether the model of their thread is ours."""
    before, meet, results = tables(), Barrier(2, timeout=60), []

    def decides(x: Tensor) -> Tensor:
        return x * (2 if x.sum().item() > 0 else 3)

    def trace_plainly() -> None:
        meet.wait()
        with suppress(Exception):
            results.append(thunder.jit(decides)(torch.ones(1, 1)))
        meet.wait()

    thread = Thread(target=trace_plainly)
    thread.start()
    with tracing.Tracing().entered():
        meet.wait()  # from here on the other thread traces
        meet.wait()
        assert patches.refuse("why") is not None
    thread.join()
    assert torch.equal(results[0], 3 * torch.ones(1, 1)), "Thunder's own wrong answer"
    assert patches.refuse("why") is None
    assert tables() == before


def test_compile_never_enters() -> None:
    with group_of_one("cpu"), mock.patch.object(room, "Tracing", side_effect=AssertionError("entered")):
        model = tz.compile(fresh(Everything), stage=3)
        model(X).backward()
        with torch.no_grad():
            model(X)
        assert all(param.grad is not None for param in model.parameters())
        tz.trace(Everything(), X)
        with pytest.raises(AssertionError, match="entered"):
            ours(Everything())


def test_a_scaler_of_other_models_keeps_torchs_own_handler() -> None:
    """Ours shares an overflow of any gradient by a collective of its own; torch's shares that of the first gradient."""
    found, inverse = torch.zeros(()), torch.ones(())
    with group_of_one("cpu"):
        model: Any = tz.compile(nn.Linear(4, 4), stage=3)
        model(X).sum().backward()
        ours_grads = [param.grad for param in model.parameters()]
        mesh = init_device_mesh("cpu", (1,))
        others = [DTensor.from_local(torch.ones(4), mesh, [Shard(0)])]
        for grads, calls in ((others, 0), (ours_grads, 1)):
            with mock.patch.object(dist, "all_reduce") as reduced:
                optimizers.UNSCALE(grads, found, inverse)
            assert reduced.call_count == calls
