"""Digests of shards depend only on the bytes, and on every byte."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from thunder_zero.sharded import digests
from thunder_zero.sharded.digests import BLOCK, digests_of

MIB = 1 << 20
SIZES = (0, 1, 7, 8, 8 * BLOCK, 8 * BLOCK + 3, 8 * MIB + 8 * BLOCK + 5)  # bytes: no block, one block, blocks of blocks


def random_bytes(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_depends_on_every_byte_but_not_on_the_address(size: int) -> None:
    there = torch.empty(size + 3, dtype=torch.uint8)[3:].copy_(random_bytes(size))
    (expected,) = map(int, digests_of([random_bytes(size)]))
    assert list(map(int, digests_of([there, there]))) == [expected, expected]
    with mock.patch.object(digests, "MULTIPLY_INTEGERS", ()):
        assert list(map(int, digests_of([there]))) == [expected]
    for place in range(0, size, max(1, size // 9)):
        there[place] ^= 1
        assert list(map(int, digests_of([there]))) != [expected], place
        there[place] ^= 1


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_that_keep_a_sum_change_the_digest(dtype: torch.dtype) -> None:
    values = (random_bytes(4800) % 2).to(dtype).view(6, 800)
    swapped, turned = values[[1, 0, 2, 3, 4, 5]], values.view(60, 80).t().contiguous()
    changed = [values, swapped, turned, torch.zeros_like(values)]
    if dtype is torch.bool:
        changed.append(~values)
    else:
        some = torch.arange(6)[:, None] == torch.tensor([2, 3, 3, 3] * 200)  # an even number
        changed += [-(values + 1), values + 1, torch.where(some, -(values + 1), values + 1)]
    assert len(set(map(int, digests_of(changed)))) == len(changed)
