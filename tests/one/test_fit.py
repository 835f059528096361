"""``tools.fit`` returns a policy that fits by the exact forecast, or refuses with numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import thunder_zero as tz
from tests.harness.errors import all_refused
from tests.harness.traced import Chain, ResidualBlock, traced
from thunder_zero.plan.amounts import size
from thunder_zero.tools.dry_run import ProgramSource
from thunder_zero.tools.forecast.figures import Holds
from thunder_zero.tools.forecast.memory import recorder_of
from thunder_zero.tools.forecast.recorder import Recorder
from thunder_zero.tools.plan.fit import trade_off
from thunder_zero.tools.plan.search import CHOICES, Candidate, Search, with_choices

import thunder

WIDTH, ROWS, BLOCKS = 64, 64, 3
PLENTY = 1 << 30
ASKED = tz.Policy(prefetch=1)  # keeps the last of three units
UNITS = tuple(f"0.{number}" for number in range(BLOCKS))
SHORT, LONG = (ROWS, WIDTH), (8 * ROWS, WIDTH)  # with the long input, activations weigh more than parameters


def net() -> nn.Module:
    """Build three units and a head."""
    return Chain(Chain(*(ResidualBlock(WIDTH) for _ in range(BLOCKS))), nn.Linear(WIDTH, 8))


def on_meta(make: Callable[[], nn.Module] = net) -> nn.Module:
    with torch.device("meta"):
        return make()


@cache
def recorded(start: tz.Policy = tz.ZERO3, make: Callable[[], nn.Module] = net) -> tuple[ProgramSource, Recorder]:
    """Capture a net once, and record its lines."""
    source = ProgramSource(on_meta(make), (torch.empty(SHORT),), {}, tz.ZERO3, tz.schedule.Mesh.of(2))
    return source, recorder_of(source.under(start), None, torch.optim.SGD)


def peak(policy: tz.Policy, shape: tuple[int, ...] = SHORT, *, fused: bool = False) -> int:
    return tz.tools.memory(traced(net, shape, policy, fused=fused), optimizer=torch.optim.SGD).peak


def fit(memory_bytes: int, shape: tuple[int, ...] = SHORT, module: Any = None, **options: Any) -> tz.Policy:
    options = {"world_size": 2, "optimizer": torch.optim.SGD, "file": StringIO(), **options}
    return tz.tools.fit(module or on_meta(), torch.empty(shape), memory_bytes=memory_bytes, **options)


@pytest.mark.slow
def test_a_policy_fits_and_costs_less_with_more_memory() -> None:
    out = StringIO()
    plenty = fit(PLENTY, file=out, policy=ASKED)
    assert plenty.keep_unsharded == UNITS  # no second gather
    assert plenty.recompute_units == ()
    assert "<- chosen" in out.getvalue()
    most = peak(plenty)
    assert fit(int(1.02 * most), policy=ASKED) == plenty
    tight = fit(int(0.85 * most), policy=ASKED)
    assert peak(tight) <= int(0.85 * most)
    assert tight != plenty


@pytest.mark.slow
def test_fit_takes_keyword_inputs_a_stage_and_a_fuser() -> None:
    module, x = Chain(ResidualBlock(8), ResidualBlock(8)), torch.empty(8, 8)
    options: dict[str, Any] = {"memory_bytes": PLENTY, "world_size": 2, "file": StringIO()}
    kept = tz.tools.fit(module, x=x, policy=tz.Policy(prefetch=0), fuse="inductor", **options).keep_unsharded
    assert kept == ("0", "1")
    policy = tz.tools.fit(module, x=x, policy=2, **options)
    assert (policy.stage, policy.keep_unsharded, policy.recompute_units) == (2, (), ())


@pytest.mark.slow
def test_a_refusal_has_the_least_bytes() -> None:
    with pytest.raises(tz.tools.DoesNotFit) as caught:
        fit(1000, LONG)
    text, least = str(caught.value), caught.value.least_bytes
    assert text.startswith("no policy fits into 0.98 KiB: the least that was found takes ")
    assert "computed again and 0 B in flight" in text
    for words in (" more, with ", "twice the ranks (about ", "cpu_offload on GPUs (about "):
        assert words in text
    assert least <= peak(tz.Policy(bucket_bytes=0, in_flight_bytes=0, recompute_units=UNITS), LONG)
    assert peak(fit(least, LONG), LONG) <= least


def even() -> nn.Module:
    return Chain(*(ResidualBlock(WIDTH, nn.functional.gelu) for _ in range(3)))


class Uneven(ResidualBlock):
    def __init__(self, hidden: int) -> None:
        super().__init__(WIDTH, nn.functional.gelu)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)


def uneven() -> nn.Module:
    return Chain(*map(Uneven, (64, 512, 128, 256)))


@pytest.mark.slow
def test_a_refusal_recommends_only_what_applies() -> None:
    # It names no units if there are none, and ``recompute="cheap"`` only if the policy lacks it.
    policy = tz.Policy(recompute="none", unit_of=lambda module: ())
    cheap = tz.tools.memory(traced(even, LONG, replace(policy, recompute="cheap")))
    result = tz.tools.memory(traced(even, LONG, policy))
    kinds = Holds.INPUT, Holds.SAVED, Holds.TEMPORARY, Holds.LOSS
    batch = sum(result.by_kind.get(kind, 0) for kind in kinds)
    assert result.by_kind[Holds.INPUT] == 4 * 8 * ROWS * WIDTH
    assert cheap.peak < result.peak
    with pytest.raises(tz.tools.DoesNotFit) as caught:
        fit(1000, LONG, on_meta(even), policy=policy, optimizer=None)
    text = str(caught.value)
    assert "unit" not in text
    assert f"half the batch (about {size(batch // 2)} less)" in text
    assert f'recompute="cheap" (about {size(result.peak - cheap.peak)} less)' in text


@pytest.mark.slow
def test_units_are_not_recomputed_if_memory_allows() -> None:
    out = StringIO()
    policy = fit(PLENTY, LONG, file=out, policy=tz.Policy(recompute="units"))
    assert (policy.recompute, policy.recompute_units) == ("cheap", ())
    rows = out.getvalue().splitlines()
    assert len(rows) == len({row.split("█")[0] for row in rows})
    kept, recomputed = next(row for row in rows if "<- chosen" in row).split("in flight")[0].split()[4:6]
    assert (kept, recomputed) == (str(BLOCKS), "0")


@pytest.mark.slow
@pytest.mark.parametrize(("fuse", "needed"), [(None, 0), ("inductor", 1)])  # needed: to fit at all
def test_prices_decide_between_recomputing_and_regathering_units(fuse: str | None, needed: int) -> None:
    budget = int(0.95 * peak(tz.Policy(keep_unsharded=UNITS), LONG, fused=fuse is not None))
    assert len(fit(budget, LONG, flops_per_byte=1e9, fuse=fuse).recompute_units) > needed
    assert len(fit(budget, LONG, flops_per_byte=0.01, fuse=fuse).recompute_units) == needed


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_one_capture_gives_the_traces_of_each_policy(fused: bool) -> None:
    chosen = tz.Policy(keep_unsharded=UNITS[1:], recompute_units=UNITS[:2])
    mesh, x = tz.schedule.Mesh.of(2), torch.empty(SHORT)
    captured = ProgramSource(on_meta(), (x,), {}, tz.ZERO3, mesh, fuse="inductor" if fused else None)
    stages = [tz.Policy(stage, recompute="units") for stage in (0, 1, 2, 0)]
    for policy in (tz.ZERO3, chosen, tz.Policy(bucket_bytes=0, in_flight_bytes=0), *stages, tz.ZERO3):
        result, expected = captured.under(policy), traced(net, SHORT, policy, fused=fused)
        assert (result.timeline, result.lifted, result.plan) == (expected.timeline, expected.lifted, expected.plan)
        for phase in ("forward", "backward"):
            text, expected_text = (str(getattr(traces, phase)).partition("\n")[2] for traces in (result, expected))
            assert text == expected_text  # the first line has the seconds of a pass


class OneSize(Search):
    """A search with only the bucket bytes of the policy."""

    @property
    def sized(self) -> tuple[tz.Policy, ...]:
        return super().sized[:1]


@pytest.mark.slow
@pytest.mark.parametrize("make", [net, uneven])
@pytest.mark.parametrize("start", [tz.ZERO3, tz.Policy(bucket_bytes=0, in_flight_bytes=0)], ids=["buckets", "none"])
def test_a_search_is_no_worse_than_all_schedules(start: tz.Policy, make: Callable[[], nn.Module]) -> None:
    source, recorder = recorded(start, make)
    search = OneSize(recorder, start, lambda policy: source.schedule(policy).timeline)
    every = []
    for choices in product(CHOICES, repeat=len(search.units)):
        policy = with_choices(dict(zip(search.units, choices, strict=True)), search.sized[0])
        every.append(Candidate(recorder, source.schedule(policy).timeline))
    least, most = min(one.peak for one in every), max(one.peak for one in every)
    for step in range(11):
        budget = least + (most - least) * step // 10
        best = search.best(budget)
        assert best is not None
        assert best.peak <= budget
        assert best.cost <= min(one.cost for one in every if one.peak <= budget)
    assert search.best(least - 1) is None
    assert len(search.evaluated) < len(every)


@pytest.mark.slow
def test_a_schedule_of_the_same_lines_has_the_memory_of_its_traces() -> None:
    source, recorder = recorded()
    for policy in (ASKED, tz.Policy(keep_unsharded=UNITS[:1], recompute_units=UNITS[1:]), tz.Policy(bucket_bytes=0)):
        timeline = source.schedule(policy).timeline
        assert timeline == traced(net, SHORT, policy).timeline
        assert Candidate(recorder, timeline).peak == peak(policy)


def test_a_candidate_has_figures_for_each_unit() -> None:
    source, recorder = recorded()
    policy = tz.Policy(reshard_after_forward=True, prefetch=0, in_flight_bytes=0)
    policies = policy, replace(policy, keep_unsharded=UNITS)
    plain, kept = (Candidate(recorder, source.schedule(one).timeline) for one in policies)
    assert plain.units == UNITS
    left = [sum(part.left for part in plain.parts[:count]) for count in range(len(plain.parts))]
    assert max(before + part.peak for before, part in zip(left, plain.parts, strict=True)) == plain.peak
    assert kept.sent < plain.sent  # no second gather
    assert kept.cost < plain.cost
    pairs = zip(kept.parts[1:-1], plain.parts[1:-1], strict=True)
    assert all(part.left > other.left for part, other in pairs)  # the parameter stays
    assert plain.flops == kept.flops == 0


def test_the_trade_off_counts_units_that_the_schedule_chose() -> None:
    source, recorder = recorded()
    policies = (ASKED, replace(ASKED, keep_unsharded=UNITS[:1]))
    named_none, named_first = (Candidate(recorder, source.schedule(policy).timeline) for policy in policies)
    assert named_none.kept == set(UNITS[2:])  # none is named
    assert named_first.kept == {UNITS[0], UNITS[2]}
    again = replace(named_none)
    rows = trade_off([named_none, again, named_first], again).splitlines()[1:]
    assert ["<- chosen" in row for row in rows] == [True, False]


def test_wrong_arguments_are_refused() -> None:
    jitted, ninth = thunder.jit(nn.Linear(2, 2)), tz.Policy(keep_unsharded=("0.9",))
    all_refused(
        (lambda: fit(0), ValueError, ("memory_bytes is 0", "give a number of bytes")),
        (lambda: fit(PLENTY, module=jitted), TypeError, ("got ThunderModule", "pass the module before")),
        (lambda: fit(PLENTY, world_size=None), ValueError, ("world_size is None", "no process group")),
        (lambda: fit(PLENTY, flops_per_byte=0), ValueError, ("flops_per_byte is 0", "give a number above 0")),
        (lambda: fit(PLENTY, flops_per_byte="x"), ValueError, ("flops_per_byte is 'x'", "give a number above 0")),
        (lambda: fit(PLENTY, policy=ninth), ValueError, ("'0.9'", "no unit", "'0.0'")),
    )
