"""One process traces and forecasts programs of sliced modules, without other ranks."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import thunder_zero as tz
from tests.harness.errors import refused
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.schedule.ops import Compute, Gather, Reduce, ends, starts_collective
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.devices.device import Lane
from thunder_zero.tools.time.estimate import by_times, ring
from thunder_zero.tools.views.page.report import page_of

DOCS_PAGE = Path(__file__).parents[2] / "docs" / "tensor-parallel.md"


class Pair(nn.Module):
    """A layer that is not sliced, then two that torch slices."""

    def __init__(self, width: int = 64, hidden: int = 256, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.first, self.up, self.down = nn.Linear(width, width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.up(self.first(x)).relu(), self.dropout))


STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def trace_pair(dp: int, tp: int, policy: tz.Policy | int = 3, rank: int = 0, rows: int = 8) -> tz.tools.Traces:
    with torch.device("meta"):
        module, x = Pair(), torch.empty(rows, 64)
    with tz.tools.fake_mesh((dp, tp), rank=rank) as mesh:
        return tz.trace(parallelize_module(module, mesh["tp"], dict(STYLES)), x, policy=policy, mesh=mesh)


def test_a_rank_of_many_is_traced_in_one_process() -> None:
    traces = trace_pair(4, 8, rank=13)  # of 32
    plan = traces.plan
    assert (plan.mesh.shard.place, plan.mesh.shard.size, plan.mesh.tensor.place, plan.mesh.tensor.size) == (1, 4, 5, 8)
    shapes = {param.path: (param.shape, plan.shard_shape(param)) for param in plan.params}
    assert shapes["up.weight"] == ((32, 64), (8, 64))
    assert shapes["down.weight"] == ((64, 32), (16, 32))
    assert shapes["first.weight"] == ((64, 64), (16, 64))
    ops = filter(starts_collective, traces.timeline.ops)
    sent = [traces.timeline.traffic(op).sent for op in ops if isinstance(op, Compute)]
    assert sent == [2 * 7 * (8 * 64 * 4 // 8)] * 2  # the activation behind down, the gradient in front of up
    assert not dist.is_initialized()


def test_each_rank_in_a_process_is_traced_with_its_own_sizes() -> None:
    """A sequence of 7 in two slices has 4 and 3 positions. DTensor caches the sizes of the rank that asks first."""
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))}
    for rank, positions in ((0, 4), (1, 3), (0, 4)):
        with torch.device("meta"):
            module, x = Pair(), torch.empty(2, 7, 64)
        with tz.tools.fake_mesh((1, 2), rank=rank) as mesh:
            traces = tz.trace(parallelize_module(module, mesh["tp"], dict(styles)), x, mesh=mesh)
        assert f'_grad: "cpu f32[2, {positions}, 64]"' in str(traces.backward)


def test_slices_draw_their_own_masks() -> None:
    with torch.device("meta"):
        module, x = Pair(dropout=0.5), torch.empty(8, 64)
    with tz.tools.fake_mesh((1, 2), rank=1) as mesh:
        traces = tz.trace(parallelize_module(module, mesh["tp"], dict(STYLES)), x, mesh=mesh)
    assert "generator_of_slice.default(1, " in str(traces.forward)
    assert tz.tools.memory(traces).peak > 0


def test_the_example_of_the_docs_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    section = DOCS_PAGE.read_text().partition("## Without ranks")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    exec(compile(program, str(DOCS_PAGE), "exec"), {})
    assert "and 1 of torch's tensor parallelism, which send 2,048 of these bytes" in capsys.readouterr().out


WIRES_ONLY = tz.tools.Device(  # only wires take time: one byte a second inside a node, half of it between nodes
    "wires",
    {"float32": 1e30},
    1e30,
    1 << 30,
    intra_node=tz.tools.Link(1.0),
    inter_node=tz.tools.Link(0.5),
    devices_per_node=2,
)
LATENCY = replace(WIRES_ONLY, intra_node=tz.tools.Link(1e30, latency_seconds=1.0), devices_per_node=8)
ACTIVATION, NUMBERS = 8 * 64 * 4, 64 * 64 + 64 + 2 * (128 * 64) + 128 + 64  # bytes; parameters of two slices


def test_times_of_slices_are_closed_forms() -> None:
    """Two ranks of a node send an activation forward and its gradient back; ZeRO's messages leave the node."""
    estimate = tz.tools.estimate(trace_pair(2, 2), WIRES_ONLY)
    rows = NUMBERS * 4 // 2
    assert estimate.wire_seconds == pytest.approx({Lane.TENSOR: 2 * ACTIVATION, Lane.SHARD: 2 * 2 * rows})
    assert estimate.exposed_on == pytest.approx(estimate.wire_seconds)
    assert estimate.busiest_bytes == 2 * ACTIVATION + 2 * rows
    assert str(estimate).count("of it for slices") == 1
    ring_steps = tz.tools.estimate(trace_pair(1, 4), LATENCY)  # an all-reduce of 4 ranks is a ring of 6 steps
    assert ring_steps.wire_seconds == pytest.approx({Lane.TENSOR: 12.0})


