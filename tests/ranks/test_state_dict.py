"""``thunder_zero.state_dict`` and torch's own functions: FSDP2 loads our state dicts, and we load FSDP2's."""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import thunder_zero as tz
from tests.harness.checkpoints import adamw, full_of, plain, same, state_of, stepped
from tests.harness.errors import raised
from tests.harness.models import Mlp, Small, Zoo, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero import state_dict as ours
from thunder_zero.runtime.state import State

import thunder

STAGES = (0, 1, 2, 3)
FULL = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def trained(stage: int, model: Any = Mlp) -> tuple[Any, torch.optim.Optimizer]:
    jitted = sharded(fresh(model), stage)
    optimizer = adamw(jitted)
    stepped(jitted, optimizer)
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
        theirs, their_optimizer = plain(world_size, "fsdp2")
        stepped(theirs, their_optimizer)
        in_ours, in_theirs = ours.get_state_dict(model, optimizer), torchs.get_state_dict(theirs, their_optimizer)
        results[f"the same kinds {stage}"] = kinds(list(in_ours)) == kinds(list(in_theirs))
        torchs.set_state_dict(theirs, their_optimizer, model_state_dict=in_ours[0], optim_state_dict=in_ours[1])
        results[f"sharded to FSDP2 {stage}"] = same(full_of(theirs, their_optimizer), right)

        theirs, their_optimizer = plain(world_size, "fsdp2")
        stepped(theirs, their_optimizer)
        right = full_of(theirs, their_optimizer)
        flat = ours.get_optimizer_state_dict(model, optimizer, options=FLAT)
        its = torchs.get_optimizer_state_dict(theirs, their_optimizer, options=FLAT)
        results[f"flat as FSDP2's {stage}"] = kinds(flat) == kinds(its)
        for name, options in (("sharded", StateDictOptions()), ("full", FULL), ("flat", FLAT)):
            in_model, in_optimizer = torchs.get_state_dict(theirs, their_optimizer, options=options)
            model, optimizer = other(stage)
            ours.set_state_dict(
                model, optimizer, model_state_dict=in_model, optim_state_dict=in_optimizer, options=options
            )
            results[f"{name} from FSDP2 {stage}"] = same(state_of(model, optimizer), right)
        in_model, in_optimizer = torchs.get_state_dict(theirs, their_optimizer, options=ON_CPU)
        assert bool(in_model) is (rank == 0)
        model, optimizer = other(stage)
        ours.set_state_dict(
            model, optimizer, model_state_dict=in_model, optim_state_dict=in_optimizer, options=FROM_RANK_0
        )
        results[f"from FSDP2's rank 0 {stage}"] = same(state_of(model, optimizer), right)
        results[f"learning rate {stage}"] = optimizer.param_groups[0]["lr"] == 1.0

        in_model, in_optimizer = ours.get_state_dict(model, optimizer)
        torch_dcp.save({"model": in_model, "optim": in_optimizer}, checkpoint_id=root / f"by-hand-{stage}")
        tz.save(root / f"ours-{stage}", model, optimizer)
        folders = root / f"ours-{stage}", root / f"by-hand-{stage}"
        results[f"as DTensors are saved {stage}"] = described(folders[0]) == described(folders[1])
        again, its_optimizer = other(stage)
        in_model, in_optimizer = ours.get_state_dict(again, its_optimizer)  # makes the state to load into
        nested: Any = {"model": in_model, "optim": in_optimizer}
        torch_dcp.load(nested, checkpoint_id=root / f"by-hand-{stage}")
        ours.set_state_dict(again, its_optimizer, model_state_dict=nested["model"], optim_state_dict=nested["optim"])
        results[f"plain DCP by hand {stage}"] = same(state_of(again, its_optimizer), right)
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
        full = ours.get_model_state_dict(model, options=FULL)
        results.append([list(full) == list(fresh(Zoo).state_dict()), same(full, tz.full_state_dict(model))])
        for options, to in ((StateDictOptions(), FULL), (FULL, FULL), (FLAT, FLAT), (ON_CPU, FROM_RANK_0)):
            in_model, in_optimizer = ours.get_state_dict(model, optimizer, options=options)
            again, its_optimizer = other(stage, Zoo)
            fits = ours.set_state_dict(
                again, its_optimizer, model_state_dict=in_model, optim_state_dict=in_optimizer, options=to
            )
            loaded = state_of(again, its_optimizer)
            stepped(again, its_optimizer)  # nothing is shared with the state dict
            results.append([fits == ([], []), same(loaded, right) + same(state_of(model, optimizer), right)])
        frozen = ours.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        results.append([set(full) - set(frozen) == {"frozen"}, []])
    return results


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
            originals = ours.get_state_dict(model, optimizer)
            in_model, in_optimizer = copy(originals)
            same_kinds = kinds([in_model, in_optimizer]) == kinds(list(originals))
            for value in originals[0].values():
                value.zero_()
            zeroed = not any(value.any() for value in tz.full_state_dict(model).values())
            ours.set_state_dict(model, optimizer, model_state_dict=in_model, optim_state_dict=in_optimizer)
            results.append((same(state_of(model, optimizer), right), same_kinds, zeroed))
    return results


