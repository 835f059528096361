"""Chooses the format of each parameter on the wire and at rest, by paths or by shape and dtype.

::

    gather_format=Int8()                         all parameters except embeddings and one-dimensional ones
    gather_format={"*": Int8(), "head": None}    ``head`` is unchanged: the last matching pattern decides
    frozen_format=NF4()                          frozen parameters that NF4 makes smaller, except embeddings
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from thunder_zero.encodings.encoding import Blocks
from thunder_zero.encodings.int8 import Int8
from thunder_zero.encodings.nf4 import NF4
from thunder_zero.plan.precision import around
from thunder_zero.plan.stored import Stored

if TYPE_CHECKING:
    from torch import nn

Format = Blocks
Formats = Format | Mapping[str, Format | None] | None
FORMATS: Mapping[str, tuple[type[Format], ...]] = {  # fields of the policy, with the package's formats
    "gather_format": (Int8,),
    "reduce_format": (Int8,),
    "frozen_format": (NF4,),
}
EMBEDDINGS = ("Embedding", "EmbeddingBag")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def require_formats(policy: Any) -> None:
    """Check the formats of a policy. Copy its dicts, so that a caller's later changes have no effect."""
    for name, kinds in FORMATS.items():
        formats = getattr(policy, name)
        if isinstance(formats, Mapping):
            object.__setattr__(policy, name, dict(formats))
        for fmt in formats.values() if isinstance(formats, Mapping) else [formats]:
            if fmt is not None and not isinstance(fmt, kinds) and not _is_custom_gather_format(name, fmt):
                raise ValueError(
                    f"{name} is {formats!r}; give {' or '.join(f'thunder_zero.{kind.__name__}()' for kind in kinds)}, "
                    f"a dict of patterns of paths with such values, or None"
                )
        if formats and policy.stage == 0:
            raise ValueError(
                f"{name} is {formats!r}, and stage 0 gathers nothing and would round each gradient twice; take stage "
                f"1, 2 or 3"
            )
    if policy.frozen_format and policy.stage == 1:
        raise ValueError(
            f"frozen_format is {policy.frozen_format!r}, and stage 1 keeps all parameters in full on every rank; take "
            f"stage 2 or 3"
        )


def _is_custom_gather_format(name: str, fmt: object) -> bool:
    """Return whether a gather format is a user's own encoding. NF4 is excluded: it encodes rows, not flat payloads."""
    return name == "gather_format" and isinstance(fmt, Blocks) and not isinstance(fmt, NF4)


def embeddings_of(module: nn.Module) -> frozenset[str]:
    """Return the paths of the embeddings of a module."""
    named = module.named_modules(remove_duplicate=False)
    return frozenset(
        path for path, submodule in named if any(kind.__name__ in EMBEDDINGS for kind in type(submodule).__mro__)
    )


def format_of(
    field: str, formats: Formats, names: Sequence[str], param: nn.Parameter, embeddings: frozenset[str]
) -> Any:
    """Return the format that a field of the policy chooses for a sharded parameter; None means unchanged. ``names`` are
    all names of the parameter; a tied parameter has several."""
    if not isinstance(formats, Mapping):
        is_exempt = param.dim() < 2 or any(path.rpartition(".")[0] in embeddings for path in names)
        return None if is_exempt or param.dtype not in DTYPES else formats
    by_name = {name: _last_match(formats, name) for name in names}
    if len(set(map(repr, by_name.values()))) > 1:
        first, second, *_ = by_name
        raise ValueError(f"{field} differs for {first!r} and {second!r}, which are one tied parameter; give one format")
    fmt = next(iter(by_name.values()))
    if fmt is not None and param.dtype not in DTYPES:
        raise ValueError(
            f"{field} asks for {fmt!r} of {names[0]!r}, which is {param.dtype}; leave it out with a pattern for it, "
            f"{{..., {names[0]!r}: None}}"
        )
    return fmt


def frozen_format_of(
    formats: Formats, names: Sequence[str], param: nn.Parameter, embeddings: frozenset[str]
) -> NF4 | None:
    """Return the format of a sharded parameter at rest; None if the parameter trains or would not get smaller."""
    if isinstance(param, Stored):
        return param.format
    if param.requires_grad or param.dim() < 2 or param.dtype not in DTYPES:
        return None
    fmt: NF4 | None = format_of("frozen_format", formats, names, param, embeddings)
    row_numel = prod(param.shape[1:])
    return fmt if fmt is not None and fmt.nbytes(row_numel) < row_numel * param.dtype.itemsize else None


def fits(pattern: str, names: Sequence[str]) -> bool:
    """Return whether a pattern matches one of a parameter's names, or the path of a submodule that holds it."""
    return any(fnmatchcase(part, pattern) for name in names for part in around(name))


def _last_match(formats: Mapping[str, Format | None], path: str) -> Format | None:
    parts = tuple(around(path))
    matching = [fmt for pattern, fmt in formats.items() if any(fnmatchcase(part, pattern) for part in parts)]
    return matching[-1] if matching else None
