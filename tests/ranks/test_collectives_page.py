"""Calls that docs/collectives.md names as collectives send on every rank; calls of one rank alone send nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import thunder_zero as tz
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool
from thunder_zero.comm import collective_tags

PAGE = (Path(__file__).parents[2] / "docs/collectives.md").read_text()
TOGETHER, ALONE = PAGE.split("## One rank may call these alone")
NO_CALLS = {"tools", "schedule", "ZeroModule", "Loaded"}  # modules, and types that calls return
X = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))


def test_the_page_has_every_public_name_in_one_table() -> None:
    calls = [rf"tz\.{name}\b" for name in set(tz.__all__) - NO_CALLS]
    calls += [rf"tz\.tools\.{name}\b" for name in tz.tools.__all__ if name.islower() and name != "traces"]
    tables = [first_columns(TOGETHER), first_columns(ALONE)]
    tables_of = {call: [bool(re.search(call, table)) for table in tables] for call in calls}
    in_both_tables = {r"tz\.EMA\b", r"tz\.whole\b", r"tz\.save\b"}  # some of their calls are collectives
    assert {call for call, is_in in tables_of.items() if not any(is_in)} == set()
    assert {call for call, is_in in tables_of.items() if all(is_in)} <= in_both_tables


def first_columns(text: str) -> str:
    """Return the first columns of tables, and the sentence about plain data."""
    return "\n".join(re.findall(r"^\| `[^|]*\||^These names are plain data.*?\n\n", text, re.M | re.S))


@pytest.mark.slow
def test_collectives_send_and_other_calls_do_not(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, make_calls_of_the_page, str(tmp_path))


def make_calls_of_the_page(rank: int, world_size: int, folder: str) -> None:
    model = sharded(fresh(Mlp), 3)
    optimizer = torch.optim.AdamW(model.parameters())
    muon = tz.whole(torch.optim.Muon, [param for param in model.parameters() if param.ndim == 2])
    ema = tz.EMA(model)
    train(model)
    optimizer.step()
    ema.update()
    for call, run in {**collectives(model, folder), "muon.step": muon.step}.items():
        with recorded_tags() as tags:
            run()
        assert tags, f"{call} sent nothing"
    with recorded_tags() as tags, ema.applied():
        pass
    assert tags
    writing = tz.save(f"{folder}/later", model, wait=False)
    with recorded_tags() as tags:
        if rank == 0:
            writing.result()
            for run in calls_alone(model, optimizer, ema, Path(folder)):
                run()
    assert not tags, tags
    train(model)  # ranks that had announced different tags would raise here
    dist.barrier()


def train(model: Any) -> None:
    model(X).square().mean().backward()


def collectives(model: Any, folder: str) -> Mapping[str, Callable[[], object]]:
    """Return the calls of the page's first table by name; all ranks make them in this order."""
    bytewise = sharded(fresh(Mlp), tz.Policy(3, reduce_format=tz.Int8()))
    return {
        "ZeroTransform": lambda: sharded(fresh(Mlp), 2),
        "compile": lambda: tz.compile(fresh(Mlp), stage=2),
        "model": lambda: model(X),
        "backward": lambda: train(model),
        "clip_grad_norm_": lambda: tz.clip_grad_norm_(model, 1.0),
        "global_mean": lambda: tz.global_mean(model, model(X).sum(), count=4),
        "shares_of": lambda: tz.shares_of(lambda: None, 4, steps=1),
        "full_parameters": lambda: enter(tz.full_parameters(model)),
        "full_state_dict": lambda: tz.full_state_dict(model),
        "save": lambda: tz.save(f"{folder}/saved", model),
        "load": lambda: tz.load(f"{folder}/saved", model),
        "save_pretrained": lambda: tz.save_pretrained(model, f"{folder}/pretrained"),
        "wire_error": lambda: tz.tools.wire_error(bytewise, lambda: train(bytewise)),
        "measure_times": lambda: tz.tools.measure_times(model, lambda: train(model), steps=1),
        "fit": lambda: tz.tools.fit(fresh(Mlp), X, memory_bytes=1 << 20, world_size=2),
        "calibrate": lambda: tz.tools.calibrate(seconds=0.01, dtypes=[torch.float32]),
        "backward again": lambda: train(model),
    }


def calls_alone(model: Any, optimizer: Any, ema: tz.EMA, folder: Path) -> Iterator[Callable[[], object]]:
    """Yield the calls of the page's second table, in its order."""
    traces = tz.trace(fresh(Mlp), X, policy=tz.ZERO3, world_size=4)
    ran = tz.traces_of(model)
    yield lambda: tz.print_trace(ran, "backward", unit="layers.1")
    yield lambda: tz.explain(ran, "layers.0.weight")
    yield lambda: tz.tools.memory(ran)
    yield lambda: tz.tools.estimate(traces, "h100")
    yield lambda: tz.tools.resized(tz.trace(fresh(Mlp), X, world_size=4, dynamic=True), {})
    yield lambda: tz.tools.for_loss(traces, lambda y: y.sum())
    yield lambda: tz.tools.diff(traces, tz.trace(fresh(Mlp), X, policy=tz.ZERO2, world_size=4))
    yield lambda: tz.tools.save_timeline(folder / "trace.json", traces, device="h100")
    yield lambda: tz.tools.report(traces, folder / "report.html", device="h100")
    yield lambda: tz.tools.plan_training(fresh(Mlp), X, world_size=2, device="h100", stages=(3,))
    yield lambda: tz.tools.consolidate(folder / "saved", folder / "one.safetensors")
    yield lambda: tz.tools.shard_safetensors(folder / "one.safetensors", folder / "start", ranks=2)
    yield lambda: tz.whole(torch.optim.Muon, [param for param in model.parameters() if param.ndim == 2])
    yield lambda: tz.EMA(model)
    yield ema.update
    yield lambda: enter(model.no_sync())
    yield lambda: model.load_state_dict(model.state_dict())
    yield lambda: model.load_original_state_dict(fresh(Mlp).state_dict())
    yield optimizer.step
    yield optimizer.zero_grad


def enter(block: Any) -> None:
    with block:
        pass


@contextmanager
def recorded_tags() -> Iterator[list[str]]:
    """Yield the tags that this rank announces; it announces a tag before each collective."""
    tags: list[str] = []
    announce = collective_tags.announce

    def record(tag: collective_tags.CollectiveTag, group: Any) -> Any:
        handle = announce(tag, group)
        tags.extend([tag.text] if handle is not None else [])  # None: the thread of an asynchronous save
        return handle

    with mock.patch.object(collective_tags, "announce", record):
        yield tags
