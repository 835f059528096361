"""Single files become checkpoints and back without ranks; wrong files are refused; the command line reports both."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp

import thunder_zero as tz
from tests.harness.commands import output_of, refusal_of, run_command
from tests.harness.errors import fails
from thunder_zero.safetensors_files import TensorToWrite, split_into_files
from thunder_zero.tools import consolidate
from thunder_zero.tools.convert import OpenCheckpoint


def weights() -> dict[str, Tensor]:
    """Return tensors with rows for three ranks, odd numbers of bytes, a scalar and an empty tensor."""
    return {
        "flags": torch.tensor([True, False, True]),
        "scale": torch.tensor(3.0),
        "wide": torch.arange(15, dtype=torch.float64).view(5, 3),
        "half": torch.arange(6).view(3, 2).bfloat16(),
        "none": torch.empty(0, 4),
    }


def assert_same(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, atol=0, rtol=0)


def data_bytes(path: Path) -> list[int]:
    return [file.stat().st_size for file in sorted(path.glob("*.distcp"))]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with a checkpoint ``start``."""
    save_file(weights(), tmp_path / "in.safetensors")
    tz.tools.shard_safetensors(tmp_path / "in.safetensors", tmp_path / "runs/start", ranks=3)
    return tmp_path / "runs"


# From files


def test_an_index_its_folder_or_a_folder_with_one_file_is_read_and_latest_stays(runs: Path, tmp_path: Path) -> None:
    assert not (runs / "latest").is_symlink()
    (runs / "latest").symlink_to("start")
    (tmp_path / "hub").mkdir()
    files = consolidate(runs / "start", tmp_path / "hub/model.safetensors", max_file_bytes=10)
    assert len(files) > 3
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "in.safetensors", tmp_path / "alone/model.safetensors")
    for source in ("hub/model.safetensors.index.json", "hub", "alone"):
        tz.tools.shard_safetensors(tmp_path / source, runs / "again", ranks=2)
        assert_same(load_file(consolidate(runs / "again", tmp_path / "one.safetensors")[0]), weights())
    assert (runs / "latest").readlink() == Path("start")


def test_floats_are_cast_and_tensors_aligned(runs: Path, tmp_path: Path) -> None:
    output_of("shard", tmp_path / "in.safetensors", tmp_path / "start", "--ranks", 2, "--dtype", "float32")
    (cast,) = consolidate(tmp_path / "start", tmp_path / "one.safetensors")
    expected = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights().items()}
    assert_same(load_file(cast), expected)
    (wide,) = consolidate(runs / "start", tmp_path / "wide.safetensors")
    content = wide.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    for name, tensor in weights().items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.itemsize == 0, name
    save_file(expected, tmp_path / "right.safetensors")
    tz.tools.shard_safetensors(tmp_path / "right.safetensors", tmp_path / "right", ranks=2)
    # Readers cast, so only bytes show the dtype.
    assert data_bytes(tmp_path / "start") == data_bytes(tmp_path / "right")


INDEX = "model.safetensors.index.json"
DAMAGED = " is no safetensors file, or damaged ("
GARBAGE = [
    ("in.safetensors", b"no tensors, no tensors", f"in.safetensors{DAMAGED}"),
    ("in.safetensors", save(weights(), {"aliases": "{"}), "in.safetensors names its tied weights in '{'"),
    ("in.safetensors", save(weights(), {"aliases": "[]"}), "in.safetensors names its tied weights in '[]'"),
    ("in.pt", b"PK", f"in.pt{DAMAGED}"),
    (INDEX, b"[1]", f"{INDEX} is no index of safetensors files"),
    (INDEX, b"{", f"{INDEX} is no index of safetensors files"),
    (INDEX, b'{"weight_map": {"no": "good.safetensors"}}', "good.safetensors has 'no', which it does not"),
    (INDEX, b'{"weight_map": {"no": "none.safetensors"}}', "none.safetensors does not exist, and the index names it"),
    ("folder/in", b"", "folder has no safetensors file"),
]


def test_garbage_is_refused_in_one_sentence(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "good.safetensors")
    (tmp_path / "folder").mkdir()
    for name, content, sentence in GARBAGE:
        (tmp_path / name).write_bytes(content)
        error = refusal_of("shard", tmp_path / name.removesuffix("/in"), tmp_path / "start")
        assert sentence in error, (sentence, error)
        assert "; " in error, error
    assert not (tmp_path / "start").exists()


# To files


def test_splitting_into_files_takes_linear_time() -> None:
    nbytes = mock.PropertyMock(return_value=8)
    wholes = [TensorToWrite(str(number), (2,), torch.float32, str(number)) for number in range(100)]
    with mock.patch.object(TensorToWrite, "nbytes", nbytes):
        assert [len(file) for file in split_into_files(wholes, 400)] == [50, 50]
    assert nbytes.call_count <= 3 * len(wholes)


