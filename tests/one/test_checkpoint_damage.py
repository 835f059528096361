"""Damaged and hostile checkpoints: load, inspect and consolidate say one sentence, and nothing that is read runs.

Most checkpoints here have a manifest that fits the damaged files.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from tests.harness.checkpoints import Simulated, mesh_of, part_of, save_simulated, simulated_ranks
from tests.harness.errors import error_of, fails
from thunder_zero.checkpoint import manifest
from thunder_zero.checkpoint.dcp_read import read_entries, read_metadata
from thunder_zero.checkpoint.dcp_write import WritePlanner, write_metadata, write_planned
from thunder_zero.checkpoint.manifest import File
from thunder_zero.checkpoint.read import read_checkpoint
from thunder_zero.tools import cli

WEIGHT, BIAS, MOMENTUM = "model.weight", "model.bias", "optim.state.weight.momentum_buffer"
FILE, LAST = "__0_0.distcp", "; use another checkpoint"
Change = Callable[[Metadata], object]


def two_ranks() -> list[Simulated]:
    ranks = simulated_ranks(nn.Linear(3, 4), 2, 3, lambda params: torch.optim.SGD(params, 0.1, momentum=0.9))
    for rank in ranks:
        for param in rank.contents.params.values():
            param.grad = torch.ones_like(param).detach()
        rank.optimizer.step()
    return ranks


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("runs") / "good"
    save_simulated(path, two_ranks())
    return path


# Changes of the metadata


def bad_type(stored: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(stored, name, value)


def entry(metadata: Metadata, key: str = WEIGHT) -> Any:
    return metadata.state_dict_metadata[key]


def place_of(metadata: Metadata, key: str) -> Any:
    return metadata.storage_data[MetadataIndex(key, (0, 0) if key != BIAS else (0,))]


def swap_places(metadata: Metadata) -> None:
    one, other = place_of(metadata, BIAS), place_of(metadata, WEIGHT)
    one.offset, other.offset, one.length, other.length = other.offset, one.offset, other.length, one.length


def move(name: object, metadata: Metadata) -> None:
    bad_type(place_of(metadata, WEIGHT), relative_path=name)


def new_key(metadata: Metadata, key: str) -> None:
    """Save the learning rate under another key, too."""
    metadata.state_dict_metadata[key] = metadata.state_dict_metadata[LR]
    metadata.storage_data[MetadataIndex(key)] = metadata.storage_data[MetadataIndex(LR)]


LR = "optim.param_groups.0.lr"
IN_METADATA: dict[str, tuple[Change, str]] = {
    "no entries": (
        lambda of: bad_type(of, state_dict_metadata=None),
        "its list of entries, or of places in",
    ),
    "no places": (lambda of: bad_type(of, storage_data=[1]), "its list of entries, or of places in"),
    "an entry": (lambda of: of.state_dict_metadata.update({WEIGHT: 5}), "model.weight is a int"),  # type: ignore[dict-item]
    "a name": (lambda of: of.state_dict_metadata.update({5: entry(of)}), "an entry that is named 5"),  # type: ignore[dict-item]
    "a shape": (lambda of: bad_type(entry(of), size="43"), "the shape of model.weight is '43'"),
    "a negative shape": (lambda of: bad_type(entry(of), size=(4, -3)), "the shape of model.weight is (4, -3)"),
    "a dtype": (lambda of: bad_type(entry(of).properties, dtype="float32"), "the dtype of model.weight is 'float32'"),
    "no dtype": (lambda of: bad_type(entry(of), properties=5), "an entry has another type than DCP's: 'int' object"),
    "a quantized dtype": (lambda of: bad_type(entry(of).properties, dtype=torch.quint8), "weight is torch.quint8"),
    "no fields": (lambda of: entry(of).__dict__.clear(), "than DCP's: 'TensorStorageMetadata' object has no"),
    "a large number": (lambda of: bad_type(entry(of).chunks[0], sizes=(2**70, 3)), "is outside of its shape (4, 3)"),
    "chunks": (lambda of: bad_type(entry(of), chunks=3), "another type than DCP's: 'int' object is not iterable"),
    "a chunk": (lambda of: bad_type(entry(of), chunks=[3]), "a part of model.weight is a int"),
    "a chunk's rank": (lambda of: bad_type(entry(of).chunks[0], sizes=(2,)), "part of model.weight has another rank"),
    "a chunk outside": (lambda of: bad_type(entry(of).chunks[1], offsets=(3, 0)), "at (3, 0) is outside of its shape"),
    "overlapping chunks": (lambda of: bad_type(entry(of).chunks[1], offsets=(1, 0)), "parts of model.weight overlap"),
    "a chunk in no file": (lambda of: of.storage_data.pop(MetadataIndex(WEIGHT, (2, 0))), "at (2, 0) is in no file"),
    "a value in no file": (lambda of: of.storage_data.pop(MetadataIndex(LR)), f"{LR} is in no file"),
    "an index": (lambda of: of.storage_data.update({"x": place_of(of, WEIGHT)}), "'x' is not the name of an entry"),
    "a place": (lambda of: of.storage_data.update({MetadataIndex(LR): 5}), f"the place of {LR} is a int"),
    "a negative place": (lambda of: bad_type(place_of(of, WEIGHT), offset=-1), "model.weight is at -1, "),
    "overlapping places": (lambda of: bad_type(place_of(of, WEIGHT), offset=1), f"entries overlap in {FILE} at byte"),
    "a short place": (lambda of: bad_type(place_of(of, WEIGHT), length=5), "model.weight has 24 bytes, its place 5"),
    **{
        f"a file at {name!r}": (partial(move, name), f"is damaged: the file name {name!r} leads out of it")
        for name in ("../x", "/etc/passwd", "a/../../x")
    },
    **{f"a file at {name!r}": (partial(move, name), f" in {name!r})") for name in ("a\0b", 5)},
    "a file without a name": (partial(move, ""), "is missing, its .metadata needs"),
    "a stored dtype": (
        lambda of: bad_type(entry(of, MOMENTUM).properties, dtype=torch.int32),
        "has shape (2, 3) and dtype torch.float32 in its file, (2, 3) and torch.int32 in .metadata",
    ),
    "swapped places": (swap_places, "and dtype torch.float32 in its file, (2"),
}


def damaged(good: Path, index: Path, change: Change = lambda of: None) -> Path:
    """Copy the good checkpoint, change its metadata, and write a manifest that fits."""
    shutil.copytree(good, index)
    metadata = read_metadata(index)
    change(metadata)
    (index / ".metadata").write_bytes(pickle.dumps(metadata))
    contents = {path.name: path.read_bytes() for path in index.iterdir() if path.name != manifest.NAME}
    files = [File(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()]
    (index / manifest.NAME).write_text(manifest.to_text(replace(manifest.read(index), files=tuple(files))))
    return index


def load(path: Path) -> str:
    """Return what a load on rank 0 of two says."""
    rank = two_ranks()[0]

    def verified() -> None:
        manifest.require_no_faults(path, manifest.read(path).files)
        read_checkpoint(path, read_metadata(path), [rank.contents], [rank.optimizer])

    return error_of(verified)


def test_damaged_metadata_is_one_sentence(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each tool says one sentence for each damage, and nothing about a good copy."""
    assert load(damaged(good, tmp_path / "same")) == "nothing"
    assert cli.main(["inspect", str(tmp_path / "same"), "--verify"]) == 0
    capsys.readouterr()
    for number, (name, (change, words)) in enumerate(IN_METADATA.items()):
        path = damaged(good, tmp_path / str(number), change)
        text = [load(path)]
        for command in (["inspect", path, "--verify"], ["consolidate", path, tmp_path / "m.pt", "--optimizer"]):
            assert cli.main([str(argument) for argument in command]) == 1, name
            text.append(capsys.readouterr().err)
        for sentence in text:
            assert words in sentence, (name, sentence)
            assert sentence.rstrip("\n").count("\n") == 0, (name, sentence)
            assert sentence.rstrip().endswith(LAST), (name, sentence)
    assert not (tmp_path / "m.pt").exists()


