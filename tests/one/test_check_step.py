"""``check_step`` says nothing of right steps, and names the cause of wrong ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import thunder_zero as tz
from tests.harness import mutants, steps, steps_of_transformers
from tests.harness.tiers import slow
from thunder_zero.spmd.axes import axes_of_batches
from thunder_zero.spmd.check import PRELOADED
from thunder_zero.spmd.processes import kept_starter
from thunder_zero.tools.cli import main

Step = Callable[[DeviceMesh], nn.Module]
FAST = (steps.megatron, steps.vocabulary_in_slices, steps.fsdp_with_clip_and_accumulation, steps.tensor_parallel)
RIGHT = [case if case[0] in FAST else slow(case)[0] for case in steps.RIGHT]


@pytest.fixture(scope="module", autouse=True)
def shared_starter() -> Iterator[None]:
    """Import torch once for all checks of this file."""
    with kept_starter([*PRELOADED, "transformers.modeling_utils"]):
        yield


def named(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("step", "mesh"), RIGHT, ids=named)
def test_nothing_is_said_of_right_steps(step: Step, mesh: dict[str, int]) -> None:
    verdict = tz.tools.check_step(step, mesh)
    assert [fault for fault in verdict.faults if fault.kind != "warning"] == [], str(verdict)
    assert verdict.status == 0
    assert str(verdict).startswith("nothing wrong")
    assert all(factor == 1 for gradient in verdict.gradients for factor in gradient.factors.values())


FAST_MODELS = ("Qwen3's plan", "FSDP2 of Llama", "FSDP2 of Mixtral")
MODELS = [
    pytest.param(*case, marks=[] if case[0] in FAST_MODELS else pytest.mark.slow)
    for case in steps_of_transformers.RIGHT
]


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(("name", "step", "mesh"), MODELS)
def test_nothing_is_said_of_language_models(name: str, step: Step, mesh: dict[str, int]) -> None:
    verdict = tz.tools.check_step(step, mesh)
    assert (verdict.status, verdict.faults) == (0, ()), str(verdict)
    assert len(verdict.gradients) > 10


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(
    ("step", "mesh", "name"),
    [
        (steps_of_transformers.experts_not_summed, "dp=7", "experts.down_proj"),
        (partial(steps_of_transformers.experts_in_slices, kind="Mixtral", sums_router=False), "tp=2", "gate.weight"),
    ],
)
def test_a_gradient_of_experts_or_of_their_router_that_is_not_summed_is_told(step: Step, mesh: str, name: str) -> None:
    verdict = tz.tools.check_step(step, mesh)
    assert verdict.status == 1, str(verdict)
    told = {path for fault in verdict.faults for path in fault.parameters if "never summed" in fault.text}
    assert told
    assert {path.partition(".mlp.")[2] for path in told} == {name}, str(verdict)


FAST_FAULTS = (  # one of each kind of sentence
    *(steps.norm_of_heads_not_summed, steps.bias_on_every_slice, steps.softmax_over_a_slice, steps.divided_twice),
    *(steps.sum_in_a_hook_and_in_a_loop, steps.sum_after_fsdp, steps.divided_by_the_local_count, steps.equal_batches),
    *(steps.optimizer_before_fully_shard, steps.clip_that_counts_replicated_parameters_n_times),
)
WRONG = [case if case[0] in FAST_FAULTS else slow(case)[0] for case in steps.WRONG]


@pytest.mark.parametrize(("step", "mesh", "cause"), WRONG, ids=named)
def test_the_first_fault_names_the_cause(step: Step, mesh: dict[str, int], cause: str) -> None:
    verdict = tz.tools.check_step(step, mesh)
    assert verdict.status == 1, str(verdict)
    first = verdict.faults[0]
    assert cause in f"{first.text} {' '.join(first.parameters)}", str(verdict)
    assert json.loads(verdict.to_json())["faults"][0]["text"] == first.text


PAGE = (Path(__file__).parents[2] / "docs/check.md").read_text()
SCRIPTS = re.findall(r"<!-- script: ([\w ]+) -->\n```python\n(.*?)```(?:\n\n```\n(.*?)```)?", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize(("name", "program", "said"), [SCRIPTS[1], *slow(SCRIPTS[0], *SCRIPTS[2:])], ids=named)
def test_the_page_shows_what_is_said_of_its_scripts(
    name: str, program: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(SCRIPTS) == 4
    script = tmp_path / "train.py"
    script.write_text(program)
    mesh = "dp=7" if name in ("right", "never divided") else "tp=2"
    assert main(["check", f"{script}:step", "--mesh", mesh]) == (1 if said else 0)
    printed = capsys.readouterr().out
    assert printed.startswith("wrong: " if said else "nothing wrong: ")
    assert said in printed


def test_a_step_that_cannot_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("def step(mesh):\n    return mesh.nothing\n")
    assert main(["check", f"{script}:step", "--mesh", "dp=7"]) == 2
    assert "train.py:2" in capsys.readouterr().err
    assert main(["check", f"{script}:step", "--mesh", "dp"]) == 2
    assert "cannot read the mesh 'dp'" in capsys.readouterr().err


SCRIPT = """
import os, torch
import torch.distributed as dist
from torch.distributed import init_device_mesh, init_process_group
from torch.distributed.fsdp import fully_shard

