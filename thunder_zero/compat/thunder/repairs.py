"""Replaces functions of Thunder that read or compute something wrong in forward.

In: a function of Thunder or torch. Out: our function in its place, while Thunder traces a model of ours::

    self.named_parameters()                ->   members            in the module's order
    fields_of(dataclass)                   ->   fields_as_constants
    cross_entropy(label_smoothing=0.1)     ->   smoothed_loss      its mean leaves out ignored targets
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thunder_zero.compat.casts import fields_of
from thunder_zero.compat.imports import PYTHON_APPLY
from thunder_zero.compat.thunder.patches import Patch

import thunder.torch as ltorch
from thunder import compile_data
from thunder.core import jit_ext
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, _interpret_call, unwrap, wrap, wrap_const
from thunder.core.module import ThunderModule

# needed while: Thunder lists parameters and buffers in the order of a set of names.
# A set's order depends on Python's hash seed, which differs from process to process. A forward that loops over
# ``self.parameters()``, or takes the first parameter, would become a different and wrong program on each rank.


def members(kind: str, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Yield (name, tensor) tuples in torch's order. Thunder's interpreter reads the tensors, and traces each read."""
    named, member = (getattr(unwrap(module), name) for name in (f"named_{kind}s", f"get_{kind}"))
    plain = [unwrap(arg) for arg in args]
    options = {unwrap(key): unwrap(value) for key, value in kwargs.items()}
    prefix = plain[0] if plain else options.get("prefix", "")
    names = tuple(name for name, _ in named(*plain, **options))
    start = len(f"{prefix}.") if prefix else 0

    def listed(names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, member(name[start:])

    source = ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[wrap_const(named).provenance])
    return _interpret_call(listed, wrap(names, provenance=source))


# needed while: Thunder cannot read a field of a dataclass by a computed name.


def fields_as_constants(tree: Any) -> Any:
    """Return, as a constant, the field names of a dataclass, which casts read."""
    return wrap_const(fields_of(unwrap(tree)))


# needed while: Thunder counts ignored targets in a mean with label smoothing.
# The mean of ``cross_entropy(label_smoothing=)`` includes the losses of ignored targets (``ignore_index``).

_smoothed = ltorch._cross_entropy_loss_label_smoothing


def smoothed_loss(a: Any, target: Any, weight: Any, ignore_index: int, reduction: str, label_smoothing: float) -> Any:
    """Return the mean loss: the sum over counted targets, divided by their weight. Other reductions are Thunder's."""
    if reduction != "mean":
        return _smoothed(a, target, weight, ignore_index, reduction, label_smoothing)
    total = ltorch.sum(_smoothed(a, target, weight, ignore_index, "none", label_smoothing))
    counts = ltorch.ne(target, ignore_index)
    if weight is not None:
        known = ltorch.reshape(ltorch.where(counts, target, 0), (-1,))
        weights = ltorch.reshape(ltorch.index_select(weight, 0, known), target.shape)
        counts = ltorch.where(counts, weights, 0)
    return ltorch.true_divide(total, ltorch.sum(ltorch.to(counts, total.dtype)))


PATCHES = (
    *(Patch(torch.autograd.Function, "apply", apply) for apply in PYTHON_APPLY),
    Patch(jit_ext._general_jit_lookaside_map, nn.Module.named_parameters, partial(members, "parameter")),
    Patch(jit_ext._general_jit_lookaside_map, nn.Module.named_buffers, partial(members, "buffer")),
    Patch(jit_ext._general_jit_lookaside_map, fields_of, fields_as_constants),
    Patch(ltorch, "_cross_entropy_loss_label_smoothing", smoothed_loss),
)

# needed while: Thunder keeps the autocast of a call for later compilations.


def forget_autocast(model: ThunderModule) -> None:
    """Forget the autocast of earlier calls, which Thunder notes in each call that asks for a program."""
    compile_data(model).autocast_stack.stack.clear()
