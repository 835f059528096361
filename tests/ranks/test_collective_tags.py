"""Ranks that do different things: an error on both at once, which names both tags, and nothing is taken for another.

Rank 0 is the rank that does something else.
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
from tests.harness.errors import error_of, kind_and_text
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool, everyone
from tests.harness.tiers import deep, slow
from thunder_zero.comm import collective_tags
from thunder_zero.comm.collective_tags import TaggedTransport, doing
from thunder_zero.comm.handle import Waitable
from thunder_zero.comm.native import PerTensor
from thunder_zero.comm.pairwise import PairwiseGloo
from thunder_zero.comm.small_collectives import all_gather_object, barrier, broadcast_object_from_rank_0, next_number
from thunder_zero.plan.mesh import SHARD

import thunder

WIDTH = 4


def assert_differ(said: str, text: str, other: str) -> None:
    """Check the sentence on both ranks; a tag may be given by its start."""
    sentence = f"the ranks do different things: rank 0 is in {text}"
    if text == other:
        sentence = f"the ranks do different things: rank 0 and rank 1 are both in {text}"
    assert sentence in said, (said, sentence)
    assert f"rank 1 is in {other}" in said if text != other else "would send different messages there" in said, said
    assert "so that all ranks call every model and every function" in said, said


# Without a model


def gather(transport: TaggedTransport, rows: int) -> Waitable:
    """Gather a tensor whose elements are the rank that has them."""
    return transport.all_gather([torch.full((rows // 2, 2), float(dist.get_rank()))], [(rows, 2)])


@contextmanager
def another_try() -> Iterator[None]:
    """Forget all tags, as if the ranks had restarted."""
    yield
    collective_tags._differences.clear()
    collective_tags._unconfirmed.clear()
    dist.barrier()


def said_in(what: str, step: Callable[[], object]) -> str:
    with doing(what):
        return error_of(step)


def meet(rank: int, world_size: int, make: type[PairwiseGloo | PerTensor]) -> None:
    """Meet every kind of difference, and some cases that are none."""
    group = everyone()
    steps = (lambda: barrier(group), lambda: all_gather_object(rank, group))
    with another_try():
        said = said_in(("tz.save", "tz.load")[rank], steps[rank])
        assert_differ(said, "tz.save", "tz.load")
        assert said_in("tz.save", steps[0]) == said, "no rank can go on"
    with another_try():
        assert_differ(said_in("tz.save", steps[rank]), "tz.save", "tz.save")
    with another_try():
        models = [
            TaggedTransport({SHARD: make(group)}, f"model {number} (Net)", group, announces=True) for number in range(2)
        ]
        for model in models:
            model.enter_phase("forward", "schedule", 5)
        alike(rank, *models)
        # Another model on each rank, whose messages differ in size, which would abort a process if they met.
        models[rank].enter_phase("forward", "schedule", 5)
        said = error_of(lambda: gather(models[rank], 2 + 200 * rank).wait())
        assert_differ(said, *[f"forward number 2 of model {n} (Net) after 5 training forwards" for n in range(2)])
        assert error_of(models[rank].drain) == said
    with another_try():
        third = TaggedTransport({SHARD: make(group)}, "model 2 (Net)", group, announces=True)
        third.enter_phase("backward", f"schedule {rank}", 5)
        said = error_of(lambda: gather(third, 2).wait())
        assert_differ(said, *["backward number 1 of model 2 (Net) after 5 training forwards"] * 2)
    assert broadcast_object_from_rank_0(7, group) == 7, "the group is sound"


def alike(rank: int, one: TaggedTransport, other: TaggedTransport) -> None:
    """Wait for two models in another order than launched, with the user's own messages in between."""
    (full,) = gather(one, 2).wait()
    assert full.tolist() == [[0.0] * 2, [1.0] * 2], full
    theirs, sent = torch.empty(3), torch.full((3,), float(rank))
    works = [dist.irecv(theirs, 1 - rank), dist.isend(sent, 1 - rank)]
    launched = [(rows, gather(other, rows)) for rows in (4, 6)]
    total = torch.ones(5)
    dist.all_reduce(total)
    for work in works:
        assert work is not None
        work.wait()
    for rows, handle in reversed(launched):
        (full,) = handle.wait()
        assert full.tolist() == [[0.0] * 2] * (rows // 2) + [[1.0] * 2] * (rows // 2), full
    assert theirs.tolist() == [1.0 - rank] * 3, theirs
    assert total.tolist() == [2.0] * 5, total


def meet_under_the_debug_switch(rank: int, world_size: int) -> None:
    """Meet by the collective that stands in for gloo's messages, for which the host waits."""
    with (
        mock.patch.object(collective_tags, "channel_of", return_value=None),
        mock.patch.object(collective_tags, "is_debugging", return_value=True),
    ):
        meet(rank, world_size, PerTensor)


def test_every_difference_is_an_error_on_both_ranks(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, meet, PairwiseGloo)
    ranks_pool.run(2, meet_under_the_debug_switch)


def numbers(rank: int, world_size: int) -> None:
    """Return the numbers of models that some ranks make alone, and of one that all ranks make."""
    alone = [dist.new_group([0, 1]), dist.new_group([2])][rank == 2]
    assert isinstance(alone, dist.ProcessGroup)
    made = [next_number(alone) for _ in range(1 + 2 * (rank == 2))] + [next_number(everyone())]
    assert made == sorted(set(made)), made
    assert set(all_gather_object(made[-1], everyone())) == {made[-1]}


def test_ranks_agree_on_the_number_of_a_model(ranks_pool: RanksPool) -> None:
    ranks_pool.run(3, numbers)


# With models


def batch(step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


class Trained:
    """A model, its optimizer, and number and loss of each step's batch."""

    def __init__(self, stage: int, **options: Any) -> None:
        self.model = thunder.jit(fresh(Mlp, WIDTH, 2), transforms=[tz.ZeroTransform(stage=stage, **options)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.name = self.model.state.name
        self.losses: list[tuple[int, float]] = []
        self.batches = 0

    def loss(self) -> Tensor:
        self.batches += 1
        loss: Tensor = self.model(batch(self.batches)).square().mean()
        return loss

    def do(self, action: str) -> None:
        match action:
            case "step":
                loss = self.loss()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append((self.batches, loss.item()))
            case "forward":
                self.loss()
            case "backward":
                self.loss().backward()
            case "no_sync":
                with self.model.no_sync():
                    self.loss().backward()
            case "evaluate":
                with torch.no_grad():
                    self.model(batch(0))
            case "save":
                tz.save("never", self.model, self.optimizer)
            case "clip":
                tz.clip_grad_norm_(self.model, 1.0)
            case "full_state_dict":
                tz.full_state_dict(self.model)

    def assert_right(self) -> None:
        """Check that the losses are those of one process: all ranks have the same batches."""
        module = fresh(Mlp, WIDTH, 2)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for number, found in self.losses:
            loss = module(batch(number)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert found == pytest.approx(loss.item(), rel=1e-5), (self.losses, loss)


def does_something_else(rank: int, world_size: int, stage: int, actions: str, here: str, there: str) -> str:
    """Check what a rank hears, and hears again in the next step; the losses until then are right."""
    one = Trained(stage)

    def run(*actions: str) -> None:
        for action in actions:
            one.do(action)

    run("step")
    kind, said = kind_and_text(lambda: run(*actions.split(" / ")[rank].split()))
    assert kind == "RuntimeError", said
    assert_differ(said, here.replace(" N", f" {one.name}"), there.replace(" N", f" {one.name}"))
    assert error_of(lambda: run("forward")) == f"RuntimeError: {said}"
    one.assert_right()
    return said


# what rank 0 does, and rank 1
EVALUATES = "evaluate step evaluate step / evaluate step step step"
EVALUATES_FIRST = "evaluate step / step step"
SKIPS_A_BACKWARD = "step forward step / step step step"
CATCHES_AN_EXCEPTION = "backward forward backward / backward backward backward"
REDUCES_LATER = "no_sync backward / backward backward"
ENDS_EARLY = "step step full_state_dict clip / step step step full_state_dict clip"
SAVES = "save step / step"
CLIPS = "backward clip backward / backward backward"


@pytest.mark.parametrize(
    ("stage", "actions", "here", "there"),
    [  # the tags of rank 0 and rank 1, or their starts; N is the model
        (3, EVALUATES, "forward without backward number 2 of N", "forward number 3 of N"),
        *slow(
            (1, EVALUATES_FIRST, "the first forward without backward of N", ""),
            (0, SKIPS_A_BACKWARD, "", "backward number 3 of N after 3 training forwards"),
            (2, CATCHES_AN_EXCEPTION, "forward number 4 of N", "backward number 3 of N"),
            (0, REDUCES_LATER, "", "backward number 2 of N after 2 training forwards"),
            (1, ENDS_EARLY, "full_state_dict of N", "the comparison of changed parameters of N"),
            (0, SAVES, "tz.save of N", ""),
            (3, CLIPS, "clip_grad_norm_ of N", "forward number 3 of N"),
        ),
    ],
)
def test_rank_0_does_something_else(ranks_pool: RanksPool, stage: int, actions: str, here: str, there: str) -> None:
    first, second = ranks_pool.run(2, does_something_else, stage, actions, here, there, timeout=110)
    assert first == second


def two_models(rank: int, world_size: int, stage: int, several_groups: bool, tag: str) -> None:
    """Let a student learn from a teacher; in the third step rank 0 calls the student first."""
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=40)) for _ in range(2)] if several_groups else [None] * 2
    teacher, student = (Trained(stage, process_group=group) for group in groups)

    def step(number: int, *order: Trained) -> None:
        outputs = {each.name: each.model(batch(number)) for each in order}
        loss = (outputs[teacher.name] - outputs[student.name] - 1.0).square().mean()
        loss.backward()
        for each in order if stage else order[::-1]:
            each.optimizer.step()
            each.optimizer.zero_grad()

    step(0, teacher, student)
    step(1, teacher, student)
    said = error_of(lambda: step(2, *((student, teacher) if rank == 0 else (teacher, student))))
    # Autograd starts with the model that was called last.
    here, there = (teacher, student) if tag.startswith("backward") else (student, teacher)
    assert here.name != there.name
    assert_differ(said, f"{tag} of {here.name}", f"{tag} of {there.name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "several_groups", "tag"),
    [
        (0, False, "backward number 3"),  # in stage 0 only backward communicates
        (1, False, "the comparison of changed parameters"),
        (3, True, "forward number 3"),
        *deep((2, False, "forward number 3"), (3, False, "forward number 3")),
    ],
)
def test_two_models_called_in_another_order(ranks_pool: RanksPool, stage: int, several_groups: bool, tag: str) -> None:
    ranks_pool.run(2, two_models, stage, several_groups, tag, timeout=110)


class Branches(nn.Module):
    """A model with another layer for each kind of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which].forward(x)


def other_branches(rank: int, world_size: int, stage: int) -> None:
    model = sharded(fresh(Branches), stage)
    model(batch(0), 0).sum().backward()
    said = error_of(lambda: model(batch(1), 1 + rank).sum().backward())
    phase, after = ("backward", "2 training forwards") if stage == 0 else ("forward", "1 training forward")
    assert_differ(said, *[f"{phase} number 2 of {model.state.name} after {after}"] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, *deep(0)])
def test_programs_that_ranks_compile_later_and_differ(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, other_branches, stage, timeout=110)


def fails_in_the_middle(rank: int, world_size: int) -> None:
    """Let a launch in the middle of a forward fail.

    If it fails on both ranks, the next step is right. If it fails on rank 0 alone, the other rank times out: nothing of
    rank 0's next step is taken for the rest of this one.
    """
    one = Trained(3, process_group=dist.new_group([0, 1], timeout=timedelta(seconds=5)))
    one.do("step")
    with failing_launch():
        assert error_of(one.loss) == "MemoryError: no memory"
    one.do("step")
    with failing_launch() if rank == 0 else nullcontext():
        first = error_of(one.loss)
    second = error_of(lambda: one.do("step"))
    if rank == 0:
        assert first == "MemoryError: no memory", first
        assert "rank 1" in second, second  # the same time-out; or it hears of rank 1's
    else:
        assert first.startswith("LostRank: rank 1 got no answer from rank 0 in forward number "), first
        assert f" of {one.name} after 2 training forwards: it died" in first, first
    assert len(one.losses) == 2, one.losses
    one.assert_right()


@contextmanager
def failing_launch() -> Iterator[None]:
    """Make the second gather inside the block fail."""
    launch, calls = TaggedTransport.all_gather, 0

    def failing(self: TaggedTransport, *args: Any) -> Waitable:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no memory")
        return launch(self, *args)

    with mock.patch.object(TaggedTransport, "all_gather", failing):
        yield


@pytest.mark.slow
def test_a_rank_that_fails_in_the_middle_of_a_phase_is_missed_by_the_others(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, fails_in_the_middle, timeout=110)
