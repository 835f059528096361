"""Executors that keep an operator of torch as one line, which Thunder would decompose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from thunder_zero.compat.never_fuses import NeverFuses

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor

Gradients = Callable[[TensorProxy], Iterable[tuple[TensorProxy, TensorProxy]]]  # output gradient -> (input, gradient)


class ClaimingExecutor(NeverFuses, OperatorExecutor):
    """An executor that claims operators of torch."""

    def claim(
        self, symbol: Any, checker: Callable[..., bool], run: Callable[..., tuple[TensorProxy, Gradients]]
    ) -> None:
        """Claim the lines of an operator for which ``checker`` returns True.

        Args:
            symbol: Thunder's symbol of the operator.
            checker: a function of a line's arguments that returns whether to claim the line.
            run: a function of the arguments that returns a tuple: the output, and a function. This function takes the
                output's gradient, and yields each input with its gradient.
        """

        def lower(*args: Any, **kwargs: Any) -> TensorProxy:
            return run(*args, **kwargs)[0]

        def differentiate(*args: Any, **kwargs: Any) -> TensorProxy:
            output, gradients = run(*args, **kwargs)
            for tensor, grad in gradients(prims.get_grad(output)):
                prims.put_grad(tensor, grad)
            return output

        self.register_implementation(symbol, checker=checker, execution_transform=lower, grad_transform=differentiate)
