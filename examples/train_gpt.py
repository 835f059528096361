"""Train a byte-level GPT on Python's own standard library, with DDP, ZeRO-1, ZeRO-2 or ZeRO-3.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py                # ZeRO-3, on 2 or more ranks
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --stage 0      # DDP
    python examples/train_gpt.py --size tiny --steps 50                           # one rank
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 \\
        --max-restarts 3 examples/train_gpt.py --save-every 100                   # resumes if a rank dies

Uses NCCL if each rank on the machine has a GPU, else gloo on CPUs. Downloads nothing. Shows the loss while it trains,
then prints a table (losses, speed, bytes sent, memory), saves the loss curve, and prints one unit's life in the program
that ran: where it is gathered, used, freed and reduced; with --report it also draws a step in one HTML file. The
defaults take about two minutes on 2 CPU cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import cos, pi, prod

import torch
from gpt import GPT, GPTConfig
from ranks import Ranks, add_format_options, formats_of, options_parser, ranks_of_torchrun, stage_name
from rich.console import Console
from show import console_of, progress_bar
from stdlib_text import Shape, Text, load_text, train_batch, validation_batches
from step_report import write_step_report
from tensor_memory import added_at_peak, bytes_held, parameters_of
from torch import Tensor, nn
from torch.nn import functional as F
from train_report import Memory, Report, Traffic, print_report, save_curve
from unit_life import print_life

import thunder_zero as tz  # before thunder
from thunder_zero.schedule.lifetimes import gathered_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VALIDATIONS = 10  # per run, evenly spread, after the one at the start
VALIDATION_BATCHES = 8
PEAK_STEP = 2  # memory is measured in this step; by then the optimizer has its state


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the learning rate that suits it."""

    blocks: int
    width: int
    heads: int
    learning_rate: float


SIZES = {
    "tiny": Size(blocks=2, width=32, heads=2, learning_rate=1e-2),  # 0.04 M parameters: to see it run
    "small": Size(blocks=4, width=128, heads=4, learning_rate=4e-3),  # 0.9 M: two minutes on 2 cores
    "medium": Size(blocks=6, width=384, heads=6, learning_rate=1e-3),  # 11 M
    "large": Size(blocks=12, width=768, heads=12, learning_rate=6e-4),  # 86 M: for GPUs
}


@dataclass
class Run:
    """Measurements taken while training.

    Attributes:
        losses: this rank's loss in each step.
        validation: (steps done, mean loss over ranks).
        peak: the most bytes of tensors alive at one time in a step.
        tokens_per_second: of all ranks, in a median step of the last ones: what the bar shows at the end.
    """

    losses: list[Tensor] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    peak: int = 0
    tokens_per_second: float = 0.0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options_parser(__doc__)
    reshard = "ZeRO-3: free all blocks after forward, also the last, which else stay if that costs no memory"
    parser.add_argument("--reshard-after-forward", action="store_true", help=reshard)
    parser.add_argument("--size", choices=SIZES, default="small", help="size of the model (small)")
    parser.add_argument("--tied", action="store_true", help="the output head uses the embedding's weight")
    dtype = "dtype of compute, gathers and reductions; parameters and optimizer state stay float32 (float32)"
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=dtype)
    parser.add_argument("--steps", type=int, default=500, help="training steps (500)")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks (16)")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence (128)")
    parser.add_argument("--lr", type=float, help="highest learning rate (depends on --size)")
    every = "save a checkpoint every so many steps and at the end; resume from the latest in --out (never)"
    parser.add_argument("--save-every", type=int, default=0, help=every)
    add_format_options(parser)
    parser.add_argument("--report", action="store_true", help="draw a step in an HTML file in --out (no)")
    options = parser.parse_args(argv)
    for name, least in {"steps": PEAK_STEP + 2, "batch": 1, "context": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}; give at least {least}")
    return options


def learning_rate_at(step: int, steps: int) -> float:
    """Return the factor of the highest rate: warm-up over the first tenth, then a cosine down to a twentieth."""
    warm_up = max(steps // 10, 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.05 + 0.95 * 0.5 * (1 + cos(pi * (step - warm_up) / (steps - warm_up)))


def loss_of(model: nn.Module, windows: Tensor, device: torch.device) -> Tensor:
    """Return the mean cross entropy of the next byte, in nats; ``windows`` is (rows, context + 1)."""
    windows = windows.to(device)
    logits = model(windows[:, :-1])  # (rows, context, 256)
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, batches: list[Tensor], ranks: Ranks) -> float:
    """Return the mean loss over the batches of all ranks."""
    model.eval()
    losses = torch.stack([loss_of(model, windows, ranks.device) for windows in batches])
    model.train()
    return ranks.mean(losses.mean()).item()