@pytest.mark.parametrize("world_size", [2, *slow(1, 3)])
def test_sharded_state_dicts_are_copied_and_saved_as_fsdp2s(ranks_pool: RanksPool, world_size: int) -> None:
    """ZeRO-1's rows lie inside of the full parameter: torch copies no DTensor whose local tensor has an offset."""
    for results in ranks_pool.run(world_size, copied):
        assert results == [([], True, True)] * 8


def loads_unknown_names(rank: int, world_size: int) -> list[Any]:
    """The errors of names that the model does not have, and what changed."""
    model, optimizer = trained(1)
    before = state_of(model, optimizer)
    changed = {name: value + 1 for name, value in tz.full_state_dict(model).items()}
    attempts = [
        raised(partial(model.load_original_state_dict, {**changed, "zzz": torch.ones(2), "layers.9.bias": 1})),
        raised(partial(model.load_state_dict, {**model.state_dict(), "zzz": torch.ones(2)})),
    ]
    return [attempts, same(state_of(model, optimizer), before)]


def test_unexpected_names_are_listed_as_torch_lists_them(ranks_pool: RanksPool) -> None:
    for (original, own), changed in ranks_pool.run(1, loads_unknown_names):
        assert "loading state_dict for Mlp: Unexpected key(s) in state_dict: 'zzz', 'layers.9.bias'; leave" in original
        assert 'Unexpected key(s) in state_dict: "zzz"' in own
        assert changed == []


def only_rank_0(rank: int, world_size: int) -> tuple[list[int], int, list[Any]]:
    """The sizes of this rank's full state dicts on the CPU; how many gathered tensors were alive at once; and the
    learning rate, and changes of the model, after an optimizer's state was made."""
    model, optimizer = trained(2)
    alive: list[Any] = []
    most = 0

    def gathered(state: State, *args: Any) -> Tensor:
        nonlocal most
        most = max(most, sum(tensor() is not None for tensor in alive))
        value = gather(state, *args)
        alive.append(weakref.ref(value))
        return value

    gather = State.gather_now
    with mock.patch.object(State, "gather_now", gathered):
        in_model, in_optimizer = ours.get_state_dict(model, optimizer, options=ON_CPU)
    again, its_optimizer = other(2)
    before = tz.full_state_dict(again)
    ours.get_optimizer_state_dict(again, its_optimizer)
    left = [its_optimizer.param_groups[0]["lr"], same(tz.full_state_dict(again), before)]
    return [len(in_model), len(in_optimizer)], most, left


def test_only_rank_0_returns_full_tensors_on_the_cpu(ranks_pool: RanksPool) -> None:
    first, second = ranks_pool.run(2, only_rank_0)
    assert first[0] == [6, 2]
    assert second[:2] == ([0, 0], 0)
    assert first[2] == second[2] == [1.0, []]


