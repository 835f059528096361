"""Transports give the values of one process, to the bit on gloo, with the fewest bytes and little memory.

Every rank's tensors come from a seed, so each process knows the tensors of all ranks and asserts on its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import count_sends
from tests.harness.ranks import RanksPool, everyone
from tests.harness.tiers import slow
from thunder_zero.comm import native
from thunder_zero.comm.backends import transport_for
from thunder_zero.comm.handle import AVERAGER, SENDER, Waitable, in_background
from thunder_zero.comm.native import CoalescedNccl, PerTensor
from thunder_zero.comm.pairwise import PACK_BELOW_BYTES, PairwiseGloo, mean_into, messages, packed_messages
from thunder_zero.comm.transport import SingleRank, Transport
from thunder_zero.plan import layout
from thunder_zero.plan.traffic import gather_traffic, reduce_traffic

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Case = tuple[str, Shapes, torch.dtype]

CPU = torch.device("cpu")
THREADS = Path("/proc/self/task")
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
EVEN: Shapes = ((12, 5), (24, 12, 300))  # rows and numbers of elements that 2, 3 and 4 divide
UNEVEN: Shapes = ((5,), (7, 3), (13, 2, 2))
LARGE: Shapes = ((257, 401),)  # its share stays above PACK_BELOW_BYTES for W = 2, 3, 4
FEW_ROWS: Shapes = ((1, 4), (2,), (3, 3))
MIXED: Shapes = ((3,), (257, 401), (1, 7), (350, 300), (64,))  # three small tensors among two large ones
SCALARS: Shapes = ((), (0, 3), (1,), (257, 401))  # replicated parameters may have these shapes, too
BLOCKS: Shapes = ((5,), (401, 402))  # the large one spans several blocks of the half-precision sum
CASES: tuple[Case, ...] = (
    *((kind, shapes, torch.float32) for kind in KINDS for shapes in (EVEN, UNEVEN, LARGE, FEW_ROWS, MIXED)),
    ("all_reduce", SCALARS, torch.float32),
    *((kind, BLOCKS, dtype) for kind in KINDS for dtype in (torch.bfloat16, torch.float16, torch.float64)),
)


def plan_of(kind: str, shapes: Shapes, dtype: torch.dtype = torch.float32) -> tz.schedule.Plan:
    """Return a plan of parameters that are sharded (stage 3) or whole (stage 0)."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])
    policy = tz.Policy(stage=0 if kind == "all_reduce" else 3)
    return tz.schedule.make_plan(module, policy, tz.schedule.Mesh.of(dist.get_world_size(), dist.get_rank()))


