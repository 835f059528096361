"""What Thunder's interpreter calls of ours in the place of torch's and Python's functions.

A lookaside is a function that the interpreter calls where forward calls another one. Thunder's table of them is one for
the process, so each is registered when a model is sharded, and stays; those that raise ask first whether the model that
is traced is ours::

    self.named_parameters()     ->   _members               in the module's order
    self.name = value           ->   set_attribute          raises where the value would be lost
    checkpoint(function, x)     ->   call_checkpoint        with keyword arguments; raises if it cannot
    fields_of(dataclass)        ->   _constants             names of fields as constants
    getattr(self, name)         ->   get_attribute          noted for ``compat/guards.py``
    random.random(), max(x)     ->   raises where each call of forward would get another value
    isinstance(x.item(), int)   ->   _isinstance            by the type of a number that nobody knows yet

Beside the table, Thunder's numbers raise where Python asks for the value of one that is not known.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from traceback import walk_tb
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from thunder_zero.compat.casts import fields_of
from thunder_zero.compat.guards import (
    CHECKED,
    DEFAULTS,
    OBJECTS,
    Namespace,
    Slotted,
    attributes_of,
    changes_unseen,
    is_fixed,
    namespaces_of,
)
from thunder_zero.compat.untraceable import THUNDER, Untraceable

import thunder
import thunder.torch as ltorch
from thunder import compile_data
from thunder.core import interpreter, jit_ext, prims
from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    interpreter_needs_wrap,
    is_opaque,
    unwrap,
    wrap,
    wrap_const,
)
from thunder.core.jit_ext import (
    _general_jit_getattr_lookaside,
    _general_jit_hasattr_lookaside,
    _general_jit_isinstance_lookaside,
    _general_jit_object_setattr_lookaside,
    _general_jit_torch_checkpoint_lookaside,
    register_general_jit_lookaside,
)
from thunder.core.module import ThunderModule
from thunder.core.proxies import IntegerProxy, NumberProxy, Proxy, TensorProxy, numberproxy

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


# needed while: Thunder decides by unknown numbers, and keeps random ones.
# It traces ``.item()`` as a number without a value, and takes the branch of a value that is None. What a function of
# ``random`` or ``numpy.random`` returns is a constant of the program, as is the next item of an iterator. Of a list
# that a function in C reads, such as ``max``, it checks no item.

Note = Callable[[Any, Namespace, str], None]  # hears of what is read: the holder, its namespace and the name
Refuse = Callable[[str], Untraceable | None]  # notes why a trace is wrong; None: the model that is traced is not ours

UNKNOWN = (
    "forward decides by a number that it takes out of a tensor (.item()), which nobody knows before the program runs"
)
TEXT = (str, repr, format, print)
BY_TYPE = (isinstance, type, callable, id)  # what they return depends on types and objects alone
MAKE = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
ASK = (
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__hash__", "__str__", "__format__"),
    *("__round__", "__floor__", "__ceil__", "__trunc__", "__divmod__", "make_static_constrained"),
)

_trace, _find_lookaside = jit_ext.thunder_general_jit, jit_ext.general_jit_lookaside
_asks = {
    (kind, name): getattr(kind, name) for kind in (NumberProxy, IntegerProxy) for name in ASK if hasattr(kind, name)
}
_convert = prims.convert_element_type.meta
_is = interpreter._default_opcode_handler_map["IS_OP"]
# Of these instructions Thunder's interpreter leaves all to Python, such as a comparison of lists.
_whole = {name: interpreter._default_opcode_handler_map[name] for name in ("COMPARE_OP", "DICT_UPDATE", "DICT_MERGE")}


def refuse_what_changes(is_ours: Callable[[], bool], refuse: Refuse, note: Note) -> None:
    """Refuse what differs from call to call of forward, while a model of ours is traced. ``note`` hears of defaults."""

    def find_lookaside(fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        if (why := _changes(fn, args)) is not None and (error := refuse(why)) is not None:
            return do_raise(error)
        if "fn" in kwargs:  # which Thunder would take for its own argument; it asks for no names
            kwargs = {f"{name}_": value for name, value in kwargs.items()}
        if isinstance(fn, FunctionType) and any(isinstance(value, list | dict | set) for value in _defaults(fn)):
            for name in DEFAULTS:
                note(fn, Slotted(fn), name)
        lookaside = _find_lookaside(fn, *args, **kwargs)
        makes_or_binds = fn is object.__init__ or getattr(fn, "__name__", "") == "__get__"  # and reads nothing
        if lookaside is None and is_opaque(fn) and not makes_or_binds and is_ours():
            for arg in args:
                _check_parts(arg, set())
        return lookaside

    def convert(a: Any, /, dtype: Any) -> Any:
        is_known = not _is_unknown(a) or not is_ours()  # Thunder converts the value None of an unknown number
        return _convert(a, dtype) if is_known else numberproxy(dtype, None, constraint=a.constraint)

    def is_same_object(inst: Any, /, stack: Any, **kwargs: Any) -> Any:
        pair = [unwrap(stack.getitem_wrapped(at)) for at in (-2, -1)]
        decides = any(map(_is_unknown, pair)) and any(isinstance(value, bool) for value in pair)
        if decides and (error := refuse(UNKNOWN)) is not None:
            return do_raise(error)
        return _is(inst, stack=stack, **kwargs)

    def handle_whole(handle: Callable[..., Any], inst: Any, /, stack: Any, **kwargs: Any) -> Any:
        if is_ours():
            for at in (-2, -1):
                _check_parts(stack.getitem_wrapped(at), set())
        return handle(inst, stack=stack, **kwargs)

    jit_ext.general_jit_lookaside = find_lookaside
    interpreter._default_opcode_handler_map |= {name: partial(handle_whole, handle) for name, handle in _whole.items()}
    interpreter._default_opcode_handler_map["IS_OP"] = is_same_object
    object.__setattr__(prims.convert_element_type, "meta", convert)
    for (kind, name), ask in _asks.items():
        asking = _asking(ask, refuse)
        setattr(kind, name, asking)
        register_general_jit_lookaside(asking)(interpreter_needs_wrap(asking))
    register_general_jit_lookaside(isinstance)(_isinstance)


def _defaults(fn: FunctionType) -> tuple[Any, ...]:
    return (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())


def after_a_number(error: Exception) -> str | None:
    """Return why Thunder failed, if it did so after ``.item()``: it handles few uses of a number that it does not know,
    and its words rarely say so."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    traces = (frame.f_locals["computation_trace"] for frame in frames if frame.f_code is _trace.__code__)
    took = any(line.sym.name == "item" for trace in traces for line in trace.bound_symbols)
    is_thunders = Path(frames[-1].f_code.co_filename).is_relative_to(THUNDER)
    return UNKNOWN if took and is_thunders else None


