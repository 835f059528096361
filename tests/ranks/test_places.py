"""Ranks that do different things: an error on both at once, which names both places, and nothing is taken for another.

Rank 0 is the one that does something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import raised, raised_as
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool, everyone
from thunder_zero.comm import places
from thunder_zero.comm.handle import Waitable
from thunder_zero.comm.native import OneByOne
from thunder_zero.comm.pairwise import Exchange
from thunder_zero.comm.placed import Placed
from thunder_zero.comm.places import doing
from thunder_zero.comm.small_collectives import all_gather_object, barrier, broadcast_object_from_rank_0, next_number
from thunder_zero.comm.transport import Transport
from thunder_zero.plan import Param

import thunder

WIDTH = 4
REMEDY = "correct the script, so that all ranks call every model and every function"


def difference(one: str, other: str) -> str:
    """The start of the sentence on both ranks."""
    found = f"rank 0 is in {one}, rank 1 is in {other}"
    if one == other:
        found = f"rank 0 and rank 1 are both in {one}, but would send different messages there"
    return f"the ranks do different things: {found}; {REMEDY}"


# Without a model


def param(rows: int) -> Param:
    return Param(
        path="w",
        aliases=(),
        shape=(rows, 2),
        dtype=torch.float32,
        compute_dtype=torch.float32,
        reduce_dtype=torch.float32,
        requires_grad=True,
        unit="",
        sharded=True,
        resident=False,
        gathered_once=False,
    )


def gather(transport: Transport, rows: int, rank: int) -> Waitable:
    """Of a parameter whose elements are the rank that has them."""
    return transport.all_gather([torch.full((rows // 2, 2), float(rank))], [param(rows)])


@contextmanager
def another_try() -> Iterator[None]:
    """As if the ranks had restarted."""
    yield
    places._differences.clear()
    places._unconfirmed.clear()
    dist.barrier()


def small(what: str, step: Callable[[], object]) -> str:
    with doing(what):
        return raised(step)


def meet(rank: int, world_size: int, transport: type[Exchange | OneByOne]) -> dict[str, Any]:
    """Every kind of difference, and what is none."""
    group = everyone()
    found: dict[str, Any] = {}
    with another_try():
        steps = (lambda: barrier(group), lambda: all_gather_object(rank, group))
        found["functions"] = small(("tz.save", "tz.load")[rank], steps[rank])
        found["later"] = small("tz.save", lambda: barrier(group))
    with another_try():
        found["steps"] = small("tz.save", steps[rank])
    with another_try():
        one = Placed(transport(group), "model 0 (Net)", group, announces=True)
        other = Placed(transport(group), "model 1 (Net)", group, announces=True)
        for placed in (one, other):
            placed.enter_half("forward", "schedule", 5)
        (mine,) = gather(one, 2, rank).wait()
        theirs, sent = torch.empty(3), torch.full((3,), float(rank))
        works = [dist.irecv(theirs, 1 - rank), dist.isend(sent, 1 - rank)]  # the user's own, meanwhile
        launched = [gather(other, 4, rank), gather(other, 6, rank)]
        total = torch.ones(5)
        dist.all_reduce(total)
        for work in works:
            assert work is not None
            work.wait()
        found["alike"] = [mine.tolist(), *(handle.wait()[0].tolist() for handle in reversed(launched))]
        found["user's"] = [theirs.tolist(), total.tolist()]
        # Another model on each rank, whose messages differ in size, which would abort a process if they met.
        (one, other)[rank].enter_half("forward", "schedule", 5)
        found["models"] = raised(lambda: gather((one, other)[rank], 2 + 200 * rank, rank).wait())
        found["again"] = raised((one, other)[rank].drain)
    with another_try():
        third = Placed(transport(group), "model 2 (Net)", group, announces=True)
        third.enter_half("backward", f"schedule {rank}", 5)
        found["schedules"] = raised(lambda: gather(third, 2, rank).wait())
    found["a sound group"] = broadcast_object_from_rank_0(7, group)
    return found


def debugging(rank: int, world_size: int) -> dict[str, Any]:
    """The collective that stands in for gloo's messages under torch's debug switch."""
    with (
        mock.patch.object(places, "channel_of", return_value=None),
        mock.patch.object(places, "is_debugging", return_value=True),
    ):
        return meet(rank, world_size, OneByOne)


def assert_met(found: dict[str, Any], rank: int) -> None:
    assert found["functions"] == f"RuntimeError: {found['later'].removeprefix('RuntimeError: ')}"
    assert difference("tz.save", "tz.load") in found["functions"]
    assert difference("tz.save", "tz.save") in found["steps"]
    assert found["alike"] == [[[0.0] * 2, [1.0] * 2], *([[0.0] * 2] * half + [[1.0] * 2] * half for half in (3, 2))]
    assert found["user's"] == [[1.0 - rank] * 3, [2.0] * 5]
    of_models = [f"forward number 2 of model {number} (Net) after 5 training forwards" for number in (0, 1)]
    assert difference(*of_models) in found["models"]
    assert found["again"] == found["models"]
    assert difference(*["backward number 1 of model 2 (Net) after 5 training forwards"] * 2) in found["schedules"]
    assert found["a sound group"] == 7


def test_every_difference_is_an_error_on_both_ranks(ranks_pool: RanksPool) -> None:
    for rank, found in enumerate(ranks_pool.run(2, meet, Exchange)):
        assert_met(found, rank)


def test_under_the_debug_switch_the_host_waits_for_places(ranks_pool: RanksPool) -> None:
    for rank, found in enumerate(ranks_pool.run(2, debugging)):
        assert_met(found, rank)


def numbers(rank: int, world_size: int) -> list[int]:
    """Of models that some ranks make alone, and of one that all make."""
    alone = [dist.new_group([0, 1]), dist.new_group([2])][rank == 2]
    assert isinstance(alone, dist.ProcessGroup)
    made = [next_number(alone) for _ in range(1 + 2 * (rank == 2))]
    return [*made, next_number(everyone())]


def test_ranks_agree_on_the_number_of_a_model(ranks_pool: RanksPool) -> None:
    *_, (*_, last) = ranks = ranks_pool.run(3, numbers)
    assert {made[-1] for made in ranks} == {last}
    assert all(made == sorted(set(made)) for made in ranks)


# With models


def batch(step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


class Trained:
    """A model, its optimizer and the losses of its steps."""

    def __init__(self, stage: int, **options: Any) -> None:
        module = fresh(Mlp, WIDTH, 2)
        transform = tz.ZeroTransform(stage=stage, **options)
        self.model = thunder.jit(module, transforms=[transform])
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.losses: list[float] = []
        self.name = self.model.state.name

    def loss(self, step: int) -> Tensor:
        loss: Tensor = self.model(batch(step)).square().mean()
        return loss

    def step(self, step: int) -> None:
        loss = self.loss(step)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(batch(99))


Case = Callable[[int, Trained], None]


def evaluate_alone(rank: int, one: Trained) -> None:
    one.evaluate()
    one.step(1)
    if rank == 0:
        one.evaluate()
    one.step(2)
    one.step(3)


def first_evaluation_alone(rank: int, one: Trained) -> None:
    if rank == 0:
        one.evaluate()
    one.step(1)
    one.step(2)


def skip_a_backward(rank: int, one: Trained) -> None:
    for step in range(1, 4):
        if rank == 0 and step == 2:
            one.loss(step)
        else:
            one.step(step)


def reduce_later(rank: int, one: Trained) -> None:
    for step in (1, 2):
        with one.model.no_sync() if rank == 0 and step == 1 else nullcontext():
            one.loss(step).backward()


def catch_and_go_on(rank: int, one: Trained) -> None:
    for step in range(1, 4):
        try:
            loss = one.loss(step)
            if rank == 0 and step == 2:
                raise ValueError("this rank's loss is bad")
        except ValueError:
            continue
        loss.backward()


def skip_a_step_then_save(rank: int, one: Trained) -> None:
    for step in range(1, 4 - (rank == 0)):
        one.step(step)
    tz.full_state_dict(one.model)
    tz.clip_grad_norm_(one.model, 1.0)


def save_alone(rank: int, one: Trained) -> None:
    if rank == 0:
        tz.save("never", one.model, one.optimizer)
    one.step(1)


def clip_alone(rank: int, one: Trained) -> None:
    one.loss(1).backward()
    if rank == 0:
        tz.clip_grad_norm_(one.model, 1.0)
    one.loss(2).backward()


ONE_MODEL: dict[str, tuple[Case, tuple[int, ...], str, str]] = {
    # what rank 0 does -> it, in which stages, where rank 0 is, where rank 1 is; N is the model, * is anything else
    "evaluates alone": (evaluate_alone, (2, 3), "forward without backward number 2 of N", "forward number 3 of N"),
    "evaluates for the first time": (first_evaluation_alone, (1,), "the first forward without backward of N", "*"),
    "skips a backward": (skip_a_backward, (0, 1, 3), "*", "backward number 3 of N after 3 training forwards"),
    "reduces later": (reduce_later, (0,), "*", "backward number 2 of N after 2 training forwards"),
    "catches an exception": (catch_and_go_on, (2,), "forward number 4 of N", "backward number 3 of N"),
    "ends a step early": (skip_a_step_then_save, (0, 1), "*", "*"),
    "saves alone": (save_alone, (0,), "tz.save of N", "*"),
    "clips alone": (clip_alone, (3,), "clip_grad_norm_ of N", "forward number 3 of N"),
}


def run_case(rank: int, world_size: int, name: str, stage: int) -> dict[str, Any]:
    one = Trained(stage)
    one.step(0)
    case, *_ = ONE_MODEL[name]
    kind, said = raised_as(lambda: case(rank, one))
    return {"kind": kind, "said": said, "again": raised(lambda: one.loss(9)), "losses": one.losses, "name": one.name}


def right_losses(stage: int, steps: int) -> list[float]:
    """Of one process: all ranks have the same batches."""
    module = fresh(Mlp, WIDTH, 2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    losses = []
    for step in range(steps):
        loss = module(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


FAST = {("evaluates alone", 3)}
CASES = [
    pytest.param(name, stage, marks=[] if (name, stage) in FAST else pytest.mark.slow, id=f"{name}-{stage}")
    for name, (_, stages, _, _) in ONE_MODEL.items()
    for stage in stages
]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_rank_0_does_something_else(ranks_pool: RanksPool, name: str, stage: int) -> None:
    _, _, *wanted = ONE_MODEL[name]
    ranks = ranks_pool.run(2, run_case, name, stage, timeout=110)
    for found in ranks:
        assert found["kind"] == "RuntimeError", found
        assert found["said"].startswith("the ranks do different things: rank 0 is in "), found
        both = found["said"].partition("rank 0 is in ")[2].partition(";")[0].split(", rank 1 is in ")
        texts = [text.replace(" N", f" {found['name']}") for text in wanted]
        assert all(text == "*" or place.startswith(text) for text, place in zip(texts, both, strict=True)), found
        assert both[0] != both[1]
        assert found["again"] == f"RuntimeError: {found['said']}"
        assert found["losses"] == pytest.approx(right_losses(stage, len(found["losses"])), rel=1e-5)
    assert ranks[0]["said"] == ranks[1]["said"]


def two_models(rank: int, world_size: int, stage: int, several_groups: bool) -> dict[str, Any]:
    """A student learns from a teacher; later one rank calls the student first."""
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=40)) for _ in range(2)] if several_groups else [None] * 2
    teacher, student = Trained(stage, process_group=groups[0]), Trained(stage, process_group=groups[1])
    losses = []

    def step(number: int, order: tuple[Trained, ...]) -> None:
        outputs = {each.name: each.model(batch(number)) for each in order}
        loss = (outputs[teacher.name] - outputs[student.name] - 1.0).square().mean()
        loss.backward()
        for each in order if stage else order[::-1]:
            each.optimizer.step()
            each.optimizer.zero_grad()
        losses.append(loss.item())

    for number in range(2):
        step(number, (teacher, student))
    said = raised(lambda: step(2, (student, teacher) if rank == 0 else (teacher, student)))
    return {"said": said, "losses": losses, "names": (teacher.name, student.name)}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "several_groups"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
def test_two_models_called_in_another_order(ranks_pool: RanksPool, stage: int, several_groups: bool) -> None:
    """In stage 0 only backward communicates; autograd starts with the model that was called last."""
    half = "backward" if stage == 0 else "forward"
    for found in ranks_pool.run(2, two_models, stage, several_groups, timeout=110):
        teacher, student = found["names"]
        assert len(found["losses"]) == 2
        assert teacher != student
        assert "the ranks do different things" in found["said"], found
        both = found["said"].partition("rank 0 is in ")[2].partition(";")[0].split(", rank 1 is in ")
        assert [name in place for name, place in zip((student, teacher), both, strict=True)] in (
            [True] * 2,
            [False] * 2,
        )
        if stage > 1:
            assert both == [f"{half} number 3 of {name} after 2 training forwards" for name in (student, teacher)]


class Branches(nn.Module):
    """Another layer for each kind of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which].forward(x)


