"""The examples run with smaller sizes, and print, send and write what their formulas say.

``test_train_gpt.py`` tests the demo, ``test_fsdp_by_hand.py`` the tutorial.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import clip_grad_norm_

import thunder_zero as tz  # before thunder
from tests.harness.as_one_process import gather_objects
from tests.harness.examples import (
    RESTARTING,
    ROOT,
    SECONDS,
    example_module,
    kill_a_rank,
    output_of,
    run_main,
    start,
    table_of,
    torchrun,
)
from tests.harness.models import relative_error
from tests.harness.ranks import RanksPool

pytestmark = pytest.mark.slow


def skip_without(*libraries: str) -> pytest.MarkDecorator:
    missing = [library for library in libraries if importlib.util.find_spec(library) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(libraries)}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


@skip_without("transformers", "peft", "bitsandbytes")
def test_the_programs_of_two_machines_at_home_train_and_merge_an_adapter(tmp_path: Path) -> None:
    """The loss does not depend on whether the base is whole on each machine."""
    page = (ROOT / "docs/two-machines.md").read_text()
    programs = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", page, re.DOTALL))
    commands = re.findall(r"^(?:python|torchrun .*29500) (\w+\.py)(.*?)(?:  #.*)?$", page, re.MULTILINE)
    assert {name for name, _ in commands} == set(programs)
    programs["adapt.py"] = programs["adapt.py"].replace("STEPS, ROWS, LENGTH = 20,", "STEPS, ROWS, LENGTH = 5,")
    (changed,) = re.findall(r"<!-- lines: adapt.py -->\n```python\n(.*?)```", page, re.DOTALL)
    programs["cut.py"] = programs["adapt.py"]
    for line in changed.splitlines():
        before = re.escape(line.partition("(")[0])
        programs["cut.py"], count = re.subn(rf"^{before}\(.*$", line, programs["cut.py"], flags=re.MULTILINE)
        assert count == 1
    for name, program in programs.items():
        (tmp_path / name).write_text(program)
    (tmp_path / "text.txt").write_text(page)
    arguments = dict(commands)
    arguments["cut.py"] = arguments["adapt.py"]
    printed = {}
    for name in ("tiny.py", "link.py", "adapt.py", "cut.py", "merge.py"):
        agent = torchrun() if name in ("link.py", "adapt.py", "cut.py") else (sys.executable,)
        printed[name] = output_of(start("env", "-C", tmp_path, *agent, name, *arguments[name].split()))
    assert re.search(r"rank 1: \d+\.\d\d Gbit/s in each direction", printed["link.py"])
    whole, cut = (re.findall(r"step 5: loss (\S+),", printed[name]) for name in ("adapt.py", "cut.py"))
    assert whole == cut != []
    before, merged = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base", "merged"))
    assert before.keys() == merged.keys()
    assert not torch.equal(*(values["model.layers.0.mlp.up_proj.weight"] for values in (before, merged)))


def test_data_parallel_mlp_under_two_agents(tmp_path: Path) -> None:
    """Start one rank by each agent of torchrun, as on two machines."""
    script = ("examples/data_parallel_mlp.py", "--rows", 96, "--width", 16, "--stage", 3, "--out", tmp_path)
    meeting = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=tests", "--local-addr=localhost")
    store = f"--rdzv-endpoint=localhost:{free_port()}"
    agents = [start(*torchrun(*meeting, store, f"--rdzv-conf=is_host={host}"), *script) for host in (True, False)]
    printed = "".join(map(output_of, agents))  # the rank that is 0 prints
    table = table_of(printed)
    assert set(table) == {"0", "5", "10", "15", "20", "25", "29"}
    assert all(float(difference) < 1e-6 for *_, difference in table.values())
    drawn = re.findall(r"^ZeRO-3 on (\d) ranks?\n +batch +96 rows +(\d+)$", printed, re.MULTILINE)
    owners = {count: "".join(dict.fromkeys(row)) for count, row in drawn}
    assert owners == {"1": "0", "2": "01", "4": "0123", "8": "01234567"}
    assert (tmp_path / "data_parallel_mlp_stage3.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("optimizer", "stages"), [("adamw", (1, 3)), ("momentum", (0, 2))])
def test_sequence_mlp(ranks_pool: RanksPool, tmp_path: Path, optimizer: str, stages: tuple[int, int]) -> None:
    """Check that stages have equal losses, that biases are replicated, and that ZeRO-1 shards momentum alone."""
    options = ("--rows", 64, "--width", 32, "--steps", 25, "--optimizer", optimizer, "--out", tmp_path)
    first, second = (run_main(ranks_pool, "sequence_mlp", *options, "--stage", stage) for stage in stages)
    table = table_of(first)
    assert float(table["last step"][0]) < float(table["mean squared error, first step"][0])
    assert float(table["step 20"][0]) == pytest.approx(float(table_of(second)["step 20"][0]), abs=1e-5)
    drawn = re.findall(r"^  ([\w. ]+?) +\d+ rows +(.+?) *$", first.rpartition(" on 2 ranks")[2], re.MULTILINE)
    cut = {name: "".join(dict.fromkeys(row)) for name, row in drawn if row != "every rank"}
    assert cut == ({"momentum of 0.weight": "01", "momentum of 2.weight": "01"} if stages[0] else {})
    assert len(drawn) == 8
    assert (tmp_path / f"sequence_mlp_{optimizer}_stage{stages[0]}.png").exists()


def test_wire_protocol(ranks_pool: RanksPool, tmp_path: Path) -> None:
    table = table_of(run_main(ranks_pool, "wire_protocol", "--stage", 3, "--out", tmp_path, ranks=3))
    sent = {table[name][0] for name in ("bytes sent in a step, by hand", "by ZeroTransform", "by the formula")}
    assert len(sent) == 1
    assert table["weights of 3 ranks"][0] == table["weights of two runs"][0] == "equal"
    assert float(table["from ZeroTransform's weights"][0]) < 1e-6
    assert (tmp_path / "wire_protocol_stage3.png").exists()


def test_tensor_parallel(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Check the bytes: two layers all-reduce activations twice in forward, and their gradients five times."""
    printed = run_main(ranks_pool, "tensor_parallel", "--steps", 5, "--out", tmp_path, ranks=4)
    table = table_of(printed)
    assert float(table["furthest from one process"][0]) < 1e-5
    assert float(table["loss of the last step"][0]) < float(table["loss of the first step"][0])
    activation = 4 * 64 * 64 * 4  # bytes of this rank's rows
    assert table["bytes sent in a step for slices"] == (f"{2 * (2 + 5) * activation:,}",)
    assert printed.count("_c10d_functional.all_reduce") == 1
    assert (tmp_path / "tensor_parallel_stage3.html").read_text().count("of slices") > 1


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="torch names operators")
def test_last_traces_prints_what_the_page_on_capture_shows() -> None:
    # In a process of its own: after other models dynamo may make sizes of a Linear symbols.
    printed = output_of(start(*torchrun(), "examples/last_traces.py")).splitlines()
    (shown,) = re.findall(r"```\n(# plain.*?)```", (ROOT / "docs/capture.md").read_text(), flags=re.DOTALL)
    lines = [line for line in shown.splitlines() if line != "..."]
    assert [line for line in lines if line not in printed] == []
    assert [line for line in lines if line.startswith("# ")] + ["# forward", "# backward"] == [
        line for line in printed if line.startswith("# ")
    ]
    assert printed[-1] == "1 program compiled, 1 call"


