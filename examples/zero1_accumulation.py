"""Optimizer sharding as it was first built on meshes: ZeRO-1, large batches out of micro-batches, one reduction a step.

    torchrun --standalone --nproc-per-node 2 examples/zero1_accumulation.py                     # preset tiny
    torchrun --standalone --nproc-per-node 2 examples/zero1_accumulation.py --micro-batches 8 --activation-checkpointing
    python examples/zero1_accumulation.py --preset 1.3b --dry-run --ranks 64                    # plans, without a rank

A GPT with ALiBi in bfloat16, AdamW, a cosine schedule with warm-up, weight decay 0.1 and dropout 0.1, which every rank
draws from a stream of its own. Texts (Python's standard library) are packed with an end-of-text token between them.
All micro-batches but the last run under `no_sync`: gradients are reduced once, and parameters refreshed once, for each
optimizer step, however many micro-batches it has; the bytes that leave a rank show it. `--dry-run` prints what each
stage holds at rest and sends, for any preset and number of ranks, from plans alone.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import cos, log, pi, prod

import torch
from alibi_gpt import AlibiConfig, AlibiGPT
from pictures import save_curve
from ranks import Ranks, options_parser, ranks_of_torchrun, stage_name
from show import Bar, console_of, figures, progress_bar
from stdlib_text import packed_text
from torch import Tensor, nn
from torch.nn import functional as F

import thunder_zero as tz  # before thunder

import thunder

END_OF_TEXT = 256  # after the 256 bytes


@dataclass(frozen=True, slots=True)
class Preset:
    """A model and its recipe.

    Attributes:
        model: its sizes.
        context: tokens in a sequence.
        batch: sequences in an optimizer step, over all ranks and micro-batches.
        rates: learning rate after the warm-up, and at the end.
        warm_up: steps.
    """

    model: AlibiConfig
    context: int
    batch: int
    rates: tuple[float, float]
    warm_up: int


PRESETS = {
    "tiny": Preset(AlibiConfig(2, 64, 256, 4, vocabulary=257), 128, 32, (4e-3, 4e-4), 10),
    "1.3b": Preset(AlibiConfig(24, 2048, 8192, 16, vocabulary=50304), 1024, 512, (2e-4, 2e-5), 2000),
}
PRECISION = tz.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def parse_options() -> argparse.Namespace:
    parser = options_parser(__doc__, stage=1)
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="model and recipe (tiny)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (60)")
    parser.add_argument("--micro-batches", type=int, default=4, help="in an optimizer step (4)")
    words = "compute each block's activations again in backward instead of keeping them"
    parser.add_argument("--activation-checkpointing", action="store_true", help=words)
    parser.add_argument("--dry-run", action="store_true", help="print bytes of every stage, from plans alone")
    parser.add_argument("--ranks", type=int, default=8, help="of --dry-run (8)")
    return parser.parse_args()


# 1. A dry run: what each stage holds and sends, from its plan.


def at_rest(param: tz.Param, plan: tz.Plan) -> dict[str, int]:
    """Bytes that a rank holds of one parameter between two steps; AdamW keeps two float32 values of each element."""
    stored = param.dtype.itemsize * prod(plan.shard_shape(param))
    # ZeRO-1 keeps all rows in the dtype of compute; its own rows are a view of them, if the dtypes agree.
    full = param.compute_dtype.itemsize * prod(param.shape) if param.resident else 0
    shared = param.resident and param.compute_dtype == param.dtype
    return {"parameters": full + (0 if shared else stored), "gradients": stored, "AdamW": 2 * stored}


def bytes_sent(param: tz.Param, plan: tz.Plan) -> float:
    """Bytes that a rank sends of one parameter in a step: its gathers and the reduction of its gradient."""
    share, numel = (plan.world_size - 1) / plan.world_size, prod(param.shape)
    gathers = 0 if not param.sharded else 1 if param.gathered_once else 2
    reduction = (1 if param.sharded else 2) * param.reduce_dtype.itemsize
    return share * numel * (gathers * param.compute_dtype.itemsize + reduction)


def dry_run(preset: Preset, world_size: int) -> list[tuple[str, ...]]:
    """A line for each stage, of rank 0 of so many."""
    with torch.device("meta"):
        module = AlibiGPT(preset.model)
    rows = []
    for stage in range(4):
        plan = tz.make_plan(module, tz.Policy(stage, mixed_precision=PRECISION), world_size, rank=0)
        held = [at_rest(param, plan) for param in plan.params]
        sums = {name: sum(of_one[name] for of_one in held) for name in held[0]}
        sent = sum(bytes_sent(param, plan) for param in plan.params)
        rows.append(
            (stage_name(stage), *(f"{value / 1e9:.2f}" for value in (*sums.values(), sum(sums.values()), sent)))
        )
    return rows


# 2. Training.


def learning_rate_at(step: int, preset: Preset, steps: int) -> float:
    """The factor of the highest rate: a linear warm-up, then a cosine down to the last rate."""
    highest, last = preset.rates
    if step < preset.warm_up:
        return (step + 1) / preset.warm_up
    done = (step - preset.warm_up) / max(steps - preset.warm_up, 1)
    return (last + (highest - last) * 0.5 * (1 + cos(pi * min(done, 1)))) / highest


def decayed(model: nn.Module) -> list[dict[str, object]]:
    """Two groups for AdamW: matrices get weight decay; biases and norms do not."""
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


class Trainer:
    """A sharded GPT, its optimizer and schedule, and the packed text."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self.options, self.ranks, self.preset = options, ranks, PRESETS[options.preset]
        self.text = packed_text(END_OF_TEXT)
        torch.manual_seed(options.seed)  # the same weights on every rank
        config = dataclasses.replace(self.preset.model, checkpointed=options.activation_checkpointing)
        policy = tz.Policy(options.stage, mixed_precision=PRECISION)
        self.model = thunder.jit(AlibiGPT(config).to(ranks.device), transforms=[tz.ZeroTransform(policy)])
        self.optimizer = torch.optim.AdamW(decayed(self.model), lr=self.preset.rates[0], betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_at(step, self.preset, options.steps)
        )
        torch.manual_seed(options.seed + 1 + ranks.rank)  # from here on: another dropout mask on each rank

    @property
    def tokens(self) -> int:
        """In an optimizer step, over all ranks."""
        return self.preset.batch * self.preset.context

    def micro_batches(self, step: int) -> Iterator[Tensor]:
        """This rank's windows of one step, (rows, context + 1) each."""
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.preset.context, (self.preset.batch,), generator=generator)
        rows = self.ranks.rows_of(starts).cpu()
        windows = self.text[rows[:, None] + torch.arange(self.preset.context + 1)].long()
        return iter(windows.to(self.ranks.device).chunk(self.options.micro_batches))

    def step(self, number: int) -> Tensor:
        """One optimizer step; returns this rank's loss in bits per byte."""
        total = torch.zeros((), device=self.ranks.device)
        micro_batches = list(self.micro_batches(number))
        for count, windows in enumerate(micro_batches, 1):
            with ExitStack() as stack:
                if count < len(micro_batches):
                    stack.enter_context(self.model.no_sync())
                loss = self.loss_of(windows) / len(micro_batches)
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return total

    def loss_of(self, windows: Tensor) -> Tensor:
        """Bits for each byte of text: the end-of-text tokens must be predicted, too, and are no bytes."""
        logits, targets = self.model(windows[:, :-1]), windows[:, 1:]
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return nats / log(2) / (targets != END_OF_TEXT).sum()


