"""``tz.save_pretrained``: writes the folder that ``from_pretrained`` loads, one tensor at a time.

The module's class decides the tensors in each file, their names, and the content of ``config.json``. So the class's own
``save_pretrained`` writes a temporary folder, with a stand-in of one number for each tensor::

    state dict             stand-ins       its own model.safetensors     ours, gathered one by one
    embed.weight           tensor([0])     embed.weight  [0]             embed.weight  embed.weight in full
    head.weight (tied)     tensor([0])
    norm.weight            tensor([1])     norm.weight   [1]             norm.weight   norm.weight in full
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thunder_zero.checkpoint.folder import FILES_UNCHANGED, create_together, explain_write_error
from thunder_zero.comm.agree import Failures, all_or_none, argument_claims
from thunder_zero.comm.small_collectives import broadcast_object_from_rank_0, full_tensor
from thunder_zero.plan.amounts import bytes_of, float_dtype, name_of
from thunder_zero.safetensors_files import (
    SUFFIX,
    TensorToWrite,
    dtype_to_write,
    remove_older,
    require_storable,
    split_into_files,
    write_parts,
)
from thunder_zero.sharded.dtensors import parameter_like
from thunder_zero.sharded.frozen import frozen_param, shape_and_dtype
from thunder_zero.sharded.sharded_model import sharded_model, tagged
from thunder_zero.sharded.state import State
from thunder_zero.sharded.wire import decode_frozen

SAVE = "to save"
CARD = "README.md"  # an existing file belongs to the user
WEIGHTS = f"model{SUFFIX}"
CONFIG = Path("config.json")
DTYPE_KEYS = ("torch_dtype", "dtype")  # in config.json: the first key until transformers 4.55
ALTERNATIVE = (
    "take the plain module: with tz.full_parameters(model, rank0_only=True) as module: module.save_pretrained(...)"
)
# Keyed by path: the tensors to write, and the maximum bytes of tensors in a file (None for no maximum).
Weights = Mapping[Path, tuple[Sequence[TensorToWrite], int | None]]


@tagged("tz.save_pretrained")
def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
) -> None:
    """Write the whole model to a folder for ``from_pretrained``, or for the argument ``weights`` of this package.

    A collective: all ranks must call it, and rank 0 writes. Each tensor is gathered, written and dropped before the
    next. The files are renamed once all are complete. Then safetensors files of an earlier save are deleted if the new
    save did not write them.

    A Hugging Face model's own ``save_pretrained`` decides the files and the names of tensors: ``config.json``,
    ``generation_config.json`` and ``model.safetensors``, or only the adapters of a ``PeftModel``. Any other module is
    saved as ``model.safetensors`` alone, with a tied weight under its first name.

    >>> tz.save_pretrained(model, "runs/model", dtype=torch.bfloat16)
    >>> LlamaForCausalLM.from_pretrained("runs/model")

    ``max_shard_size`` bounds the bytes of tensors in a file: a number, or a text such as ``"500MiB"``. A larger tensor
    has a file of its own. Several files have an index. Adapters are always one file. ``dtype`` is for floating-point
    tensors; by default it is the shards' dtype.

    All ranks raise if a file cannot be written (existing files are then unchanged), if safetensors files cannot hold a
    dtype, or if the module's own ``save_pretrained`` raises.
    """
    sharded = sharded_model(model)
    state = sharded.state
    with all_or_none(state.group, SAVE) as claims:
        state.require_sharded()
        dtype = float_dtype("dtype", dtype)
        folder = Path(folder)
        max_bytes = bytes_of("max_shard_size", max_shard_size)
        state_dict = sharded.plain.state_dict(keep_vars=True)
        claims += argument_claims({"folder": folder, "max_shard_size": max_bytes, "dtype": dtype})
    with all_or_none(state.group, SAVE):
        is_writer = state.group.rank() == 0
        weights, other_files = (
            _plan_files(sharded.plain, state_dict, folder, max_bytes, dtype) if is_writer else ({}, {})
        )
    files = [members for planned in weights.values() for members in split_into_files(*planned)]
    keys = broadcast_object_from_rank_0([tensor.key for members in files for tensor in members], state.group)
    values = (_gather(state, state_dict[key]) for key in keys)  # lazy, so that only one tensor is held at a time
    failures = Failures()
    with failures.capture():
        if state.group.rank() == 0:
            _write(weights, other_files, values)
    for _ in values:
        pass  # every rank takes part in every gather, even rank 0 after an error
    with all_or_none(state.group, SAVE):
        failures.raise_first()


def _plan_files(
    module: nn.Module, state_dict: Mapping[str, Any], folder: Path, max_bytes: int, dtype: torch.dtype | None
) -> tuple[Weights, dict[Path, bytes]]:
    """Create the folder. Return the tensors of each safetensors file, and the contents of other files."""
    tensors = _tensors_of(state_dict)
    names_of: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), []).append(name)
    present = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    names_by_file, other_files = _files_of_module(module, tensors, names_of, dtype_to_write(present, dtype))
    weights: dict[Path, tuple[list[TensorToWrite], int | None]] = {}
    for path, names in names_by_file.items():
        to_write = []
        for name, key in names.items():
            tensor, tied = tensors[key], names_of[id(tensors[key])]
            aliases = tuple(alias for alias in tied if alias not in names) if name in tied else ()
            shape, wanted = tuple(tensor.shape), dtype_to_write(tensor.dtype, dtype)
            to_write.append(TensorToWrite(name, shape, wanted, key, aliases))
        require_storable(to_write)
        weights[folder / path] = to_write, max_bytes if path == Path(WEIGHTS) else None
    for path in {path.parent for path in (*names_by_file, *other_files)}:
        with explain_write_error(str(folder / path), FILES_UNCHANGED):
            (folder / path).mkdir(parents=True, exist_ok=True)
    existing = {Path(CARD)} if (folder / CARD).exists() else set()
    return weights, {folder / path: text for path, text in other_files.items() if path not in existing}


def _tensors_of(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state dict by name, with meta tensors in place of DTensors."""
    tensors: dict[str, Tensor] = {}
    on_meta: dict[int, Tensor] = {}  # a tied parameter has one tensor under all of its names
    left_out = []
    for name, value in state_dict.items():
        if isinstance(value, DTensor):
            shape, dtype = shape_and_dtype(value)
            tensors[name] = on_meta.setdefault(id(value), torch.empty(shape, dtype=dtype, device="meta"))
        elif isinstance(value, Tensor):
            tensors[name] = value
        else:
            left_out.append(name)
    if left_out:
        warnings.warn(
            f"tz.save_pretrained leaves out {', '.join(left_out)}: safetensors files hold tensors alone", stacklevel=5
        )
    return tensors


