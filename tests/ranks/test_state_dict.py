"""torch's state dict functions work on our models as on FSDP2's, and each model loads the other's state dicts."""

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
from torch.distributed.checkpoint import state_dict as dcp_state
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


def make_trained(stage: int, kind: Any = Mlp) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(fresh(kind), stage)
    optimizer = adamw(model)
    take_step(model, optimizer)
    return model, optimizer


def make_other(stage: int, kind: Any = Mlp) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = sharded(kind(), stage)
    return model, adamw(model, lr=1.0)


def describe_types(tree: Any) -> Any:
    """Describe the types, shapes and placements in a state dict."""
    if isinstance(tree, dict):
        return {key: describe_types(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [describe_types(value) for value in tree]
    if isinstance(tree, DTensor):
        return "DTensor", tree.placements, tuple(tree.shape), tree.stride(), tuple(tree.to_local().shape), tree.dtype
    return ("Tensor", tuple(tree.shape), tree.dtype) if isinstance(tree, Tensor) else type(tree)


def describe_folder(folder: Path) -> Any:
    """Return the shape, properties and row chunks of each tensor in DCP's metadata, and the path of each name."""
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    tensors = {
        name: (
            entry.size,
            entry.properties,
            {(*chunk.offsets, *chunk.sizes) for chunk in entry.chunks if chunk.sizes.numel()},
        )
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, torch_dcp.TensorStorageMetadata)
    }
    return tensors, {name: path for name, path in metadata.planner_data.items() if path[0] in ("model", "optim")}


def compare_with_fsdp2(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for stage in (1, 3):
        model, optimizer = make_trained(stage)
        expected = state_of(model, optimizer)
        fsdp2, fsdp2_optimizer = torch_model(world_size, "fsdp2")
        take_step(fsdp2, fsdp2_optimizer)
        ours, theirs = dcp_state.get_state_dict(model, optimizer), dcp_state.get_state_dict(fsdp2, fsdp2_optimizer)
        results[f"the same kinds {stage}"] = describe_types(list(ours)) == describe_types(list(theirs))
        dcp_state.set_state_dict(fsdp2, fsdp2_optimizer, model_state_dict=ours[0], optim_state_dict=ours[1])
        results[f"sharded to FSDP2 {stage}"] = differing(torch_state_of(fsdp2, fsdp2_optimizer), expected)

        fsdp2, fsdp2_optimizer = torch_model(world_size, "fsdp2")
        take_step(fsdp2, fsdp2_optimizer)
        expected = torch_state_of(fsdp2, fsdp2_optimizer)
        flat = dcp_state.get_optimizer_state_dict(model, optimizer, options=FLAT)
        fsdp2_flat = dcp_state.get_optimizer_state_dict(fsdp2, fsdp2_optimizer, options=FLAT)
        results[f"flat as FSDP2's {stage}"] = describe_types(flat) == describe_types(fsdp2_flat)
        for name, options in (("sharded", StateDictOptions()), ("full", FULL), ("flat", FLAT)):
            model_state, optimizer_state = dcp_state.get_state_dict(fsdp2, fsdp2_optimizer, options=options)
            model, optimizer = make_other(stage)
            dcp_state.set_state_dict(
                model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
            )
            results[f"{name} from FSDP2 {stage}"] = differing(state_of(model, optimizer), expected)
        model_state, optimizer_state = dcp_state.get_state_dict(fsdp2, fsdp2_optimizer, options=ON_CPU)
        assert bool(model_state) is (rank == 0)
        model, optimizer = make_other(stage)
        dcp_state.set_model_state_dict(model, model_state, options=FROM_RANK_0)
        dcp_state.set_optimizer_state_dict(model, optimizer, optimizer_state, options=FROM_RANK_0)
        results[f"from FSDP2's rank 0 {stage}"] = differing(state_of(model, optimizer), expected)
        results[f"learning rate {stage}"] = optimizer.param_groups[0]["lr"] == 1.0

        model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
        torch_dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=root / f"by-hand-{stage}")
        tz.save(root / f"ours-{stage}", model, optimizer)
        folders = root / f"ours-{stage}", root / f"by-hand-{stage}"
        results[f"as DTensors are saved {stage}"] = describe_folder(folders[0]) == describe_folder(folders[1])
        loaded, loaded_optimizer = make_other(stage)
        nested: Any = dict(zip(("model", "optim"), dcp_state.get_state_dict(loaded, loaded_optimizer), strict=True))
        torch_dcp.load(nested, checkpoint_id=root / f"by-hand-{stage}")
        states = {f"{name}_state_dict": state for name, state in nested.items()}
        dcp_state.set_state_dict(loaded, loaded_optimizer, **states)
        results[f"plain DCP by hand {stage}"] = differing(state_of(loaded, loaded_optimizer), expected)
    return results


COMPARISONS = (
    *("the same kinds", "sharded to FSDP2", "flat as FSDP2's", "sharded from FSDP2", "full from FSDP2"),
    *("flat from FSDP2", "from FSDP2's rank 0", "learning rate", "as DTensors are saved", "plain DCP by hand"),
)


@pytest.fixture(scope="module", params=[3, *slow(1)])
def with_fsdp2(
    request: pytest.FixtureRequest, ranks_pool: RanksPool, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return ranks_pool.run(request.param, compare_with_fsdp2, tmp_path_factory.mktemp("fsdp2"))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", COMPARISONS)
def test_state_dicts_equal_fsdp2s_and_load_both_ways(with_fsdp2: list[dict[str, Any]], name: str, stage: int) -> None:
    for results in with_fsdp2:
        assert len(results) == 2 * len(COMPARISONS)
        assert results[f"{name} {stage}"] in (True, [])


def load_every_kind(rank: int, world_size: int) -> list[Any]:
    """Get and load full and sharded state dicts of a model with every kind of parameter, a tie and buffers."""
    results = []
    for stage in STAGES:
        model, optimizer = make_trained(stage, Zoo)
        expected = state_of(model, optimizer)
        full: dict[str, Any] = dcp_state.get_model_state_dict(model, options=FULL)
        results.append([list(full) == list(fresh(Zoo).state_dict()), differing(full, tz.full_state_dict(model))])
        for options, load_options in ((StateDictOptions(), FULL), (FULL, FULL), (FLAT, FLAT), (ON_CPU, FROM_RANK_0)):
            model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer, options=options)
            if load_options.broadcast_from_rank0:  # torch broadcasts a transposed tensor's memory as if it were rows
                model_state, optimizer_state = tree_map_only(Tensor, Tensor.contiguous, (model_state, optimizer_state))
            loaded, loaded_optimizer = make_other(stage, Zoo)
            keys = dcp_state.set_model_state_dict(loaded, model_state, options=load_options)
            dcp_state.set_optimizer_state_dict(loaded, loaded_optimizer, optimizer_state, options=load_options)
            after_load = state_of(loaded, loaded_optimizer)
            take_step(loaded, loaded_optimizer)
            results.append([keys == ([], []), differing(after_load, expected)])
            model, optimizer = make_trained(stage, Zoo)  # torch's optimizers share what they load
        frozen = dcp_state.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        results.append([set(full) - set(frozen) == {"frozen"}, []])
    return results


@pytest.mark.slow
def test_every_kind_of_parameter_is_loaded(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, load_every_kind):
        assert results == [[True, []]] * 6 * len(STAGES)


def through_torch_save(state_dict: Any) -> Any:
    stream = io.BytesIO()
    torch.save(state_dict, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def load_copies(rank: int, world_size: int) -> list[Any]:
    """Return what differs after copies were loaded, if their types are equal, and if state dicts are views."""
    results = []
    for stage in (0, 1, 2, 3):
        model, optimizer = make_trained(stage, Zoo)
        expected = state_of(model, optimizer)
        for copy in (deepcopy, through_torch_save):
            originals = dcp_state.get_state_dict(model, optimizer)
            model_state, optimizer_state = copy(originals)
            same_kinds = describe_types([model_state, optimizer_state]) == describe_types(list(originals))
            for value in originals[0].values():
                value.zero_()
            zeroed = not any(value.any() for value in tz.full_state_dict(model).values())
            dcp_state.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
            results.append((differing(state_of(model, optimizer), expected), same_kinds, zeroed))
    return results


@pytest.mark.parametrize("world_size", [2, *slow(1, 3)])
def test_sharded_state_dicts_can_be_copied_and_saved(ranks_pool: RanksPool, world_size: int) -> None:
    """ZeRO-1's rows are a view of the full parameter: torch cannot copy a DTensor whose local tensor has an offset."""
    for results in ranks_pool.run(world_size, load_copies):
        assert results == [([], True, True)] * 8


def load_rank_0s_file(rank: int, world_size: int) -> list[Any]:
    """Load rank 0's rows on every rank: into a model, an optimizer before its first step, and one after it."""
    results = []
    for stage in (1, 3):
        model, optimizer = make_trained(stage)
        other, other_optimizer = make_other(stage)
        file = [through_torch_save([model.state_dict(), optimizer.state_dict()])]
        dist.broadcast_object_list(file)
        (weights, states), before = file[0], tz.full_state_dict(other)
        other_optimizer.load_state_dict(states)
        load, step = partial(other.load_state_dict, weights), partial(take_step, other, other_optimizer)
        errors = [error_of(call) for call in (load, step, partial(optimizer.load_state_dict, states))]
        results.append((errors, differing(tz.full_state_dict(other), before) == []))
    return results


def test_one_ranks_rows_are_refused_by_the_others(ranks_pool: RanksPool) -> None:
    on_rank_0, on_rank_1 = ranks_pool.run(2, load_rank_0s_file)
    assert {error for errors, _ in on_rank_0 for error in errors} == {"nothing"}
    for errors, _ in on_rank_1:
        for error, name in zip(errors, ("'layers.0.weight'", *["the state 'exp_avg' of a param"] * 2), strict=True):
            assert name in error, error
            assert "has the rows of the rank at (0,) of the mesh, and this rank is at (1,)" in error, error


class Renaming(nn.Module):
    """A module that loads files of older versions, with other names and with two weights in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}both" in state_dict:
            both = state_dict.pop(f"{prefix}both")
            state_dict |= dict(zip((f"{prefix}first.weight", f"{prefix}second.weight"), both.split(5), strict=True))
            state_dict[f"{prefix}first.bias"] = state_dict.pop(f"{prefix}bias")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def load_plain_files(rank: int, world_size: int, old: dict[str, Tensor]) -> None:
    """Load a file with older names, and a plain optimizer's file before and after the first step."""
    for stage in STAGES:
        model = sharded(Renaming(), stage)
        for load in (model.load_state_dict, partial(dcp_state.set_model_state_dict, model, options=FULL)):
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
        for load in (optimizer.load_state_dict, partial(dcp_state.set_optimizer_state_dict, model, optimizer)):
            model.load_state_dict(before.state_dict())
            load(deepcopy(files[0].state_dict()))
            take_step(model, optimizer)
            assert differing(state_of(model, optimizer), torch_state_of(after, files[1]) | after.state_dict()) == []


@pytest.mark.slow
def test_files_of_plain_modules_and_optimizers_are_cut_into_rows(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, load_plain_files, {"both": torch.randn(10, 3), "bias": torch.randn(5)})


def load_unknown_names(rank: int, world_size: int) -> list[Any]:
    """Load names that the model does not have; return the errors, and what they changed."""
    model, optimizer = make_trained(1)
    before = state_of(model, optimizer)
    changed = {name: value + 1 for name, value in tz.full_state_dict(model).items()}
    errors = [
        error_of(partial(model.load_original_state_dict, {**changed, "zzz": torch.ones(2), "layers.9.bias": 1})),
        error_of(partial(model.load_state_dict, {**model.state_dict(), "zzz": torch.ones(2)})),
    ]
    return [errors, differing(state_of(model, optimizer), before)]


def test_unexpected_names_are_listed_as_torch_lists_them(ranks_pool: RanksPool) -> None:
    for (original, in_shards), changed in ranks_pool.run(1, load_unknown_names):
        assert "loading state_dict for Mlp: Unexpected key(s) in state_dict: 'zzz', 'layers.9.bias'; leave" in original
        assert 'Unexpected key(s) in state_dict: "zzz"' in in_shards
        assert changed == []


def get_on_rank_0(rank: int, world_size: int) -> tuple[list[int], list[Any]]:
    """Return the sizes of this rank's full state dicts on the CPU, and what creating an optimizer's state changed."""
    model, optimizer = make_trained(2)
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer, options=ON_CPU)
    other, other_optimizer = make_other(2)
    before = tz.full_state_dict(other)
    dcp_state.get_optimizer_state_dict(other, other_optimizer)
    unchanged = [other_optimizer.param_groups[0]["lr"], differing(tz.full_state_dict(other), before)]
    return [len(model_state), len(optimizer_state)], unchanged


def test_only_rank_0_returns_full_tensors_on_the_cpu(ranks_pool: RanksPool) -> None:
    first, second = ranks_pool.run(2, get_on_rank_0)
    assert (first[0], second[0]) == ([6, 2], [0, 0])
    assert first[1] == second[1] == [1.0, []]


def get_under_hybrid_sharding(rank: int, world_size: int) -> int:
    """Return the size of this rank's full state dict on the CPU under hybrid sharding."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = thunder.jit(fresh(Mlp), transforms=[tz.ZeroTransform(mesh=mesh)])
    return len(dcp_state.get_model_state_dict(model, options=ON_CPU))


def test_only_rank_0_returns_full_tensors_under_hybrid_sharding(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, get_under_hybrid_sharding) == [6, 0]


class Unsharded(nn.Module):
    """A module with ignored parameters, one of them frozen, a buffer and an extra state."""

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


def load_unsharded(rank: int, world_size: int) -> list[Any]:
    """Load ignored parameters, buffers and extra states."""
    module = Unsharded()
    model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3, ignored=("own", "own_frozen"))])
    changed = {name: value + 1 for name, value in dcp_state.get_model_state_dict(model, options=FULL).items()}
    expected: dict[str, Any] = dict(changed)
    dcp_state.set_model_state_dict(model, changed, options=FULL)
    loaded: dict[str, Any] = dcp_state.get_model_state_dict(model, options=FULL)
    extra_difference = loaded.pop("_extra_state") - expected.pop("_extra_state")
    results: list[Any] = [(module.seen, extra_difference, differing(loaded, expected))]
    frozen = dcp_state.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    results.append("own_frozen" not in frozen and "own" in frozen)
    return results


def test_buffers_ignored_parameters_and_extra_states_are_loaded(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, load_unsharded):
        assert results == [(1, 0, []), True]


def load_misfits(rank: int, world_size: int) -> list[str]:
    model, optimizer = make_trained(3)
    good, optimizer_state = dcp_state.get_state_dict(model, optimizer, options=FULL)
    incomplete = {name: value for name, value in model.state_dict().items() if name != "layers.0.weight"}
    incomplete_states = {name: state for name, state in optimizer_state["state"].items() if name != "layers.1.bias"}
    short_state = {**optimizer_state, "state": incomplete_states}
    keys = dcp_state.set_model_state_dict(model, dict(incomplete), options=StateDictOptions(strict=False))
    assert keys == (["layers.0.weight"], []), keys
    load = partial(dcp_state.set_model_state_dict, model, options=FULL)
    return [
        error_of(partial(dcp_state.set_model_state_dict, model, incomplete)),
        error_of(partial(load, {**good, "more": torch.ones(2)})),
        error_of(partial(load, {**good, "layers.0.weight": torch.ones(3, 3)})),
        error_of(partial(dcp_state.set_optimizer_state_dict, model, optimizer, short_state, options=FULL)),
    ]


def test_a_state_dict_that_does_not_fit_raises_on_every_rank(ranks_pool: RanksPool) -> None:
    for missing, unknown, shape, state in ranks_pool.run(2, load_misfits):
        assert 'Missing key(s) in state_dict: "layers.0.weight"' in missing
        assert 'Unexpected key(s) in state_dict: "more"' in unknown
        assert "size mismatch for layers.0.weight" in shape
        assert "Missing optimizer state for parameter 'layers.1.bias'" in state


def load_optimizers(rank: int, world_size: int) -> list[Any]:
    """Load optimizers with partial states, with a tensor as learning rate, and two at once."""
    results: list[Any] = []
    model = sharded(fresh(Mlp), 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step(model, sgd)
    state_dict = dcp_state.get_optimizer_state_dict(model, sgd)
    sgd.param_groups[0]["lr"] = 0.5
    dcp_state.set_optimizer_state_dict(model, sgd, state_dict)
    results += [[name for name, state in state_dict["state"].items() if state.get("momentum_buffer") is not None]]
    results.append(sgd.param_groups[0]["lr"])
    model.zero_grad()
    rate = torch.tensor(0.1)
    biases = torch.optim.AdamW([param for param in model.parameters() if param.ndim == 1], lr=rate)
    weights = torch.optim.AdamW([param for param in model.parameters() if param.ndim == 2], lr=0.2)
    dcp_state.get_optimizer_state_dict(model, biases)
    results.append(biases.param_groups[0]["lr"] is rate)
    for options in (StateDictOptions(), FULL, FLAT):
        take_step(model, biases)
        take_step(model, weights)
        union = dcp_state.get_optimizer_state_dict(model, [weights, biases], options=options)
        expected = state_of(model, biases)
        model.zero_grad()  # torch makes states to load into only where there are no gradients
        loaded = torch.optim.AdamW([param for param in model.parameters() if param.ndim == 1], lr=1.0)
        dcp_state.set_optimizer_state_dict(model, loaded, union, options=options)
        results.append(
            (differing(state_of(model, loaded), expected), float(loaded.param_groups[0]["lr"]) == float(rate))
        )
    return results


def test_every_kind_of_optimizer_is_loaded(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, load_optimizers):
        assert results == [[], 0.1, True, *[([], True)] * 3]


def load_extra_tensor(rank: int, world_size: int) -> list[Any]:
    """Get and load a module's extra state that is a tensor, as in Transformer Engine."""
    module = Unsharded()
    module.seen = torch.arange(3)
    model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])
    results: list[Any] = []
    for options in (StateDictOptions(), StateDictOptions(cpu_offload=True), FULL):
        state_dict = dcp_state.get_model_state_dict(model, options=options)
        results.append(state_dict["_extra_state"].tolist())
    module.seen = 0
    dcp_state.set_model_state_dict(model, state_dict, options=FULL)
    return [*results, module.seen.tolist()]


def test_an_extra_state_may_be_a_tensor(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, load_extra_tensor):
        assert results == [[0, 1, 2]] * 4
