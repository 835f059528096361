"""A Hugging Face Llama, sharded: its own loss, clipping, bfloat16, and one file that the plain model loads.

    pip install -e ".[hugging-face]"
    torchrun --standalone --nproc-per-node 2 examples/hugging_face.py            # ZeRO-3
    torchrun --standalone --nproc-per-node 2 examples/hugging_face.py --lora 4   # trains adapters of rank 4 only
    python examples/hugging_face.py --stage 1 --dtype float32                    # one process

The model is made from a config (tied embeddings, grouped-query attention) and reads bytes; nothing is downloaded. The
loss comes from `labels=`. Each step clips the norm of all gradients. At the end the sharded checkpoint becomes one
safetensors file; the plain model loads it and repeats the loss of the sharded one. With `--lora` the base is frozen:
its rows are gathered, but nothing of it is reduced, has a gradient or optimizer state, and training leaves each bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pictures import save_curve
from ranks import Ranks, options_parser, positive, ranks_of_torchrun, stage_name
from safetensors.torch import load_file
from show import Bar, console_of, figures, progress_bar
from stdlib_text import Shape, load_text, train_batch
from tensor_memory import bytes_held, parameters_of, part_of
from torch import Tensor, nn

import thunder_zero as tz

DTYPES = {
    "float32": tz.MixedPrecision(),
    "bfloat16": tz.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32),
}
ADAPTED = ("q_proj", "v_proj")  # the layers that get adapters
TIED = "lm_head.weight"  # is the embedding, under whose name the file has it


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of compute (bfloat16)")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank only (0: all)")
    parser.add_argument("--layers", type=positive, default=2, help="(2)")
    parser.add_argument("--width", type=positive, default=64, help="features of a token (64)")
    parser.add_argument("--steps", type=positive, default=100, help="training steps (100)")
    parser.add_argument("--batch", type=positive, default=16, help="sequences per step, rounded up for the ranks (16)")
    parser.add_argument("--context", type=positive, default=64, help="bytes per sequence (64)")
    return parser.parse_args(argv)


def check_transformers() -> None:
    """End the script with one sentence if transformers is missing, or older than 5."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = "missing"
    if not found.startswith("5."):
        raise SystemExit(f'transformers is {found}; this script takes 5: run pip install -e ".[hugging-face]"')


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two narrow matrices (Hu et al., arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # at the start the adapter changes nothing

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + 2 * self.up(self.down(x))
        return y


def make_llama(options: argparse.Namespace) -> nn.Module:
    """Build a small Llama with four heads that share two heads of keys and values; with ``--lora`` also its
    adapters."""
    from transformers import LlamaConfig, LlamaForCausalLM  # checked first, so that --help works without it

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.context,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(options.seed)  # the same weights on every rank
    model = LlamaForCausalLM(config)
    if options.lora:
        model.requires_grad_(False)
        for path, layer in list(model.named_modules()):
            parent, _, name = path.rpartition(".")
            if name in ADAPTED:
                setattr(model.get_submodule(parent), name, LoRA(layer, options.lora))
    return model


class Trainer:
    """A sharded Llama, its optimizer, and the text."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self.options, self.ranks, self.text = options, ranks, load_text()
        self.shape = Shape(ranks.rounded_up(options.batch), options.context - 1, ranks.rank, ranks.world_size)
        module = make_llama(options).to(ranks.device)
        policy = tz.Policy(options.stage, mixed_precision=DTYPES[options.dtype])
        self.model = tz.compile(module, policy)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-2 if options.lora else 3e-3, fused=True)

    def loss_of(self, step: int) -> Tensor:
        """Return the model's own loss: it shifts the labels itself."""
        windows = train_batch(self.text, step, self.shape, self.options.seed).to(self.ranks.device)
        loss: Tensor = self.model(input_ids=windows, labels=windows).loss
        return loss

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """Take one step; return the loss, and the norm of all gradients before they were clipped."""
        loss = self.loss_of(number)
        loss.backward()
        norm = tz.clip_grad_norm_(self.model, max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm

    def train(self, bar: Bar) -> list[float]:
        """Take all steps; return the losses, mean over ranks."""
        losses = []
        for number in range(self.options.steps):
            loss, norm = self.step(number)
            losses.append(self.ranks.mean(loss).item())
            bar.step(losses[-1])
            bar.note(f"norm {norm.item():.2f}")
        return losses


def next_loss(trainer: Trainer) -> float:
    """Return the sharded model's loss on the next step's text, mean over ranks.

    It runs the program of training.
    """
    return trainer.ranks.mean(trainer.loss_of(trainer.options.steps).detach()).item()


@torch.no_grad()
def plain_loss(file: Path, trainer: Trainer) -> tuple[float, str]:
    """Return the loss of a plain Llama with the weights of one file, on all ranks' rows, and whether frozen weights are
    equal.

    Raises:
        RuntimeError: the file lacks a weight other than the tied one, or has one too many.
    """
    plain, weights, start = make_llama(trainer.options), load_file(file), make_llama(trainer.options)
    missing, unexpected = plain.load_state_dict(weights, strict=False)
    if missing != [TIED] or unexpected:
        raise RuntimeError(f"{file} should lack {TIED} only: it lacks {missing}, and has too much: {unexpected}")
    frozen = [name for name, parameter in start.named_parameters() if not parameter.requires_grad]
    same = all(torch.equal(weights[name], start.get_parameter(name)) for name in frozen)
    shape = Shape(trainer.shape.rows, trainer.shape.context, rank=0, world_size=1)
    windows = train_batch(trainer.text, trainer.options.steps, shape, trainer.options.seed)
    return float(plain(input_ids=windows, labels=windows).loss), "equal" if same else "differs"


def bytes_reduced(model: nn.Module) -> tuple[str, str]:
    """Return the bytes of the gradients that a step reduces, and the bytes of all parameters' gradients."""
    timeline = tz.traces_of(model).timeline
    reduced = [path for op in timeline.ops if isinstance(op, tz.schedule.Reduce) for path in op.params]
    nbytes = {param.path: param.grad_bytes for param in timeline.plan.params}
    trained = sum(nbytes[param.path] for param in timeline.plan.params if param.requires_grad)
    words = f"bytes, of {trained:,} trained and {sum(nbytes.values()) - trained:,} frozen"
    return f"{sum(nbytes[path] for path in reduced):,}", words


def report(trainer: Trainer, losses: list[float], sharded: float, file: Path) -> None:
    """Print the figures, and draw the loss."""
    options, ranks = trainer.options, trainer.ranks
    state = [value for entry in trainer.optimizer.state.values() for value in entry.values()]
    trained = sum(part_of(parameter).numel() for parameter in trainer.trained)
    held, params = bytes_held(parameters_of(trainer.model)), tz.traces_of(trainer.model).plan.params
    copies = sum(param.full_bytes for param in params if param.resident and param.is_cast)  # ZeRO-1 keeps them
    plain, same = plain_loss(file, trainer)
    rows = [
        ("loss, first and last step", f"{losses[0]:.3f}, {losses[-1]:.3f}", "nats per byte, mean over ranks"),
        ("loss of the next step's text", f"{sharded:.4f}", f"sharded, {options.dtype}"),
        ("plain model, from one file", f"{plain:.4f}", "float32"),
        ("elements this rank trains", f"{trained:,}", "of adapters" if options.lora else "of all parameters"),
        ("parameters per rank, at rest", f"{held:,}", f"bytes, and {copies:,} cast and full"),
        ("AdamW per rank, at rest", f"{bytes_held(state):,}", "bytes"),
        ("gradients reduced in a step", *bytes_reduced(trainer.model)),
    ]
    model, name = "Llama", "hugging_face"
    if options.lora:
        model, name = "Llama with LoRA", "hugging_face_lora"
        rows.append(("frozen base, in the file", same, "to that before training, bit for bit"))
    heading = f"{model}, {stage_name(options.stage)} on {ranks.words}"
    figures(console_of(ranks), heading, rows)
    path = options.out / f"{name}_stage{options.stage}.png"
    save_curve(path, heading, losses, x="step", y="loss, nats per byte")
    console_of(ranks).print(f"The picture is {path}.")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    check_transformers()
    with ranks_of_torchrun() as ranks:
        trainer = Trainer(options, ranks)
        tokens = trainer.shape.rows * options.context
        with progress_bar(console_of(ranks), "training", options.steps, tokens, "tokens") as bar:
            losses = trainer.train(bar)
        sharded = next_loss(trainer)
        folder = options.out / "hugging_face" / f"step-{options.steps}"
        tz.save(folder, trainer.model, trainer.optimizer)
        if ranks.rank == 0:
            (file,) = tz.tools.consolidate(folder, folder.parent / "model.safetensors")
            report(trainer, losses, sharded, file)


if __name__ == "__main__":
    main()
