"""A ResNet-50 with the usual recipe: many small parameters, uneven rows, and buffers, under every stage.

    torchrun --standalone --nproc-per-node 2 examples/resnet.py                                    # ZeRO-3
    torchrun --standalone --nproc-per-node 2 examples/resnet.py --stage 0                          # DDP
    torchrun --standalone --nproc-per-node 3 examples/resnet.py --batch 15                         # uneven rows
    python examples/resnet.py --blocks 1 1 1 1 --width 8 --image 32 --epochs 2 --steps-in-epoch 3  # smaller

The standard shape (He et al., Deep residual learning for image recognition, arXiv 1512.03385): bottleneck blocks 3, 4,
6 and 3, width 64. The recipe: SGD with momentum 0.9 and weight decay 1e-4, learning rate 0.4 (for batches of 1,024; in
proportion for others) after a warm-up of 5 epochs, divided by 10 every 30. Each rank normalises with its own rows, as
in DDP, and keeps running statistics of its own. The images are synthetic: a class is a pattern under noise. At the end
it prints what this rank holds at rest and at the peak of a step beside the formula of the stage, and images per second.
The formula of the peak adds what the timeline foresees: gathered parameters, and gradients until they are reduced.
Activations are measured only; no plan knows them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from pictures import COLORS, FAINT, INK, curves, picture, title
from planned import foreseen_at_peak
from ranks import Ranks, options_parser, positive, ranks_of_torchrun, stage_name
from show import Bar, console_of, figures, mb, progress_bar
from tensor_memory import added_at_peak, bytes_held, parameters_of
from torch import Tensor, nn
from torch.nn import functional as F

import thunder_zero as tz  # before thunder

RECIPE_BATCH = 1024  # images; the learning rate is in proportion to the batch (Goyal et al., arXiv 1706.02677)
EXPANSION = 4  # outputs of a bottleneck block, over its width
WARM_UP, DECAY_EVERY = 5, 30  # epochs


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--blocks", type=positive, nargs="+", default=(3, 4, 6, 3), help="in each stage (3 4 6 3)")
    parser.add_argument("--width", type=positive, default=64, help="channels of the first stage (64)")
    parser.add_argument("--classes", type=positive, default=1000, help="(1000)")
    parser.add_argument("--image", type=positive, default=64, help="height and width of an image (64)")
    parser.add_argument("--batch", type=positive, default=16, help="images in a step; rounded up for the ranks (16)")
    parser.add_argument("--epochs", type=positive, default=2, help="of the 90 of the recipe (2)")
    parser.add_argument("--steps-in-epoch", type=positive, default=5, help="(5)")
    parser.add_argument("--lr", type=float, default=0.4, help="after the warm-up, for batches of 1,024 (0.4)")
    options = parser.parse_args(argv)
    if options.epochs * options.steps_in_epoch < 2:
        parser.error("--epochs 1 --steps-in-epoch 1 is one step; memory is measured in a later one: give more steps")
    return options


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norm, and a residual connection; the 3x3 one has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv_1, self.norm_1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv_2, self.norm_2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv_3, self.norm_3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        nn.init.zeros_(self.norm_3.weight)  # each block starts as the identity (Goyal et al.)

    def forward(self, x: Tensor) -> Tensor:  # (rows, inputs, height, width)
        y = F.relu(self.norm_1(self.conv_1(x)))
        y = F.relu(self.norm_2(self.conv_2(y)))
        return F.relu(self.norm_3(self.conv_3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of bottleneck blocks, the mean over the image, and a linear head."""

    def __init__(self, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList()
        inputs = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage and number == 0 else 1
                self.blocks.append(Bottleneck(inputs, width << stage, stride))
                inputs = EXPANSION * (width << stage)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:  # (rows, 3, height, width) -> (rows, classes)
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def learning_rate_at(epoch: float) -> float:
    """Return the factor of the highest rate: a linear warm-up, then a tenth after every 30 epochs."""
    return epoch / WARM_UP if epoch < WARM_UP else 0.1 ** (epoch // DECAY_EVERY)


def make_batch(step: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return images of all ranks, (batch, 3, image, image), and their classes: a pattern of the class under noise."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    labels = torch.randint(options.classes, (options.batch,), generator=generator)
    noise = torch.randn(options.batch, 3, options.image, options.image, generator=generator)
    across = torch.linspace(0, 6.28, options.image)
    waves = torch.sin(across * (1 + labels[:, None] % 7)) + torch.cos(across * (1 + labels[:, None] // 7 % 7))
    return noise + waves[:, None, None, :], labels


class Trainer:
    """A sharded ResNet, its optimizer and its schedule, which counts in steps."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        options.batch = ranks.rounded_up(options.batch)
        torch.manual_seed(options.seed)  # the same weights on every rank
        module = ResNet(options.blocks, options.width, options.classes).to(ranks.device)
        self.buffers = bytes_held(module.buffers())
        self.model = tz.compile(module, stage=options.stage)
        self.lr = options.lr * options.batch / RECIPE_BATCH
        self.optimizer = torch.optim.SGD(self.model.parameters(), self.lr, momentum=0.9, weight_decay=1e-4)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_at((step + 1) / options.steps_in_epoch)
        )

    def step(self, number: int) -> Tensor:
        """Take one step on this rank's rows; return their loss. The gradients stay until the next step, to be
        counted."""
        images, labels = map(self.ranks.rows_of, make_batch(number, self.options))
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def held(self) -> dict[str, int]:
        """Return the bytes that this rank holds between two steps."""
        state = [value["momentum_buffer"] for value in self.optimizer.state.values()]
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return {
            "parameters": bytes_held(parameters_of(self.model)),
            "gradients": bytes_held(gradients),
            "momentum": bytes_held(state),
        }


def by_formula(plan: tz.schedule.Plan, stage: int) -> dict[str, float]:
    """Return what a rank holds by the stage's formula: what is sharded takes 1 / W."""
    model = sum(param.full_bytes for param in plan.params)
    share = model / plan.mesh.shard.size
    return {
        "parameters": model if stage < 2 else share,
        "gradients": model if stage < 1 else share,
        "momentum": model if stage < 1 else share,
    }


def train(trainer: Trainer, bar: Bar) -> tuple[list[float], int]:
    """Train; return the loss of each step, mean over ranks, and the bytes that the last step adds at its peak."""
    losses: list[float] = []

    def step() -> None:
        losses.append(trainer.ranks.mean(trainer.step(len(losses))).item())

    for _ in range(trainer.options.epochs * trainer.options.steps_in_epoch - 1):
        step()
        bar.step(losses[-1])
    trainer.optimizer.zero_grad()
    added = added_at_peak(step, trainer.ranks.device)
    bar.step(losses[-1])
    return losses, added


def report(trainer: Trainer, losses: list[float], added: int, bar: Bar) -> None:
    """Print the figures and draw the loss."""
    options, ranks, traces = trainer.options, trainer.ranks, tz.traces_of(trainer.model)
    plan, held, expected = traces.plan, trainer.held(), by_formula(traces.plan, options.stage)
    uneven = [param for param in plan.params if param.sharded and param.shape[0] % plan.mesh.shard.size]
    resting, planned = trainer.buffers + held["parameters"] + held["momentum"], foreseen_at_peak(traces.timeline)
    by_peak_formula = trainer.buffers + expected["parameters"] + expected["momentum"] + planned
    rows = [
        ("loss, first and last step", f"{losses[0]:.3f}, {losses[-1]:.3f}", "mean over ranks"),
        ("learning rate after the warm-up", f"{trainer.lr:.5g}", f"{options.lr:g} for batches of {RECIPE_BATCH:,}"),
        *((name, mb(held[name]), f"by the formula {mb(expected[name])}") for name in held),
        ("buffers", mb(trainer.buffers), "batch norm's; each rank has its own"),
        ("parameters with uneven rows", str(len(uneven)), f"of {len(plan.params)}"),
        ("at the peak of a step", mb(resting + added), f"by the formula {mb(by_peak_formula)}, and activations"),
        ("  gathered, and gradients", mb(planned), "of that, by the timeline"),
        ("images/s", f"{bar.speed:,.1f}", f"all ranks, {options.image} x {options.image}"),
    ]
    parameters = sum(param.full_bytes for param in plan.params) / 4e6
    heading = f"ResNet, {parameters:.3f} M parameters, {stage_name(options.stage)} on {ranks.words}"
    figures(console_of(ranks), f"{heading}: per rank", rows)
    path = options.out / f"resnet_stage{options.stage}.png"
    pairs = {name: (held[name], expected[name]) for name in held}
    draw(path, heading, losses, pairs | {"peak": (resting + added, by_peak_formula)})
    console_of(ranks).print(f"The picture is {path}.")


def draw(path: Path, heading: str, losses: list[float], memory: dict[str, tuple[float, float]]) -> None:
    """Draw the loss, and what a rank holds, measured and by the formula, in bytes."""
    with picture(path, panels=2, size=(12, 4)) as (left, right):
        curves(left, {"loss": (range(len(losses)), losses)}, x="step", y="cross entropy, nats")
        title(left, heading)
        for at, (name, color) in enumerate((("measured", COLORS[0]), ("by the formula", FAINT))):
            places = [place + 0.38 * (at - 0.5) for place in range(len(memory))]
            values = [pair[at] / 1e6 for pair in memory.values()]
            drawn = right.barh(places, values, height=0.34, color=color, label=name)
            right.bar_label(drawn, fmt="{:.1f}", padding=4, color=INK, fontsize=9)
        right.set_yticks(range(len(memory)), list(memory))
        right.invert_yaxis()
        right.margins(x=0.12)
        right.set_xlabel("MB per rank; the formula leaves out activations", color=INK)
        right.legend(frameon=False, labelcolor="linecolor")
        title(right, "At rest, and at the peak of a step")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    with ranks_of_torchrun() as ranks:
        trainer = Trainer(options, ranks)
        steps = options.epochs * options.steps_in_epoch
        with progress_bar(console_of(ranks), "training", steps, options.batch, "images") as bar:
            losses, added = train(trainer, bar)
        if ranks.rank == 0:
            report(trainer, losses, added, bar)


if __name__ == "__main__":
    main()