def make_tensor(shape: Shape, rank: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return the gradient of ``rank``; that of rank 0 is also the full parameter."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def shard_of(full: Tensor) -> Tensor:
    """Return this rank's rows and their padding."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = full.new_zeros(layout.shard_shape(tuple(full.shape), world_size))
    start, stop = layout.row_range(full.shape[0], world_size, rank)
    shard[: stop - start] = full[start:stop]
    return shard


def mean_of(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the mean: summed in rank order, half precision in float32, divided once."""
    grads = [make_tensor(shape, rank, dtype) for rank in range(dist.get_world_size())]
    total = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
    for grad in grads:
        total += grad
    return (total / len(grads)).to(dtype)


def inputs_of(kind: str, shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    if kind == "all_gather":
        return [shard_of(make_tensor(shape, 0, dtype)) for shape in shapes]
    return [make_tensor(shape, dist.get_rank(), dtype) for shape in shapes]


def expected_of(kind: str, shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    if kind == "all_gather":
        return [make_tensor(shape, 0, dtype) for shape in shapes]
    means = [mean_of(shape, dtype) for shape in shapes]
    return means if kind == "all_reduce" else list(map(shard_of, means))


def launch(transport: Transport, kind: str, shapes: Shapes) -> Waitable:
    return start(transport, kind, inputs_of(kind, shapes), shapes)


def start(transport: Transport, kind: str, inputs: Sequence[Tensor], shapes: Shapes) -> Waitable:
    """Start a collective of tensors; ``shapes`` are the full ones."""
    if kind == "all_gather":
        return transport.all_gather(inputs, shapes)
    return transport.reduce_scatter(inputs) if kind == "reduce_scatter" else transport.all_reduce(inputs)


def assert_same(results: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 0.0) -> None:
    """Compare shapes, dtypes and values. Without a tolerance the bits are equal, on all ranks and in every run."""
    torch.testing.assert_close(list(results), list(expected), rtol=tolerance, atol=tolerance)


def transpose_memory(tensor: Tensor) -> Tensor:
    """Return the same values in another order of memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


# One bucket


def carry_all(rank: int, world_size: int, make: Callable[..., Transport]) -> None:
    transport = make(everyone())
    for case in CASES:
        if make is PairwiseGloo or case[-1] is torch.float32:  # the backend sums in half precision
            inputs = inputs_of(*case)
            carry(transport, case, inputs)
            if case[0] != "all_gather":
                carry(transport, case, list(map(transpose_memory, inputs)))


def carry(transport: Transport, case: Case, inputs: list[Tensor]) -> None:
    kind, shapes, _ = case
    before = [tensor.clone() for tensor in inputs]
    is_exact = isinstance(transport, PairwiseGloo) or kind == "all_gather"
    with count_sends() as sent:
        results = start(transport, kind, inputs, shapes).wait()
    assert_same(results, expected_of(*case), 0.0 if is_exact else 1e-6)
    assert_same(inputs, before)
    for tensor, result in zip(inputs, results, strict=True):
        assert result.is_contiguous(), case
        assert not result.requires_grad, case
        assert not result.numel() or result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr(), case
    if isinstance(transport, PairwiseGloo):
        assert_least(sent, case)


def assert_least(sent: list[int], case: Case) -> None:
    """Check the bytes of each message from this rank."""
    kind, shapes, dtype = case
    peers, plan = dist.get_world_size() - 1, plan_of(*case)
    if kind == "all_reduce":  # parts are uneven: a rank is near the minimum, the sum of all ranks exactly at it
        total = torch.tensor(sum(sent))
        dist.all_reduce(total)
        assert total == 2 * peers * sum(map(prod, shapes)) * dtype.itemsize, (case, total)
    if kind != "all_reduce" or shapes == EVEN:
        traffic = gather_traffic if kind == "all_gather" else reduce_traffic
        assert sum(sent) == sum(traffic(plan, param).sent for param in plan.params), (case, sent)
    if shapes == MIXED:  # small tensors share a message; means need a second one, except on two ranks
        assert len(sent) == 3 * peers * (2 if kind == "all_reduce" and peers > 1 else 1), (case, sent)


@pytest.mark.parametrize("world_size", [2, 3, *slow(4)])
def test_the_gloo_exchange_is_exact_and_sends_the_fewest_bytes(ranks_pool: RanksPool, world_size: int) -> None:
    ranks_pool.run(world_size, carry_all, PairwiseGloo)


@pytest.mark.parametrize("world_size", [3, *slow(2)])
def test_plain_collectives_give_close_values(ranks_pool: RanksPool, world_size: int) -> None:
    ranks_pool.run(world_size, carry_all, PerTensor)


def half_precision_keeps_its_values(rank: int, world_size: int) -> None:
    """Native sums divide by about the square root of W before and after: dividing by 4 first makes 2**-23 a zero."""
    for make, large in ((PairwiseGloo, 60000.0), (PerTensor, 120000.0 / world_size)):
        for value in (large, 2.0**-23):
            mean = torch.full((9,), value, dtype=torch.float16)
            assert_same(make(everyone()).reduce_scatter([mean]).wait(), [shard_of(mean)])
            assert_same(make(everyone()).all_reduce([mean]).wait(), [mean])
    # (256 + 1 + 1 + 1) / 4 = 64.75, rounded to 65; a sum in bfloat16 stays at 256 and gives 64
    grad = torch.full((4,), 1.0 if rank else 256.0, dtype=torch.bfloat16)
    mean = torch.full((4,), (255 + world_size) / world_size, dtype=torch.bfloat16)
    assert_same(PairwiseGloo(everyone()).reduce_scatter([grad]).wait(), [shard_of(mean)])
    assert_same(PairwiseGloo(everyone()).all_reduce([grad]).wait(), [mean])


@pytest.mark.parametrize("world_size", [4, *slow(2)])
def test_float16_neither_overflows_nor_vanishes(ranks_pool: RanksPool, world_size: int) -> None:
    ranks_pool.run(world_size, half_precision_keeps_its_values)


def test_tensors_share_messages_by_their_bytes_to_one_peer() -> None:
    limit = torch.empty(PACK_BELOW_BYTES // 4)
    below = limit[:-1]
    assert messages([limit, below, limit, below]) == [[1, 3], [0], [2]]
    assert messages([limit]) == [[0]]
    rows, few, odd = (4 * limit.numel(), 1), (4, 3), (5, 3)
    small, large = packed_messages((few, rows, (8,)), 4, 4, PACK_BELOW_BYTES)
    assert (small.members, small.shard_shapes, small.sizes, small.is_even) == ((0, 2), ((1, 3), (2,)), (3, 2), True)
    assert (large.members, large.sizes, large.is_even) == ((1,), (limit.numel(),), False)
    assert not packed_messages((few, odd), 4, 4, PACK_BELOW_BYTES)[0].is_even


def test_the_mean_may_overwrite_its_first_two_parts() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for out in (0, 1):
            parts = [torch.full((70_000,), value, dtype=dtype) for value in (3.0, 5.0, 10.0)]
            mean_into(parts[out], parts)
            assert parts[out].unique().tolist() == [6.0]


# Memory


def a_gather_into_buffers_fills_the_other_rows(rank: int, world_size: int) -> None:
    for make, shapes in ((PairwiseGloo, MIXED), (PerTensor, UNEVEN)):
        fulls = [make_tensor(shape, 0) for shape in shapes]
        buffers, shards = [], []
        for full in fulls:
            buffer = torch.full(layout.padded_shape(tuple(full.shape), world_size), torch.nan)
            chunk = layout.stored_rows(full.shape[0], world_size)
            rows = buffer[rank * chunk : (rank + 1) * chunk]
            rows.copy_(shard_of(full))
            buffers.append(buffer)
            shards.append(nn.Parameter(rows))
        results = make(everyone()).all_gather(shards, shapes, into=buffers).wait()
        assert_same(results, fulls)
        assert_same([shard.detach() for shard in shards], list(map(shard_of, fulls)))
        in_place = [result.data_ptr() == buffer.data_ptr() for result, buffer in zip(results, buffers, strict=True)]
        assert all(in_place), in_place


def wait_drops_the_inputs(rank: int, world_size: int) -> None:
    grad = make_tensor((350, 300), rank)
    before = uses(grad)
    handle = PairwiseGloo(everyone()).all_reduce([grad])
    assert uses(grad) > before, "nothing keeps the gradient alive while it travels"
    handle.wait()
    assert uses(grad) == before


def uses(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def nothing_made_here_is_an_inference_tensor(rank: int, world_size: int) -> None:
    with torch.inference_mode():
        for kind in KINDS:
            results = launch(PairwiseGloo(everyone()), kind, ((5,), (257, 401))).wait()
            assert not any(result.is_inference() for result in results), kind


# In flight


def buckets_are_waited_for_in_any_order(rank: int, world_size: int) -> None:
    """Launch all three collectives twice, and wait in another order on each rank."""
    transport, shapes = PairwiseGloo(everyone()), ((257, 401), (5,))
    handles = [(kind, launch(transport, kind, shapes)) for _ in range(2) for kind in KINDS]
    for kind, handle in handles[rank:] + handles[:rank]:
        assert_same(handle.wait(), expected_of(kind, shapes))


def an_all_reduce_goes_on_while_nobody_waits(rank: int, world_size: int) -> None:
    handle = launch(PairwiseGloo(everyone()), "all_reduce", LARGE)
    if rank == 0:
        dist.barrier()  # other ranks arrive here only with the means, which need rank 0's part
    assert_same(handle.wait(), expected_of("all_reduce", LARGE))
    if rank != 0:
        dist.barrier()


def an_all_reduce_that_has_to_wait_blocks_nothing_else(rank: int, world_size: int) -> None:
    """Rank 1 launches its all-reduce only after a gather that the other ranks launched after theirs has ended."""
    pair = dist.new_group([0, 2])
    if rank == 1:
        dist.barrier()
    handle = launch(PairwiseGloo(everyone()), "all_reduce", LARGE)
    if rank != 1:
        (full,) = PairwiseGloo(pair).all_gather([torch.full((1, 2), float(rank))], [(2, 2)]).wait()
        assert full.tolist() == [[0.0, 0.0], [2.0, 2.0]], full
        dist.barrier()
    assert_same(handle.wait(), expected_of("all_reduce", LARGE))


def drain_ends_all_that_a_failed_step_left(rank: int, world_size: int) -> None:
    """After launches without waits, drain makes the next step right; each result is returned once."""
    transport, shapes = PairwiseGloo(everyone()), ((350, 300), (7,))
    handles = [launch(transport, kind, shapes) for kind in KINDS]
    was_in_flight = transport.in_flight
    transport.drain()
    assert (was_in_flight, transport.in_flight) == (True, False)
    assert_same(launch(transport, "reduce_scatter", LARGE).wait(), expected_of("reduce_scatter", LARGE))
    assert_same(handles[0].wait(), expected_of("all_gather", shapes))
    with pytest.raises(RuntimeError, match="already waited for; call wait once"):
        handles[0].wait()


def ranks_trade_tensors_of_their_own_sizes(rank: int, world_size: int) -> None:
    """Trade tensors of several sizes, some empty; rank 0 sends rank 1 nothing. On gloo small ones share a message."""
    peers = [peer for peer in range(world_size) if peer != rank]

    def sizes(source: int, target: int) -> Shape:
        return () if (source, target) == (0, 1) else (PACK_BELOW_BYTES, 3 + source, 0, 5 + target)

    for make in (PairwiseGloo, PerTensor):
        transport = make(everyone())
        outgoing = {peer: [make_tensor((size,), rank, seed=peer) for size in sizes(rank, peer)] for peer in peers}
        incoming = {peer: [torch.empty(size) for size in sizes(peer, rank)] for peer in peers}
        with count_sends() as sent:
            assert transport.trade(outgoing, incoming).wait() == ()
        assert not transport.in_flight
        for peer in peers:
            assert_same(incoming[peer], [make_tensor((size,), peer, seed=rank) for size in sizes(peer, rank)])
        assert len(sent) == (2 * (len(peers) - (rank == 0)) if make is PairwiseGloo else 0), sent


def test_a_background_failure_is_raised_by_its_wait_and_the_thread_goes_on() -> None:
    done: list[int] = []
    failed = in_background(AVERAGER, lambda: done.index(0) and None)
    after = in_background(AVERAGER, lambda: done.append(1))
    with pytest.raises(ValueError, match="not in list"):
        failed.result()
    after.result()
    assert done == [1]


def threads_that_send_wait_for_a_core(rank: int, world_size: int) -> None:
    tz.compile(nn.Linear(2, 2))
    in_background(SENDER, int).result()
    comms = {int(thread.name): (thread / "comm").read_text().strip() for thread in THREADS.iterdir()}
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    policies = {names.get(thread, comm): os.sched_getscheduler(thread) for thread, comm in comms.items()}
    assert policies["gloo_tcp_loop"] == policies["thunder_zero sender"] == os.SCHED_BATCH, policies
    assert os.sched_getscheduler(os.getpid()) == os.SCHED_OTHER, policies  # Python has another number, after a fork


@pytest.mark.skipif(not THREADS.exists(), reason="reads the scheduling of threads from Linux")
def test_a_thread_that_sends_does_not_preempt_another_thread(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, threads_that_send_wait_for_a_core)


# Other transports


def one_rank_needs_no_communication(rank: int, world_size: int) -> None:
    transport = transport_for(everyone(), CPU)
    assert type(transport) is SingleRank
    shard, grad = nn.Parameter(make_tensor((5, 2), 0)), make_tensor((2, 5), 0).t()
    for into in (None, [shard.detach()]):
        results = transport.all_gather([shard], [(5, 2)], into=into).wait()
        assert_same(results, [shard.detach()])
        assert not results[0].requires_grad
    for kind in KINDS[1:]:
        (mean,) = start(transport, kind, [grad], ((5, 2),)).wait()
        assert_same([mean], [grad])
        assert mean.is_contiguous()
    transport.drain()


def native_transports_run_on_eight_fake_ranks(rank: int, world_size: int) -> None:
    """On rank 3 of 8 fake ranks, both native transports give the right shapes."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=3, world_size=8)
    shapes = ((5, 2), (16, 3), (9,))
    try:
        assert type(transport_for(everyone(), CPU)) is PerTensor
        for make in (PerTensor, CoalescedNccl):
            transport = make(everyone())
            for kind in KINDS:
                actual = [tuple(result.shape) for result in launch(transport, kind, shapes).wait()]
                assert actual == ([(1, 2), (2, 3), (2,)] if kind == "reduce_scatter" else list(shapes)), (kind, actual)
            transport.trade({0: [torch.ones(2)]}, {1: [torch.ones(3, dtype=torch.int16)]}).wait()
        (full,) = CoalescedNccl(everyone()).all_gather([torch.full((2,), 3.0)], [(15,)]).wait()
        assert full.tolist() == [3.0] * 15, "fake ranks have the same values as ours"
    finally:
        dist.destroy_process_group()


def grouped_averages_in_one_launch_and_copies_only_to_pad(rank: int, world_size: int) -> None:
    """Record the calls that NCCL would get for one bucket."""
    calls: list[tuple[Tensor, Any]] = []

    def record(output: Tensor, tensor: Tensor, group: object, op: dist.ReduceOp.RedOpType) -> None:
        calls.append((tensor, op))

    shapes = ((4, 2), (5,))
    even, odd = inputs_of("reduce_scatter", shapes)
    with mock.patch.object(native, "reduce_scatter_single", record), mock.patch.object(native, "one_launch") as manager:
        CoalescedNccl(everyone()).reduce_scatter([even, odd])
    assert manager.call_count == 1
    (first, *ops), (second, op) = calls
    assert [*ops, op] == [dist.ReduceOp.AVG] * 2, ops
    assert first.data_ptr() == even.data_ptr(), "rows divisible by the ranks are not copied"
    assert second.tolist() == [*odd.tolist(), 0.0], "the padding is zero"


@pytest.mark.parametrize(
    ("world_size", "promise"),
    [
        (3, a_gather_into_buffers_fills_the_other_rows),
        (3, wait_drops_the_inputs),
        (2, nothing_made_here_is_an_inference_tensor),
        (4, buckets_are_waited_for_in_any_order),
        (3, an_all_reduce_goes_on_while_nobody_waits),
        (3, an_all_reduce_that_has_to_wait_blocks_nothing_else),
        (3, drain_ends_all_that_a_failed_step_left),
        (3, ranks_trade_tensors_of_their_own_sizes),
        (1, one_rank_needs_no_communication),
        (1, native_transports_run_on_eight_fake_ranks),
        (2, grouped_averages_in_one_launch_and_copies_only_to_pad),
        *slow((2, wait_drops_the_inputs), (2, buckets_are_waited_for_in_any_order)),
    ],
)
def test_each_promise_holds_on_ranks(ranks_pool: RanksPool, world_size: int, promise: Callable[..., None]) -> None:
    ranks_pool.run(world_size, promise)
