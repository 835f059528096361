"""Costs, devices and simulated steps have the numbers of arithmetic, for hand-written timelines. No clock is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.errors import fails
from tests.harness.timelines import make_param, model, spans_in_words, split, timelines
from thunder_zero.encodings.int8 import Int8
from thunder_zero.plan.mesh import ALL, REPLICATE, Mesh
from thunder_zero.plan.outer import Outer
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import Policy
from thunder_zero.schedule.ops import Compute, Gather, Launch, Op, Reduce, Wait, Work
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import Timeline, Value
from thunder_zero.tools.devices.device import A100, DEVICES, H100, TPU_V2, Cost, Device, Lane, Link, Points
from thunder_zero.tools.plan.places import on_link
from thunder_zero.tools.time.estimate import compute_dtype, ring, simulate, step_time
from thunder_zero.tools.time.lanes import Lanes
from thunder_zero.tools.time.sites import Exchanges, exchanges_of

PAGE = (Path(__file__).parents[2] / "docs/cost-model.md").read_text()
PLAN = Plan(Policy(3), Mesh.of(2), ())
SECOND = Device(  # a FLOP, a byte of traffic and a byte on a wire each take one second
    "one",
    {"float32": 1.0},
    1.0,
    1,
    intra_node=Link(1.0),
    inter_node=Link(0.5, latency_seconds=0.25),
    devices_per_node=2,
)


def lanes(text: str, *, overlaps: bool) -> list[str]:
    """Return the spans of a step such as ``gather a 2; compute 3; wait a``, with seconds.

    ``across`` launches on the wire between copies of the model.
    """
    ops: list[Op] = []
    costs = []
    for line in split(text):
        kind, *words = line.split()
        name = "y" if kind == "compute" else words.pop(0)
        if kind in ("gather", "across"):
            ops.append(Gather((f"t_{name}",), f"fut_{name}", ()))
            lane = Lane.SHARD if kind == "gather" else Lane.REPLICATE
            costs.append(Cost(lane=lane, wire_seconds=float(words[0])))
        else:
            ops.append(Wait(Gather((), f"fut_{name}", ()), (name,)) if kind == "wait" else Compute(("x",), (name,)))
            costs.append(Cost(seconds=sum(map(float, words))))
    return spans_in_words(simulate(Timeline(tuple(ops), {}, PLAN), costs, replace(SECOND, overlaps=overlaps)))


STEP = "gather a 2; gather b 2; compute 1; wait a; compute 3; wait b; compute 1"


def spans_of(shared: frozenset[Lane]) -> list[str]:
    """Simulate an all-reduce of slices, which takes one second, during a gather, which takes four."""
    busy = Lanes(shared)
    busy.launch(0, "a", Cost(lane=Lane.SHARD, wire_seconds=4.0))
    busy.compute(1, 1.0)
    busy.launch(2, "b", Cost(lane=Lane.TENSOR, wire_seconds=1.0))
    busy.wait(3, "b")
    busy.compute(4, 0.5)
    busy.wait(5, "a")
    return spans_in_words(busy.spans())


def test_gathers_run_behind_collectives_of_slices() -> None:
    separate, sharing = spans_of(frozenset()), spans_of(frozenset({Lane.SHARD, Lane.TENSOR}))
    assert separate == split("shard 0 4; compute 0 1; tensor 1 2; wait 1 2; compute 2 2.5; wait 2.5 4")
    assert sharing == split("shard 0 5; compute 0 1; tensor 1 3; wait 1 3; compute 3 3.5; wait 3.5 5")


@pytest.mark.parametrize(
    ("step", "overlaps", "expected"),
    [
        # a wire carries one launch at a time, beside compute; b has arrived at its wait
        (STEP, True, "shard 0 2; shard 2 4; compute 0 1; wait 1 2; compute 2 5; compute 5 6"),
        (STEP, False, "shard 0 2; wait 0 2; shard 2 4; wait 2 4; compute 4 5; compute 5 8; compute 8 9"),
        # the wires of hybrid sharding run side by side
        ("gather a 1; across b 2; gather c 1; wait b", True, "shard 0 1; replicate 0 2; shard 1 2; wait 0 2"),
        # a launch waits for the computation of its gradient
        ("compute 2; gather a 1; wait a", True, "compute 0 2; shard 2 3; wait 2 3"),
    ],
)
def test_lanes_are_busy_at_the_expected_times(step: str, overlaps: bool, expected: str) -> None:
    assert lanes(step, overlaps=overlaps) == split(expected)


def test_a_step_has_the_figures_of_arithmetic() -> None:
    # A gather of 4 bytes, a product of 6 FLOPs and 12 bytes of traffic, and the product recomputed.
    param = make_param("w", (2,), "", PLAN.policy)
    values = {name: Value(4, "float32") for name in ("x", "w", "y")}
    product = Compute(("x", "w"), ("y",), work=Work.MATMUL, flops=6)
    launch = Gather(("t_w",), "fut", ("w",))
    ops = (launch, Wait(launch, ("w",)), product, replace(product, repeated=True))
    estimate = step_time(Timeline(ops, values, replace(PLAN, params=(param,))), SECOND)
    assert [cost.seconds for cost in estimate.costs] == [0, 0, 12, 12]
    assert (estimate.seconds, estimate.compute_seconds, estimate.exposed_seconds) == (28, 24, 4)
    assert (estimate.flops, estimate.busiest_bytes, estimate.wire_seconds) == (12, 4, {Lane.SHARD: 4})
    assert [(span.op, span.lane) for span in estimate.critical_path] == [(0, "shard"), (2, "compute"), (3, "compute")]
    assert estimate.mfu == 6 / 28  # recomputed FLOPs do not count
    assert estimate.tokens_per_second(7) == 0.25
    assert str(estimate).startswith("step 28 s on one: compute 24 s, exposed communication 4 s")
    assert str(estimate).replace("\n ", "").endswith("a bound, expect 42.4 s to 49.1 s")


def launch_of(
    shape: tuple[int, ...], kind: type[Launch], world: int, copies: int, **fields: object
) -> tuple[Launch, Timeline]:
    param = make_param("w", shape, "", Policy(3), dtype=torch.bfloat16, **fields)
    op = kind(("g",), "fut", ("w",))
    return op, Timeline((op,), {}, Plan(Policy(3), Mesh.of(world, replicas=copies), (param,)))


def test_a_launch_has_the_ring_of_its_ranks() -> None:
    # 5 rows of 3 bfloat16 on 2 ranks: the busiest rank owns 3 rows, 18 bytes.
    inside = Lane.SHARD, ("gather", 2, 1, 18, 1, 1)
    assert [ring(*launch_of((5, 3), Gather, 2, copies)) for copies in (1, 4)] == [inside, inside]
    op, timeline = launch_of((5, 3), Reduce, 2, 4)
    assert ring(op, timeline) == (Lane.SHARD, ("scatter", *inside[1][1:]))
    across = Lane.REPLICATE, ("all_reduce", 4, 2, 2 * 14, 6, 1)  # 13.5 elements
    assert ring(Reduce(("g",), "fut", ("w",), REPLICATE), timeline) == across
    op, timeline = launch_of((5, 3), Reduce, 2, 2, sharded=False)
    in_full = Lane.REPLICATE, ("all_reduce", 4, 1, 2 * 23, 6, 1)  # 22.5 elements: 2 * 3 / 4 of 15
    assert ring(Reduce(("g",), "fut", ("w",), ALL), timeline) == in_full
    assert ring(*launch_of((5, 3), Gather, 1, 1)) is None


@pytest.mark.slow
@given(timelines(), st.booleans())
def test_the_critical_path_is_as_long_as_the_step(timeline: Timeline, overlaps: bool) -> None:
    timeline = run(timeline)
    estimate = step_time(timeline, replace(SECOND, overlaps=overlaps, devices_per_node=3))
    path = estimate.critical_path
    assert sum(span.seconds for span in path) == pytest.approx(estimate.seconds)
    assert all(span.end == following.start for span, following in pairwise(path))
    assert estimate.compute_seconds + estimate.exposed_seconds == pytest.approx(estimate.seconds)
    for lane in Lane:
        spans = [span for span in estimate.spans if span.lane is lane]
        assert all(span.end <= following.start for span, following in pairwise(spans))
    wires = sum(estimate.wire_seconds.values())
    assert estimate.exposed_seconds <= wires * (1 + 1e-9)
    assert overlaps or estimate.exposed_seconds == pytest.approx(wires)


def traffic(work: Work, *, reads: tuple[str, ...] = ("x", "table"), updates: tuple[str, ...] = ()) -> int:
    """Return the traffic of an operation that writes 8 bytes."""
    values = {"x": Value(4, "float32"), "table": Value(100, "float32"), "y": Value(8, "float32")}
    values["wide"] = Value(64, "float32", base="x")  # expanded
    op = Compute(reads, ("y",), work=work, updates=updates)
    return Timeline((op,), values, PLAN).moved(op)


@pytest.mark.parametrize(
    ("delay", "seconds", "spans", "mean"),
    [
        (0, 12.0, "site 10 13; wait 10 13", 13.0),  # an exchange in four steps
        (1, 12.0, "site 7.5 10.5; wait 10 10.5", 10.5),
        (2, 12.0, "site 7 10", 10.0),
    ],
)
def test_exchanges_wait_for_a_step_or_run_beside_it(delay: int, seconds: float, spans: str, mean: float) -> None:
    exchanges = Exchanges(Outer(sync_every=4, delay=delay), (0,), (seconds,))
    assert spans_in_words(tuple(exchanges.spans(0, 10.0))) == split(spans)
    assert exchanges.mean_seconds(10.0) == mean
    assert exchanges.hidden_from(10.0) == 3  # a delay of two steps


def test_all_ranks_of_a_site_share_its_link() -> None:
    # 3 sites: a rank sends two parts of its rows, and the mean of one to both other sites. Rows have 4 bytes.
    params = tuple(make_param(f"{unit}.w", (numel, 1), unit, Policy(3)) for unit, numel in (("a", 12), ("b", 24)))
    plan, outer = Plan(Policy(3), Mesh.of(2), params), Outer(sync_every=4, fragments=2, sites=3)
    exchanges = exchanges_of(plan, outer, Link(2.0, 0.25), SECOND)
    assert exchanges.sent == (2 * 4 * 2 * 4, 2 * 4 * 4 * 4)
    assert exchanges.seconds == (64 / 2 + 0.5, 128 / 2 + 0.5)
    assert exchanges.mean_seconds(10.0) == 10 + (32.5 + 64.5) / 4
    assert exchanges.hidden_from(10.0) == 2 * (7 + 1)  # the longer one takes seven steps
    of_rate = exchanges_of(plan, outer, "16 bit/s", SECOND)  # of the bits on Ethernet, TCP's payload is 94%
    assert of_rate.seconds == pytest.approx([sent / 2 * 1538 / 1448 + 0.5 for sent in exchanges.sent])


def test_collectives_of_a_measured_device_leave_it_on_its_link_to_others() -> None:
    # One of the three peers of each of two ranks is on its side.
    curves: dict[str, Points] = {name: ((0.0, 0.0), (1.0, 1.0)) for name in ("pointwise", "matmul float32")}
    measured = replace(SECOND, curves=curves)
    assert measured.leaving(4, 1, 30) == 2 * 30 * 2 / 3
    assert measured.collective("all_reduce", 4, 1, 30, 6, 1) == Cost(wire_seconds=30 * 2 / 3 / 0.5 + 2 * 0.25)
    for name, seconds in {"launch": 2.0, "finish": 1.0, "taken": 10.125, "tensor": 3.0}.items():
        curves[f"all_reduce {name}"] = ((0.0, 0.0), (1.0, 0.0), (30.0, seconds)) if name != "tensor" else ((1.0, 3.0),)
    together = replace(measured, curves=curves).collective("all_reduce", 4, 1, 30, 6, 2)
    assert together == Cost(wire_seconds=40.5, load=0.25, launch_seconds=2 + 3, finish_seconds=1), "of the core"
    place = on_link(replace(measured, devices_per_node=4), Link(8.0), 1)  # calibrated with ranks at other places
    assert (place.devices_per_node, place.inter_node) == (1, Link(8.0))
    with pytest.raises(ValueError, match="was calibrated with 4 ranks, not with 2"):
        on_link(replace(measured, devices_per_node=4), Link(8.0), 2)
    assert SECOND.leaving(4, 1, 30) == 30
    assert SECOND.leaving(2, 1, 30) == 0


def test_traffic_counts_the_bytes_read_and_written() -> None:
    assert traffic(Work.POINTWISE) == 4 + 100 + 8
    assert traffic(Work.POINTWISE, reads=("x", "x")) == 4 + 8
    assert traffic(Work.POINTWISE, reads=("wide",)) == 4 + 8
    assert traffic(Work.POINTWISE, reads=("x", "table"), updates=("table",)) == 4 + 100
    assert traffic(Work.INDEX) == 4 + 8 + 8  # the rows that are written
    assert traffic(Work.VIEW) == traffic(Work.NONE) == 0
    launches = model(Policy(3), "a.w")
    assert launches.moved(launches.ops[0]) == 0


def test_a_product_computes_in_the_dtype_of_its_inputs() -> None:
    values = {"i": Value(4, "int64"), "x": Value(4, "bfloat16"), "w": Value(4, "float32")}
    for reads, dtype in {("i", "x", "w"): "bfloat16", ("i",): "int64", (): ""}.items():
        assert compute_dtype(Compute(reads, ()), Timeline((), values, PLAN)) == dtype


def test_a_ring_is_as_fast_as_its_slowest_link_and_takes_its_latency_at_each_step() -> None:
    # A node of eight devices has links of 450 GB/s, and a network card of 50 GB/s for each device.
    gigabytes = {(8, 1): 450, (16, 1): 8 * 50, (2, 8): 50, (4, 4): 100, (2, 4): 450}
    assert {place: H100.ring(*place).bytes_per_second / 1e9 for place in gigabytes} == gigabytes
    assert Link(10.0, latency_seconds=0.5).seconds(20, steps=3) == 3.5
    assert H100.ring(8).latency_seconds == 3.4e-6
    assert H100.ring(2, 8).latency_seconds == pytest.approx(14e-6)
    assert H100.ring(24).seconds(0, steps=23) == pytest.approx(21 * 3.4e-6 + 2 * 14e-6)  # two steps leave a node


def test_an_error_names_what_a_device_lacks() -> None:
    rows: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: TPU_V2.peak("float32"), "TPU v2 has FLOP/s for bfloat16, but the step computes in 'float32'"),
        (lambda: TPU_V2.ring(512), "TPU v2 has no link to other nodes, but 512 ranks"),
        (lambda: replace(A100, memory_bytes=0), "memory_bytes is 0; give a number above 0"),
        (lambda: replace(A100, flops_per_second={"float32": -1}), "flops_per_second of 'float32' is -1"),
        (lambda: Link(1.0, -1), "latency_seconds is -1"),
    )
    for call, words in rows:
        fails(call, "ValueError", words)


def sizes_in(cell: str) -> list[float]:
    units = {"MiB": 1 << 20, "GiB": 1 << 30, "TB/s": 1e12, "GB/s": 1e9}
    sizes = re.findall(r"([\d.]+) ([MGT]i?B(?:/s)?)", cell.replace(",", ""))
    return [float(number) * units[unit] for number, unit in sizes]


def test_the_page_has_the_packages_devices() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(DEVICES)
    assert len({device.name for device in DEVICES.values()}) == len(DEVICES)
    for name, peaks, memory, inside, across in rows:
        device, dtypes = DEVICES[name], re.findall(r"(\w+): ([\de.]+)", peaks)
        assert {dtype: float(flops) for dtype, flops in dtypes}.items() <= device.flops_per_second.items()
        assert sizes_in(memory) == pytest.approx([device.memory_bytes, device.memory_bytes_per_second])
        assert sizes_in(inside) == [device.intra_node.bytes_per_second]
        assert inside.replace(",", "").startswith(f"{device.devices_per_node} ")
        assert sizes_in(across) == ([] if device.inter_node is None else [device.inter_node.bytes_per_second])


@pytest.mark.parametrize(
    ("kind", "fields", "before", "after"),
    [
        (Gather, {}, 0, 0),
        (Reduce, {}, 0, 0),
        (Gather, {"compute_dtype": torch.bfloat16}, 4 * 6, 0),  # the shard
        (Reduce, {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, 8 * 6, 0),  # the full gradient
        (Reduce, {"reduce_dtype": torch.bfloat16}, 8 * 6, 4 * 6),  # the mean comes back to float32
        (Gather, {"gather_format": Int8(4)}, 16 + 8, 2 * 8 + 32),  # a payload is 8 bytes
        (Reduce, {"reduce_format": Int8(4)}, 32 + 8, 8 + 16),  # the peer's part
    ],
)
def test_a_launch_has_the_traffic_of_both_ends(
    kind: type[Launch], fields: dict[str, object], before: int, after: int
) -> None:
    # Encoding reads and writes before the launch, decoding after the wait.
    launch = kind(("given",), "handle", ("w",))
    plan = Plan(Policy(3), Mesh.of(2), (make_param("w", (8,), "", Policy(3), **fields),))
    timeline = Timeline((launch,), {"given": Value(32, "float32")}, plan)
    (cost,) = step_time(timeline, SECOND).costs
    assert (cost.launch_seconds, cost.finish_seconds, cost.traffic_bytes) == (before, after, before + after)
    slopes = {"pointwise": 1, "matmul float32": 1, "encode": 2, "decode": 3}
    measured = replace(
        SECOND, devices_per_node=1, curves={name: ((0, 0), (1, slope)) for name, slope in slopes.items()}
    )
    (cost,) = step_time(timeline, measured).costs
    in_int8 = any(isinstance(value, Int8) for value in fields.values())
    assert (cost.launch_seconds, cost.finish_seconds) == ((2 * before, 3 * after) if in_int8 else (before, after))


def test_a_copy_on_several_nodes_shares_its_wire_with_other_copies() -> None:
    # Rings inside a copy and rings across copies both use all network cards of a node.
    op, timeline = launch_of((5, 3), Reduce, 4, 2)
    timeline = timeline.with_ops((op, Reduce(("g",), "fut", ("w",), REPLICATE)))
    for devices, lanes in {4: [Lane.SHARD, Lane.REPLICATE], 2: [Lane.SHARD, Lane.SHARD]}.items():
        costs = step_time(timeline, replace(SECOND, devices_per_node=devices)).costs
        assert [cost.lane for cost in costs] == lanes
