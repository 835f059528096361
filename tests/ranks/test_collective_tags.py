"""Ranks that do different things raise at once, with both tags in the error, and mix up no messages.

Rank 0 is the rank that does something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.as_one_process import Side, Steps, trains_as_one_process
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


def assert_differ(error: str, text: str, other: str) -> None:
    """Check the error's sentence; ``text`` and ``other`` are the starts of the tags of rank 0 and rank 1."""
    sentence = f"the ranks do different things: rank 0 is in {text}"
    if text == other:
        sentence = f"the ranks do different things: rank 0 and rank 1 are both in {text}"
    assert sentence in error, (error, sentence)
    assert f"rank 1 is in {other}" in error if text != other else "would send different messages there" in error, error
    assert "so that all ranks call every model and every function" in error, error


# Without a model


def gather(transport: TaggedTransport, rows: int) -> Waitable:
    """Gather a tensor whose rows hold the number of the rank that sent them."""
    return transport.all_gather([torch.full((rows // 2, 2), float(dist.get_rank()))], [(rows, 2)])


def error_in(name: str, step: Callable[[], object], *models: str) -> str:
    with doing(name, *models):
        return error_of(step)


def differ_in_all_ways(rank: int, world_size: int, make: type[PairwiseGloo | PerTensor]) -> None:
    """Let the ranks differ in every way, and check that equal ranks are not refused."""
    group = everyone()
    steps = (lambda: barrier(group), lambda: all_gather_object(rank, group))
    error = error_in(("tz.save", "tz.load")[rank], steps[rank], "model 8 (Net)")
    assert_differ(error, "tz.save of model 8 (Net)", "tz.load of model 8 (Net)")
    assert error_in("tz.save", steps[0], "model 9 (Net)", "model 8 (Net)") == error, "no rank goes on with this model"
    assert_differ(error_in("tz.save", steps[rank]), "tz.save", "tz.save")
    models = [
        TaggedTransport({SHARD: make(group)}, f"model {number} (Net)", group, announces=True) for number in range(3)
    ]
    for model in models[:2]:
        model.enter_phase("forward", "schedule", 5)
    check_equal_ranks(rank, *models[:2])
    # Another model on each rank, whose messages differ in size, which would abort a process if they met.
    models[rank].enter_phase("forward", "schedule", 5)
    error = error_of(lambda: gather(models[rank], 2 + 200 * rank).wait())
    assert_differ(error, *[f"forward number 2 of model {n} (Net) after 5 training forwards" for n in range(2)])
    assert [error_of(model.drain) for model in models] == [error, error, "nothing"]
    launches = ["all_gather a", "all_reduce b", "all_gather c"][: 3 - rank]
    models[2].enter_phase("backward", f"schedule {rank}", 5, launches)
    error = error_of(lambda: gather(models[2], 2).wait())
    assert_differ(error, *["backward number 1 of model 2 (Net) after 5 training forwards"] * 2)
    assert "there (launch 3: all_gather c on rank 0, nothing on rank 1); pass materialize_grads=True" in error, error
    assert broadcast_object_from_rank_0(7, group) == 7, "the group is sound"


def check_equal_ranks(rank: int, first: TaggedTransport, second: TaggedTransport) -> None:
    """Wait for two models in reverse order of launch, with the user's own messages in between."""
    (full,) = gather(first, 2).wait()
    assert full.tolist() == [[0.0] * 2, [1.0] * 2], full
    received, sent = torch.empty(3), torch.full((3,), float(rank))
    works = [dist.irecv(received, 1 - rank), dist.isend(sent, 1 - rank)]
    launched = [(rows, gather(second, rows)) for rows in (4, 6)]
    total = torch.ones(5)
    dist.all_reduce(total)
    for work in works:
        assert work is not None
        work.wait()
    for rows, handle in reversed(launched):
        (full,) = handle.wait()
        assert full.tolist() == [[0.0] * 2] * (rows // 2) + [[1.0] * 2] * (rows // 2), full
    assert received.tolist() == [1.0 - rank] * 3, received
    assert total.tolist() == [2.0] * 5, total


def differ_under_the_debug_switch(rank: int, world_size: int) -> None:
    """Let the ranks differ where a collective, for which the host waits, replaces gloo's messages."""
    with (
        mock.patch.object(collective_tags, "channel_of", return_value=None),
        mock.patch.object(collective_tags, "is_debugging", return_value=True),
    ):
        differ_in_all_ways(rank, world_size, PerTensor)


def test_every_difference_is_an_error_on_both_ranks(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, differ_in_all_ways, PairwiseGloo)
    ranks_pool.run(2, differ_under_the_debug_switch)


def average_alone(rank: int, world_size: int) -> None:
    """Average under a tag that no other rank has. The thread that averages for all models must not wait for peers."""

    def compare() -> None:
        raise RuntimeError("ranks differ")

    alone = PairwiseGloo(everyone()).with_tag(1 + rank, compare)
    assert error_of(lambda: alone.all_reduce([torch.ones(6)]).wait()) == "RuntimeError: ranks differ"
    (mean,) = PairwiseGloo(everyone()).all_reduce([torch.full((6,), float(rank))]).wait()
    assert mean.tolist() == [1.0] * 6, mean


def test_no_average_waits_for_ranks_that_differ(ranks_pool: RanksPool) -> None:
    ranks_pool.run(3, average_alone, timeout=20)


def take_numbers(rank: int, world_size: int) -> None:
    """Check the numbers of models that some ranks make alone, and of a model that all ranks make."""
    alone = [dist.new_group([0, 1]), dist.new_group([2])][rank == 2]
    assert isinstance(alone, dist.ProcessGroup)
    taken = [next_number(alone) for _ in range(1 + 2 * (rank == 2))] + [next_number(everyone())]
    assert taken == sorted(set(taken)), taken
    assert set(all_gather_object(taken[-1], everyone())) == {taken[-1]}


def test_ranks_agree_on_the_number_of_a_model(ranks_pool: RanksPool) -> None:
    ranks_pool.run(3, take_numbers)


# With models


def batch(step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


class Trained:
    """A model, its optimizer, and the number and the loss of each step's batch."""

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

    def assert_losses(self) -> None:
        """Check that the losses are those of one process: all ranks have the same batches."""
        module = fresh(Mlp, WIDTH, 2)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for number, actual in self.losses:
            loss = module(batch(number)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert actual == pytest.approx(loss.item(), rel=1e-5), (self.losses, loss)


def do_something_else(rank: int, world_size: int, stage: int, actions: str, on_rank_0: str, on_rank_1: str) -> str:
    """Check the losses and the error, which the next step raises again; return the error."""
    trained = Trained(stage)

    def run(*actions: str) -> None:
        for action in actions:
            trained.do(action)

    run("step")
    kind, error = kind_and_text(lambda: run(*actions.split(" / ")[rank].split()))
    assert kind == "RuntimeError", error
    assert_differ(error, on_rank_0.replace(" N", f" {trained.name}"), on_rank_1.replace(" N", f" {trained.name}"))
    assert error_of(lambda: run("forward")) == f"RuntimeError: {error}"
    trained.assert_losses()
    return error


# What rank 0 does / what rank 1 does
EVALUATES = "evaluate step evaluate step / evaluate step step step"
EVALUATES_FIRST = "evaluate step / step step"
SKIPS_A_BACKWARD = "step forward step / step step step"
CATCHES_AN_EXCEPTION = "backward forward backward / backward backward backward"
REDUCES_LATER = "no_sync backward / backward backward"
ENDS_EARLY = "step step full_state_dict clip / step step step full_state_dict clip"
SAVES = "save step / step"
CLIPS = "backward clip backward / backward backward"


@pytest.mark.parametrize(
    ("stage", "actions", "on_rank_0", "on_rank_1"),
    [  # the tags of rank 0 and rank 1, or their starts; N is the model
        (3, EVALUATES, "forward without backward number 2 of N", "forward number 3 of N"),
        *slow(
            (1, EVALUATES_FIRST, "forward without backward number 1 of N", ""),
            (0, SKIPS_A_BACKWARD, "", "backward number 3 of N after 3 training forwards"),
            (2, CATCHES_AN_EXCEPTION, "forward number 4 of N", "backward number 3 of N"),
            (0, REDUCES_LATER, "", "backward number 2 of N after 2 training forwards"),
            (1, ENDS_EARLY, "full_state_dict of N", "the comparison of changed parameters of N"),
            (0, SAVES, "tz.save of N", ""),
            (3, CLIPS, "clip_grad_norm_ of N", "forward number 3 of N"),
        ),
    ],
)
def test_rank_0_does_something_else(
    ranks_pool: RanksPool, stage: int, actions: str, on_rank_0: str, on_rank_1: str
) -> None:
    first, second = ranks_pool.run(2, do_something_else, stage, actions, on_rank_0, on_rank_1)
    assert first == second


def call_two_models(rank: int, world_size: int, stage: int, several_groups: bool, tag: str) -> None:
    """Let a student learn from a teacher; in the third step rank 0 calls the student first."""
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=40)) for _ in range(2)] if several_groups else [None] * 2
    teacher, student = (Trained(stage, process_group=group) for group in groups)

    def step(number: int, *order: Trained) -> None:
        outputs = {trained.name: trained.model(batch(number)) for trained in order}
        loss = (outputs[teacher.name] - outputs[student.name] - 1.0).square().mean()
        loss.backward()
        for trained in order if stage else order[::-1]:
            trained.optimizer.step()
            trained.optimizer.zero_grad()

    step(0, teacher, student)
    step(1, teacher, student)
    error = error_of(lambda: step(2, *((student, teacher) if rank == 0 else (teacher, student))))
    # Autograd starts with the model that was called last.
    first, second = (teacher, student) if tag.startswith("backward") else (student, teacher)
    assert first.name != second.name
    assert_differ(error, f"{tag} of {first.name}", f"{tag} of {second.name}")


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
    ranks_pool.run(2, call_two_models, stage, several_groups, tag)


class Branches(nn.Module):
    """A model with another layer for each kind of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which].forward(x)


def take_other_branches(rank: int, world_size: int, stage: int) -> None:
    model = sharded(fresh(Branches), stage)
    model(batch(0), 0).sum().backward()
    error = error_of(lambda: model(batch(1), 1 + rank).sum().backward())
    phase, after = ("backward", "2 training forwards") if stage == 0 else ("forward", "1 training forward")
    assert_differ(error, *[f"{phase} number 2 of {model.state.name} after {after}"] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, *deep(0)])
def test_programs_that_ranks_compile_later_and_differ(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, take_other_branches, stage)


# Ranks whose data decide which graphs run


class Gated(nn.Module):
    """A model of several graphs. Data decide on each rank alone which graphs run, with equal collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        if x.sum() > 0:
            y = 2.0 * y
            torch._dynamo.graph_break()  # one more graph, without parameters
        return self.c(torch.tanh(self.b(y)))


class GatedFirst(Gated):
    """A model whose data decide before the only graph with parameters."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if x.sum() > 0:
            y = 2.0 * y
            torch._dynamo.graph_break()
        return self.c(torch.tanh(self.b(torch.tanh(self.a(y)))))


class Skips(Gated):
    """A model that skips a layer for some data."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        if x.sum() > 0:
            y = torch.tanh(self.b(y))
        return self.c(y)


def decided(side: Side) -> Steps:
    """Train two micro-batches a step, and evaluate. Each rank has negative data in its own micro-batch."""
    (model,) = side.models
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    world_size = side.world_size if side.is_sharded else dist.get_world_size()
    for step in range(2 * world_size + 1):
        optimizer.zero_grad()
        for micro in range(2):
            signs = torch.tensor([-1.0 if (step + micro) % world_size == rank else 1.0 for rank in range(world_size)])
            rows = (batch(step).abs().repeat(world_size, 1, 1) * signs[:, None, None]).flatten(0, 1)
            parts = side.parts(rows.requires_grad_(), (3,) * world_size)
            with model.no_sync() if side.is_sharded and micro == 0 else nullcontext():
                loss = torch.stack([model(part).square().mean() for part in parts]).mean()
                loss.backward()
        optimizer.step()
        with torch.no_grad():
            evaluated = torch.stack([model(part).mean() for part in parts]).mean()
        yield side.mean(evaluated)


def decide_on_each_rank(rank: int, world_size: int, make: type[Gated], stage: int) -> None:
    """Train where ranks run different graphs. Then let launches differ, and train models made before and after."""
    plain = fresh(make)
    before, skips = tz.compile(deepcopy(plain), stage), tz.compile(fresh(Skips), stage)
    trains_as_one_process([(before, plain)], decided)
    skips(batch(0).abs()).sum().backward()
    calls = [
        lambda: skips(batch(0).abs() * (1 if rank == 0 else -1)).sum().backward(),
        lambda: skips(batch(0)),
        lambda: tz.save("never", skips),
    ]
    error, *again = map(error_of, calls)
    phase, after = ("backward", "2 training forwards") if stage == 0 else ("forward", "1 training forward")
    assert_differ(error, *[f"{phase} number {4 - (stage == 0)} of {skips.state.name} after {after}"] * 2)
    assert "(launch " in error, error
    assert "b.weight" in error, error
    assert again == [error] * 2, again
    plain.load_state_dict(tz.full_state_dict(before))
    for model in before, tz.compile(deepcopy(plain), stage):
        trains_as_one_process([(model, plain)], decided)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "make", "stage"), [(2, Gated, 3), (3, Gated, 0), (2, GatedFirst, 0), (3, GatedFirst, 3)]
)
def test_data_decide_on_each_rank_which_graphs_run(
    ranks_pool: RanksPool, world_size: int, make: type[Gated], stage: int
) -> None:
    ranks_pool.run(world_size, decide_on_each_rank, make, stage)


def fail_in_the_middle(rank: int, world_size: int) -> None:
    """Let a launch in the middle of a forward fail on both ranks, which go on, and then on rank 0 alone."""
    trained = Trained(3, process_group=dist.new_group([0, 1], timeout=timedelta(seconds=5)))
    trained.do("step")
    with failing_launch():
        assert error_of(trained.loss) == "MemoryError: no memory"
    trained.do("step")
    with failing_launch() if rank == 0 else nullcontext():
        first = error_of(trained.loss)
    second = error_of(lambda: trained.do("step"))
    if rank == 0:  # no message of its second step is taken for the rest of the first
        assert first == "MemoryError: no memory", first
        assert "rank 1" in second, second  # its own time-out, or an error of rank 1's
    else:
        assert first.startswith("LostRank: rank 1 got no answer from rank 0 in forward number "), first
        assert f" of {trained.name} after 2 training forwards: it died" in first, first
    assert len(trained.losses) == 2, trained.losses
    trained.assert_losses()


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
    ranks_pool.run(2, fail_in_the_middle)
