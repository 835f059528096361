"""``weights=`` reads a folder of safetensors files by name, and refuses others; test_meta_device.py shards them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.harness.errors import refused
from thunder_zero.capture.arguments import sources_of
from thunder_zero.safetensors_files import SafetensorsWeights

A, B = torch.arange(6.0).view(2, 3), torch.ones(2, dtype=torch.bfloat16)
INDEX = "model.safetensors.index.json"


def write_two_files(folder: Path) -> None:
    save_file({"a": A}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": B}, folder / "model-00002-of-00002.safetensors")


def write_indexed(folder: Path, **changes: str) -> None:
    write_two_files(folder)
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors", **changes}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write_another_file(folder: Path) -> None:
    """Write an index, and a file beside it that must be ignored."""
    write_indexed(folder)
    save_file({"a": A + 1, "c": A}, folder / "consolidated.safetensors")


@pytest.mark.parametrize("write", [write_two_files, write_indexed, write_another_file])
def test_tensors_are_read_by_name(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    for path in (tmp_path, str(tmp_path)):
        weights = sources_of(None, path).weights
        assert weights is not None
        assert list(weights) == ["a", "b"]
        assert torch.equal(weights["a"], A)
        assert torch.equal(weights["b"], B)
        assert len(weights) == 2
        assert "c" not in weights


def test_a_file_or_an_index_may_be_given(tmp_path: Path) -> None:
    write_indexed(tmp_path)
    assert list(SafetensorsWeights(tmp_path / INDEX)) == ["a", "b"]
    assert list(SafetensorsWeights(tmp_path / "model-00002-of-00002.safetensors")) == ["b"]


def write_damaged(folder: Path) -> None:
    write_two_files(folder)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"damaged")


def write_torchs(folder: Path) -> None:
    torch.save({"a": A}, folder / "pytorch_model.bin")


def write_twice(folder: Path) -> None:
    write_two_files(folder)
    save_file({"a": A}, folder / "model.safetensors")


def write_empty_index(folder: Path) -> None:
    write_two_files(folder)
    (folder / INDEX).write_text("{}")


def write_two_indexes(folder: Path) -> None:
    write_indexed(folder)
    (folder / f"other{INDEX}").write_text("{}")


@pytest.mark.parametrize(
    ("write", "kind", "words"),
    [
        (lambda folder: folder.rmdir(), FileNotFoundError, ["does not exist", "give a folder"]),
        (write_torchs, ValueError, ["no safetensors file", "torch.load(file, mmap=True)"]),
        (write_damaged, ValueError, ["model-00002-of-00002.safetensors is no safetensors file, or damaged"]),
        (write_twice, ValueError, ["model-00001-of-00002.safetensors and model.safetensors", "both have 'a'"]),
        (write_empty_index, ValueError, ["is no index of safetensors files"]),
        (write_two_indexes, ValueError, ["several indexes"]),
        (lambda folder: write_indexed(folder, a="gone.pt"), FileNotFoundError, ["gone.pt does not exist"]),
        (
            lambda folder: write_indexed(folder, a="model-00002-of-00002.safetensors"),
            ValueError,
            ["says that model-00002-of-00002.safetensors has 'a', which it does not"],
        ),
    ],
)
def test_other_folders_are_refused(
    tmp_path: Path, write: Callable[[Path], None], kind: type[Exception], words: list[str]
) -> None:
    write(tmp_path)
    with refused(kind, *words):
        SafetensorsWeights(tmp_path)
