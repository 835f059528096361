"""Shard arithmetic on integers: which rows a rank owns, how many it stores, how many are padding.

A parameter is split along dim 0 into shards of ``stored_rows`` rows. The last ranks pad their shards with zeros::

    rows = 5, world_size = 4 -> stored_rows = 2

    rank 0 [0 1]   rank 1 [2 3]   rank 2 [4 .]   rank 3 [. .]      (. = padding)

Rank 0 owns the most rows, and so sends the most in a gather. Padding is stored, so that all shards have one shape.
Padding is not sent if the transport allows uneven messages.
"""

from math import prod


def row_range(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the half-open range of the real (unpadded) rows that ``rank`` owns. It may be empty."""
    start, stop = stored_range(rows, world_size, rank)
    return min(start, rows), min(stop, rows)


def stored_rows(rows: int, world_size: int) -> int:
    """Return the number of rows that each rank stores, padding included: ``ceil(rows / world_size)``."""
    return -(-rows // world_size)


def stored_range(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the half-open range of the rows that ``rank`` stores, in the concatenation of all shards."""
    stored = stored_rows(rows, world_size)
    return rank * stored, (rank + 1) * stored


def padding_rows(rows: int, world_size: int, rank: int) -> int:
    """Return the number of rows of padding that ``rank`` stores. Only the last ranks have any."""
    start, stop = row_range(rows, world_size, rank)
    return stored_rows(rows, world_size) - (stop - start)


def is_sharded(shape: tuple[int, ...]) -> bool:
    """Return whether a parameter of this shape can be split into rows: it is neither 0-dim nor empty."""
    return len(shape) > 0 and prod(shape) > 0


def shard_shape(shape: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    """Return the shape of the shard that each rank stores, padding included."""
    return (stored_rows(shape[0], world_size), *shape[1:]) if is_sharded(shape) else shape


def padded_shape(shape: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    """Return the shape of the concatenated shards of all ranks, padding included."""
    return (world_size * stored_rows(shape[0], world_size), *shape[1:]) if is_sharded(shape) else shape


def owned_numel(shape: tuple[int, ...], world_size: int, rank: int) -> int:
    """Return the number of real elements that ``rank`` owns."""
    if not is_sharded(shape):
        return prod(shape)
    start, stop = row_range(shape[0], world_size, rank)
    return (stop - start) * prod(shape[1:])


def gather_sends(shape: tuple[int, ...], world_size: int, rank: int) -> int:
    """Return the number of elements that ``rank`` sends in one all-gather: its rows, once to each other rank."""
    return owned_numel(shape, world_size, rank) * (world_size - 1) if is_sharded(shape) else 0


def scatter_sends(shape: tuple[int, ...], world_size: int, rank: int) -> int:
    """Return the number of elements that ``rank`` sends in one reduce-scatter: the rows of all other ranks, once."""
    return prod(shape) - owned_numel(shape, world_size, rank) if is_sharded(shape) else 0


def all_reduce_sends(shape: tuple[int, ...], world_size: int) -> int:
    """Return how many elements each rank sends in one all-reduce: ``2 (W - 1) / W`` times the tensor's, rounded up.

    An all-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms,
    2009)."""
    return -(-2 * (world_size - 1) * prod(shape) // world_size)
