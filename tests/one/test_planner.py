"""A model whose alike blocks are repeated has exactly the figures of the same model traced whole; what a plan says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from thunder_zero.cli import main
from thunder_zero.forecast.kinds import Holds
from thunder_zero.planner.advise import best_of
from thunder_zero.planner.code import code_of
from thunder_zero.planner.figures import Row
from thunder_zero.planner.meshes import Mesh
from thunder_zero.planner.models import KNOWN, cross_entropy
from thunder_zero.planner.programs import Choice, Programs, adamw
from thunder_zero.planner.reason import reason_of
from thunder_zero.planner.step import estimate_whole
from thunder_zero.planner.subject import Subject, of_module, subject_of

pytestmark = pytest.mark.slow

H100 = tz.DEVICES["h100"]
PRECISION = tz.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
BLOCKS = 9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Small(nn.Module):
    """An embedding larger than a block, blocks, and a head."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(41, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(6, 41)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def subject() -> Subject:
    with torch.device("meta"):
        return of_module(Small(), torch.empty(2, 3, dtype=torch.long), loss=cross_entropy)


@cache
def programs() -> Programs:
    return Programs(subject(), PRECISION, 2, lambda what: None)


@cache
def whole(choice: Choice, mesh: Mesh) -> tuple[tz.Traces, tz.Memory]:
    """By the public functions."""
    module, inputs = programs().subject.module, programs().subject.inputs
    policy = programs().policy(choice)
    traces = tz.trace(module, *inputs, policy=policy, world_size=mesh.shards, replicas=mesh.replicas)
    return traces, tz.memory(traces, loss=cross_entropy, optimizer=adamw, backend="nccl")


CHOICES = ((0, "cheap"), (2, "units"), (3, "none"))
CASES = [(Choice(*choice), Mesh(1, 2)) for choice in CHOICES]
CASES += [(Choice(1, "cheap"), Mesh(1, 4)), (Choice(3, "cheap"), Mesh(2, 4))]  # 4: uneven rows


@pytest.mark.parametrize(("choice", "mesh"), CASES, ids=[f"{one.stage}-{one.recompute}-{on}" for one, on in CASES])
def test_repeated_blocks_have_the_figures_of_the_model_traced_whole(choice: Choice, mesh: Mesh) -> None:
    found = programs().evaluate(choice, mesh, H100, fused=False)
    assert found.traced < BLOCKS
    traces, memory = whole(choice, mesh)
    exact = tz.estimate(traces, H100)
    assert (found.estimate.sent_bytes, found.estimate.flops) == (exact.sent_bytes, exact.flops)
    assert sum(cost.traffic_bytes for cost in found.estimate.costs) == sum(cost.traffic_bytes for cost in exact.costs)
    for name in ("seconds", "compute_seconds", "exposed_seconds", "model_seconds", "mfu"):
        assert getattr(found.estimate, name) == pytest.approx(getattr(exact, name), rel=1e-9, abs=1e-15)
    assert found.estimate.wire_seconds == pytest.approx(exact.wire_seconds, rel=1e-9)
    held = found.held
    assert (held.at_rest, held.peak, held.optimizer_step) == (memory.at_rest, memory.peak, memory.optimizer_step)
    assert held.half == memory.peak_line.half
    assert dict(held.by_kind) == {str(kind): nbytes for kind, nbytes in memory.peak_line.alive.items() if nbytes}


@pytest.mark.parametrize("stage", [0, 3])
def test_so_have_fused_kernels(stage: int) -> None:
    choice = Choice(stage, "cheap")
    found = programs().evaluate(choice, CASES[0][1], H100).estimate
    exact = estimate_whole(whole(choice, CASES[0][1])[0], H100, (), 0, fused=True)
    assert sum(cost.traffic_bytes for cost in found.costs) == sum(cost.traffic_bytes for cost in exact.costs)
    assert found.seconds == pytest.approx(exact.seconds, rel=1e-9)
    lines = sum(cost.traffic_bytes for cost in tz.estimate(whole(choice, CASES[0][1])[0], H100).costs)
    assert sum(cost.traffic_bytes for cost in found.costs) < lines


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("gpt-1.3b", 1_313_525_760),
    ],
)
def test_models_have_their_parameters(name: str, parameters: int) -> None:
    known = KNOWN[name]
    with torch.device("meta"):
        module = known.make(known.sizes)
    assert sum(param.numel() for param in module.parameters()) == parameters


