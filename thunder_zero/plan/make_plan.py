"""Plans each parameter of a module: the module tree decides its unit, the policy everything else.

``make_plan(module, policy, mesh)`` reads the module tree once. In stage 3 on four ranks::

    h.0.weight, shape (10, 8)    ->    Param("h.0.weight", unit="h.0", sharded=True, resident=False,
                                             kept_unsharded=False, ...)    each rank stores three rows
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING

from thunder_zero.plan import layout
from thunder_zero.plan.formats import FORMATS, embeddings_of, fits, format_of, frozen_format_of
from thunder_zero.plan.geometry import Geometry
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.owners import Piece, assign, work_of_shape
from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.plan.precision import MixedPrecision, around
from thunder_zero.plan.stored import Stored

if TYPE_CHECKING:
    from torch import nn

from thunder_zero.plan.params import ROOT, Param, Plan


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the outermost repeated submodules that hold parameters, in module order: the default units.

    A member of a ``Sequential`` or ``ModuleList`` is a block if another member of any container has the same class
    (transformer blocks, the blocks of a ResNet's stages). A leaf is a block only if a sibling in its container has the
    same class (the layers of an MLP). Submodules that are not blocks are searched for blocks.
    """
    members = [child for parent in module.modules() if _is_container(parent) for child in parent.children()]
    members_by_class = Counter(type(member) for member in members)
    blocks: list[str] = []

    def visit(parent: nn.Module, prefix: str) -> None:
        siblings = Counter(type(child) for child in parent.children())
        for name, child in parent.named_children():
            is_leaf = next(child.children(), None) is None
            repeats = (siblings if is_leaf else members_by_class)[type(child)] > 1
            has_parameters = next(child.parameters(), None) is not None
            if _is_container(parent) and repeats and has_parameters and not _is_container(child):
                blocks.append(prefix + name)
            else:
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    return tuple(blocks)


def _is_container(module: nn.Module) -> bool:
    """Return whether a module is a ModuleList or a plain Sequential. A subclass of Sequential is not a container."""
    lists = any(kind.__name__ == "ModuleList" for kind in type(module).__mro__)
    return lists or type(module).__name__ == "Sequential"


def make_plan(
    module: nn.Module,
    policy: Policy,
    mesh: Mesh,
    slices: Mapping[str, int] | None = None,
    partial: Container[str] = (),
) -> Plan:
    """Plan every parameter of ``module`` for one rank, except those that the policy ignores.

    ``slices`` has the dimensions along which torch's tensor parallelism slices parameters. ``partial`` has the names of
    parameters whose gradients are sums over the ranks along ``tensor``.
    """
    if policy.shares and len(policy.shares) != mesh.batches:
        raise ValueError(
            f"shares is {policy.shares}, and the model has {mesh.batches} data-parallel ranks; give a number for each"
        )
    modules = {path for path, _ in module.named_modules()}
    names = _names(module, policy, modules)
    units = (policy.unit_of or repeated_blocks)(module)
    for unit in units:
        if unit not in modules:
            raise ValueError(
                f"unit_of names {unit!r}, which is not a submodule of {type(module).__name__}; return paths as "
                f"named_modules() has them"
            )
    embeddings = embeddings_of(module)
    params = tuple(
        _plan_param(param, tuple(paths), policy, _unit_of(paths[0], units), embeddings, mesh, slices or {}, partial)
        for param, paths in names.items()
    )
    plan = Plan(policy, mesh, _with_owners(params, policy, mesh))
    _require_units(plan, module)
    _require_formats(plan)
    return plan


