"""Damaged and hostile checkpoints are refused in one sentence by load, inspect and consolidate; no code in them runs.

Most damaged checkpoints here have a manifest that fits the damaged files.
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
from thunder_zero.checkpoint.load import read_checkpoint
from thunder_zero.checkpoint.manifest import File
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
    """Return the folder of an intact checkpoint of two ranks."""
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
    bias, weight = place_of(metadata, BIAS), place_of(metadata, WEIGHT)
    bias.offset, weight.offset, bias.length, weight.length = weight.offset, bias.offset, weight.length, bias.length


def move(name: object, metadata: Metadata) -> None:
    bad_type(place_of(metadata, WEIGHT), relative_path=name)


def new_key(metadata: Metadata, key: str) -> None:
    """Store the learning rate under a second key."""
    metadata.state_dict_metadata[key] = metadata.state_dict_metadata[LR]
    metadata.storage_data[MetadataIndex(key)] = metadata.storage_data[MetadataIndex(LR)]


LR = "optim.param_groups.0.lr"
IN_METADATA: dict[str, tuple[Change, str]] = {
    "no entries": (lambda m: bad_type(m, state_dict_metadata=None), "its list of entries, or of places in"),
    "no places": (lambda m: bad_type(m, storage_data=[1]), "its list of entries, or of places in"),
    "an entry": (lambda m: m.state_dict_metadata.update({WEIGHT: 5}), "model.weight is a int"),  # type: ignore[dict-item]
    "a name": (lambda m: m.state_dict_metadata.update({5: entry(m)}), "an entry that is named 5"),  # type: ignore[dict-item]
    "a shape": (lambda m: bad_type(entry(m), size="43"), "the shape of model.weight is '43'"),
    "a negative shape": (lambda m: bad_type(entry(m), size=(4, -3)), "the shape of model.weight is (4, -3)"),
    "a dtype": (lambda m: bad_type(entry(m).properties, dtype="float32"), "the dtype of model.weight is 'float32'"),
    "no dtype": (lambda m: bad_type(entry(m), properties=5), "an entry has another type than DCP's: 'int' object"),
    "a quantized dtype": (lambda m: bad_type(entry(m).properties, dtype=torch.quint8), "weight is torch.quint8"),
    "no fields": (lambda m: entry(m).__dict__.clear(), "than DCP's: 'TensorStorageMetadata' object has no"),
    "a large number": (lambda m: bad_type(entry(m).chunks[0], sizes=(2**70, 3)), "is outside of its shape (4, 3)"),
    "chunks": (lambda m: bad_type(entry(m), chunks=3), "another type than DCP's: 'int' object is not iterable"),
    "a chunk": (lambda m: bad_type(entry(m), chunks=[3]), "a part of model.weight is a int"),
    "a chunk's rank": (lambda m: bad_type(entry(m).chunks[0], sizes=(2,)), "part of model.weight has another rank"),
    "a chunk outside": (lambda m: bad_type(entry(m).chunks[1], offsets=(3, 0)), "at (3, 0) is outside of its shape"),
    "overlapping chunks": (lambda m: bad_type(entry(m).chunks[1], offsets=(1, 0)), "parts of model.weight overlap"),
    "a chunk in no file": (lambda m: m.storage_data.pop(MetadataIndex(WEIGHT, (2, 0))), "at (2, 0) is in no file"),
    "a value in no file": (lambda m: m.storage_data.pop(MetadataIndex(LR)), f"{LR} is in no file"),
    "an index": (lambda m: m.storage_data.update({"x": place_of(m, WEIGHT)}), "'x' is not the name of an entry"),
    "a place": (lambda m: m.storage_data.update({MetadataIndex(LR): 5}), f"the place of {LR} is a int"),
    "a negative place": (lambda m: bad_type(place_of(m, WEIGHT), offset=-1), "model.weight is at -1, "),
    "overlapping places": (lambda m: bad_type(place_of(m, WEIGHT), offset=1), f"entries overlap in {FILE} at byte"),
    "a short place": (lambda m: bad_type(place_of(m, WEIGHT), length=5), "model.weight has 24 bytes, its place 5"),
    **{
        f"a file at {name!r}": (partial(move, name), f"is damaged: the file name {name!r} leads out of it")
        for name in ("../x", "/etc/passwd", "a/../../x")
    },
    **{f"a file at {name!r}": (partial(move, name), f" in {name!r})") for name in ("a\0b", 5)},
    "a file without a name": (partial(move, ""), "is missing, its .metadata needs"),
    "a stored dtype": (
        lambda m: bad_type(entry(m, MOMENTUM).properties, dtype=torch.int32),
        "has shape (2, 3) and dtype torch.float32 in its file, (2, 3) and torch.int32 in .metadata",
    ),
    "swapped places": (swap_places, "and dtype torch.float32 in its file, (2"),
}


def damaged(good: Path, target: Path, change: Change = lambda m: None) -> Path:
    """Copy the good checkpoint, change its metadata, and write a manifest that fits."""
    shutil.copytree(good, target)
    metadata = read_metadata(target)
    change(metadata)
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    contents = {path.name: path.read_bytes() for path in target.iterdir() if path.name != manifest.NAME}
    files = [File(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()]
    (target / manifest.NAME).write_text(manifest.to_text(replace(manifest.read(target), files=tuple(files))))
    return target


def load(path: Path) -> str:
    """Load on rank 0 of two. Return the error."""
    rank = two_ranks()[0]

    def verified() -> None:
        manifest.require_no_faults(path, manifest.read(path).files)
        read_checkpoint(path, read_metadata(path), [rank.contents], [rank.optimizer])

    return error_of(verified)


def test_damaged_metadata_is_refused_in_one_sentence(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(damaged(good, tmp_path / "same")) == "nothing"
    assert cli.main(["inspect", str(tmp_path / "same"), "--verify"]) == 0
    capsys.readouterr()
    for number, (name, (change, words)) in enumerate(IN_METADATA.items()):
        path = damaged(good, tmp_path / str(number), change)
        messages = [load(path)]
        for command in (
            ["inspect", path, "--verify"],
            ["consolidate", path, tmp_path / "m.safetensors", "--optimizer"],
        ):
            assert cli.main([str(argument) for argument in command]) == 1, name
            messages.append(capsys.readouterr().err)
        for sentence in messages:
            assert words in sentence, (name, sentence)
            assert sentence.rstrip("\n").count("\n") == 0, (name, sentence)
            assert sentence.rstrip().endswith(LAST), (name, sentence)
    assert not (tmp_path / "m.safetensors").exists()


def test_places_outside_of_files_and_links_are_refused(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = damaged(good, tmp_path / "long", lambda m: bad_type(place_of(m, WEIGHT), offset=10**9))
    assert f"long is damaged: {FILE} has " in load(long)
    assert cli.main(["inspect", str(long)]) == 1
    assert f"long is damaged: {FILE} has " in capsys.readouterr().err
    linked = damaged(good, tmp_path / "linked")
    (linked / FILE).rename(tmp_path / "elsewhere")
    (linked / FILE).symlink_to(tmp_path / "elsewhere")
    assert f"{FILE} is not a file, but a link or something else" in load(linked)
    fails(lambda: read_metadata(linked), "leads out of it; use another checkpoint")


def test_damaged_parameter_groups_and_a_huge_rank_are_refused(good: Path, tmp_path: Path) -> None:
    params = "optim.param_groups.0.params"
    for number, (change, words) in enumerate(
        (
            (lambda m: new_key(m, "optim.param_groups.x.lr"), "groups are damaged: 'x.lr' is 0.1"),
            (lambda m: new_key(m, params), "groups are damaged: '0.params' is 0.1"),
            (lambda m: m.state_dict_metadata.pop(params), "group 0 of the checkpoint's optimizer lists no param"),
        )
    ):
        text = load(damaged(good, tmp_path / str(number), change))
        assert words in text, text
        assert text.endswith(LAST), text
    huge = damaged(good, tmp_path / "rank", lambda m: new_key(m, "rank99999999999.extra.a"))
    assert load(huge).endswith((LAST, "nothing"))


def test_a_manifest_with_wrong_types_is_refused(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damaged(good, tmp_path / "typed")
    expected = manifest.read(path)
    first, *rest = expected.files
    for change in ({"size": "5"}, {"size": -1}, {"sha256": 5}, {"name": "../a"}, {"name": "/etc/passwd"}):
        files = (replace(first, **change), *rest)
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


def test_code_in_metadata_or_values_does_not_run(tmp_path: Path) -> None:
    # DCP itself unpickles both.
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


def test_missing_rows_are_refused_only_if_needed(tmp_path: Path) -> None:
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
