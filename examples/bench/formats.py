"""Training in formats beside exact training, paired by seed: does int8 change where it ends?

    python examples/bench/formats.py --out runs/formats                 # five seeds; prints the table at the end
    python examples/bench/formats.py --out runs/formats --tables        # the tables of what is there
    python examples/bench/formats.py --speed                            # how long bytes take to write and read

Trains the demo's GPT (``train_gpt.py``, 500 steps) and ``digits_checkpoint.py`` (12 epochs) on two ranks, stage 3, for
each seed and each choice of formats, and evaluates the exact weights, in the plain module. Three contestants exist here
alone: gradients rounded to nearest, without and with error feedback, and exact training from weights that differ in
their last bits, which shows what this measure cannot tell apart. The tables have the loss on validation data and its
difference from the exact run of the same seed: means over seeds, and two standard errors. What is there is not run
again.

``--speed`` times ``encodings/int8.py`` on one core, beside what any such function must do: read the elements once, and
write as many bytes. The contestants alternate, round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))  # the examples, which import each other by their bare names

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F

import thunder_zero as tz  # before thunder

SEEDS = 5
SPEED_ELEMENTS, SPEED_ROUNDS = 23_000_000, 21
NEAREST, FEEDBACK = "int8 reductions, to nearest", "int8 reductions, to nearest with feedback"
NUDGED, NUDGE = "exact, from weights that differ by 1e-6", 1e-6
VARIANTS: dict[str, Sequence[str]] = {
    "exact": (),
    NUDGED: (),
    "int8 gathers": ("--gather-format", "int8"),
    "int8 reductions": ("--reduce-format", "int8"),
    NEAREST: ("--reduce-format", "int8"),
    FEEDBACK: ("--reduce-format", "int8"),
    "int8 both": ("--gather-format", "int8", "--reduce-format", "int8"),
}


def gpt(ranks: Ranks, options: Sequence[str], steps: int, nudge: float) -> float:
    """Train the demo's GPT; return the validation loss in nats a byte. ``nudge``: what weights are made larger by."""
    import train_gpt
    from stdlib_text import load_text, validation_batches

    trainer = train_gpt.Trainer(train_gpt.parse_options(["--steps", str(steps), *options]), ranks, load_text())
    batches = validation_batches(trainer.text, train_gpt.VALIDATION_BATCHES, trainer.shape)
    enlarge(trainer.model, nudge)
    for number in range(steps):
        trainer.step(number)
    with tz.full_parameters(trainer.model) as module:
        return train_gpt.validate(module, batches, ranks)


def digits(ranks: Ranks, options: Sequence[str], steps: int, nudge: float) -> float:
    """Train on digits; return the loss on the test images in nats an image."""
    import digits_checkpoint as example
    from show import console_of, progress_bar

    epochs = example.parse_options([]).epochs
    trainer = example.Trainer(example.parse_options(list(options)), ranks)
    enlarge(trainer.model, nudge)
    with progress_bar(console_of(ranks), "digits", epochs * trainer.steps_in_epoch, trainer.batch, "images") as bar:
        for epoch in range(epochs):
            trainer.train_epoch(epoch, bar)
    example.pool_statistics(trainer.model, ranks)
    with tz.full_parameters(trainer.model) as module:
        module.eval()
        with torch.no_grad():
            return F.cross_entropy(module(trainer.test_images), trainer.test_labels).item()


