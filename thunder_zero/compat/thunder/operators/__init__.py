"""Torch's own operators, one line each way, in place of what Thunder's autodiff decomposes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from thunder_zero.compat.never_fuses import NeverFuses

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor

Gradients = Callable[[TensorProxy], Iterable[tuple[TensorProxy, TensorProxy]]]  # of the output -> each input, its own


class ClaimingExecutor(NeverFuses, OperatorExecutor):
    """An executor of torch's own operators."""

    def claim(
        self, symbol: Any, checker: Callable[..., bool], run: Callable[..., tuple[TensorProxy, Gradients]]
    ) -> None:
        """Claim those lines of an operator for whose arguments ``checker`` holds. ``run`` gets them, too, and returns
        the output, and what makes the inputs' gradients of the output's."""

        def lower(*args: Any, **kwargs: Any) -> TensorProxy:
            return run(*args, **kwargs)[0]

        def differentiate(*args: Any, **kwargs: Any) -> TensorProxy:
            output, gradients = run(*args, **kwargs)
            for given, grad in gradients(prims.get_grad(output)):
                prims.put_grad(given, grad)
            return output

        self.register_implementation(symbol, checker=checker, execution_transform=lower, grad_transform=differentiate)
