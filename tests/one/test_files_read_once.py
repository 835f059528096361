"""A load reads each byte of a file at most once on a rank, and hashes it on the way."""

from __future__ import annotations

import builtins
import io
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import thunder_zero as tz
from tests.harness.checkpoints import Simulated, adamw, save_simulated, simulated_ranks, take_step
from tests.harness.errors import error_of
from tests.harness.models import fresh
from tests.harness.one_rank import group_of_one
from thunder_zero.checkpoint import manifest
from thunder_zero.checkpoint.dcp_read import METADATA, read_metadata
from thunder_zero.checkpoint.load import _files_to_verify as files_to_verify
from thunder_zero.checkpoint.load import read_checkpoint


class Wide(nn.Module):
    """Larger than a page, so that a second read of any entry shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 300), nn.Linear(300, 64)


@contextmanager
def bytes_read() -> Iterator[Counter[str]]:
    """Count the bytes that are read from files inside the block, by name."""
    counts = Counter[str]()

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            return self._counted(super().readinto(buffer))

        def read(self, size: int | None = -1) -> bytes | None:  # type: ignore[override]
            data = super().read(-1 if size is None else size)
            self._counted(len(data or b""))
            return data

        def readall(self) -> bytes | None:  # type: ignore[override]
            return self.read()

        def _counted(self, count: int | None) -> int | None:
            counts[Path(str(self.name)).name] += count or 0
            return count

    def counting_open(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if mode != "rb" or not isinstance(file, str | Path):
            return real(file, mode, buffering, *args, **options)
        raw = Counting(file, "rb")
        return raw if buffering == 0 else io.BufferedReader(raw)

    real = builtins.open
    with mock.patch.object(io, "open", counting_open), mock.patch.object(builtins, "open", counting_open):
        yield counts


def test_tz_load_reads_each_file_once(tmp_path: Path) -> None:
    # Except for the manifest: a second read shows whether another save has replaced the checkpoint.
    with group_of_one("cpu"):
        model = tz.compile(fresh(Wide), tz.ZERO3)
        optimizer = adamw(model)
        take_step(model, optimizer)
        tz.save(tmp_path / "run", model, optimizer, extra={"position": torch.arange(1000)})
        with bytes_read() as counts:
            tz.load(tmp_path / "run", model, optimizer)
        with bytes_read() as unverified:
            tz.load(tmp_path / "run", model, optimizer, verify_files=False)
    sizes = {file.name: file.size for file in manifest.read(tmp_path / "run").files}
    assert sizes.keys() == {"__0_0.distcp", METADATA}
    assert {name: counts[name] for name in sizes} == sizes
    assert {name: unverified[name] for name in sizes} == sizes, "every entry is needed"


def two_steps(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


def simulated(world: int) -> list[Simulated]:
    ranks = simulated_ranks(fresh(Wide), world, 3, two_steps)
    for rank in ranks:
        for param in rank.contents.params.values():
            param.grad = torch.ones_like(param).detach()
        rank.optimizer.step()
    return ranks


def load(path: Path, rank: Simulated) -> None:
    written = manifest.read(path)
    files = files_to_verify(written, rank.contents.rank, rank.contents.ranks)
    described = next(file for file in written.files if file.name == METADATA)
    read_checkpoint(path, read_metadata(path, described), [rank.contents], [rank.optimizer], files)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_another_world_reads_each_file_once_on_a_rank(tmp_path: Path, world: int) -> None:
    save_simulated(tmp_path / "run", simulated(3))
    sizes = {file.name: file.size for file in manifest.read(tmp_path / "run").files}
    in_full = Counter[str]()
    for rank in simulated(world):
        with bytes_read() as counts:
            load(tmp_path / "run", rank)
        assert all(counts[name] <= size for name, size in sizes.items()), counts
        in_full.update(name for name, size in sizes.items() if counts[name] == size)
    assert in_full.keys() == sizes.keys(), "each file is hashed by some rank"


def test_any_changed_byte_is_found_by_its_hash(tmp_path: Path) -> None:
    # Even bytes that cannot be decoded then: a header, a directory of torch's zip, a pickled value.
    save_simulated(tmp_path / "run", simulated(1))
    rank, path = simulated(1)[0], tmp_path / "run" / "__0_0.distcp"
    expected = path.read_bytes()
    undecodable = 0
    for place in range(0, len(expected), len(expected) // 100):
        path.write_bytes(expected[:place] + bytes([expected[place] ^ 0x10]) + expected[place + 1 :])
        assert "__0_0.distcp was changed: its SHA-256 differs; use another" in error_of(lambda: load(path.parent, rank))
        metadata = read_metadata(path.parent)
        undecodable += error_of(lambda: read_checkpoint(path.parent, metadata, [rank.contents], [])) != "nothing"  # noqa: B023
    assert undecodable, "some changes cannot be decoded"
