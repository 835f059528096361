"""A plan traces few alike blocks and repeats them: its figures are exactly those of the model traced whole."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import thunder_zero as tz
from tests.harness.commands import output_of, refusal_of, run_command
from tests.harness.errors import all_refused
from tests.harness.traced import Chain, ResidualBlock, traced
from thunder_zero.tools.forecast.figures import Holds
from thunder_zero.tools.models import LLAMA_STYLES, DecoderSizes, Llama, cross_entropy
from thunder_zero.tools.plan.plan_training import OWN_SLICES, best_of
from thunder_zero.tools.plan.subject import (
    FusedAdamW,
    Subject,
    SubjectPrograms,
    alike_blocks,
    of_module,
    sliced_copy,
    subject_of,
)
from thunder_zero.tools.plan.training_plan import MeshShape, PlanRow, code_of, reason_of

H100 = tz.tools.DEVICES["h100"]
PRECISION = tz.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
PLANNED = tz.Policy(3, bucket_bytes=1, in_flight_bytes=1, prefetch=1)
BLOCKS, ROOM = 7, 80 << 30
SHAPE = (2, 3)


def squared_relu(x: Tensor) -> Tensor:
    """Apply two pointwise operations in a row, which a fuser would merge."""
    return torch.relu(x).square()


def build_model(blocks: int = BLOCKS) -> nn.Module:
    """Build an embedding larger than a block, blocks, and a head."""
    return Chain(nn.Embedding(99, 6), Chain(*(ResidualBlock(6, squared_relu) for _ in range(blocks))), nn.Linear(6, 99))


def make_subject(blocks: int = BLOCKS) -> Subject:
    with torch.device("meta"):
        return of_module(build_model(blocks), (torch.empty(SHAPE, dtype=torch.long),), loss=cross_entropy)


def make_llama(blocks: int) -> Subject:
    with torch.device("meta"):
        module = Llama(DecoderSizes(blocks, 16, 4, 4, 32, 64, 8))
        return of_module(module, (torch.empty(2, 8, dtype=torch.long),), loss=cross_entropy)


@cache
def make_programs() -> SubjectPrograms:
    return SubjectPrograms(make_subject(), tz.Policy(mixed_precision=PRECISION), 2, H100, lambda what: None)


def assert_exact(programs: SubjectPrograms, policy: tz.Policy, mesh: MeshShape, traces: tz.tools.Traces) -> Any:
    """Compare the evaluation with the forecasts of ``traces``; return it, the estimate and the memory."""
    (evaluation, count), exact = programs.evaluate(policy, mesh), tz.tools.estimate(traces, H100)
    memory = tz.tools.memory(traces, loss=cross_entropy, optimizer=FusedAdamW, backend="nccl")
    estimate = evaluation.estimate
    assert count < BLOCKS
    assert (estimate.busiest_bytes, estimate.flops) == (exact.busiest_bytes, exact.flops)
    for name in ("seconds", "compute_seconds", "exposed_seconds", "model_seconds"):
        assert getattr(estimate, name) == pytest.approx(getattr(exact, name), rel=1e-9, abs=1e-15)
    for name in ("at_rest", "peak", "optimizer_step"):
        assert getattr(evaluation, name) == getattr(memory, name)
    return evaluation, exact, memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "recompute", "replicas", "shards"),
    [(0, "none", 1, 2), (1, "cheap", 1, 4), (2, "units", 1, 2), (3, "cheap", 2, 4)],  # four do not divide six rows
)
def test_repeated_blocks_have_the_figures_of_the_whole_model(
    stage: int, recompute: str, replicas: int, shards: int
) -> None:
    policy = make_programs().policy(stage, recompute)
    traces = traced(build_model, SHAPE, policy, world_size=shards, replicas=replicas, dtype=torch.long)
    evaluation, exact, memory = assert_exact(make_programs(), policy, MeshShape(replicas, shards), traces)
    assert evaluation.estimate.mfu == pytest.approx(exact.mfu, rel=1e-9)
    assert evaluation.estimate.wire_seconds == pytest.approx(exact.wire_seconds, rel=1e-9)
    assert traffic(evaluation.estimate) == traffic(exact)
    assert evaluation.phase == memory.peak_line.phase
    alive = {str(kind): nbytes for kind, nbytes in memory.alive[memory.lines.index(memory.peak_line)].items()}
    assert dict(evaluation.by_kind) == alive


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "recompute", "replicas"), [(3, "none", 1), (2, "units", 2), (0, "cheap", 1)])
def test_repeated_blocks_in_slices_have_the_figures_of_the_whole_model(
    stage: int, recompute: str, replicas: int
) -> None:
    subject, mesh, mixed = make_llama(BLOCKS), MeshShape(replicas, 2, 2), tz.Policy(mixed_precision=PRECISION)
    programs = SubjectPrograms(subject, mixed, 2, H100, lambda what: None, 2, LLAMA_STYLES)
    policy = programs.policy(stage, recompute)
    with tz.tools.fake_mesh((replicas, 2, 2), ("dp_replicate", "dp_shard", "tp")) as ranks:
        part = sliced_copy(subject.module, ranks["tp"], LLAMA_STYLES)
        traces = tz.trace(part, *subject.args, policy=policy, mesh=ranks, device=H100)
    # Norms' gradients are summed over slices early: otherwise all blocks would be reduced at the end.
    together = [set(op.params) for op in traces.timeline.ops if op.kind == "reduce"]
    assert any({"blocks.1.mlp_norm.weight", "blocks.1.mlp.down.weight"} <= params for params in together)
    evaluation, exact, _ = assert_exact(programs, policy, mesh, traces)
    assert evaluation.estimate.exposed_on == pytest.approx(exact.exposed_on, rel=1e-9)


@pytest.mark.slow
def test_a_plan_compares_ranks_of_tensor_parallelism() -> None:
    subject = make_llama(2)
    options: dict[str, Any] = {"world_size": 8, "devices_per_node": 4, "stages": (3,), "tp": (1, 2, 4)}
    options |= {"loss": subject.loss, "tp_plan": LLAMA_STYLES}
    plan = tz.tools.plan_training(subject.module, *subject.args, **options)
    meshes = [(str(row.mesh), row.mesh.ranks) for row in plan.rows]
    assert meshes == [("2 x 4", 8), ("8", 8), ("2 x 2, tp 2", 8), ("4, tp 2", 8), ("2, tp 4", 8)]
    whole, halves, quarters = (row for row in plan.rows if row.mesh.replicas == 1)
    assert whole.tokens_per_second == pytest.approx(subject.tokens / whole.seconds)
    assert halves.tokens_per_second == pytest.approx(subject.tokens / halves.seconds / 2)
    # All parameters but the norms' are in slices: a rank holds as much at rest, and less in a step.
    assert halves.at_rest_bytes == pytest.approx(whole.at_rest_bytes, rel=0.1)
    assert whole.peak_bytes > halves.peak_bytes > quarters.peak_bytes
    assert max(map(len, str(plan).splitlines())) <= 80
    assert "tp again" in plan.table()
    assert any("tensor parallelism" in text for text in plan.assumed)
    code = code_of(halves, PLANNED, subject.build, OWN_SLICES.format("llama3-8b"))
    assert '"cuda", (4, 2), mesh_dim_names=("dp", "tp")' in code
    assert code.index("parallelize_module(module") < code.index("tz.compile(module, policy, mesh=mesh)")
    run_definitions(code)
    bound = partial(bind, *subject.args, model=subject.module)
    threes, none = bound(tp=3, tp_plan=LLAMA_STYLES), bound(tp=(0,), tp_plan=LLAMA_STYLES)
    all_refused(
        (bound(tp=2), ValueError, ("tp is 2, and nothing says how to slice Llama",)),
        (threes, ValueError, ("3 ranks of tensor parallelism do not divide 8 ranks in nodes of 8",)),
        (none, ValueError, ("tp is (0,)",)),
    )


@pytest.mark.slow
def test_tensor_parallelism_is_compared_at_one_global_batch() -> None:
    plan = tz.tools.plan_training("gpt-1.3b", world_size=8, sequence_length=64, global_batch=16, stages=(3,), tp=(1, 4))
    whole, quarters = plan.rows
    assert plan.global_tokens == 16 * 64
    for row in (whole, quarters):
        assert row.tokens_per_second * row.seconds * 8 == pytest.approx(plan.global_tokens)
    assert "1,024 tokens of all ranks a step" in str(plan).replace("\n", " ")
    alone = tz.tools.plan_training("gpt-1.3b", world_size=8, sequence_length=64, micro_batch=8, stages=(3,), tp=4)
    assert alone.rows == (quarters,)
    assert (whole.tensor_exposed_seconds, quarters.tensor_exposed_seconds > 0) == (0.0, True)
    assert quarters.tensor_exposed_seconds <= quarters.exposed_seconds


def traffic(estimate: tz.tools.Estimate) -> int:
    return sum(cost.traffic_bytes for cost in estimate.costs)


def make_plan(memory_bytes: int = ROOM, **options: Any) -> tz.tools.TrainingPlan:
    subject = make_subject(2)
    options = {"world_size": 4, "device": "h100", "devices_per_node": 2, "loss": subject.loss, **options}
    return tz.tools.plan_training(subject.module, *subject.args, memory_bytes=memory_bytes, **options)


@pytest.mark.slow
def test_a_plan_compares_stages_and_meshes_and_its_code_has_the_policy_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = make_plan()
    # Each long part announces itself, with the number of finished rows.
    progress = [line.split()[1:3] for line in capsys.readouterr().err.splitlines()]
    assert progress[0] == ["0/7", "captures"]
    # Hybrid sharding reduces twice, so stages 1 to 3 have two rows each.
    times = {"captures": 1, "schedules": 7, "forecasts": 7, "simulates": 7}
    assert Counter(step for _, step in progress) == times
    assert [count for count, step in progress if step == "simulates"] == [f"{count}/7" for count in range(7)]
    meshes = [(0, "4"), *((stage, mesh) for stage in (1, 2, 3) for mesh in ("2 x 2", "4"))]
    assert [(row.stage, str(row.mesh)) for row in plan.rows] == meshes
    assert all(row.fits and row.recompute == "none" and row.traced_blocks == 2 for row in plan.rows)
    assert plan.chosen is not None
    assert plan.chosen.tokens_per_second >= 0.995 * max(row.tokens_per_second for row in plan.rows)
    assert plan.tokens == 6
    assert f"{plan.chosen.name} ranks is " in plan.reason
    fewest, most = plan.expected_tokens_per_second or (0, 0)
    assert (fewest, most) == (0.57 * plan.chosen.tokens_per_second, 0.66 * plan.chosen.tokens_per_second)
    assert f"Expect {fewest:,.0f} to {most:,.0f} tokens/s" in str(plan).replace("\n", " ")
    names = run_definitions(plan.code)
    assert names["policy"] == make_programs().policy(plan.chosen.stage, plan.chosen.recompute)
    # Formats send fewer bytes, and the code passes them.
    bytewise = make_plan(stages=(3,), gather_format=tz.Int8(), reduce_format={"*": None, "*weight": tz.Int8(64)})
    pairs = zip(bytewise.rows, plan.rows[-2:], strict=True)
    assert all(row.busiest_bytes < 0.9 * other.busiest_bytes for row, other in pairs)
    assert "gather_format=tz.Int8(block=128),\n" in bytewise.code
    assert "reduce_format={'*': None, '*weight': tz.Int8(block=64)}" in bytewise.code
    assert any("whose bytes are written and read at both ends" in text for text in bytewise.assumed)
    # A step includes the memory traffic of the loss and of AdamW.
    ddp = plan.rows[0]
    adamw = 7 * 4 * plan.parameters / 3.35e12  # and a counter of steps for each parameter
    assert adamw < ddp.optimizer_seconds < 1.03 * adamw
    assert ddp.loss_seconds * 3.35e12 > 32 * 6 * 99  # 32 bytes for each logit: casts, softmax and gradients
    parts = ddp.compute_seconds + ddp.exposed_seconds + ddp.loss_seconds + ddp.optimizer_seconds
    assert ddp.seconds == pytest.approx(parts)
    # Programs that do not fit recompute.
    rows = plan.rows[-2:]
    tight = make_plan(max(row.needed_bytes for row in rows) - 1, stages=(3,)).rows
    assert [row.mesh for row in tight] == [row.mesh for row in rows]
    assert [row.recompute for row in tight] != ["none", "none"]
    for row, other in zip(tight, rows, strict=True):
        assert row == other if row.recompute == "none" else row.needed_bytes <= other.needed_bytes
    # If nothing fits, the reason names the smallest. CUDA's context alone takes 1 GiB.
    nothing = make_plan(1 << 30, stages=(3,))
    assert (nothing.chosen, nothing.code) == (None, "")
    takes = f"takes {min(row.needed_bytes for row in nothing.rows) / 2**30:.2f} GiB"
    for words in ("nothing fits into 1.00 GiB: the least, ZeRO-3", takes, "; neither more"):
        assert words in nothing.reason


def run_definitions(code: str) -> dict[str, Any]:
    """Run the imports of the code and its policy, and return the names that they define."""
    compile(code, "pasted", "exec")
    names: dict[str, Any] = {}
    imports, start, rest = code.partition('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n')
    assert start, "ranks use their own GPUs"
    group, policy = rest.partition("with torch.device")[0].split("\n", 1)
    assert group == 'torch.distributed.init_process_group("nccl")'
    exec(imports + policy, names)
    return names


class Scalar(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


class Windowed(nn.Linear):
    def __init__(self, number: int) -> None:
        super().__init__(4, 4)
        self.number, self.attends = number, "to all" if number == 3 else "in a window"


def test_blocks_that_differ_in_a_word_are_not_alike() -> None:
    assert alike_blocks(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))) == tuple("01234")
    assert alike_blocks(nn.Sequential(*map(Windowed, range(5)))) == ("0", "1", "2")


@pytest.mark.slow
def test_a_module_without_alike_blocks_is_traced_whole() -> None:
    """If the module returns a scalar, that is the loss."""
    for kind, dtype, dtypes, loss in (
        (Chain, torch.float32, "; float32 shards and", "the loss is left out"),
        (Scalar, torch.bfloat16, "; float32 and bfloat16 shards and", "number that the model returns is its loss"),
    ):
        with torch.device("meta"):
            module, x = kind(nn.Linear(4, 8), nn.Linear(8, 2, dtype=dtype)), torch.empty(3, 4)
        plan = tz.tools.plan_training(module, x=x, world_size=1, stages=(3,), memory_bytes=ROOM)
        assert (plan.blocks, plan.tokens, plan.rows[0].loss_seconds) == (0, 3, 0.0)
        assert plan.reason == "ZeRO-3 on 1 rank is the only one that was compared, and fits into 80.0 GiB"
        assert dtypes in plan.assumed[2]
        assert loss in plan.assumed[2]
        assert f"\n    module = ...  # yours: the {kind.__name__} that was planned\n" in plan.code
        compile(plan.code, "pasted", "exec")


@pytest.mark.deep
def test_the_page_answers_which_stage_trains_13_b_on_four_devices(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    (program,) = re.findall(r"<!-- file: thirteen.py -->\n```python\n(.*?)```", page, re.DOTALL)
    plan = plan_of_file(tmp_path, program, "--world-size", 4)
    assert plan["parameters"] == pytest.approx(13e9, rel=0.02)
    assert plan["chosen"]["stage"] == 3
    assert [row["stage"] for row in plan["rows"] if row["fits"]] == [2, 3]


@pytest.mark.deep
def test_the_page_answers_whether_a_second_machine_pays() -> None:
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    command, table = re.findall(r"```\n(.*?)\n```", page.partition("## Does a second machine pay?")[2], re.DOTALL)[:2]
    assert output_of(*command.split()[1:]).startswith(f"{table}\n\n")


def plan_of_file(folder: Path, text: str, *options: object) -> Any:
    """Plan the module that ``build`` of a file returns. Return the plan's data."""
    (folder / "model.py").write_text(text)
    model = ("--model", f"{folder / 'model.py'}:build")
    return json.loads(output_of("plan", *model, "--memory-bytes", "80GB", "--json", *options))


