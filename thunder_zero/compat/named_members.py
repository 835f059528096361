"""needed while: Thunder lists parameters and buffers in the order of a set of names.

Makes ``parameters()`` and ``buffers()`` in a forward come in the module's order. A set's order depends on Python's hash
seed, and each process has another one. A forward that loops over ``self.parameters()``, or takes the first of them,
would become another program on each rank, and a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    _interpret_call,
    unwrap,
    wrap,
    wrap_const,
)
from thunder.core.jit_ext import register_general_jit_lookaside


def in_order() -> None:
    """Register our functions in the place of Thunder's; it calls them instead of torch's methods while it traces."""
    register_general_jit_lookaside(nn.Module.named_parameters)(_named_parameters)
    register_general_jit_lookaside(nn.Module.named_buffers)(_named_buffers)


def _named_parameters(module: Any, *args: Any, **kwargs: Any) -> Any:
    plain = unwrap(module)
    return _members(plain.named_parameters, plain.get_parameter, args, kwargs)


def _named_buffers(module: Any, *args: Any, **kwargs: Any) -> Any:
    plain = unwrap(module)
    return _members(plain.named_buffers, plain.get_buffer, args, kwargs)


def _members(
    named: Callable[..., Iterator[tuple[str, Tensor]]],
    member: Callable[[str], Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[Any, Any],
) -> Any:
    """The names by torch's method, and their tensors by Thunder's interpreter, which traces what is read."""
    given = [unwrap(arg) for arg in args]
    options = {unwrap(key): unwrap(value) for key, value in kwargs.items()}
    prefix = given[0] if given else options.get("prefix", "")
    names = tuple(name for name, _ in named(*given, **options))
    start = len(f"{prefix}.") if prefix else 0

    def members(names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, member(name[start:])

    source = ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[wrap_const(named).provenance])
    return _interpret_call(members, wrap(names, provenance=source))
