"""Damaged and hostile checkpoints whose manifest was made to fit: one sentence from load, inspect and consolidate."""

from __future__ import annotations

import hashlib
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
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)

import thunder_zero as tz
from thunder_zero import cli
from thunder_zero.checkpoint import folder, manifest
from thunder_zero.checkpoint.collect import model_items, optimizer_items
from thunder_zero.checkpoint.dcp_read import read_metadata
from thunder_zero.checkpoint.dcp_write import write_items
from thunder_zero.checkpoint.manifest import File
from thunder_zero.checkpoint.read_all import read_checkpoint
from thunder_zero.checkpoint.write import finish_checkpoint
from thunder_zero.plan import make_plan
from thunder_zero.rows import own_rows
from thunder_zero.state_dict.contents import ModelContents

WEIGHT, BIAS, MOMENTUM = "model.weight", "model.bias", "optim.state.weight.momentum_buffer"
FILE = "__0_0.distcp"
Change = Callable[[Metadata], object]


def rank_of(rank: int) -> tuple[ModelContents, torch.optim.Optimizer]:
    module = nn.Linear(3, 4)
    plan = make_plan(module, tz.Policy(stage=3), 2, rank)
    shards = {
        param.path: nn.Parameter(own_rows(module.get_parameter(param.path).detach(), param, plan))
        for param in plan.params
    }
    optimizer = torch.optim.SGD(shards.values(), 0.1, momentum=0.9)
    for shard in shards.values():
        shard.grad = torch.ones_like(shard)
    optimizer.step()
    return ModelContents(plan, shards, {}, {}, {}, rank), optimizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("runs") / "good"
    folder.prepare(path)
    parts = []
    for rank in range(2):
        contents, optimizer = rank_of(rank)
        items = model_items(contents) + optimizer_items(contents, [optimizer])
        parts.append(write_items(folder.staging_of(path), rank, items))
    finish_checkpoint(path, parts, None)
    return path


