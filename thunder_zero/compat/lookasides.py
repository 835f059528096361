"""What Thunder's interpreter calls of ours in the place of torch's and Python's functions.

A lookaside is a function that the interpreter calls where forward calls another one. Thunder's table of them is one for
the process, so each is registered when a model is sharded, and stays; those that raise ask first whether the model that
is traced is ours::

    self.named_parameters()     ->   _members               in the module's order
    self.name = value           ->   set_attribute          raises where the value would be lost
    checkpoint(function, x)     ->   call_checkpoint        with keyword arguments; raises if it cannot
    fields_of(dataclass)        ->   _constants             names of fields as constants
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from thunder_zero.compat.casts import fields_of

import thunder.torch as ltorch
from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    _interpret_call,
    do_raise,
    unwrap,
    wrap,
    wrap_const,
)
from thunder.core.jit_ext import (
    _general_jit_object_setattr_lookaside,
    _general_jit_torch_checkpoint_lookaside,
    register_general_jit_lookaside,
)

# needed while: Thunder lists parameters and buffers in the order of a set of names.
# A set's order depends on Python's hash seed, and each process has another one. A forward that loops over
# ``self.parameters()``, or takes the first of them, would become another program on each rank, and a wrong one.


def list_members_in_order() -> None:
    """Let ``parameters()`` and ``buffers()`` in a forward come in the module's order."""
    for kind in ("parameter", "buffer"):
        register_general_jit_lookaside(getattr(nn.Module, f"named_{kind}s"))(partial(_members, kind))


def _members(kind: str, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The names by torch's method, and their tensors by Thunder's interpreter, which traces what is read."""
    named, member = (getattr(unwrap(module), name) for name in (f"named_{kind}s", f"get_{kind}"))
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


# needed while: Thunder drops assignments to attributes, and fails on what checkpoints are given.
# It drops what forward assigns to an attribute of the module itself without a word; attributes of submodules, and
# buffers, keep what was assigned. For a reentrant checkpoint it raises a string, it ignores ``context_fn``, and has no
# keyword arguments of the function.

# The other options of ``checkpoint`` change nothing here: what is computed again has forward's random numbers.
OF_CHECKPOINT = frozenset(("context_fn", "debug", "determinism_check", "early_stop", "preserve_rng_state"))
CONTEXT_FN = (
    "forward calls torch.utils.checkpoint.checkpoint with context_fn, which Thunder does not call; leave it out, and "
    "choose what backward computes again by Policy.recompute"
)

_ABSENT = object()


def refuse_calls(is_ours: Callable[[], bool]) -> None:
    """Register our functions in front of Thunder's, which it calls while it traces any model; unless the model is ours,
    they do what Thunder does."""

    def set_attribute(obj: Any, name: str, value: Any) -> Any:
        if is_ours() and _is_lost(obj, unwrap(name), unwrap(value)):
            kind = type(unwrap(obj)).__name__
            return do_raise(
                RuntimeError(
                    f"forward of {kind} changes its attribute {unwrap(name)!r}, and Thunder would drop the change; "
                    f"return the value, or keep it in a buffer (self.register_buffer)"
                )
            )
        return _general_jit_object_setattr_lookaside(obj, name, value)

    def call_checkpoint(function: Any, *args: Any, use_reentrant: Any = False, **kwargs: Any) -> Any:
        if not is_ours():
            return _general_jit_torch_checkpoint_lookaside(function, *args, use_reentrant=use_reentrant, **kwargs)
        if unwrap(use_reentrant):
            return do_raise(
                RuntimeError(
                    "forward calls torch.utils.checkpoint.checkpoint with use_reentrant=True, which Thunder cannot "
                    "trace; pass use_reentrant=False"
                )
            )
        if unwrap(kwargs.get("context_fn")) not in (None, noop_context_fn):
            return do_raise(RuntimeError(CONTEXT_FN))
        own = {name: value for name, value in kwargs.items() if name not in OF_CHECKPOINT}
        if own:
            args = (function, wrap_const(tuple(own)), *args, *own.values())
            function = wrap_const(_with_keywords)
        return _general_jit_torch_checkpoint_lookaside(function, *args)

    register_general_jit_lookaside(object.__setattr__)(set_attribute)
    register_general_jit_lookaside(checkpoint)(call_checkpoint)


def _with_keywords(function: Callable[..., Any], names: tuple[str, ...], *given: Any) -> Any:
    """Call a function with the last of these as keyword arguments; Thunder interprets this."""
    first = len(given) - len(names)
    return function(*given[:first], **dict(zip(names, given[first:])))  # noqa: B905 (Thunder has no zip with strict)


def _is_lost(obj: Any, name: str, value: Any) -> bool:
    """Whether this assigns another value than there is to an attribute of the module that is traced itself."""
    module = unwrap(obj)
    if not isinstance(module, nn.Module) or obj.provenance.inst is not PseudoInst.INPUT_FN:
        return False
    before = vars(module).get(name, _ABSENT)
    plain = (bool, int, float, str, type(None))
    return before is not value and not (isinstance(value, plain) and type(before) is type(value) and before == value)


# needed while: Thunder reads no field of a dataclass by a name that forward computed.


def take_fields_as_constants() -> None:
    """Let Thunder's interpreter take the names of a dataclass's fields, which casts ask for, as constants."""
    register_general_jit_lookaside(fields_of)(_constants)


def _constants(tree: Any) -> Any:
    return wrap_const(fields_of(unwrap(tree)))


# needed while: Thunder counts ignored targets in a mean with label smoothing.
# The mean of ``cross_entropy(label_smoothing=)`` sums what the ignored targets (``ignore_index``) would add, too.

_smoothed = ltorch._cross_entropy_loss_label_smoothing


def mend_label_smoothing() -> None:
    """Let the mean of a smoothed cross entropy leave out ignored targets, as torch's does."""
    ltorch._cross_entropy_loss_label_smoothing = _smoothed_without_ignored


def _smoothed_without_ignored(
    a: Any, target: Any, weight: Any, ignore_index: int, reduction: str, label_smoothing: float
) -> Any:
    """As Thunder's, but that a mean is the sum of all targets' losses, 0 for ignored ones, by the others' weight."""
    if reduction != "mean":
        return _smoothed(a, target, weight, ignore_index, reduction, label_smoothing)
    total = ltorch.sum(_smoothed(a, target, weight, ignore_index, "none", label_smoothing))
    counts = ltorch.ne(target, ignore_index)
    if weight is not None:
        known = ltorch.reshape(ltorch.where(counts, target, 0), (-1,))
        weights = ltorch.reshape(ltorch.index_select(weight, 0, known), target.shape)
        counts = ltorch.where(counts, weights, 0)
    return ltorch.true_divide(total, ltorch.sum(ltorch.to(counts, total.dtype)))
