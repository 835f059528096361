"""The examples, smaller, as a user runs them; examples/train_gpt.py and examples/fabric_litgpt.py have files of their
own."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import thunder_zero as tz  # before thunder
from tests.harness.examples import SECONDS, example_module, run_example, table_of
from tests.harness.ranks import RanksPool

import thunder

pytestmark = pytest.mark.timeout(SECONDS + 60)  # longer than any launch may take


@pytest.mark.slow
def test_data_parallel_mlp(tmp_path: Path) -> None:
    options = ("--rows", "96", "--width", "16", "--stage", "3")
    printed = run_example("examples/data_parallel_mlp.py", *options, "--out", str(tmp_path))
    table = table_of(printed)
    assert set(table) == {"0", "5", "10", "15", "20", "25", "29"}
    assert all(float(apart) < 1e-6 for *_, apart in table.values())
    drawn = re.findall(r"^ZeRO-3 on (\d) ranks?\n +batch +96 rows +(\d+)$", printed, re.MULTILINE)
    assert [(int(count), "".join(dict.fromkeys(row))) for count, row in drawn] == [
        (count, "".join(map(str, range(count)))) for count in (1, 2, 4, 8)
    ]
    assert (tmp_path / "data_parallel_mlp_stage3.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_sequence_mlp(tmp_path: Path) -> None:
    """Biases are replicated. ZeRO-1 shards momentum alone."""
    options = ("--rows", "64", "--width", "32", "--steps", "25", "--stage", "1")
    printed = run_example("examples/sequence_mlp.py", *options, "--out", str(tmp_path))
    table = table_of(printed)
    assert float(table["last step"][0]) < float(table["mean squared error, first step"][0])
    drawn = dict(re.findall(r"^  ([\w. ]+?) +\d+ rows +(.+?) *$", printed.partition("ZeRO-1 on")[2], re.MULTILINE))
    shown = {name: row if row == "every rank" else "".join(dict.fromkeys(row)) for name, row in drawn.items()}
    assert shown == {
        **dict.fromkeys(("0.weight", "2.weight"), "every rank"),
        **dict.fromkeys(("momentum of 0.weight", "momentum of 2.weight"), "01"),
        **dict.fromkeys(("0.bias", "2.bias", "momentum of 0.bias", "momentum of 2.bias"), "every rank"),
    }
    assert {path.name for path in tmp_path.iterdir()} >= {"sequence_mlp_adamw_stage1.png"}


def forecast_in_all_stages(rank: int, world_size: int) -> dict[str, list[float]]:
    """The loss at the step to compare, by optimizer and stage."""
    example = example_module("sequence_mlp")
    ranks, found = example.Ranks(rank, world_size, torch.device("cpu")), {}
    for name in example.MOMENTUM:
        options = argparse.Namespace(optimizer=name, steps=example.STEP_TO_COMPARE + 1, rows=63, seed=0)
        losses = []
        for stage in range(4):
            torch.manual_seed(0)
            policy = tz.Policy(stage, replicated=("*.bias",))
            model = thunder.jit(example.perceptron(16), transforms=[tz.ZeroTransform(policy)])
            optimizer = example.optimizer_of(name, list(model.parameters()))
            losses.append(example.train(model, optimizer, options, ranks)[-1])
        found[name] = losses
    return found


@pytest.mark.slow
def test_sequence_mlp_has_the_same_curve_under_every_stage(ranks_pool: RanksPool) -> None:
    for found in ranks_pool.run(2, forecast_in_all_stages, timeout=SECONDS):
        for losses in found.values():
            assert losses == pytest.approx([losses[0]] * 4, abs=1e-5)


@pytest.mark.slow
def test_the_velocity_of_momentum_starts_from_zero() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = example_module("sequence_mlp").optimizer_of("momentum", [parameter])
    optimizer.step()
    optimizer.step()  # velocities 0.1 and 0.9 * 0.1 + 0.1
    assert parameter.tolist() == pytest.approx([-0.01 * (0.1 + 0.19)] * 2)


@pytest.mark.slow
def test_wire_protocol(tmp_path: Path) -> None:
    table = table_of(run_example("examples/wire_protocol.py", "--stage", "3", "--out", str(tmp_path), ranks=3))
    sent = {table[name][0] for name in ("bytes sent in a step, by hand", "by ZeroTransform", "by the formula")}
    assert len(sent) == 1
    assert table["weights of 3 ranks"][0] == table["weights of two runs"][0] == "equal"
    assert float(table["from ZeroTransform's weights"][0]) < 1e-6
    assert (tmp_path / "wire_protocol_stage3.png").exists()


@pytest.mark.slow
def test_digits_checkpoint(tmp_path: Path) -> None:
    """Saved by two ranks in ZeRO-3, resumed by one in ZeRO-1; the plain module reads as many digits right."""
    pytest.importorskip("sklearn")
    script, out = "examples/digits_checkpoint.py", ("--out", str(tmp_path))
    first = table_of(run_example(script, "--epochs", "1", *out))
    sharded, everywhere = first["test accuracy, sharded"]
    assert sharded == first["plain module, from one file"][0]
    assert set(re.findall(r"[\d.]+%", everywhere)) == {sharded}
    other = ("--stage", "1", "--dtype", "bfloat16", "--activation-checkpointing")
    again = run_example(script, "--epochs", "2", *other, "--resume", f"{tmp_path}/digits/latest", *out, ranks=1)
    assert "Resumed after epoch 1" in again
    read = [float(table_of(again)[name][0][:-1]) for name in ("test accuracy, sharded", "plain module, from one file")]
    assert read[0] == pytest.approx(read[1], abs=2)  # bfloat16 and float32 read a few digits differently
    assert "computes in float32" in table_of(again)["plain module, from one file"][1]


@pytest.mark.slow
def test_resnet(tmp_path: Path) -> None:
    """5 classes on 2 ranks: the last shard of the head has a row of padding. 7 images become 8."""
    model = ("--blocks", "1", "--width", "8", "--image", "16", "--classes", "5", "--batch", "7")
    options = (*model, "--epochs", "1", "--steps-in-epoch", "3", "--stage", "2", "--out", str(tmp_path))
    table = table_of(run_example("examples/resnet.py", *options))
    for name in ("parameters", "gradients", "momentum"):
        held, formula = table[name][0], table[name][1].removeprefix("by the formula ")
        assert abs(mb_of(held) - mb_of(formula)) <= 0.01  # uneven rows
    measured, foreseen = map(mb_of, table["at the peak of a step"])
    at_rest = sum(mb_of(table[name][0]) for name in ("parameters", "momentum", "buffers"))
    added = mb_of(table["gathered, and gradients"][0])
    assert foreseen == pytest.approx(at_rest + added, abs=0.02)
    assert 0 < added < foreseen < measured  # activations are in what is measured only
    assert table["parameters with uneven rows"] == ("2", "of 17")
    assert table["learning rate after the warm-up"][0] == f"{0.4 * 8 / 1024}"
    assert (tmp_path / "resnet_stage2.png").exists()


def mb_of(cell: str) -> float:
    """The first number of megabytes in a cell."""
    return float(re.findall(r"([\d.]+) MB", cell)[0])


@pytest.mark.slow
def test_resnet_has_the_standard_shape_and_recipe() -> None:
    example = example_module("resnet")
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in example.ResNet((3, 4, 6, 3), 64, 1000).parameters()]
    assert (len(sizes), sum(sizes)) == (161, 25_557_032)
    rates = {epoch: 0.4 * example.learning_rate_at(epoch) for epoch in (0, 2.5, 5, 29, 30, 60, 89)}
    assert rates == pytest.approx({0: 0, 2.5: 0.2, 5: 0.4, 29: 0.4, 30: 0.04, 60: 0.004, 89: 0.004})


@pytest.mark.slow
def test_zero1_accumulation(tmp_path: Path) -> None:
    """ZeRO-3 gathers in every micro-batch; gradients are reduced once there, too."""
    options = ("--stage", "3", "--steps", "2", "--micro-batches", "2", "--out", str(tmp_path))
    table = table_of(run_example("examples/zero1_accumulation.py", *options))
    others = (257 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64 - 64) // 2  # rank 1 has 128 of the embedding's 257 rows
    assert table["bytes sent in it: gradients"] == (f"{4 * others:,}", "in micro-batch 2 alone")
    assert table["gradients, by the plan"] == (f"{4 * others:,}", "")
    parameters, where = table["bytes sent in it: parameters"]
    most, words = table["parameters, by the plan"]
    assert (where, words) == ("in all 2 micro-batches", "at most")
    assert 2 * 2 * others < int(parameters.replace(",", "")) <= int(most.replace(",", "")) <= 4 * 2 * (others + 64)
    assert table["different dropout masks"] == ("2", "on 2 ranks")
    assert (tmp_path / "zero1_accumulation_stage3.png").exists()


ACCUMULATIONS = ((1, False), (1, True), (4, False))  # micro-batches, activation checkpointing


def accumulate(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Trains a smaller GPT in each of those ways: its losses, what it sent in the last step, and its plan of that."""
    example = example_module("zero1_accumulation")
    config = example.AlibiConfig(1, 8, 16, 2, vocabulary=258)
    example.PRESETS["smaller"] = example.Preset(config, 8, 8, (4e-3, 4e-4), 2)
    ranks, runs = example.Ranks(rank, world_size, torch.device("cpu")), []
    for micro_batches, checkpointed in ACCUMULATIONS:
        options = argparse.Namespace(
            preset="smaller", stage=1, micro_batches=micro_batches, activation_checkpointing=checkpointed
        )
        options.seed, options.steps = 0, 5
        trainer = example.Trainer(options, ranks)
        pairs = [trainer.step(number) for number in range(options.steps)]
        sent = [tuple(of_one[dtype] for dtype in (torch.bfloat16, torch.float32)) for of_one in pairs[-1][1]]
        run: dict[str, Any] = {"losses": [ranks.mean(loss).item() for loss, _ in pairs], "sent": sent}
        traces = tz.traces_of(trainer.model, synced=True)
        run["lines of backward"] = sum(op.backward for op in traces.timeline.ops)
        run["planned"] = example.sent_in_step(traces.plan, micro_batches)
        runs.append(run | {"masked": masked_outputs(trainer)})
    return runs


