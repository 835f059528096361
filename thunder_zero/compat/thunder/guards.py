"""needed while: Thunder ignores a value that becomes None, or another collection or object.

In: the arguments of a call, and the attributes, globals and closures that forward read while Thunder traced it. Out:
forms, which are equal if a program may run again (:func:`form_of`), and a :class:`Guard` for each program::

    model(x, None)         (Tensor, None)        one program
    model(x, mask)         (Tensor, Tensor)      another program
    self.scale is None     a lookup of "scale"   compiled again once the attribute has a value

Thunder itself checks the tensors that a program reads, and the values of numbers and strings.
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

MOST_ITEMS = 100  # items of larger collections are compared by identity
WARN_AFTER = 4  # different forms of one argument or attribute
NUMBERS = (bool, int, float, complex)
CHECKED = (Tensor, *NUMBERS, str, slice)  # types that Thunder checks where forward reads them
CONSTANTS = (type(None), Enum, bytes, torch.dtype, torch.device, range)
OBJECTS = (nn.Module, type, ModuleType, BuiltinFunctionType)  # compared by identity
COLLECTIONS = (Mapping, list, tuple, deque, Set)
OF_MODULES = frozenset((*vars(nn.Module()), *vars(nn.Module))) - {"forward"}  # attributes that other checks compare
LEAVES = frozenset((*NUMBERS, str))
FLAT, STRING = LEAVES | {type(None), Tensor}, {str}
UNCHECKED = (deque, FunctionType)  # Thunder checks no items of a deque, and not all defaults of a function
DEFAULTS = ("__defaults__", "__kwdefaults__")
FIXED = frozenset(("builtins", "torch", "thunder"))  # packages whose names nobody replaces

_ABSENT = object()

Form = Any  # compared by == alone


class Namespace(Protocol):
    """A mapping from names to values, such as ``__dict__``."""

    def get(self, name: str, default: Any, /) -> Any:
        """Return the value, or the default."""


def form_of(value: Any) -> Form:
    """Return the form of an argument: its structure, types, and values that Thunder does not check.

    The form of a number or string is its type only. The form of a tensor includes its class.
    """
    return _Forms().of(value)


def _form_read(value: Any, exact: bool = False) -> Form:
    """Return the form of a value that forward reads and that is not an argument.

    Objects are compared by identity, since each attribute that forward reads has its own lookup.
    """
    if not exact and (form := _flat_form(value)) is not None:
        return form
    if not isinstance(value, COLLECTIONS):
        return value if value is None or value is _ABSENT or isinstance(value, CONSTANTS) else _Same(value)
    return _Forms(by_identity=True).of(value, exact) if len(value) <= MOST_ITEMS else _Items(value)


def _flat_form(value: Any) -> Form:
    """Return the form of a plain collection of None and values that Thunder checks, or None for other values."""
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
    """The forms of the parts of one value. Parts may be shared, so they are numbered by their first visit.

    If ``by_identity`` is True, objects are compared by identity, not by their attributes.
    """

    def __init__(self, by_identity: bool = False) -> None:
        self._by_identity = by_identity
        self._seen: dict[int, tuple[int, Any]] = {}  # keeps each part alive, so that ids stay unique

    def of(self, value: Any, exact: bool = False) -> Form:
        """Return the form of a part. If ``exact`` is True, numbers and strings are compared by value."""
        kind: type[Any] = type(value)
        if isinstance(value, Tensor):
            return "tensor", cast(Form, kind)
        if isinstance(value, CONSTANTS):
            return kind, value
        if kind in LEAVES:
            return (kind, repr(value)) if exact else kind  # the text also tells NaN and -0.0 apart
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
        if isinstance(value, CHECKED):  # an instance of a subclass
            return (kind, repr(value)) if exact else kind
        if changes_unseen(value):
            return kind
        return _Same(value) if cast(Any, kind.__hash__) is object.__hash__ else (kind, value)


def _element(value: Any) -> Form:
    return (type(value), value) if isinstance(value, (*CONSTANTS, *LEAVES)) else _Same(value)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return (name, part) tuples of a collection or a function."""
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
    """Return the attributes in the ``__dict__`` and in the slots of an object."""
    slotted = (vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind))
    slots = (name for kind in slotted for name, member in kind.items() if isinstance(member, MemberDescriptorType))
    slotted_values = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes = getattr(value, "__dict__", None)
    return slotted_values | attributes if isinstance(attributes, dict) else slotted_values


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return _ABSENT


def changes_unseen(value: Any) -> bool:
    """Return whether a value, such as an iterator or an array, may change without a change of its form."""
    if isinstance(value, Iterator) or type(value).__hash__ is None:
        return not isinstance(value, (*COLLECTIONS, *CHECKED, CellType)) and not attributes_of(value)
    return False


class _Same:
    """The form of an object that is compared by identity. ``now`` returns the object, or None once it is freed."""

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
    """The form of a large collection, whose items are compared by identity."""

    def __init__(self, value: Any) -> None:
        self._kind, self._items = type(value), [*value, *(value.values() if isinstance(value, Mapping) else ())]

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Items) or (self._kind, len(self._items)) != (other._kind, len(other._items)):
            return False
        pairs = zip(self._items, other._items, strict=True)
        return all(mine is theirs for mine, theirs in pairs)


