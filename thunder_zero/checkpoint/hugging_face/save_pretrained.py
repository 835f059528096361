"""``tz.save_pretrained``: the folder that ``from_pretrained`` loads, one tensor at a time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thunder_zero.checkpoint.folder import explain_write_error
from thunder_zero.checkpoint.hugging_face.own_files import WEIGHTS, own_files
from thunder_zero.checkpoint.whole_files import (
    FILES_UNCHANGED,
    TensorToWrite,
    create_together,
    dtype_to_write,
    remove_older,
    require_storable,
    split_into_files,
    write_parts,
)
from thunder_zero.comm.agree import Fact, all_or_none, require_same
from thunder_zero.comm.small_collectives import broadcast_object_from_rank_0, full_tensor
from thunder_zero.plan.amounts import bytes_of, float_dtype
from thunder_zero.sharded.sharded_model import sharded_model, tagged
from thunder_zero.sharded.state import State

SAVE = "to save"
CARD = "README.md"  # an existing one is the user's


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A safetensors file, or several with an index.

    Attributes:
        path: of the file, or of what the several are named after.
        tensors: what it has.
        max_bytes: of the tensors in one file; None: there is one file.
    """

    path: Path
    tensors: Sequence[TensorToWrite]
    max_bytes: int | None


@dataclass(frozen=True, slots=True)
class Folder:
    """What rank 0 writes.

    Attributes:
        weights: the files of tensors.
        others: the contents of the other files.
    """

    weights: Sequence[WeightsFile]
    others: Mapping[Path, bytes]

    @property
    def reads(self) -> list[str]:
        """The state dict's names in the order in which tensors are written."""
        files = [members for file in self.weights for members in split_into_files(file.tensors, file.max_bytes)]
        return [one.key for members in files for one in members]


@tagged("tz.save_pretrained")
def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
) -> None:
    """Write a folder of the whole model that Hugging Face's ``from_pretrained`` and argument ``weights`` load.

    A collective: all ranks must call it; rank 0 writes. Each tensor is gathered, written and dropped before the next
    one. The files get their names once all are complete; then earlier safetensors files of the same name that are not
    part of the model any more are deleted. A Hugging Face model's class says which files there are, which names its
    tensors have and which name of a tied weight is written, by its own ``save_pretrained``: ``config.json``,
    ``generation_config.json`` and ``model.safetensors``; of a ``PeftModel`` its adapters alone. Of another module
    ``model.safetensors`` alone is written, with a tied weight under its first name.

    >>> tz.save_pretrained(model, "runs/model", dtype=torch.bfloat16)
    >>> LlamaForCausalLM.from_pretrained("runs/model")

    Args:
        model: a model with ZeroTransform.
        folder: made if it is missing; rank 0 must see it.
        max_shard_size: the most bytes of tensors in one file, as a number or as in ``"5GB"`` or ``"500MiB"``; a larger
            tensor has a file of its own. Several files have an index. Adapters are always one file.
        dtype: of the floating-point tensors, such as ``"bfloat16"`` (default None: the shards' own).

    Raises:
        TypeError: not a model with ZeroTransform.
        ValueError: an argument is invalid; safetensors files cannot hold a tensor's dtype; the module's own
            ``save_pretrained`` raises.
        OSError: a file cannot be written; existing files are unchanged.
        RuntimeError: another rank refused; an argument differs between ranks; inside of ``full_parameters``.
    """
    sharded = sharded_model(model)
    state = sharded.state
    with all_or_none(state.group, SAVE):
        state.require_sharded()
        dtype = float_dtype("dtype", dtype)
        folder = Path(folder)
        max_bytes = bytes_of("max_shard_size", max_shard_size)
        found = sharded.plain.state_dict(keep_vars=True)
    arguments = {"folder": folder, "max_shard_size": max_bytes, "dtype": dtype}
    facts = [Fact(name, str(value), "pass the same on every rank") for name, value in arguments.items()]
    require_same(facts, state.group)
    plan = Folder([], {})
    with all_or_none(state.group, SAVE):
        if state.group.rank() == 0:
            plan = _planned(sharded.plain, found, folder, max_bytes, dtype)
    _gather_and_write(state, found, plan)


