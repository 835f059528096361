"""Makes one file of whole tensors (or a few) from a checkpoint, one tensor at a time."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thunder_zero.checkpoint.dcp_check import require_files
from thunder_zero.convert.atomic_files import Create, create_together
from thunder_zero.convert.open_checkpoint import OpenCheckpoint, open_checkpoint
from thunder_zero.convert.safetensors_file import (
    INDEX_SUFFIX,
    MADE_HERE,
    SUFFIX,
    require_float,
    split_into_files,
    write_safetensors,
)
from thunder_zero.convert.tensor_to_write import ReadTensor, TensorToWrite
from thunder_zero.convert.torch_file import write_torch
from thunder_zero.report.progress import show_progress
from thunder_zero.state_dict.contents import GROUPS, MODEL, OPTIM, STATE, groups_of

TORCH = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Optim:
    """An optimizer in a checkpoint.

    Attributes:
        tensors: its states that are tensors, named ``"parameter.state"``.
        values: its other states, by such names.
        groups: hyper-parameters by ``"<group>.<name>"``.
    """

    tensors: list[TensorToWrite]
    values: dict[str, Any]
    groups: dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """What to write.

    Attributes:
        model: its tensors.
        extra_states: the states that modules add to a state dict (``get_extra_state``), by name.
        optim: the optimizer, if it is to be written.
        left_out: names of the ranks' own values, which no file has.
    """

    model: list[TensorToWrite]
    extra_states: dict[str, Any]
    optim: Optim | None
    left_out: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.model, *(self.optim.tensors if self.optim else ())))


def consolidate(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    optimizer: bool = False,
    max_file_bytes: int | None = None,
    verify_files: bool = True,
) -> tuple[Path, ...]:
    """Make one file of whole tensors (or a few) from a checkpoint, one tensor at a time.

    Needs no process group and no model. The files get their names once all are complete; then files that an earlier
    call wrote under the name ``out`` (parts, index, optimizer) and this one did not are deleted. The ranks' own values
    are left out, and in safetensors files extra states (``get_extra_state``), too: a warning names them.

    >>> tz.consolidate("runs/latest", "model.safetensors", dtype=torch.bfloat16)

    Args:
        checkpoint: the folder that :func:`thunder_zero.save` wrote, or the link ``latest``.
        out: the file, in the format of its suffix: ``.safetensors``; or ``.pt``, ``.pth``, ``.bin`` as ``torch.save``.
            A tied weight is written once: a safetensors file has its other names as JSON under ``aliases`` in its
            metadata, a torch file has the same tensor under each name.
        dtype: of the model's floating-point tensors (default None: as they were saved).
        optimizer: also write its state. With safetensors to ``NAME.optimizer.safetensors``: tensors are named
            ``parameter.state``; other states and hyper-parameters are JSON in the metadata, under ``state`` and
            ``param_groups``. A torch file is ``{"model": ..., "optim": ...}`` then, instead of the model's state dict.
        max_file_bytes: safetensors only: write files ``NAME-00001-of-00003.safetensors`` of at most so many bytes of
            tensors, and ``NAME.safetensors.index.json`` (default None: one file).
        verify_files: compare the files with their SHA-256 first; False also reads a checkpoint without a manifest.

    Returns:
        The files that were written.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, or an argument is invalid.
        OSError: a file cannot be written.
    """
    out = Path(out)
    _require_valid(out, dtype, max_file_bytes)
    source = open_checkpoint(Path(checkpoint), verify_files=verify_files)
    contents = _find_contents(source, dtype, optimizer)
    _warn_of_omissions(out, contents)
    with show_progress(f"write {out.name}", contents.nbytes) as done, create_together() as create:
        read = _reading_with_progress(source, done)
        if out.suffix != SUFFIX:
            return _write_torch(create, out, contents, read)
        written = _write_safetensors(create, out, contents, read, max_file_bytes)
    _remove_older(out, written)
    return tuple(written)


def _require_valid(out: Path, dtype: torch.dtype | None, max_file_bytes: int | None) -> None:
    if out.suffix not in (SUFFIX, *TORCH):
        raise ValueError(
            f"{out.name} ends in {out.suffix or 'nothing'!r}; pass a name that ends in .safetensors or .pt"
        )
    if max_file_bytes is not None and (out.suffix != SUFFIX or max_file_bytes < 1):
        raise ValueError(f"max_file_bytes is {max_file_bytes}; pass 1 or more, and a name that ends in .safetensors")
    require_float(dtype)


def _find_contents(source: OpenCheckpoint, dtype: torch.dtype | None, optimizer: bool) -> Contents:
    require_files(source.path, source.metadata)
    model = source.tensors_to_write(f"{MODEL}.", dtype)
    if not model:
        raise ValueError(f"{source.path} has no model; pass a checkpoint that thunder_zero.save wrote")
    prefixes = (f"{MODEL}.", f"{OPTIM}.") if optimizer else (f"{MODEL}.",)
    left_out = [name for name in source.keys_of_single_ranks() if name.startswith(prefixes)]
    return Contents(model, source.values(f"{MODEL}."), _read_optim(source) if optimizer else None, left_out)


def _read_optim(source: OpenCheckpoint) -> Optim:
    prefix = f"{OPTIM}.{GROUPS}."
    tensors = source.tensors(prefix).items()
    numbers = {name: source.read(prefix + name, stored.properties.dtype).tolist() for name, stored in tensors}
    groups = source.values(prefix) | numbers
    if not groups:
        raise ValueError(f"{source.path} has no optimizer; consolidate without one")
    return Optim(source.tensors_to_write(f"{OPTIM}.{STATE}."), source.values(f"{OPTIM}.{STATE}."), groups)


def _warn_of_omissions(out: Path, contents: Contents) -> None:
    if contents.left_out:
        warnings.warn(
            f"{out.name} does not contain the ranks' own values of ignored parameters: {', '.join(contents.left_out)}; "
            f"tz.load restores them on the same number of ranks",
            stacklevel=3,
        )
    if out.suffix == SUFFIX and contents.extra_states:
        warnings.warn(
            f"{out.name} does not contain {', '.join(contents.extra_states)}: safetensors files cannot hold extra "
            f"states; write {out.with_suffix('.pt').name} for them",
            stacklevel=3,
        )


def _reading_with_progress(source: OpenCheckpoint, done: Callable[[int], None]) -> ReadTensor:
    def read(tensor: TensorToWrite) -> Tensor:
        value = source.read(tensor.key, tensor.dtype)
        done(tensor.nbytes)
        return value

    return read


def _write_torch(create: Create, out: Path, contents: Contents, read: ReadTensor) -> tuple[Path, ...]:
    with create(out) as stream:
        write_torch(stream, _torch_tree(contents), read)
    return (out,)


def _torch_tree(contents: Contents) -> dict[str, Any]:
    """The nested dict of a torch file."""
    model: dict[str, Any] = {name: tensor for tensor in contents.model for name in (tensor.name, *tensor.aliases)}
    model |= contents.extra_states
    optim = contents.optim
    if optim is None:
        return model
    state: dict[str, dict[str, Any]] = {}
    for name, value in ({tensor.name: tensor for tensor in optim.tensors} | optim.values).items():
        param, _, entry = name.rpartition(".")
        state.setdefault(param, {})[entry] = value
    return {MODEL: model, OPTIM: {STATE: state, GROUPS: groups_of(optim.groups)}}


def _write_safetensors(
    create: Create, out: Path, contents: Contents, read: ReadTensor, max_file_bytes: int | None
) -> list[Path]:
    optim = contents.optim
    if optim is None:
        return _write_parts(create, out, contents.model, read, {}, max_file_bytes)
    notes = _notes(optim)  # refuses before anything is written
    of_optimizer = out.with_name(f"{out.stem}.optimizer{SUFFIX}")
    written = _write_parts(create, out, contents.model, read, {}, max_file_bytes)
    return written + _write_parts(create, of_optimizer, optim.tensors, read, notes, max_file_bytes)


def _notes(optim: Optim) -> dict[str, str]:
    """The metadata of the optimizer's safetensors file."""
    try:
        return {STATE: json.dumps(optim.values), GROUPS: json.dumps(optim.groups)}
    except TypeError as error:
        raise ValueError(f"a safetensors file cannot hold the optimizer's state ({error}); write a .pt file") from None


