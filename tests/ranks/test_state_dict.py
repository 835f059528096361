"""torch's functions for state dicts, on our models as on FSDP2's: each loads the other's."""

from __future__ import annotations

import io
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import thunder_zero as tz
from tests.harness.checkpoints import adamw, differing, state_of, take_step, torch_model, torch_state_of
from tests.harness.errors import error_of
from tests.harness.models import Mlp, Zoo, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow

import thunder

STAGES = (0, 1, 2, 3)
FULL = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def trained(stage: int, model: Any = Mlp) -> tuple[Any, torch.optim.Optimizer]:
    jitted = sharded(fresh(model), stage)
    optimizer = adamw(jitted)
    take_step(jitted, optimizer)
    return jitted, optimizer


def other(stage: int, model: Any = Mlp) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(7)
    jitted = sharded(model(), stage)
    return jitted, adamw(jitted, lr=1.0)


def kinds(tree: Any) -> Any:
    """Types, shapes and placements in a state dict, for comparing ours with FSDP2's."""
    if isinstance(tree, dict):
        return {key: kinds(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [kinds(value) for value in tree]
    if isinstance(tree, DTensor):
        return "DTensor", tree.placements, tuple(tree.shape), tree.stride(), tuple(tree.to_local().shape), tree.dtype
    return ("Tensor", tuple(tree.shape), tree.dtype) if isinstance(tree, Tensor) else type(tree)


def described(folder: Path) -> Any:
    """Each name in DCP's metadata: its shape, dtype, layout and chunks of rows; and its path."""
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    tensors = {
        name: (
            stored.size,
            stored.properties,
            {(*chunk.offsets, *chunk.sizes) for chunk in stored.chunks if chunk.sizes.numel()},
        )
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, torch_dcp.TensorStorageMetadata)
    }
    return tensors, {name: path for name, path in metadata.planner_data.items() if path[0] in ("model", "optim")}


def compared_with_fsdp2(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for stage in (1, 3):
        model, optimizer = trained(stage)
        right = state_of(model, optimizer)
        theirs, their_optimizer = torch_model(world_size, "fsdp2")
        take_step(theirs, their_optimizer)
        in_ours, in_theirs = torchs.get_state_dict(model, optimizer), torchs.get_state_dict(theirs, their_optimizer)
        results[f"the same kinds {stage}"] = kinds(list(in_ours)) == kinds(list(in_theirs))
        torchs.set_state_dict(theirs, their_optimizer, model_state_dict=in_ours[0], optim_state_dict=in_ours[1])
        results[f"sharded to FSDP2 {stage}"] = differing(torch_state_of(theirs, their_optimizer), right)

        theirs, their_optimizer = torch_model(world_size, "fsdp2")
        take_step(theirs, their_optimizer)
        right = torch_state_of(theirs, their_optimizer)
        flat = torchs.get_optimizer_state_dict(model, optimizer, options=FLAT)
        its = torchs.get_optimizer_state_dict(theirs, their_optimizer, options=FLAT)
        results[f"flat as FSDP2's {stage}"] = kinds(flat) == kinds(its)
        for name, options in (("sharded", StateDictOptions()), ("full", FULL), ("flat", FLAT)):
            in_model, in_optimizer = torchs.get_state_dict(theirs, their_optimizer, options=options)
            model, optimizer = other(stage)
            torchs.set_state_dict(
                model, optimizer, model_state_dict=in_model, optim_state_dict=in_optimizer, options=options
            )
            results[f"{name} from FSDP2 {stage}"] = differing(state_of(model, optimizer), right)
        in_model, in_optimizer = torchs.get_state_dict(theirs, their_optimizer, options=ON_CPU)
        assert bool(in_model) is (rank == 0)
        model, optimizer = other(stage)
        torchs.set_model_state_dict(model, in_model, options=FROM_RANK_0)
        torchs.set_optimizer_state_dict(model, optimizer, in_optimizer, options=FROM_RANK_0)
        results[f"from FSDP2's rank 0 {stage}"] = differing(state_of(model, optimizer), right)
        results[f"learning rate {stage}"] = optimizer.param_groups[0]["lr"] == 1.0

        in_model, in_optimizer = torchs.get_state_dict(model, optimizer)
        torch_dcp.save({"model": in_model, "optim": in_optimizer}, checkpoint_id=root / f"by-hand-{stage}")
        tz.save(root / f"ours-{stage}", model, optimizer)
        folders = root / f"ours-{stage}", root / f"by-hand-{stage}"
        results[f"as DTensors are saved {stage}"] = described(folders[0]) == described(folders[1])
        again, its_optimizer = other(stage)
        in_model, in_optimizer = torchs.get_state_dict(again, its_optimizer)  # makes the state to load into
        nested: Any = {"model": in_model, "optim": in_optimizer}
        torch_dcp.load(nested, checkpoint_id=root / f"by-hand-{stage}")
        torchs.set_state_dict(again, its_optimizer, model_state_dict=nested["model"], optim_state_dict=nested["optim"])
        results[f"plain DCP by hand {stage}"] = differing(state_of(again, its_optimizer), right)
    return results


COMPARISONS = (
    *("the same kinds", "sharded to FSDP2", "flat as FSDP2's", "sharded from FSDP2", "full from FSDP2"),
    *("flat from FSDP2", "from FSDP2's rank 0", "learning rate", "as DTensors are saved", "plain DCP by hand"),
)


@pytest.fixture(scope="module", params=[3, *slow(1)])
def with_fsdp2(
    request: pytest.FixtureRequest, ranks_pool: RanksPool, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return ranks_pool.run(request.param, compared_with_fsdp2, tmp_path_factory.mktemp("fsdp2"))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", COMPARISONS)
def test_state_dicts_equal_fsdp2s_and_load_both_ways(with_fsdp2: list[dict[str, Any]], name: str, stage: int) -> None:
    for results in with_fsdp2:
        assert len(results) == 2 * len(COMPARISONS)
        assert results[f"{name} {stage}"] in (True, [])


def every_kind(rank: int, world_size: int) -> list[Any]:
    """A model with parameters of every kind, a tie and buffers: gets and loads full and sharded state dicts."""
    results = []
    for stage in STAGES:
        model, optimizer = trained(stage, Zoo)
        right = state_of(model, optimizer)
        full: dict[str, Any] = torchs.get_model_state_dict(model, options=FULL)
        results.append([list(full) == list(fresh(Zoo).state_dict()), differing(full, tz.full_state_dict(model))])
        for options, to in ((StateDictOptions(), FULL), (FULL, FULL), (FLAT, FLAT), (ON_CPU, FROM_RANK_0)):
            in_model, in_optimizer = torchs.get_state_dict(model, optimizer, options=options)
            if to.broadcast_from_rank0:  # torch sends a transposed tensor's memory, and calls it rows
                in_model, in_optimizer = tree_map_only(Tensor, Tensor.contiguous, (in_model, in_optimizer))
            again, its_optimizer = other(stage, Zoo)
            fits = torchs.set_model_state_dict(again, in_model, options=to)
            torchs.set_optimizer_state_dict(again, its_optimizer, in_optimizer, options=to)
            loaded = state_of(again, its_optimizer)
            take_step(again, its_optimizer)
            results.append([fits == ([], []), differing(loaded, right)])
            model, optimizer = trained(stage, Zoo)  # torch's optimizers share what they load
        frozen = torchs.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        results.append([set(full) - set(frozen) == {"frozen"}, []])
    return results


@pytest.mark.slow
def test_every_kind_of_parameter(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, every_kind):
        assert results == [[True, []]] * 6 * len(STAGES)


def through_torch_save(state_dict: Any) -> Any:
    stream = io.BytesIO()
    torch.save(state_dict, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def copied(rank: int, world_size: int) -> list[Any]:
    """Per stage: what differs after state dicts were copied or saved and then loaded; whether the copies are of the
    same kinds; and whether what is written to the state dict is written to the model."""
    results = []
    for stage in (0, 1, 2, 3):
        model, optimizer = trained(stage, Zoo)
        right = state_of(model, optimizer)
        for copy in (deepcopy, through_torch_save):
            originals = torchs.get_state_dict(model, optimizer)
            in_model, in_optimizer = copy(originals)
            same_kinds = kinds([in_model, in_optimizer]) == kinds(list(originals))
            for value in originals[0].values():
                value.zero_()
            zeroed = not any(value.any() for value in tz.full_state_dict(model).values())
            torchs.set_state_dict(model, optimizer, model_state_dict=in_model, optim_state_dict=in_optimizer)
            results.append((differing(state_of(model, optimizer), right), same_kinds, zeroed))
    return results


@pytest.mark.parametrize("world_size", [2, *slow(1, 3)])
def test_sharded_state_dicts_are_copied_and_saved_as_fsdp2s(ranks_pool: RanksPool, world_size: int) -> None:
    """ZeRO-1's rows lie inside of the full parameter: torch copies no DTensor whose local tensor has an offset."""
    for results in ranks_pool.run(world_size, copied):
        assert results == [([], True, True)] * 8


def from_rank_0s_file(rank: int, world_size: int) -> list[Any]:
    """What every rank but rank 0 says of a file that rank 0 wrote of its own rows: a load into the model, and the next
    step of an optimizer that loaded it, before and after it has stepped."""
    results = []
    for stage in (1, 3):
        model, optimizer = trained(stage)
        again, fresh_one = other(stage)
        file = [through_torch_save([model.state_dict(), optimizer.state_dict()])]
        dist.broadcast_object_list(file)
        (weights, states), before = file[0], tz.full_state_dict(again)
        fresh_one.load_state_dict(states)
        said = [
            error_of(call) for call in (partial(again.load_state_dict, weights), partial(take_step, again, fresh_one))
        ]
        said.append(error_of(partial(optimizer.load_state_dict, states)))
        results.append((said, differing(tz.full_state_dict(again), before) == []))
    return results


def test_one_ranks_rows_are_refused_by_the_others(ranks_pool: RanksPool) -> None:
    on_rank_0, on_rank_1 = ranks_pool.run(2, from_rank_0s_file)
    assert {words for said, _ in on_rank_0 for words in said} == {"nothing"}
    for said, _ in on_rank_1:
        for words, what in zip(said, ("'layers.0.weight'", *["the state 'exp_avg' of a param"] * 2), strict=True):
            assert what in words, words
            assert "has the rows of the rank at (0,) of the mesh, and this rank is at (1,)" in words, words


class Renames(nn.Module):
    """Loads files of older versions: other names, and two weights in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}both" in state_dict:
            both = state_dict.pop(f"{prefix}both")
            state_dict |= dict(zip((f"{prefix}first.weight", f"{prefix}second.weight"), both.split(5), strict=True))
            state_dict[f"{prefix}first.bias"] = state_dict.pop(f"{prefix}bias")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def of_plain_modules(rank: int, world_size: int, old: dict[str, Tensor]) -> None:
    """A file with older names; and a plain optimizer's file by numbers, loaded before the first step and after it."""
    for stage in STAGES:
        model = sharded(Renames(), stage)
        for load in (model.load_state_dict, partial(torchs.set_model_state_dict, model, options=FULL)):
            take_step(model, adamw(model))
            assert load(dict(old)) == ([], [])
            loaded = tz.full_state_dict(model)
            both = torch.cat([loaded["first.weight"], loaded["second.weight"]])
            assert differing({"both": both, "bias": loaded["first.bias"]}, old) == []
        before, after = (fresh(Zoo), fresh(Zoo))
        files = [adamw(module) for module in (before, after)]
        take_step(before, files[0])
        take_step(after, files[1])
        take_step(after, files[1])
        model = sharded(fresh(Zoo), stage)
        optimizer = adamw(model)
        for load in (optimizer.load_state_dict, partial(torchs.set_optimizer_state_dict, model, optimizer)):
            model.load_state_dict(before.state_dict())
            load(deepcopy(files[0].state_dict()))
            take_step(model, optimizer)
            assert differing(state_of(model, optimizer), torch_state_of(after, files[1]) | after.state_dict()) == []


def test_files_of_plain_modules_and_optimizers_are_cut_into_rows(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, of_plain_modules, {"both": torch.randn(10, 3), "bias": torch.randn(5)})


def loads_unknown_names(rank: int, world_size: int) -> list[Any]:
    """The errors of names that the model does not have, and what changed."""
    model, optimizer = trained(1)
    before = state_of(model, optimizer)
    changed = {name: value + 1 for name, value in tz.full_state_dict(model).items()}
    attempts = [
        error_of(partial(model.load_original_state_dict, {**changed, "zzz": torch.ones(2), "layers.9.bias": 1})),
        error_of(partial(model.load_state_dict, {**model.state_dict(), "zzz": torch.ones(2)})),
    ]
    return [attempts, differing(state_of(model, optimizer), before)]


def test_unexpected_names_are_listed_as_torch_lists_them(ranks_pool: RanksPool) -> None:
    for (original, own), changed in ranks_pool.run(1, loads_unknown_names):
        assert "loading state_dict for Mlp: Unexpected key(s) in state_dict: 'zzz', 'layers.9.bias'; leave" in original
        assert 'Unexpected key(s) in state_dict: "zzz"' in own
        assert changed == []


def only_rank_0(rank: int, world_size: int) -> tuple[list[int], list[Any]]:
    """The sizes of this rank's full state dicts on the CPU; and the learning rate, and changes of the model, after an
    optimizer's state was made."""
    model, optimizer = trained(2)
    in_model, in_optimizer = torchs.get_state_dict(model, optimizer, options=ON_CPU)
    again, its_optimizer = other(2)
    before = tz.full_state_dict(again)
    torchs.get_optimizer_state_dict(again, its_optimizer)
    left = [its_optimizer.param_groups[0]["lr"], differing(tz.full_state_dict(again), before)]
    return [len(in_model), len(in_optimizer)], left


def test_only_rank_0_returns_full_tensors_on_the_cpu(ranks_pool: RanksPool) -> None:
    first, second = ranks_pool.run(2, only_rank_0)
    assert (first[0], second[0]) == ([6, 2], [0, 0])
    assert first[1] == second[1] == [1.0, []]


def copies(rank: int, world_size: int) -> int:
    """The size of this rank's full state dict on the CPU under hybrid sharding with two copies of the model."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = thunder.jit(fresh(Mlp), transforms=[tz.ZeroTransform(mesh=mesh)])
    return len(torchs.get_model_state_dict(model, options=ON_CPU))


def test_only_rank_0_returns_full_tensors_on_the_cpu_among_copies(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, copies) == [6, 0]


class Own(nn.Module):
    """A parameter that is each rank's own, a frozen one, a buffer, and a state of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.own = nn.Parameter(torch.ones(3))
        self.own_frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("offset", torch.zeros(2))
        self.seen: Any = 0
        self.refuses: Any = None

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state
        if state == self.refuses:
            raise ValueError("rank 1 refuses it")


def own_things(rank: int, world_size: int) -> list[Any]:
    """What is not sharded comes back, too."""
    module = Own()
    model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3, ignored=("own", "own_frozen"))])
    good = {name: value + 1 for name, value in torchs.get_model_state_dict(model, options=FULL).items()}
    right: dict[str, Any] = dict(good)
    torchs.set_model_state_dict(model, good, options=FULL)
    loaded: dict[str, Any] = torchs.get_model_state_dict(model, options=FULL)
    extra = loaded.pop("_extra_state") - right.pop("_extra_state")
    results: list[Any] = [(module.seen, extra, differing(loaded, right))]
    frozen = torchs.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    results.append("own_frozen" not in frozen and "own" in frozen)
    return results


def test_buffers_ignored_parameters_and_extra_states_are_loaded(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, own_things):
        assert results == [(1, 0, []), True]


def misfits(rank: int, world_size: int) -> list[str]:
    model, optimizer = trained(3)
    good, in_optimizer = torchs.get_state_dict(model, optimizer, options=FULL)
    few = {name: value for name, value in model.state_dict().items() if name != "layers.0.weight"}
    states = {name: of for name, of in in_optimizer["state"].items() if name != "layers.1.bias"}
    short = {**in_optimizer, "state": states}
    fits = torchs.set_model_state_dict(model, dict(few), options=StateDictOptions(strict=False))
    assert fits == (["layers.0.weight"], []), fits
    load = partial(torchs.set_model_state_dict, model, options=FULL)
    return [
        error_of(partial(torchs.set_model_state_dict, model, few)),
        error_of(partial(load, {**good, "more": torch.ones(2)})),
        error_of(partial(load, {**good, "layers.0.weight": torch.ones(3, 3)})),
        error_of(partial(torchs.set_optimizer_state_dict, model, optimizer, short, options=FULL)),
    ]


def test_a_state_dict_that_does_not_fit_raises_on_every_rank(ranks_pool: RanksPool) -> None:
    for missing, unknown, shape, state in ranks_pool.run(2, misfits):
        assert 'Missing key(s) in state_dict: "layers.0.weight"' in missing
        assert 'Unexpected key(s) in state_dict: "more"' in unknown
        assert "size mismatch for layers.0.weight" in shape
        assert "Missing optimizer state for parameter 'layers.1.bias'" in state


def optimizers(rank: int, world_size: int) -> list[Any]:
    """Without a state, with a tensor as learning rate, several at once."""
    results: list[Any] = []
    model = sharded(fresh(Mlp), 3)
    ascent = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step(model, ascent)
    found = torchs.get_optimizer_state_dict(model, ascent)
    ascent.param_groups[0]["lr"] = 0.5
    torchs.set_optimizer_state_dict(model, ascent, found)
    results += [[name for name, of in found["state"].items() if of.get("momentum_buffer") is not None]]
    results.append(ascent.param_groups[0]["lr"])
    model.zero_grad()
    rate = torch.tensor(0.1)
    biases = torch.optim.AdamW([param for param in model.parameters() if param.ndim == 1], lr=rate)
    weights = torch.optim.AdamW([param for param in model.parameters() if param.ndim == 2], lr=0.2)
    torchs.get_optimizer_state_dict(model, biases)
    results.append(biases.param_groups[0]["lr"] is rate)
    for options in (StateDictOptions(), FULL, FLAT):
        take_step(model, biases)
        take_step(model, weights)
        union = torchs.get_optimizer_state_dict(model, [weights, biases], options=options)
        right = state_of(model, biases)
        model.zero_grad()  # torch makes states to load into only where there are no gradients
        again = torch.optim.AdamW([param for param in model.parameters() if param.ndim == 1], lr=1.0)
        torchs.set_optimizer_state_dict(model, again, union, options=options)
        results.append((differing(state_of(model, again), right), float(again.param_groups[0]["lr"]) == float(rate)))
    return results


def test_optimizers_of_every_kind(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, optimizers):
        assert results == [[], 0.1, True, *[([], True)] * 3]


def extra_tensor(rank: int, world_size: int) -> list[Any]:
    """A module's extra state that is a tensor, as Transformer Engine's."""
    module = Own()
    module.seen = torch.arange(3)
    model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])
    results: list[Any] = []
    for options in (StateDictOptions(), StateDictOptions(cpu_offload=True), FULL):
        found = torchs.get_model_state_dict(model, options=options)
        results.append(found["_extra_state"].tolist())
    module.seen = 0
    torchs.set_model_state_dict(model, found, options=FULL)
    return [*results, module.seen.tolist()]


def test_a_modules_own_state_may_be_a_tensor(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, extra_tensor):
        assert results == [[0, 1, 2]] * 4
