"""Modules in slices beside one process: loss, gradients and ten AdamW steps. The table of docs/tensor-parallel.md.

    python examples/bench/slices.py                                    # all of it: half an hour on two cores
    python examples/bench/slices.py --meshes 2x2 --models Llama --stages 3 --dtypes float64

Each model is sliced by torch's ``parallelize_module``, with activations of whole sequences, or of parts of them
("sequence"). A cell has the largest difference of any number from those of one process that trains on all rows.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import thunder_zero as tz

ROWS, LENGTH, WORDS, WIDTH, HEADS, STEPS = 4, 8, 32, 32, 8, 10
MESHES = {"1x2": (1, 2), "2x1": (2, 1), "2x2": (2, 2), "1x4": (1, 4), "4x1": (4, 1)}
STAGES = (0, 1, 2, 3)
DTYPES = ("float64", "float32")
COLUMNS, OF_ROWS = ColwiseParallel, RowwiseParallel
IN_PARTS: Placement = Shard(1)  # an activation: each rank has a part of the sequence


# Models, and how each is sliced


class Block(nn.Module):
    """Attention and a perceptron, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        heads = [each(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v)]
        x = x + self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Own(nn.Module):
    """A model of one's own, of plain modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def slice_own(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """Slice the linears; with ``sequence``, norms and what is around them have parts of a sequence."""
    parts = IN_PARTS if sequence else Replicate()
    block: dict[str, Any] = {name: COLUMNS(input_layouts=parts) for name in ("q", "k", "v", "up")}
    block |= {name: OF_ROWS(output_layouts=parts) for name in ("o", "down")}
    styles = {f"blocks.{number}.{name}": style for number in range(2) for name, style in block.items()}
    styles["embed"] = OF_ROWS(input_layouts=Replicate(), output_layouts=parts)
    styles["head"] = COLUMNS(input_layouts=parts, output_layouts=Replicate())
    if sequence:
        norms = ("norm", *(f"blocks.{number}.norms.{norm}" for number in range(2) for norm in range(2)))
        styles |= {name: SequenceParallel(use_local_output=True) for name in norms}
    return parallelize_module(model, mesh, styles)


def llama(tied: bool = False) -> nn.Module:
    """A small Llama, whose heads share keys and values in pairs."""
    return LlamaForCausalLM(LlamaConfig(**_sizes(), rms_norm_eps=1e-5, tie_word_embeddings=tied))


def qwen3() -> nn.Module:
    """A small Qwen3, which has norms of each head."""
    return Qwen3ForCausalLM(Qwen3Config(**_sizes(), head_dim=WIDTH // HEADS, tie_word_embeddings=False))


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "max_position_embeddings": 4 * LENGTH,
        "use_cache": False,
    }


def slice_llama(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """Slice a Llama or a Qwen3: embedding, attention by heads, perceptrons, head.

    With ``sequence``, parts of a sequence begin at the first layer, since Hugging Face's models read its length, and
    make positions from it, behind the embedding.
    """
    parts = IN_PARTS if sequence else Replicate()
    layer: dict[str, Any] = {f"self_attn.{name}_proj": COLUMNS() for name in "qkv"}
    layer |= {f"mlp.{name}_proj": COLUMNS(input_layouts=parts) for name in ("gate", "up")}
    layer |= {name: OF_ROWS(output_layouts=parts) for name in ("self_attn.o_proj", "mlp.down_proj")}
    by_name = dict(model.named_modules())
    if "model.layers.0.self_attn.q_norm" in by_name:  # a norm of each head: ranks have some of the heads
        of_heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        layer |= {f"self_attn.{name}_norm": of_heads for name in "qk"}
    styles: dict[str, Any] = {
        "model.embed_tokens": OF_ROWS(input_layouts=Replicate()),
        "lm_head": COLUMNS(input_layouts=parts, output_layouts=Replicate()),
    }
    if sequence:
        layer["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": IN_PARTS}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        names = ("input_layernorm", "post_attention_layernorm")
        layer |= {name: SequenceParallel(use_local_output=True) for name in names}
        styles["model.norm"] = SequenceParallel(use_local_output=True)
        styles["model.layers.0"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=IN_PARTS, use_local_output=True
        )
    layers = (name for name in by_name if name.removeprefix("model.layers.").isdigit())
    styles |= {f"{name}.{part}": style for name in layers for part, style in layer.items()}
    return parallelize_module(model, mesh, styles)


def gpt2() -> nn.Module:
    """A small GPT-2, without dropout."""
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=LENGTH, use_cache=False, **none)
    )


def slice_gpt2(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """Slice the perceptrons: torch's styles know no ``Conv1D``, and attention has q, k and v in one matrix."""
    for name, module in model.named_modules():
        if name.endswith(("mlp.c_fc", "mlp.c_proj")):
            _slice_conv1d(module, mesh, columns=name.endswith("c_fc"))
    return model


def _slice_conv1d(module: nn.Module, mesh: DeviceMesh, *, columns: bool) -> None:
    """Slice the columns or the rows of a ``Conv1D``, whose weight is (inputs, outputs), as torch's styles do."""
    placed: dict[str, Placement] = {"weight": Shard(int(columns)), "bias": Shard(0) if columns else Replicate()}

    def partition(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(part.named_parameters()):
            part.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [placed[key]])))

    def inputs(part: nn.Module, given: Any, mesh: DeviceMesh) -> Any:
        here = Replicate() if columns else Shard(-1)
        return (DTensor.from_local(given[0], mesh, [here], run_check=False),)

    def outputs(part: nn.Module, made: Any, mesh: DeviceMesh) -> Any:
        return made.redistribute(placements=[Shard(-1) if columns else Replicate()]).to_local()

    distribute_module(module, mesh, partition, inputs, outputs)


