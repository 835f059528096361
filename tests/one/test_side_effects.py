"""Our models do not affect other models: what is patched while ours compile is restored."""

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
    """A module that calls everything that is patched while one of our models is traced."""

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


def read_tables() -> list[dict[Any, int]]:
    """Return the identities of the objects in Thunder's tables and modules."""
    tables = []
    for holder in HOLDERS:
        names: Any = holder if isinstance(holder, dict) else vars(holder)
        tables.append({name: id(value) for name, value in names.items() if not str(name).startswith("__")})
    return [*tables, {"meta": id(prims.convert_element_type.meta)}]


def jit_ours(module: nn.Module) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])


def text_of(jitted: Any) -> str:
    traces = *thunder.last_prologue_traces(jitted)[-1:], *thunder.last_traces(jitted)[::5]
    return re.sub(r"took \d+ \w+|0x\w+|_\d{6,}", "", "\n".join(map(str, traces)))


LASTING = {  # what stays for the life of the process and does not affect other models
    "DTensor's handlers: aten._amp_foreach_non_finite_check_and_unscale_.default",
    "optimizer_global_optimizer_post_hooks: thunder_zero.sharded.optimizers._note_step",
    "optimizer_global_optimizer_pre_hooks: thunder_zero.sharded.optimizers._before_step",
}


def test_training_our_models_changes_nothing_else() -> None:
    """Runs in a new process, as changes by an earlier test would not show."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.harness.side_effects"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    changed = json.loads(process.stdout)
    assert {*changed.pop("training")} == LASTING
    assert changed == {key: [] for key in ("torch by itself", "import", "functions", "Thunder", "bits")}


def test_our_traces_patch_thunder_and_plain_models_are_traced_as_by_thunder_alone() -> None:
    plain = thunder.jit(fresh(Everything))
    plain(X).backward()
    with group_of_one("cpu"):
        model = jit_ours(fresh(Everything))
        with mock.patch.object(tracing, "replaced", wraps=patches.replaced) as entered:
            model(X).backward()
            assert entered.call_count == 2
            model(X)
        assert entered.call_count == 2  # an existing program needs no trace
    after = thunder.jit(fresh(Everything))
    after(X).backward()
    assert text_of(plain) == text_of(after)


def test_patches_are_undone_after_an_exception_and_by_overlapping_blocks() -> None:
    before = read_tables()

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(str(len(self.layer(x).shape)))

    with group_of_one("cpu"):
        with pytest.raises(KeyError, match="2"):
            jit_ours(Fails())(X)
        assert read_tables() == before
    with patches.replaced(tracing.PATCHES):
        with patches.replaced(tracing.PATCHES):
            inside = read_tables()
        assert read_tables() == inside != before
    assert read_tables() == before


def test_a_thread_that_traces_another_model_at_the_same_time_is_refused_nothing() -> None:
    """It calls our functions in Thunder's tables; they check whether their thread traces one of our models."""
    before, meet, results = read_tables(), Barrier(2, timeout=60), []

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
        meet.wait()  # now the other thread traces
        meet.wait()
        assert patches.refuse("why") is not None
    thread.join()
    assert torch.equal(results[0], 3 * torch.ones(1, 1)), "Thunder's own wrong answer"
    assert patches.refuse("why") is None
    assert read_tables() == before


def test_compile_never_patches_thunder() -> None:
    with group_of_one("cpu"), mock.patch.object(room, "Tracing", side_effect=AssertionError("entered")):
        model = tz.compile(fresh(Everything), stage=3)
        model(X).backward()
        with torch.no_grad():
            model(X)
        assert all(param.grad is not None for param in model.parameters())
        tz.trace(Everything(), X)
        with pytest.raises(AssertionError, match="entered"):
            jit_ours(Everything())


def test_a_scaler_of_other_models_uses_torchs_handler() -> None:
    """Our handler shares an overflow of any gradient by a collective; torch's looks at the first gradient only."""
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