def enlarge(model: nn.Module, share: float) -> None:
    """Make all weights larger by a share of each."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + share)


TASKS: dict[str, Callable[[Ranks, Sequence[str], int, float], float]] = {"gpt": gpt, "digits": digits}


@contextmanager
def gradients_to_nearest(*, feedback: bool) -> Iterator[None]:
    """Round gradients to nearest inside of the block. With ``feedback`` a rank adds what rounding took from what it
    sent to what it sends next of the same parameter. Between two ranks, a parameter has one payload."""
    lost: dict[str, Tensor] = {}

    encode = tz.Int8.encode

    def encode_to_nearest(form: tz.Int8, x: Tensor, *, key: str = "", **options: Any) -> Tensor:
        path = key.split()[1] if key else ""  # only gradients have a key: torch's seed, then the parameter's path
        if path and feedback:
            x = x + lost[path] if path in lost else x
        payload = encode(form, x, **options)
        if path and feedback:
            lost[path] = x - form.decode(payload, torch.empty_like(x))
        return payload

    with mock.patch.object(tz.Int8, "encode", encode_to_nearest):
        yield
    if feedback and not lost:
        raise RuntimeError("no gradient was written: thunder_zero.sharded.wire gives Int8.encode no key")


def run(rank: int, options: argparse.Namespace, store: str) -> None:
    """One rank of all runs; rank 0 writes a line of JSON for each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ranks = Ranks(rank, 2, torch.device("cpu"))
    file = options.out / "runs.jsonl"
    there = {(each["task"], each["seed"], each["variant"]) for each in lines_of(file)}
    for seed in range(options.seeds):
        for task in options.tasks:
            for variant in options.variants:
                if (task, seed, variant) in there:
                    continue
                start = perf_counter()
                asked = ("--seed", str(seed), "--out", str(options.out), *VARIANTS[variant])
                to_nearest = variant in (NEAREST, FEEDBACK)
                with gradients_to_nearest(feedback=variant == FEEDBACK) if to_nearest else nullcontext():
                    loss = TASKS[task](ranks, asked, options.steps, NUDGE if variant == NUDGED else 0.0)
                if rank == 0:
                    seconds = perf_counter() - start
                    print(f"{task}, seed {seed}, {variant}: {loss:.5f} ({seconds:.0f} s)", flush=True)
                    with file.open("a") as out:
                        out.write(json.dumps({"task": task, "seed": seed, "variant": variant, "loss": loss}) + "\n")
                dist.barrier()
    dist.destroy_process_group()


def lines_of(file: Path) -> list[dict[str, object]]:
    """What was run."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(lines: Sequence[dict[str, object]], task: str) -> str:
    """The losses of a task, and their differences from the exact runs, as Markdown."""
    losses = {(each["variant"], each["seed"]): float(str(each["loss"])) for each in lines if each["task"] == task}
    rows = [f"| {task} | loss | difference from exact, % | at most, by two standard errors |", "|---|---|---|---|"]
    for variant in VARIANTS:
        seeds = [seed for name, seed in losses if name == variant and ("exact", seed) in losses]
        if not seeds:
            continue
        mean = statistics.mean(losses[variant, seed] for seed in seeds)
        apart = [100 * (losses[variant, seed] / losses["exact", seed] - 1) for seed in seeds]
        error = 2 * statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
        off = "" if variant == "exact" else f"{statistics.mean(apart):+.3f}"
        limit = "" if variant == "exact" else f"{abs(statistics.mean(apart)) + error:.3f}"
        rows.append(f"| {variant} ({len(seeds)} seeds) | {mean:.4f} | {off} | {limit} |")
    return "\n".join(rows)


def speed() -> str:
    """Return the milliseconds that 23 million float32 elements take, as Markdown: the median and the least."""
    torch.set_num_threads(1)
    x = torch.randn(SPEED_ELEMENTS, generator=torch.Generator().manual_seed(0))
    out, form = torch.empty_like(x), tz.Int8()
    payload = torch.empty(form.nbytes(len(x)), dtype=torch.uint8)
    elements = payload[: len(x)].view(torch.int8)
    contestants: dict[str, Callable[[], object]] = {
        "write, to nearest": lambda: form.encode(x, out=payload),
        "write, at random": lambda: form.encode(x, out=payload, key="key"),
        "read": lambda: form.decode(payload, out),
        "read and add": lambda: form.decode(payload, out, add=True),
        "`sum()`: reads float32": x.sum,
        "`copy_`: float32 to int8": lambda: elements.copy_(x),
        "`copy_`: int8 to float32": lambda: out.copy_(elements),
        "`copy_`: float32 to float32": lambda: out.copy_(x),
    }
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(SPEED_ROUNDS):
        for name, call in contestants.items():
            start = perf_counter()
            call()
            taken[name].append(1000 * (perf_counter() - start))
    rows = [f"| {name} | {statistics.median(each):.1f} | {min(each):.1f} |" for name, each in taken.items()]
    return "\n".join([f"| {len(x):,} elements, one core | median, ms | least, ms |", "|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/formats"), help="folder of what was run (runs/formats)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"seeds ({SEEDS})")
    parser.add_argument("--steps", type=int, default=500, help="of the GPT (500)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="what is trained")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="what is compared")
    parser.add_argument("--tables", action="store_true", help="train nothing")
    parser.add_argument("--speed", action="store_true", help="train nothing; time how bytes are written and read")
    options = parser.parse_args()
    if options.speed:
        print(speed())
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.tables:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (options, str(Path(folder) / "store")), 2)
    for task in options.tasks:
        print(table(lines_of(options.out / "runs.jsonl"), task))


if __name__ == "__main__":
    main()