# Without traces


def row_of(stage: int, tokens: float, needed: int = 40, shards: int = 8, **figures: Any) -> PlanRow:
    """Return an invented row whose step takes 1 s. ``needed`` is in GiB."""
    kinds = {str(kind): nbytes << 30 for kind, nbytes in figures.pop("kinds", {}).items()}
    parts = ("compute_seconds", "exposed_seconds", "tensor_exposed_seconds", "loss_seconds", "optimizer_seconds", "mfu")
    defaults: dict[str, Any] = {"recompute": "none", "fits": needed <= 80, "peak_phase": "backward", "busiest_bytes": 1}
    defaults |= {"traced_blocks": 1, **dict.fromkeys(parts, 0.1)}
    nbytes = dict.fromkeys(("needed_bytes", "peak_bytes", "at_rest_bytes"), needed << 30)
    rest = {"by_kind": kinds, "seconds": 1.0, "tokens_per_second": tokens, **nbytes}
    return PlanRow(stage=stage, mesh=MeshShape(1, shards), **{**defaults, **rest, **figures})


def explain(*rows: PlanRow, batch: int = 1) -> str:
    return reason_of(rows, best_of(rows), ROOM, batch)


def explain_slower(**figures: Any) -> str:
    return explain(row_of(2, 90, **figures), row_of(3, 100))