def plan(memory_bytes: int = 80 << 30, **how: Any) -> tz.TrainingPlan:
    one = subject()
    how = {"world_size": 4, "device": "h100", "devices_per_node": 2, "loss": one.loss, **how}
    return tz.plan_training(one.module, *one.inputs, memory_bytes=memory_bytes, **how)


def test_a_plan_compares_stages_and_meshes_and_its_code_is_the_policy_of_its_figures() -> None:
    found = plan()
    assert [(row.stage, str(row.mesh)) for row in found.rows] == [
        (0, "4"),
        (1, "2 x 2"),
        (1, "4"),
        (2, "2 x 2"),
        (2, "4"),
        (3, "2 x 2"),
        (3, "4"),
    ]
    assert all(row.fits and row.recompute == "none" and row.traced_blocks < BLOCKS for row in found.rows)
    assert found.chosen is not None
    assert found.chosen.tokens_per_second >= 0.995 * max(row.tokens_per_second for row in found.rows)
    assert found.tokens == 6
    assert f"{found.chosen.name} ranks is " in found.reason
    assert "the fastest of 7 that fit into 80.0 GiB" in found.reason
    assert found.reason.count(". ") == 0
    names: dict[str, Any] = {}
    compile(found.code, "pasted", "exec")
    exec(found.code.partition("module = ")[0], names)
    choice = Choice(found.chosen.stage, found.chosen.recompute)
    assert names["policy"] == programs().policy(choice)
    assert plan(stages=(3,)).rows == found.rows[5:]


def test_a_step_has_the_traffic_of_the_loss_and_of_adamw() -> None:
    row = plan(stages=(0,)).rows[0]
    parameters = sum(param.numel() for param in subject().module.parameters())
    assert row.optimizer_seconds == pytest.approx(7 * 4 * parameters / 3.35e12)
    assert row.loss_seconds * 3.35e12 > 32 * 6 * 41  # bytes of each logit: casts, softmax and gradients
    parts = row.compute_seconds + row.exposed_seconds + row.loss_seconds + row.optimizer_seconds
    assert row.seconds == pytest.approx(parts)


def test_what_does_not_fit_as_it_is_computes_again() -> None:
    rows = plan(stages=(3,)).rows
    tight = plan(max(row.needed_bytes for row in rows) - 1, stages=(3,)).rows
    assert [row.recompute for row in tight] != [row.recompute for row in rows]
    assert all(one.needed_bytes <= other.needed_bytes for one, other in zip(tight, rows, strict=True))


def test_if_nothing_fits_the_reason_says_the_least_and_what_would_help() -> None:
    found = plan(1 << 30)
    assert (found.chosen, found.code) == (None, "")
    least = min(row.needed_bytes for row in found.rows)
    assert found.reason.startswith("nothing fits into 1.00 GiB: the least, ZeRO-")
    assert f"takes {least / 2**30:.2f} GiB" in found.reason
    assert found.reason.endswith("; neither more ranks nor a smaller batch alone would help")  # CUDA's context is 1 GiB


def test_a_module_without_alike_blocks_is_traced_whole() -> None:
    with torch.device("meta"):
        module, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.empty(3, 4)
    found = tz.plan_training(module, x, world_size=2, stages=(3,), memory_bytes=80 << 30)
    assert (found.blocks, found.tokens, found.rows[0].loss_seconds) == (0, 3, 0.0)
    assert found.reason == "ZeRO-3 on 2 ranks is the only one that was compared, and fits into 80.0 GiB"
    assert "float32 shards" in found.assumed[2]
    assert "the loss is left out, since" in found.assumed[2]
    assert "\nmodule = ...  # yours: the Sequential that was planned\n" in found.code
    compile(found.code, "pasted", "exec")


