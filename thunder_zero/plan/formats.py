"""Which parameters travel in which format: by patterns of paths, or by what they are.

::

    gather_format=Int8()                         all but embeddings and parameters of one dimension
    gather_format={"*": Int8(), "head": None}    what the last pattern that matches says
    frozen_format=NF4()                          likewise, of the frozen parameters that get smaller so
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from thunder_zero.encodings.int8 import Int8
from thunder_zero.encodings.nf4 import NF4
from thunder_zero.plan.precision import around

if TYPE_CHECKING:
    from torch import nn

Format = Int8 | NF4
Formats = Format | Mapping[str, Format | None] | None
FORMATS: Mapping[str, tuple[type[Format], ...]] = {
    "gather_format": (Int8,),
    "reduce_format": (Int8,),
    "frozen_format": (NF4,),
}
EMBEDDINGS = ("Embedding", "EmbeddingBag")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def require_formats(policy: Any) -> None:
    """Check the formats of a policy, and keep copies of its dicts, which nobody changes.

    Raises:
        ValueError: a field is no format of its kind, or the stage has no such collectives.
    """
    for name, kinds in FORMATS.items():
        asked = getattr(policy, name)
        if isinstance(asked, Mapping):
            object.__setattr__(policy, name, dict(asked))
        for each in asked.values() if isinstance(asked, Mapping) else [asked]:
            if each is not None and not isinstance(each, kinds):
                raise ValueError(
                    f"{name} is {asked!r}; give {' or '.join(f'thunder_zero.{kind.__name__}()' for kind in kinds)}, a "
                    f"dict of patterns of paths with such values, or None"
                )
        if asked and policy.stage == 0:
            raise ValueError(
                f"{name} is {asked!r}, and stage 0 gathers nothing and would round each gradient twice; take stage 1, "
                f"2 or 3"
            )
    if policy.frozen_format and policy.stage == 1:
        raise ValueError(
            f"frozen_format is {policy.frozen_format!r}, and stage 1 keeps all parameters in full on every rank; take "
            f"stage 2 or 3"
        )


def embeddings_of(module: nn.Module) -> frozenset[str]:
    """Return the paths of the embeddings of a module."""
    named = module.named_modules(remove_duplicate=False)
    return frozenset(path for path, each in named if any(kind.__name__ in EMBEDDINGS for kind in type(each).__mro__))


def format_of(field: str, asked: Formats, names: Sequence[str], param: nn.Parameter, embeddings: frozenset[str]) -> Any:
    """Return the format of a sharded parameter, given its names, by a field of the policy; None if it travels as it is.

    Raises:
        ValueError: a pattern asks for one that its dtype cannot have, or patterns differ for a tied parameter's names.
    """
    if not isinstance(asked, Mapping):
        is_exempt = param.dim() < 2 or any(path.rpartition(".")[0] in embeddings for path in names)
        return None if is_exempt or param.dtype not in DTYPES else asked
    found = {path: _last_match(asked, path) for path in names}
    if len(set(map(repr, found.values()))) > 1:
        one, *others = found
        raise ValueError(
            f"{field} differs for {one!r} and {others[0]!r}, which are one tied parameter; give one format"
        )
    form = next(iter(found.values()))
    if form is not None and param.dtype not in DTYPES:
        raise ValueError(
            f"{field} asks for {form!r} of {names[0]!r}, which is {param.dtype}; leave it out with a pattern for it, "
            f"{{..., {names[0]!r}: None}}"
        )
    return form


def frozen_format_of(
    asked: Formats, names: Sequence[str], param: nn.Parameter, embeddings: frozenset[str]
) -> NF4 | None:
    """Return the format in which a sharded parameter rests; None if it trains, or does not get smaller by it.

    Raises:
        ValueError: patterns differ for a tied parameter's names.
    """
    if param.requires_grad or param.dim() < 2 or param.dtype not in DTYPES:
        return None
    form: NF4 | None = format_of("frozen_format", asked, names, param, embeddings)
    numel = prod(param.shape[1:])
    return form if form is not None and form.nbytes(numel) < numel * param.dtype.itemsize else None


def fits(pattern: str, names: Sequence[str]) -> bool:
    """Return whether a pattern names a parameter, or a submodule that holds it."""
    return any(fnmatchcase(part, pattern) for name in names for part in around(name))


def _last_match(asked: Mapping[str, Format | None], path: str) -> Format | None:
    parts = tuple(around(path))
    matching = [form for pattern, form in asked.items() if any(fnmatchcase(part, pattern) for part in parts)]
    return matching[-1] if matching else None