def explain_large(stage: int = 3, needed: int = 100, batch: int = 1, **figures: Any) -> str:
    return explain(row_of(stage, 1, needed, kinds={Holds.OPTIMIZER: 40, Holds.SAVED: 40}, **figures), batch=batch)


RANKS, HALF, NEITHER = "about 16 ranks would be needed", "half the batch saves about 20.0 GiB", "neither more ranks nor"
REASONS: list[tuple[str, str]] = [
    (explain(row_of(1, 100), row_of(3, 101)), "ZeRO-3 on 8 ranks is the fastest of 2 that fit into 80.0 GiB"),
    (explain(row_of(1, 100.1, 60), row_of(3, 100)), "ZeRO-3 on 8 ranks is within 0.5% of the fastest of 2 that fit"),
    (explain(row_of(2, 100), row_of(3, 101, needed=90)), "ZeRO-2 on 8 ranks is the only one that fits into 80.0 GiB"),
    (explain(row_of(0, 100, needed=90), row_of(3, 101)), "DDP on 8 would take 90.0 GiB"),
    (explain_slower(compute_seconds=0.3), "ZeRO-2 on 8 is 10% slower, where it computes 200 ms longer"),
    (explain_slower(exposed_seconds=0.3, compute_seconds=0.2), "200 ms more of communication are exposed"),
    (explain_slower(loss_seconds=0.3), "the loss takes 200 ms longer"),
    (explain_slower(optimizer_seconds=0.3, exposed_seconds=0.2), "the optimizer takes 200 ms longer"),
    (explain_slower(compute_seconds=0.3, recompute="units"), "200 ms longer, as it has to recompute='units' to fit"),
    (explain_slower(exposed_seconds=0.3, recompute="cheap"), "exposed, and it has to recompute='cheap' to fit"),
    (explain_large(), f"takes 100 GiB, 20.0 GiB more; {RANKS}"),
    (explain_large(batch=2), f"{RANKS}, as they share 40.0 GiB of it, {HALF}"),
    (explain_large(stage=0, batch=2), f"20.0 GiB more; {HALF}"),  # each rank of DDP holds all
    (explain_large(needed=130, batch=2), f"; {NEITHER}"),
    (explain_large(stage=0, batch=2, peak_phase="optimizer step"), f"; {NEITHER}"),
]