class Scalar(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[1](self[0](x)).sum()
        return y


def test_a_number_that_the_model_returns_is_its_loss_and_shards_have_the_dtypes_of_the_parameters() -> None:
    with torch.device("meta"):
        module, x = Scalar(nn.Linear(4, 8), nn.Linear(8, 2, dtype=torch.bfloat16)), torch.empty(3, 4)
    found = tz.plan_training(module, x, world_size=1, stages=(3,))
    assert "the one number that the model returns is its loss" in found.assumed[2]
    assert "; float32 and bfloat16 shards and " in found.assumed[2]
    assert found.reason.startswith("ZeRO-3 on 1 rank is the only one")


def row(stage: int, tokens: float, needed: int = 40, shards: int = 8, **other: Any) -> Row:
    """Made up; a step takes 1 s. Memory in GiB."""
    kinds = {str(kind): nbytes << 30 for kind, nbytes in other.pop("kinds", {}).items()}
    figures = {
        "recompute": "none",
        "fits": needed <= 80,
        "peak_half": "backward",
        **dict.fromkeys(("sent_bytes", "traced_blocks"), 1),
        **dict.fromkeys(("compute_seconds", "exposed_seconds", "loss_seconds", "optimizer_seconds", "mfu"), 0.1),
    }
    nbytes = dict.fromkeys(("needed_bytes", "peak_bytes", "at_rest_bytes"), needed << 30)
    rest = {"by_kind": kinds, "seconds": 1.0, "tokens_per_second": tokens, **nbytes}
    return Row(stage=stage, mesh=Mesh(1, shards), **{**figures, **rest, **other})


def reason(*rows: Row, batch: int = 1) -> str:
    return reason_of(rows, best_of(rows), 80 << 30, batch)


def test_the_reason_says_whether_the_row_is_the_fastest_or_nearly() -> None:
    assert reason(row(1, 100), row(3, 101)) == "ZeRO-3 on 8 ranks is the fastest of 2 that fit into 80.0 GiB"
    assert reason(row(1, 100.1, needed=60), row(3, 100)) == (
        "ZeRO-3 on 8 ranks is within 0.5% of the fastest of 2 that fit into 80.0 GiB, "
        "and needs the least memory of those"
    )
    assert reason(row(2, 100), row(3, 101, needed=90)) == "ZeRO-2 on 8 ranks is the only one that fits into 80.0 GiB"
    assert reason(row(3, 100)) == "ZeRO-3 on 8 ranks is the only one that was compared, and fits into 80.0 GiB"


@pytest.mark.parametrize(
    ("slower", "sentence"),
    [
        ({"compute_seconds": 0.3}, "it computes 200 ms longer"),
        ({"exposed_seconds": 0.3, "compute_seconds": 0.2}, "200 ms more of communication are exposed"),
        ({"loss_seconds": 0.3}, "the loss takes 200 ms longer"),
        ({"optimizer_seconds": 0.3, "exposed_seconds": 0.2}, "the optimizer takes 200 ms longer"),
        (
            {"compute_seconds": 0.3, "recompute": "units"},
            "it computes 200 ms longer, as it has to recompute='units' to fit",
        ),
        (
            {"exposed_seconds": 0.3, "recompute": "cheap"},
            "200 ms more of communication are exposed, and it has to recompute='cheap' to fit",
        ),
    ],
)
def test_the_reason_says_what_makes_another_row_slower(slower: dict[str, Any], sentence: str) -> None:
    assert reason(row(2, 90, **slower), row(3, 100)).endswith(f": ZeRO-2 on 8 is 10% slower, where {sentence}")


def test_if_nothing_fits_only_what_helps_is_offered() -> None:
    kinds = {Holds.OPTIMIZER: 40, Holds.SAVED: 40}
    needs_ranks = "about 16 ranks would be needed, as they share 40.0 GiB of it"
    half = "half the batch saves about 20.0 GiB"
    assert reason(row(3, 1, 100, kinds=kinds)).endswith(f"takes 100 GiB, 20.0 GiB more; {needs_ranks}")
    assert reason(row(3, 1, 100, kinds=kinds), batch=2).endswith(f"; {needs_ranks}, {half}")
    assert reason(row(0, 1, 100, kinds=kinds), batch=2).endswith(f"20.0 GiB more; {half}")  # each rank of DDP holds all
    none = "; neither more ranks nor a smaller batch alone would help"
    assert reason(row(3, 1, 130, kinds=kinds), batch=2).endswith(none)
    stepping = row(0, 1, 100, kinds=kinds, peak_half="optimizer step")
    assert reason(stepping, batch=2).endswith(none)


def test_the_batch_of_a_file_and_of_one_sequence_cannot_be_halved(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 4), torch.empty(6, 4)\n")
    assert [subject_of(name, None, 1).batch for name in (f"{file}:build", "gpt-1.3b")] == [1, 1]
    assert subject_of("gpt-1.3b", None, 4).batch == 4
    assert subject_of(f"{file}:build", None, 1).build == f"module = ...  # yours: {file}:build returns it"


def test_the_code_of_a_model_by_name_makes_it() -> None:
    policy = tz.Policy(3, bucket_bytes=1, in_flight_bytes=1, prefetch=1)
    hybrid = replace(row(3, 1), mesh=Mesh(2, 8))
    code = code_of(hybrid, policy, subject_of("llama3-8b", 16, 1).build)
    compile(code, "pasted", "exec")
    names: dict[str, Any] = {}
    exec(code.partition("module = ")[0], names)
    assert names["policy"].stage == 3
    assert callable(names["init_device_mesh"])
    with torch.device("meta"):
        exec("module = " + code.partition("module = ")[2].partition("mesh = ")[0], names)
    assert names["module"].cosines.shape == (16, 128)


@pytest.mark.parametrize("stages", [(), (5,), 3, (True,), "3"])
def test_it_refuses_stages(stages: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"stages is {stages!r}; give some of 0, 1, 2 and 3")):
        plan(stages=stages)


