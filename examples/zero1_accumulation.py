"""Optimizer sharding as it was first built on meshes: ZeRO-1, large batches out of micro-batches, one reduction a step.

    torchrun --standalone --nproc-per-node 2 examples/zero1_accumulation.py                     # preset tiny
    torchrun --standalone --nproc-per-node 2 examples/zero1_accumulation.py --micro-batches 8 --activation-checkpointing
    python examples/zero1_accumulation.py --preset 1.3b --dry-run --ranks 64                    # plans, without a rank

A GPT with ALiBi in bfloat16, AdamW, a cosine schedule with warm-up, weight decay 0.1 and dropout 0.1, which every rank
draws from a stream of its own. Texts (Python's standard library) are packed with an end-of-text token between them.
All micro-batches but the last run under `no_sync`, which keeps full gradients on every rank meanwhile: they are reduced
once, and ZeRO-1's parameters refreshed once, for each optimizer step, however many micro-batches it has. The bytes are
counted where they leave the rank. ZeRO-2 and ZeRO-3 gather parameters in every micro-batch. `--dry-run` prints what
each stage holds at rest and sends, for any preset and number of ranks, from plans alone.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import cos, log, pi

import torch
import torch.distributed as dist
from alibi_gpt import AlibiConfig, AlibiGPT
from pictures import curves, picture, title
from planned import at_rest, sent_in_step
from ranks import Ranks, options_parser, positive, ranks_of_torchrun, stage_name
from sent_bytes import counted_sends
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
        batch: sequences in an optimizer step, over all ranks and micro-batches; rounded up to a multiple of these.
        rates: learning rate after the warm-up, and at the end.
        warm_up: number of steps.
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


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options_parser(__doc__, stage=1)
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="model and recipe (tiny)")
    parser.add_argument("--steps", type=positive, default=60, help="optimizer steps (60)")
    parser.add_argument("--micro-batches", type=positive, default=4, help="in an optimizer step (4)")
    words = "compute each block's activations again in backward instead of keeping them"
    parser.add_argument("--activation-checkpointing", action="store_true", help=words)
    parser.add_argument("--dry-run", action="store_true", help="print bytes of every stage, from plans alone")
    parser.add_argument("--ranks", type=positive, help="of --dry-run (8)")
    options = parser.parse_args(argv)
    if options.ranks and not options.dry_run:
        parser.error("--ranks is for --dry-run; torchrun's --nproc-per-node says how many ranks train")
    options.ranks = options.ranks or 8
    return options


# 1. A dry run: what each stage holds and sends, from its plan.


def dry_run(preset: Preset, world_size: int, micro_batches: int) -> dict[int, dict[str, int]]:
    """Return the bytes that rank 0 holds and sends, for each stage. Modules on the meta device allocate nothing."""
    with torch.device("meta"):
        module = AlibiGPT(preset.model)
    stages = {}
    for stage in range(4):
        plan = tz.schedule.make_plan(
            module, tz.Policy(stage, mixed_precision=PRECISION), tz.schedule.Mesh.of(world_size)
        )
        held = at_rest(plan, values=2)  # AdamW's two means
        stages[stage] = held | {"at rest": sum(held.values()), "sent in a step": sum(sent_in_step(plan, micro_batches))}
    return stages


def print_dry_run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Print a line for each stage."""
    preset, micro_batches = PRESETS[options.preset], options.micro_batches
    stages = dry_run(preset, options.ranks, micro_batches)
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in AlibiGPT(preset.model).parameters())
    heading = f"{options.preset}, {numel:,} parameters, {micro_batches} micro-batches: GB on rank 0 of {options.ranks}"
    rows = [(stage_name(stage), *(f"{value / 1e9:.4g}" for value in found.values())) for stage, found in stages.items()]
    figures(console_of(ranks), heading, rows, ("stage", *stages[0]))


# 2. Training.


def learning_rate_at(step: int, preset: Preset, steps: int) -> float:
    """Return the factor of the highest rate: a linear warm-up, then a cosine down to the last rate."""
    highest, last = preset.rates
    if step < preset.warm_up:
        return (step + 1) / preset.warm_up
    done = (step - preset.warm_up) / max(steps - preset.warm_up, 1)
    return (last + (highest - last) * 0.5 * (1 + cos(pi * min(done, 1)))) / highest


