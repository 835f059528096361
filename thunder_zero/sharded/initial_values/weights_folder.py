"""Reads safetensors files lazily, as a mapping from names to tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"


class SafetensorsWeights(Mapping[str, Tensor]):
    """The tensors of a safetensors file, of an index, or of a folder that Hugging Face's ``save_pretrained`` wrote.

    A folder without an index has the tensors of all its files.

    Attributes:
        files: the file of each tensor, by the tensor's name.
    """

    def __init__(self, path: Path) -> None:
        self.files: dict[str, Path] = {}
        for file, names in _names_by_file(path):
            for name in names:
                if name in self.files:
                    raise ValueError(
                        f"{self.files[name].name} and {file.name} in {file.parent} both have {name!r}; give one of "
                        f"the files, or an index"
                    )
                self.files[name] = file

    def __getitem__(self, name: str) -> Tensor:
        file = self.files[name]
        with safe_open(file, "pt") as tensors:
            value: Tensor = tensors.get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def _names_by_file(path: Path) -> Iterator[tuple[Path, Iterable[str]]]:
    """Yield each file with the names of the tensors to read from it."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a folder of safetensors files")
    if path.is_file() and not path.name.endswith(INDEX):
        yield path, _names_in(path)
        return
    indexes = [path] if path.is_file() else sorted(path.glob(f"*{INDEX}"))
    if len(indexes) > 1:
        raise ValueError(f"{path} has several indexes: {', '.join(index.name for index in indexes)}; give one of them")
    if indexes:
        yield from _named_by(indexes[0])
        return
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise ValueError(
            f"{path} has no safetensors file; give the weights in files of torch.save as torch.load(file, mmap=True)"
        )
    for file in files:
        yield file, _names_in(file)


def _named_by(index: Path) -> Iterator[tuple[Path, Iterable[str]]]:
    """Yield each file that an index names, with the names of its tensors."""
    try:
        file_of_tensor: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = list(file_of_tensor.items())
    except (ValueError, LookupError, AttributeError, TypeError):
        raise ValueError(f"{index} is no index of safetensors files; save the model again") from None
    for file in dict.fromkeys(file_of_tensor.values()):
        present = set(_names_in(index.parent / file))
        expected = [name for name, other_file in names if other_file == file]
        if missing := [name for name in expected if name not in present]:
            raise ValueError(
                f"{index.name} says that {file} has {missing[0]!r}, which it does not; save the model again"
            )
        yield index.parent / file, expected


def _names_in(file: Path) -> list[str]:
    """Return the names of the tensors in a file."""
    try:
        with safe_open(file, "pt") as tensors:
            return list(tensors.keys())
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} does not exist, and the index names it; fetch it, too") from None
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file, or damaged ({error}); fetch it again") from None