def test_only_files_of_an_earlier_call_are_removed(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    foreign = ["m.pt", "m2.safetensors", "xm-00001-of-00002.safetensors", "m-1-of-2.safetensors", "m.safetensors.txt"]
    foreign += ["m-00001-of-00009.safetensors", "m.optimizer.safetensors.index.json"]  # of other tools
    for name in foreign:
        (out / name).touch()
    (start,) = consolidate(runs / "start", tmp_path / "ours.safetensors")
    for name in ("m.optimizer.safetensors", "m.optimizer-00001-of-00002.safetensors"):
        shutil.copy(start, out / name)
    for limit in (10, 20, None, 10):
        files = consolidate(runs / "start", out / "m.safetensors", max_file_bytes=limit)
        assert {path.name for path in out.iterdir()} == {*foreign, *(file.name for file in files)}


def test_existing_files_stay_if_a_call_fails(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    target = out / "m.safetensors"
    consolidate(runs / "start", target, max_file_bytes=20)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with mock.patch.object(OpenCheckpoint, "read", side_effect=OSError(28, "No space left on device")):
        fails(lambda: consolidate(runs / "start", target), ": the disk is full; existing files are unchanged")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


# The command line


def test_inspect_and_consolidate_refuse_a_damaged_checkpoint(runs: Path) -> None:
    # ``inspect`` without --verify compares only sizes.
    inspect, consolidate = ("inspect", runs / "start"), ("consolidate", runs / "start", runs / "m.safetensors")
    file = next((runs / "start").glob("__0_*"))
    content, damaged = file.read_bytes(), f"thunder-zero: {runs / 'start'} is damaged: {file.name}"
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    output_of(*inspect)
    for arguments in ((*inspect, "--verify"), consolidate):
        assert refusal_of(*arguments) == f"{damaged} was changed: its SHA-256 differs; use another checkpoint\n"
    file.write_bytes(content[:-1])
    sizes = f"has {len(content) - 1:,} bytes, it was saved with {len(content):,}; "
    assert refusal_of(*inspect).startswith(f"{damaged} {sizes}")
    file.unlink()
    for command in (inspect, consolidate):
        assert refusal_of(*command) == f"{damaged} is missing; use another checkpoint\n"
    assert refusal_of(*consolidate, "--no-verify").startswith(f"{damaged} is missing, its .metadata needs ")
    (runs / "start/manifest.json").write_text("{}")
    assert "manifest.json is damaged" in refusal_of(*inspect)
    assert refusal_of("inspect", runs / "none").startswith("thunder-zero: there is no checkpoint at ")
    none = f"thunder-zero: {runs} is not a checkpoint: it has no .metadata; pass the folder that was saved\n"
    assert refusal_of("inspect", runs) == none


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("state", [{"model": weights()}, weights()], ids=["nested", "flat"])
def test_checkpoints_of_other_tools_can_be_inspected_and_consolidated(tmp_path: Path, state: dict[str, Tensor]) -> None:
    dcp.save(state, checkpoint_id=tmp_path / "other", no_dist=True)
    code, out, err = run_command("inspect", tmp_path / "other")
    assert (code, err) == (0, "")
    assert "│ wide " in out
    assert "other: no manifest.json, so its files cannot be verified; 0 tensors of an optimizer; 2 files" in out
    assert "other: it has no manifest.json" in refusal_of("inspect", tmp_path / "other", "--verify")
    consolidate = "consolidate", tmp_path / "other", tmp_path / "m.safetensors"
    refusal_of(*consolidate)
    if "model" not in state:
        refusal_of(*consolidate, "--no-verify")
        return
    output_of(*consolidate, "--no-verify")
    assert_same(load_file(tmp_path / "m.safetensors"), weights())


def test_an_interrupt_is_reported_in_one_line() -> None:
    with mock.patch("thunder_zero.tools.convert.inspect", side_effect=KeyboardInterrupt()):
        assert run_command("inspect", "latest") == (130, "", "thunder-zero: interrupted\n")


def test_files_are_printed_to_stdout_and_bars_to_stderr(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes_of(*names: str) -> str:
        return "".join(f"{runs / name}  {(runs / name).stat().st_size:,} B\n" for name in names)

    consolidate = "consolidate", runs / "start", runs / "m.safetensors"
    names = [f"m-0000{number}-of-00002.safetensors" for number in (1, 2)] + ["m.safetensors.index.json"]
    code, out, err = run_command(*consolidate, "--max-file-bytes", "130B")
    assert (code, out, err) == (0, sizes_of(*names), "")
    assert refusal_of(*consolidate, "--max-file-bytes", "0B").startswith("thunder-zero: max_file_bytes is '0B';")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    _, out, err = run_command(*consolidate)
    assert out == sizes_of("m.safetensors")
    assert (last(err, "verify start"), last(err, "write m.safetensors")) == ("100%", "100%")
    _, out, err = run_command("shard", runs.parent / "in.safetensors", runs / "again", "--ranks", 2)
    assert out == f"{runs / 'again'}\n"
    assert last(err, "write again") == "100%"


def last(printed: str, bar: str) -> str:
    """Return the last percentage that a progress bar showed."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed)
    return str(re.findall(rf"{bar} \S+ +(\d+%)", plain)[-1])