def sent_in_step(model: nn.Module, kind: tz.Kind) -> int:
    """Bytes that this rank sends in collectives of a kind in an optimizer step, however many micro-batches it has."""
    timeline = tz.traces_of(model, synced=True).timeline
    return sum(timeline.bytes_sent(op) for op in timeline.ops if op.kind is kind)


def report(trainer: Trainer, losses: list[float], bar: Bar) -> None:
    """Print the figures of the run, and draw its curve."""
    options, ranks = trainer.options, trainer.ranks
    refresh, reduction = (sent_in_step(trainer.model, kind) for kind in (tz.Kind.GATHER, tz.Kind.REDUCE))
    rows = [
        ("bits per byte, first and last step", f"{losses[0]:.3f}, {losses[-1]:.3f}", "mean over ranks"),
        ("micro-batches in an optimizer step", str(options.micro_batches), ""),
        ("bytes sent in it: refresh", f"{refresh:,}", "once, in the first micro-batch"),
        ("reduction", f"{reduction:,}", "once, in the last micro-batch"),
        ("tokens/s", f"{bar.speed:,.0f}", "all ranks"),
    ]
    heading = f"GPT with ALiBi, {options.preset}, {stage_name(options.stage)} on {ranks.words}"
    figures(console_of(ranks), heading, rows)
    path = options.out / f"zero1_accumulation_stage{options.stage}.png"
    save_curve(path, heading, "loss", losses, x="optimizer step", y="bits per byte")
    console_of(ranks).print(f"The picture is {path}.")


def main() -> None:
    options = parse_options()
    with ranks_of_torchrun() as ranks:
        if options.dry_run:
            heading = f"Preset {options.preset}, rank 0 of {options.ranks}: GB at rest, and sent in a step"
            header = ("stage", "parameters", "gradients", "AdamW", "at rest", "sent")
            figures(console_of(ranks), heading, dry_run(PRESETS[options.preset], options.ranks), header)
            return
        trainer, losses = Trainer(options, ranks), []
        with progress_bar(console_of(ranks), "training", options.steps, trainer.tokens, "tokens") as bar:
            for number in range(options.steps):
                losses.append(ranks.mean(trainer.step(number)).item())
                bar.step(losses[-1])
        if ranks.rank == 0:
            report(trainer, losses, bar)


if __name__ == "__main__":
    main()
