"""Writes the whole tensors of a checkpoint to one or more safetensors files."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thunder_zero.checkpoint.contents import EMAS, GROUPS, MODEL, OPTIM, STATE, name_some
from thunder_zero.checkpoint.folder import create_together
from thunder_zero.plan.amounts import bytes_of, float_dtype
from thunder_zero.safetensors_files import SUFFIX, TensorToWrite, is_made_here, remove_older, write_parts
from thunder_zero.tools.convert.open_checkpoint import OpenCheckpoint, open_checkpoint
from thunder_zero.tools.printing.progress import show_progress


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
    """Write the whole tensors of a checkpoint to one or more safetensors files.

    The function needs no process group and no model. It needs memory for one tensor. Files have temporary names until
    all files are complete. Then stale files of an earlier call for ``out`` are deleted. A warning lists values that the
    files cannot hold. For a file of ``torch.save``, ``torch.distributed.checkpoint.format_utils.dcp_to_torch_save``
    reads checkpoints, too.

    >>> tz.tools.consolidate("runs/latest", "model.safetensors", dtype="bfloat16")

    Args:
        checkpoint: the folder that :func:`thunder_zero.save` wrote, or the link ``latest``.
        out: the file to write, ``NAME.safetensors``. A tied weight is written once. Its other names are in the
            metadata, as JSON under ``aliases``.
        dtype: dtype of the model's floating-point tensors, such as ``"bfloat16"`` (default: as saved).
        optimizer: True to write the optimizer's state as well, to ``NAME.optimizer.safetensors``, in tensors named
            ``parameter.state``. Other states and hyper-parameters are JSON in the metadata, under ``state`` and
            ``param_groups``.
        ema: name of the extra that holds an EMA. The averages are written as parameters (default: no EMA).
        max_file_bytes: the most bytes of tensors in a file, such as ``"5GB"``. The files are
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
    if out.suffix != SUFFIX:
        raise ValueError(
            f"{out.name} ends in {out.suffix or 'nothing'!r}; pass a name that ends in .safetensors, or call torch's "
            f"dcp_to_torch_save for a file of torch.save"
        )
    most_bytes = None if max_file_bytes is None else bytes_of("max_file_bytes", max_file_bytes)
    source = open_checkpoint(Path(checkpoint), verify_files=verify_files)
    model = _read_model(source, float_dtype("dtype", dtype), ema)
    extra_states = source.values(f"{MODEL}.")  # results of get_extra_state
    states, notes = _read_optim(source) if optimizer else ([], {})
    prefixes = (f"{MODEL}.", f"{OPTIM}.") if optimizer else (f"{MODEL}.",)
    _warn_of_omissions(out, extra_states, [name for name in source.keys_of_single_ranks() if name.startswith(prefixes)])
    total = sum(tensor.nbytes for tensor in (*model, *states))
    with show_progress(f"write {out.name}", total) as advance, create_together() as create:

        def read(tensor: TensorToWrite) -> Tensor:
            value = source.read(tensor.key, tensor.dtype)
            advance(tensor.nbytes)
            return value

        written = write_parts(create, out, model, read, {}, most_bytes)
        if optimizer:
            optimizer_file = out.with_name(f"{out.stem}.optimizer{SUFFIX}")
            written += write_parts(create, optimizer_file, states, read, notes, most_bytes)
    remove_older(out, written, is_made_here)
    return tuple(written)


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


def _read_optim(source: OpenCheckpoint) -> tuple[list[TensorToWrite], dict[str, str]]:
    """Return the tensors of an optimizer's state, and the file's metadata: other states, and hyper-parameters."""
    prefix = f"{OPTIM}.{GROUPS}."
    tensors = source.tensors(prefix).items()
    tensor_values = {name: source.read(prefix + name, stored.properties.dtype).tolist() for name, stored in tensors}
    groups = source.values(prefix) | tensor_values
    if not groups:
        raise ValueError(f"{source.path} has no optimizer; consolidate without one")
    try:
        notes = {STATE: json.dumps(source.values(f"{OPTIM}.{STATE}.")), GROUPS: json.dumps(groups)}
    except TypeError as error:
        raise ValueError(
            f"a safetensors file cannot hold the optimizer's state ({error}); torch's dcp_to_torch_save writes it"
        ) from None
    return source.tensors_to_write(f"{OPTIM}.{STATE}."), notes


def _warn_of_omissions(out: Path, extra_states: dict[str, Any], left_out: list[str]) -> None:
    if left_out:
        warnings.warn(
            f"{out.name} does not contain the ranks' own values of ignored parameters: {', '.join(left_out)}; "
            f"tz.load restores them on the same number of ranks",
            stacklevel=3,
        )
    if extra_states:
        warnings.warn(
            f"{out.name} does not contain {', '.join(extra_states)}: safetensors files cannot hold extra "
            f"states; torch's dcp_to_torch_save writes them",
            stacklevel=3,
        )
