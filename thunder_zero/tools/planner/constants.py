"""What a GPU's memory holds beside tensors, as stated constants."""

from __future__ import annotations

from dataclasses import dataclass

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Beside:
    """Bytes beside tensors.

    Attributes:
        context: of CUDA, with the code of kernels and the workspaces of cuBLAS.
        communicator: of each NCCL communicator.
        segments: of torch's allocator: a segment of small blocks and one of larger ones that are not full.
        block: to a multiple of which the allocator rounds each block up.
    """

    # 723 MiB with the first tensor (https://discuss.pytorch.org/t/73021, 2020); a round number above it
    context: int = GiB
    # buffers of a channel and direction: 4 MiB, 512 KiB and about 4.7 MiB for the protocols simple, LL and LL128
    # (DEFAULT_BUFFSIZE and others, https://github.com/NVIDIA/nccl/blob/master/src/init.cc); 32 channels, 2 directions
    communicator: int = 32 * 2 * int(9.2 * MiB)
    # https://github.com/pytorch/pytorch/blob/main/c10/core/AllocatorConfig.h: kSmallBuffer, kLargeBuffer, kMinBlockSize
    segments: int = 2 * MiB + 20 * MiB
    block: int = 512

    def nbytes(self, communicators: int, storages: int) -> int:
        """Bytes beside this many storages; each of them is rounded up by less than a block."""
        return self.context + communicators * self.communicator + self.segments + storages * self.block

    def __str__(self) -> str:
        return (
            f"beside tensors: {self.context >> 20:,} MiB for CUDA's context, {self.communicator >> 20} MiB for each "
            f"NCCL communicator (1; 3 with copies), {self.segments >> 20} MiB for segments of the allocator that are "
            f"not full, and {self.block} B for each tensor; fragments are not counted"
        )


BESIDE = Beside()