def test_a_reason_says_what_is_best_what_makes_others_slower_and_what_helps() -> None:
    for sentence, words in REASONS:
        assert words in sentence


def test_named_models_have_as_many_parameters_as_published() -> None:
    with torch.device("meta"):
        modules = {name: named.make(named.sequence_length) for name, named in tz.tools.MODELS.items()}
    numels = {name: sum(param.numel() for param in module.parameters()) for name, module in modules.items()}
    assert numels == {
        "llama3-8b": 8_030_261_248,
        "llama3-70b": 70_553_706_496,
        "llama3-405b": 405_853_388_800,
        "gpt-1.3b": 1_313_525_760,
    }


def test_the_code_of_a_named_model_builds_and_slices_it_with_public_names() -> None:
    planned = replace(row_of(3, 1), mesh=MeshShape(2, 2, 2))
    for name in ("llama3-8b", "gpt-1.3b"):
        code = code_of(planned, PLANNED, subject_of(name, length=16).build, OWN_SLICES.format(name))
        imports = set(re.findall(r"^from (\S+) import ", code, re.MULTILINE))
        assert imports == {"torch.distributed.device_mesh", "torch.distributed.tensor.parallel"}
        assert set(re.findall(r"\btz\.tools\.(\w+)", code)) <= set(tz.tools.__all__)
        names = run_definitions(code)
        assert names["policy"].stage == 3
        assert callable(names["init_device_mesh"])
        building, _, slicing = code.partition("with torch.device")[2].partition("mesh = ")
        exec("with torch.device" + building, names)
        assert names["module"](torch.empty(1, 16, dtype=torch.long, device="meta")).shape[:2] == (1, 16)
        with tz.tools.fake_mesh((2, 2, 2), ("dp_replicate", "dp_shard", "tp")) as names["mesh"]:
            exec(slicing[slicing.index("styles = ") : slicing.index("model = ")], names)
        assert names["module"].blocks[0].mlp.up.weight.placements == (Shard(0),)


