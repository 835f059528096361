"""Measures training on batches of random lengths, beside FSDP2: what compiling takes, and the rest.

    python -m examples.bench.lengths                                   # 200 batches: 15 minutes
    python -m examples.bench.lengths --contestants "FSDP2 keep" "stage 2" "FSDP2 reshard" "stage 3"    # docs/lengths.md
    python -m examples.bench.lengths --batches 20 --layers 2 --contestants "stage 3"
    python -m examples.bench.lengths --model "Mixtral, grouped_mm" --batches 40 --layers 2

Two ranks over loopback, one thread each; every batch has another length, of its own on each rank, from 16 to 512. The
model is a Llama (examples/llama.py), the same with a temperature that is another float in every batch, or one of
transformers with experts. Contestants train the same batches, each in processes of its own. A step
that compiled something counts as a step of its tokens, by the others' median seconds a token; what it took beyond is
the time of compiling. "Resident" is the memory of rank 0's process after the 20th batch, and after the last.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import thunder_zero as tz  # before thunder
from examples.bench.families import DECODER, EXPERTS, hugging_face
from examples.llama import Llama, LlamaConfig, Output
from thunder_zero.capture.compilations import resident_bytes

SHORTEST, LONGEST, SEQUENCES, SETTLED = 16, 512, 2, 20
WORDS = 4096


@dataclass(frozen=True)
class Found:
    """What one contestant did: a number for each batch, of rank 0, but losses are means over ranks."""

    seconds: list[float]
    tokens: list[int]  # of the longer batch, for which the other rank waits
    programs: list[int]
    losses: list[float]
    resident: list[int]


class Tempered(Llama):
    """Divides its logits by a number."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, temperature: float = 1.0) -> Output:
        output = super().forward(input_ids)
        assert labels is not None
        logits = output.logits[:, :-1] / temperature
        return Output(F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()), output.logits)


def llama(kind: type[Llama], layers: int) -> nn.Module:
    return kind(LlamaConfig(WORDS, 256, 704, layers, 8, 4))


def experts(name: str, implementation: str, layers: int) -> nn.Module:
    """A decoder of transformers with four experts a layer, of which each token takes two."""
    sizes = {"vocab_size": WORDS, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": LONGEST}
    count = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 352, "decoder_sparse_step": 1}
    module: Any = hugging_face(f"{name}ForCausalLM", f"{name}Config", **DECODER | EXPERTS | sizes | heads | count)()
    module.set_experts_implementation(implementation)
    return module  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "Llama": partial(llama, Llama),
    "Llama, a float": partial(llama, Tempered),
    **{
        f"{name}, {implementation}": partial(experts, name, implementation)
        for name in ("Mixtral", "Qwen3Moe")
        for implementation in ("grouped_mm", "batched_mm")
    },
}


def fsdp2(module: Any, *, reshard: bool) -> nn.Module:
    """Each layer and the root."""
    for layer in module.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(module, reshard_after_forward=None if reshard else False)
    return module


def ours(module: nn.Module, **options: Any) -> nn.Module:
    return tz.compile(module, progress=False, **options)


CONTESTANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "FSDP2 keep": partial(fsdp2, reshard=False),
    "stage 2": partial(ours, stage=2),
    "stage 2, inductor": partial(ours, stage=2, fuse="inductor"),
    "FSDP2 reshard": partial(fsdp2, reshard=True),
    "stage 3": partial(ours, stage=3),
    "stage 3, inductor": partial(ours, stage=3, fuse="inductor"),
}


def train(rank: int, world_size: int, name: str, kind: str, layers: int, batches: int, folder: str) -> None:
    """One rank; rank 0 writes what it found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model: Any = CONTESTANTS[name](MODELS[kind](layers))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (batches, world_size), generator=torch.Generator().manual_seed(0))
    found = Found([], [], [], [], [])
    for number, of_ranks in enumerate(lengths.tolist()):
        tokens = torch.randint(WORDS, (SEQUENCES, of_ranks[rank]), generator=torch.Generator().manual_seed(number))
        dist.barrier()
        start = perf_counter()
        options = {"temperature": 1 + number / batches} if kind.endswith("float") else {}
        loss: Tensor = model(tokens, labels=tokens, **options).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.seconds.append(perf_counter() - start)
        total = loss.detach()
        dist.all_reduce(total)
        found.tokens.append(SEQUENCES * max(of_ranks))
        found.losses.append(float(total) / world_size)
        found.programs.append(len(tz.tools.programs(model)) if isinstance(model, tz.ZeroModule) else 0)
        found.resident.append(resident_bytes())
    if rank == 0:
        torch.save(vars(found), Path(folder) / "found.pt")
    dist.destroy_process_group()


def row(name: str, found: Found, right: Found) -> str:
    """A row of the table; the losses beside those of the first contestant."""
    before = [0, *found.programs]
    compiled = [now > then for then, now in zip(before, found.programs, strict=False)]
    compiled[0] = True  # the first step also warms up what does not compile
    steps = [*zip(found.seconds, found.tokens, compiled, strict=True)]
    of_token = median(seconds / tokens for seconds, tokens, new in steps if not new)
    extra = sum(seconds - of_token * tokens for seconds, tokens, new in steps if new)
    off = max(abs(a - b) / abs(b) for a, b in zip(found.losses, right.losses, strict=True))
    resident = " to ".join(f"{found.resident[at] / 2**20:.0f}" for at in (min(SETTLED, len(steps)) - 1, -1))
    return (
        f"| {name} | {found.programs[-1]} | {extra:.1f} | {sum(found.seconds) - extra:.1f} | {off:.0e} | {resident} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--model", default="Llama", choices=[*MODELS])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--contestants", nargs="+", default=[*CONTESTANTS], choices=[*CONTESTANTS])
    options = parser.parse_args()
    print("| | programs | compiling, s | the rest, s | losses differ by | resident, MiB |")
    print("|---|---:|---:|---:|---:|---:|")
    right = None
    for name in options.contestants:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(train, (2, name, options.model, options.layers, options.batches, folder), 2)
            found = Found(**torch.load(Path(folder) / "found.pt"))
        right = right or found
        print(row(name, found, right), flush=True)


if __name__ == "__main__":
    main()
