"""Writes the whole tensors of a checkpoint to one or more files."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thunder_zero.checkpoint.contents import EMAS, GROUPS, MODEL, OPTIM, STATE, name_some
from thunder_zero.checkpoint.folder import create_together
from thunder_zero.checkpoint.optimizer_states import groups_of
from thunder_zero.plan.amounts import bytes_of, float_dtype
from thunder_zero.safetensors_files import SUFFIX, ReadTensor, TensorToWrite, is_made_here, remove_older, write_parts
from thunder_zero.tools.convert.open_checkpoint import OpenCheckpoint, open_checkpoint
from thunder_zero.tools.printing.progress import show_progress

TORCH = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Optim:
    """An optimizer in a checkpoint."""

    tensors: list[TensorToWrite]  # states that are tensors, named ``"parameter.state"``
    values: dict[str, Any]  # other states, keyed by ``"parameter.state"``
    groups: dict[str, Any]  # hyper-parameters, keyed by ``"<group>.<name>"``


def consolidate(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    optimizer: bool = False,
    ema: str | None = None,
    max_file_bytes: int | str | None = None,
    verify_files: bool = True,
) -> tuple[Path, ...]:
    """Write the whole tensors of a checkpoint to one or more files.

    The function needs no process group and no model. It needs memory for one tensor, or for all tensors of a torch
    file. Files have temporary names until all files are complete. Then stale files of an earlier call for ``out`` are
    deleted. A warning lists values that the files cannot hold.

    >>> tz.tools.consolidate("runs/latest", "model.safetensors", dtype="bfloat16")

    Args:
        checkpoint: the folder that :func:`thunder_zero.save` wrote, or the link ``latest``.
        out: the file to write. The suffix selects the format: ``.safetensors``, or ``.pt``, ``.pth``, ``.bin`` for
            ``torch.save``. A tied weight is written once. A safetensors file has the weight's other names in the
            metadata, as JSON under ``aliases``. A torch file has one tensor under all names.
        dtype: dtype of the model's floating-point tensors, such as ``"bfloat16"`` (default: as saved).
        optimizer: True to write the optimizer's state as well. A torch file then holds ``{"model": ..., "optim":
            ...}``. For safetensors, the state is in ``NAME.optimizer.safetensors``, in tensors named
            ``parameter.state``. Other states and hyper-parameters are JSON in the metadata, under ``state`` and
            ``param_groups``.
        ema: name of the extra that holds an EMA. The averages are written as parameters (default: no EMA).
        max_file_bytes: the most bytes of tensors in a safetensors file, such as ``"5GB"``. The files are
            ``NAME-00001-of-00003.safetensors`` and ``NAME.safetensors.index.json`` (default: one file).
        verify_files: True to check the SHA-256 of each file first. False also accepts checkpoints without a manifest.

    Returns:
        The files that were written.

    Raises:
        FileNotFoundError: there is no checkpoint.
        OSError: a file cannot be written.
        ValueError: the checkpoint is damaged, has no EMA ``ema``, or an argument is invalid.
    """
    out = Path(out)
    most_bytes = _limit(out, max_file_bytes)
    source = open_checkpoint(Path(checkpoint), verify_files=verify_files)
    model = _read_model(source, float_dtype("dtype", dtype), ema)
    extra_states = source.values(f"{MODEL}.")  # results of get_extra_state
    optim = _read_optim(source) if optimizer else None
    prefixes = (f"{MODEL}.", f"{OPTIM}.") if optimizer else (f"{MODEL}.",)
    _warn_of_omissions(out, extra_states, [name for name in source.keys_of_single_ranks() if name.startswith(prefixes)])
    total = sum(tensor.nbytes for tensor in (*model, *(optim.tensors if optim else ())))
    with show_progress(f"write {out.name}", total) as advance, create_together() as create:

        def read(tensor: TensorToWrite) -> Tensor:
            value = source.read(tensor.key, tensor.dtype)
            advance(tensor.nbytes)
            return value

        if out.suffix != SUFFIX:
            with create(out) as stream:
                torch.save(_torch_tree(model, extra_states, optim, read), stream)
            return (out,)
        metadata = _notes(optim) if optim else {}  # raises before anything is written
        written = write_parts(create, out, model, read, {}, most_bytes)
        if optim:
            optimizer_file = out.with_name(f"{out.stem}.optimizer{SUFFIX}")
            written += write_parts(create, optimizer_file, optim.tensors, read, metadata, most_bytes)
    remove_older(out, written, is_made_here)
    return tuple(written)


def _limit(out: Path, max_file_bytes: int | str | None) -> int | None:
    """Return the most bytes of tensors in a file; None for a single file."""
    if out.suffix not in (SUFFIX, *TORCH):
        raise ValueError(
            f"{out.name} ends in {out.suffix or 'nothing'!r}; pass a name that ends in .safetensors or .pt"
        )
    if max_file_bytes is not None and out.suffix != SUFFIX:
        raise ValueError(f"max_file_bytes is given for {out.name}; pass a name that ends in .safetensors")
    return None if max_file_bytes is None else bytes_of("max_file_bytes", max_file_bytes)


def _read_model(source: OpenCheckpoint, dtype: torch.dtype | None, ema: str | None) -> list[TensorToWrite]:
    model = source.tensors_to_write(f"{MODEL}.", dtype)
    if not model:
        raise ValueError(f"{source.path} has no model; pass a checkpoint that thunder_zero.save wrote")
    return model if ema is None else _averaged(source, model, ema)


def _averaged(source: OpenCheckpoint, model: list[TensorToWrite], ema: str) -> list[TensorToWrite]:
    """Return the tensors of a model. The averages of an EMA replace the parameters that it tracks."""
    prefix = f"{EMAS}.{ema}.{MODEL}."
    averages = source.tensors(prefix)
    if not averages:
        names = {key.split(".")[1] for key in source.metadata.state_dict_metadata if key.startswith(f"{EMAS}.")}
        raise ValueError(
            f"{source.path} has no EMA {ema!r}, it has {name_some(sorted(names))}; pass the name of its extra"
        )
    return [replace(tensor, key=prefix + tensor.name) if tensor.name in averages else tensor for tensor in model]


def _read_optim(source: OpenCheckpoint) -> Optim:
    prefix = f"{OPTIM}.{GROUPS}."
    tensors = source.tensors(prefix).items()
    tensor_values = {name: source.read(prefix + name, stored.properties.dtype).tolist() for name, stored in tensors}
    groups = source.values(prefix) | tensor_values
    if not groups:
        raise ValueError(f"{source.path} has no optimizer; consolidate without one")
    return Optim(source.tensors_to_write(f"{OPTIM}.{STATE}."), source.values(f"{OPTIM}.{STATE}."), groups)


def _warn_of_omissions(out: Path, extra_states: dict[str, Any], left_out: list[str]) -> None:
    if left_out:
        warnings.warn(
            f"{out.name} does not contain the ranks' own values of ignored parameters: {', '.join(left_out)}; "
            f"tz.load restores them on the same number of ranks",
            stacklevel=3,
        )
    if out.suffix == SUFFIX and extra_states:
        warnings.warn(
            f"{out.name} does not contain {', '.join(extra_states)}: safetensors files cannot hold extra "
            f"states; write {out.with_suffix('.pt').name} for them",
            stacklevel=3,
        )


def _torch_tree(
    model: list[TensorToWrite], extra_states: dict[str, Any], optim: Optim | None, read: ReadTensor
) -> dict[str, Any]:
    """Return the content of a torch file: a nested dict with all values."""
    tree: dict[str, Any] = {}
    for tensor in model:
        tree |= dict.fromkeys((tensor.name, *tensor.aliases), read(tensor))
    tree |= extra_states
    if optim is None:
        return tree
    state: dict[str, dict[str, Any]] = {}
    for name, value in ({tensor.name: read(tensor) for tensor in optim.tensors} | optim.values).items():
        param, _, entry = name.rpartition(".")
        state.setdefault(param, {})[entry] = value
    return {MODEL: tree, OPTIM: {STATE: state, GROUPS: groups_of(optim.groups)}}


def _notes(optim: Optim) -> dict[str, str]:
    """Return the metadata for the optimizer's safetensors file."""
    try:
        return {STATE: json.dumps(optim.values), GROUPS: json.dumps(optim.groups)}
    except TypeError as error:
        raise ValueError(f"a safetensors file cannot hold the optimizer's state ({error}); write a .pt file") from None
