"""What a collective is: an all-reduce, a gather and a reduce-scatter made of sends and receives, byte by byte.

    torchrun --standalone --nproc-per-node 2 examples/wire_protocol.py             # ZeRO-3
    torchrun --standalone --nproc-per-node 4 examples/wire_protocol.py --stage 0   # DDP
    python examples/wire_protocol.py                                               # one process sends nothing

Trains a small perceptron by hand: `Wire` has the three collectives, `Layer` calls them where the stage needs them, and
every byte that leaves this rank is counted, and when. It trains twice, and all ranks end with the same weights, bit for
bit, both times. Then ZeroTransform trains the same model and sends the same bytes; in ZeRO-1 it refreshes the other
ranks' rows in the next forward, not after the step, and in ZeRO-3 it is told not to save bytes
(`reshard_after_forward=True`), which it would by keeping this small model's weights from forward to backward. The
picture shows who sends how much to whom in a step, and how that adds up. Always runs on CPUs (gloo), on any number of
ranks; rows that do not divide by it make the last rank's part smaller.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pictures import COLORS, INK, picture, title
from ranks import Ranks, options_parser, positive, ranks_of_torchrun, stage_name
from sent_bytes import counted_sends
from show import Bar, console_of, figures, progress_bar
from torch import Tensor, nn

import thunder_zero as tz  # before thunder
from thunder_zero.plan import layout

import thunder

LEARNING_RATE = 0.1
ROWS = 32  # of a batch, on each rank
FEATURES, WIDTH = 24, 48  # divide by 2, 3 and 4 ranks
T = TypeVar("T")

# What the bytes of a step are for.
FORWARD, BACKWARD, REDUCED, REFRESHED = PURPOSES = (
    "gathered in forward",
    "gathered again in backward",
    "reduced in backward",
    "refreshed after the step",
)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--steps", type=positive, default=20, help="training steps (20)")
    return parser.parse_args(argv)


# 1. The wire. A rank sends messages to its peers and receives theirs; nothing else happens in a collective.


@dataclass
class Wire:
    """The collectives of one rank, made of sends and receives.

    Attributes:
        rank, world_size: this rank's number, and how many there are.
        sent: bytes that left this rank, by what they were for and by receiver.
    """

    rank: int
    world_size: int
    sent: Counter[tuple[str, int]] = field(default_factory=Counter)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], purpose: str) -> None:
        """Send a message to each peer and receive one from each, all at the same time."""
        works = [dist.irecv(slot, src=peer) for peer, slot in incoming.items() if slot.numel()]
        works += [dist.isend(message, dst=peer) for peer, message in outgoing.items() if message.numel()]
        self.sent.update({(purpose, peer): message.nbytes for peer, message in outgoing.items()})
        for work in works:
            work.wait()

    @property
    def peers(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def parts(self, full: Tensor) -> list[Tensor]:
        """Return the rows of each rank, as views."""
        ranges = [layout.row_range(len(full), self.world_size, rank) for rank in range(self.world_size)]
        return [full[start:stop] for start, stop in ranges]

    def gather(self, rows: Tensor, count: int, purpose: str) -> Tensor:
        """Return all rows, on every rank. Sends this rank's rows to each peer: (W - 1) / W of the bytes."""
        full = rows.new_empty(count, *rows.shape[1:])
        parts = self.parts(full)
        parts[self.rank].copy_(rows)
        self.exchange(dict.fromkeys(self.peers, rows), {peer: parts[peer] for peer in self.peers}, purpose)
        return full

    def reduce_scatter(self, grad: Tensor) -> Tensor:
        """Return the mean over ranks of this rank's rows. Sends each peer its rows: (W - 1) / W of the bytes."""
        parts = self.parts(grad.contiguous())
        found = [torch.empty_like(parts[self.rank]) for _ in parts]
        found[self.rank] = parts[self.rank]
        self.exchange({peer: parts[peer] for peer in self.peers}, {peer: found[peer] for peer in self.peers}, REDUCED)
        total = found[0].clone()
        for part in found[1:]:  # in rank order, so that the bits do not depend on which message came first
            total += part
        return total / self.world_size

    def all_reduce(self, grad: Tensor) -> Tensor:
        """Return the mean over ranks, on every rank: a reduce-scatter and a gather, 2 (W - 1) / W of the bytes."""
        return self.gather(self.reduce_scatter(grad), len(grad), REDUCED)


# 2. A parameter. The optimizer steps the part that this rank owns; ZeRO-1 keeps all rows as well.


