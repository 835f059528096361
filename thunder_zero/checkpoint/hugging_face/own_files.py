"""Asks a module's own ``save_pretrained`` for its files: the names of its tensors, and all others.

Which of a tied weight's names is written, which tensors are left out or renamed, what an adapter consists of and what
stands in ``config.json``: all of this is the module's class to say, and differs between versions of the libraries. So
its own method runs, into a temporary folder, on stand-ins of one number a tensor; what it wrote says the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from thunder_zero.checkpoint.whole_files import SUFFIX
from thunder_zero.plan.amounts import name_of
from thunder_zero.sharded.attributes import parameter_like

WEIGHTS = f"model{SUFFIX}"
CONFIG = "config.json"
DTYPE_KEYS = ("torch_dtype", "dtype")  # in config.json; the first one until transformers 4.55
INSTEAD = (
    "take the plain module: with tz.full_parameters(model, rank0_only=True) as module: module.save_pretrained(...)"
)


@runtime_checkable
class SavesPretrained(Protocol):
    """A module of Hugging Face's libraries."""

    def save_pretrained(self, folder: str, *, state_dict: Mapping[str, Tensor]) -> object:
        """Write this state dict to a folder."""


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """The files of a model.

    Attributes:
        weights: for each safetensors file, the state dict's name of each of its tensors, by the name there.
        others: the contents of each other file.
    """

    weights: Mapping[Path, Mapping[str, str]]
    others: Mapping[Path, bytes]


def own_files(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> OwnFiles:
    """The files of a module: what its ``save_pretrained`` writes; without one, each tensor once by its first name.

    Args:
        module: a plain module, whose parameters may be placeholders; left as it is.
        tensors: its state dict's tensors; a tied one is the same under each name.
        dtype: of its weights, for ``config.json``.

    Raises:
        ValueError: its ``save_pretrained`` raises, or writes something else than these tensors.
    """
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    names = list(first.values())
    if not isinstance(module, SavesPretrained):
        return OwnFiles({Path(WEIGHTS): {name: name for name in names}}, {})
    numbers = {key: torch.tensor([number]) for number, key in enumerate(first)}
    stand_ins = {name: numbers[id(tensor)] for name, tensor in tensors.items()}
    with TemporaryDirectory() as folder:
        try:
            _skeleton(module).save_pretrained(folder, state_dict=stand_ins)
        except Exception as error:
            raise ValueError(f"{type(module).__name__}.save_pretrained raised: {error}; {INSTEAD}") from error
        written = {path: path.relative_to(folder) for path in sorted(Path(folder).rglob("*")) if path.is_file()}
        weights = {to: _names_in(path, names, module) for path, to in written.items() if path.suffix == SUFFIX}
        others = {to: _contents(path, to, dtype) for path, to in written.items() if to not in weights}
    if not weights:
        raise ValueError(f"{type(module).__name__}.save_pretrained wrote no safetensors file; {INSTEAD}")
    return OwnFiles(weights, others)


def _skeleton(module: Any) -> SavesPretrained:
    """A copy of a module whose parameters have no values: saving looks at them, and writes to configs."""
    parameters = {
        id(param): parameter_like(param, torch.empty(param.shape, dtype=param.dtype, device="meta"))
        for param in module.parameters()
    }
    copy: SavesPretrained = deepcopy(module, {**parameters, **{id(buffer): buffer for buffer in module.buffers()}})
    return copy


def _names_in(path: Path, names: list[str], module: object) -> dict[str, str]:
    """The state dict's names by the names in a file of stand-ins, in the state dict's order."""
    found: dict[str, int] = {}
    for name, stand_in in load_file(path).items():
        if stand_in.shape != (1,) or stand_in.dtype is not torch.int64:
            raise ValueError(
                f"{type(module).__name__}.save_pretrained does not write the state dict that it is given: {name!r} in "
                f"{path.name} is {tuple(stand_in.shape)} {stand_in.dtype}; {INSTEAD}"
            )
        found[name] = int(stand_in)
    return {name: names[number] for name, number in sorted(found.items(), key=lambda entry: entry[1])}


def _contents(path: Path, to: Path, dtype: torch.dtype) -> bytes:
    """A file's contents; in ``config.json`` the weights' dtype, since a placeholder has that of compute."""
    contents = path.read_bytes()
    if to != Path(CONFIG):
        return contents
    config: dict[str, Any] = json.loads(contents)
    config |= {key: name_of(dtype) for key in DTYPE_KEYS if key in config}
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
