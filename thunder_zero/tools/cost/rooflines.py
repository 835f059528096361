"""Closed forms: bytes of collectives, tokens that hide collectives, memory, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod

from thunder_zero.plan.policy import STAGES
from thunder_zero.tools.devices.device import Device

FORWARD, BACKWARD = 2, 4  # FLOPs for each parameter and token
GATHER, SCATTER = 1, 1  # bytes sent by one of many ranks, as multiples of the model's bytes


def all_reduce_bytes(nbytes: float, ranks: float = inf) -> float:
    """Return the bytes that each of N ranks sends to all-reduce ``nbytes``: 2 (N - 1) / N times ``nbytes``."""
    return 2 * (1 - 1 / ranks) * nbytes


def gather_bytes(nbytes: float, ranks: float = inf) -> float:
    """Return the bytes that each of N ranks sends to all-gather or reduce-scatter: (N - 1) / N times ``nbytes``."""
    return (1 - 1 / ranks) * nbytes


def tokens_to_hide(device: Device, stage: int, dtype: str = "bfloat16", itemsize: int = 2) -> float:
    """Return the smallest number of tokens per rank with which compute hides communication among many ranks.

    A parameter takes 2 FLOPs per token in forward and 4 in backward. Each all-gather and each reduce-scatter sends the
    parameter once, in elements of ``itemsize`` bytes, over the device's links inside a node.
    """
    intensity = device.peak(dtype) / device.intra_node.bytes_per_second  # FLOPs in the time to send a byte
    return max(times * itemsize * intensity / flops for flops, times in _phases(stage))


def _phases(stage: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (FLOPs per parameter and token, bytes sent divided by the model's bytes) for forward and for backward."""
    row = STAGES[stage]
    if not row.sharded:
        return (FORWARD, 0), (BACKWARD, GATHER + SCATTER)  # an all-reduce is a reduce-scatter and an all-gather
    return (FORWARD, GATHER), (BACKWARD, SCATTER if row.kept_unsharded else GATHER + SCATTER)


def state_bytes(parameters: float, stage: int = 0, ranks: int = 1, *, resident: int = 2, optimizer: int = 12) -> float:
    """Return the bytes of parameters, gradients and optimizer state of a rank, in mixed precision with Adam.

    A parameter element takes ``resident`` bytes, and so does its gradient. Its optimizer state takes ``optimizer``
    bytes: a float32 copy of the parameter, and two averages. The stage decides which of these tensors are sharded.
    """
    row = STAGES[stage]
    shares = {
        "parameter": resident / (ranks if row.sharded and not row.kept_unsharded else 1),
        "gradient": resident / (ranks if row.sharded and not row.resident else 1),
        "optimizer": optimizer / (ranks if row.sharded else 1),
    }
    return parameters * sum(shares.values())


def tensor_bytes(*shape: int, itemsize: int = 4) -> int:
    """Return the bytes of a dense tensor."""
    return prod(shape) * itemsize


@dataclass(frozen=True)
class GptShape:
    """The sizes of a decoder-only transformer without biases and norms, which ties its embedding to its head. The
    hidden layers of the MLPs have the width ``hidden``."""

    layers: int
    width: int
    hidden: int
    vocabulary: int
    length: int

    @property
    def parameters(self) -> int:
        """The number of elements of all matrices."""
        block = 4 * self.width**2 + 2 * self.width * self.hidden
        return self.layers * block + self.vocabulary * self.width

    def flops_6n(self, tokens: float) -> float:
        """Return the FLOPs of a step: 6 per parameter and token (Kaplan et al., 2020)."""
        return (FORWARD + BACKWARD) * self.parameters * tokens

    def flops_with_attention(self, tokens: float) -> float:
        """Return the FLOPs of a step with attention, including masked scores (PaLM, appendix B)."""
        attention = 3 * 2 * 2 * self.layers * self.width * self.length  # each token has two products with all tokens
        return self.flops_6n(tokens) + attention * tokens

    def flops_megatron(self, tokens: float, passes: int = 3) -> float:
        """Return the FLOPs of a step by the formula of Narayanan et al., 2021.

        ``passes`` is 4 if backward recomputes forward, otherwise 3. The formula was derived for 4 passes. Some scripts
        also use it with 3 passes, which undercounts the head's FLOPs.
        """
        bracket = 1 + self.length / (6 * self.width) + self.vocabulary / (16 * self.layers * self.width)
        return 24 * passes * tokens * self.layers * self.width**2 * bracket
