"""needed while: torch draws numbers for slices only on DTensors, and only on GPUs.

::

    state = generator_of_slice(1, device)        a new state for each slice and each step
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

NAME = "thunder_zero::generator_of_slice"

torch.library.define(NAME, "(int part, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def generator_of_slice(part: int, device: torch.device) -> Tensor:
    """Return the state of a generator for a slice, and advance the device's generator equally on all ranks."""
    if device.type == "cpu":
        drawn_number = int(torch.randint(1 << 62, ()))
    else:  # reading a number that the device drew would wait for the device
        module = torch.get_device_module(device)
        state = module.get_rng_state(device)
        drawn_number = int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:8], "big")
        seed, offset = state.view(torch.int64).tolist()
        module.set_rng_state(torch.tensor([seed, offset + 4]).view(torch.uint8), device)
    digest = hashlib.sha256(f"{drawn_number} {part}".encode()).digest()
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return generator.get_state()


@torch.library.register_fake(NAME)
def _fake(part: int, device: torch.device) -> Tensor:
    """Return a tensor with the shape and dtype of the state."""
    return torch.empty(len(torch.get_rng_state()) if device.type == "cpu" else 16, dtype=torch.uint8, device="cpu")


GENERATOR_OF_SLICE: Any = torch.ops.thunder_zero.generator_of_slice.default