def other_branches(rank: int, world_size: int, stage: int) -> tuple[str, str]:
    model = sharded(fresh(Branches), stage)
    model(batch(0), 0).sum().backward()
    return raised(lambda: model(batch(1), 1 + rank).sum().backward()), model.state.name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_programs_that_ranks_compile_later_and_differ(ranks_pool: RanksPool, stage: int) -> None:
    half, after = ("backward", "2 training forwards") if stage == 0 else ("forward", "1 training forward")
    for said, name in ranks_pool.run(2, other_branches, stage, timeout=110):
        assert difference(*[f"{half} number 2 of {name} after {after}"] * 2) in said


def fails_in_the_middle(rank: int, world_size: int, both: bool) -> dict[str, Any]:
    """A launch in the middle of a forward fails, on rank 0 or on both, and the ranks go on with the next step."""
    one = Trained(3, process_group=dist.new_group([0, 1], timeout=timedelta(seconds=5)))
    one.step(0)
    launch, calls = Placed.all_gather, 0

    def failing(self: Placed, *args: Any) -> Waitable:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no memory")
        return launch(self, *args)

    with mock.patch.object(Placed, "all_gather", failing) if both or rank == 0 else nullcontext():
        first = raised(lambda: one.loss(1))
    second = raised(lambda: one.step(1))
    return {"first": first, "second": second, "losses": one.losses, "name": one.name}


@pytest.mark.slow
def test_all_ranks_may_fail_at_the_same_launch_and_go_on(ranks_pool: RanksPool) -> None:
    for found in ranks_pool.run(2, fails_in_the_middle, True, timeout=110):
        assert found["first"] == "MemoryError: no memory"
        assert found["second"] == "nothing"
        assert found["losses"] == pytest.approx(right_losses(3, 2), rel=1e-5)


@pytest.mark.slow
def test_a_rank_that_fails_in_the_middle_of_a_half_is_missed_by_the_others(ranks_pool: RanksPool) -> None:
    """At the time-out; meanwhile nothing of its next step is taken for the rest of this one."""
    failed, waiting = ranks_pool.run(2, fails_in_the_middle, False, timeout=110)
    assert failed["first"] == "MemoryError: no memory"
    assert "got no answer from rank 1 in " in failed["second"], failed
    where = f"forward number 2 of {waiting['name']} after 1 training forward"
    said = f"LostRank: rank 1 got no answer from rank 0 in {where}: it died"
    assert waiting["first"].startswith(said), waiting
    for found in (failed, waiting):
        assert found["losses"] == pytest.approx(right_losses(3, 1), rel=1e-5)
