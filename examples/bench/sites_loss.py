"""The loss of sites that begin with a trained model: one process simulates two sites, bit for bit as on ranks.

    python -m examples.bench.sites_loss --warm 0 512

ZeRO-2 trains all steps. Each setting continues from its parameters and its AdamW states after ``--warm`` steps, with
the same tokens. Prints a Markdown table. docs/two-sites.md has it.
"""

from __future__ import annotations

import argparse
import time
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from examples.gpt import GPT, GPTConfig
from examples.stdlib_text import Shape, Text, load_text, train_batch, validation_batches

CONTEXT, ROWS, SITES = 64, 16, 2
HIGHEST = 2e-3  # learning rate, after 50 steps; it falls in the last 30% of the steps


@dataclass(frozen=True)
class Setting:
    every: int
    rate: float = 0.7
    momentum: float = 0.5


SETTINGS = (
    Setting(32, 0.7, 0.9),
    Setting(32, 0.7, 0.5),
    Setting(32, 1.0, 0.0),
)


@dataclass
class Trained:
    """A model with its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @staticmethod
    def of(model: nn.Module) -> Trained:
        rates = {"lr": HIGHEST, "betas": (0.9, 0.95), "weight_decay": 0.1}
        return Trained(model, torch.optim.AdamW(model.parameters(), **rates))

    def copy(self) -> Trained:
        other = Trained.of(deepcopy(self.model))
        other.optimizer.load_state_dict(deepcopy(self.optimizer.state_dict()))
        return other

    def step(self, text: Text, step: int, steps: int, shape: Shape) -> None:
        windows = train_batch(text, step, shape, 0)
        logits = self.model(windows[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = HIGHEST * min((step + 1) / 50, 1.0) * min((steps - step) / (0.3 * steps), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def loss(self, text: Text) -> float:
        batches = validation_batches(text, 8, Shape(64, CONTEXT, 0, 1))
        losses = [F.cross_entropy(self.model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()) for x in batches]
        return float(torch.stack(losses).mean())


def continued(start: Trained, setting: Setting, first: int, steps: int, text: Text) -> float:
    """Train sites from ``start``. Return their loss after the last exchange."""
    sites, agreed = [start.copy() for _ in range(SITES)], deepcopy(start.model)
    outer = torch.optim.SGD(agreed.parameters(), setting.rate, momentum=setting.momentum, nesterov=setting.momentum > 0)
    for step in range(first, steps):
        for number, site in enumerate(sites):
            site.step(text, step, steps, Shape(ROWS, CONTEXT, number, SITES))
        if (step + 1 - first) % setting.every == 0:
            with torch.no_grad():
                for param, *own in zip(agreed.parameters(), *(site.model.parameters() for site in sites), strict=True):
                    param.grad = torch.stack([param - each for each in own]).mean(0)
            outer.step()
            for site in sites:
                site.model.load_state_dict(agreed.state_dict())
    return sites[0].loss(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2048)
    parser.add_argument("--warm", type=int, nargs="+", default=[0, 512], help="steps of ZeRO-2 before the outer step")
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text, steps = load_text(), options.steps
    zero = Trained.of(GPT(GPTConfig(blocks=4, width=options.width, heads=4, context=CONTEXT)))
    starts = {}
    begun = time.process_time()
    for step in range(steps):
        if step in options.warm:
            starts[step] = zero.copy()
        zero.step(text, step, steps, Shape(ROWS, CONTEXT, 0, 1))
    least = zero.loss(text)
    print(f"ZeRO-2, {steps} steps: {least:.4f}, {(time.process_time() - begun) / steps * 1e3:.0f} ms a step\n")
    print("| ZeRO-2 steps | H | outer rate | momentum | validation loss | of ZeRO-2 |")
    print("|---:|---:|---:|---:|---:|---:|")
    for warm, start in starts.items():
        for setting in SETTINGS:
            loss = continued(start, setting, warm, steps, text)
            cells = (
                warm,
                setting.every,
                setting.rate,
                setting.momentum,
                f"{loss:.4f}",
                f"{100 * (loss / least - 1):+.1f}%",
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