def test_data_parallel_rings_skip_the_other_slices() -> None:
    def rings(mesh: Mesh, stage: int) -> set[tuple[str, int, int]]:
        plan = make_plan(Pair(), tz.Policy(stage), mesh, {"up.weight": 0, "up.bias": 0, "down.weight": 1})
        ops = (Reduce(("g",), "h", ("up.weight",), over) for over in plan.reduced_over(plan.params[2]))
        all_rings = (ring(op, Timeline((op,), {}, plan)) for op in ops)
        return {(hop[0], *hop[1][1:3]) for hop in all_rings if hop}

    assert rings(Mesh.of(4, slices=2), 3) == {("shard", 4, 2)}
    assert rings(Mesh.of(4, replicas=3, slices=2), 3) == {("shard", 4, 2), ("replicate", 3, 8)}
    assert rings(Mesh.of(4, replicas=3, slices=2), 0) == {("replicate", 12, 2)}


def test_timelines_pages_explanations_and_differences_show_slices(tmp_path: Path) -> None:
    traces = trace_pair(2, 2)
    tz.tools.save_timeline(tmp_path / "step.json", traces, device=WIRES_ONLY)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = Counter(event["name"] for event in events)
    assert (names["all_reduce over tensor"], names["wait for all_reduce over tensor"]) == (2, 2)
    page = page_of(traces, WIRES_ONLY)
    assert page["programs"][0]["lanes"] == ["compute", "tensor parallelism", "gathers", "reductions"]
    exposed: Counter[str] = Counter()
    for collective in page["programs"][0]["collectives"]:
        exposed[collective["kind"]] += collective["exposed_seconds"]
    rows = NUMBERS * 4 // 2
    assert exposed == pytest.approx({"tensor": 2 * ACTIVATION, "gather": 2 * rows, "reduce": 2 * rows})
    assert page["programs"][0]["figures"]["slices"] == 2
    assert "waiting for tensor parallelism" in page["programs"][0]["bound"]
    text = str(tz.explain(traces, "down.weight"))
    assert "part 0 of 2 of 64 x 256, along dimension 1" in text
    assert "each of the 2 ranks of tensor parallelism computes with all of it" in str(tz.explain(traces, "down.bias"))
    difference = tz.tools.diff(trace_pair(4, 1), traces)
    assert [total["slices"] for total in difference.total] == [0, 2]
    assert [total["sent by slices"] for total in difference.total] == [0, 2 * ACTIVATION]
    assert "collectives of tensor parallelism: 0 -> 2, which send 0 B -> 4.00 KiB of all" in str(difference)


SLOW = replace(tz.tools.DEVICES["h100"], intra_node=tz.tools.Link(1e9))


def make_forecast() -> tuple[tz.tools.Estimate, dict[int, float]]:
    """Return the estimate of a step with many gathers, and how long compute waits for slices at each operation."""
    estimate = tz.tools.estimate(trace_pair(2, 2, tz.Policy(3, bucket_bytes=1, prefetch=1)), SLOW)
    waits: defaultdict[int, float] = defaultdict(float)
    for span in estimate.spans:
        op = estimate.timeline.ops[span.op]
        if span.waits and isinstance(op, Compute) and op.between_slices:
            waits[span.op] += span.seconds
    assert len(waits) == 2
    return estimate, waits