LINEAR = nn.Linear(2, 2)
CPU = tz.tools.Device(
    "ours",
    {"float32": 1.0},
    1.0,
    1 << 33,
    intra_node=tz.tools.Link(1.0),
    curves=dict.fromkeys(("matmul float32", "pointwise"), ((1.0, 1.0),)),
)


def test_a_plan_for_a_cpu_counts_a_process_and_its_code_runs_there() -> None:
    options: dict[str, Any] = {"world_size": 1, "stages": (3,), "precision": tz.MixedPrecision()}
    plan = tz.tools.plan_training(nn.Linear(4, 4), torch.zeros(2, 4), device=CPU, **options)
    (row,) = plan.rows
    assert row.needed_bytes - row.peak_bytes == 512 << 20
    assert not re.search("CUDA|NCCL|nccl|cuda", str(plan))
    assert 'torch.distributed.init_process_group("gloo")\n' in plan.code


MODEL = """
import torch

class Net(torch.nn.Linear):
    def forward(self, x, *, scale, labels=None): return super().forward(x).mul(scale).sum()

def build(): return Net(4, 4), (torch.empty(6, 4),), {"scale": torch.empty(4)}
def by_name(): return Net(4, 4), (), {"x": torch.empty(6, 4), "scale": torch.empty(4)}
"""