@torch.no_grad()
def _gather(state: State, value: Tensor) -> Tensor:
    """Return a full value on rank 0's CPU, and an empty tensor on other ranks. This is a collective."""
    full = full_tensor(value, state.group) if isinstance(value, DTensor) else value
    if state.group.rank():
        return full.new_empty(0)
    param = frozen_param(value)
    return full.cpu() if param is None else decode_frozen(full, param, param.dtype).cpu()


@torch.no_grad()
def _write(weights: Weights, other_files: Mapping[Path, bytes], values: Iterator[Tensor]) -> None:
    written: dict[Path, list[Path]] = {}

    def read(tensor: TensorToWrite) -> Tensor:
        return next(values).to(tensor.dtype)

    with create_together() as create:
        for path, contents in other_files.items():
            with create(path) as stream:
                stream.write(contents)
        for path, (tensors, max_bytes) in weights.items():
            written[path] = write_parts(create, path, tensors, read, {}, max_bytes)
    for path, files in written.items():
        remove_older(path, files, lambda older: True)


# Running the module's own save_pretrained


def _files_of_module(
    module: nn.Module, tensors: Mapping[str, Tensor], names_of: Mapping[int, Sequence[str]], dtype: torch.dtype
) -> tuple[dict[Path, dict[str, str]], dict[Path, bytes]]:
    """Return the files that a module's own ``save_pretrained`` writes.

    For each safetensors file, return a mapping from names in the file to names in the state dict. For each other file,
    return its contents. A module without ``save_pretrained`` has one file, with each tensor under its first name.
    """
    names = [tied[0] for tied in names_of.values()]
    if not hasattr(module, "save_pretrained"):
        return {Path(WEIGHTS): {name: name for name in names}}, {}
    numbers = {key: torch.tensor([number]) for number, key in enumerate(names_of)}
    stand_ins = {name: numbers[id(tensor)] for name, tensor in tensors.items()}
    with TemporaryDirectory() as folder:
        try:
            _skeleton(module).save_pretrained(folder, state_dict=stand_ins)
        except Exception as error:
            raise ValueError(f"{type(module).__name__}.save_pretrained raised: {error}; {ALTERNATIVE}") from error
        written = {path: path.relative_to(folder) for path in sorted(Path(folder).rglob("*")) if path.is_file()}
        weights = {name: _names_in(path, names, module) for path, name in written.items() if path.suffix == SUFFIX}
        other_files = {name: path.read_bytes() for path, name in written.items() if name not in weights}
    if not weights:
        raise ValueError(f"{type(module).__name__}.save_pretrained wrote no safetensors file; {ALTERNATIVE}")
    if CONFIG in other_files:  # the stand-ins have the dtype of compute
        config: dict[str, Any] = json.loads(other_files[CONFIG])
        config |= {key: name_of(dtype) for key in DTYPE_KEYS if key in config}
        other_files[CONFIG] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return weights, other_files


def _skeleton(module: nn.Module) -> Any:
    """Copy a module, with parameters on the meta device. ``save_pretrained`` may change the copy's configs."""
    parameters = {}
    for param in module.parameters():
        shape, dtype = shape_and_dtype(param)
        parameters[id(param)] = parameter_like(param, torch.empty(shape, dtype=dtype, device="meta"))
    return deepcopy(module, {**parameters, **{id(buffer): buffer for buffer in module.buffers()}})


def _names_in(path: Path, names: list[str], module: object) -> dict[str, str]:
    """Return a mapping from names in a file of stand-ins to names in the state dict, in the state dict's order."""
    numbers: dict[str, int] = {}
    for name, stand_in in load_file(path).items():
        if stand_in.shape != (1,) or stand_in.dtype is not torch.int64:
            raise ValueError(
                f"{type(module).__name__}.save_pretrained does not write the state dict that it is given: {name!r} in "
                f"{path.name} is {tuple(stand_in.shape)} {stand_in.dtype}; {ALTERNATIVE}"
            )
        numbers[name] = int(stand_in)
    return {name: names[number] for name, number in sorted(numbers.items(), key=lambda entry: entry[1])}
