"""Estimates the memory traffic of AdamW, and a rank's memory that belongs to no tensor."""

from __future__ import annotations

from thunder_zero.tools.devices.device import Device

MiB, GiB = 1 << 20, 1 << 30

# CUDA's context, the code of kernels and the workspaces of cuBLAS took 723 MiB with the first tensor
# (https://discuss.pytorch.org/t/73021, 2020), here rounded up.
CONTEXT = GiB
# An NCCL communicator has 32 channels and 2 directions. Each channel and direction has buffers for the protocols simple
# (4 MiB), LL (512 KiB) and LL128 (about 4.7 MiB; DEFAULT_BUFFSIZE and others in
# https://github.com/NVIDIA/nccl/blob/master/src/init.cc).
COMMUNICATOR = 32 * 2 * int(9.2 * MiB)
# Torch's allocator has a segment of small blocks and one of large blocks that are not full. It rounds each block up to
# a multiple of BLOCK (https://github.com/pytorch/pytorch/blob/main/c10/core/AllocatorConfig.h: kSmallBuffer,
# kLargeBuffer, kMinBlockSize).
SEGMENTS = 2 * MiB + 20 * MiB
BLOCK = 512
OVERHEAD = (
    f"overhead that is no tensor: {CONTEXT >> 20:,} MiB for CUDA's context, {COMMUNICATOR >> 20} MiB for each NCCL "
    f"communicator (1; 3 with copies), {SEGMENTS >> 20} MiB for segments of the allocator that are not full, and "
    f"{BLOCK} B for each tensor; fragments are not counted"
)
# On two gloo ranks, a process took 409 MiB after three steps of a model of 130 kB (torch 2.13.0), here rounded up.
PROCESS = 512 * MiB
OVERHEAD_OF_CPU = (
    f"overhead that is no tensor: {PROCESS >> 20} MiB for the process with Python, torch and Thunder; fragments are "
    f"not counted"
)

TRAFFIC = 7  # times a shard's bytes: AdamW reads parameter, gradient and two averages, and writes all but the gradient


def overhead_bytes(device: Device, copies: int, storages: int, slices: int = 1) -> int:
    """Return the bytes of a device's memory on a rank that belong to no tensor. Measured devices are CPUs.

    ``copies`` is the number of replicas, ``slices`` the number of tensor-parallel ranks. ``storages`` is the number of
    storages, whose sizes the allocator rounds up to blocks.
    """
    if device.is_measured:
        return PROCESS
    communicators = (1 if copies == 1 else 3) + (slices > 1)
    return CONTEXT + communicators * COMMUNICATOR + SEGMENTS + storages * BLOCK