def test_a_file_gives_keyword_inputs(tmp_path: Path) -> None:
    """Plans, traces and reports share the loader."""
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    for function, names in (("build", {"scale"}), ("by_name", {"x", "scale"})):
        subject = subject_of(f"{file}:{function}")
        assert (len(subject.args), set(subject.kwargs), subject.tokens) == (2 - len(names), names, 6)
        assert "zero_all_gather" in output_of("trace", f"{file}:{function}", "--world-size", "2", "--stage", "3")
    # The batch of a file and of one sequence cannot be halved.
    subjects = subject_of(f"{file}:build"), subject_of("gpt-1.3b"), subject_of("gpt-1.3b", micro_batch=4)
    assert [subject.batch for subject in subjects] == [1, 1, 4]
    assert subjects[0].build == f"module = ...  # yours: {file}:build returns it"


def test_with_blocks_restores_the_list_of_blocks() -> None:
    subject = make_subject()
    before = dict(subject.module.named_modules())
    with subject.with_blocks(3) as module:
        assert len(list(module.get_submodule("1").children())) == 3
    assert dict(subject.module.named_modules()) == before


def bind(*inputs: Any, model: Any = LINEAR, **options: Any) -> Callable[[], object]:
    return partial(tz.tools.plan_training, model, *inputs, world_size=8, **options)