def copies(rank: int, world_size: int) -> int:
    """The size of this rank's full state dict on the CPU under hybrid sharding with two copies of the model."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = thunder.jit(fresh(Mlp), transforms=[tz.ZeroTransform(mesh=mesh)])
    return len(ours.get_model_state_dict(model, options=ON_CPU))


def test_only_rank_0_returns_full_tensors_on_the_cpu_among_copies(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, copies) == [6, 0]


def doubled(in_optimizer: dict[str, Any]) -> dict[str, Any]:
    """Another state."""
    states = {name: {key: 2 * value for key, value in of.items()} for name, of in in_optimizer["state"].items()}
    return {**in_optimizer, "state": states}


@contextmanager
def fussy(optimizer: torch.optim.Optimizer, rank: int) -> Iterator[None]:
    """Inside, rank 1's optimizer refuses every state dict."""

    def refuse(optimizer: Any, state_dict: Any) -> None:
        if rank == 1:
            raise ValueError("rank 1 refuses it")

    hook = optimizer.register_load_state_dict_pre_hook(refuse)
    yield
    hook.remove()


def sgd_on(model: Any, rank: int) -> torch.optim.Optimizer:
    """An optimizer that has stepped, and has a state, on rank 0 alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    if rank == 0:
        optimizer.step()
    return optimizer


def adamw_of(groups: list[list[Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": group} for group in groups], lr=1.0)


def refused(rank: int, world_size: int) -> dict[str, tuple[str, list[str]]]:
    model, optimizer = trained(3)
    before = state_of(model, optimizer)
    good, in_optimizer = ours.get_state_dict(model, optimizer, options=FULL)
    few = {name: value + 1 for name, value in good.items() if name != "layers.0.weight"}
    results: dict[str, Any] = {}

    def attempt(name: str, call: Any) -> None:
        results[name] = raised(call), same(state_of(model, optimizer), before)

    refused_for_a_model(attempt, model, good, rank, world_size)
    refused_for_optimizers(attempt, model, optimizer, good, in_optimizer, rank)
    refused_for_others(attempt, model, optimizer, good, in_optimizer, rank)
    fits = ours.set_model_state_dict(model, few, options=StateDictOptions(strict=False))
    assert fits == (["layers.0.weight"], [])
    dist.barrier()
    return results


def refused_for_a_model(attempt: Any, model: Any, good: dict[str, Any], rank: int, world_size: int) -> None:
    wrong = {**good, "layers.0.weight": torch.ones(3, 3)}
    few = {name: value + 1 for name, value in good.items() if name != "layers.0.weight"}
    attempt("missing", partial(ours.set_model_state_dict, model, few))
    attempt("unknown", partial(ours.set_model_state_dict, model, {**good, "more": torch.ones(2)}))
    attempt("shape on rank 1", partial(ours.set_model_state_dict, model, wrong if rank else good))
    for name, value in {
        "rank 0's shape": torch.ones(3, 3),
        "rank 0's list": [1.0],
        "rank 0's meta device": torch.ones(7, 7, device="meta"),
        "rank 0's DTensor": ours.get_model_state_dict(model)["layers.0.weight"],
    }.items():
        given: Any = {} if rank else {**good, "layers.0.weight": value}
        attempt(name, partial(ours.set_model_state_dict, model, given, options=FROM_RANK_0))
    mesh = init_device_mesh("cpu", (world_size,))
    theirs = {**good, "layers.0.weight": DTensor.from_local(torch.ones(7, 7), mesh, [Replicate()])}
    attempt("rank 0's to gather", partial(ours.set_model_state_dict, model, good if rank else theirs))


def refused_for_optimizers(
    attempt: Any, model: Any, optimizer: Any, good: dict[str, Any], in_optimizer: dict[str, Any], rank: int
) -> None:
    groups = {**in_optimizer, "param_groups": []}
    attempt("no groups", partial(ours.set_optimizer_state_dict, model, optimizer, groups))
    changed = {name: value + 1 for name, value in good.items()}
    both = partial(ours.set_state_dict, model, optimizer, model_state_dict=changed)
    attempt("no groups, model too", partial(both, optim_state_dict=groups))
    for name, of in {
        "state": {"exp_avg": torch.ones(2)},
        "a row each": {"exp_avg": torch.ones(7, 1)},
        "a list": {"exp_avg": [1.0]},
        "rank 0's state": {"exp_avg": torch.ones(7, 7, device="meta")},
    }.items():
        states = {**in_optimizer["state"], "layers.0.weight": of}
        options = FROM_RANK_0 if name.startswith("rank 0") else None
        load = partial(ours.set_optimizer_state_dict, model, optimizer, options=options)
        attempt(name, partial(load, {**in_optimizer, "state": states}))
    states = {name: of for name, of in in_optimizer["state"].items() if name != "layers.1.bias"}
    attempt("no state", partial(ours.set_optimizer_state_dict, model, optimizer, {**in_optimizer, "state": states}))
    with fussy(optimizer, rank):
        attempt("rank 1's optimizer", partial(ours.set_optimizer_state_dict, model, optimizer, doubled(in_optimizer)))
        attempt("rank 1's optimizer, model too", partial(both, optim_state_dict=doubled(in_optimizer)))


def refused_for_others(
    attempt: Any, model: Any, optimizer: Any, good: dict[str, Any], in_optimizer: dict[str, Any], rank: int
) -> None:
    """Options, flat state dicts and optimizers of other kinds."""
    attempt("submodules", partial(ours.get_model_state_dict, model, submodules={model}))
    flat = ours.get_optimizer_state_dict(model, optimizer, options=FLAT)
    load = partial(ours.set_optimizer_state_dict, model, optimizer)
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    attempt("of another kind", partial(ours.set_optimizer_state_dict, model, sgd, in_optimizer))
    tied = sharded(fresh(Small), 3)
    untied = {**ours.get_model_state_dict(tied, options=FULL), "head.weight": torch.ones(9, 5)}
    attempt("untied", partial(ours.set_model_state_dict, tied, untied))
    half = StateDictOptions(full_state_dict=rank == 0)
    attempt("options", partial(ours.get_model_state_dict, model, options=half))
    attempt("flat, of another", partial(load, {key: value for key, value in flat.items() if ".bias." not in key}))
    attempt("flat, two rates", partial(load, {**flat, "param_groups.layers.1.weight.lr": 7.0}))
    attempt("flat, a model's", partial(load, good))
    trusting = sharded(fresh(Mlp), tz.Policy(stage=3, trust_optimizer=True))
    factored = torch.optim.Adafactor([param for param in trusting.parameters() if rank == 0 or param.ndim > 1], lr=0.0)
    stepped(trusting, factored)
    attempt("one row of each rank's", partial(ours.get_optimizer_state_dict, trusting, factored))
    params = list(model.parameters())
    for name, groups in {
        "other parameters": [params[:1], params[1 + rank :]],
        "other order": [params[:4] + (params[:3:-1] if rank else params[4:])],
        "other groups": [params] if rank else [params[:1], params[1:]],
        "no optimizer": [] if rank else [params],
    }.items():
        optimizers = [adamw_of(groups)] if groups else []
        send = partial(ours.set_optimizer_state_dict, model, optimizers, {} if rank else in_optimizer)
        attempt(name, partial(send, options=FROM_RANK_0))
    attempt("other states", partial(ours.get_optimizer_state_dict, model, sgd_on(model, rank)))


def why_state_dicts_do_not_fit() -> dict[str, str]:
    return {
        "missing": "Missing key(s) in state_dict: 'layers.0.weight'; Unexpected key(s) in state_dict: none; set strict",
        "unknown": "Missing key(s) in state_dict: none; Unexpected key(s) in state_dict: 'more'",
        "shape on rank 1": "'layers.0.weight' has shape (3, 3) in the state dict and (7, 7) in the model",
        "rank 0's shape": "'layers.0.weight' has shape (3, 3) in the state dict and (7, 7) in the model",
        "rank 0's list": "'layers.0.weight' is a list in the state dict; give a tensor of shape (7, 7)",
        "rank 0's meta device": "cannot copy 'layers.0.weight' from the state dict to cpu as torch.float32",
        "rank 0's DTensor": "rank 0 cannot send 'layers.0.weight': it is a DTensor in the state dict",
        "rank 0's to gather": "the layout of 'layers.0.weight' in the state dict differs between ranks",
        "no groups": "the state dict is not an optimizer's: it has no param_groups",
        "no groups, model too": "the state dict is not an optimizer's: it has no param_groups",
        "state": "the optimizer's 'exp_avg' of parameter 'layers.0.weight' into rows: it has shape (2,) in",
        "a row each": "'layers.0.weight' into rows: it has shape (7, 1) in the state dict, and is neither one number",
        "a list": "'layers.0.weight' into rows: it is a list in the state dict, and is neither one number",
        "rank 0's state": "cannot copy the optimizer's 'exp_avg' of parameter 'layers.0.weight' from the state dict",
        "no state": "the state dict has no state for parameter 'layers.1.bias', which this optimizer trains",
        "rank 1's optimizer": "rank 1 refuses it",
        "rank 1's optimizer, model too": "rank 1 refuses it",
        "submodules": "submodules is not supported",
        "of another kind": "has no 'dampening', so it is not of SGD",
        "untied": "'embed.weight' and 'head.weight' are tied in the model, but differ in the state dict",
        "options": "the argument 'options' differs between ranks",
        "flat, of another": "the state dict has no param_groups for parameter 'layers.0.bias'",
        "flat, two rates": "parameters 'layers.0.weight' and 'layers.1.weight' are in one group",
        "flat, a model's": "'layers.0.weight' begins with neither 'state' nor 'param_groups'",
        "one row of each rank's": "'row_var' of parameter 'layers.0.weight': it has shape (4, 1), and is neither",
        "other parameters": "group 1 of optimizer 0 differs between ranks: rank 0 has 'layers.0.bias', ",
        "other order": "parameter 4 of group 0 of optimizer 0 differs between ranks: rank 0 has 'layers.2.weight'",
        "other groups": "group 0 of optimizer 0 differs between ranks: rank 0 has 'layers.0.weight', rank 1",
        "no optimizer": "rank 0 has group 0 of optimizer 0 where rank 1 has nothing more; build the same optimizers",
        "other states": "the optimizer's state of parameter 'layers.0.weight' differs between ranks",
    }


@pytest.fixture(scope="module")
def refusals(ranks_pool: RanksPool) -> list[dict[str, tuple[str, list[str]]]]:
    return ranks_pool.run(2, refused)


@pytest.mark.parametrize("name", why_state_dicts_do_not_fit())
def test_a_state_dict_that_does_not_fit_raises_on_every_rank_and_changes_nothing(refusals: Any, name: str) -> None:
    for results in refusals:
        error, changed = results[name]
        assert why_state_dicts_do_not_fit()[name] in error
        assert changed == []


def test_all_refusals_have_a_case(refusals: Any) -> None:
    assert all(results.keys() == why_state_dicts_do_not_fit().keys() for results in refusals)


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
    """Load state dicts that are refused, then one that is not: errors, and changes of the model."""
    module = Own()
    model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3, ignored=("own", "own_frozen"))])
    good = {name: value + 1 for name, value in ours.get_model_state_dict(model, options=FULL).items()}
    module.refuses = 1 if rank == 1 else None
    results: list[Any] = []
    for name, value, options in (
        ("own", torch.full((1,), 7.0), FULL),
        ("own", torch.ones(5), FROM_RANK_0),
        ("offset", "text", FROM_RANK_0),
        ("_extra_state", lambda: 1, FROM_RANK_0),  # cannot be sent
        ("linear.bias", good["linear.bias"], FROM_RANK_0),  # nothing wrong but that rank 1's module refuses
    ):
        before = ours.get_model_state_dict(model, options=FULL)
        given = {name: "junk"} if options is FROM_RANK_0 and rank else {**good, name: value}
        error = raised(partial(ours.set_model_state_dict, model, given, options=options))
        after = ours.get_model_state_dict(model, options=FULL)
        extra = before.pop("_extra_state"), after.pop("_extra_state")
        results.append((error, same(after, before), extra))
    module.refuses = None
    ours.set_model_state_dict(model, {"_extra_state": lambda: 0} if rank else good, options=FROM_RANK_0)  # not read
    loaded = ours.get_model_state_dict(model, options=FULL)
    results.append((module.seen, loaded.pop("_extra_state") - good.pop("_extra_state"), same(loaded, good)))
    frozen = ours.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    results.append("own_frozen" not in frozen and "own" in frozen)
    return results


def test_other_values_than_shards_are_checked_and_a_module_that_refuses_keeps_its_state(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, own_things):
        (broadcast, *right), (longer, *also), (text, *too), (function, *again), (refused_, *as_well), loaded, frozen = (
            results
        )
        assert "'own' has shape (1,) in the state dict and (3,) in the model" in broadcast
        assert "'own' has shape (5,) in the state dict and (3,) in the model" in longer
        assert "'offset' is a str in the state dict" in text
        assert "rank 0 cannot send the state dict: torch.save failed (" in function
        assert "rank 1 refuses it" in refused_
        assert right == also == too == again == as_well == [[], (0, 0)]
        assert loaded == (1, 0, [])
        assert frozen


def stateless(rank: int, world_size: int) -> list[Any]:
    """Optimizers without a state, without a learning rate, with a tensor as learning rate, several, and a superset."""
    results: list[Any] = []
    model = sharded(fresh(Mlp), 3)
    names = [name for name, _ in model.named_parameters()]
    ascent = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped(model, ascent)
    results.append(list(ours.get_optimizer_state_dict(model, ascent)["state"]))
    full = ours.get_optimizer_state_dict(model, ascent, options=FULL)
    ascent.param_groups[0]["lr"] = 0.5
    ours.set_optimizer_state_dict(model, ascent, full)
    results.append(ascent.param_groups[0]["lr"])
    model.zero_grad()
    without = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with mock.patch.object(without, "step", return_value=None):
        del without.param_groups[0]["lr"]
        results.append("lr" in ours.get_optimizer_state_dict(model, without)["param_groups"][0])

    rate = torch.tensor(0.1)
    biases = torch.optim.AdamW([param for param in model.parameters() if param.ndim == 1], lr=rate)
    weights = torch.optim.AdamW([param for param in model.parameters() if param.ndim == 2], lr=0.2)
    ours.get_optimizer_state_dict(model, biases)
    results.append(biases.param_groups[0]["lr"] is rate)
    for options in (StateDictOptions(), FULL, FLAT):
        stepped(model, biases)
        stepped(model, weights)
        union = ours.get_optimizer_state_dict(model, [weights, biases], options=options)
        right = state_of(model, biases)
        again = torch.optim.AdamW([param for param in model.parameters() if param.ndim == 1], lr=1.0)
        again.add_param_group({"params": [], "lr": 3.0})
        ours.set_optimizer_state_dict(model, again, union, options=options)
        rates = [float(group["lr"]) for group in again.param_groups]
        results.append((same(state_of(model, again), right), rates == [float(rate), 3.0]))
    part = ours.get_optimizer_state_dict(model, weights)
    del part["state"]["layers.1.weight"]
    ours.set_optimizer_state_dict(model, weights, part, options=StateDictOptions(strict=False))
    stepped_ = {name for name, param in model.named_parameters() if param in weights.state}
    results.append(set(names) - stepped_ == {"layers.1.weight", *(name for name in names if "bias" in name)})
    results.append(ours.get_state_dict(model, [])[1])
    ours.set_state_dict(model, [], model_state_dict=ours.get_model_state_dict(model), optim_state_dict={})
    return results


def test_optimizers_of_every_kind(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, stateless):
        assert results == [[], 0.1, False, True, ([], True), ([], True), ([], True), True, {}]


def extra_tensor(rank: int, world_size: int) -> list[Any]:
    """A module's extra state that is a tensor, as Transformer Engine's."""
    module = Own()
    seen = module.seen = torch.arange(3)
    model = thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])
    results: list[Any] = []
    for options in (StateDictOptions(), StateDictOptions(cpu_offload=True), FULL):
        found = ours.get_model_state_dict(model, options=options)
        results.append((found["_extra_state"].tolist(), found["_extra_state"].data_ptr() == seen.data_ptr()))
    module.seen = 0
    ours.set_model_state_dict(model, {} if rank else found, options=FROM_RANK_0)
    return [*results, module.seen.tolist()]


def test_a_modules_own_state_may_be_a_tensor(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, extra_tensor):
        assert results == [([0, 1, 2], True), ([0, 1, 2], True), ([0, 1, 2], False), [0, 1, 2]]
