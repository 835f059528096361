"""The parts of examples/train_gpt.py work: text, model and memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from examples.gpt import GPT, GPTConfig
from examples.stdlib_text import Shape, Text, load_text, train_batch, validation_batches
from examples.tensor_memory import MARK, Added, added_at_peak, added_by_mark, added_in_parts, bytes_held

CPU = torch.device("cpu")


def test_text_is_split_by_file(tmp_path: Path) -> None:
    """Files are read in order, skipped folders are not read, and too few files are refused."""
    with pytest.raises(FileNotFoundError, match="has 0 Python files; use a Python that ships its sources"):
        load_text(tmp_path)
    for index in range(40):
        (tmp_path / f"m{index:02}.py").write_text(f"{index:02}")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/a.py").write_text("skipped")
    text = load_text(tmp_path)
    train, validation = (bytes(part.tolist()).decode().split() for part in (text.train, text.validation))
    assert validation == ["00", "16", "32"]
    assert train == [f"{index:02}" for index in range(40) if index % 16]


def test_ranks_share_the_global_batch() -> None:
    text = Text(train=torch.arange(200, dtype=torch.uint8), validation=torch.arange(100, dtype=torch.uint8))

    def draw(size: int) -> list[torch.Tensor]:
        shapes = [Shape(rows=12, context=7, rank=rank, world_size=size) for rank in range(size)]
        train = torch.cat([train_batch(text, step=3, shape=shape, seed=0) for shape in shapes])
        return [train, *map(torch.cat, zip(*(validation_batches(text, 2, shape) for shape in shapes), strict=True))]

    for rows, expected in zip(draw(3), draw(1), strict=True):
        assert torch.equal(rows, expected)
        assert (rows.diff(dim=1) == 1).all()  # consecutive bytes
    with pytest.raises(ValueError, match="rows is 16; on 3 ranks give a multiple of 3"):
        Shape(rows=16, context=8, rank=0, world_size=3)
    shape = Shape(12, 7, 0, 1)
    drawn = [train_batch(text, step, shape, seed=seed) for step, seed in ((3, 0), (4, 0), (3, 1))]
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:])
    first, *_, last = torch.cat(validation_batches(text, 3, Shape(4, 7, 0, 1)))
    assert (first[0], last[-1]) == (0, 99), "to both ends"
    short = Text(train=torch.arange(10, dtype=torch.uint8), validation=text.validation)
    starts = torch.cat([train_batch(short, step, Shape(64, 7, 0, 1), seed=0)[:, 0] for step in range(4)])
    assert set(starts.tolist()) == {0, 1, 2}, "and no further"


def test_gpt_is_causal_and_ties_its_head() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"blocks": 2, "width": 16, "heads": 2, "context": 8}
    tied, model = (GPT(GPTConfig(**sizes, tied=tied)) for tied in (True, False))
    assert tied.head.weight is tied.embedding.weight is not model.head.weight
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)
    for name, value in (("blocks", 0), ("heads", 3)):
        with pytest.raises(ValueError, match=f"{name}(=| is ){value}"):
            GPTConfig(**sizes | {name: value})


def test_memory_counts_what_is_alive_at_the_same_time() -> None:
    """Shared memory counts once, as a whole. Allocations of other threads count."""
    full = torch.zeros(10, 4)
    assert bytes_held([full[:5], full[5:], torch.zeros(3)]) == 10 * 4 * 4 + 3 * 4
    kept: list[torch.Tensor] = []

    def in_a_thread(task: Callable[[], object]) -> None:
        thread = Thread(target=task)
        thread.start()
        thread.join()

    def backward() -> None:
        kept.append(torch.empty(300))  # 1,200 bytes
        kept.pop(0)

    def with_threads() -> None:
        in_a_thread(kept.clear)
        in_a_thread(lambda: kept.append(torch.empty(500)))
        torch.empty(100)

    forward, optimizer = lambda: kept.append(torch.empty(1000)), kept.clear
    parts = {"forward": forward, "backward": backward, "with threads": with_threads, "optimizer": optimizer}
    assert added_in_parts(parts, CPU) == {
        "forward": Added(4000, 4000),
        "backward": Added(1200, 5200),
        "with threads": Added(2000, 2400),
        "optimizer": Added(0, 2000),
    }
    assert added_at_peak(lambda: torch.empty(1000), CPU) == 4000


def test_memory_events_are_read_in_order_of_time() -> None:
    """An event's index gives the order inside its thread. The last two events are of another thread."""
    changes = [(7.5, 3, -8, 24), (6.0, 1, 4, 24), (6.5, 2, 8, 32), (7.5, 4, 2, 26), (5.0, 9, 20, 20), (5.5, 10, 0, 20)]
    events = [
        {"name": "[memory]", "ts": seconds, "args": {"Ev Idx": index, "Bytes": nbytes, "Total Allocated": total}}
        for seconds, index, nbytes, total in changes
    ]
    events += [{"name": MARK + name, "ts": seconds} for name, seconds in (("first", 4.9), ("idle", 6.2), ("last", 6.4))]
    assert added_by_mark([*events, {"name": "aten::add", "ts": 1.0, "args": {}}]) == {
        "first": Added(24, 24),
        "idle": Added(24, 24),
        "last": Added(26, 32),
    }
    assert added_by_mark([{"name": MARK + "step", "ts": 1.0}]) == {"step": Added(0, 0)}