def watch_traces(traced: Callable[[Callable[[], Any]], Any]) -> None:
    """Let ``traced`` call Thunder's front end, whenever a function is traced."""
    thunder.thunder_general_jit = lambda *args, **kwargs: traced(partial(_trace, *args, **kwargs))


@cache
def _asking(ask: Callable[..., Any], refuse: Refuse) -> Callable[..., Any]:
    def asking(number: Any, *args: Any) -> Any:
        if _is_unknown(number) and (error := refuse(UNKNOWN)) is not None:
            raise error
        return ask(number, *args)

    return asking


def _is_unknown(value: Any) -> bool:
    """Return whether a number is known only when the program runs."""
    return isinstance(value, NumberProxy) and value.value is None


def _isinstance(value: Any, cls: Any) -> Any:
    """Answer for a number by its type in Python."""
    number = unwrap(value)
    if not isinstance(number, NumberProxy):
        return _general_jit_isinstance_lookaside(value, cls)
    return wrap_const(issubclass(number.python_type, unwrap(cls)))


def _changes(fn: Any, args: Sequence[Any]) -> str | None:
    """Return why the result of a call differs from call to call of forward, or None. Python functions are interpreted,
    down to functions in C."""
    values = [unwrap(arg) for arg in args]
    if any(fn is each for each in TEXT) and any(isinstance(value, TensorProxy) for value in values):
        return f"forward makes a text of a tensor ({fn.__name__}), whose values nobody knows before the program runs"
    makes = any(fn is each for each in MAKE) or getattr(fn, "__qualname__", "").startswith("_VariableFunctions")
    if makes and any(map(_is_unknown, values)) and not any(isinstance(value, TensorProxy) for value in values):
        return UNKNOWN
    if not isinstance(fn, FunctionType | MethodType) and not any(fn is each for each in BY_TYPE):
        for arg, value in zip(args, values, strict=True):
            origins = INPUTS if not isinstance(value, Iterator) else (*INPUTS, *OF_MODEL)
            if changes_unseen(value) and arg.provenance.inputs and _origin(arg, *STEPS) in origins:
                kind = type(value).__name__
                return f"forward reads a value of type {kind}, and every later call would get what it has now"
    of: Any = type(values[0]) if values else object
    generator = _generator(of)
    if generator and hasattr(of, getattr(fn, "__name__", "")) and (generator == "NumPy" or is_opaque(fn)):
        return draws_by(generator)
    return None