def test_places_that_the_files_do_not_have(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused without --verify, too. A link out of the folder is refused under any name."""
    long = damaged(good, tmp_path / "long", lambda of: bad_type(place_of(of, WEIGHT), offset=10**9))
    assert f"long is damaged: {FILE} has " in load(long)
    assert cli.main(["inspect", str(long)]) == 1
    assert f"long is damaged: {FILE} has " in capsys.readouterr().err
    linked = damaged(good, tmp_path / "linked")
    (linked / FILE).rename(tmp_path / "elsewhere")
    (linked / FILE).symlink_to(tmp_path / "elsewhere")
    assert f"{FILE} is not a file, but a link or something else" in load(linked)
    fails(lambda: read_metadata(linked), "leads out of it; use another checkpoint")


def test_parameter_groups_that_are_none(good: Path, tmp_path: Path) -> None:
    """Damaged parameter groups are refused, and a rank whose number would need all memory."""
    params = "optim.param_groups.0.params"
    for number, (change, words) in enumerate(
        (
            (lambda of: new_key(of, "optim.param_groups.x.lr"), "groups are damaged: 'x.lr' is 0.1"),
            (lambda of: new_key(of, params), "groups are damaged: '0.params' is 0.1"),
            (lambda of: of.state_dict_metadata.pop(params), "group 0 of the checkpoint's optimizer lists no param"),
        )
    ):
        text = load(damaged(good, tmp_path / str(number), change))
        assert words in text, text
        assert text.endswith(LAST), text
    huge = damaged(good, tmp_path / "rank", lambda of: new_key(of, "rank99999999999.extra.a"))
    assert load(huge).endswith((LAST, "nothing"))


def test_a_manifest_of_other_types(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damaged(good, tmp_path / "typed")
    expected = manifest.read(path)
    first, *others = expected.files
    for change in ({"size": "5"}, {"size": -1}, {"sha256": 5}, {"name": "../a"}, {"name": "/etc/passwd"}):
        files = (replace(first, **change), *others)
        (path / manifest.NAME).write_text(manifest.to_text(replace(expected, files=files)))
        assert "manifest.json is damaged: it is not a manifest (TypeError" in load(path), change
        assert cli.main(["inspect", str(path)]) == 1
        assert "manifest.json is damaged" in capsys.readouterr().err


# Hostile files, and missing rows


class Command:
    """An object that runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_nothing_that_is_read_runs(tmp_path: Path) -> None:
    """Neither DCP's metadata nor a value runs code; DCP itself unpickles both."""
    done = tmp_path / "done"
    for content, words in ((Command(done), "(it names posix.mkdir"), ([1], "(it holds a list)")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
        fails(lambda: read_metadata(tmp_path), f".metadata is damaged {words}", LAST)
    value = io.BytesIO()
    torch.save(Command(done), value)
    (tmp_path / "a").mkdir()
    part = write_planned(tmp_path / "a", 0, WritePlanner({("rank0", "extra"): value.getvalue()}))
    write_metadata(tmp_path / "a", [part])
    fails(
        lambda: read_entries(tmp_path / "a", read_metadata(tmp_path / "a"), ["rank0.extra"]),
        "is damaged (Weights only load failed",
        "; use another",
    )
    assert not done.exists()


def test_rows_that_are_in_no_file(tmp_path: Path) -> None:
    rows = part_of(torch.ones(4, 3), mesh_of(0, 2))
    part = write_planned(tmp_path, 0, WritePlanner({("w",): rows}))
    none = write_planned(tmp_path, 1, WritePlanner({}))
    fails(lambda: write_metadata(tmp_path, [part, none]), "key:w invalid fill tensor-volume: 12 chunks-volume: 6")
    write_metadata(tmp_path, [part])
    metadata = read_metadata(tmp_path)
    missing = "is incomplete: rows of w are missing; use another checkpoint"
    for parts in ({}, {"w": part_of(torch.ones(4, 3), mesh_of(1, 2))}, {"w": part_of(torch.ones(4, 3), mesh_of(1, 3))}):
        fails(lambda: read_entries(tmp_path, metadata, ["w"], parts), missing)  # noqa: B023
    assert read_entries(tmp_path, metadata, ["w"], {"w": rows})["w"].tolist() == [[1.0] * 3] * 2