class Part:
    """What one rank holds of a parameter.

    Attributes:
        own: the rows that the optimizer steps: all rows (DDP), or this rank's.
        full: all rows (DDP, ZeRO-1), or None: gathered where they are needed.
    """

    def __init__(self, param: Tensor, wire: Wire, stage: int) -> None:
        self.wire, self.stage, self.count = wire, stage, len(param)
        value = param.detach().clone()
        self.own = (value if stage == 0 else wire.parts(value)[wire.rank].clone()).requires_grad_()
        self.full = value if stage < 2 else None

    def gathered(self, purpose: str) -> Tensor:
        """Return all rows."""
        return self.wire.gather(self.own.detach(), self.count, purpose) if self.full is None else self.full.detach()

    def reduced(self, grad: Tensor) -> Tensor:
        """Return the mean over ranks, of the rows that the optimizer steps."""
        return self.wire.all_reduce(grad) if self.stage == 0 else self.wire.reduce_scatter(grad)

    def step(self) -> None:
        """Plain SGD; ZeRO-1 then refreshes the rows of other ranks."""
        assert self.own.grad is not None
        with torch.no_grad():
            self.own -= LEARNING_RATE * self.own.grad
        self.own.grad = None
        if self.stage == 1:
            self.full = self.wire.gather(self.own.detach(), self.count, REFRESHED)


# 3. One layer. It gathers a parameter before it uses it, and reduces its gradient as soon as there is one.


class Layer(torch.autograd.Function):
    """``x @ weight.t() + bias``. Autograd sees what the optimizer steps, so that this gets the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Part, bias: Part, *stepped: Tensor) -> Tensor:
        full = weight.gathered(FORWARD)
        ctx.weight, ctx.bias = weight, bias
        ctx.save_for_backward(x, *([] if weight.stage == 3 else [full]))  # ZeRO-3 frees what it gathered
        return x @ full.t() + bias.gathered(FORWARD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *kept = ctx.saved_tensors
        into_x = None
        if ctx.needs_input_grad[0]:  # not of the first layer, whose weight is not gathered again
            into_x = grad @ (kept[0] if kept else ctx.weight.gathered(BACKWARD))
        return into_x, None, None, ctx.weight.reduced(grad.t() @ x), ctx.bias.reduced(grad.sum(dim=0))


# 4. Training, by hand and by ZeroTransform.


@dataclass(frozen=True, slots=True)
class Run:
    """The end of a run.

    Attributes:
        weights: all parameters in full.
        sent: bytes that this rank sent in the last step.
        parts: bytes by what they were for and by receiver, if that is known.
    """

    weights: list[Tensor]
    sent: int
    parts: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def sum_for(self, purpose: str) -> int:
        """Return the bytes to all ranks."""
        return sum(count for (of_part, _), count in self.parts.items() if of_part == purpose)

    def sums_to(self, world_size: int) -> list[int]:
        """Return the bytes to each rank."""
        return [sum(count for (_, peer), count in self.parts.items() if peer == rank) for rank in range(world_size)]


def perceptron(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)  # the same weights on every rank
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, FEATURES)
    )


def make_batch(step: int, options: argparse.Namespace, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return this rank's own rows and their targets."""
    generator = torch.Generator().manual_seed((options.seed * 1000 + step) * ranks.world_size + ranks.rank)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x, x.roll(1, dims=1)


def bar_of(name: str, options: argparse.Namespace, ranks: Ranks) -> AbstractContextManager[Bar]:
    return progress_bar(console_of(ranks), name, options.steps, ROWS * ranks.world_size, "rows")


def train_by_hand(options: argparse.Namespace, ranks: Ranks) -> Run:
    """Train with `Wire` and `Layer`."""
    wire = Wire(ranks.rank, ranks.world_size)
    parts = [Part(param, wire, options.stage) for param in perceptron(options.seed).parameters()]
    layers = list(zip(parts[::2], parts[1::2], strict=True))
    with bar_of("by hand", options, ranks) as bar:
        for step in range(options.steps):
            wire.sent.clear()
            x, y = make_batch(step, options, ranks)
            for number, (weight, bias) in enumerate(layers):
                x = Layer.apply(x.relu() if number else x, weight, bias, weight.own, bias.own)
            loss = (x - y).square().mean()
            loss.backward()
            for part in parts:
                part.step()
            bar.step(loss.item())
    sent = dict(wire.sent)
    return Run([part.gathered("the end") for part in parts], sum(sent.values()), sent)