def with_fitting_manifest(path: Path) -> None:
    names = [at.name for at in path.iterdir() if at.name != manifest.NAME]
    contents = {name: (path / name).read_bytes() for name in names}
    files = tuple(File(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items())
    (path / manifest.NAME).write_text(manifest.to_text(replace(manifest.read(path), files=files)))


def bad_type(stored: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(stored, name, value)


def place_of(metadata: Metadata, key: str) -> Any:
    return metadata.storage_data[MetadataIndex(key, (0, 0) if key != BIAS else (0,))]


def swap_places(metadata: Metadata, one: str, other: str) -> None:
    first, second = place_of(metadata, one), place_of(metadata, other)
    first.offset, second.offset, first.length, second.length = (
        second.offset,
        first.offset,
        second.length,
        first.length,
    )


def move(name: object, metadata: Metadata) -> None:
    bad_type(place_of(metadata, WEIGHT), relative_path=name)


def new_key(metadata: Metadata, key: Any, of: str) -> None:
    """Another name of a value."""
    metadata.state_dict_metadata[key] = metadata.state_dict_metadata[of]
    metadata.storage_data[MetadataIndex(key)] = metadata.storage_data[MetadataIndex(of)]


def entry(metadata: Metadata, key: str = WEIGHT) -> Any:
    return metadata.state_dict_metadata[key]


LR = "optim.param_groups.0.lr"
IN_METADATA: dict[str, tuple[Change, str]] = {
    "no entries": (lambda of: bad_type(of, state_dict_metadata=None), "list of entries is not a dict"),
    "no places": (lambda of: bad_type(of, storage_data=[1]), "list of places in files is not a dict"),
    "an entry": (lambda of: of.state_dict_metadata.update({WEIGHT: 5}), "model.weight is a int"),  # type: ignore[dict-item]
    "a name": (lambda of: of.state_dict_metadata.update({5: entry(of)}), "an entry that is named 5"),  # type: ignore[dict-item]
    "a shape": (lambda of: bad_type(entry(of), size="43"), "the shape of model.weight is '43'"),
    "a negative shape": (lambda of: bad_type(entry(of), size=(4, -3)), "the shape of model.weight is (4, -3)"),
    "a dtype": (lambda of: bad_type(entry(of).properties, dtype="float32"), "the dtype of model.weight is 'float32'"),
    "no dtype": (lambda of: bad_type(entry(of), properties=5), "an entry has another type than DCP's: 'int' object"),
    "a quantized dtype": (lambda of: bad_type(entry(of).properties, dtype=torch.quint8), "weight is torch.quint8"),
    "no fields": (
        lambda of: entry(of).__dict__.clear(),
        "than DCP's: 'TensorStorageMetadata' object has no",
    ),
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
        f"a file at {name!r}": (partial(move, name), "outside of the folder")
        for name in ("../x", "/etc/passwd", "a/../../x", "", "a\0b", 5)
    },
}
IN_FILES: dict[str, tuple[Change, str]] = {
    "a stored dtype": (
        lambda of: bad_type(entry(of, MOMENTUM).properties, dtype=torch.int32),
        "has shape (2, 3) and dtype torch.float32 in its file, (2, 3) and torch.int32 in .metadata",
    ),
    "swapped places": (
        lambda of: swap_places(of, BIAS, WEIGHT),
        "and dtype torch.float32 in its file, (2",
    ),
}


def damaged(good: Path, at: Path, change: Change) -> Path:
    shutil.copytree(good, at)
    metadata = read_metadata(at)
    change(metadata)
    (at / ".metadata").write_bytes(pickle.dumps(metadata))
    with_fitting_manifest(at)
    return at


def load(path: Path) -> str:
    contents, optimizer = rank_of(0)
    try:
        manifest.require_no_faults(path, manifest.find_faults(path, manifest.read(path).files))
        read_checkpoint(path, contents, [optimizer], 2)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_damaged_metadata_is_one_sentence(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy of the good one passes; what each tool says of each damage."""
    assert load(damaged(good, tmp_path / "same", lambda of: None)) == "loaded"
    assert cli.main(["inspect", str(tmp_path / "same"), "--verify"]) == 0
    capsys.readouterr()
    for number, (name, (change, words)) in enumerate((IN_METADATA | IN_FILES).items()):
        path = damaged(good, tmp_path / str(number), change)
        said = [load(path)]
        for command in (["inspect", path, "--verify"], ["consolidate", path, tmp_path / "m.pt", "--optimizer"]):
            assert cli.main([str(argument) for argument in command]) == 1, name
            said.append(capsys.readouterr().err)
        for sentence in said:
            assert words in sentence, (name, sentence)
            assert sentence.rstrip("\n").count("\n") == 0, (name, sentence)
            assert sentence.rstrip().endswith("; use another checkpoint"), (name, sentence)
    assert not (tmp_path / "m.pt").exists()


def test_places_that_the_files_do_not_have(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also without the option --verify; a link out of the folder is refused under any name."""
    long = damaged(good, tmp_path / "long", lambda of: bad_type(place_of(of, WEIGHT), offset=10**9))
    assert f"long is damaged: {FILE} has " in load(long)
    assert cli.main(["inspect", str(long)]) == 1
    assert f"long is damaged: {FILE} has " in capsys.readouterr().err
    linked = damaged(good, tmp_path / "linked", lambda of: None)
    (linked / FILE).rename(tmp_path / "elsewhere")
    (linked / FILE).symlink_to(tmp_path / "elsewhere")
    assert f"{FILE} is not a file, but a link or something else" in load(linked)
    contents, _ = rank_of(0)
    with pytest.raises(ValueError, match="leads out of it; use another checkpoint"):
        read_checkpoint(linked, contents, [])  # with verify_files=False, too


def test_other_values_than_ours(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameter groups that are none; a rank whose number would need all memory; a manifest of other types."""
    for name, key in (("groups", "optim.param_groups.x.lr"), ("rank", "rank99999999999.extra.a")):
        path = damaged(good, tmp_path / name, lambda of, key=key: new_key(of, key, LR))  # type: ignore[misc]
        assert load(path).endswith(("; use another checkpoint", "loaded")), name
    assert "groups are damaged: 'x.lr' is 0.1" in load(tmp_path / "groups")
    path = damaged(good, tmp_path / "params", lambda of: new_key(of, "optim.param_groups.0.params", LR))
    assert "groups are damaged: '0.params' is 0.1" in load(path)
    path = damaged(good, tmp_path / "no params", lambda of: of.state_dict_metadata.pop("optim.param_groups.0.params"))
    assert "parameter group 0 of the checkpoint's optimizer lists no parameters" in load(path)
    for name, change in {
        "a size": {"size": "5"},
        "a negative size": {"size": -1},
        "a hash": {"sha256": 5},
        "a name": {"name": "../a"},
        "a path": {"name": "/etc/passwd"},
    }.items():
        path = damaged(good, tmp_path / name, lambda of: None)
        first, *others = manifest.read(path).files
        files = (replace(first, **change), *others)  # type: ignore[arg-type]
        (path / manifest.NAME).write_text(manifest.to_text(replace(manifest.read(path), files=files)))
        assert "manifest.json is damaged: it is not a manifest (TypeError" in load(path), name
        assert cli.main(["inspect", str(path)]) == 1
        assert "manifest.json is damaged" in capsys.readouterr().err