def decayed(model: nn.Module) -> list[dict[str, object]]:
    """Return two groups for AdamW: matrices get weight decay; biases and norms do not."""
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
        self.optimizer = torch.optim.AdamW(decayed(self.model), lr=self.preset.rates[0], betas=(0.9, 0.95), fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_at(step, self.preset, options.steps)
        )
        torch.manual_seed(options.seed + 1 + ranks.rank)  # from here on: another dropout mask on each rank

    @property
    def rows(self) -> int:
        """Sequences in an optimizer step, over all ranks: as many in each micro-batch of each rank."""
        return self.ranks.rounded_up(self.preset.batch, self.options.micro_batches)

    def micro_batches(self, step: int) -> tuple[Sequence[Tensor], Tensor]:
        """This rank's windows of one step, (rows, context + 1) each; the bytes of text that a rank predicts on average.

        The end-of-text tokens must be predicted, too, and are no bytes.
        """
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.preset.context, (self.rows,), generator=generator)
        windows = self.text[starts[:, None] + torch.arange(self.preset.context + 1)].long()
        nbytes = (windows[:, 1:] != END_OF_TEXT).sum() / self.ranks.world_size
        return self.ranks.rows_of(windows).chunk(self.options.micro_batches), nbytes.to(self.ranks.device)

    def step(self, number: int) -> tuple[Tensor, list[Counter[torch.dtype]]]:
        """One optimizer step: this rank's loss in bits per byte, and the bytes that it sent in each micro-batch."""
        total, sent = torch.zeros((), device=self.ranks.device), []
        micro_batches, nbytes = self.micro_batches(number)
        for count, windows in enumerate(micro_batches, 1):
            deferred = self.model.no_sync() if count < len(micro_batches) else nullcontext()
            with deferred, counted_sends() as of_one:
                logits, targets = self.model(windows[:, :-1]), windows[:, 1:]
                nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                loss = nats / log(2) / nbytes
                loss.backward()
            total += loss.detach()
            sent.append(of_one)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return total, sent


# 3. The figures.


def different_masks(ranks: Ranks) -> int:
    """Return how many dropout masks the ranks would draw now. A collective; it draws nothing from the ranks'
    streams."""
    with torch.random.fork_rng():
        mask = F.dropout(torch.ones(256, device=ranks.device), 0.1).tolist()
    masks: list[list[float]] = [[]] * ranks.world_size
    dist.all_gather_object(masks, mask)
    return len(set(map(tuple, masks)))


def sent_in(dtype: torch.dtype, sent: Sequence[Counter[torch.dtype]], ranks: Ranks) -> tuple[str, str]:
    """Return the bytes sent in messages of this dtype, and in which micro-batches."""
    if ranks.device.type == "cuda":
        return "not counted", "NCCL's sends are not seen"
    used = [number for number, of_one in enumerate(sent, 1) if of_one[dtype]]
    where = f"in all {len(used)} micro-batches" if len(used) > 1 else f"in micro-batch {used[0]} alone" if used else ""
    return f"{sum(of_one[dtype] for of_one in sent):,}", where or "in none"


def report(
    trainer: Trainer, history: Sequence[tuple[float, float]], sent: Sequence[Counter[torch.dtype]], masks: int, bar: Bar
) -> None:
    """Print the figures of the run, and draw its loss and its learning rate."""
    options, ranks = trainer.options, trainer.ranks
    plan = tz.traces_of(trainer.model, synced=True).plan
    parameters, gradients = sent_in_step(plan, options.micro_batches)
    losses, rates = zip(*history, strict=True)
    rows = [
        ("bits per byte, first and last step", f"{losses[0]:.5f}, {losses[-1]:.5f}", "mean over ranks"),
        ("micro-batches in an optimizer step", str(options.micro_batches), f"{trainer.rows} sequences"),
        ("bytes sent in it: parameters", *sent_in(torch.bfloat16, sent, ranks)),
        ("parameters, by the plan", f"{parameters:,}", "at most" if options.stage == 3 else ""),
        ("bytes sent in it: gradients", *sent_in(torch.float32, sent, ranks)),
        ("gradients, by the plan", f"{gradients:,}", ""),
        ("different dropout masks", str(masks), f"on {ranks.words}"),
        ("tokens/s", f"{bar.speed:,.0f}", "all ranks"),
    ]
    heading = f"GPT with ALiBi, {options.preset}, {stage_name(options.stage)} on {ranks.words}"
    figures(console_of(ranks), heading, rows)
    path = options.out / f"zero1_accumulation_stage{options.stage}.png"
    with picture(path, panels=2, size=(11, 4)) as (left, right):
        curves(left, {"loss": (range(len(losses)), losses)}, x="optimizer step", y="bits per byte")
        curves(right, {"rate": (range(len(rates)), rates)}, x="optimizer step", y="learning rate")
        title(left, heading)
        title(right, "Warm-up, then a cosine")
    console_of(ranks).print(f"The picture is {path}.")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    with ranks_of_torchrun() as ranks:
        if options.dry_run:
            print_dry_run(options, ranks)
            return
        trainer, history = Trainer(options, ranks), []
        masks = different_masks(ranks)
        tokens = trainer.rows * trainer.preset.context
        with progress_bar(console_of(ranks), "training", options.steps, tokens, "tokens") as bar:
            for number in range(options.steps):
                rate = trainer.schedule.get_last_lr()[0]
                loss, sent = trainer.step(number)
                history.append((ranks.mean(loss).item(), rate))
                bar.step(history[-1][0])
                bar.note(f"rate {rate:.2g}")
        if ranks.rank == 0:
            report(trainer, history, sent, masks, bar)


if __name__ == "__main__":
    main()
