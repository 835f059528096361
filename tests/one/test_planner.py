"""A model whose alike blocks are repeated has exactly the figures of the same model traced whole; what a plan says."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.traced import Chain, ResidualBlock, traced
from thunder_zero.tools.cli import main
from thunder_zero.tools.forecast.figures import Holds
from thunder_zero.tools.models.decoder import DecoderSizes, Llama
from thunder_zero.tools.models.named import LLAMA_STYLES, cross_entropy
from thunder_zero.tools.planner.plan_training import OWN_SLICES, best_of
from thunder_zero.tools.planner.programs import SubjectPrograms, adamw
from thunder_zero.tools.planner.slicing import sliced_copy
from thunder_zero.tools.planner.subject import Subject, of_module, subject_of
from thunder_zero.tools.planner.training_plan import MeshShape, PlanRow, code_of, reason_of

H100 = tz.tools.DEVICES["h100"]
PRECISION = tz.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
BLOCKS, ROOM = 7, 80 << 30
SHAPE = (2, 3)


def squared_relu(x: Tensor) -> Tensor:
    """Two pointwise lines in a row, which a fuser would make one."""
    return torch.relu(x).square()


def model(blocks: int = BLOCKS) -> nn.Module:
    """An embedding larger than a block, blocks, and a head."""
    return Chain(nn.Embedding(99, 6), Chain(*(ResidualBlock(6, squared_relu) for _ in range(blocks))), nn.Linear(6, 99))


def subject(blocks: int = BLOCKS) -> Subject:
    with torch.device("meta"):
        return of_module(model(blocks), (torch.empty(SHAPE, dtype=torch.long),), loss=cross_entropy)


@cache
def programs() -> SubjectPrograms:
    return SubjectPrograms(subject(), tz.Policy(mixed_precision=PRECISION), 2, H100, lambda what: None)


# Four ranks do not divide six rows.
CASES = [
    (0, "none", MeshShape(1, 2)),
    (1, "cheap", MeshShape(1, 4)),
    (2, "units", MeshShape(1, 2)),
    (3, "cheap", MeshShape(2, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "recompute", "mesh"), CASES, ids=str)
def test_repeated_blocks_have_the_figures_of_the_model_traced_whole(
    stage: int, recompute: str, mesh: MeshShape
) -> None:
    policy = programs().policy(stage, recompute)
    on = {"world_size": mesh.shards, "replicas": mesh.replicas, "dtype": torch.long}
    traces = traced(model, SHAPE, policy, **on)
    found = programs().evaluate(policy, mesh)
    assert found.traced < BLOCKS
    exact = tz.tools.estimate(traces, H100)
    assert (found.estimate.sent_bytes, found.estimate.flops) == (exact.sent_bytes, exact.flops)
    for name in ("seconds", "compute_seconds", "exposed_seconds", "model_seconds", "mfu"):
        assert getattr(found.estimate, name) == pytest.approx(getattr(exact, name), rel=1e-9, abs=1e-15)
    assert found.estimate.wire_seconds == pytest.approx(exact.wire_seconds, rel=1e-9)
    # What tz.compile runs by default is not fused.
    assert traffic(found.estimate) == traffic(exact) > traffic(tz.tools.estimate(traces, H100, fused=True))
    memory = tz.tools.memory(traces, loss=cross_entropy, optimizer=adamw, backend="nccl")
    held = found.memory
    assert (held.at_rest, held.peak, held.optimizer_step) == (memory.at_rest, memory.peak, memory.optimizer_step)
    assert held.phase == memory.peak_line.phase
    assert dict(held.by_kind) == {str(kind): nbytes for kind, nbytes in memory.peak_line.alive.items() if nbytes}


def llama(blocks: int) -> Subject:
    with torch.device("meta"):
        module = Llama(DecoderSizes(blocks, 16, 4, 4, 32, 64, 8))
        return of_module(module, (torch.empty(2, 8, dtype=torch.long),), loss=cross_entropy)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "recompute", "replicas"), [(3, "none", 1), (2, "units", 2), (0, "cheap", 1)])
def test_repeated_blocks_in_slices_have_the_figures_of_the_model_traced_whole(
    stage: int, recompute: str, replicas: int
) -> None:
    one, mesh = llama(BLOCKS), MeshShape(replicas, 2, 2)
    of = SubjectPrograms(one, tz.Policy(mixed_precision=PRECISION), 2, H100, lambda what: None, 2, LLAMA_STYLES)
    policy = of.policy(stage, recompute)
    names = ("dp_replicate", "dp_shard", "tp")
    with tz.tools.fake_mesh((replicas, 2, 2), names) as ranks:
        part = sliced_copy(one.module, ranks["tp"], LLAMA_STYLES)
        traces = tz.trace(part, *one.args, policy=policy, mesh=ranks, device=H100)
    # Sums of norms' gradients over slices come as early as their parts, or blocks were reduced at the end alone.
    together = [set(op.params) for op in traces.timeline.ops if op.kind == "reduce"]
    assert any({"blocks.1.mlp_norm.weight", "blocks.1.mlp.down.weight"} <= params for params in together)
    found, exact = of.evaluate(policy, mesh), tz.tools.estimate(traces, H100)
    assert found.traced < BLOCKS
    assert (found.estimate.sent_bytes, found.estimate.flops) == (exact.sent_bytes, exact.flops)
    for name in ("seconds", "compute_seconds", "exposed_seconds", "model_seconds"):
        assert getattr(found.estimate, name) == pytest.approx(getattr(exact, name), rel=1e-9, abs=1e-15)
    assert found.estimate.exposed_on == pytest.approx(exact.exposed_on, rel=1e-9)
    memory = tz.tools.memory(traces, loss=cross_entropy, optimizer=adamw, backend="nccl")
    held = found.memory
    assert (held.at_rest, held.peak, held.optimizer_step) == (memory.at_rest, memory.peak, memory.optimizer_step)


@pytest.mark.slow
def test_a_plan_compares_ranks_of_tensor_parallelism() -> None:
    one = llama(2)
    how: dict[str, Any] = {"world_size": 8, "devices_per_node": 4, "loss": one.loss, "stages": (3,), "tp": (1, 2, 4)}
    found = tz.tools.plan_training(one.module, *one.args, tp_plan=LLAMA_STYLES, **how)
    meshes = [(str(row.mesh), row.mesh.ranks) for row in found.rows]
    assert meshes == [("2 x 4", 8), ("8", 8), ("2 x 2, tp 2", 8), ("4, tp 2", 8), ("2, tp 4", 8)]
    whole, halves, quarters = (row for row in found.rows if row.mesh.replicas == 1)
    assert whole.tokens_per_second == pytest.approx(one.tokens / whole.seconds)
    assert halves.tokens_per_second == pytest.approx(one.tokens / halves.seconds / 2)
    # All parameters but the norms' are in slices, so ranks hold alike at rest, and less in a step.
    assert halves.at_rest_bytes == pytest.approx(whole.at_rest_bytes, rel=0.1)
    assert whole.peak_bytes > halves.peak_bytes > quarters.peak_bytes
    assert max(map(len, str(found).splitlines())) <= 80
    assert "tp again" in found.table()
    assert any("tensor parallelism" in text for text in found.assumed)
    code = code_of(
        halves, tz.Policy(3, bucket_bytes=1, in_flight_bytes=1, prefetch=1), one.build, OWN_SLICES.format("llama3-8b")
    )
    assert '"cuda", (4, 2), mesh_dim_names=("dp", "tp")' in code
    assert code.index("parallelize_module(module") < code.index("tz.compile(module, policy, mesh=mesh)")
    pasted(code)
    with refused(ValueError, "tp is 2, and nothing says how to slice Llama"):
        tz.tools.plan_training(one.module, *one.args, world_size=8, tp=2)
    with refused(ValueError, "3 ranks of tensor parallelism do not divide 8 ranks in nodes of 8"):
        tz.tools.plan_training(one.module, *one.args, world_size=8, tp=3, tp_plan=LLAMA_STYLES)
    with refused(ValueError, "tp is (0,)"):
        tz.tools.plan_training(one.module, *one.args, world_size=8, tp=(0,), tp_plan=LLAMA_STYLES)


@pytest.mark.slow
def test_ranks_of_tensor_parallelism_are_compared_at_one_global_batch() -> None:
    found = tz.tools.plan_training(
        "gpt-1.3b", world_size=8, sequence_length=64, global_batch=16, stages=(3,), tp=(1, 4)
    )
    whole, quarters = found.rows
    assert found.global_tokens == 16 * 64
    for row in (whole, quarters):
        assert row.tokens_per_second * row.seconds * 8 == pytest.approx(found.global_tokens)
    assert "1,024 tokens of all ranks a step" in str(found).replace("\n", " ")
    alone = tz.tools.plan_training("gpt-1.3b", world_size=8, sequence_length=64, micro_batch=8, stages=(3,), tp=4)
    assert alone.rows == (quarters,)
    assert (whole.tensor_exposed_seconds, quarters.tensor_exposed_seconds > 0) == (0.0, True)
    assert quarters.tensor_exposed_seconds <= quarters.exposed_seconds


def traffic(estimate: tz.tools.Estimate) -> int:
    return sum(cost.traffic_bytes for cost in estimate.costs)


def plan(memory_bytes: int = ROOM, **how: Any) -> tz.tools.TrainingPlan:
    one = subject(2)
    how = {"world_size": 4, "device": "h100", "devices_per_node": 2, "loss": one.loss, **how}
    return tz.tools.plan_training(one.module, *one.args, memory_bytes=memory_bytes, **how)


@pytest.mark.slow
def test_a_plan_compares_stages_and_meshes_and_its_code_is_the_policy_of_its_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = plan()
    # Each long part says what it does before it begins, with the rows that are done.
    told = [line.split()[1:3] for line in capsys.readouterr().err.splitlines()]
    assert told[0] == ["0/7", "captures"]
    # A program with copies of the model reduces twice, so stages 1 to 3 have two each.
    times = {"captures": 1, "compiles": 7, "forecasts": 7, "simulates": 7}
    assert Counter(what for _, what in told) == times
    assert [done for done, what in told if what == "simulates"] == [f"{done}/7" for done in range(7)]
    meshes = [(0, "4"), *((stage, mesh) for stage in (1, 2, 3) for mesh in ("2 x 2", "4"))]
    assert [(row.stage, str(row.mesh)) for row in found.rows] == meshes
    assert all(row.fits and row.recompute == "none" and row.traced_blocks == 2 for row in found.rows)
    assert found.chosen is not None
    assert found.chosen.tokens_per_second >= 0.995 * max(row.tokens_per_second for row in found.rows)
    assert found.tokens == 6
    assert f"{found.chosen.name} ranks is " in found.reason
    fewest, most = found.expected_tokens_per_second or (0, 0)
    assert (fewest, most) == (0.57 * found.chosen.tokens_per_second, 0.66 * found.chosen.tokens_per_second)
    assert f"Expect {fewest:,.0f} to {most:,.0f} tokens/s" in str(found).replace("\n", " ")
    names = pasted(found.code)
    assert names["policy"] == programs().policy(found.chosen.stage, found.chosen.recompute)
    # Formats send fewer bytes, and are in the code.
    bytewise = plan(stages=(3,), gather_format=tz.Int8(), reduce_format={"*": None, "*weight": tz.Int8(64)})
    pairs = zip(bytewise.rows, found.rows[-2:], strict=True)
    assert all(row.sent_bytes < 0.9 * other.sent_bytes for row, other in pairs)
    assert "gather_format=tz.Int8(block=128),\n" in bytewise.code
    assert "reduce_format={'*': None, '*weight': tz.Int8(block=64)}" in bytewise.code
    assert any("whose bytes are written and read at both ends" in text for text in bytewise.assumed)
    # A step has the traffic of the loss and of AdamW.
    ddp = found.rows[0]
    assert ddp.optimizer_seconds == pytest.approx(7 * 4 * found.parameters / 3.35e12)
    assert ddp.loss_seconds * 3.35e12 > 32 * 6 * 99  # bytes of each logit: casts, softmax and gradients
    parts = ddp.compute_seconds + ddp.exposed_seconds + ddp.loss_seconds + ddp.optimizer_seconds
    assert ddp.seconds == pytest.approx(parts)
    # What does not fit as it is computes again.
    rows = found.rows[-2:]
    tight = plan(max(row.needed_bytes for row in rows) - 1, stages=(3,)).rows
    assert [row.mesh for row in tight] == [row.mesh for row in rows]
    assert [row.recompute for row in tight] != ["none", "none"]
    for one, other in zip(tight, rows, strict=True):
        assert one == other if one.recompute == "none" else one.needed_bytes <= other.needed_bytes
    # If nothing fits, the reason says the least. CUDA's context alone takes 1 GiB.
    nothing = plan(1 << 30, stages=(3,))
    assert (nothing.chosen, nothing.code) == (None, "")
    least = min(row.needed_bytes for row in nothing.rows)
    for words in ("nothing fits into 1.00 GiB: the least, ZeRO-3", f"takes {least / 2**30:.2f} GiB", "; neither more"):
        assert words in nothing.reason


def pasted(code: str) -> dict[str, Any]:
    """What the code defines before the module."""
    compile(code, "pasted", "exec")
    names: dict[str, Any] = {}
    exec(code.partition("module = ")[0], names)
    return names


class Scalar(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "said"),
    [
        (Chain, torch.float32, ("; float32 shards and", "the loss is left out")),
        (Scalar, torch.bfloat16, ("; float32 and bfloat16 shards and", "number that the model returns is its loss")),
    ],
)
def test_a_module_without_alike_blocks_is_traced_whole(
    kind: type[Chain], dtype: torch.dtype, said: tuple[str, ...]
) -> None:
    """Its loss is what it returns, if that is one number."""
    with torch.device("meta"):
        module, x = kind(nn.Linear(4, 8), nn.Linear(8, 2, dtype=dtype)), torch.empty(3, 4)
    found = tz.tools.plan_training(module, x=x, world_size=1, stages=(3,), memory_bytes=ROOM)
    assert (found.blocks, found.tokens, found.rows[0].loss_seconds) == (0, 3, 0.0)
    assert found.reason == "ZeRO-3 on 1 rank is the only one that was compared, and fits into 80.0 GiB"
    for words in said:
        assert words in found.assumed[2]
    assert f"\nmodule = ...  # yours: the {kind.__name__} that was planned\n" in found.code
    compile(found.code, "pasted", "exec")


@pytest.mark.deep
def test_the_page_answers_which_stage_trains_13_b_on_four_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    (program,) = re.findall(r"<!-- file: thirteen.py -->\n```python\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "thirteen.py"
    file.write_text(program)
    assert main(["plan", "--model", f"{file}:build", "--world-size", "4", "--memory-bytes", "80GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == pytest.approx(13e9, rel=0.02)
    assert found["chosen"]["stage"] == 3
    assert [row["stage"] for row in found["rows"] if row["fits"]] == [2, 3]


# What needs no trace.


def row(stage: int, tokens: float, needed: int = 40, shards: int = 8, **other: Any) -> PlanRow:
    """Made up; a step takes 1 s. Memory in GiB."""
    kinds = {str(kind): nbytes << 30 for kind, nbytes in other.pop("kinds", {}).items()}
    figures = {
        "recompute": "none",
        "fits": needed <= 80,
        "peak_phase": "backward",
        **dict.fromkeys(("sent_bytes", "traced_blocks"), 1),
        **dict.fromkeys(("compute_seconds", "exposed_seconds", "tensor_exposed_seconds", "mfu"), 0.1),
        **dict.fromkeys(("loss_seconds", "optimizer_seconds"), 0.1),
    }
    nbytes = dict.fromkeys(("needed_bytes", "peak_bytes", "at_rest_bytes"), needed << 30)
    rest = {"by_kind": kinds, "seconds": 1.0, "tokens_per_second": tokens, **nbytes}
    return PlanRow(stage=stage, mesh=MeshShape(1, shards), **{**figures, **rest, **other})


def reason(*rows: PlanRow, batch: int = 1) -> str:
    return reason_of(rows, best_of(rows), ROOM, batch)


def slower(**other: Any) -> str:
    return reason(row(2, 90, **other), row(3, 100))


def too_large(stage: int = 3, needed: int = 100, batch: int = 1, **other: Any) -> str:
    return reason(row(stage, 1, needed, kinds={Holds.OPTIMIZER: 40, Holds.SAVED: 40}, **other), batch=batch)


RANKS, HALF, NEITHER = "about 16 ranks would be needed", "half the batch saves about 20.0 GiB", "neither more ranks nor"
REASONS: list[tuple[str, str]] = [
    (reason(row(1, 100), row(3, 101)), "ZeRO-3 on 8 ranks is the fastest of 2 that fit into 80.0 GiB"),
    (reason(row(1, 100.1, 60), row(3, 100)), "ZeRO-3 on 8 ranks is within 0.5% of the fastest of 2 that fit into"),
    (reason(row(2, 100), row(3, 101, needed=90)), "ZeRO-2 on 8 ranks is the only one that fits into 80.0 GiB"),
    (reason(row(0, 100, needed=90), row(3, 101)), "DDP on 8 would take 90.0 GiB"),
    (slower(compute_seconds=0.3), "ZeRO-2 on 8 is 10% slower, where it computes 200 ms longer"),
    (slower(exposed_seconds=0.3, compute_seconds=0.2), "200 ms more of communication are exposed"),
    (slower(loss_seconds=0.3), "the loss takes 200 ms longer"),
    (slower(optimizer_seconds=0.3, exposed_seconds=0.2), "the optimizer takes 200 ms longer"),
    (slower(compute_seconds=0.3, recompute="units"), "200 ms longer, as it has to recompute='units' to fit"),
    (slower(exposed_seconds=0.3, recompute="cheap"), "exposed, and it has to recompute='cheap' to fit"),
    (too_large(), f"takes 100 GiB, 20.0 GiB more; {RANKS}"),
    (too_large(batch=2), f"{RANKS}, as they share 40.0 GiB of it, {HALF}"),
    (too_large(stage=0, batch=2), f"20.0 GiB more; {HALF}"),  # each rank of DDP holds all
    (too_large(needed=130, batch=2), f"; {NEITHER}"),
    (too_large(stage=0, batch=2, peak_phase="optimizer step"), f"; {NEITHER}"),
]


def test_the_reason_says_why_a_row_is_best_what_makes_another_slower_and_only_what_helps() -> None:
    for sentence, words in REASONS:
        assert words in sentence


def test_models_by_name_have_their_parameters() -> None:
    found = {}
    for name, named in tz.tools.MODELS.items():
        with torch.device("meta"):
            found[name] = sum(param.numel() for param in named.make(named.sequence_length).parameters())
    assert found == {
        "llama3-8b": 8_030_261_248,
        "llama3-70b": 70_553_706_496,
        "llama3-405b": 405_853_388_800,
        "gpt-1.3b": 1_313_525_760,
    }


def test_the_code_of_a_model_by_name_makes_it_and_slices_it_by_public_names() -> None:
    policy = tz.Policy(3, bucket_bytes=1, in_flight_bytes=1, prefetch=1)
    for name in ("llama3-8b", "gpt-1.3b"):
        planned = replace(row(3, 1), mesh=MeshShape(2, 2, 2))
        code = code_of(planned, policy, subject_of(name, length=16).build, OWN_SLICES.format(name))
        nodes = list(ast.walk(ast.parse(code)))
        imports = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        assert imports == {"torch.distributed.device_mesh", "torch.distributed.tensor.parallel"}
        tools = {
            node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tz.tools"
        }
        assert tools <= set(tz.tools.__all__)
        names = pasted(code)
        assert names["policy"].stage == 3
        assert callable(names["init_device_mesh"])
        made, _, rest = code.partition("module = ")[2].partition("mesh = ")
        with torch.device("meta"):
            exec("module = " + made, names)
        assert names["module"](torch.empty(1, 16, dtype=torch.long, device="meta")).shape[:2] == (1, 16)
        with tz.tools.fake_mesh((2, 2, 2), ("dp_replicate", "dp_shard", "tp")) as names["mesh"]:
            exec(rest[rest.index("styles = ") : rest.index("model = ")], names)
        assert names["module"].blocks[0].mlp.up.weight.placements == (Shard(0),)


def test_the_batch_of_a_file_and_of_one_sequence_cannot_be_halved(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 4), torch.empty(6, 4)\n")
    assert [subject_of(name).batch for name in (f"{file}:build", "gpt-1.3b")] == [1, 1]
    assert subject_of("gpt-1.3b", micro_batch=4).batch == 4
    assert subject_of(f"{file}:build").build == f"module = ...  # yours: {file}:build returns it"


def test_the_list_of_blocks_is_as_it_was() -> None:
    one = subject()
    before = dict(one.module.named_modules())
    with one.with_blocks(3) as module:
        assert len(list(module.get_submodule("1").children())) == 3
    assert dict(one.module.named_modules()) == before


def plans(*inputs: Any, **how: Any) -> Callable[[], object]:
    return lambda: tz.tools.plan_training(how.pop("model", nn.Linear(2, 2)), *inputs, world_size=8, **how)


REFUSED: list[tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = [
    *(
        (plans(stages=stages), ValueError, (f"stages is {stages!r}", "give some of 0, 1, 2 and 3"))
        for stages in ((), (5,), 3, (True,), "3")
    ),
    (plans(model=3), TypeError, ("model is of type int", "give a torch.nn.Module, a name")),
    (plans(device=None), TypeError, ("device is of type NoneType", "give one of a100")),
    (plans(devices_per_node=0), ValueError, ("devices_per_node is 0", "give the number of devices of a node")),
    (plans(devices_per_node=2.0), ValueError, ("devices_per_node is 2.0", "give the number")),
    (plans(micro_batch=2), ValueError, ("micro_batch belongs to models by name", "change the shapes of the inputs")),
    (plans(global_batch=16), ValueError, ("micro_batch belongs to models by name",)),
    (plans(model="gpt-1.3b", global_batch=0), ValueError, ("global_batch is 0", "give a number of sequences")),
    (plans(model="gpt-1.3b", global_batch=8, micro_batch=2), ValueError, ("and global_batch are given; leave one",)),
    (plans(model="gpt-1.3b", global_batch=4, tp=(1, 2)), ValueError, ("the 8 ranks of data at tp=1", "give tp=[2]")),
    (plans(sequence_length=2), ValueError, ("sequence_length belongs to models by name",)),
    (plans(model="gpt-1.3b", loss=torch.sum), ValueError, ("gpt-1.3b comes with a loss", "give loss= with")),
    (plans(torch.zeros(1), model="gpt-1.3b"), ValueError, ("give inputs with a module alone",)),
    (plans(model=nn.ReLU()), ValueError, ("ReLU has no parameter that requires a gradient",)),
]


def test_python_refuses_in_one_sentence() -> None:
    for call, kind, words in REFUSED:
        with refused(kind, *words):
            call()


GPT = ("--model", "gpt-1.3b")
REFUSED_ARGUMENTS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--model", "llama9"), ("there is no model 'llama9'", "choose llama3-8b, llama3-70b")),
    ((*GPT, "--device", "h9"), ("there is no device 'h9'", "give one of a100, h100")),
    ((*GPT, "--memory-bytes", "much"), ("memory_bytes is 'much'", "with a unit, such as")),
    ((*GPT, "--memory-bytes", "40"), ("memory_bytes is '40'", "without a unit", "GiB, GB, or B for bytes")),
    ((*GPT, "--world-size", "12"), ("12 ranks do not fill nodes of 8 devices", "give a multiple of 8")),
    ((*GPT, "--world-size", "0"), ("world_size is 0", "give the number of ranks, at least 1")),
    ((*GPT, "--micro-batch", "0"), ("micro_batch is 0", "give a number of sequences, at least 1")),
    ((*GPT, "--sequence-length", "-1"), ("sequence_length is -1", "give a number of tokens")),
    (("--model", "no.py:build"), ("there is no file no.py", "give FILE.py:function")),
    (("--model", "{file}:build"), ("returns int", "return a tuple of the module and its inputs")),
    (("--model", "{file}:build", "--micro-batch", "2"), ("makes its own inputs", "change their shapes there")),
]


@pytest.mark.slow
def test_the_command_prints_data_or_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 2), torch.zeros(1, 2)\n")
    assert main(["plan", "--world-size", "2", "--model", f"{file}:build", "--memory-bytes", "80GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters"], found["memory_bytes"]) == (6, 80 * 10**9)
    assert found["chosen"] in found["rows"]
    assert any("the loss is left out" in each for each in found["assumed"])
    loss = tmp_path / "loss.py"
    loss.write_text("def of(y):\n    return y.square().mean()\n")
    asked = ("--memory-bytes", "80GB", "--json", "--loss", f"{loss}:of")
    assert main(["plan", "--world-size", "2", "--model", f"{file}:build", *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("the loss is eager torch's" in each for each in found["assumed"])
    assert found["chosen"]["loss_seconds"] > 0
    file.write_text("def build():\n    return 1\n")
    for arguments, words in REFUSED_ARGUMENTS:
        assert main(["plan", "--world-size", "8", *(one.format(file=file) for one in arguments)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("thunder-zero: ")
        assert [word for word in words if word not in error] == [], error