@dataclass(frozen=True)
class Sliced:
    """A model, and how it is sliced.

    Attributes:
        build: makes the plain model.
        slice: slices it in place, with parts of sequences or without; returns it.
        sequence: False and True, or False alone.
    """

    build: Callable[[], nn.Module]
    slice: Callable[[nn.Module, DeviceMesh, bool], nn.Module]
    sequence: tuple[bool, ...] = (False, True)


MODELS = {
    "Llama": Sliced(llama, slice_llama),
    "Qwen3": Sliced(qwen3, slice_llama),
    "GPT-2, perceptrons": Sliced(gpt2, slice_gpt2, (False,)),
    "of plain modules": Sliced(Own, slice_own),
}


# One process, and ranks


@dataclass(frozen=True)
class Step:
    """What a step of one process has: its loss, and gradients; and parameters before it."""

    loss: Tensor
    grads: Mapping[str, Tensor]
    params: Mapping[str, Tensor]


def plain(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Build a model alike on all ranks, with biases that are not zero."""
    torch.manual_seed(seed)
    module = build().to(dtype)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    return module


def tokens_of(step: int) -> Tensor:
    """Return the rows of all ranks."""
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean loss of words to come."""
    found = model(tokens)
    logits = found if isinstance(found, Tensor) else found.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model: Any) -> torch.optim.Optimizer:
    """Return AdamW, whose steps do not turn rounding of nearly nothing into much."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def one_process(module: nn.Module, steps: int = STEPS) -> list[Step]:
    """Train a plain module on all rows; the last entry is for the parameters at the end."""
    optimizer, found = adamw(module), []
    for number in range(steps + 1):
        optimizer.zero_grad()
        loss = loss_of(module, tokens_of(number))
        loss.backward()
        params = {name: param.detach().clone() for name, param in module.named_parameters()}
        grads = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
        found.append(Step(loss.detach(), deepcopy(grads), params))
        optimizer.step()
    return found


def worst(model: Any, mesh: DeviceMesh, right: list[Step]) -> float:
    """Train a model on ranks, and return the largest difference of a number from that of one process; a collective."""
    optimizer, data = adamw(model), mesh["dp"]
    off = torch.zeros(())
    for number, expected in enumerate(right):
        optimizer.zero_grad()
        loss = loss_of(model, tokens_of(number).chunk(data.size())[data.get_local_rank()])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        pairs = [(mean / dist.get_world_size(), expected.loss)]
        params = dict(model.named_parameters())
        assert params.keys() == expected.params.keys()
        pairs += [(params[name].detach(), value) for name, value in expected.params.items()]
        pairs += [(params[name].grad, value) for name, value in expected.grads.items()]
        for found, value in pairs:
            full = found.full_tensor() if isinstance(found, DTensor) else found
            off = torch.maximum(off, (full - value).abs().max().float())
        optimizer.step()
    dist.all_reduce(off, dist.ReduceOp.MAX)
    return off.item()


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    """Return a mesh of (dp, tp)."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def in_slices(name: str, mesh: DeviceMesh, stage: int, sequence: bool, dtype: torch.dtype, **options: Any) -> Any:
    """Compile a model of the table in slices."""
    how = MODELS[name]
    return tz.compile(how.slice(plain(how.build, dtype), mesh["tp"], sequence), stage=stage, mesh=mesh, **options)


# The table


def run(rank: int, options: argparse.Namespace, mesh_name: str, store: str, found: Any) -> None:
    """One rank of a mesh with all its cases; rank 0 writes to ``found``."""
    torch.set_num_threads(1)
    shape = MESHES[mesh_name]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=shape[0] * shape[1])
    mesh = mesh_of(shape)
    for dtype_name in options.dtypes:
        dtype = getattr(torch, dtype_name)
        for name in options.models:
            right = one_process(plain(MODELS[name].build, dtype))
            for sequence in MODELS[name].sequence:
                for stage in options.stages:
                    torch._dynamo.reset()
                    off = worst(in_slices(name, mesh, stage, sequence, dtype), mesh, right)
                    if rank == 0:
                        key = name + ", sequence" * sequence, dtype_name, mesh_name
                        found[key] = max(found.get(key, 0.0), off)
                        print(*key, f"stage {stage}", f"{off:.1e}", file=sys.stderr, flush=True)
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Measure all cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=[*MESHES], metavar="MESH")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="MODEL")
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=[*STAGES])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    options = parser.parse_args(arguments)
    with mp.get_context("spawn").Manager() as manager, tempfile.TemporaryDirectory() as folder:
        found = manager.dict()
        for name in options.meshes:
            dp, tp = MESHES[name]
            mp.start_processes(run, (options, name, f"{folder}/{name}", found), dp * tp, start_method="spawn")
        print(table(dict(found)))


def table(errors: Mapping[tuple[str, str, str], float]) -> str:
    """Return a row for each model with its largest error on any mesh, by dtype; then the versions."""
    dtypes = dict.fromkeys(dtype for _, dtype, _ in errors)
    lines = ["| | " + " | ".join(dtypes) + " |", "|---|" + "---|" * len(dtypes)]
    for model in dict.fromkeys(key[0] for key in errors):
        cells = (max(error for key, error in errors.items() if key[:2] == (model, dtype)) for dtype in dtypes)
        lines.append(f"| {model} | " + " | ".join(f"{error:.0e}" for error in cells) + " |")
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))
    return "\n".join((*lines, f"\n(Python {platform.python_version()}, {versions}.)"))


if __name__ == "__main__":
    main()
