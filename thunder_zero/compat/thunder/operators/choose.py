"""needed while: Thunder's default recipe lists None among its executors where nvFuser is missing."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_zero.compat.thunder.operators.activations import activations_ex
from thunder_zero.compat.thunder.operators.attention import attention_ex
from thunder_zero.compat.thunder.operators.convolution import convolution_ex

import thunder
from thunder.executors.torch_compile import torch_compile_xentropy_ex
from thunder.extend import Executor, FusionExecutor, OperatorExecutor

NEVER_FUSED = (attention_ex, convolution_ex)


def executors_in_front(others: Sequence[Executor]) -> tuple[OperatorExecutor, ...]:
    """Return our executors that go in front of ``others``.

    Activations and norms are left to a fuser if there is one. Thunder's default fuser does not count, since it fuses
    cross entropy only.
    """
    fuses = any(isinstance(other, FusionExecutor) and other != torch_compile_xentropy_ex for other in others)
    return NEVER_FUSED if fuses else (*NEVER_FUSED, activations_ex)


def default_executors() -> list[Executor]:
    """Return our executors for attention and convolutions, then Thunder's default executors."""
    return [*NEVER_FUSED, *thunder.get_default_executors()]