def main(divisor=1, models=1, **options):
    init_process_group("gloo")
    rank, ranks = int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    for _ in range(models):
        model = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (ranks,)))
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
        (torch.nn.MSELoss()(model(x), x) / divisor).backward()
        torch.optim.SGD(model.parameters()).step()
    dist.destroy_process_group()

def wrong(): main(divisor=int(os.environ["WORLD_SIZE"]))
def two(): main(models=2)
def needs(mesh, config): main()
"""


@pytest.mark.parametrize(
    ("function", "code", "text"),
    [
        ("main", 0, "nothing wrong"),
        *slow(("wrong", 1, "gradient is 0.5 x the true one (the loss is a mean)")),
        *slow(("two", 2, "the step returned NoneType, and called FSDPLinear, FSDPLinear with parameters to train")),
        *slow(("needs", 2, "train.py:needs cannot be called without config; give its parameters defaults")),
    ],
)
def test_a_script_that_torchrun_starts_is_a_step(
    function: str, code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["check", f"{script}:{function}", "--mesh", "dp=2"]) == code
    assert text in "".join(capsys.readouterr())


def test_a_difference_that_may_be_meant_is_a_warning() -> None:
    for step, mesh, text in (
        (steps.two_precisions, steps.HYBRID, "two precisions"),
        (steps.root_of_a_mean, steps.DP, "of a mean over each rank's own batch"),
        (steps.batch_norm, steps.DP, "the statistics of its own batch"),
        (steps.positions_of_slices, steps.SP, "the ranks report different numbers"),
    ):
        verdict = tz.tools.check_step(step, mesh)
        assert [fault.kind for fault in verdict.faults] == ["warning"], str(verdict)
        assert text in verdict.faults[0].text
        assert verdict.status == 0


@pytest.mark.slow
def test_ranks_with_tokens_and_experts_of_their_own_are_typed() -> None:
    for step, text in (
        (steps.experts_in_slices, ""),
        (steps.experts_that_the_gate_chooses, ""),
        (steps.gate_not_summed, "gate.weight"),
        (steps.experts_not_divided, "3 x the true one"),
    ):
        verdict = tz.tools.check_step(step, {"ep": 3}, data=["ep"])
        assert verdict.status == bool(text), str(verdict)
        assert text in str(verdict)


def test_it_says_what_it_cannot_check() -> None:
    for step, axis, text in (
        (steps.shape_of_data, "dp", "on the data"),
        (steps.ring, "dp", "what send and recv bring"),
        (steps.experts_that_choose, "ep", "index reads items of this rank's own batch"),
    ):
        verdict = tz.tools.check_step(step, {axis: 3}, data=[axis])
        assert verdict.status == 2, str(verdict)
        assert text in verdict.faults[0].text


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="the mesh has no axis fsdp; it has dp"):
        tz.tools.check_step(steps.ddp, "dp=2", data=["fsdp"])
    with pytest.raises(TypeError, match="define step at the top of a file"):
        tz.tools.check_step(lambda mesh: mesh, "dp=2")


CHANGED = (  # ten right steps
    *(steps.ddp, steps.fsdp_with_clip_and_accumulation, steps.fsdp_in_bf16, steps.hsdp, steps.tensor_parallel),
    *(steps.sequence_parallel, steps.megatron, steps.vocabulary_in_slices, steps.positions_of_slices),
    steps.dropout_with_a_generator_for_each_slice,
)


@pytest.mark.slow
def test_nearly_all_changes_of_a_collective_or_a_divisor_are_noticed() -> None:
    counts, missed = 0, []
    for step, mesh in steps.RIGHT:
        if step in CHANGED:
            count, unnoticed = mutants.unnoticed(step, mesh, axes_of_batches(mesh))
            counts += count
            missed += [f"{step.__name__}: {what}" for what in unnoticed]
    assert counts > 100
    assert len(missed) <= 0.05 * counts, missed