class Trainer:
    """A sharded model, its optimizer, and one training step."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks, text: Text) -> None:
        self.options, self.ranks, self.text = options, ranks, text
        self.shape = Shape(ranks.rounded_up(options.batch), options.context, ranks.rank, ranks.world_size)
        size = SIZES[options.size]
        torch.manual_seed(options.seed)  # the same weights on every rank
        self.config = GPTConfig(size.blocks, size.width, size.heads, options.context, options.tied)
        module = GPT(self.config).to(ranks.device)
        precision = tz.MixedPrecision(DTYPES[options.dtype])
        policy = tz.Policy(
            options.stage,
            reshard_after_forward=options.reshard_after_forward or None,
            mixed_precision=precision,
            **formats_of(options),
        )
        self.model = tz.compile(module, policy)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=options.lr or size.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_at(step, options.steps)
        )
        self.checkpoints = options.out / f"train_gpt_stage{options.stage}"

    def step(self, number: int) -> Tensor:
        """Take one step on one global batch; return this rank's loss.

        Clears the gradients before the step, not after it, so that ``held`` can count them between steps.
        """
        windows = train_batch(self.text, number, self.shape, self.options.seed)
        self.optimizer.zero_grad()
        loss = loss_of(self.model, windows, self.ranks.device)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def resume(self) -> int:
        """Load the latest checkpoint, if one exists; return the number of steps already done."""
        if not self.options.save_every or not (self.checkpoints / "latest").exists():
            return 0
        extra = {"schedule": self.schedule}
        loaded = tz.load(self.checkpoints / "latest", self.model, self.optimizer, extra=extra)
        return int(loaded.own["step"])

    def save(self, done: int) -> None:
        """Save a checkpoint if one is due after ``done`` steps; the step's number determines its batch."""
        every, steps = self.options.save_every, self.options.steps
        if every and (done % every == 0 or done == steps):
            path = self.checkpoints / f"step-{done}"
            extra = {"step": done, "schedule": self.schedule}
            tz.save(path, self.model, self.optimizer, extra=extra, max_to_keep=2)

    def held(self) -> tuple[int, int, int]:
        """Return the bytes of parameters, gradients and optimizer state that this rank holds now."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return bytes_held(parameters_of(self.model)), bytes_held(gradients), bytes_held(state)


def train(trainer: Trainer, batches: list[Tensor], first: int, console: Console) -> tuple[Run, tz.tools.Traces]:
    """Train from step ``first``, validating before, between and after; return the record and a step's traces."""
    run, steps = Run(), trainer.options.steps
    validate_at = {first, *(steps * part // VALIDATIONS for part in range(VALIDATIONS + 1))}
    tokens = trainer.shape.rows * trainer.shape.context
    if first:
        console.print(f"Resuming after step {first} from {trainer.checkpoints / 'latest'}.")
    with progress_bar(console, "training", steps, tokens, "tokens", done=first) as bar:
        for number in range(first, steps + 1):
            if number in validate_at:
                run.validation.append((number, validate(trainer.model, batches, trainer.ranks)))
                bar.note(f"validation {run.validation[-1][1]:.3f}")
            if number == steps:
                break
            measure = number == min(first + PEAK_STEP, steps - 1)
            take_step(trainer, number, measure, run)
            trainer.save(number + 1)
            bar.step(run.losses[-1].item())
            if measure:
                traces = tz.traces_of(trainer.model)  # of the program that ran last, a training step
        run.tokens_per_second = bar.speed
    return run, traces


def take_step(trainer: Trainer, number: int, measure: bool, run: Run) -> None:
    """Take one training step and record it in ``run``; with ``measure``, record its memory peak, too."""

    def step() -> None:
        run.losses.append(trainer.step(number))

    if measure:
        trainer.optimizer.zero_grad()
        run.peak = sum(trainer.held()) + added_at_peak(step, trainer.ranks.device)
    else:
        step()
    run.losses[-1] = run.losses[-1].cpu()  # waits for a GPU


def traffic_of(traces: tz.tools.Traces, stage: int, ranks: Ranks) -> Traffic:
    """Return the bytes that the program of one training step sends, and those of the formula."""
    timeline, plan = traces.timeline, traces.plan
    sent = ranks.mean(torch.tensor(sum(timeline.traffic(op).sent for op in timeline.ops))).item()
    share = (ranks.world_size - 1) / ranks.world_size
    u = share * sum(param.full_bytes for param in plan.params)
    exact = "" if not any(param.gather_format or param.reduce_format for param in plan.params) else ", without formats"
    if stage < 3:
        return Traffic(sent, 2 * u, f"2u{exact}; u = {u:,.0f}")
    needed = [param for param in plan.params if needed_again(param.names)]
    not_read = u - share * sum(param.full_bytes for param in needed)
    once = share * sum(param.full_bytes for param in needed if param.kept_unsharded)
    words = f"3u - {not_read:,.0f} not read by backward - {once:,.0f} kept unsharded{exact}; u = {u:,.0f}"
    return Traffic(sent, 3 * u - not_read - once, words)


def needed_again(names: tuple[str, ...]) -> bool:
    """Return whether the GPT's backward reads a parameter, given all its names.

    The gradients of a lookup and of an added bias do not depend on the parameter. Those of the head's product do, so
    backward reads a tied embedding.
    """
    return any(not name.endswith("bias") and not name.startswith(("embedding", "positions")) for name in names)


def modules_kept_unsharded(plan: tz.schedule.Plan) -> str:
    """Return the modules whose parameters stay unsharded from forward to backward."""
    if len(plan.kept_unsharded) == len(plan.params):
        return "all of the model"
    owners = (plan.by_name[path].unit or path.rpartition(".")[0] for path in plan.kept_unsharded)
    return ", ".join(dict.fromkeys(owners)) or "nothing"


def draw_step(trainer: Trainer, traces: tz.tools.Traces) -> None:
    """Draw a step in an HTML file, on all ranks: see :func:`step_report.write_step_report`."""
    options, path = trainer.options, trainer.options.out / f"train_gpt_stage{trainer.options.stage}.html"
    windows = train_batch(trainer.text, 0, trainer.shape, options.seed).to(trainer.ranks.device)
    options.out.mkdir(parents=True, exist_ok=True)
    write_step_report(
        trainer.model,
        lambda: trainer.step(options.steps - 1),
        path,
        traces=traces,
        plain=GPT(trainer.config).to(trainer.ranks.device),
        inputs=windows[:, :-1],
        loss=lambda logits: F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten()),
        optimizer=torch.optim.AdamW,
        ranks=trainer.ranks,
    )


def report_of(trainer: Trainer, run: Run, traces: tz.tools.Traces) -> Report:
    options, ranks = trainer.options, trainer.ranks
    parameters = sum(prod(param.shape) for param in traces.plan.params)
    at_border = gathered_bytes(traces.forward_timeline)[-1]
    where = f"{stage_name(options.stage)} on {ranks.words}"
    return Report(
        title=f"Byte-level GPT, {parameters / 1e6:.2f} M parameters, {options.dtype}, {where}",
        losses=ranks.mean(torch.stack(run.losses)).tolist(),
        validation=run.validation,
        tokens_per_second=run.tokens_per_second,
        traffic=traffic_of(traces, options.stage, ranks),
        memory=Memory(*trainer.held(), run.peak, max(gathered_bytes(traces.timeline)), at_border),
        kept_unsharded=modules_kept_unsharded(traces.plan),
    )


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    with ranks_of_torchrun() as ranks:
        console = console_of(ranks)
        trainer = Trainer(options, ranks, load_text())
        batches = validation_batches(trainer.text, VALIDATION_BATCHES, trainer.shape)
        first = trainer.resume()
        if first == options.steps:
            latest = trainer.checkpoints / "latest"
            console.print(f"Nothing to train: {latest} is from step {first}, the last one; give another --out.")
            return
        run, traces = train(trainer, batches, first, console)
        report = report_of(trainer, run, traces)
        if options.report:
            draw_step(trainer, traces)
        if ranks.rank == 0:
            print_report(report, console)
            options.out.mkdir(parents=True, exist_ok=True)
            curve = options.out / f"train_gpt_stage{options.stage}.png"
            save_curve(report, curve)
            console.print(f"The loss curve is in {curve}.")
            if options.report:
                console.print(f"A step is in {curve.with_suffix('.html')}.")
            print_life(traces, console)


if __name__ == "__main__":
    main()
