"""The transports: values, bits, bytes sent and memory, compared with what one process computes from known tensors.

Every rank's tensors come from a seed, so each process knows those of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.ranks import RanksPool, everyone
from thunder_zero import layout
from thunder_zero.comm import pairwise
from thunder_zero.comm.backends import transport_for
from thunder_zero.comm.background import AVERAGER, in_background
from thunder_zero.comm.handle import Waitable
from thunder_zero.comm.native import Grouped, OneByOne
from thunder_zero.comm.pairwise import PACK_BELOW_BYTES, TAG, Exchange, mean_into, messages
from thunder_zero.comm.transport import Alone, Transport
from thunder_zero.plan import Param, Plan
from thunder_zero.policy import Policy

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]

CPU = torch.device("cpu")
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
BUCKETS: dict[str, Shapes] = {
    "one divisible": ((12, 5),),
    "one large, not divisible": ((257, 401),),  # its share stays above PACK_BELOW_BYTES for W = 2, 3, 4
    "uneven rows": ((5,), (7, 3), (13, 2, 2)),
    "fewer rows than ranks": ((1, 4), (2,), (3, 3)),
    "small among large": ((3,), (257, 401), (1, 7), (350, 300), (64,)),
}
SCALARS: Shapes = ((), (0, 3), (1,), (257, 401))  # replicated parameters may have these shapes, too


def param(shape: Shape, dtype: torch.dtype = torch.float32, sharded: bool = True) -> Param:
    return Param(
        path="w",
        aliases=(),
        shape=shape,
        dtype=dtype,
        compute_dtype=dtype,
        reduce_dtype=dtype,
        requires_grad=True,
        unit="",
        sharded=sharded,
        resident=False,
        gathered_once=False,
    )


def known(shape: Shape, rank: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The gradient of ``rank``; that of rank 0 is also the full parameter."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def shard_of(full: Tensor, rank: int, world_size: int) -> Tensor:
    shard = full.new_zeros(layout.shard_shape(tuple(full.shape), world_size, rank))
    start, stop = layout.row_range(full.shape[0], world_size, rank)
    shard[: stop - start] = full[start:stop]
    return shard


def mean_of(shape: Shape, world_size: int, dtype: torch.dtype) -> Tensor:
    """In rank order, in float32, divided once."""
    total = known(shape, 0, dtype).float()
    for rank in range(1, world_size):
        total = total + known(shape, rank, dtype).float()
    return (total / world_size).to(dtype)


def expected(kind: str, shape: Shape, rank: int, world_size: int, dtype: torch.dtype) -> Tensor:
    if kind == "all_gather":
        return known(shape, 0, dtype)
    mean = mean_of(shape, world_size, dtype)
    return mean if kind == "all_reduce" else shard_of(mean, rank, world_size)


def launch(
    transport: Transport, kind: str, shapes: Shapes, dtype: torch.dtype = torch.float32, transposed: bool = False
) -> Waitable:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    params = [param(shape, dtype, kind != "all_reduce") for shape in shapes]
    if kind == "all_gather":
        return transport.all_gather([shard_of(known(s, 0, dtype), rank, world_size) for s in shapes], params)
    grads = [known(shape, rank, dtype) for shape in shapes]
    if transposed:
        grads = [grad.t().contiguous().t() for grad in grads]
    return transport.reduce_scatter(grads, params) if kind == "reduce_scatter" else transport.all_reduce(grads, params)


def transport_named(name: str) -> Transport:
    return Exchange(everyone()) if name == "Exchange" else OneByOne(everyone())


@dataclass
class Seen:
    """Results and traffic of one bucket on one rank."""

    results: list[Tensor]
    sent_bytes: int
    plan_bytes: int
    sends: int


def carry(
    rank: int, world_size: int, name: str, kind: str, shapes: Shapes, dtype: torch.dtype, transposed: bool = False
) -> Seen:
    sent: list[int] = []
    real_send = pairwise.send

    def counting(message: Tensor, *where: object) -> Callable[[], object]:
        sent.append(message.nbytes)
        return real_send(message, *where)  # type: ignore[arg-type]

    with mock.patch.object(pairwise, "send", counting):
        results = launch(transport_named(name), kind, shapes, dtype, transposed).wait()
    params = tuple(param(shape, dtype, kind != "all_reduce") for shape in shapes)
    plan = Plan(Policy(), world_size, rank, params)
    bytes_of = plan.gather_bytes if kind == "all_gather" else plan.reduce_bytes
    assert all(result.is_contiguous() and not result.requires_grad for result in results)
    return Seen(list(results), sum(sent), sum(map(bytes_of, params)), len(sent))


def assert_exact(seen: Sequence[Seen], kind: str, shapes: Shapes, dtype: torch.dtype) -> None:
    """Shapes, dtypes and, bit for bit, values on every rank."""
    for rank, one in enumerate(seen):
        for shape, result in zip(shapes, one.results, strict=True):
            wanted = expected(kind, shape, rank, len(seen), dtype)
            assert result.dtype is wanted.dtype
            assert result.shape == wanted.shape
            assert torch.equal(result, wanted), f"{kind} of {shape} on rank {rank} of {len(seen)}"


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exchange_gives_exact_values_and_sends_the_fewest_bytes(
    ranks_pool: RanksPool, world_size: int, kind: str, bucket: str
) -> None:
    shapes = BUCKETS[bucket]
    seen = ranks_pool.run(world_size, carry, "Exchange", kind, shapes, torch.float32)
    assert_exact(seen, kind, shapes, torch.float32)
    if kind == "all_reduce":  # uneven parts: each rank is near the minimum, their sum is exactly at it
        numel = sum(map(torch.Size.numel, map(torch.Size, shapes)))
        assert sum(one.sent_bytes for one in seen) == 2 * (world_size - 1) * numel * 4
    else:
        assert [one.sent_bytes for one in seen] == [one.plan_bytes for one in seen]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_even_all_reduce_sends_what_the_plan_says(ranks_pool: RanksPool, world_size: int) -> None:
    shapes = ((12, 5), (24, 12, 300))  # numbers of elements divisible by 2, 3 and 4
    seen = ranks_pool.run(world_size, carry, "Exchange", "all_reduce", shapes, torch.float32)
    assert [one.sent_bytes for one in seen] == [one.plan_bytes for one in seen]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_exchange_of_other_dtypes(ranks_pool: RanksPool, world_size: int, kind: str, dtype: torch.dtype) -> None:
    shapes = ((5,), (401, 402))  # the large one spans several blocks of the half-precision sum
    seen = ranks_pool.run(world_size, carry, "Exchange", kind, shapes, dtype)
    if dtype is torch.float64 and kind != "all_gather":
        for rank, one in enumerate(seen):
            for shape, result in zip(shapes, one.results, strict=True):
                wanted = expected(kind, shape, rank, world_size, dtype)
                torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)
    else:
        assert_exact(seen, kind, shapes, dtype)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_scalars_and_empty_tensors_are_averaged(ranks_pool: RanksPool, world_size: int) -> None:
    seen = ranks_pool.run(world_size, carry, "Exchange", "all_reduce", SCALARS, torch.float32)
    assert_exact(seen, "all_reduce", SCALARS, torch.float32)


@pytest.mark.parametrize("name", ["Exchange", "OneByOne"])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_gradients_may_be_transposed(ranks_pool: RanksPool, kind: str, name: str) -> None:
    shapes = ((7, 3), (401, 257))
    seen = ranks_pool.run(2, carry, name, kind, shapes, torch.float32, True)
    assert_exact(seen, kind, shapes, torch.float32)  # W = 2: halving before or after the sum gives the same bits


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_plain_gives_close_values(ranks_pool: RanksPool, world_size: int, kind: str, bucket: str) -> None:
    shapes = BUCKETS[bucket]
    seen = ranks_pool.run(world_size, carry, "OneByOne", kind, shapes, torch.float32)
    for rank, one in enumerate(seen):
        for shape, result in zip(shapes, one.results, strict=True):
            wanted = expected(kind, shape, rank, world_size, torch.float32)
            torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)


# Messages


@pytest.mark.parametrize("kind", KINDS)
def test_small_tensors_share_a_message_and_large_ones_do_not(ranks_pool: RanksPool, kind: str) -> None:
    seen = ranks_pool.run(2, carry, "Exchange", kind, ((8,), (8, 3), (350, 300), (6,), (257, 401)), torch.float32)
    assert [one.sends for one in seen] == [3, 3]  # three small ones in one message, two large ones


def test_tensors_share_messages_by_their_bytes_to_one_peer() -> None:
    limit = torch.empty(PACK_BELOW_BYTES // 4)
    below = limit[:-1]
    assert messages([limit, below, limit, below], 4, sharded=True) == [[1, 3], [0], [2]]
    whole = [torch.empty(4 * limit.numel()), torch.empty(4 * limit.numel() - 1)]
    assert messages(whole, 4, sharded=False) == [[1], [0]]
    assert messages([limit], 4, sharded=True) == [[0]]


# Precision and bits


def constant(rank: int, world_size: int, name: str, value: float) -> list[Tensor]:
    grads = [torch.full((9,), value, dtype=torch.float16)]
    params = [param((9,), torch.float16)]
    transport = transport_named(name)
    return [*transport.reduce_scatter(grads, params).wait(), *transport.all_reduce(grads, params).wait()]


LARGE = {("Exchange", 2): 60000.0, ("Exchange", 4): 60000.0, ("OneByOne", 2): 60000.0, ("OneByOne", 4): 30000.0}


@pytest.mark.parametrize(("name", "world_size"), LARGE)
def test_float16_neither_overflows_nor_vanishes(ranks_pool: RanksPool, world_size: int, name: str) -> None:
    """Native sums divide by about the square root of W before and after: dividing by 4 first makes 2**-23 a zero."""
    for value in (LARGE[name, world_size], 2.0**-23):
        for rank, (rows, mean) in enumerate(ranks_pool.run(world_size, constant, name, value)):
            start, stop = layout.row_range(9, world_size, rank)
            assert rows[: stop - start].tolist() == [value] * (stop - start)
            assert mean.tolist() == [value] * 9


def lopsided(rank: int, world_size: int) -> list[Tensor]:
    grads = [torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)]
    params = [param((4,), torch.bfloat16)]
    transport = Exchange(everyone())
    return [*transport.reduce_scatter(grads, params).wait(), *transport.all_reduce(grads, params).wait()]


def test_bfloat16_is_added_up_in_float32(ranks_pool: RanksPool) -> None:
    # (256 + 1 + 1 + 1) / 4 = 64.75, rounded to 65; a sum in bfloat16 stays at 256 and gives 64
    for rows, mean in ranks_pool.run(4, lopsided):
        assert rows.tolist() == [65.0]
        assert mean.tolist() == [65.0] * 4


def test_the_mean_may_overwrite_its_first_two_parts() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for out in (0, 1):
            parts = [torch.full((70_000,), value, dtype=dtype) for value in (3.0, 5.0, 10.0)]
            mean_into(parts[out], parts)
            assert parts[out].unique().tolist() == [6.0]


def reduce_twice(rank: int, world_size: int) -> list[list[Tensor]]:
    transport = Exchange(everyone())
    kinds = ("all_reduce", "all_reduce", "reduce_scatter", "reduce_scatter")
    return [list(launch(transport, kind, ((257, 401), (5,))).wait()) for kind in kinds]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reductions_are_equal_bit_for_bit_on_all_ranks_and_in_reruns(ranks_pool: RanksPool, world_size: int) -> None:
    seen = ranks_pool.run(world_size, reduce_twice)
    for rank, (full, full_again, rows, rows_again) in enumerate(seen):
        for at in range(2):
            assert torch.equal(full[at], full_again[at])
            assert torch.equal(rows[at], rows_again[at])
            assert torch.equal(full[at], seen[0][0][at])
            assert torch.equal(rows[at], shard_of(full[at], rank, world_size))


# Memory


def refresh(rank: int, world_size: int, name: str) -> tuple[list[Tensor], list[bool], bool]:
    """Gather into buffers in which only the rank's own rows are right."""
    shapes = BUCKETS["small among large"] if name == "Exchange" else BUCKETS["uneven rows"]
    buffers, shards = [], []
    for shape in shapes:
        buffer = torch.full(layout.padded_shape(shape, world_size), torch.nan)
        chunk = layout.stored_rows(shape[0], world_size, rank)
        shard = buffer[rank * chunk : (rank + 1) * chunk]
        shard.copy_(shard_of(known(shape, 0), rank, world_size))
        buffers.append(buffer)
        shards.append(torch.nn.Parameter(shard))
    results = transport_named(name).all_gather(shards, [param(shape) for shape in shapes], into=buffers).wait()
    in_place = [result.data_ptr() == buffer.data_ptr() for result, buffer in zip(results, buffers, strict=True)]
    own_unchanged = all(
        torch.equal(shard, shard_of(known(shape, 0), rank, world_size))
        for shard, shape in zip(shards, shapes, strict=True)
    )
    return list(results), in_place, own_unchanged


