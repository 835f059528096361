"""Counts the bytes of tensors that a contestant holds between steps."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PLAIN = (torch.Tensor, nn.Parameter)  # the memory of a DTensor is that of its plain tensor


def alive() -> dict[int, int]:
    """Bytes of the storages of all CPU tensors that Python can reach, by address; those in the memory of another one
    do not count."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in PLAIN and thing.device.type == "cpu"]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    spans = sorted((storage.data_ptr(), -storage.nbytes()) for storage in storages if storage.nbytes())
    found, end = {}, 0
    for address, negative in spans:
        if address >= end:
            found[address] = -negative
            end = address - negative
    return found


def held_bytes(before: dict[int, int], model: nn.Module) -> int:
    """Bytes alive now but not ``before``; and DDP's buckets, which no Python object holds."""
    held = sum(nbytes for address, nbytes in alive().items() if address not in before)
    if isinstance(model, DistributedDataParallel):
        held += sum(param.numel() * param.element_size() for param in model.parameters())
    return held
