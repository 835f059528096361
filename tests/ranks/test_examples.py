"""The examples, smaller, as a user runs them; examples/train_gpt.py and examples/fabric_litgpt.py have files of their
own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.examples import SECONDS, run_example, table_of


def test_data_parallel_mlp(tmp_path: Path) -> None:
    options = ("--rows", "96", "--width", "16", "--steps", "6", "--stage", "3")
    printed = run_example("examples/data_parallel_mlp.py", *options, "--out", str(tmp_path))
    table = table_of(printed)
    assert set(table) == {"0", "5"}
    assert all(float(apart) < 1e-6 for *_, apart in table.values())
    drawn = re.findall(r"^ZeRO-3 on (\d) ranks?\n +batch +96 rows +(\d+)$", printed, re.MULTILINE)
    assert [(int(count), "".join(dict.fromkeys(row))) for count, row in drawn] == [
        (count, "".join(map(str, range(count)))) for count in (1, 2, 4, 8)
    ]
    assert (tmp_path / "data_parallel_mlp_stage3.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_sequence_mlp(tmp_path: Path) -> None:
    """Biases are replicated; all stages have the same curve."""
    curves = set()
    for stage in (0, 3):
        options = ("--rows", "64", "--width", "32", "--steps", "25", "--stage", str(stage))
        printed = run_example("examples/sequence_mlp.py", *options, "--out", str(tmp_path))
        table = table_of(printed)
        curves.add(round(float(table["step 20"][0]), 5))
        assert float(table["last step"][0]) < float(table["mean squared error, first step"][0])
        assert re.search(r"0\.bias +32 rows +every rank", printed)
        assert (re.search(r"momentum of 0\.weight +32 rows +0+1+$", printed, re.MULTILINE) is None) is (stage == 0)
    assert len(curves) == 1
    assert {path.name for path in tmp_path.iterdir()} >= {"sequence_mlp_adamw_stage3.png"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_wire_protocol(stage: int, tmp_path: Path) -> None:
    table = table_of(run_example("examples/wire_protocol.py", "--stage", str(stage), "--out", str(tmp_path), ranks=3))
    sent = {table[name][0] for name in ("bytes sent in a step, by hand", "by ZeroTransform", "by the formula")}
    assert len(sent) == 1
    assert table["weights of 3 ranks"][0] == table["weights of two runs"][0] == "equal"
    assert float(table["from ZeroTransform's weights"][0]) < 1e-6


@pytest.mark.slow
def test_digits_checkpoint(tmp_path: Path) -> None:
    """Saved by two ranks in ZeRO-3, resumed by one in ZeRO-1; the plain module reads as many digits right."""
    pytest.importorskip("sklearn")
    script, out = "examples/digits_checkpoint.py", ("--out", str(tmp_path))
    first = table_of(run_example(script, "--epochs", "1", *out))
    again = run_example(script, "--epochs", "2", "--stage", "1", "--resume", f"{tmp_path}/digits/latest", *out, ranks=1)
    assert "Resumed after epoch 1" in again
    for table in (first, table_of(again)):
        sharded, everywhere = table["test accuracy, sharded"]
        assert sharded == table["plain module, from one file"][0]
        assert set(re.findall(r"[\d.]+%", everywhere)) == {sharded}


@pytest.mark.slow
def test_resnet(tmp_path: Path) -> None:
    model = ("--blocks", "1", "1", "1", "1", "--width", "4", "--image", "16", "--classes", "5", "--batch", "8")
    options = (*model, "--epochs", "1", "--steps-in-epoch", "4", "--stage", "2", "--out", str(tmp_path))
    table = table_of(run_example("examples/resnet.py", *options))
    for name in ("parameters", "gradients", "momentum"):
        held, formula = table[name][0], table[name][1].removeprefix("by the formula ")
        assert abs(float(held.removesuffix(" MB")) - float(formula.removesuffix(" MB"))) <= 0.01  # uneven rows
    assert (tmp_path / "resnet_stage2.png").exists()


@pytest.mark.slow
def test_zero1_accumulation(tmp_path: Path) -> None:
    """The bytes of an optimizer step do not depend on the number of its micro-batches."""
    script, sent = "examples/zero1_accumulation.py", set()
    for count in (1, 4):
        printed = run_example(script, "--steps", "3", "--micro-batches", str(count), "--out", str(tmp_path))
        table = table_of(printed)
        sent.add((table["bytes sent in it: refresh"][0], table["reduction"][0]))
    assert len(sent) == 1
    printed = run_example(script, "--preset", "1.3b", "--dry-run", "--ranks", "64", ranks=1)
    assert re.search(r"ZeRO-1 +│ +2\.71 │ +0\.08 │ +0\.16 │ +2\.95 │ +7\.75", printed)


LLAMA = ("--layers", "1", "--width", "16", "--steps", "3", "--out")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)  # Thunder traces for long
def test_hugging_face(tmp_path: Path) -> None:
    """The plain model repeats the loss from one file: in float32, so bfloat16's half unit of 2**-9 is between them."""
    pytest.importorskip("transformers")
    table = table_of(run_example("examples/hugging_face.py", *LLAMA, str(tmp_path)))
    first, last = map(float, table["loss, first and last step"][0].split(", "))
    sharded, dtype = table["loss of unseen text, sharded"]
    plain = float(table["plain model, from one file"][0])
    assert dtype == "bfloat16"
    assert plain < last < first
    assert float(sharded) == pytest.approx(plain, rel=2**-9)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)  # Thunder traces for long
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
@pytest.mark.parametrize("stage", [0, 3])
def test_wrong_on_purpose(stage: int) -> None:
    """Each mistake gets its message; in DDP torch's clipping is right, and a second mean changes nothing."""
    printed = run_example("examples/wrong_on_purpose.py", "--stage", str(stage))
    rows = re.split(r"^[├└].*$", printed, flags=re.MULTILINE)[:-1]
    messages = [" ".join(re.findall(r"^│[^│]*│[^│]*│ (.*?) *│$", row, re.MULTILINE)) for row in rows]
    assert len(messages) == 12
    words = [
        *("moved by", "DistributedDataParallel", "AdamW holds the plain module's", "clip_grad_norm_", "cannot step"),
        *("of the plain module", "(9, 4)", "float64", "was replaced", "does not require grad"),
        *("ZeroTransform as well", "the checkpoint is of another model"),
    ]
    for number, (message, word) in enumerate(zip(messages, words, strict=True), 1):
        if number == 4 and stage == 0:
            assert message.strip() == "no message"
        else:
            assert word in message, (number, message)