def _gather_and_write(state: State, found: Mapping[str, Any], plan: Folder) -> None:
    """Write rank 0's plan; a collective."""
    values = _values(state, found, broadcast_object_from_rank_0(plan.reads, state.group))
    failure: Exception | None = None
    try:
        if state.group.rank() == 0:
            _write(plan, values)
    except Exception as error:
        failure = error
    for _ in values:
        pass  # what rank 0 writes the others gather, too; and rank 0 what they gather, after it failed to write
    with all_or_none(state.group, SAVE):
        if failure is not None:
            raise failure


def _planned(
    module: nn.Module, state_dict: Mapping[str, Any], folder: Path, max_bytes: int, dtype: torch.dtype | None
) -> Folder:
    """What to write; makes the folder."""
    found = _tensors(state_dict)
    names_of: dict[int, list[str]] = {}
    for name, tensor in found.items():
        names_of.setdefault(id(tensor), []).append(name)
    own = next((tensor.dtype for tensor in found.values() if tensor.is_floating_point()), torch.float32)
    files = own_files(module, found, dtype_to_write(own, dtype))
    weights = []
    for path, names in files.weights.items():
        tensors = [
            _to_write(name, found[key], key, names_of[id(found[key])], names, dtype) for name, key in names.items()
        ]
        require_storable(tensors)
        weights.append(WeightsFile(folder / path, tensors, max_bytes if path == Path(WEIGHTS) else None))
    for path in {path.parent for path in (*files.weights, *files.others)}:
        with explain_write_error(str(folder / path), FILES_UNCHANGED):
            (folder / path).mkdir(parents=True, exist_ok=True)
    kept = {Path(CARD)} if (folder / CARD).exists() else set()
    return Folder(weights, {folder / path: text for path, text in files.others.items() if path not in kept})


def _tensors(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict's tensors by name; DTensors without values, on the meta device."""
    found: dict[str, Tensor] = {}
    shapes: dict[int, Tensor] = {}  # one for the names of a tied parameter
    left_out = []
    for name, value in state_dict.items():
        if isinstance(value, DTensor):
            found[name] = shapes.setdefault(id(value), torch.empty(value.shape, dtype=value.dtype, device="meta"))
        elif isinstance(value, Tensor):
            found[name] = value
        else:
            left_out.append(name)
    if left_out:
        warnings.warn(
            f"tz.save_pretrained leaves out {', '.join(left_out)}: safetensors files hold tensors alone", stacklevel=5
        )
    return found


def _to_write(
    name: str, like: Tensor, key: str, tied: Sequence[str], names: Container[str], dtype: torch.dtype | None
) -> TensorToWrite:
    """A tensor of a file that has these names; the names that it is tied under are aliases, unless it was renamed."""
    aliases = tuple(other for other in tied if other not in names) if name in tied else ()
    return TensorToWrite(name, tuple(like.shape), dtype_to_write(like.dtype, dtype), key, aliases)


def _values(state: State, state_dict: Mapping[str, Any], names: Sequence[str]) -> Iterator[Tensor]:
    """The values of these names in full, one at a time, on rank 0's CPU: it holds none. A collective."""
    for name in names:
        yield _full(state, state_dict[name].detach())


@torch.no_grad()
def _full(state: State, value: Tensor) -> Tensor:
    full = full_tensor(value, state.group) if isinstance(value, DTensor) else value
    return full.cpu() if state.group.rank() == 0 else full.new_empty(0)


@torch.no_grad()
def _write(plan: Folder, values: Iterator[Tensor]) -> None:
    """Write all files, then give them their names; on rank 0."""
    written: dict[Path, list[Path]] = {}

    def read(tensor: TensorToWrite) -> Tensor:
        return next(values).to(tensor.dtype)

    with create_together() as create:
        for path, contents in plan.others.items():
            with create(path) as stream:
                stream.write(contents)
        for file in plan.weights:
            written[file.path] = write_parts(create, file.path, file.tensors, read, {}, file.max_bytes)
    for path, files in written.items():
        remove_older(path, files, lambda older: True)
