"""needed while: Thunder ignores what becomes None, or another collection or object.

Guards for what Thunder reads without a check: the form of a call, attributes, globals and closures.

In: the arguments of a call; what forward read while Thunder traced it. Out: values that are equal where a program may
serve again (:func:`form_of`), and a :class:`Guard` for each program::

    model(x, None)         (Tensor, None)        one program
    model(x, mask)         (Tensor, Tensor)      another program
    self.scale is None     a lookup of "scale"   compiled again once the attribute has a value

Thunder itself checks the tensors, and the values of the numbers and strings, that a program reads.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Protocol, cast
from weakref import ref

import torch
from torch import Tensor, nn

MOST_ITEMS = 100  # of a collection that forward reads and that is compared by value; larger ones: item by item
WARN_AFTER = 4  # different forms of one argument or attribute
NUMBERS = (bool, int, float, complex)
CHECKED = (Tensor, *NUMBERS, str, slice)  # by Thunder, where forward reads one
CONSTANTS = (type(None), Enum, bytes, torch.dtype, torch.device, range)
OBJECTS = (nn.Module, type, ModuleType, BuiltinFunctionType)  # the same where they are the same object
COLLECTIONS = (Mapping, list, tuple, deque, Set)
OF_MODULES = frozenset((*vars(nn.Module()), *vars(nn.Module))) - {"forward"}  # of every module: other checks look at it
LEAVES = frozenset((*NUMBERS, str))
FLAT, STRING = LEAVES | {type(None), Tensor}, {str}
UNCHECKED = (deque, FunctionType)  # what Thunder does not look into, or not at all defaults
DEFAULTS = ("__defaults__", "__kwdefaults__")
FIXED = frozenset(("builtins", "torch", "thunder"))  # packages whose own names nobody replaces

_ABSENT = object()

Form = Any  # equal to another one, or not


class Namespace(Protocol):
    """What has values by names."""

    def get(self, name: str, default: Any, /) -> Any:
        """Return the value, or the default."""


def form_of(value: Any) -> Form:
    """Return what decides which program an argument needs: structure, types, and values that Thunder does not check.

    Numbers and strings have their types here, tensors their classes.
    """
    return _Forms().of(value)


def _form_read(value: Any, exact: bool = False) -> Form:
    """Return what decides which program a value needs that forward reads and that is no argument: objects by identity,
    as their attributes are lookups of their own."""
    if not exact and (form := _flat_form(value)) is not None:
        return form
    if not isinstance(value, COLLECTIONS):
        return value if value is None or value is _ABSENT or isinstance(value, CONSTANTS) else _Same(value)
    return _Forms(by_identity=True).of(value, exact) if len(value) <= MOST_ITEMS else _Items(value)


def _flat_form(value: Any) -> Form:
    """Return the form of a plain collection of what Thunder checks, and of None, in a microsecond; None of others."""
    kind, items = type(value), value
    if kind is dict:
        items = value.values()
        if not STRING.issuperset(map(type, value)):
            return None
    elif kind is not list and kind is not tuple:
        return None
    types = [*map(type, items)]
    return (kind, types, [*value] if kind is dict else None) if FLAT.issuperset(types) else None


class _Forms:
    """The forms of the parts of one value, which are numbered in the order of their first visit: parts may be shared.

    ``by_identity``: objects are compared as such, not by their attributes.
    """

    def __init__(self, by_identity: bool = False) -> None:
        self._by_identity = by_identity
        self._seen: dict[int, tuple[int, Any]] = {}  # with the part, so that no other one gets its id

    def of(self, value: Any, exact: bool = False) -> Form:
        """Return the form of a part. ``exact``: numbers and strings by their values."""
        kind: type[Any] = type(value)
        if isinstance(value, Tensor):
            return "tensor", cast(Form, kind)
        if isinstance(value, CONSTANTS):
            return kind, value
        if kind in LEAVES:
            return (kind, repr(value)) if exact else kind  # NaN and -0.0 are values, too
        if isinstance(value, OBJECTS):
            return _Same(value)
        if id(value) in self._seen:
            return "part", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        if isinstance(value, Set):
            return kind, frozenset(map(_element, value))
        if self._by_identity and not isinstance(value, (*COLLECTIONS, *CHECKED)):
            return _Same(value)
        parts = [*attributes_of(value).items(), *_parts(value)]
        if parts or isinstance(value, COLLECTIONS):
            exact = exact or isinstance(value, UNCHECKED)
            names = (name if type(name) is str else self.of(name, exact=True) for name, _ in parts)
            return kind, tuple(zip(names, [self.of(part, exact) for _, part in parts], strict=True))
        if isinstance(value, CHECKED):  # of a subclass
            return (kind, repr(value)) if exact else kind
        if changes_unseen(value):
            return kind
        return _Same(value) if cast(Any, kind.__hash__) is object.__hash__ else (kind, value)


def _element(value: Any) -> Form:
    return (type(value), value) if isinstance(value, (*CONSTANTS, *LEAVES)) else _Same(value)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a collection or a function consists of, by names."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple | deque):
        return enumerate(value)
    if isinstance(value, slice):
        return [("start", value.start), ("stop", value.stop), ("step", value.step)]
    if isinstance(value, FunctionType):
        cells = enumerate(map(_contents, value.__closure__ or ()))
        return [("code", _Same(value.__code__)), *((name, getattr(value, name)) for name in DEFAULTS), *cells]
    if isinstance(value, MethodType):
        return [("function", value.__func__), ("object", value.__self__)]
    if isinstance(value, partial):
        return [("function", value.func), ("args", value.args), ("keywords", value.keywords)]
    return []


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object itself, in its ``__dict__`` and its slots."""
    slotted = (vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind))
    slots = (name for kind in slotted for name, member in kind.items() if isinstance(member, MemberDescriptorType))
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    own = getattr(value, "__dict__", None)
    return found | own if isinstance(own, dict) else found


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: what it is to hold is not there yet
        return _ABSENT