class Slotted:
    """The namespace of an object without ``__dict__``: the slots of an object, or the content of a closure's cell."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, name: str, default: Any, /) -> Any:
        """Return an attribute."""
        try:
            return getattr(self._owner, name)
        except (AttributeError, ValueError):
            return default


def namespaces_of(holder: Any, name: str) -> Iterator[tuple[Any, Namespace]]:
    """Yield (owner, namespace) tuples for the namespaces that define an attribute. The owner is an object or a class.

    Namespaces that nobody changes, or that other checks compare, are left out.
    """
    if isinstance(holder, CellType):
        yield holder, Slotted(holder)
        return
    kinds = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
    members = (vars(holder).get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
    if name.startswith("__") or isinstance(holder, Tensor):
        return
    if isinstance(holder, nn.Module) and (name in OF_MODULES or any(name in names for names in members)):
        return
    attributes = getattr(holder, "__dict__", None)
    if isinstance(attributes, dict) and not (isinstance(holder, ModuleType) and is_fixed(holder.__name__)):
        yield holder, attributes
        if name in attributes:
            return
    for kind in kinds:
        if name in vars(kind):
            if isinstance(vars(kind)[name], MemberDescriptorType) and not isinstance(holder, type):
                yield holder, Slotted(holder)
            elif not is_fixed(kind.__module__):
                yield kind, vars(kind)
            return


def is_fixed(package: str) -> bool:
    """Return whether the names in a Python module are never replaced, as in torch."""
    return package.partition(".")[0] in FIXED


@dataclass(frozen=True, eq=False)
class Lookup:
    """A name that forward read in a namespace.

    Attributes:
        key: the identity of the namespace's owner, and the name.
        namespace: the namespace of the name.
        name: the name that forward read.
        form: the form of the value.
        exact: True if the form includes the values of numbers and strings.
    """

    key: tuple[int, str]
    namespace: Namespace
    name: str
    form: Form
    exact: bool

    def holds(self) -> bool:
        """Return whether the current value of the name has this form."""
        return bool(_form_read(self.namespace.get(self.name, _ABSENT), self.exact) == self.form)


class Lookups:
    """The lookups of one trace. Each name is noted at its first read, before forward could change the value."""

    def __init__(self) -> None:
        # Each entry keeps its holder alive, so that the holder's id stays unique.
        self._read: dict[tuple[int, str], tuple[Lookup, Form, Any]] = {}

    def note(self, holder: Any, namespace: Namespace, name: str) -> None:
        """Note a read of a name in the namespace of ``holder``, unless Thunder checks the value itself."""
        value, key = namespace.get(name, _ABSENT), (id(holder), name)
        if not isinstance(value, CHECKED) and key not in self._read:
            exact = name in DEFAULTS or holder is namespace  # Thunder checks no defaults, and not all of globals
            lookup = Lookup(key, namespace, name, _form_read(value, exact), exact)
            self._read[key] = lookup, _form_read(value, exact=True), holder

    def changed(self) -> dict[str, Any]:
        """Return the values that changed since forward first read them, keyed by name."""
        now = ((lookup, form, lookup.namespace.get(lookup.name, _ABSENT)) for lookup, form, _ in self._read.values())
        return {lookup.name: value for lookup, form, value in now if _form_read(value, exact=True) != form}

    def taken(self) -> tuple[Lookup, ...]:
        """Return the lookups since the last call, and forget them."""
        reads, self._read = tuple(lookup for lookup, *_ in self._read.values()), {}
        return reads


class Guard:
    """The conditions under which a program may run again: the form of the call, and the values that forward read."""

    def __init__(self, form: Form, lookups: Sequence[Lookup]) -> None:
        self.form, self.lookups = form, lookups
        # Most lookups have None, no value, or one object. They are compared without new forms, which is fast.
        items = [(lookup.namespace.get, lookup.name, lookup.form) for lookup in lookups]
        self._constants = [item for item in items if item[2] is None or item[2] is _ABSENT]
        self._objects = [(get, name, form.now) for get, name, form in items if isinstance(form, _Same)]
        are_simple = (lookup.form in (None, _ABSENT) or isinstance(lookup.form, _Same) for lookup in lookups)
        self._others = [lookup for lookup, is_simple in zip(lookups, are_simple, strict=True) if not is_simple]

    def holds(self, form: Form) -> bool:
        """Return whether the program may run for a call of this form now."""
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
    """The guards of one model's programs. ``form`` is the form of the current call."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._guards: list[Guard] = []
        self._warned = False
        self.form: tuple[tuple[int | str, Form], ...] = ()

    def add(self, lookups: Sequence[Lookup]) -> int:
        """Add a guard for the program that is compiled for the current call. Return the guard's number."""
        self._guards.append(Guard(self.form, lookups))
        self._warn()
        return len(self._guards) - 1

    def holds(self, number: int) -> bool:
        """Return whether a program may run for the current call."""
        return self._guards[number].holds(self.form)

    def _warn(self) -> None:
        """Warn once if the form of an argument, or of a value that forward reads, differs between several programs."""
        subjects: dict[Hashable, str] = {name: f"argument {name!r}" for name, _ in self.form}
        subjects |= {lookup.key: f"{lookup.name!r}, which forward reads" for lookup in self._guards[-1].lookups}
        for key, subject in subjects.items():
            different: list[Form] = []
            for guard in self._guards:
                forms = dict(guard.form) | {lookup.key: lookup.form for lookup in guard.lookups}
                if key in forms and forms[key] not in different:
                    different.append(forms[key])
            if len(different) >= WARN_AFTER and not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self._model} was compiled for {len(different)} forms of {subject}, and each costs a "
                    f"compilation: None, types, lengths and objects make the form; keep it the same, or out of forward",
                    stacklevel=2,
                )


def form_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[int | str, Form], ...]:
    """Return the forms of a call's arguments, keyed by position or name."""
    forms = _Forms()
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return tuple((key, forms.of(value)) for key, value in named)