@skip_without("sklearn")
def test_digits_checkpoint(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Save on two ranks in ZeRO-3, resume on one in ZeRO-1; the plain module has an equal accuracy."""
    name, out = "digits_checkpoint", ("--out", tmp_path)
    first = table_of(run_main(ranks_pool, name, "--epochs", 1, *out))
    sharded, everywhere = first["test accuracy, sharded"]
    assert sharded == first["plain module, from one file"][0]
    assert set(re.findall(r"[\d.]+%", everywhere)) == {sharded}
    changes = ("--stage", 1, "--dtype", "bfloat16", "--activation-checkpointing")
    resume = ("--resume", tmp_path / "digits/latest")
    resumed = run_main(ranks_pool, name, "--epochs", 2, *changes, *resume, *out, ranks=1)
    assert "Resumed after epoch 1" in resumed
    second = table_of(resumed)
    accuracies = [float(second[name][0][:-1]) for name in ("test accuracy, sharded", "plain module, from one file")]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=2)  # bfloat16 and float32 read a few digits differently
    assert "computes in float32" in second["plain module, from one file"][1]


def test_resnet(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Train with 5 classes on 2 ranks, which pads the head's last shard, and with 7 images, which become 8."""
    model = ("--blocks", 1, "--width", 8, "--image", 16, "--classes", 5, "--batch", 7)
    options = (*model, "--epochs", 1, "--steps-in-epoch", 3, "--stage", 2, "--out", tmp_path)
    table = table_of(run_main(ranks_pool, "resnet", *options))
    for name in ("parameters", "gradients", "momentum"):
        assert mb_of(table[name][0]) == pytest.approx(mb_of(table[name][1]), abs=0.01)  # by the formula; uneven rows
    measured, foreseen = map(mb_of, table["at the peak of a step"])
    held = ("parameters", "momentum", "buffers", "gathered, and gradients")
    assert foreseen == pytest.approx(sum(mb_of(table[name][0]) for name in held), abs=0.02)
    assert foreseen < measured  # only what is measured has the activations
    assert table["parameters with uneven rows"] == ("2", "of 17")
    assert (tmp_path / "resnet_stage2.png").exists()


def mb_of(cell: str) -> float:
    """Return the first number of megabytes in a cell."""
    return float(re.findall(r"([\d.]+) MB", cell)[0])


def test_zero1_accumulation(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Check that ZeRO-3 gathers in every micro-batch, and reduces gradients once."""
    options = ("--stage", 3, "--steps", 2, "--micro-batches", 2, "--out", tmp_path)
    table = table_of(run_main(ranks_pool, "zero1_accumulation", *options))
    sent_numel = (257 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64 - 64) // 2  # rank 1 has 128 rows of the embedding
    assert table["bytes sent in it: gradients"] == (f"{4 * sent_numel:,}", "in micro-batch 2 alone")
    assert table["gradients, by the plan"][0] == f"{4 * sent_numel:,}"
    names = ("bytes sent in it: parameters", "parameters, by the plan")
    sent, most = (int(table[name][0].replace(",", "")) for name in names)
    assert 2 * 2 * sent_numel < sent <= most <= 4 * 2 * (sent_numel + 64)
    assert table["different dropout masks"] == ("2", "on 2 ranks")
    assert (tmp_path / "zero1_accumulation_stage3.png").exists()


def accumulate(rank: int, world_size: int) -> None:
    """Check that a step of ZeRO-1 sends what is planned, also in micro-batches, and recomputes with equal masks."""
    example = example_module("zero1_accumulation")
    config = example.AlibiConfig(1, 8, 16, 2, vocabulary=258)
    example.PRESETS["smaller"] = example.Preset(config, 8, 8, (4e-3, 4e-4), 2)
    ranks, losses, lines = example.Ranks(rank, world_size, torch.device("cpu")), [], []
    numel = 258 * 8 + 8 * 8**2 + 11 * 8 + 2 * 8  # all rows divide by 2
    gathered, reduced = 2 * numel // 2, 4 * numel // 2
    for micro_batches, recompute in ((1, False), (1, True), (4, False)):
        options = argparse.Namespace(preset="smaller", stage=1, steps=5, seed=0, micro_batches=micro_batches)
        options.activation_checkpointing = recompute
        trainer = example.Trainer(options, ranks)
        pairs = [trainer.step(number) for number in range(options.steps)]
        losses.append([ranks.mean(loss).item() for loss, _ in pairs])
        sent = [(by_dtype[torch.bfloat16], by_dtype[torch.float32]) for by_dtype in pairs[-1][1]]
        idle = [(0, 0)] * (micro_batches - 2)
        expected = [(gathered, 0), *idle, (0, reduced)] if micro_batches > 1 else [(gathered, reduced)]
        assert sent == expected, (micro_batches, recompute, sent)
        traces = tz.traces_of(trainer.model, synced=True)
        assert example.sent_in_step(traces.plan, micro_batches) == (gathered, reduced)
        lines.append(sum(op.backward for op in traces.timeline.ops))
        assert have_equal_masks(trainer) == [False, True], "ranks draw masks of their own"
    assert lines[1] > lines[0], "backward computes forward again"
    assert losses[1] == pytest.approx(losses[0], rel=1e-6), "recomputed masks differ"


def have_equal_masks(trainer: Any) -> list[bool]:
    """Return whether ranks have equal outputs: with their own random numbers, and with a common seed."""
    windows, are_equal = trainer.text[:9].long().repeat(4 // trainer.options.micro_batches, 1), []
    for seed in (None, 7):
        if seed is not None:
            torch.manual_seed(seed)
        output = trainer.model(windows[:, :-1]).square().mean()
        output.backward()
        are_equal.append(len(set(gather_objects(output.item()))) == 1)
    return are_equal


def test_zero1_accumulation_sends_once_and_recomputes_the_same_masks(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, accumulate, timeout=SECONDS)


LLAMA = ("--layers", 1, "--width", 16, "--steps", 3, "--out")


@skip_without("transformers")
def test_hugging_face(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Check that the plain model repeats the loss from one file, within bfloat16's half unit of 2**-9."""
    table = table_of(run_main(ranks_pool, "hugging_face", *LLAMA, tmp_path))
    first, last = map(float, table["loss, first and last step"][0].split(", "))
    sharded, dtype = table["loss of the next step's text"]
    plain = float(table["plain model, from one file"][0])
    assert dtype == "sharded, bfloat16"
    assert plain < last < first
    assert float(sharded) == pytest.approx(plain, rel=2**-9)


@skip_without("transformers")
def test_hugging_face_lora(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Check that only adapters are trained and reduced, and have an optimizer state of two float32 and a count."""
    table = table_of(run_main(ranks_pool, "hugging_face", "--stage", 2, "--lora", 4, *LLAMA, tmp_path))
    adapters = 4 * (16 + 16) + 4 * (16 + 8)  # of q_proj and v_proj: 16 features; two heads of keys and values: 8
    base = 256 * 16 + 2 * 16 * 16 + 2 * 8 * 16 + 3 * 48 * 16 + 3 * 16  # embedding, q and o, k and v, MLP, norms
    assert table["elements this rank trains"][0] == f"{adapters // 2}"
    assert table["parameters per rank, at rest"][0] == f"{4 * (adapters + base) // 2:,}"
    assert table["AdamW per rank, at rest"][0] == f"{8 * adapters // 2 + 4 * 4:,}"
    reduced = f"bytes, of {4 * adapters} trained and {4 * base:,} frozen"
    assert table["gradients reduced in a step"] == (f"{4 * adapters}", reduced)
    assert table["frozen base, in the file"][0] == "equal"
    assert (tmp_path / "hugging_face_lora_stage2.png").exists()


LINES = ["import os", "def first(value):", "    return value + 1", "x = 3"]


def compute_packed_lines(rank: int, world_size: int) -> None:
    """Check that lines packed into a row have the loss of separate lines, also in the sharded model."""
    example, transformers = example_module("fine_tune"), importlib.import_module("transformers")
    tokenizer = transformers.ByT5Tokenizer()
    rows = example.rows_of(LINES, tokenizer, 64)
    lengths = [len(row["labels"]) for row in rows]
    batch = transformers.default_data_collator(example.packed(rows, sum(lengths)))
    separate = transformers.DataCollatorForSeq2Seq(tokenizer)(rows)  # pads by 0, and labels by -100
    assert separate["labels"].shape == separate["attention_mask"].shape == (len(LINES), max(lengths))
    plain = example.make_llama(argparse.Namespace(seed=0, context=64), tokenizer)
    expected = plain(**separate).loss
    torch.testing.assert_close(plain(**batch).loss, expected)
    torch.testing.assert_close(tz.compile(plain, 3)(**batch).loss, expected)
    assert (separate["labels"] != -100).sum() == sum(length - length // 2 for length in lengths)


@skip_without("transformers")
def test_packed_lines_do_not_see_each_other(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, compute_packed_lines, timeout=SECONDS)


@skip_without("transformers", "accelerate")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a rank's process in /proc")
def test_fine_tuning_goes_on_after_a_rank_is_killed(tmp_path: Path) -> None:
    """Kill rank 1 after a checkpoint; check that losses and text equal those of an undisturbed run."""
    steps, options = 10, ("--save-steps", 2, "--batch", 2, "--context", 24)
    agent = (*RESTARTING, *torchrun("--standalone", "--nproc-per-node", 2, "--max-restarts", 1))
    runs = [
        start(
            *agent,
            "examples/fine_tune.py",
            "--steps",
            steps,
            *options,
            "--out",
            tmp_path / name,
        )
        for name in ("killed", "whole")
    ]
    kill_a_rank(runs[0], lambda: list(tmp_path.glob("killed/fine_tune/checkpoint-*/trainer_state.json")))
    killed, whole = map(output_of, runs)
    assert [text.count("compiled forward and backward") for text in (killed, whole)] == [2, 1]
    losses, expected = (re.findall(r"^step (\d+): loss (\S+)$", text, re.MULTILINE) for text in (killed, whole))
    assert losses == expected
    assert [int(step) for step, _ in expected] == list(range(1, steps + 1))
    assert len(re.findall("'learning_rate': '?0.003'?,", killed)) == 1, "only the first run took step 1"
    generated = [re.findall(r"^generated: (.+)$", text, re.MULTILINE) for text in (killed, whole)]
    assert generated[0] == generated[1]
    assert generated[0][0].startswith("'import ")


@skip_without("accelerate")
def test_accelerates_loop_prints_the_lines_of_ddp(tmp_path: Path) -> None:
    """Compare with Accelerate's own DDP, and with a run that another stage's state resumes."""
    resume = ("--resume", tmp_path / "sharded/accelerate_loop/epoch-0", "--stage", 1)
    printed = [
        output_of(start(*torchrun(), "examples/accelerate_loop.py", "--epochs", 2, "--out", tmp_path / name, *options))
        for name, options in (("plain", ("--plain",)), ("sharded", ()), ("resumed", resume))
    ]
    plain, sharded, resumed = (re.findall(r"^(?:epoch|one file).*$", text, re.MULTILINE) for text in printed)
    assert len(plain) == 2 * (7 + 1) + 1, plain  # 203 rows are 13 batches on each of 2 ranks
    for lines, expected in ((sharded, plain), (resumed, plain[7 + 1 :])):
        for line, expected_line in zip(lines, expected, strict=True):
            assert numbers_in(line) == pytest.approx(numbers_in(expected_line), abs=2e-6), (line, expected_line)
    assert plain[-1] == "one file, of 234 numbers: equal"
    assert "45 rows" in plain[-2], "padding of the last batch counts in a metric"


def numbers_in(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)]


def test_wrong_on_purpose(ranks_pool: RanksPool) -> None:
    """Check that each mistake gets its message."""
    printed = run_main(ranks_pool, "wrong_on_purpose", "--stage", 3)
    rows = re.split(r"^[├└].*$", printed, flags=re.MULTILINE)[:-1]
    messages = [" ".join(re.findall(r"^│[^│]*│[^│]*│ (.*?) *│$", row, re.MULTILINE)) for row in rows]
    words = [
        *("does not have a sharding strategy", "DistributedDataParallel", "AdamW holds the plain module's"),
        *("cannot step", "mixed torch.Tensor and DTensor"),
        *("(9, 4)", "float64", "was replaced", "does not require grad"),
        *("ZeroTransform as well", "the checkpoint has another model"),
    ]
    for word, message in zip(words, messages, strict=True):
        assert word in message


def test_parts_of_examples() -> None:
    """Check the standard ResNet, its learning rates, and momentum's first velocities, which small runs do not reach."""
    resnet, sequence = example_module("resnet"), example_module("sequence_mlp")
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in resnet.ResNet((3, 4, 6, 3), 64, 1000).parameters()]
    assert (len(sizes), sum(sizes)) == (161, 25_557_032)
    rates = {epoch: 0.4 * resnet.learning_rate_at(epoch) for epoch in (0, 2.5, 5, 29, 30, 60, 89)}
    assert rates == pytest.approx({0: 0, 2.5: 0.2, 5: 0.4, 29: 0.4, 30: 0.04, 60: 0.004, 89: 0.004})
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = sequence.optimizer_of("momentum", [parameter])
    optimizer.step()
    optimizer.step()  # velocities 0.1 and 0.9 * 0.1 + 0.1
    assert parameter.tolist() == pytest.approx([-0.01 * (0.1 + 0.19)] * 2)


def test_the_dry_run_of_a_large_preset() -> None:
    """Compare with figures by hand for 1.3 billion parameters, whose rows all divide by 64."""
    example = example_module("zero1_accumulation")
    numel = 1_311_625_216
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


# LitGPT's model in Lightning Fabric, whose own launcher starts the second rank

STEPS, ROWS, CONTEXT = 3, 2, 16  # rows on each rank


def train_litgpt(rank: int, world_size: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train on both ranks' rows with plain torch; return losses and norms by step, and the final weights."""
    example = example_module("fabric_litgpt")
    torch.manual_seed(example.SEED)
    model, lines = example.GPT(example.config_of(None, CONTEXT)), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for number in range(STEPS):
        shape = example.Shape(2 * ROWS, CONTEXT, 0, 1)
        optimizer.zero_grad()
        loss = example.loss_of(model, example.train_batch(example.load_text(), number, shape, example.SEED))
        loss.backward()
        lines.append((loss.item(), clip_grad_norm_(model.parameters(), 1.0).item()))
        optimizer.step()
    return lines, model.state_dict()


@skip_without("lightning", "litgpt")
def test_fabric_litgpt(ranks_pool: RanksPool, tmp_path: Path) -> None:
    sizes = {"steps": STEPS, "micro-batches": 1, "rows": ROWS, "context": CONTEXT, "out": tmp_path / "model.pt"}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    run = start(sys.executable, "examples/fabric_litgpt.py", *options)
    ((lines, weights),) = ranks_pool.run(1, train_litgpt, timeout=SECONDS)
    printed = output_of(run)
    assert re.search(r"gather +transformer\.h\.1", printed)
    printed_lines = [tuple(map(float, line)) for line in re.findall(r"step \d: loss (\S+), norm (\S+)", printed)]
    assert printed_lines == [pytest.approx(line, rel=2e-5) for line in lines]
    saved = torch.load(tmp_path / "model.pt")
    assert saved["steps"] == STEPS
    assert saved["model"].keys() == weights.keys()
    assert max(relative_error(saved["model"][name], weights[name]) for name in weights) <= 1e-5