@pytest.mark.parametrize(
    ("how", "error", "sentence"),
    [
        ({"model": 3}, TypeError, "model is of type int; give a torch.nn.Module, a name"),
        ({"device": None}, TypeError, "device is of type NoneType; give a100"),
        ({"devices_per_node": 0}, ValueError, "devices_per_node is 0; give the number of devices of a node"),
        ({"devices_per_node": 2.0}, ValueError, "devices_per_node is 2.0; give the number"),
        ({"micro_batch": 2}, ValueError, "micro_batch belongs to models by name; change the shapes of the inputs"),
        ({"sequence_length": 2}, ValueError, "sequence_length belongs to models by name"),
        (
            {"model": "gpt-1.3b", "loss": torch.sum},
            ValueError,
            "gpt-1.3b comes with inputs and a loss; give loss= with",
        ),
        ({"model": nn.ReLU()}, ValueError, "ReLU has no parameter that requires a gradient"),
    ],
)
def test_it_refuses_options_in_one_sentence(how: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(sentence)):
        tz.plan_training(**{"model": nn.Linear(2, 2), "world_size": 8, **how})
    with pytest.raises(ValueError, match="give inputs with a module alone"):
        tz.plan_training("gpt-1.3b", torch.zeros(1), world_size=8)


def test_the_list_of_blocks_is_as_it_was() -> None:
    one = subject()
    before = dict(one.module.named_modules())
    with one.with_blocks(3) as module:
        assert len(list(module.get_submodule("blocks").children())) == 3
    assert dict(one.module.named_modules()) == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "llama9"], "there is no model 'llama9'; choose llama3-8b, llama3-70b"),
        (["--model", "gpt-1.3b", "--device", "h9"], "there is no device 'h9'; choose a100, h100"),
        (["--model", "gpt-1.3b", "--memory", "much"], "'much' is no amount of memory; give a number with a unit, such"),
        (
            ["--model", "gpt-1.3b", "--memory", "40"],
            "'40' is an amount of memory without a unit; give it one, such as 40GiB or 40GB",
        ),
        (
            ["--model", "gpt-1.3b", "--world-size", "12"],
            "12 ranks do not fill nodes of 8 devices; give a multiple of 8",
        ),
        (["--model", "gpt-1.3b", "--world-size", "0"], "world_size is 0; give the number of ranks, at least 1"),
        (["--model", "gpt-1.3b", "--micro-batch", "0"], "micro_batch is 0; give a number of sequences, at least 1"),
        (["--model", "no.py:build"], "there is no file no.py; give FILE.py:function"),
        (["--model", "gpt-1.3b", "--sequence-length", "-1"], "sequence_length is -1; give a number of tokens"),
    ],
)
def test_it_refuses(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--world-size", "8", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"thunder-zero: {sentence}")


def test_the_page_answers_which_stage_trains_13_b_on_four_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    (program,) = re.findall(r"<!-- file: thirteen.py -->\n```python\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "thirteen.py"
    file.write_text(program)
    assert main(["plan", "--model", f"{file}:build", "--world-size", "4", "--memory", "80GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == pytest.approx(13e9, rel=0.02)
    assert found["chosen"]["stage"] == 3
    assert [row["stage"] for row in found["rows"] if row["fits"]] == [2, 3]
    assert f"{found['chosen']['tokens_per_second']:,.0f}" in page
    assert f"{found['reason'].split(':')[0]}" in page.replace("\n", " ")


def test_it_refuses_what_a_function_returns_and_sizes_that_are_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.py"
    file.write_text("def build():\n    return 1\n")
    assert main(["plan", "--world-size", "8", "--model", f"{file}:build"]) == 1
    assert "returns int; return a tuple of the module and its inputs" in capsys.readouterr().err
    assert main(["plan", "--world-size", "8", "--model", f"{file}:build", "--micro-batch", "2"]) == 1
    assert "makes its own inputs; change their shapes there" in capsys.readouterr().err
