"""needed while: Thunder reads no field of a dataclass by a name that forward computed."""

from __future__ import annotations

from typing import Any

from thunder_zero.compat.casts import fields_of

from thunder.core.interpreter import unwrap, wrap_const
from thunder.core.jit_ext import register_general_jit_lookaside


def take_as_constants() -> None:
    """Let Thunder's interpreter take the names of a dataclass's fields, which casts ask for, as constants."""
    register_general_jit_lookaside(fields_of)(_constants)


def _constants(tree: Any) -> Any:
    return wrap_const(fields_of(unwrap(tree)))
