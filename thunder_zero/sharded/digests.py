"""Computes digests of shards, which detect the writes that bump no version.

Writes through ``.data``, numpy or a kernel bump no version. A digest is a weighted sum of a shard's 64-bit words modulo
2 ** 64, with a random weight for each position. Integer sums do not depend on the order of the words. One pass
suffices. A change goes undetected with a probability below 2 ** -30, unless an attacker knows the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

WORD_BYTES = 8
BLOCK = 1024  # words in one sum; further levels add these sums
LEVELS = 5  # levels of sums, enough for 1024 ** 5 words
MULTIPLY_INTEGERS = ("cpu",)  # devices whose matmul supports integers
CACHED = 64  # blocks at a time on these devices, so that a temporary copy stays in the caches
SLICE = 4096  # blocks at a time on other devices


@torch.no_grad()
def digests_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return an int64 digest for each tensor, (1,), on the tensors' device."""
    return [_sum(_words(tensor.detach().reshape(-1))) for tensor in tensors]


def _words(flat: Tensor) -> Tensor:
    """Return the bytes of a vector as int64. Copy and pad them with zeros if they are not aligned words."""
    if flat.nbytes % WORD_BYTES == 0 and flat.storage_offset() * flat.itemsize % WORD_BYTES == 0:
        return flat.view(torch.int64)
    words = torch.zeros(-(-flat.nbytes // WORD_BYTES), dtype=torch.int64, device=flat.device)
    words.view(torch.uint8)[: flat.nbytes] = flat.view(torch.uint8)
    return words


def _sum(words: Tensor) -> Tensor:
    """Return the weighted sum of words, (1,). Sum blocks, then sum the results, with new weights on each level."""
    weights = _weights(words.device)
    level = 0
    while len(words) > BLOCK:
        end = len(words) // BLOCK * BLOCK
        blocks, last_block = words[:end].view(-1, BLOCK), words[None, end:]
        words = torch.cat([_products(blocks, weights[level]), _products(last_block, weights[level])])
        level += 1
    return _products(words[None], weights[level])


def _products(blocks: Tensor, weights: Tensor) -> Tensor:
    """Return the dot product of each row of words with an equal number of weights.

    First add the upper half of each word to its lower half. Otherwise a change of the highest bits, such as a sign,
    would not change most products.
    """
    weights, multiplies = weights[: blocks.shape[1]], blocks.device.type in MULTIPLY_INTEGERS
    products = []
    for chunk in blocks.split(CACHED if multiplies else SLICE):
        mixed = (chunk >> 32).add_(chunk)
        products.append(mixed.mv(weights) if multiplies else mixed.mul_(weights).sum(1))
    return products[0] if len(products) == 1 else torch.cat(products)


@cache
def _weights(device: torch.device) -> Tensor:
    """Return random words of shape (LEVELS, BLOCK), which are equal in every process."""
    generator = torch.Generator().manual_seed(9)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (LEVELS, BLOCK), generator=generator).to(device)
