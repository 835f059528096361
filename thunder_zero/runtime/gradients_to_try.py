"""The gradients of stand-ins: noise, rows of many sizes, along the parameter, across it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EXPONENTS = (0, -6, 3)  # of ten: the scales of gradients; float64 is far from Inf and zero, squared too
DOWNHILL = 8  # steps at the end that go one way, as in training: some optimizers measure how far they get
OUTLIER = 1e3
SPREAD = 3  # rows differ by 10 ** -SPREAD to 10 ** SPREAD
TINY = 1e-300

Pattern = Callable[[Tensor, Tensor, Tensor], Tensor]  # of noise, parameter and last gradient, each (rows, columns)


def _many_sizes(noise: Tensor, param: Tensor, last: Tensor) -> Tensor:
    sizes = torch.logspace(-SPREAD, SPREAD, len(noise), dtype=noise.dtype, device=noise.device)
    return noise * sizes[:, None]


def _along(noise: Tensor, param: Tensor, last: Tensor) -> Tensor:
    return param * (noise.abs().max() / param.abs().max().clamp_min(TINY))


def _across(noise: Tensor, param: Tensor, last: Tensor) -> Tensor:
    """Orthogonal to the parameter: in each row, or as a whole if it is a vector."""
    rows = (1, -1) if param.shape[1] == 1 else param.shape
    noise, param = noise.reshape(rows), param.reshape(rows)
    share = (noise * param).sum(1, keepdim=True) / param.square().sum(1, keepdim=True).clamp_min(TINY)
    return noise - share * param


def _some_rows(noise: Tensor, param: Tensor, last: Tensor) -> Tensor:
    """Every second row is zero, the first among them."""
    return noise * (torch.arange(len(noise), device=noise.device) % 2)[:, None]


def _outlier(noise: Tensor, param: Tensor, last: Tensor) -> Tensor:
    noise[-1, -1] *= OUTLIER
    return noise


PATTERNS: Sequence[Pattern] = (
    lambda noise, param, last: noise,
    _many_sizes,
    _along,
    _across,
    _some_rows,
    lambda noise, param, last: last,
    lambda noise, param, last: -last,
    _outlier,
)
STEPS = len(PATTERNS) * len(EXPONENTS) + DOWNHILL


def start_of(number: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """The values of a stand-in before its first step, float64."""
    return 0.1 * _noise(-1, number, shape, device)


def gradient_of(step: int, number: int, param: Tensor, last: Tensor) -> Tensor:
    """The gradient of a stand-in in a step: each pattern in each scale, then downhill.

    Args:
        step: 0 to STEPS - 1.
        number: of the stand-in; the next one has gradients of another scale.
        param: the stand-in, not empty.
        last: its gradient in the step before.
    """
    exponent = EXPONENTS[(step // len(PATTERNS) + number) % len(EXPONENTS)]
    noise = 10.0**exponent * _noise(step, number, param.shape, param.device)
    rows = (param.shape[0] if param.ndim else 1, -1)
    pattern = PATTERNS[step % len(PATTERNS)] if step < STEPS - DOWNHILL else _along
    return pattern(noise.reshape(rows), param.reshape(rows), last.reshape(rows)).reshape(param.shape)


def _noise(step: int, number: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """The same on every rank; the random state stays as it is."""
    generator = torch.Generator().manual_seed(1000 * number + step + 1)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64, device="cpu").to(device)