@pytest.mark.parametrize("name", ["Exchange", "OneByOne"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gather_into_buffers_fills_the_other_rows_in_place(ranks_pool: RanksPool, world_size: int, name: str) -> None:
    shapes = BUCKETS["small among large"] if name == "Exchange" else BUCKETS["uneven rows"]
    for results, in_place, own_unchanged in ranks_pool.run(world_size, refresh, name):
        assert all(in_place)
        assert own_unchanged
        for shape, result in zip(shapes, results, strict=True):
            assert torch.equal(result, known(shape, 0))


def inputs_after(rank: int, world_size: int, name: str, kind: str) -> list[bool]:
    """Whether each input is unchanged, and whether each result has memory of its own."""
    shapes = ((5, 2), (350, 300))
    params = [param(shape) for shape in shapes]
    inputs = [known(shape, rank) for shape in shapes]
    if kind == "all_gather":
        inputs = [shard_of(known(shape, 0), rank, world_size) for shape in shapes]
    before = [tensor.clone() for tensor in inputs]
    results = getattr(transport_named(name), kind)(inputs, params).wait()
    unchanged = [torch.equal(tensor, old) for tensor, old in zip(inputs, before, strict=True)]
    own_memory = [
        result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        for result, tensor in zip(results, inputs, strict=True)
    ]
    return unchanged + own_memory


@pytest.mark.parametrize("name", ["Exchange", "OneByOne"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_inputs_are_left_alone_and_results_are_new(
    ranks_pool: RanksPool, world_size: int, kind: str, name: str
) -> None:
    assert ranks_pool.run(world_size, inputs_after, name, kind) == [[True] * 4] * world_size


def under_inference_mode(rank: int, world_size: int) -> list[bool]:
    transport = Exchange(everyone())
    with torch.inference_mode():
        results = [result for kind in KINDS for result in launch(transport, kind, ((5,), (257, 401))).wait()]
    return [result.is_inference() for result in results]


def test_nothing_made_here_is_an_inference_tensor(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, under_inference_mode) == [[False] * 6] * 2


def inputs_held(rank: int, world_size: int) -> tuple[int, int]:
    """References from the transport to a launched gradient, before and after its wait."""
    grad = known((350, 300), rank)
    transport = Exchange(everyone())
    before = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    handle = transport.all_reduce([grad], [param((350, 300))])
    launched = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    handle.wait()
    waited = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    return launched - before, waited - before


@pytest.mark.parametrize("world_size", [2, 3])
def test_wait_drops_the_inputs(ranks_pool: RanksPool, world_size: int) -> None:
    for launched, waited in ranks_pool.run(world_size, inputs_held):
        assert launched > 0
        assert waited == 0


# In flight


def out_of_order(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """All three under way twice, waited for in another order on each rank."""
    transport = Exchange(everyone())
    handles = {f"{kind} {turn}": launch(transport, kind, ((257, 401), (5,))) for turn in range(2) for kind in KINDS}
    names = list(handles)
    return {name: list(handles[name].wait()) for name in names[rank:] + names[:rank]}


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_buckets_may_be_waited_for_in_any_order(ranks_pool: RanksPool, world_size: int) -> None:
    for rank, results in enumerate(ranks_pool.run(world_size, out_of_order)):
        for name, (large, small) in results.items():
            kind = name.split()[0]
            assert torch.equal(large, expected(kind, (257, 401), rank, world_size, torch.float32))
            assert torch.equal(small, expected(kind, (5,), rank, world_size, torch.float32))


def lazy_first_rank(rank: int, world_size: int) -> Tensor:
    handle = launch(Exchange(everyone()), "all_reduce", ((257, 401),))
    if rank == 0:
        dist.barrier()  # the others come here only after they have the means, including rank 0's part
        return handle.wait()[0]
    mean = handle.wait()[0]
    dist.barrier()
    return mean


def test_an_all_reduce_goes_on_while_nobody_waits(ranks_pool: RanksPool) -> None:
    for mean in ranks_pool.run(3, lazy_first_rank, timeout=20.0):
        assert torch.equal(mean, mean_of((257, 401), 3, torch.float32))


def behind_a_late_rank(rank: int, world_size: int) -> tuple[Tensor, Tensor | None]:
    """Rank 1 launches its all-reduce only after the others have ended a gather that they launched after theirs."""
    pair = dist.new_group([0, 2])
    if rank == 1:
        dist.barrier()
        return launch(Exchange(everyone()), "all_reduce", ((257, 401),)).wait()[0], None
    late = launch(Exchange(everyone()), "all_reduce", ((257, 401),))
    (full,) = Exchange(pair).all_gather([torch.full((1, 2), float(rank))], [param((2, 2))]).wait()
    dist.barrier()
    return late.wait()[0], full


def test_an_all_reduce_that_has_to_wait_blocks_nothing_else(ranks_pool: RanksPool) -> None:
    results = ranks_pool.run(3, behind_a_late_rank, timeout=20.0)
    assert all(torch.equal(mean, mean_of((257, 401), 3, torch.float32)) for mean, _ in results)
    assert [full.tolist() for _, full in results if full is not None] == [[[0.0, 0.0], [2.0, 2.0]]] * 2


def fail_then_go_on(rank: int, world_size: int) -> tuple[list[Tensor], int]:
    """A step that launches everything and waits for nothing; the next one drains, and is right."""
    transport = Exchange(everyone())
    for kind in KINDS:
        launch(transport, kind, ((350, 300), (7,)), torch.float32)
    transport.drain()
    left = len(transport._pending)
    return list(launch(transport, "reduce_scatter", ((257, 401),)).wait()), left


@pytest.mark.parametrize("world_size", [2, 3])
def test_drain_ends_all_that_a_failed_step_left_in_flight(ranks_pool: RanksPool, world_size: int) -> None:
    for rank, ((rows,), left) in enumerate(ranks_pool.run(world_size, fail_then_go_on)):
        assert left == 0
        assert torch.equal(rows, expected("reduce_scatter", (257, 401), rank, world_size, torch.float32))


def drain_then_wait(rank: int, world_size: int) -> tuple[Tensor, str]:
    transport = Exchange(everyone())
    handle = launch(transport, "all_gather", ((7, 2),))
    transport.drain()
    (full,) = handle.wait()
    with pytest.raises(RuntimeError) as caught:
        handle.wait()
    return full, str(caught.value)


def test_a_drained_handle_still_has_its_results_and_a_second_wait_is_an_error(ranks_pool: RanksPool) -> None:
    for full, message in ranks_pool.run(2, drain_then_wait):
        assert torch.equal(full, known((7, 2), 0))
        assert message == "this handle was already waited for; call wait once per launch"


def during_user_messages(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """A user's own message is in flight meanwhile."""
    mine, theirs = torch.full((3,), float(rank)), torch.empty(3)
    works = [dist.irecv(theirs, 1 - rank), dist.isend(mine, 1 - rank)]
    (mean,) = launch(Exchange(everyone()), "all_reduce", ((3,),)).wait()
    for work in works:
        assert work is not None
        work.wait()
    return mean, theirs


def test_user_messages_do_not_get_mixed_up_with_ours(ranks_pool: RanksPool) -> None:
    assert TAG != 0
    for rank, (mean, theirs) in enumerate(ranks_pool.run(2, during_user_messages)):
        assert torch.equal(mean, mean_of((3,), 2, torch.float32))
        assert theirs.tolist() == [1.0 - rank] * 3


def in_a_subgroup(rank: int, world_size: int) -> Tensor | None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    grad = torch.full((3,), float(rank))
    return transport_for(group, CPU).all_reduce([grad], [param((3,))]).wait()[0]


def test_ranks_are_those_of_the_group(ranks_pool: RanksPool) -> None:
    _, *means = ranks_pool.run(3, in_a_subgroup)
    assert [mean.tolist() for mean in means] == [[1.5] * 3] * 2


def test_a_failure_in_the_background_is_raised_by_its_wait_and_the_thread_goes_on() -> None:
    done: list[int] = []
    failed = in_background(AVERAGER, lambda: done.index(0) and None)
    after = in_background(AVERAGER, lambda: done.append(1))
    with pytest.raises(ValueError, match="not in list"):
        failed.result(timeout=10)
    after.result(timeout=10)
    assert done == [1]


# Choice of a transport


def choose(rank: int, world_size: int) -> tuple[str, str]:
    with pytest.raises(ValueError, match="backend") as caught:
        transport_for(everyone(), torch.device("meta"))
    return type(transport_for(everyone(), CPU)).__name__, str(caught.value)


def test_device_and_backend_choose_the_transport(ranks_pool: RanksPool) -> None:
    for name, message in ranks_pool.run(2, choose):
        assert name == "Exchange"
        assert "supports no meta tensors" in message
    assert ranks_pool.run(1, choose)[0][0] == "Alone"


def alone(rank: int, world_size: int) -> list[bool]:
    transport = transport_for(everyone(), CPU)
    shard, grad = torch.nn.Parameter(known((5, 2), 0)), known((2, 5), 0).t()
    (full,) = transport.all_gather([shard], [param((5, 2))]).wait()
    (into,) = transport.all_gather([shard], [param((5, 2))], into=[shard.detach()]).wait()
    means = [getattr(transport, kind)([grad], [param((5, 2))]).wait()[0] for kind in KINDS[1:]]
    transport.drain()
    return [
        isinstance(transport, Alone),
        torch.equal(full, shard) and torch.equal(into, shard),
        not full.requires_grad,
        *(torch.equal(mean, grad) and mean.is_contiguous() for mean in means),
    ]


def test_one_rank_needs_no_communication(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(1, alone) == [[True] * 5]


def on_fake_ranks(rank: int, world_size: int) -> tuple[str, list[list[Shape]], Tensor]:
    """Rank 3 of 8 without real peers: both native transports give the right shapes."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=3, world_size=8)
    try:
        chosen = type(transport_for(everyone(), CPU)).__name__
        shapes = ((5, 2), (16, 3), (9,))
        seen = [
            [tuple(result.shape) for result in launch(transport(everyone()), kind, shapes).wait()]
            for transport in (OneByOne, Grouped)
            for kind in KINDS
        ]
        for transport in (OneByOne, Grouped):
            transport(everyone()).trade({0: [torch.ones(2)]}, {1: [torch.ones(3, dtype=torch.int16)]}).wait()
        (full,) = Grouped(everyone()).all_gather([torch.full((2,), 3.0)], [param((15,))]).wait()
        return chosen, seen, full
    finally:
        dist.destroy_process_group()


def test_native_transports_on_eight_fake_ranks(ranks_pool: RanksPool) -> None:
    ((chosen, seen, full),) = ranks_pool.run(1, on_fake_ranks)
    assert chosen == "OneByOne"
    assert seen == [[(5, 2), (16, 3), (9,)], [(1, 2), (2, 3), (2,)], [(5, 2), (16, 3), (9,)]] * 2
    assert full.tolist() == [3.0] * 15  # fake ranks have the same values as ours


def calls_of_grouped(rank: int, world_size: int) -> tuple[list[Shape], list[str], int]:
    """The calls that NCCL would get for one bucket: shapes of inputs, operations, number of launches."""
    from thunder_zero.comm import native

    transport = Grouped(everyone())
    inputs: list[Tensor] = []
    ops: list[str] = []

    def record(output: Tensor, given: Tensor, group: object, op: dist.ReduceOp.RedOpType) -> None:
        inputs.append(given)
        ops.append(str(op))

    grads = [known((4, 2), rank), known((5,), rank)]
    with (
        mock.patch.object(native, "_reduce_scatter_single", record),
        mock.patch.object(native, "_coalescing_manager") as manager,
    ):
        transport.reduce_scatter(grads, [param((4, 2)), param((5,))])
    assert inputs[0].data_ptr() == grads[0].data_ptr(), "rows divisible by the ranks are not copied"
    assert inputs[1].tolist() == [*grads[1].tolist(), 0.0], "the padding is zero"
    return [tuple(given.shape) for given in inputs], ops, manager.call_count


def test_grouped_averages_in_one_launch_and_copies_only_to_pad(ranks_pool: RanksPool) -> None:
    for shapes, ops, launches in ranks_pool.run(2, calls_of_grouped):
        assert shapes == [(4, 2), (6,)]
        assert ops == ["RedOpType.AVG"] * 2
        assert launches == 1


def trade(rank: int, world_size: int, name: str) -> tuple[list[list[Tensor]], int]:
    """Each rank sends every other one tensors of several sizes, some empty; rank 0 sends rank 1 nothing."""
    transport, peers = transport_named(name), [peer for peer in range(world_size) if peer != rank]
    sizes: dict[tuple[int, int], Shape] = {}
    sizes |= {
        (one, other): (PACK_BELOW_BYTES, 3 + one, 0, 5 + other) for one in range(world_size) for other in range(9)
    }
    sizes[0, 1] = ()
    sent: list[int] = []
    real_send = pairwise.send

    def counting(message: Tensor, *where: object) -> Callable[[], object]:
        sent.append(message.nbytes)
        return real_send(message, *where)  # type: ignore[arg-type]

    outgoing = {peer: [known((size,), rank, seed=peer) for size in sizes[rank, peer]] for peer in peers}
    incoming = {peer: [torch.empty(size) for size in sizes[peer, rank]] for peer in peers}
    with mock.patch.object(pairwise, "send", counting):
        assert transport.trade(outgoing, incoming).wait() == ()
    assert not transport.in_flight
    return [incoming.get(peer, []) for peer in range(world_size)], len(sent)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Exchange", "OneByOne"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_trade_tensors_of_their_own_sizes(ranks_pool: RanksPool, world_size: int, name: str) -> None:
    """On gloo small ones share a message."""
    for rank, (found, messages_sent) in enumerate(ranks_pool.run(world_size, trade, name)):
        for peer, tensors in enumerate(found):
            assert len(tensors) == (0 if peer == rank or (peer, rank) == (0, 1) else 4)
            for tensor in tensors:
                assert torch.equal(tensor, known(tuple(tensor.shape), peer, seed=rank))
        others = world_size - 1 - (rank == 0)
        assert messages_sent == (2 * others if name == "Exchange" else 0)
