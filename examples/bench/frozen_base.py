"""A frozen Llama in bfloat16 and in 4 bits, with adapters that train: bytes at rest and on the wire, seconds a step.

    pip install -e ".[hugging-face]"
    torchrun --standalone --nproc-per-node 2 examples/bench/frozen_base.py

docs/formats.md has the table. Bytes at rest and on the wire are those of the blocks' frozen linear layers alone:
embeddings, norms and adapters are as they are in both.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thunder_zero as tz
from thunder_zero.plan.traffic import gather_traffic


def adapted(width: int, layers: int) -> nn.Module:
    """A Llama from a config, whose linear layers have adapters of rank 8."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    found: nn.Module = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return found


def measured(options: argparse.Namespace, stage: int, form: tz.NF4 | None) -> tuple[list[str], float]:
    """A row of the table, and the loss of the last step; the first step compiles."""
    module = adapted(options.width, options.layers)
    model: Any = tz.compile(module, stage=stage, frozen_format=form and {"*.layers.*": form})
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    tokens = torch.randint(256, (2, 128), generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds = []
    for _ in range(1 + options.steps):
        dist.barrier()
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    traces = tz.traces_of(model)
    params = {param.path: param for param in traces.plan.params if "base_layer" in param.path}
    held = sum(model.state.params[path].rows.nbytes for path in params)
    gathers = [op for op in traces.timeline.ops if isinstance(op, tz.schedule.Gather)]
    sent = sum(gather_traffic(traces.plan, params[path]).sent for op in gathers for path in op.params if path in params)
    held_at_peak = tz.tools.memory(traces, loss=lambda output: output.loss).peak
    numbers = [f"{held / 1e6:.2f}", f"{sent / 1e6:.2f}", f"{held_at_peak / 1e6:.1f}", f"{median(seconds[1:]):.3f}"]
    return [f"stage {stage}", str(form or "bfloat16"), *numbers], loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="features of a token (1024)")
    parser.add_argument("--layers", type=int, default=4, help="(4)")
    parser.add_argument("--steps", type=int, default=7, help="steps that are timed (7)")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rows = [measured(options, stage, form) for stage in (2, 3) for form in (None, tz.NF4())]
    if dist.get_rank() == 0:
        print("| | base | MB at rest | MB sent a step | MB at the peak | seconds a step |")
        print("|---|---|---|---|---|---|")
        for row, _ in rows:
            print(f"| {' | '.join(row)} |")
        print("losses of the last step:", ", ".join(f"{loss:.4f}" for _, loss in rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