def changes_unseen(value: Any) -> bool:
    """Return whether a value changes without a sign, such as an iterator or an array."""
    if isinstance(value, Iterator) or type(value).__hash__ is None:
        return not isinstance(value, (*COLLECTIONS, *CHECKED, CellType)) and not attributes_of(value)
    return False


class _Same:
    """Equal for one object alone, which may go: ``now`` returns it, or None."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self.now: Callable[[], Any] = ref(value)
        except TypeError:
            self.now = lambda: value

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._id == other._id and self.now() is other.now() is not None


class _Items:
    """The items of a large collection, each the same object."""

    def __init__(self, value: Any) -> None:
        self._kind, self._items = type(value), [*value, *(value.values() if isinstance(value, Mapping) else ())]

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Items) or (self._kind, len(self._items)) != (other._kind, len(other._items)):
            return False
        pairs = zip(self._items, other._items, strict=True)
        return all(one is other for one, other in pairs)


class Slotted:
    """The namespace of an object without ``__dict__``: its slots, or what a cell of a closure holds."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def get(self, name: str, default: Any, /) -> Any:
        """Return an attribute."""
        try:
            return getattr(self._of, name)
        except (AttributeError, ValueError):
            return default


def namespaces_of(of: Any, name: str) -> Iterator[tuple[Any, Namespace]]:
    """Yield the namespaces that decide what an attribute of an object is, each after the object or class that it is of.

    None of those that nobody changes, or that other checks look at.
    """
    if isinstance(of, CellType):
        yield of, Slotted(of)
        return
    kinds = of.__mro__ if isinstance(of, type) else type(of).__mro__
    members = (vars(of).get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
    if name.startswith("__") or isinstance(of, Tensor):
        return
    if isinstance(of, nn.Module) and (name in OF_MODULES or any(name in each for each in members)):
        return
    own = getattr(of, "__dict__", None)
    if isinstance(own, dict) and not (isinstance(of, ModuleType) and is_fixed(of.__name__)):
        yield of, own
        if name in own:
            return
    for kind in kinds:
        if name in vars(kind):
            if isinstance(vars(kind)[name], MemberDescriptorType) and not isinstance(of, type):
                yield of, Slotted(of)
            elif not is_fixed(kind.__module__):
                yield kind, vars(kind)
            return


def is_fixed(package: str) -> bool:
    """Return whether nobody replaces what a module of Python has, such as the functions of torch."""
    return package.partition(".")[0] in FIXED


@dataclass(frozen=True, eq=False)
class Lookup:
    """A name that forward read in a namespace, and the form of what was there; ``key`` tells lookups apart."""

    key: tuple[int, str]
    namespace: Namespace
    name: str
    form: Form
    exact: bool  # with the values of numbers and strings

    def holds(self) -> bool:
        """Return whether the same is there now."""
        return bool(_form_read(self.namespace.get(self.name, _ABSENT), self.exact) == self.form)


class Lookups:
    """What forward reads while Thunder traces it, each once, with its form before forward could change it."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, str], tuple[Lookup, Form, Any]] = {}  # with the holder, which keeps its id

    def note(self, holder: Any, namespace: Namespace, name: str) -> None:
        """Note a read of a name in the namespace of ``holder``, unless Thunder has a check for what is there."""
        value, key = namespace.get(name, _ABSENT), (id(holder), name)
        if not isinstance(value, CHECKED) and key not in self._read:
            exact = name in DEFAULTS or holder is namespace  # Thunder checks no defaults, and not all of globals
            lookup = Lookup(key, namespace, name, _form_read(value, exact), exact)
            self._read[key] = lookup, _form_read(value, exact=True), holder

    def changed(self) -> dict[str, Any]:
        """Return by name what is not as it was when forward first read it."""
        now = ((read, form, read.namespace.get(read.name, _ABSENT)) for read, form, _ in self._read.values())
        return {read.name: value for read, form, value in now if _form_read(value, exact=True) != form}

    def taken(self) -> tuple[Lookup, ...]:
        """Return what was read since the last time, and forget it."""
        reads, self._read = tuple(lookup for lookup, *_ in self._read.values()), {}
        return reads


class Guard:
    """What must be as it was when a program was traced: the form of the call, and what forward read."""

    def __init__(self, form: Form, lookups: Sequence[Lookup]) -> None:
        self.form, self.lookups = form, lookups
        # Most are of None, of a name that is not there, or of one object: no forms need be made of them.
        read = [(each.namespace.get, each.name, each.form) for each in lookups]
        self._constants = [each for each in read if each[2] is None or each[2] is _ABSENT]
        self._objects = [(get, name, form.now) for get, name, form in read if isinstance(form, _Same)]
        self._others = [each for each in lookups if not (each.form in (None, _ABSENT) or isinstance(each.form, _Same))]

    def holds(self, form: Form) -> bool:
        """Return whether the program may serve a call of this form now."""
        if self.form != form:
            return False
        for get, name, value in self._constants:
            if get(name, _ABSENT) is not value:
                return False
        for get, name, now in self._objects:
            if (value := get(name, _ABSENT)) is None or value is not now():
                return False
        return all(map(Lookup.holds, self._others))


class Guards:
    """The guards of one model's programs. ``form`` is that of the call that runs."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._guards: list[Guard] = []
        self._warned = False
        self.form: tuple[tuple[int | str, Form], ...] = ()

    def add(self, lookups: Sequence[Lookup]) -> int:
        """Keep the guard of the program that is compiled for the call that runs; return its number."""
        self._guards.append(Guard(self.form, lookups))
        self._warn()
        return len(self._guards) - 1

    def holds(self, number: int) -> bool:
        """Return whether a program may serve the call that runs."""
        return self._guards[number].holds(self.form)

    def _warn(self) -> None:
        """Warn once of an argument, or of something that forward reads, that changes from program to program."""
        shown: dict[Hashable, str] = {name: f"argument {name!r}" for name, _ in self.form}
        shown |= {lookup.key: f"{lookup.name!r}, which forward reads" for lookup in self._guards[-1].lookups}
        for key, words in shown.items():
            different: list[Form] = []
            for guard in self._guards:
                forms = dict(guard.form) | {lookup.key: lookup.form for lookup in guard.lookups}
                if key in forms and forms[key] not in different:
                    different.append(forms[key])
            if len(different) >= WARN_AFTER and not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self._model} was compiled for {len(different)} forms of {words}, and each costs a compilation: "
                    f"None, types, lengths and objects make the form; keep it the same, or out of forward",
                    stacklevel=2,
                )


def form_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[int | str, Form], ...]:
    """Return the forms of the arguments of a call, by position or name."""
    forms = _Forms()
    return (*((at, forms.of(value)) for at, value in enumerate(args)), *((at, forms.of(kwargs[at])) for at in kwargs))
