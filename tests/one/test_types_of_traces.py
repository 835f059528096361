"""Types of our own traces: right programs have no fault, wrong ones are refused when they are traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.steps import CopyToSlices, SumOfSlices
from tests.harness.tiers import slow
from thunder_zero.capture import joint
from thunder_zero.spmd import of_trace
from thunder_zero.spmd.of_trace import types_of_trace
from thunder_zero.tools.cli import main
from thunder_zero.tools.models import GPT2_STYLES, LLAMA_STYLES, DecoderSizes, Gpt2, Llama
from thunder_zero.tools.views.page.report import page_of
from thunder_zero.tools.views.print_trace import json_of

SIZES = DecoderSizes(blocks=2, width=16, heads=8, key_heads=4, hidden=32, vocabulary=24, length=6)
STYLES: Mapping[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
Build = Callable[[DeviceMesh], nn.Module]


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.up(self.norm(x)).relu(), self.dropout))


class Heads(nn.Module):
    """A norm of each head, between two layers in slices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.RMSNorm(4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(self.up(x).unflatten(-1, (-1, 4)))
        return self.down(heads.flatten(-2))


class ByHand(nn.Module):
    """Two layers in slices by hand, and one fault, or none."""

    def __init__(self, mesh: DeviceMesh, fault: str = "") -> None:
        super().__init__()
        self.fault, self.group = fault, mesh.get_group()
        layer: Any
        self.first, self.up, self.down, self.last = (nn.Linear(*shape) for shape in ((8, 8), (8, 16), (16, 8), (8, 4)))
        for layer, dim in ((self.up, 0), (self.down, 1)):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(dim)]))
            layer.bias = None

        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.fault != "no f":
            x = CopyToSlices.apply(x, self.group)
        up, down = (layer.weight.to_local() for layer in (self.up, self.down))  # type: ignore[attr-defined]
        y = F.linear(F.linear(x, up).relu(), down)
        if self.fault == "bias on every slice":
            return self.last(SumOfSlices.apply(y + self.bias, self.group))
        if self.fault == "never summed":
            return self.last(y.relu() + self.bias)
        if self.fault == "returns shares":
            return y
        if self.fault == "summed twice":
            y = SumOfSlices.apply(y, self.group)
        y = SumOfSlices.apply(y, self.group)
        return self.last(y + self.bias)


def parallel(build: Callable[[], nn.Module], styles: Mapping[str, Any], mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(build(), mesh, dict(styles))


def traced(build: Build, shape: tuple[int, ...], stage: int = 3, rank: int = 0, **options: Any) -> tz.tools.Traces:
    inputs = torch.zeros(shape, dtype=torch.float32 if shape[-1] == 8 else torch.int64)
    with tz.tools.fake_mesh((2, 2), rank=rank) as mesh:
        return tz.trace(build(mesh["tp"]), inputs, policy=stage, mesh=mesh, **options)


@cache
def traced_mlp() -> tz.tools.Traces:
    return traced(partial(parallel, Mlp, STYLES), (2, 4, 8))


DECODERS = {
    "llama": partial(parallel, partial(Llama, SIZES), LLAMA_STYLES),
    "gpt2": partial(parallel, partial(Gpt2, SIZES), GPT2_STYLES),
}


@pytest.mark.parametrize(
    ("name", "stage", "rank"), [("llama", 3, 1), *slow(("llama", 1, 0), ("gpt2", 0, 1), ("gpt2", 2, 0))]
)
def test_decoders_in_slices_have_the_types_of_their_plan(name: str, stage: int, rank: int) -> None:
    """The embedding's rows, a sequence in slices, and heads: no fault, and each gradient is placed as planned."""
    traces = traced(DECODERS[name], (2, 6), stage, rank)
    types = types_of_trace(traces)
    assert (types.faults, types.not_checked) == ((), "")
    assert types.gradients == {param.path: "R" if param.sliced is None else "S" for param in traces.plan.params}
    written = {name for op in traces.timeline.ops if op.kind == "compute" for name in op.writes}
    assert written - types.values.keys() == set()


def test_right_slices_by_hand_have_no_fault() -> None:
    assert types_of_trace(traced(ByHand, (4, 8))).faults == ()
    styles = {**STYLES, "norm": SequenceParallel(sequence_dim=2, use_local_output=True)}
    summed = traced(partial(parallel, Heads, styles), (2, 4, 8))
    assert types_of_trace(summed).gradients["norm.weight"] == "R"
    masks = types_of_trace(traced(partial(parallel, partial(Mlp, 0.5), STYLES), (2, 4, 8)))
    assert (masks.faults, masks.gradients["up.weight"]) == ((), "S")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("bias on every slice", ("once summed it is counted 2 times", "SumOfSlices.apply(y + self.bias, self.group)")),
        *slow(
            ("never summed", ("relu is not linear in a share of a sum", "return self.last(y.relu()")),
            ("no f", ("gradient of parameter 'first.weight' is a share of a sum", "x = self.first(x)")),
            ("returns shares", ("forward returns a share of a sum", "y = F.linear(F.linear(x, up)")),
            ("summed twice", ("already equal on all ranks multiplies it by 2", "(steps.py:")),
        ),
    ],
)
def test_wrong_slices_are_refused_with_the_users_line(fault: str, words: tuple[str, ...]) -> None:
    with refused(RuntimeError, *words):
        traced(partial(ByHand, fault=fault), (4, 8))


