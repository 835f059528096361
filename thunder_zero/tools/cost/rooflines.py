"""Closed forms: bytes of collectives, tokens that hide them, memory of the state, FLOPs of a GPT."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod

from thunder_zero.plan.policy import STAGES
from thunder_zero.tools.devices.device import Device

FORWARD, BACKWARD = 2, 4  # FLOPs of a parameter of a product and a token
GATHER, SCATTER = 1, 1  # how often an all-gather, or a reduce-scatter, sends the model, with many ranks


def all_reduce_bytes(nbytes: float, ranks: float = inf) -> float:
    """Bytes that each rank sends to all-reduce ``nbytes``: 2 (N - 1) / N of them."""
    return 2 * (1 - 1 / ranks) * nbytes


def gather_bytes(nbytes: float, ranks: float = inf) -> float:
    """Bytes that each rank sends to all-gather, or to reduce-scatter, ``nbytes`` in all: (N - 1) / N of them."""
    return (1 - 1 / ranks) * nbytes


def tokens_to_hide(device: Device, stage: int, dtype: str = "bfloat16", itemsize: int = 2) -> float:
    """Tokens of a device from which on compute hides communication, in the phase that needs more, with many ranks.

    A parameter has 2 FLOPs a token in forward and 4 in backward; all-gathers and reduce-scatters send it once each,
    in elements of ``itemsize`` bytes, over the device's links inside a node.
    """
    intensity = device.peak(dtype) / device.intra_node.bytes_per_second  # FLOPs in the time of a byte
    return max(times * itemsize * intensity / flops for flops, times in _phases(stage))


def _phases(stage: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """FLOPs of a parameter and token, and how often the model travels, in forward and in backward."""
    row = STAGES[stage]
    if not row.sharded:
        return (FORWARD, 0), (BACKWARD, GATHER + SCATTER)  # an all-reduce is both
    return (FORWARD, GATHER), (BACKWARD, SCATTER if row.kept_unsharded else GATHER + SCATTER)


def state_bytes(parameters: float, stage: int = 0, ranks: int = 1, *, resident: int = 2, optimizer: int = 12) -> float:
    """Bytes of parameters, gradients and the optimizer's state of a rank, in mixed precision with Adam.

    ``resident`` bytes of a parameter and as many of its gradient; ``optimizer``: float32 copies of the parameter and
    of two averages. The stage says which of them are sharded.
    """
    row = STAGES[stage]
    shares = {
        "parameter": resident / (ranks if row.sharded and not row.kept_unsharded else 1),
        "gradient": resident / (ranks if row.sharded and not row.resident else 1),
        "optimizer": optimizer / (ranks if row.sharded else 1),
    }
    return parameters * sum(shares.values())


def tensor_bytes(*shape: int, itemsize: int = 4) -> int:
    """Bytes of a dense tensor."""
    return prod(shape) * itemsize


@dataclass(frozen=True)
class GptShape:
    """The sizes of a decoder-only transformer with a tied embedding, without biases and norms; ``hidden`` is the width
    inside an MLP of two layers."""

    layers: int
    width: int
    hidden: int
    vocabulary: int
    length: int

    @property
    def parameters(self) -> int:
        """Of all matrices."""
        block = 4 * self.width**2 + 2 * self.width * self.hidden
        return self.layers * block + self.vocabulary * self.width

    def flops_6n(self, tokens: float) -> float:
        """Of a step: 6 a parameter and token (Kaplan et al., 2020)."""
        return (FORWARD + BACKWARD) * self.parameters * tokens

    def flops_with_attention(self, tokens: float) -> float:
        """Of a step: the products of parameters and those of attention, all scores (PaLM, appendix B)."""
        of_attention = 3 * 2 * 2 * self.layers * self.width * self.length  # two products of a token with all others
        return self.flops_6n(tokens) + of_attention * tokens

    def flops_megatron(self, tokens: float, passes: int = 3) -> float:
        """Of a step, by the formula of Narayanan et al., 2021, whose bracket is that of 4 passes.

        ``passes``: 4 if backward computes forward again, otherwise 3: scripts put 3 before the same bracket, which
        counts the head less than the matrices.
        """
        bracket = 1 + self.length / (6 * self.width) + self.vocabulary / (16 * self.layers * self.width)
        return 24 * passes * tokens * self.layers * self.width**2 * bracket
