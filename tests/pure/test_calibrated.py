"""Calibrated devices: curves, the compute that collectives take, and files. Fixed constants; no clock is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.errors import fails
from tests.harness.timelines import make_param, spans_in_words, split
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import Policy
from thunder_zero.schedule.ops import Compute, Reduce, Wait, Work
from thunder_zero.schedule.timeline import Timeline, Value
from thunder_zero.tools.devices.calibrate import wire_seconds
from thunder_zero.tools.devices.device import Cost, Device, Lane, Link, load_device, rising, save_device, seconds_at
from thunder_zero.tools.time.estimate import step_time
from thunder_zero.tools.time.lanes import Lanes, Span

LINE = ((0.0, 0.0), (100.0, 1.0))
SENDS = {
    "launch": ((0.0, 0.5),),
    "wire": LINE,
    "finish": ((0.0, 0.25),),
    "taken": ((0.0, 0.0), (100.0, 0.5)),
    "tensor": ((0.0, 0.0), (1.0, 0.0)),
}
WORK = {
    "matmul float32": LINE,
    "attention float32": ((0.0, 0.0), (100.0, 4.0)),
    "pointwise": ((0.0, 0.125), (10.0, 1.0)),
    "view": ((0.0, 0.5),),
}
COLLECTIVES = {f"{kind} {name}": SENDS[name] for kind in ("gather", "scatter", "all_reduce") for name in SENDS}
DEVICE = Device(
    "ours",
    {"float32": 100.0},
    10.0,
    1 << 30,
    intra_node=Link(100.0),
    devices_per_node=2,
    curves=WORK | COLLECTIVES | {"scatter tensor": ((0.0, 0.0), (1.0, 2.0))},
)
ALONE = replace(DEVICE, devices_per_node=1, curves=WORK)


def test_a_curve_is_a_line_from_point_to_point() -> None:
    curve = ((10.0, 1.0), (20.0, 3.0), (40.0, 4.0))
    assert [seconds_at(curve, size) for size in (0, 10, 15, 20, 30, 40, 80)] == [1, 1, 2, 3, 3.5, 4, 8]
    assert seconds_at(((0.0, 0.5),), 7) == 0.5
    assert rising([(4.0, 2.0), (1.0, 3.0), (8.0, 5.0)]) == ((1, 3), (4, 3), (8, 5)), "no larger size is faster"


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-9, 1e3)), min_size=1, unique_by=lambda point: point[0]))
def test_a_larger_size_takes_no_less_time(points: list[tuple[float, float]]) -> None:
    curve = rising(points)
    sizes = sorted([size * factor for size, _ in points for factor in (0.5, 1, 1.5)])
    seconds = [seconds_at(curve, size) for size in sizes]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(seconds))


def test_lines_take_the_seconds_of_their_class_of_work() -> None:
    assert DEVICE.seconds(50, "float32", 7, "matmul") == 0.5
    assert DEVICE.seconds(50, "float32", 7, "attention") == 2
    assert DEVICE.seconds(50, "float32", 7, "convolution") == 0.5  # not measured, so as products
    assert DEVICE.seconds(0, "float32", 10, "pointwise") == DEVICE.seconds(0, "", 10, "reduction") == 1
    assert DEVICE.seconds(0, "float32", 0, "view") == 0.5


def test_unmeasured_sizes_dtypes_and_ranks_are_refused() -> None:
    for points in ((), ((1, -1),), ((1, float("nan")),), ((2, 1), (1, 2)), ((1, 2), (2, 1))):
        wrong = partial(replace, DEVICE, curves=WORK | {"view": points})
        fails(wrong, "ValueError", "the curve 'view' has the points")
    seconds = partial(DEVICE.seconds, 50, "bfloat16", 7, "matmul")
    fails(seconds, "ValueError", "ours has FLOP/s for float32, but ", " in 'bfloat16'")
    for device, ring, words in (
        (DEVICE, (4, 1, 100, 3, 1), "collectives of 2 ranks, but the step has one of 4 ran"),
        (DEVICE, (2, 2, 100, 1, 1), "of 2 ranks, 2 apart; calibrate under torchrun with"),
        (ALONE, (2, 1, 100, 1, 1), "was calibrated with collectives of one rank alone"),
    ):
        fails(partial(device.collective, "gather", *ring), "ValueError", words)


def reduce_of(*, sharded: bool) -> Timeline:
    """Build a reduction of two float32 gradients of 10 rows and 5 columns, beside compute of 150 FLOPs."""
    params = tuple(make_param(name, (10, 5), "", Policy(3), sharded=sharded) for name in ("v", "w"))
    launch = Reduce(("gv", "gw"), "fut", ("v", "w"))
    ops = (
        launch,
        Compute(("x",), ("y",), work=Work.MATMUL, flops=150),
        Wait(launch, ("mv", "mw")),
        Compute(("mv", "mw"), (), work=Work.NONE),
    )
    return Timeline(ops, {"x": Value(4, "float32")}, Plan(Policy(3), Mesh.of(2), params))


def test_a_launch_and_a_wait_delay_compute() -> None:
    # The busiest rank sends 200 of 400 B, in 2 s of wire that take 1 s of the core: half of it.
    timeline = reduce_of(sharded=True)
    cost = step_time(timeline, DEVICE).costs[0]
    assert cost == Cost(0, 0, 200, 0.0, Lane.SHARD, 2.0, load=0.5, launch_seconds=2.5, finish_seconds=0.25)
    step = step_time(timeline, DEVICE)
    # beside the wire compute has half of the core for 2 s; then it has 0.5 s to go
    spans = "compute 0 2.5; shard 2.5 4.5; compute 2.5 5; compute 5 5.25; compute 5.25 5.25"
    assert spans_in_words(step.spans) == split(spans)
    assert (step.seconds, step.compute_seconds, step.exposed_seconds) == (5.25, 5.25, 0)
    assert step_time(reduce_of(sharded=False), DEVICE).costs[0].wire_seconds == 4.0


def simulate(load: float, *compute: float, wires: int = 1) -> list[Span]:
    """Run rings of 2 s each, which take a share of the core, beside computations; then wait for the last ring."""
    lanes = Lanes()
    for number in range(wires):
        lanes.launch(number, f"fut{number}", Cost(lane=Lane.SHARD, wire_seconds=2.0, load=load))
    for number, seconds in enumerate(compute):
        lanes.compute(wires + number, seconds)
    lanes.wait(wires + len(compute), f"fut{wires - 1}")
    return list(lanes.spans())


def test_a_ring_in_flight_takes_its_share_of_the_core_but_at_most_half() -> None:
    def spans_of(load: float, compute: float, wires: int = 1) -> str:
        return "; ".join(spans_in_words(simulate(load, compute, wires=wires)))

    assert spans_of(0.25, 3) == "shard 0 2; compute 0 3.5"
    assert spans_of(0.25, 0.75) == "shard 0 2; compute 0 1; wait 1 2"
    assert spans_of(0.0, 3) == "shard 0 2; compute 0 3"
    assert spans_of(1.0, 3) == "shard 0 4; compute 0 5"
    assert spans_of(1.0, 1, wires=2) == "shard 0 3; shard 3 5; compute 0 2; wait 2 5"


@given(st.floats(0, 1), st.lists(st.floats(0.01, 5), min_size=1, max_size=6), st.integers(1, 4))
def test_no_work_of_the_core_is_lost(load: float, compute: Sequence[float], wires: int) -> None:
    result = simulate(load, *compute, wires=wires)
    computed = sum(span.seconds for span in result if span.lane is Lane.COMPUTE and not span.waits)
    end = max(span.end for span in result)
    assert computed >= sum(compute) * (1 - 1e-9)
    assert computed <= sum(compute) + load * 2 * wires + 1e-6
    assert end >= max(2 * wires, sum(compute)) * (1 - 1e-9)
    assert end <= 2 * wires + sum(compute) + 1e-6


def test_the_wire_seconds_of_a_collective_are_measured_in_a_train_of_two() -> None:
    # Two collectives of 5 s whose launch and wait take 1 s. A launch either overlaps the wire or delays it.
    for taken, elapsed in ((0.0, 11.0), (5.0, 12.0)):
        assert wire_seconds(elapsed, held=1.0, taken=taken, burst=2) == pytest.approx(5.0)


def test_a_saved_device_is_read_back(tmp_path: Path) -> None:
    save_device(DEVICE, tmp_path / "device.json")
    assert load_device(tmp_path / "device.json") == DEVICE


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"format": "other"},
            "device.json is no device, or damaged: it is not of the format 'thunder_zero device 2'; ca",
        ),
        (
            {"curves": {"pointwise": [[1, 1]]}},
            "damaged: it has no curve of matmul float32 work; calibrate this machine",
        ),
        ({"curves": {"pointwise": [[1, -1]]}}, "damaged: the curve 'pointwise' has the points"),
        ({"curves": {"pointwise": 7}}, "damaged: "),
        ({"curves": []}, "damaged: "),
        ({"devices_per_node": 0}, "damaged: devices_per_node is 0"),
        ({"ranks": 2}, "damaged: .* 'ranks'"),
        ("{", "is no device"),
        ("[]", "is no device"),
        ('{"format": "thunder_zero device 2"}', "it has no 'intra_node'"),
    ],
)
def test_damaged_and_foreign_files_are_refused(content: dict[str, object] | str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    save_device(DEVICE, path)
    path.write_text(content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content))
    with pytest.raises(ValueError, match=words):
        load_device(path)