def _write_parts(
    create: Create,
    out: Path,
    tensors: list[TensorToWrite],
    read: ReadTensor,
    notes: Mapping[str, str],
    max_file_bytes: int | None,
) -> list[Path]:
    """Write safetensors files, and their index if there are several."""
    files = split_into_files(tensors, max_file_bytes)
    numbered = [f"{out.stem}-{number:05}-of-{len(files):05}{SUFFIX}" for number in range(1, len(files) + 1)]
    paths = [out] if len(files) == 1 else [out.with_name(name) for name in numbered]
    for path, members in zip(paths, files, strict=True):
        with create(path) as stream:
            write_safetensors(stream, members, read, notes)
    if len(files) == 1:
        return paths
    where = {tensor.name: path.name for path, members in zip(paths, files, strict=True) for tensor in members}
    total = {"total_size": sum(tensor.nbytes for tensor in tensors), **MADE_HERE}
    index = out.with_name(out.name + INDEX_SUFFIX)
    with create(index) as stream:
        stream.write(json.dumps({"metadata": total, "weight_map": where}, indent=1).encode() + b"\n")
    return [*paths, index]


def _remove_older(out: Path, written: Iterable[Path]) -> None:
    """Delete files that an earlier call wrote under this name and this one did not: a reader would mix them."""
    stem, dot, end = re.escape(out.stem), re.escape(SUFFIX), re.escape(INDEX_SUFFIX)
    ours = re.compile(rf"{stem}(\.optimizer)?(-\d{{5,}}-of-\d{{5,}}{dot}|{dot}({end})?)")
    current = {path.name for path in written}
    for path in list(out.parent.iterdir()):
        if ours.fullmatch(path.name) and path.name not in current and _is_made_here(path):
            path.unlink()


def _is_made_here(path: Path) -> bool:
    """Whether ``consolidate`` wrote a safetensors file, or an index, by its metadata."""
    try:
        if path.name.endswith(INDEX_SUFFIX):
            metadata = json.loads(path.read_text())["metadata"]
        else:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
        return bool(metadata.items() >= MADE_HERE.items())
    except (SafetensorError, ValueError, LookupError, AttributeError, TypeError):
        return False
