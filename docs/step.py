"""Writes what docs/how-a-step-works.md shows: the steps of a model of three blocks in each stage, from real traces.

python docs/step.py                the picture and the table
python docs/step.py report.html    the report, which the site makes by itself
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import thunder_zero as tz  # before thunder
from thunder_zero.schedule import Compute, Free, Gather, Op, Reduce, Timeline, Wait
from thunder_zero.schedule.ops import Work

DOCS = Path(__file__).parent
PAGE, DATA = DOCS / "how-a-step-works.md", DOCS / "step-data.js"
BEGIN, END = "<!-- steps: python docs/step.py -->\n", "<!-- end of the steps -->"
RANKS, BLOCKS, WIDTH = 4, 3, 64
NAMES = ("0 DDP", "1 ZeRO-1", "2 ZeRO-2", "3 ZeRO-3")
POLICIES = (
    tz.DDP,
    tz.Policy(stage=1, prefetch=1),
    tz.Policy(stage=2, prefetch=1),
    tz.Policy(stage=3, prefetch=1, reshard_after_forward=True),
)


class Block(nn.Module):
    """One weight, so that a block is gathered by one message."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def steps(stage: int) -> list[dict[str, Any]]:
    """What a rank holds while each block computes, forward and backward, and when the optimizer steps.

    Weights: "full"; "shard"; "arriving" (gathered at this moment); in stage 1 "stale" (full, but the rows of other
    ranks are those before the last optimizer step) and "refreshed" (they arrive at this moment). Gradients: "none";
    "made" (by this block's backward); "leaving" (reduced at this moment); "mean", from stage 1 on of this rank's rows.
    """
    x = torch.randn(4, WIDTH, requires_grad=True)  # as if an embedding stood before: all blocks need their input's
    timeline = tz.trace(Blocks(), x, policy=POLICIES[stage], world_size=RANKS).timeline
    at_rest = ("full", "stale", "shard", "shard")[stage]
    state = _State(timeline, at_rest)
    for op in timeline.ops:
        state.take(op)
    state.show("optimizer", None)
    return state.shown


class _State:
    """Follows a timeline, and notes the moment at which each block begins."""

    def __init__(self, timeline: Timeline, at_rest: str) -> None:
        self.timeline, self.weights, self.grads = timeline, [at_rest] * BLOCKS, ["none"] * BLOCKS
        self.gathers = "refreshed" if at_rest == "stale" else "arriving"
        self.full = {value: path for value, path in timeline.inputs.items() if path}  # values of full weights
        self.sent = 0.0
        self.shown: list[dict[str, Any]] = []

    def take(self, op: Op) -> None:
        self.sent += self.timeline.traffic(op).sent
        blocks = [_block_of(path) for path in op.params]
        match op:
            case Gather():
                _set(self.weights, blocks, self.gathers)
            case Reduce():
                _set(self.grads, blocks, "leaving")
            case Wait(launch=Gather()):
                _set(self.weights, blocks, "full")
                self.full.update(zip(op.writes, op.params, strict=True))
            case Wait():
                _set(self.grads, blocks, "mean")
            case Free(params=(path, *_)) if op.backward or path not in self.timeline.plan.kept_unsharded:
                _set(self.weights, blocks, "shard")
            case Compute():
                self._compute(op)

    def _compute(self, op: Compute) -> None:
        phase = "backward" if op.backward else "forward"
        read = [self.full[value] for value in op.reads if value in self.full]
        if op.work is Work.VIEW:  # of a full weight, which backward may read in its place
            self.full.update((value, path) for value in op.writes for path in read)
            return
        used = set(map(_block_of, read))
        before = {(step["phase"], step["block"]) for step in self.shown[-1:]}
        for block in used:
            if (phase, block) not in before:
                self.show(phase, block)

    def show(self, phase: str, block: int | None) -> None:
        grads = ["made" if phase == "backward" and at == block else word for at, word in enumerate(self.grads)]
        sent = self.sent / (WIDTH * WIDTH * 4)
        self.shown.append({"phase": phase, "block": block, "weights": [*self.weights], "grads": grads, "sent": sent})


def _set(words: list[str], blocks: list[int], word: str) -> None:
    for block in blocks:
        words[block] = word


def _block_of(path: str) -> int:
    return int(path.split(".")[1])


def table(stages: list[list[dict[str, Any]]]) -> str:
    """The same in words: what travels and what is full at each moment."""
    rows = ["| while | " + " | ".join(NAMES) + " |", "|---" * (len(NAMES) + 1) + "|"]
    for moments in zip(*stages, strict=True):
        first = moments[0]
        name = "the optimizer steps" if first["block"] is None else f"{first['phase']} {first['block']}"
        rows.append(" | ".join([f"| {name}", *map(_words, moments)]) + " |")
    sent = [f"{moments[-1]['sent']:g}" for moments in stages]
    return "\n".join([*rows, "| sent by a rank, in blocks | " + " | ".join(sent) + " |"]) + "\n"


def _words(moment: dict[str, Any]) -> str:
    held = [
        (word, [str(at) for at, found in enumerate(moment[kind]) if found == wanted])
        for word, kind, wanted in (
            ("full", "weights", "full"),
            ("old rows in", "weights", "stale"),
            ("gathers", "weights", "arriving"),
            ("refreshes", "weights", "refreshed"),
            ("reduces", "grads", "leaving"),
        )
    ]
    said = {word: "all" if len(blocks) == BLOCKS else ", ".join(blocks) for word, blocks in held if blocks}
    return "; ".join(f"{word} {blocks}" for word, blocks in said.items()) or "shards only"


def data(stages: list[list[dict[str, Any]]]) -> str:
    """What step.js draws."""
    found = [{"name": name, "steps": moments} for name, moments in zip(NAMES, stages, strict=True)]
    return f"// Written by docs/step.py from the traces of each stage.\nconst STAGES = {json.dumps(found)};\n"


def report() -> str:
    """The report of stage 3 beside stage 2, as an HTML page, on a device on which some gathers are not hidden."""
    device = tz.tools.Device("slow", {"float32": 2e9}, 1e10, 1 << 30, intra_node=tz.tools.Link(1e8, 1e-5))
    x = torch.randn(64, WIDTH, requires_grad=True)
    zero3, zero2 = (tz.trace(Blocks(), x, policy=POLICIES[stage], world_size=RANKS) for stage in (3, 2))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        around = {"loss": lambda y: y.square().mean(), "optimizer": torch.optim.AdamW}
        tz.tools.report(zero3, path, device=device, beside=zero2, title="Three blocks on four ranks", **around)
        return path.read_text("utf-8")


def main() -> None:
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(report(), "utf-8")
        return
    stages = [steps(stage) for stage in range(len(NAMES))]
    DATA.write_text(data(stages))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table(stages) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