def test_measured_times_include_waits_for_slices() -> None:
    estimate, waits = make_forecast()
    timeline = estimate.timeline
    gathers = [op for op in timeline.ops if isinstance(op, Gather)]
    pairs = zip(timeline.ops, estimate.costs, strict=True)
    wire_seconds = sum(cost.wire_seconds for op, cost in pairs if op in gathers)
    for slower in (1.0, 3.0):
        times: tuple[dict[str, float], dict[str, float]] = {}, {}
        waits_for_gathers = [index for index, op in enumerate(timeline.ops) if ends(op, Gather)]
        for index, following in pairwise(waits_for_gathers):
            op = timeline.ops[index]
            if op.backward is timeline.ops[following].backward:
                stretch = range(index + 1, following)
                times[op.backward][op.params[0]] = slower * sum(
                    estimate.costs[inner].seconds + waits[inner] for inner in stretch
                )
        speed = sum(timeline.traffic(op).busiest for op in gathers) / wire_seconds
        measured = by_times(estimate, tz.schedule.Times(*times, speed))
        assert measured.compute_seconds == pytest.approx(slower * estimate.compute_seconds)
        assert measured.exposed_on[Lane.TENSOR] == pytest.approx(slower * estimate.exposed_on[Lane.TENSOR])


@pytest.mark.slow
def test_fit_finds_a_policy_for_slices() -> None:
    def peak(policy: tz.Policy) -> int:
        return tz.tools.memory(tz.trace(module, x, policy=policy, mesh=mesh)).peak

    with torch.device("meta"):
        layers, x = nn.Sequential(*(Pair() for _ in range(3))), torch.empty(8, 64)
    with tz.tools.fake_mesh((4, 2)) as mesh:
        styles = {f"{index}.{name}": style for index in range(3) for name, style in STYLES.items()}
        module = parallelize_module(layers, mesh["tp"], styles)
        options: dict[str, Any] = {"file": StringIO(), "mesh": mesh}
        roomy = tz.tools.fit(module, x, memory_bytes="1GiB", **options)
        nbytes = int(0.8 * peak(roomy))
        assert peak(tz.tools.fit(module, x, memory_bytes=nbytes, **options)) <= nbytes
        with pytest.raises(tz.tools.DoesNotFit) as caught:
            tz.tools.fit(module, x, memory_bytes=1000, **options)
        assert "twice the ranks" in str(caught.value)
        assert "cpu_offload" not in str(caught.value)  # slices refuse offload
        with refused(ValueError, "mesh says how many ranks there are", "leave out world_size and replicas"):
            tz.tools.fit(module, x, memory_bytes=nbytes, world_size=2, **options)
        with refused(RuntimeError, "is a DTensor", "give mesh="):
            tz.tools.fit(module, x, memory_bytes=nbytes, world_size=2)


def test_wrong_uses_are_refused() -> None:
    with torch.device("meta"):
        module, x = Pair(), torch.empty(8, 64)
    with refused(ValueError, "rank is 4", "the ranks 0 to 3"), tz.tools.fake_mesh((2, 2), rank=4):
        pass
    with tz.tools.fake_mesh((2, 2)) as mesh:
        with refused(RuntimeError, "there is a process group", "init_device_mesh"), tz.tools.fake_mesh((1, 2)):
            pass
        with refused(ValueError, "no parameter of Pair is a DTensor"):
            tz.trace(module, x, mesh=mesh)
        parallelize_module(module, mesh["tp"], dict(STYLES))
        with refused(ValueError, "mesh says how many ranks there are", "leave out world_size"):
            tz.trace(module, x, mesh=mesh, world_size=2)
        with refused(RuntimeError, "parameter 'up.weight' is a DTensor", "give mesh="):
            tz.trace(module, x)
        with refused(ValueError, "'up.weight' is a DTensor and the policy ignores it"):
            tz.trace(module, x, mesh=mesh, policy=tz.Policy(3, ignored=("up",)))
