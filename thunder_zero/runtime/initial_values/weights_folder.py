"""Reads safetensors files as a mapping from names to tensors, each when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"


class SafetensorsWeights(Mapping[str, Tensor]):
    """The tensors of safetensors files.

    Args:
        path: a folder, as Hugging Face's ``save_pretrained`` writes it: the files that its index names, or else all of
            its safetensors files; or one such file, or an index.

    Raises:
        FileNotFoundError: there is nothing at ``path``, or a file that the index names is missing.
        ValueError: a folder without safetensors files; a damaged file or index; files that have the same name.
    """

    def __init__(self, path: Path) -> None:
        self._file_of: dict[str, Path] = {}
        for file, names in _names_by_file(path):
            for name in names:
                if name in self._file_of:
                    raise ValueError(
                        f"{self._file_of[name].name} and {file.name} in {file.parent} both have {name!r}; give one of "
                        f"the files, or an index"
                    )
                self._file_of[name] = file

    def __getitem__(self, name: str) -> Tensor:
        file = self._file_of[name]
        with safe_open(file, "pt") as tensors:
            value: Tensor = tensors.get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _names_by_file(path: Path) -> Iterator[tuple[Path, Iterable[str]]]:
    if not path.exists():
        raise FileNotFoundError(f"weights names {path}, which does not exist; give a folder of safetensors files")
    if path.is_file() and not path.name.endswith(INDEX):
        yield path, _names_in(path)
        return
    indexes = [path] if path.is_file() else sorted(path.glob(f"*{INDEX}"))
    if len(indexes) > 1:
        raise ValueError(f"{path} has several indexes: {', '.join(one.name for one in indexes)}; give one of them")
    if indexes:
        yield from _named_by(indexes[0])
        return
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise ValueError(
            f"{path} has no safetensors file; for files of torch.save give torch.load(file, mmap=True) as weights"
        )
    for file in files:
        yield file, _names_in(file)


def _named_by(index: Path) -> Iterator[tuple[Path, Iterable[str]]]:
    try:
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = list(where.items())
    except (ValueError, LookupError, AttributeError, TypeError):
        raise ValueError(f"{index} is no index of safetensors files; save the model again") from None
    for file in dict.fromkeys(where.values()):
        there = set(_names_in(index.parent / file))
        named = [name for name, other in names if other == file]
        if missing := [name for name in named if name not in there]:
            raise ValueError(
                f"{index.name} says that {file} has {missing[0]!r}, which it does not; save the model again"
            )
        yield index.parent / file, named


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as tensors:
            return list(tensors.keys())
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} does not exist, and the index names it; fetch it, too") from None
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file, or damaged ({error}); fetch it again") from None
