"""Sharding of states shown bare: a perceptron forecasts noisy sums of sines, and every rank keeps a part of it.

    torchrun --standalone --nproc-per-node 2 examples/sequence_mlp.py                        # ZeRO-3, AdamW
    torchrun --standalone --nproc-per-node 4 examples/sequence_mlp.py --stage 1 --optimizer momentum
    python examples/sequence_mlp.py                                                          # one process

A window of 128 points enters, and the same window leaves: shifted by 5 points, times 0.8, plus 0.1 of its square, plus
noise. The optimizer is a plain torch optimizer, built on this rank's rows, so its momentum is sharded as the weights
are. Rules on paths choose which parameters are sharded: weights are, biases are replicated. The pictures show the loss,
one forecast over its target, and who holds which rows of weights and momentum, replicated (DDP) and in this run. ZeRO-1
shards the momentum alone: every rank keeps all weights, steps its own rows of them, and sends these to the others.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from holdings import Rows, draw_rows, print_rows, rows_of_plan
from pictures import curves, picture, title
from ranks import Ranks, options_parser, positive, ranks_of_torchrun, stage_name
from show import console_of, figures, mb, progress_bar
from tensor_memory import bytes_held, parameters_of
from torch import Tensor, nn

import thunder_zero as tz  # before thunder
from thunder_zero.schedule import Mesh, Plan, make_plan

import thunder

POINTS = 128  # of a window
SINES, CYCLES, AMPLITUDE, NOISE = 3, (1.0, 3.5), 0.9, 0.11  # a sum of sines; cycles in a window, from and to
SHIFT, GAIN, BEND = 5, 0.8, 0.1  # of the target
STEP_TO_COMPARE = 20  # by then all stages must have the same loss
MOMENTUM = {"adamw": "exp_avg", "momentum": "momentum_buffer"}  # optimizer -> its state's name in torch


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options_parser(__doc__)
    words = "adamw (learning rate 0.01), or SGD (0.01) with velocity 0.9 v + 0.1 g, from zero (adamw)"
    parser.add_argument("--optimizer", choices=MOMENTUM, default="adamw", help=words)
    parser.add_argument("--steps", type=positive, default=501, help="training steps (501)")
    parser.add_argument("--rows", type=positive, default=8192, help="in a batch, rounded up for the ranks (8192)")
    parser.add_argument("--width", type=positive, default=2048, help="features of the hidden layer (2048)")
    return parser.parse_args(argv)


def perceptron(width: int) -> nn.Sequential:
    """Return a perceptron 128-width-128 with ReLU; weights are LeCun-normal (variance 1 / inputs), biases zero."""
    module = nn.Sequential(nn.Linear(POINTS, width), nn.ReLU(), nn.Linear(width, POINTS))
    for layer in (module[0], module[2]):
        nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.in_features))
        nn.init.zeros_(layer.bias)
    return module


def make_batch(rows: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy windows and their targets, (rows, 128) each; they depend only on the seed and the step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)

    def uniform(low: float, high: float) -> Tensor:  # (rows, sines, 1)
        return torch.rand(rows, SINES, 1, generator=generator) * (high - low) + low

    phase = 2 * math.pi * (uniform(*CYCLES) * torch.arange(POINTS) / POINTS + uniform(0, 1))
    x = (uniform(0, AMPLITUDE) * phase.sin()).sum(dim=1)
    x = x + NOISE * torch.randn(rows, POINTS, generator=generator)
    shifted = x.roll(-SHIFT, dims=1)
    y = GAIN * shifted + BEND * shifted.square() + NOISE * torch.randn(rows, POINTS, generator=generator)
    return x, y


def optimizer_of(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, dampening=0.9)
    for parameter in parameters:  # from zero: without it, torch's first velocity is g, not 0.1 g
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace, ranks: Ranks) -> list[float]:
    """Train on this rank's rows of each batch; return the loss of each step, mean over ranks."""
    losses, rows = [], ranks.rounded_up(options.rows)
    with progress_bar(console_of(ranks), options.optimizer, options.steps, rows, "windows") as bar:
        for step in range(options.steps):
            x, y = map(ranks.rows_of, make_batch(rows, step, options.seed))
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(ranks.mean(loss.detach()).item())
            bar.step(losses[-1])
    return losses


