"""Fine-tunes a Hugging Face Llama by ``Trainer``: padded or packed rows, a run that outlives a killed rank, and text.

    pip install -e ".[hugging-face]"
    torchrun --standalone --nproc-per-node 2 examples/fine_tune.py            # padded rows
    torchrun --standalone --nproc-per-node 2 examples/fine_tune.py --packed   # rows of one length

The model is made from a config and reads bytes; nothing is downloaded. It learns to end lines of Python's standard
library: the first half of a line is its prompt, which counts in no loss. With ``--max-restarts 3`` (docs/launching.md
has the command) torchrun starts all ranks again if one is killed (``kill -9``). They resume from the last complete
checkpoint below ``--out``; started again after its end, the script trains no more. One line differs from a script for
DistributedDataParallel: the class of the trainer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from ranks import options_parser, positive, ranks_of_torchrun
from stdlib_text import load_text
from torch import nn

import thunder_zero as tz
from thunder_zero.hugging_face import sharded

Row = dict[str, list[int]]
BYTES, SHORTEST, PROMPT = 200_000, 16, "import "  # of text, and of a line, read; what to continue at the end


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options_parser(__doc__)
    parser.add_argument("--packed", action="store_true", help="put several lines into each row, instead of padding")
    parser.add_argument("--steps", type=positive, default=60, help="training steps (60)")
    parser.add_argument("--save-steps", type=positive, default=20, help="steps from checkpoint to checkpoint (20)")
    parser.add_argument("--batch", type=positive, default=8, help="rows of a rank and step (8)")
    parser.add_argument("--context", type=positive, default=64, help="tokens of a row, at most (64)")
    return parser.parse_args(argv)


def make_llama(options: argparse.Namespace, tokenizer: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * options.context,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def rows_of(lines: Sequence[str], tokenizer: Any, most: int) -> list[Row]:
    """Return a row for each line; labels of -100 count in no loss."""
    rows = []
    for line in lines:
        tokens = tokenizer(line, max_length=most, truncation=True).input_ids
        half = len(tokens) // 2
        rows.append({"input_ids": tokens, "labels": [-100] * half + tokens[half:]})
    return rows


def packed(rows: Sequence[Row], length: int) -> list[Row]:
    """Pack rows end to end into rows of one length. Attention keeps apart what begins at position 0 again."""
    joined: Row = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        for name, values in (row | {"position_ids": list(range(len(row["labels"])))}).items():
            joined[name].extend(values)
    starts = range(0, len(joined["labels"]) - length + 1, length)
    return [{name: values[start : start + length] for name, values in joined.items()} for start in starts]


def last_complete(folder: Path) -> str | None:
    """Return the last complete checkpoint: a trainer writes its own state after all other files."""
    complete = [state.parent for state in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.partition("-")[2]))) if complete else None


def make_trainer(options: argparse.Namespace, folder: Path) -> Any:
    from transformers import ByT5Tokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments, default_data_collator

    tokenizer = ByT5Tokenizer()  # a token is a byte
    text = bytes(load_text().train[:BYTES].tolist()).decode(errors="replace")
    rows = rows_of([line for line in text.splitlines() if len(line) >= SHORTEST], tokenizer, options.context)
    data: Any = packed(rows, options.context) if options.packed else rows
    if find_spec("datasets"):
        from datasets import Dataset

        data = Dataset.from_list(data)
    arguments = TrainingArguments(
        str(folder),
        max_steps=options.steps,
        save_steps=options.save_steps,
        save_total_limit=2,
        logging_steps=1,
        per_device_train_batch_size=options.batch,
        learning_rate=3e-3,
        seed=options.seed,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    padded = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=options.context)  # one length, so one program
    return sharded(Trainer, stage=options.stage)(
        model=make_llama(options, tokenizer),
        args=arguments,
        train_dataset=data,
        data_collator=default_data_collator if options.packed else padded,
        processing_class=tokenizer,
    )


def continued(trainer: Any, prompt: str) -> str:
    """Return what the trained model writes after a prompt; all ranks must call it."""
    tokenizer = trainer.processing_class
    start = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids], device=trainer.args.device)
    with tz.full_parameters(trainer.model_wrapped) as module, torch.no_grad():
        tokens = module.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    folder = options.out / "fine_tune"
    with ranks_of_torchrun():
        trainer = make_trainer(options, folder)
        trainer.train(resume_from_checkpoint=last_complete(folder))
        text = continued(trainer, PROMPT)
        for entry in trainer.state.log_history if trainer.is_world_process_zero() else ():
            if "loss" in entry:
                print(f"step {entry['step']}: loss {entry['loss']}")
    if trainer.is_world_process_zero():
        print(f"generated: {text!r}")


if __name__ == "__main__":
    main()