def test_a_norm_of_slices_and_equal_masks_are_refused() -> None:
    with refused(RuntimeError, "'norm.weight' is a share of a sum", "heads = self.norm(", "SequenceParallel"):
        traced(partial(parallel, Heads, STYLES), (2, 4, 8))
    equal_masks = mock.patch.object(joint, "_draw_by_slices")
    with equal_masks, refused(RuntimeError, "native_dropout draws equal masks", "F.dropout(self.up("):
        traced(partial(parallel, partial(Mlp, 0.5), STYLES), (2, 4, 8))


def printed(traces: tz.tools.Traces) -> str:
    file = StringIO()
    tz.print_trace(traces, file=file, types=True)
    return file.getvalue()


def test_types_are_printed_after_each_line() -> None:
    text = printed(traced_mlp())
    assert "# dp:S tp:P: what the line above writes, on each axis. R: equal on all ranks, S: a slice,\n" in text
    for line, types in (
        ("zero_wait_coalesced", "dp:R tp:R; dp:R tp:S"),
        ("aten.relu", "dp:S tp:S"),
        ("linear_1 = aten.addmm(", "dp:S tp:P"),
        ("c10d_functional.all_reduce.default(linear_1", "dp:S tp:R"),
        ("up_weight_grad = aten.mm", "dp:P tp:S"),
    ):
        after = text.partition(line)[2].splitlines()[1:4]
        assert f"    # {types}" in after, (line, after)
    with refused(ValueError, "a timeline is printed whole"):
        tz.print_trace(traced_mlp().timeline, types=True)


def test_types_are_data_of_rows_and_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_of(traced_mlp(), types=True)["lines"]
    of_lines = {row["code"].partition(" = ")[0]: row["types"] for row in rows}
    assert (of_lines["linear_1"], of_lines["relu"]) == ("dp:S tp:P", "dp:S tp:S")
    assert {row["types"] for row in json_of(traced_mlp())["lines"]} == {""}
    lines = page_of(traced_mlp(), "h100", types=True)["programs"][0]["lines"]
    assert [types for code, types in zip(lines["code"], lines["types"], strict=True) if "linear_1 =" in code] == [
        "dp:S tp:P"
    ]
    main(["trace", f"{Path(__file__)}:plain", "--world-size", "2", "--types", "--phase", "forward"])
    assert "    # dp:S\n" in capsys.readouterr().out


def plain() -> tuple[nn.Module, Tensor]:
    return nn.Linear(8, 8), torch.randn(4, 8)


def test_large_and_symbolic_programs_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_trace, "LIMIT", 1 << 10)
    types = types_of_trace(traced_mlp())
    assert types.not_checked.startswith("experiments would take")
    assert types.values == {}
    assert "# types: not checked: experiments would take" in printed(traced_mlp())
    symbolic = tz.trace(*plain(), world_size=2, dynamic=True)
    assert types_of_trace(symbolic).not_checked == "sizes are symbols"
