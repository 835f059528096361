"""Data parallelism shown bare: each rank computes on its rows of the batch, and gradients are averaged.

    torchrun --standalone --nproc-per-node 2 examples/data_parallel_mlp.py             # DDP
    torchrun --standalone --nproc-per-node 4 examples/data_parallel_mlp.py --stage 3   # parameters sharded as well
    python examples/data_parallel_mlp.py                                               # one process

A perceptron (128-2048-2048-128, ReLU) takes 30 steps of plain SGD on one batch of 8,192 rows, cut over the ranks. Rank
0 trains an equal model alone on the whole batch. The losses agree: the mean over ranks of the means over their rows is
the mean over all rows, for the loss and for its gradients. The pictures show which rank holds which rows, of the batch
and of each parameter, on 1, 2, 4 and 8 ranks; a plan needs no processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from holdings import Rows, draw_rows, print_rows, rows_of_batch, rows_of_plan
from pictures import picture
from ranks import Ranks, options_parser, positive, ranks_of_torchrun, rounded_up, stage_name
from show import Bar, console_of, figures, progress_bar
from torch import Tensor, nn

import thunder_zero as tz  # before thunder

import thunder

FEATURES = 128  # of inputs and outputs
LEARNING_RATE = 1e-5
PRINT_EVERY = 5  # steps
LAYOUTS = (1, 2, 4, 8)  # ranks
Losses = Callable[[Tensor], Tensor]  # from this rank's loss to that of all rows


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options_parser(__doc__, stage=0)
    parser.add_argument("--steps", type=positive, default=30, help="training steps (30)")
    parser.add_argument("--rows", type=positive, default=8192, help="of the batch, rounded up for the ranks (8192)")
    parser.add_argument("--width", type=positive, default=2048, help="features of the hidden layers (2048)")
    return parser.parse_args(argv)


def perceptron(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, FEATURES)
    )


def make_batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (rows, 128) each, from a standard normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, FEATURES, generator=generator), torch.randn(rows, FEATURES, generator=generator)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the squared distance: the sum over features, the mean over rows."""
    return (model(x) - y).square().sum(dim=1).mean()


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, losses_of: Losses, bar: Bar) -> list[float]:
    """Take SGD steps on one batch; return the loss before each step."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(losses_of(loss.detach()).item())
        bar.step(losses[-1])
    return losses


def layouts_of(module: nn.Module, stage: int, rows: int) -> dict[int, list[Rows]]:
    """Return which rank holds what, by number of ranks."""
    plans = {count: tz.schedule.make_plan(module, tz.Policy(stage), tz.schedule.Mesh.of(count)) for count in LAYOUTS}
    even = rounded_up(rows, max(LAYOUTS))
    return {count: [rows_of_batch(even, count), *rows_of_plan(plan)] for count, plan in plans.items()}


def train_together(module: nn.Module, x: Tensor, y: Tensor, options: argparse.Namespace, ranks: Ranks) -> list[float]:
    """Train on all ranks, each with its rows of the batch; return the losses."""
    model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=options.stage)])
    with progress_bar(console_of(ranks), f"on {ranks.words}", options.steps, options.rows, "rows") as bar:
        return train(model, ranks.rows_of(x), ranks.rows_of(y), options.steps, ranks.mean, bar)


def train_alone(module: nn.Module, x: Tensor, y: Tensor, options: argparse.Namespace, ranks: Ranks) -> list[float]:
    """Train the model in this process alone, without Thunder; return the losses."""
    with progress_bar(console_of(ranks), "alone", options.steps, options.rows, "rows") as bar:
        return train(module, x.to(ranks.device), y.to(ranks.device), options.steps, Tensor.double, bar)


def report(options: argparse.Namespace, ranks: Ranks, together: list[float], alone: list[float]) -> None:
    """Print the two curves side by side, and how far they are apart."""
    apart = [abs(mine - other) / other for mine, other in zip(together, alone, strict=True)]
    shown = sorted({*range(0, options.steps, PRINT_EVERY), options.steps - 1})
    rows = [(f"{step}", f"{together[step]:.6f}", f"{alone[step]:.6f}", f"{apart[step]:.1e}") for step in shown]
    title = f"Loss before each step: {stage_name(options.stage)} on {ranks.words}, and one process"
    figures(console_of(ranks), title, rows, header=("step", f"on {ranks.words}", "alone", "relative difference"))


def show_layouts(options: argparse.Namespace, ranks: Ranks, layouts: dict[int, list[Rows]]) -> None:
    """Draw who holds what, in the terminal and as a PNG."""
    console = console_of(ranks)
    path = options.out / f"data_parallel_mlp_stage{options.stage}.png"
    with picture(path, panels=len(layouts), size=(4 * len(layouts), 3.2)) as panels:
        for axes, (count, rows) in zip(panels, layouts.items(), strict=True):
            heading = f"{stage_name(options.stage)} on {count} {'rank' if count == 1 else 'ranks'}"
            print_rows(console, heading, rows)
            draw_rows(axes, heading, rows)
    console.print(f"The layouts are drawn in {path}.")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    with ranks_of_torchrun() as ranks:
        torch.manual_seed(options.seed)  # the same weights on every rank
        module = perceptron(options.width).to(ranks.device)
        plain = deepcopy(module)  # the transform shards the module
        layouts = layouts_of(plain, options.stage, options.rows)
        x, y = make_batch(ranks.rounded_up(options.rows), options.seed)
        together = train_together(module, x, y, options, ranks)
        if ranks.rank == 0:
            report(options, ranks, together, train_alone(plain, x, y, options, ranks))
            show_layouts(options, ranks, layouts)


if __name__ == "__main__":
    main()