def masked_outputs(trainer: Any) -> list[float]:
    """What the model makes of the same text: under this rank's stream of random numbers, and under a shared one."""
    windows, outputs = trainer.text[:9].long().repeat(4 // trainer.options.micro_batches, 1), []
    for seed in (None, 7):
        if seed is not None:
            torch.manual_seed(seed)
        output = trainer.model(windows[:, :-1]).square().mean()
        output.backward()
        outputs.append(output.item())
    return outputs


@pytest.mark.slow
def test_zero1_accumulation_sends_once_and_recomputes_the_same_masks(ranks_pool: RanksPool) -> None:
    first, second = ranks_pool.run(2, accumulate, timeout=280.0)
    one, again, four = first
    numel = 258 * 8 + 8 * 8**2 + 11 * 8 + 2 * 8  # all rows divide by 2
    parameters, gradients = 2 * numel // 2, 4 * numel // 2
    assert {run["planned"] for run in first} == {(parameters, gradients)}
    assert one["sent"] == again["sent"] == [(parameters, gradients)]
    assert four["sent"] == [(parameters, 0), (0, 0), (0, 0), (0, gradients)]
    assert again["lines of backward"] > one["lines of backward"]  # which computes forward again,
    assert again["losses"] == pytest.approx(one["losses"], rel=1e-6)  # under the masks that forward drew
    for mine, other in zip(first, second, strict=True):
        own, shared = zip(mine["masked"], other["masked"], strict=True)
        assert own[0] != own[1]
        assert shared[0] == shared[1]


@pytest.mark.slow
def test_the_dry_run_of_a_large_preset() -> None:
    """Each figure by hand, for 1.3 billion parameters, whose rows all divide by 64."""
    example = example_module("zero1_accumulation")
    block = 4 * 2048 + 3 * 2048 * 2049 + 2048 * 2049 + 8192 * 2049 + 2048 * 8193  # norms, qkv, out, up, down
    numel = 50304 * 2048 + 24 * block + 2 * 2048
    assert numel == 1_311_625_216
    whole, rows, gather = 4 * numel, 4 * numel // 64, 2 * numel * 63 // 64
    reduce = 2 * gather
    full = {"parameters": whole, "gradients": whole, "optimizer": 2 * whole, "at rest": 4 * whole}
    cut = {"parameters": rows, "gradients": rows, "optimizer": 2 * rows, "at rest": 4 * rows}
    resident = {"parameters": 2 * numel + rows, "at rest": 2 * numel + 4 * rows}
    assert example.dry_run(example.PRESETS["1.3b"], world_size=64, micro_batches=8) == {
        0: full | {"sent in a step": 2 * reduce},
        1: cut | resident | {"sent in a step": gather + reduce},
        2: cut | {"sent in a step": 8 * gather + reduce},
        3: cut | {"sent in a step": 8 * 2 * gather + reduce},
    }


LLAMA = ("--layers", "1", "--width", "16", "--steps", "3", "--out")


@pytest.mark.slow
def test_hugging_face(tmp_path: Path) -> None:
    """The plain model repeats the loss from one file: in float32, so bfloat16's half unit of 2**-9 is between them."""
    pytest.importorskip("transformers")
    table = table_of(run_example("examples/hugging_face.py", *LLAMA, str(tmp_path)))
    first, last = map(float, table["loss, first and last step"][0].split(", "))
    sharded, dtype = table["loss of the next step's text"]
    plain = float(table["plain model, from one file"][0])
    assert dtype == "sharded, bfloat16"
    assert plain < last < first
    assert float(sharded) == pytest.approx(plain, rel=2**-9)


@pytest.mark.slow
def test_hugging_face_lora(tmp_path: Path) -> None:
    """Only adapters are trained, reduced, and have optimizer state: at rest, two float32 and a step count each."""
    pytest.importorskip("transformers")
    options = ("--stage", "2", "--lora", "4", *LLAMA, str(tmp_path))
    table = table_of(run_example("examples/hugging_face.py", *options))
    adapters = 4 * (16 + 16) + 4 * (16 + 8)  # of q_proj and v_proj: 16 features; two heads of keys and values: 8
    base = 256 * 16 + 2 * 16 * 16 + 2 * 8 * 16 + 3 * 48 * 16 + 3 * 16  # embedding, q and o, k and v, MLP, norms
    assert table["elements this rank trains"][0] == f"{adapters // 2}"
    assert table["parameters per rank, at rest"][0] == f"{4 * (adapters + base) // 2:,}"
    assert table["AdamW per rank, at rest"][0] == f"{8 * adapters // 2 + 4 * 4:,}"
    assert table["gradients reduced in a step"] == (
        f"{4 * adapters}",
        f"bytes, of {4 * adapters} trained and {4 * base:,} frozen",
    )
    assert table["frozen base, in the file"][0] == "equal"
    assert (tmp_path / "hugging_face_lora_stage2.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_wrong_on_purpose() -> None:
    """Each mistake gets its message."""
    printed = run_example("examples/wrong_on_purpose.py", "--stage", "3")
    rows = re.split(r"^[├└].*$", printed, flags=re.MULTILINE)[:-1]
    messages = [" ".join(re.findall(r"^│[^│]*│[^│]*│ (.*?) *│$", row, re.MULTILINE)) for row in rows]
    assert len(messages) == 12
    words = [
        *("moved by", "DistributedDataParallel", "AdamW holds the plain module's", "clip_grad_norm_", "cannot step"),
        *("of the plain module", "(9, 4)", "float64", "was replaced", "does not require grad"),
        *("ZeroTransform as well", "the checkpoint is of another model"),
    ]
    for number, (message, word) in enumerate(zip(messages, words, strict=True), 1):
        assert word in message, (number, message)
