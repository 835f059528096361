"""``repr`` and ``str`` of the tools' values fit a screen; ``table()`` has the rest."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from io import StringIO
from typing import Any

import pytest
import torch
from torch import nn

import thunder_zero as tz
from tests.harness import steps
from tests.harness.traced import Chain, ResidualBlock, mean_square
from thunder_zero.tools.compiled_programs import Programs
from thunder_zero.tools.format_errors import WireErrors

BLOCKS, WIDTH = 16, 8
COLUMNS, LINES, LINES_OF_REPR = 100, 60, 12
OTHERS = {"Traces", "DoesNotFit"}  # built elsewhere; an error
pytestmark = pytest.mark.slow


class Uneven(nn.Module):
    """A module of blocks of different sizes, so that their figures differ, and a layer that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            Chain(nn.Linear(WIDTH, WIDTH + index), nn.Linear(WIDTH + index, WIDTH)) for index in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(self.shared(block(x)))
        return x


def unit_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(f"blocks.{index}" for index in range(BLOCKS))


ERROR = "blocks.11.attention.qkv.weight", "int8/128, exact", 6.5e-3, 1.2e-2, 0.9999
PROGRAM = "graph 0", "training", {"tokens": torch.Size((2, 128))}, 1.4, 12 << 20, None


@cache
def build_values() -> Mapping[str, tuple[Any, ...]]:
    """Build values of each public class of the tools, and results of functions that return other classes."""
    with torch.device("meta"):
        module, x = Uneven(), torch.empty(2, WIDTH)
        alike, y = Chain(*(ResidualBlock(WIDTH) for _ in range(7))), torch.empty(2, WIDTH)
    policy = tz.Policy(unit_of=unit_of, gather_per_unit=True)
    two, three = (tz.trace(module, x, policy=chosen) for chosen in (tz.Policy(2, unit_of=unit_of), policy))
    memory = tz.tools.memory(three, loss=mean_square, optimizer=torch.optim.AdamW)
    device = tz.tools.DEVICES["h100"]
    curves = ("matmul float32", "matmul bfloat16", "pointwise", "gather wire", "scatter wire", "all_reduce wire")
    measured = tz.tools.Device(
        "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
        {"float32": 1e11, "bfloat16": 1e11},
        1e10,
        64 << 30,
        tz.tools.Link(1e9),
        devices_per_node=4,
        curves=dict.fromkeys(curves, ((1.0, 1e-6), (1e6, 1e-3))),
    )
    plan = tz.tools.plan_training(alike, y, world_size=1024, stages=(2, 3), loss=mean_square)
    table = tz.tools.step_table(three, device="h100")
    verdict = tz.tools.check_step(steps.bias_on_every_slice, {"tp": 2})
    linear, batch = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    comparison = tz.tools.compare_gradients(lambda: linear, lambda model, mesh: model, batch, {"dp": 2})
    return {
        "wire_error": (WireErrors([dict(zip(WireErrors.forms, ERROR, strict=True))]),),
        "programs": (Programs([dict(zip(Programs.forms, PROGRAM, strict=True))]),),
        "ComparedValue": comparison.rows,
        "Fault": verdict.faults,
        "GradientComparison": (comparison,),
        "Verdict": (verdict,),
        "DEVICES": (tz.tools.DEVICES,),
        "Device": (measured, *tz.tools.DEVICES.values()),
        "Difference": (tz.tools.diff(two, three),),
        "Estimate": (tz.tools.estimate(three, "h100", loss=mean_square, optimizer=torch.optim.AdamW),),
        "Explanation": (tz.explain(three, "shared.weight", device="h100"), tz.explain(three, "blocks.3.0.weight")),
        "Holds": tuple(tz.tools.Holds),
        "Link": (device.intra_node,),
        "Memory": (memory,),
        "MODELS": (tz.tools.MODELS,),
        "NamedModel": tuple(tz.tools.MODELS.values()),
        "Row": table.all_rows,
        "Storage": memory.storages,
        "Table": (table,),
        "TrainingPlan": (plan, plan.rows[0], plan.rows[0].mesh),
        "fit": (tz.tools.fit(alike, y, memory_bytes="1GiB", world_size=8, file=StringIO()),),
    }


def list_public_names() -> list[str]:
    named = [(name, getattr(tz.tools, name)) for name in tz.tools.__all__]
    classes = [name for name, value in named if name not in OTHERS and not inspect.isfunction(value)]
    return [*classes, "fit", "programs", "wire_error"]


def test_every_public_class_has_a_value() -> None:
    assert sorted(build_values()) == sorted(list_public_names())


@pytest.mark.parametrize("name", list_public_names())
def test_its_text_fits_a_screen(name: str) -> None:
    for value in build_values()[name]:
        for text, limit in ((repr(value), LINES_OF_REPR), (str(value), LINES)):
            lines = text.splitlines()
            # a policy is a single line of Python
            too_wide = [line for line in lines if len(line) > COLUMNS and name != "fit"]
            assert too_wide == []
            assert sum(-(-len(line) // COLUMNS) for line in lines) <= limit, text


@pytest.mark.parametrize("name", ["Difference", "Explanation", "Memory", "TrainingPlan"])
def test_its_table_has_the_rest(name: str) -> None:
    value = build_values()[name][0]
    lines = value.table().splitlines()
    assert max(map(len, lines)) <= COLUMNS
    if name == "TrainingPlan":
        assert value.table() in str(value)
        assert max(map(len, str(value).splitlines())) <= 80
        assert len(lines) == 1 + len(value.rows)
    else:
        assert len(lines) - len(str(value).splitlines()) >= 3, str(value)
    if name == "Difference":
        assert sum("blocks." in line for line in lines) == BLOCKS