REFUSED: list[tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = [
    *(
        (bind(stages=stages), ValueError, (f"stages is {stages!r}", "give some of 0, 1, 2 and 3"))
        for stages in ((), (5,), 3, (True,), "3")
    ),
    (bind(model=3), TypeError, ("model is of type int", "give a torch.nn.Module, a name")),
    (bind(device=None), TypeError, ("device is of type NoneType", "give one of a100")),
    (bind(devices_per_node=0), ValueError, ("devices_per_node is 0", "give the number of devices of a node")),
    (bind(devices_per_node=2.0), ValueError, ("devices_per_node is 2.0", "give the number")),
    (bind(micro_batch=2), ValueError, ("micro_batch belongs to models by name", "change the shapes of the inputs")),
    (bind(global_batch=16), ValueError, ("micro_batch belongs to models by name",)),
    (bind(model="gpt-1.3b", global_batch=0), ValueError, ("global_batch is 0", "give a number of sequences")),
    (bind(model="gpt-1.3b", global_batch=8, micro_batch=2), ValueError, ("and global_batch are given; leave one",)),
    (bind(model="gpt-1.3b", global_batch=4, tp=(1, 2)), ValueError, ("the 8 ranks of data at tp=1", "give tp=[2]")),
    (bind(sequence_length=2), ValueError, ("sequence_length belongs to models by name",)),
    (bind(model="gpt-1.3b", loss=torch.sum), ValueError, ("gpt-1.3b comes with a loss", "give loss= with")),
    (bind(torch.zeros(1), model="gpt-1.3b"), ValueError, ("give inputs with a module alone",)),
    (bind(model=nn.ReLU()), ValueError, ("ReLU has no parameter that requires a gradient",)),
]


def test_wrong_arguments_are_refused() -> None:
    all_refused(*REFUSED)


@pytest.mark.slow
def test_a_plan_of_sites_has_rows_of_the_planner(tmp_path: Path) -> None:
    model = "import torch\ndef build():\n    return torch.nn.Linear(64, 64, bias=False), torch.zeros(1, 64)\n"
    alone = plan_of_file(tmp_path, model, "--world-size", 2, "--devices-per-node", 2)["chosen"]
    plan = plan_of_file(tmp_path, model, "--sites", "2x2", "--between", "100mbit", "--stages", 0, alone["stage"])
    one, ddp, zero, bytewise, *outer = plan
    weight = 64 * 64 * 4
    assert (one["steps/s"], one["link/step"], one["needs"]) == (1 / alone["seconds"], 0, alone["needed_bytes"])
    assert ddp["link/step"] == 2 * weight * 3 / 4  # one of four ranks in a ring sends to the other site
    rate = 12.5e6 * 1448 / 1538  # of TCP's payload
    assert 1 / ddp["steps/s"] > 2 * weight * 3 / 4 / rate
    assert bytewise["link/step"] < zero["link/step"] / 3
    payload, latency = 64 * 64 + 64 * 4, 2 * H100.inter_node.latency_seconds if H100.inter_node else 0
    for row, every in zip(outer, (8, 32, 128), strict=True):
        assert (row["way"], row["link/step"]) == (f"outer step, H = {every}", payload / every)
        exchange = payload / rate + latency
        assert 1 / row["steps/s"] == pytest.approx(alone["seconds"] + exchange / every)
        assert row["tokens/s"] == 4 * row["steps/s"]
        assert (row["hidden"] - 2) * alone["seconds"] < exchange <= (row["hidden"] - 1) * alone["seconds"]
        assert row["needs"] >= one["needs"] + weight  # half of the agreed weight, and of its momentum
    text = output_of("plan", "--model", f"{tmp_path / 'model.py'}:build", "--sites", "2x2", "--between", "100mbit")
    assert "5.1% at 32 and 8.8% at 128" in text
    assert "docs/two-sites.md" in text
    assert len(plan_of_file(tmp_path, model, "--sites", "2x1", "--between", "1gbit", "--stages", 3)) == 6
    for options, words in {("--sites", "1x2"): "sites is '1x2'", ("--sites", "2x2"): "between is 'fast'"}.items():
        assert words in refusal_of("plan", *GPT, *options, "--between", "fast" if words[0] == "b" else "1mbit")


CHAIN = """import torch
def build():
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(3)]
    return torch.nn.Sequential(*layers), torch.zeros(16384, 512, device="meta")
"""


def plan_two(folder: Path, between: str, *options: object) -> Any:
    """Plan one RTX 4090 and two, each in a machine of its own."""
    asked = ("--machines", 1, 2, "--device", "rtx4090", "--between", between, "--stages", 0, 2, *options)
    return plan_of_file(folder, CHAIN, *asked)


@pytest.mark.slow
def test_a_second_machine_pays_from_a_link_on(tmp_path: Path) -> None:
    plan = plan_two(tmp_path, "1gbit")
    one, ddp, zero, bytewise = plan["rows"]
    assert [row["machines"] for row in plan["rows"]] == [1, 2, 2, 2]
    assert [row["way"] for row in plan["rows"][1:]] == ["DDP on 2", "ZeRO-2 on 2", "ZeRO-2 on 2, int8"]
    assert (one["sent"], one["pays from"]) == (0, None)
    assert zero["sent"] == 3 * 512 * 512 * (2 + 4) / 2  # half of the parameters in 16 bits, of the gradients in 32
    assert bytewise["sent"] < zero["sent"] / 2
    assert bytewise["pays from"] < zero["pays from"]
    assert plan["answer"].startswith("No: 2 machines reach")
    assert "More machines pay from" in plan["answer"]
    assert not any(row["tokens/s"] >= one["tokens/s"] for row in (ddp, zero, bytewise))
    # At that link both have as many tokens/s, and more on a faster link.
    at = {factor: plan_two(tmp_path, f"{factor * zero['pays from']:.0f}bit") for factor in (1, 2)}
    assert at[1]["rows"][2]["tokens/s"] == pytest.approx(one["tokens/s"], rel=0.01)
    assert at[1]["rows"][2]["tokens/s"] >= one["tokens/s"]
    assert at[1]["rows"][2]["pays from"] == pytest.approx(zero["pays from"], rel=0.01)
    for slow, fast in zip(at[1]["rows"][1:], at[2]["rows"][1:], strict=True):
        assert fast["tokens/s"] >= slow["tokens/s"]
    assert at[2]["answer"].startswith("Yes: 2 machines reach")


@pytest.mark.slow
def test_progress_counts_the_rows_of_all_machines(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(CHAIN)
    options = ("--machines", 1, 2, "--between", "1gbit", "--devices-per-node", 2, "--stages", 0, 2)
    _, _, err = run_command("plan", "--model", f"{tmp_path / 'model.py'}:build", *options)
    counts = list(dict.fromkeys(line.split()[2] for line in err.splitlines()))
    # Each stage on one machine, DDP on two, ZeRO-2 on two with and without replicas, and a row in int8.
    assert counts == [f"{count}/6" for count in range(7)]


@pytest.mark.slow
def test_a_second_machine_may_be_needed_or_not_enough(tmp_path: Path) -> None:
    one, _, _, bytewise = plan_two(tmp_path, "1gbit")["rows"]
    between = (one["needs"] + bytewise["needs"]) // 2
    plan = plan_two(tmp_path, "1gbit", "--memory-bytes", f"{between}B")
    assert [(row["fits"], row["pays from"]) for row in plan["rows"][::3]] == [(False, None), (True, 0.0)]
    assert plan["answer"].startswith("Yes: 1 machine would need")
    plan = plan_two(tmp_path, "1gbit", "--memory-bytes", "1GiB")
    assert plan["answer"].startswith("nothing fits into 1.00 GiB: the least, ZeRO-2 on 2 ranks")
    assert not any(row["fits"] for row in plan["rows"])


def test_numbers_of_machines_are_checked() -> None:
    for numbers in (["2"], ["0", "1"], ["2", "2"]):
        given = f"machines is ({', '.join(numbers)}{',' * (len(numbers) == 1)}); give two numbers of machines or more"
        assert given in refusal_of("plan", *GPT, "--machines", *numbers, "--between", "1gbit")


GPT = ("--model", "gpt-1.3b")
REFUSED_ARGUMENTS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--model", "llama9"), ("there is no model 'llama9'", "choose llama3-8b, llama3-70b")),
    ((*GPT, "--memory-bytes", "much"), ("memory_bytes is 'much'", "with a unit, such as")),
    ((*GPT, "--memory-bytes", "40"), ("memory_bytes is '40'", "without a unit", "GiB, GB, or B for bytes")),
    ((*GPT, "--world-size", "12"), ("12 ranks do not fill nodes of 8 devices", "give a multiple of 8")),
    ((*GPT, "--world-size", "0"), ("world_size is 0", "give the number of ranks, at least 1")),
    ((*GPT, "--micro-batch", "0"), ("micro_batch is 0", "give a number of sequences, at least 1")),
    ((*GPT, "--sequence-length", "-1"), ("sequence_length is -1", "give a number of tokens")),
    ((*GPT, "--between", "1mbit"), ("give --world-size, or --between with either",)),
    ((*GPT, "--sites", "2x2", "--between", "1mbit"), ("--sites is given; leave out --world-size",)),
    ((*GPT, "--machines", "1", "2", "--between", "1mbit"), ("--machines is given; leave out --world-size",)),
    (("--model", "no.py:build"), ("there is no file no.py", "give FILE.py:function")),
    (("--model", "{file}:build"), ("returns int", "return a tuple of the module and its inputs")),
    (
        ("--model", "{file}:build", "--micro-batch", "2"),
        ("micro_batch belongs to models by name", "change the shapes of the inputs in"),
    ),
]


@pytest.mark.slow
def test_the_command_prints_data_or_refuses(tmp_path: Path) -> None:
    model = "import torch\ndef build():\n    return torch.nn.Linear(2, 2), torch.zeros(1, 2)\n"
    plan = plan_of_file(tmp_path, model, "--world-size", 2)
    assert (plan["parameters"], plan["memory_bytes"]) == (6, 80 * 10**9)
    assert plan["chosen"] in plan["rows"]
    assert any("the loss is left out" in text for text in plan["assumed"])
    loss = tmp_path / "loss.py"
    loss.write_text("def of(y):\n    return y.square().mean()\n")
    plan = plan_of_file(tmp_path, model, "--world-size", 2, "--loss", f"{loss}:of")
    assert any("the loss is eager torch's" in text for text in plan["assumed"])
    assert plan["chosen"]["loss_seconds"] > 0
    file = tmp_path / "number.py"
    file.write_text("def build():\n    return 1\n")
    for arguments, words in REFUSED_ARGUMENTS:
        error = refusal_of("plan", "--world-size", "8", *(argument.format(file=file) for argument in arguments))
        assert [word for word in words if word not in error] == [], error