def _names(module: nn.Module, policy: Policy, modules: set[str]) -> dict[nn.Parameter, list[str]]:
    """Return a mapping from parameters that are not ignored to their names. Raise ValueError for unknown paths."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    paths = {*modules, *(name for aliases in names.values() for name in aliases)}
    _require_known(policy.ignored, paths, module)
    _require_matches("replicated names", policy.replicated, paths, module)
    _require_matches("owned names", policy.owned, paths, module)
    with_buffers = {*paths, *(name for name, _ in module.named_buffers())}
    _require_matches("mixed_precision overrides", policy.mixed_precision.overrides, with_buffers, module)
    for field in FORMATS:
        formats = getattr(policy, field)
        _require_matches(field, formats if isinstance(formats, Mapping) else (), paths, module)
    names = {
        param: paths
        for param, paths in names.items()
        if not any(part in policy.ignored for path in paths for part in around(path))
    }
    _require_rows(names, policy)
    if not names:
        raise ValueError(
            f"{type(module).__name__} has no parameters{' that are not ignored' * bool(policy.ignored)}; there is "
            f"nothing to shard or to reduce"
        )
    return names


def _require_rows(names: Mapping[nn.Parameter, Sequence[str]], policy: Policy) -> None:
    """Raise ValueError for a parameter of a library that quantises, unless its rows can rest as they are."""
    for param, (name, *_) in names.items():
        kind = type(param)
        if kind.__module__.startswith(("bitsandbytes.", "torchao.")):
            raise ValueError(
                f"parameter {name!r} is a {kind.__name__} of {kind.__module__.partition('.')[0]}, which cannot be cut "
                f"into rows; thunder_zero takes bitsandbytes' Linear4bit with nf4, or a plain base with "
                f"frozen_format=thunder_zero.NF4()"
            )
        if isinstance(param, Stored) and policy.stage < 2:
            raise ValueError(
                f"parameter {name!r} rests in 4 bits, as bitsandbytes has it, and stage {policy.stage} keeps "
                f"parameters in full on every rank; take stage 2 or 3"
            )


def _require_units(plan: Plan, module: nn.Module) -> None:
    for field in ("recompute_units", "keep_unsharded"):
        for path in getattr(plan.policy, field):
            if path == ROOT or path not in plan.units:
                raise ValueError(
                    f"{field} names {path!r}, which is no unit of {type(module).__name__}; its units are "
                    f"{', '.join(repr(unit) for unit in plan.units if unit != ROOT) or 'none'}"
                )


def _with_owners(params: tuple[Param, ...], policy: Policy, mesh: Mesh) -> tuple[Param, ...]:
    """Give each parameter that ``Policy.owned`` names to a rank, so that ranks have equal work in each unit."""
    if policy.owned and not (STAGES[policy.stage].sharded and mesh.replicate.size == mesh.tensor.size == 1):
        raise ValueError(
            f"owned is {policy.owned!r}, in stage {policy.stage} with {mesh.replicate.size} replicas and "
            f"{mesh.tensor.size} slices; give it in stage 1, 2 or 3, with one replica and without tensor parallelism, "
            f"or leave it out, since tz.whole also steps rows"
        )
    pieces = [
        Piece(number, work_of_shape(param.shape), param.grad_bytes, param.unit)
        for number, param in enumerate(params)
        if _is_owned(param.names, param.shape, policy)
    ]
    if policy.owned and not pieces:
        raise ValueError(f"owned is {policy.owned!r}, where no parameter has two dimensions or more; name matrices")
    buckets = assign(pieces, mesh.shard.size, sum(piece.nbytes for piece in pieces), [0] * mesh.shard.size)
    owners = {number: owner for bucket in buckets for number, owner in bucket}
    return tuple(replace(param, owner=owners.get(number)) for number, param in enumerate(params))


def _is_owned(names: Sequence[str], shape: tuple[int, ...], policy: Policy) -> bool:
    return len(shape) > 1 and layout.is_sharded(shape) and any(fits(pattern, names) for pattern in policy.owned)


KINDS = {
    "gather_format": "sharded floating-point parameters",
    "reduce_format": "sharded floating-point parameters that train",
    "frozen_format": "frozen, sharded floating-point parameters of two dimensions or more that get smaller by it",
}


def _require_formats(plan: Plan) -> None:
    """Raise ValueError if a format applies to no parameter, since the user expects the format to save bytes."""
    for field, kind in KINDS.items():
        formats = getattr(plan.policy, field)
        for pattern, fmt in (formats if isinstance(formats, Mapping) else {"*": formats}).items():
            matched = [param for param in plan.params if fits(pattern, param.names)]
            usable = [param for param in matched if param.requires_grad or field != "reduce_format"]
            if fmt is not None and not any(getattr(param, field) for param in usable):
                raise ValueError(
                    f"{field} asks for {fmt!r} of {pattern!r}, and no parameter there can have it{_largest(matched)}: "
                    f"it is for {kind}, without a pattern of two dimensions or more that are no embeddings; name "
                    f"others, freeze or unfreeze them before the model is sharded, or leave {field} out"
                )


def _largest(params: Sequence[Param]) -> str:
    """Describe the largest parameter, for an error."""
    if not params:
        return ""
    largest = max(params, key=lambda param: prod(param.shape))
    state = "not sharded" if not largest.sharded else "trains" if largest.requires_grad else "frozen"
    return f" ({largest.path!r} is {tuple(largest.shape)} {largest.dtype}, {state})"


def _require_known(ignored: tuple[str, ...], known: set[str], module: nn.Module) -> None:
    for path in ignored:
        if path not in known or path == ROOT:
            raise ValueError(
                f"ignored names {path!r}, which is no parameter and no submodule of {type(module).__name__}; "
                f"give paths as its named_parameters() and named_modules() have them"
            )


def _require_matches(field: str, patterns: Iterable[str], known: set[str], module: nn.Module) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in known - {ROOT}):
            raise ValueError(
                f"{field} {pattern!r}, which fits no parameter and no submodule of "
                f"{type(module).__name__}; give a path or a pattern of paths, such as 'blocks.*.norm'"
            )


def _plan_param(
    param: nn.Parameter,
    names: tuple[str, ...],
    policy: Policy,
    unit: str,
    embeddings: frozenset[str],
    mesh: Mesh,
    slices: Mapping[str, int],
    partial: Container[str],
) -> Param:
    stage, sliced = STAGES[policy.stage], slices.get(names[0])
    geometry = Geometry(tuple(param.shape), mesh, is_cut=False, sliced=sliced)
    shape, uneven = geometry.in_compute, geometry.uneven
    if 0 in uneven:
        raise ValueError(
            f"dimension {sliced} of parameter {names[0]!r} is {sum(uneven)} long, of which the last of {len(uneven)} "
            f"ranks of tensor parallelism has nothing; choose fewer ranks, or do not slice this parameter"
        )
    is_small = prod(shape) * param.dtype.itemsize < policy.replicate_below_bytes and not uneven
    replicated = any(fits(pattern, names) for pattern in policy.replicated) or _is_owned(names, shape, policy)
    # torch's placements cannot describe rows of slices that have different numbers of rows.
    is_divisible = not (uneven and sliced == 0)
    sharded = stage.sharded and layout.is_sharded(shape) and is_divisible and not (is_small or replicated)
    precision = _precision_of(names, policy.mixed_precision) if param.is_floating_point() else MixedPrecision()
    compute_dtype = precision.param_dtype or param.dtype
    gather_format, reduce_format = (
        format_of(name, getattr(policy, name), names, param, embeddings) if sharded else None
        for name in ("gather_format", "reduce_format")
    )
    frozen_format = frozen_format_of(policy.frozen_format, names, param, embeddings) if sharded else None
    return Param(
        path=names[0],
        aliases=names[1:],
        shape=shape,
        dtype=param.dtype,
        compute_dtype=compute_dtype,
        reduce_dtype=precision.reduce_dtype or compute_dtype,
        requires_grad=param.requires_grad,
        unit=unit,
        sharded=sharded,
        resident=sharded and stage.resident,
        kept_unsharded=not sharded or stage.kept_unsharded or unit in policy.keep_unsharded,
        gather_per_unit=sharded and not stage.kept_unsharded and policy.gather_per_unit,
        gather_format=None if frozen_format else gather_format,
        reduce_format=reduce_format,
        frozen_format=frozen_format,
        sliced=sliced,
        is_partial=any(name in partial for name in names),
        uneven=uneven,
    )


def _precision_of(names: tuple[str, ...], precision: MixedPrecision) -> MixedPrecision:
    """Return the precision of a parameter. Raise ValueError if names of a tied parameter match different overrides."""
    overrides = {name: override for name in names if (override := precision.of(name)) is not precision}
    different = [name for name, override in overrides.items() if override != overrides[next(iter(overrides))]]
    if different:
        raise ValueError(
            f"mixed_precision has different overrides for {next(iter(overrides))!r} and {different[0]!r}, which are "
            f"one tied parameter; give both the same"
        )
    return next(iter(overrides.values()), precision)


def _unit_of(path: str, units: tuple[str, ...]) -> str:
    """Return the innermost unit that holds the parameter."""
    return max((unit for unit in units if path.startswith(f"{unit}.")), key=len, default=ROOT)