@torch.no_grad()
def forecast(model: nn.Module, options: argparse.Namespace, ranks: Ranks) -> tuple[list[float], list[float]]:
    """Return the model's forecast of one window that it has not seen, and the target; every rank calls the model."""
    x, y = make_batch(1, options.steps, options.seed)
    return model(x.to(ranks.device))[0].tolist(), y[0].tolist()


def momentum_rows(plan: Plan) -> list[Rows]:
    """Return which rank holds which rows of the optimizer's momentum: the rows of the parameters that the optimizer
    steps."""
    return [Rows(f"momentum of {rows.name}", rows.count, rows.of_rank) for rows in rows_of_plan(plan, stepped=True)]


def report(options: argparse.Namespace, ranks: Ranks, losses: list[float], held: tuple[int, int]) -> None:
    """Print the figures of the run; ``held``: bytes of parameters and of momentum that this rank holds."""
    at = min(STEP_TO_COMPARE, options.steps - 1)
    rows = [
        ("mean squared error, first step", f"{losses[0]:.4f}", ""),
        (f"step {at}", f"{losses[at]:.7f}", "the same under every stage"),
        ("last step", f"{losses[-1]:.4f}", f"noise alone: {NOISE**2:.4f}"),
        ("parameters per rank", mb(held[0]), "at rest"),
        ("momentum per rank", mb(held[1]), "at rest; AdamW has as much again" * (options.optimizer == "adamw")),
    ]
    figures(console_of(ranks), f"{options.optimizer}, {stage_name(options.stage)} on {ranks.words}", rows)


def draw(options: argparse.Namespace, losses: list[float], shown: tuple[list[float], list[float]]) -> str:
    """Draw the loss, and one forecast over its target; return the picture's path."""
    path = options.out / f"sequence_mlp_{options.optimizer}_stage{options.stage}.png"
    with picture(path, panels=2, size=(12, 4)) as (left, right):
        curves(left, {"loss": (range(len(losses)), losses)}, x="step", y="mean squared error", log=True)
        title(left, f"{options.optimizer}, {stage_name(options.stage)}: {losses[-1]:.4f} at the end")
        points, (found, target) = range(POINTS), shown
        curves(right, {"forecast": (points, found), "target": (points, target)}, x="point of the window", y="value")
        title(right, "A window that the model has not seen")
    return str(path)


def draw_layouts(options: argparse.Namespace, ranks: Ranks, plan_of_run: Plan, replicated: Plan) -> str:
    """Draw who holds what, in the terminal and as a picture: replicated beside this run's stage."""
    path = options.out / f"sequence_mlp_layout_stage{options.stage}.png"
    with picture(path, panels=2, size=(12, 3.6)) as panels:
        for axes, plan in zip(panels, (replicated, plan_of_run), strict=True):
            heading = f"{stage_name(plan.policy.stage)} on {ranks.words}"
            rows = [*rows_of_plan(plan), *momentum_rows(plan)]
            print_rows(console_of(ranks), heading, rows)
            draw_rows(axes, heading, rows)
    return str(path)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    with ranks_of_torchrun() as ranks:
        torch.manual_seed(options.seed)  # the same weights on every rank
        module = perceptron(options.width).to(ranks.device)
        policies = [tz.Policy(stage, replicated=("*.bias",)) for stage in (options.stage, 0)]
        mesh = Mesh.of(ranks.world_size, ranks.rank)
        plan_of_run, replicated = (make_plan(module, policy, mesh) for policy in policies)
        model = thunder.jit(module, transforms=[tz.ZeroTransform(policies[0])])
        optimizer = optimizer_of(options.optimizer, list(model.parameters()))
        losses = train(model, optimizer, options, ranks)
        shown = forecast(model, options, ranks)
        if ranks.rank == 0:
            momentum = [state[MOMENTUM[options.optimizer]] for state in optimizer.state.values()]
            report(options, ranks, losses, (bytes_held(parameters_of(model)), bytes_held(momentum)))
            paths = draw(options, losses, shown), draw_layouts(options, ranks, plan_of_run, replicated)
            console_of(ranks).print(f"The pictures are {paths[0]} and {paths[1]}.")


if __name__ == "__main__":
    main()