def draws_by(kind: str) -> str:
    """Return why a forward that draws random numbers is refused."""
    return f"forward draws random numbers by {kind}, and every later call would get the first ones"


def generators() -> dict[str, Any]:
    """Return the states of the random number generators that functions of ``random`` and ``numpy.random`` share."""
    states: dict[str, Any] = {"Python": random.getstate()}
    if "numpy" in sys.modules:
        states["NumPy"] = pickle.dumps(sys.modules["numpy"].random.get_state(legacy=False))
    return states


def moved(before: dict[str, Any]) -> str | None:
    """Return whose random numbers were drawn since then, if any were."""
    now = generators()
    return next((kind for kind, state in before.items() if now[kind] != state), None)


@cache
def _generator(kind: Any) -> str | None:
    """Return whose generator of random numbers a class is; None for other classes."""
    if issubclass(kind, random.Random):
        return "Python"
    return "NumPy" if str(kind.__module__).startswith("numpy.random") else None


def _check_parts(value: Any, seen: set[int]) -> None:
    """Let Thunder check the numbers and strings of an argument or attribute that a function in C reads."""
    of = unwrap(value)
    if id(of) in seen or _origin(value) not in (*INPUTS, *OF_MODEL) or isinstance(of, (*CHECKED, *OBJECTS)):
        return
    if _is_global(value):  # compared by its values; some Thunder cannot look at
        return
    seen.add(id(of))
    if isinstance(of, dict | list | tuple):
        value.track_items()
        items = value.item_wrappers
        parts = items.values() if isinstance(items, dict) else items
    else:
        parts = (_interpret_call(getattr, value, wrap_const(name)) for name in attributes_of(of))
    for part in parts:
        if isinstance(part, WrappedValue):  # not a signal that the attribute cannot be read
            _check_parts(part, seen)


INPUTS = (PseudoInst.INPUT_ARGS, PseudoInst.INPUT_KWARGS)
OF_MODEL = (PseudoInst.INPUT_FN, PseudoInst.CONSTANT)
MADE = (PseudoInst.OPAQUE, PseudoInst.LOOKASIDE)
STEPS = (PseudoInst.LOAD_ATTR, PseudoInst.BINARY_SUBSCR)


def _origin(of: Any, *steps: Any) -> Any:
    """Return what a value is part of: the arguments, the module, or a constant such as a global; None if forward made
    it, or if it was reached by another step than these."""
    origin = of.provenance
    while origin.inputs:
        if origin.inst in MADE or (steps and origin.inst not in steps):
            return None
        origin = origin.inputs[0]
    return origin.inst


def _is_global(of: Any) -> bool:
    origin = of.provenance
    while origin.inputs:
        if origin.inst is PseudoInst.LOAD_ATTR and origin.inputs[1].value == "__globals__":
            return True
        origin = origin.inputs[0]
    return False


# needed while: Thunder guards no attribute that is None, a collection or an object.


def note_reads(note: Note) -> None:
    """Tell ``note`` the holder, the namespace and the name of what is read while a model is traced: attributes of
    objects that forward did not make, what closures hold, globals and defaults of functions."""

    def note_attribute(of: Any, name: Any) -> None:
        if isinstance(holder := unwrap(of), Proxy):
            return
        for owner, namespace in namespaces_of(holder, unwrap(name)):
            if _origin(of) in OF_MODEL:
                note(owner, namespace, unwrap(name))

    def get_attribute(holder: Any, name: Any, *default: Any) -> Any:
        note_attribute(holder, name)
        return _general_jit_getattr_lookaside(holder, name, *default)

    def has_attribute(holder: Any, name: Any) -> Any:
        note_attribute(holder, name)
        return _general_jit_hasattr_lookaside(holder, name)

    def note_global(value: Any, name: str) -> Any:
        namespace = unwrap(get_interpreterruntimectx().frame_stack[-1].globals)
        if name in namespace and not is_fixed(namespace.get("__name__", "")):
            note(namespace, namespace, name)
        return _note_global(value, name)

    register_general_jit_lookaside(getattr)(get_attribute)
    register_general_jit_lookaside(hasattr)(has_attribute)
    jit_ext.general_jit_callbacks[interpreter.INTERPRETER_CALLBACKS.GLOBAL_CALLBACK] = note_global


_note_global = jit_ext._general_jit_global_callback


# needed while: Thunder keeps the autocast of a call for later compilations.


def forget_autocast(model: ThunderModule) -> None:
    """Forget the autocast of earlier calls, which Thunder notes when it is asked for a program, and keeps."""
    compile_data(model).autocast_stack.stack.clear()


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