def train_sharded(options: argparse.Namespace, ranks: Ranks) -> Run:
    """Train with ZeroTransform."""
    policy = tz.Policy(options.stage, reshard_after_forward=True)
    model = thunder.jit(perceptron(options.seed), transforms=[tz.ZeroTransform(policy)])
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    with bar_of("ZeroTransform", options, ranks) as bar:
        for step in range(options.steps):
            x, y = make_batch(step, options, ranks)
            with counted_sends() as sent:
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            bar.step(loss.item())
    return Run([value.detach() for value in tz.full_state_dict(model).values()], sent.total())


# 5. The figures.


def formula(stage: int, ranks: Ranks) -> tuple[float, str]:
    """Return the bytes that a rank sends in a step, if the number of ranks divides all rows."""
    share = (ranks.world_size - 1) / ranks.world_size
    sizes = [param.nbytes for param in perceptron(0).parameters()]
    if stage < 3:
        return 2 * share * sum(sizes), "2 (W - 1) / W of the model"
    again = sizes[2::2]  # weights, except the first layer's
    return share * (2 * sum(sizes) + sum(again)), "the same, and (W - 1) / W of the weights of layers 2 and 3"


def of_all_ranks(value: T) -> list[T]:
    """Return every rank's value."""
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def digest(weights: list[Tensor]) -> str:
    """Return the first digits of the SHA-256 of the weights."""
    joined = b"".join(value.contiguous().numpy().tobytes() for value in weights)
    return hashlib.sha256(joined).hexdigest()[:16]


def draw(path: Path, heading: str, table: list[list[int]], bars: dict[str, float]) -> None:
    """Draw the bytes of a step: from whom to whom, and this rank's sum, counted and by the formula."""
    with picture(path, panels=2, size=(11, 4)) as (left, right):
        left.imshow(table, cmap="Blues", vmin=0, vmax=3 * max(map(max, table)) or 1)
        for sender, row in enumerate(table):
            for receiver, count in enumerate(row):
                left.text(receiver, sender, f"{count:,}" if count else "-", ha="center", va="center", color=INK)
        left.set_xticks(range(len(table)), [f"to rank {rank}" for rank in range(len(table))])
        left.set_yticks(range(len(table)), [f"rank {rank}" for rank in range(len(table))])
        left.spines[:].set_visible(False)
        left.tick_params(length=0)
        title(left, f"{heading}: bytes sent in a step")
        drawn = right.barh(list(bars), list(bars.values()), color=COLORS, height=0.6)
        right.bar_label(drawn, fmt="{:,.0f}", padding=4, color=INK)
        right.invert_yaxis()
        right.margins(x=0.2)
        right.set_xticks([])
        right.spines["bottom"].set_visible(False)
        title(right, "Sent by rank 0")


def report(options: argparse.Namespace, ranks: Ranks, runs: tuple[Run, Run], sharded: Run) -> None:
    """Print the figures and draw the bytes; every rank calls it, since ranks compare their weights."""
    first = runs[0]
    digests = [of_all_ranks(digest(run.weights)) for run in runs]
    sent = of_all_ranks(first.sums_to(ranks.world_size))
    apart = max((mine - other).abs().max().item() for mine, other in zip(first.weights, sharded.weights, strict=True))
    expected, words = formula(options.stage, ranks)
    equal = {True: "equal", False: "DIFFERENT"}
    whose = "each rank's own" if options.stage < 2 else "gathered from their owners"
    rows = [
        ("bytes sent in a step, by hand", f"{first.sent:,}", "counted where they leave"),
        *((f"  {purpose}", f"{first.sum_for(purpose):,}", "") for purpose in PURPOSES),
        ("by ZeroTransform", f"{sharded.sent:,}", "counted where they leave"),
        ("by the formula", f"{expected:,.0f}", words),
        (f"weights of {ranks.words}", equal[len(set(digests[0])) == 1], f"{whose}, bit for bit: {digests[0][0]}"),
        ("weights of two runs", equal[digests[0] == digests[1]], "bit for bit"),
        ("from ZeroTransform's weights", f"{apart:.1e}", "the largest difference"),
    ]
    heading = f"{stage_name(options.stage)} on {ranks.words}"
    figures(console_of(ranks), f"{heading}, rank 0", rows)
    if ranks.rank == 0:
        path = options.out / f"wire_protocol_stage{options.stage}.png"
        draw(path, heading, sent, {"by hand": first.sent, "ZeroTransform": sharded.sent, "formula": expected})
        console_of(ranks).print(f"The picture is {path}.")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    with ranks_of_torchrun(on_cpus=True) as ranks:
        runs = train_by_hand(options, ranks), train_by_hand(options, ranks)
        report(options, ranks, runs, train_sharded(options, ranks))


if __name__ == "__main__":
    main()
