"""Hugging Face's folders, ``generate``, adapters, Trainer and Accelerate work on sharded models as on plain ones.

Models are made from configs, without a download. Hugging Face's libraries are imported where they are used, after
``thunder_zero``. The code of ``docs/hugging-face.md`` runs here.
"""

from __future__ import annotations

import copy
import errno
import importlib
import importlib.util
import json
import os
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import thunder_zero as tz
from examples.bench.families import BY_NAME
from examples.llama import Llama, LlamaConfig
from tests.harness.checkpoints import adamw, differing, take_step
from tests.harness.errors import error_of
from tests.harness.models import Small, fresh, full, sharded
from tests.harness.ranks import LONG, RanksPool
from thunder_zero.capture.zero_module import captured_forward
from thunder_zero.checkpoint import hugging_face as writing
from thunder_zero.comm import small_collectives
from thunder_zero.sharded.dtensors import local

import thunder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
TOKENS = torch.arange(16).view(2, 8)
KILOBYTES = "2KB"  # more than most tensors of the Llama below, less than its embedding


def library(name: str) -> Any:
    return importlib.import_module(name)


def has_transformers(*version: int) -> bool:
    """Return whether transformers has this version or a newer one."""
    return tuple(map(int, library("transformers").__version__.split(".")[:2])) >= version


def make_llama(seed: int = 0, dtype: torch.dtype = torch.float32, *, tied: bool = True) -> Any:
    """Make a Llama, whose output layer may be tied to its embedding."""
    transformers = library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        use_cache=False,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config).to(dtype)


def compile_model(module: nn.Module, policy: tz.Policy | int = 3, **arguments: Any) -> Any:
    return tz.compile(module, policy, **arguments)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return a folder's tensors by name; check that each is in one file, and check the index."""
    tensors_by_name: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not tensors_by_name.keys() & tensors.keys()
        tensors_by_name |= tensors
        files |= dict.fromkeys(tensors, path.name)
    index = folder / "model.safetensors.index.json"
    assert index.exists() is (len(set(files.values())) > 1)
    if index.exists():
        written = json.loads(index.read_text())
        assert written["weight_map"] == files
        assert written["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_by_name.values())
    return tensors_by_name


def dtype_in(config: dict[str, Any]) -> Any:
    """Return the dtype in a model's config."""
    return config["dtype"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Folders


def unordered_names(text: str) -> dict[str, Any]:
    """Sort the lists of names in JSON: peft writes its sets in the order of their hashes."""
    values = json.loads(text)
    return {key: sorted(value, key=str) if isinstance(value, list) else value for key, value in values.items()}


def assert_same_files(ours: Path, theirs: Path) -> None:
    """Check that names, tensors and JSON values are equal; tensors may be in other files."""
    assert names_in(ours) == names_in(theirs)
    assert differing(tensors_of(ours), tensors_of(theirs)) == []
    for path in theirs.glob("*.json"):
        if not path.name.endswith("index.json"):
            assert unordered_names((ours / path.name).read_text()) == unordered_names(path.read_text()), path


def load_and_save(rank: int, world_size: int, source: Path, folder: Path, stage: int, dtype: torch.dtype) -> None:
    """Load from a folder and save to another one, without a step; in ZeRO-2 with two copies on a rank each."""
    mesh = init_device_mesh("cpu", (world_size, 1)) if stage == 2 else None
    model = compile_model(make_llama(seed=1, dtype=dtype), stage, weights=source, mesh=mesh)
    tz.save_pretrained(model, folder, max_shard_size=KILOBYTES)


@pytest.mark.parametrize(("stage", "dtype"), [(3, torch.bfloat16), (1, torch.float32), (2, torch.float32)])
def test_a_folder_comes_out_as_it_went_in(
    ranks_pool: RanksPool, tmp_path: Path, stage: int, dtype: torch.dtype
) -> None:
    plain, ours, theirs = make_llama(dtype=dtype), tmp_path / "ours", tmp_path / "theirs"
    plain.save_pretrained(theirs, max_shard_size=KILOBYTES)
    ranks_pool.run(2, load_and_save, theirs, ours, stage, dtype)
    assert_same_files(ours, theirs)
    assert len(list(ours.glob("*.safetensors"))) > 2
    assert "lm_head.weight" not in tensors_of(ours)
    loaded = type(plain).from_pretrained(ours, dtype="auto")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(TOKENS).logits, plain(TOKENS).logits)


def save_after_training(rank: int, world_size: int, folder: Path) -> Tensor:
    """Train and save weights that no file had; return the logits of the plain module."""
    half = tz.MixedPrecision(torch.bfloat16)
    model = compile_model(make_llama(), tz.Policy(3, mixed_precision=half))
    take_step(model, adamw(model))
    alive: list[weakref.ref[Tensor]] = []
    full_tensor, before = small_collectives.full_tensor, dtype_in(model.plain.config.to_dict())

    def gather_alone(*args: Any) -> Tensor:
        assert not any(ref() is not None for ref in alive), "two gathered tensors are alive"
        value = full_tensor(*args)
        alive.append(weakref.ref(value))
        return value

    with mock.patch.object(writing, "full_tensor", gather_alone):
        tz.save_pretrained(model, folder / "many", max_shard_size=KILOBYTES)
        tz.save_pretrained(model, folder / "one", max_shard_size=KILOBYTES)
        tz.save_pretrained(model, folder / "one")  # replaces several files
        tz.save_pretrained(model, folder / "half", dtype=torch.bfloat16)
    with tz.full_parameters(model) as module, torch.no_grad():
        assert dtype_in(module.config.to_dict()) == before, "saving left the module's config alone"
        return module(TOKENS).logits


def test_from_pretrained_loads_what_was_trained(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Check that files have the dtype of shards, or the dtype that is asked for."""
    kind = type(make_llama())
    for logits in ranks_pool.run(2, save_after_training, tmp_path):
        for folder in ("many", "one"):
            assert torch.equal(kind.from_pretrained(tmp_path / folder, dtype="auto")(TOKENS).logits, logits)
    assert names_in(tmp_path / "one") == ["config.json", "generation_config.json", "model.safetensors"]
    for folder, word in {"many": "float32", "one": "float32", "half": "bfloat16"}.items():
        assert dtype_in(json.loads((tmp_path / folder / "config.json").read_text())) == word
    whole = {name: tensor.bfloat16() for name, tensor in tensors_of(tmp_path / "one").items()}
    assert differing(tensors_of(tmp_path / "half"), whole) == []


WORDS = TOKENS + 1  # transformers gives the embedding of its padding, 0, no gradient


def train_own_llama(rank: int, world_size: int, folder: Path, expected: Tensor) -> None:
    """Load the repository's Llama from a folder of transformers under ``thunder.jit``, and save it as one."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(33, **sizes, num_key_value_heads=1, tie_word_embeddings=True)
    model = thunder.jit(Llama(config), transforms=[tz.ZeroTransform(3, weights=folder)])
    out = model(input_ids=WORDS, labels=WORDS)
    assert_close(out.logits, expected)
    out.loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    tz.save_pretrained(model, folder / "trained")


def test_the_repositorys_llama_takes_weights_of_transformers(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Train it under ``thunder.jit``, and transformers' Llama in eager mode."""
    plain = make_llama()
    plain.save_pretrained(tmp_path)
    out = plain(input_ids=WORDS, labels=WORDS)
    ranks_pool.run(2, train_own_llama, tmp_path, out.logits.detach())
    out.loss.backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    trained = tensors_of(tmp_path / "trained")
    assert_close(trained, {name: plain.state_dict()[name] for name in trained}, rtol=1e-5, atol=1e-6)
    assert len(trained) == len(list(plain.parameters()))


def ask_for_hidden_states(rank: int, world_size: int) -> None:
    """Ask for hidden states in the second of three forwards, in which transformers adds hooks that stay."""
    plain, model = make_llama(), compile_model(make_llama())
    for hidden in (False, True, False):
        outputs = [module(input_ids=WORDS, labels=WORDS, output_hidden_states=hidden) for module in (model, plain)]
        assert [out.hidden_states is not None for out in outputs] == [hidden] * 2
        for actual, expected in zip(*(out.hidden_states or [out.logits] for out in outputs), strict=True):
            assert_close(actual, expected)
        for out in outputs:
            (out.loss + sum(state.mean() for state in out.hidden_states or ())).backward()
    for (name, actual), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(full(actual.grad), expected.grad, msg=name)


def test_hidden_states_are_those_of_the_plain_model(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, ask_for_hidden_states)


def use_own_units(rank: int, world_size: int) -> None:
    """Check that ViT's own plan has units for its embeddings and for its only layer."""
    module = fresh(BY_NAME["ViT"].make)
    units = run_page("Units", {"tz": tz, "module": module})["model"].state.plan.units
    assert "vit.embeddings" in units
    assert len(units) == 3
    assert set(compile_model(fresh(BY_NAME["ViT"].make)).state.plan.units) == {""}


def test_units_of_a_models_own_plan(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, use_own_units)


FAMILIES = ("BERT", "CLIP", "GPT-2", "Mixtral", "ResNet", "T5", "ViT", "Whisper")  # of unlike names and ties
CONVERTED = ("Mixtral",)  # transformers 5 converts its weights


def save_by_both(rank: int, world_size: int, folder: Path) -> None:
    for name in FAMILIES:
        module: Any = fresh(BY_NAME[name].make)
        if rank == 0:
            module.save_pretrained(folder / name / "theirs")
        dist.barrier()  # save_pretrained writes to the module's config
        model, ours = compile_model(module), folder / name / "ours"
        if name in CONVERTED and has_transformers(5):
            # Transformers joins experts when it loads, and parts them when it saves, which needs full values.
            words = error_of(partial(tz.save_pretrained, model, ours))
            assert "MixtralForCausalLM.save_pretrained raised" in words, words
            with tz.full_parameters(model, rank0_only=True) as full_module:
                if rank == 0:
                    full_module.save_pretrained(ours)
            continue
        tz.save_pretrained(model, ours)


def test_each_family_has_the_files_of_its_own_class(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, save_by_both, tmp_path)
    for name in FAMILIES:
        assert_same_files(tmp_path / name / "ours", tmp_path / name / "theirs")


class Odd(Small):
    """A model with a buffer outside of the state dict, an extra state, and a parameter that ranks do not share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.arange(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.own = nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


def save_odd(rank: int, world_size: int, folder: Path) -> None:
    model = sharded(fresh(Odd), tz.Policy(3, ignored=("own",)))
    take_step(model, adamw(model))
    model.own.data.fill_(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tz.save_pretrained(model, folder)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (rank == 0), messages
    assert all("leaves out _extra_state" in words for words in messages), messages
    loaded = compile_model(Odd(), weights=folder)
    extra = {"_extra_state": torch.tensor(3)}
    expected, actual = tz.full_state_dict(model) | extra, tz.full_state_dict(loaded) | extra
    assert differing(actual, {**expected, "own": torch.zeros(2)}) == [], "ignored parameters are rank 0's"
    if rank == 0:
        assert names_in(folder) == ["model.safetensors"]
        assert tensors_of(folder).keys() == expected.keys() - {"head.weight", "_extra_state"}, "embed.weight is first"
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert json.loads(file.metadata()["aliases"]) == {"head.weight": "embed.weight"}


def test_a_module_that_is_not_hugging_faces_gets_its_weights_alone(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(3, save_odd, tmp_path / "new" / "folder")


class Failing(Small):
    """A model whose own ``save_pretrained`` fails in training, and writes other values in evaluation."""

    def save_pretrained(self, folder: str, *, state_dict: Any) -> None:
        if self.training:
            raise LookupError("no config")
        save_file({"scale": torch.ones(3)}, f"{folder}/model.safetensors")


def refuse_saves(rank: int, world_size: int, folder: Path) -> None:
    model, failing, writing_wrong = (sharded(fresh(kind), 3) for kind in (Small, Failing, Failing))
    writing_wrong.eval()
    complex_one = compile_model(nn.Linear(2, 2).to(torch.complex128))

    def save(module: Any = model, path: Any = folder / "model", **options: Any) -> Callable[[], None]:
        return lambda: tz.save_pretrained(module, path, **options)

    def inside() -> None:
        with tz.full_parameters(model):
            save()()

    def disk_full() -> None:
        def fails(create: Any, path: Path, *rest: Any) -> None:
            with create(path) as stream:
                stream.write(b"some")
                raise OSError(errno.ENOSPC, "")

        with mock.patch.object(writing, "write_parts", fails):
            save()()

    file, everyone = folder / "file", None
    file.touch()
    rows: list[tuple[Callable[[], None], int | None, tuple[str, ...]]] = [  # a call, the rank that refuses, words
        (save(), everyone, ("nothing",)),
        (save(fresh(Small)), everyone, ("a sharded model, got Small",)),
        (save(max_shard_size=0), everyone, ("max_shard_size is 0", "or one with a unit")),
        (save(dtype=torch.int8), everyone, ("dtype is torch.int8", "give a dtype of floating-point numbers")),
        (save(path=folder / f"of {rank}"), everyone, ("folder differs between ranks",)),
        (inside, everyone, ("is inside full_parameters; leave that block first",)),
        (save(max_shard_size="5 bytes" if rank == 1 else 1), 1, ("max_shard_size is '5 bytes'",)),
        (save(path=3 if rank == 1 else folder), 1, ("os.PathLike object",)),
        (save(path=file), 0, (f"cannot write {file}", "File exists; existing files are unchanged")),
        (disk_full, 0, (f"cannot write {folder / 'model/model.safetensors'}", "the disk is full; existing files")),
        (save(failing), 0, ("Failing.save_pretrained raised: no config", "full_parameters(model, rank0_only=True)")),
        (save(writing_wrong), 0, ("does not write the state dict that it is given: 'scale'",)),
        (save(complex_one), 0, ("a safetensors file cannot hold weight of torch.complex128",)),
    ]
    for call, refuser, words in rows:
        error = error_of(call)
        more = () if refuser in (everyone, rank) else (f"rank {refuser} refused to save, so every rank stops",)
        assert [word for word in (*words, *more) if word not in error] == [], error


def test_refusals_on_every_rank_leave_the_folder_as_it_was(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, refuse_saves, tmp_path)
    assert names_in(tmp_path) == ["file", "model"]
    assert names_in(tmp_path / "model") == ["model.safetensors"]


# The code of docs/hugging-face.md

PAGE = Path(__file__).parents[2] / "docs/hugging-face.md"
MODULES = {"torch": torch, "tz": tz, "thunder": thunder}


def run_page(heading: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the code under a heading of the page with these names; return all names afterwards."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
        exec(compile(block, f"{PAGE.name}: {heading}", "exec"), names)
    return names


def make_batches(rank: int, world_size: int) -> list[Tensor]:
    """Return this rank's rows of three batches of four rows."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 33, (4, 8), generator=generator).chunk(world_size)[rank] for _ in range(3)]


def train(module: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train in one process on the page's batches."""
    for batch in make_batches(0, 1):
        module(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def generate(rank: int, world_size: int, folder: Path, expected: list[Tensor], trained: dict[str, Tensor]) -> None:
    names = {"start": folder / "start", "trained": folder / "trained", "batches": make_batches(rank, world_size)}
    results = run_page("From a folder to a folder", dict(names))
    for prompt, tokens in enumerate(expected):
        answer = run_page("Generate", results | {"prompt": PROMPT + prompt})["answer"]
        assert answer.tolist() == tokens.tolist(), (answer, tokens)
    weights = tz.full_state_dict(results["model"])
    assert_close(weights, trained, rtol=1e-4, atol=1e-5)
    if rank == 0:
        loaded = library("transformers").AutoModelForCausalLM.from_pretrained(folder / "trained")
        assert differing(dict(loaded.state_dict()), weights) == []


PROMPT = torch.arange(1, 5).view(1, 4)


def test_greedy_generation_after_training_is_the_plain_modules(ranks_pool: RanksPool, tmp_path: Path) -> None:
    plain = make_llama(tied=False)  # a tied Llama repeats its last token
    plain.save_pretrained(tmp_path / "start")
    before = plain.generate(PROMPT, max_new_tokens=8, do_sample=False)
    train(plain, adamw(plain, 1e-2))
    expected = [plain.generate(PROMPT + offset, max_new_tokens=8, do_sample=False) for offset in (0, 1)]
    assert not expected[0].equal(before)
    ranks_pool.run(2, generate, tmp_path, expected, dict(plain.state_dict()))


def train_adapters(rank: int, world_size: int, folder: Path) -> Tensor:
    """Check that only adapters are trained, reduced, stepped and saved; return the logits."""
    peft, base = library("peft"), make_llama()
    torch.manual_seed(0)
    plain = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    start = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    trained = [name for name, param in plain.named_parameters() if param.requires_grad]
    train(plain, torch.optim.AdamW([plain.get_parameter(name) for name in trained], lr=1e-2))
    names = {"base": make_llama(), "batches": make_batches(rank, world_size), "folder": folder}
    results = run_page("LoRA with peft", MODULES | names)
    model, optimizer = results["model"], results["optimizer"]
    with mock.patch.object(writing, "full_tensor", side_effect=small_collectives.full_tensor) as gather:
        tz.save_pretrained(model, folder / "again")
    shapes = [tuple(plain.get_parameter(name).shape) for name in trained]
    assert sorted(tuple(call.args[0].shape) for call in gather.call_args_list) == sorted(shapes)
    ops = tz.traces_of(model).timeline.ops
    assert {path for op in ops if isinstance(op, tz.schedule.Reduce) for path in op.params} == set(trained)
    state = [value for entry in optimizer.state.values() for key, value in entry.items() if key != "step"]
    assert sum(local(value).numel() for value in state) == sum(plain.get_parameter(name).numel() for name in trained)
    frozen = model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    assert len(local(frozen)) == 8
    full = tz.full_state_dict(model)
    assert_close(full, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
    assert set(differing(full, start)) == set(trained)
    with tz.full_parameters(model) as module, torch.no_grad():
        return module(TOKENS).logits


def test_adapters_of_peft_are_trained_and_saved_alone(ranks_pool: RanksPool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    logits, _ = ranks_pool.run(2, train_adapters, tmp_path / "adapter")
    for folder in (tmp_path / "adapter", tmp_path / "adapter/again"):
        assert torch.equal(peft.PeftModel.from_pretrained(make_llama(), folder)(TOKENS).logits, logits)


def train_on_a_base_of_bitsandbytes(rank: int, world_size: int, folder: Path) -> None:
    """Train the page's model; merge, save and load what one process with bitsandbytes has."""
    torch.manual_seed(0)
    one = run_page("A base of bitsandbytes", {"tz": Uncompiled, "start": folder / "start"})["model"]
    torch.manual_seed(rank)
    model = run_page("A base of bitsandbytes", {"tz": tz, "start": folder / "start"})["model"]
    for module in (one, model):
        optimizer = torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=1e-2)
        for batch in make_batches(0, 1):
            module(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    adapters, full = (
        {name: param for name, param in one.named_parameters() if param.requires_grad},
        tz.full_state_dict(model),
    )
    assert_close({name: full[name] for name in adapters}, adapters, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for name, adapter in adapters.items():  # a rounding error may decide on a level in 4 bits
            adapter.copy_(full[name])
    with tz.full_parameters(model) as module, torch.no_grad():
        merged, expected = copy.deepcopy(module).merge_and_unload(), one.merge_and_unload()
        assert torch.equal(merged(TOKENS).logits, expected(TOKENS).logits)
        if rank == 0:
            merged.save_pretrained(folder / "merged")
            loaded = library("transformers").AutoModelForCausalLM.from_pretrained(folder / "merged")
            assert torch.equal(loaded(TOKENS).logits, expected(TOKENS).logits)


class Uncompiled:
    @staticmethod
    def compile(module: Any, **arguments: Any) -> Any:
        return module


@pytest.mark.slow
def test_a_base_of_bitsandbytes_is_that_of_one_process(ranks_pool: RanksPool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    make_llama().save_pretrained(tmp_path / "start")
    ranks_pool.run(2, train_on_a_base_of_bitsandbytes, tmp_path)


ADAPTERS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"target_modules": ["q_proj"], "modules_to_save": ["norm"], "bias": "all", "use_dora": True},
    "IA3Config": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "PromptTuningConfig": {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"},
}


def save_adapters_by_both(rank: int, world_size: int, folder: Path) -> None:
    peft = library("peft")
    for name, options in ADAPTERS.items():
        model = peft.get_peft_model(make_llama(), getattr(peft, name)(**options))
        if name == "LoraConfig":
            model.add_adapter("other", peft.LoraConfig(target_modules=["v_proj"]))
        ours, theirs = folder / name / "ours", folder / name / "theirs"
        model.save_pretrained(theirs)
        error = error_of(partial(tz.save_pretrained, compile_model(model), ours))
        if name == "PromptTuningConfig":  # its save_pretrained computes
            for words in ("PeftModelForCausalLM.save_pretrained raised", "full_parameters(model, rank0_only=True)"):
                assert words in error, error
            continue
        assert error == "nothing", (name, error)
        for part in ("", "other") if name == "LoraConfig" else ("",):
            assert_same_files(ours / part, theirs / part)


def test_each_kind_of_adapter_has_the_files_of_peft(ranks_pool: RanksPool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    ranks_pool.run(1, save_adapters_by_both, tmp_path)


class Regression(nn.Module):
    """A model for Trainer and Accelerate, which takes keywords and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.head.forward(torch.tanh(self.hidden.forward(x)))
        return {"loss": (y - labels).square().mean(), "logits": y}


def make_rows(count: int) -> list[dict[str, Tensor]]:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(2))
    return [{"x": x, "labels": x.sum().view(1)} for x in inputs]


def step_plain(plain: Any, optimizer: torch.optim.Optimizer, micro_batches: list[Any], half: bool = False) -> float:
    """Take one process's step on several batches of equal size; return the norm of its gradients."""
    for batch in micro_batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = plain(**batch)["loss"]
        (loss.float() / len(micro_batches)).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


@pytest.fixture
def own_pool() -> Iterator[RanksPool]:
    """Yield a pool for a single test, because Accelerate reads the environment only once."""
    pytest.importorskip("accelerate")
    with RanksPool() as pool:
        yield pool


def set_environment(rank: int, world_size: int) -> None:
    """Set what Accelerate reads from the environment; the process group exists already."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"WORLD_SIZE": str(world_size), "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": "1"}  # no process connects to it


def refuse_by_trainer(rank: int, world_size: int, folder: Path) -> None:
    """Check that a plain Trainer refuses a sharded model, and that a sharded one refuses arguments that do not fit."""
    set_environment(rank, world_size)
    peft, transformers = library("peft"), library("transformers")
    adapters = peft.get_peft_model(make_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    arguments = partial(transformers.TrainingArguments, str(folder), use_cpu=True, report_to=[], disable_tqdm=True)
    for module in (fresh(Regression), adapters):
        model = compile_model(module, broadcast_from=0)
        plain_trainer = transformers.Trainer(model=model, args=arguments(max_steps=1), train_dataset=make_rows(4))
        words = error_of(plain_trainer.train)
        assert "Accelerate, or a Trainer, was given a" in words, words
        assert "or sharded(Trainer)(model=model, ...)" in words, words
    model = compile_model(fresh(Regression))
    three, none = (
        partial(library("thunder_zero.hugging_face").sharded, transformers.Trainer, **options)
        for options in ({"stage": 3}, {})
    )
    best = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "save_steps": 500,
        "metric_for_best_model": "loss",
    }
    rows_of: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
        (three, {}, {"auto_find_batch_size": True}, "has auto_find_batch_size=True; set per_device_train_batch_size"),
        (three, {}, {"neftune_noise_alpha": 5.0}, "has neftune_noise_alpha=5.0; leave it out"),
        (three, {}, {"save_only_model": True, **best}, "save_only_model=True leaves out what load_best_model_at_end"),
        (three, {"model": None, "model_init": Regression}, {}, "model_init makes a new model for each train()"),
        (three, {"model": model}, {}, "is sharded twice; leave stage= and the other arguments of sharded(...) out"),
        (partial(three, shares=(2, 1)), {}, {}, "shares is (2, 1), and Accelerate gives every rank an equal batch"),
        (none, {}, {}, "nothing says how to shard the model of the trainer; pass stage= to sharded(...)"),
    ]
    for make, inputs, options, sentence in rows_of:
        inputs = {"model": fresh(Regression), "eval_dataset": make_rows(2)} | inputs
        words = error_of(lambda make=make, inputs=inputs, options=options: make()(args=arguments(**options), **inputs))  # type: ignore[misc]
        assert sentence in words, words
    words = error_of(partial(library("thunder_zero.hugging_face").sharded, Regression, stage=3))
    assert "Regression has no method _load_best_model, which a sharded trainer replaces; give a class derived" in words
    assert f"of transformers 4.56 to 5.24 (here: {transformers.__version__})" in words, words


def test_what_does_not_fit_a_sharded_model_is_refused(own_pool: RanksPool, tmp_path: Path) -> None:
    own_pool.run(2, refuse_by_trainer, tmp_path)


# Accelerate


def make_accelerator(kind: Any, precision: str = "no") -> Any:
    """Make an accelerator on the CPU, where Accelerate has no float16: its autocast and scaler are added here."""
    library("accelerate.state").AcceleratorState._reset_state()  # which keeps the precision of the process
    on_cpu = {"fp16": "no"}.get(precision, precision)
    accelerator = kind(mixed_precision=on_cpu, gradient_accumulation_steps=2, cpu=True)
    if precision == "fp16":
        accelerator.native_amp, accelerator.state._mixed_precision = True, precision
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2)  # too large at first
    return accelerator


class Dropping(nn.Sequential):
    """A model with random numbers, and more rows than ranks divide."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 1))


def loop_by(kind: Any, precision: str, folder: Path) -> tuple[list[Any], dict[str, Tensor]]:
    """Train as a user of Accelerate does. A sharded accelerator then takes the second epoch again from its state."""
    accelerator = make_accelerator(kind, precision)
    module = fresh(Dropping)
    torch.manual_seed(accelerator.process_index)
    optimizer = adamw(module, 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    rows_of: Any = [(row["x"], row["labels"]) for row in make_rows(19)]
    loader = torch.utils.data.DataLoader(rows_of, batch_size=2)
    optimizer = accelerator.prepare(optimizer)  # before the model that it steps
    model, loader, scheduler = accelerator.prepare(module, loader, scheduler)

    def epoch() -> list[Any]:
        lines: list[Any] = []
        for x, labels in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - labels).square().mean()
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else loss
                assert type(norm) is Tensor
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            scale = accelerator.scaler.get_scale() if accelerator.scaler is not None else 1.0
            skipped = accelerator.sync_gradients and accelerator.optimizer_step_was_skipped
            total = accelerator.gather(loss.detach()).sum()
            lines += [total.item(), float(norm), *scheduler.get_last_lr(), scale, skipped]
        with torch.no_grad():
            errors = [accelerator.gather_for_metrics((model(x) - labels).abs()) for x, labels in loader]
        return [*lines, len(torch.cat(errors)), torch.cat(errors).sum().item()]

    first = epoch()
    accelerator.save_state(folder)
    second, weights = epoch(), accelerator.get_state_dict(model)
    if isinstance(model, tz.ZeroModule):
        accelerator.load_state(folder)
        assert repr(epoch()) == repr(second), "a resumed run differs"  # a norm may be nan
        assert differing(tz.full_state_dict(model), weights) == []
        assert not {"optimizer.bin", "model.safetensors", "pytorch_model.bin"} & set(names_in(folder)), names_in(folder)
        unwrapped = accelerator.unwrap_model(model)
        accelerator.save_model(unwrapped, folder / "model")
        dist.barrier()
        assert differing(load_file(folder / "model/model.safetensors"), weights) == []
    return first + second, dict(weights)


def train_by_accelerate(rank: int, world_size: int, folder: Path) -> None:
    """Compare with Accelerate's own DistributedDataParallel, in each precision and two stages."""
    set_environment(rank, world_size)
    plain, sharded_class = library("accelerate").Accelerator, library("thunder_zero.hugging_face").sharded
    for precision, close in {"no": 1e-5, "bf16": 2e-2, "fp16": 5e-3}.items():
        lines, weights = loop_by(plain, precision, folder / f"ddp-{precision}")
        skipped = lines[4:25:5]  # in the first epoch
        assert any(skipped) is (precision == "fp16"), skipped
        assert sum(skipped) < 3, "no step was taken"
        for stage in (3,) if precision == "bf16" else (0, 3):
            state = folder / f"{stage}-{precision}"
            actual_lines, actual = loop_by(sharded_class(plain, stage=stage), precision, state)
            assert actual_lines == pytest.approx(lines, rel=close, abs=close, nan_ok=True), (precision, stage)
            assert_close(actual, weights, rtol=close, atol=close)


def test_accelerates_loop_trains_and_resumes_as_under_ddp(own_pool: RanksPool, tmp_path: Path) -> None:
    own_pool.run(2, train_by_accelerate, tmp_path, timeout=LONG)


def refuse_by_accelerate(rank: int, world_size: int, folder: Path) -> None:
    """Check that no accelerator writes one rank's rows, and that settings which do not fit are refused."""
    set_environment(rank, world_size)
    plain, sharded_class = library("accelerate").Accelerator, library("thunder_zero.hugging_face").sharded
    model = compile_model(fresh(Regression))
    batch = torch.utils.data.default_collate(make_rows(2))
    for kind in (plain, sharded_class(plain)):  # neither has prepared the model
        accelerator = make_accelerator(kind)
        optimizer = accelerator.prepare(adamw(model))
        model(**batch)["loss"].backward()
        optimizer.step()
        words = error_of(partial(accelerator.save_state, folder / "state"))
        assert "Accelerate writes the state of AdamW on one rank, and each rank holds its own rows; let" in words, words
        if kind is not plain:
            continue
        for call in (
            partial(accelerator.get_state_dict, model),
            partial(accelerator.save_model, model, folder / "model", safe_serialization=False),
        ):
            words = error_of(call)
            assert "Accelerate writes the state dict of Regression on one rank" in words, words
            assert "sharded(Accelerator)(...) prepare the model, or call tz.save and tz.full_state_dict" in words, words
        words = error_of(partial(accelerator.prepare, model))
        assert "Accelerate, or a Trainer, was given a Regression that thunder_zero trains" in words, words
        assert "make it by thunder_zero.hugging_face.sharded(Accelerator)(...)" in words, words
    dist.barrier()
    assert names_in(folder / "state") == []
    assert not (folder / "model").exists()
    assert accelerator.prepare(model) is model, "a sharded accelerator takes a sharded model"
    words = error_of(lambda: accelerator.save(accelerator.unwrap_model(model).state_dict(), folder / "rows.pt"))
    assert "Accelerator.save was given DTensors, and writes the rows of one rank; pass it acc" in words, words
    accelerator.save_state(folder / "state")
    dist.barrier()
    assert not (folder / "rows.pt").exists()
    assert names_in(folder / "state") == ["latest", "random_states_0.pkl", "random_states_1.pkl", "run"]
    words = error_of(partial(accelerator.prepare, fresh(Regression)))
    assert "nothing says how to shard Regression; pass stage= to sharded(Accelerator, ...)" in words, words
    words = error_of(partial(accelerator.prepare, compile_model(fresh(Regression), shares=(2, 1))))
    assert "shares is (2, 1), and Accelerate gives every rank an equal batch; leave shares out" in words, words
    criterion = nn.MSELoss()
    assert accelerator.prepare(criterion) is criterion
    three = sharded_class(plain, stage=3)
    kinds, backends = library("accelerate").DistributedType, library("accelerate.utils").DynamoBackend
    state = accelerator.state
    for target, change, sentence in (
        (vars(state), {"distributed_type": kinds.FSDP}, "is set up to shard by FSDP"),
        (vars(state), {"_mixed_precision": "fp8"}, "has mixed_precision='fp8'"),
        (vars(state.dynamo_plugin), {"backend": backends.INDUCTOR}, "compiles by dynamo_backend='INDUCTOR'"),
        (vars(state), {"parallelism_config": object()}, "has a parallelism_config"),
    ):
        with mock.patch.dict(target, change):
            words = error_of(partial(three.adopt, accelerator))
        assert f"Accelerator {sentence}" in words, (sentence, words)
        assert ", and thunder_zero shards the model;" in words, words


def test_no_accelerator_writes_the_rows_of_one_rank(own_pool: RanksPool, tmp_path: Path) -> None:
    own_pool.run(2, refuse_by_accelerate, tmp_path, timeout=LONG)


def train_the_pages_loop(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    set_environment(rank, world_size)
    rows_of: Any = [{"input_ids": row, "labels": row} for row in torch.arange(1, 33).view(8, 4)]
    loader = torch.utils.data.DataLoader(rows_of, batch_size=2)
    names = {"module": make_llama(seed=rank), "loader": loader, "folder": folder / "state"}
    results = run_page("Accelerate", {**MODULES, **names, "trained": folder / "trained"})
    assert results["model"].state.plan.policy.stage == 3
    policy = tz.Policy(3, mixed_precision=tz.MixedPrecision(torch.bfloat16))
    halves = results["accelerator"].prepare(compile_model(fresh(Regression), policy))
    logits = halves(**torch.utils.data.default_collate(make_rows(2)))["logits"]
    assert logits.dtype is torch.bfloat16, "Accelerate has replaced the model's precision"
    logits = results["model"](**results["batch"]).logits
    assert torch.equal(logits, logits.bfloat16().float()), "the autocast did not reach forward"
    assert logits.dtype is torch.float32
    return tz.full_state_dict(results["model"])


def test_from_pretrained_loads_what_accelerates_page_trained(own_pool: RanksPool, tmp_path: Path) -> None:
    for weights in own_pool.run(2, train_the_pages_loop, tmp_path, timeout=LONG):
        loaded = type(make_llama()).from_pretrained(tmp_path / "trained")
        assert differing(dict(loaded.state_dict()), weights) == []
        assert any(not torch.equal(weights[name], value) for name, value in make_llama().state_dict().items())


class RecordingList(list[Any]):
    """A list that records the indices that are read."""

    def __init__(self, data: list[Any]) -> None:
        super().__init__(data)
        self.indices: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.indices.append(index)
        return super().__getitem__(index)


def train_adapters_by(kind: Any, folder: Path) -> None:
    """Save peft's adapters after each step, and resume after the first; check that final weights are equal."""
    peft, transformers, ends = library("peft"), library("transformers"), []
    data = [{"input_ids": TOKENS[number % 2] + 1, "labels": TOKENS[number % 2] + 1} for number in range(8)]
    for start in (None, f"{folder}/adapters/checkpoint-1"):
        torch.manual_seed(0)
        module = peft.get_peft_model(make_llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        arguments = transformers.TrainingArguments(
            f"{folder}/adapters", use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2, save_steps=1
        )
        trainer = kind(model=module, args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=start)
        ends.append(tz.full_state_dict(trainer.model_wrapped))
    assert differing(*ends) == []
    written = load_file(folder / "adapters/checkpoint-2/adapter_model.safetensors")
    assert all("lora_" in name for name in written), list(written)
    assert written


def train_words_by(kind: Any, folder: Path) -> None:
    """Step on rows of 7, 5, 3 and 1 words, whose loss is a mean over the words of all ranks and micro-batches.

    The user makes the optimizer over the plain module's parameters.
    """
    transformers, tokens = library("transformers"), torch.arange(1, 33).view(4, 8)
    labels = [torch.where(torch.arange(8) < 2 * number + 1, -100, row) for number, row in enumerate(tokens)]
    data = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    options: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    options |= {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        f"{folder}/words", use_cpu=True, report_to=[], disable_tqdm=True, **options
    )
    module, plain = make_llama(), make_llama()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    trainer = kind(model=module, args=arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    logits = plain(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    nn.functional.cross_entropy(logits, torch.stack(labels)[:, 1:].flatten()).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    assert_close(tz.full_state_dict(trainer.model_wrapped), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


def train_by_trainer(rank: int, world_size: int, folder: Path) -> tuple[Any, ...]:
    """Take four steps, the last two again from a checkpoint, and four in bfloat16.

    Return this rank's row numbers, norms of gradients, and the weights in float32 and bfloat16.
    """
    set_environment(rank, world_size)
    options = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "max_steps": 4, "save_steps": 2}
    options |= {"logging_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options |= {
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "weight_decay": 0.5,
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
    }
    data = RecordingList(make_rows(32))
    results = run_page("Trainer", {"module": fresh(Regression), "options": options, "data": data})
    trainer, zero = results["trainer"], results["sharded"](library("transformers").Trainer)
    resumed = zero(model=compile_model(Regression()), args=results["arguments"], train_dataset=make_rows(32))
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    trainer.args.push_to_hub = True
    with mock.patch.object(trainer, "push_to_hub") as pushed:
        trainer.save_model(f"{folder}/last")
    pushed.assert_called_once_with(commit_message="Model save", revision=None)
    trainer.args.push_to_hub = False
    three = type(trainer)
    train_adapters_by(three, folder)
    in_4_bits = results["sharded"](library("transformers").Trainer, stage=3, frozen_format=tz.NF4())
    train_adapters_by(in_4_bits, folder / "4-bits")
    train_words_by(three, folder)
    groups = trainer.optimizer.param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.5, 2), (0.0, 2)]
    weights = tz.full_state_dict(trainer.model_wrapped)
    assert differing(tz.full_state_dict(resumed.model_wrapped), weights) == []
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    for name in ("checkpoint-4", "last") if rank == 0 else ():
        assert differing(load_file(folder / name / "model.safetensors"), weights) == [], name
    options |= {"bf16": True, "save_steps": 4}
    half = run_page("Trainer", {"module": fresh(Regression), "options": options, "data": make_rows(32)})["trainer"]
    return data.indices, logged, weights, tz.full_state_dict(half.model_wrapped)


def test_the_trainer_of_the_page_trains_saves_and_resumes(own_pool: RanksPool, tmp_path: Path) -> None:
    results = own_pool.run(2, train_by_trainer, tmp_path, timeout=LONG)
    data = make_rows(32)
    for half in (False, True):
        plain, norms = fresh(Regression), list[float]()
        weights, biases = ([p for n, p in plain.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
        groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        for step in range(4):
            places = [slice(4 * step + start, 4 * step + start + 2) for start in (0, 2)]
            micro = [[data[index] for index in indices[place]] for place in places for indices, *_ in results]
            collated = [torch.utils.data.default_collate(examples) for examples in micro]
            norms.append(step_plain(plain, optimizer, collated, half))
        for _, logged, *actual in results:
            assert half or logged == pytest.approx(norms)
            close = 1e-3 if half else 1e-6
            assert_close(actual[half], dict(plain.state_dict()), rtol=10 * close, atol=close)
    assert any((actual[0][name] - actual[1][name]).abs().max() > 1e-5 for name in actual[0]), "in float32"


# Scripts of trainers, under DistributedDataParallel and sharded


def make_words(count: int, seed: int = 0) -> Any:
    """Return a dataset of rows of 4 to 8 tokens, with a column that no model takes."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 9, (count,), generator=generator).tolist()
    tokens = [torch.randint(1, 33, (length,), generator=generator).tolist() for length in lengths]
    rows_of = [{"input_ids": row, "labels": row, "length": len(row), "name": "row"} for row in tokens]
    return library("datasets").Dataset.from_list(rows_of)


def collate_padded(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a batch whose padding counts in no loss."""
    length = max(len(row["input_ids"]) for row in examples)
    pads = {"input_ids": 0, "labels": -100}
    return {
        name: torch.tensor([row[name] + [pad] * (length - len(row[name])) for row in examples])
        for name, pad in pads.items()
    }


def logged_by(trainer: Any) -> list[tuple[str, float]]:
    """Return what a trainer logged, without times."""
    logged = ("loss", "eval_loss", "grad_norm", "learning_rate")
    return [(name, value) for entry in trainer.state.log_history for name, value in entry.items() if name in logged]


def full_weights_of(trainer: Any) -> dict[str, Tensor]:
    """Return the full weights that a trainer trained."""
    is_zero = isinstance(trainer.model_wrapped, tz.ZeroModule)
    return tz.full_state_dict(trainer.model_wrapped) if is_zero else dict(trainer.model.state_dict())


def assert_trained_alike(zero: Any, ddp: Any) -> None:
    for (name, value), (expected_name, expected_value) in zip(logged_by(zero), logged_by(ddp), strict=True):
        assert name == expected_name
        assert value == pytest.approx(expected_value, rel=1e-4, abs=1e-7), name
    actual, expected = full_weights_of(zero), full_weights_of(ddp)
    assert_close(actual, expected, rtol=1e-4, atol=5e-5)
    for path, weight in expected.items():  # where a gradient is nearly 0, rounding decides AdamW's step
        near = torch.isclose(actual[path], weight, rtol=1e-4, atol=1e-6)
        assert near.float().mean() >= 0.99, path


def train_by_one_script(rank: int, world_size: int, folder: Path) -> None:
    """Train with many arguments, of which the best model is not the last; then resume from DDP's checkpoint."""
    set_environment(rank, world_size)
    transformers, hugging_face = library("transformers"), library("thunder_zero.hugging_face")
    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 3, "eval_steps": 1}
    options |= {"logging_steps": 1, "eval_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    options |= {"save_total_limit": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options |= {"learning_rate": 0.1, "max_grad_norm": 0.5, "label_smoothing_factor": 0.1}
    by_length: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
    if not by_length.keys() <= {field.name for field in fields(transformers.TrainingArguments)}:
        by_length = {"group_by_length": True}  # its name before transformers 5.2
    options |= {"gradient_checkpointing": True, "optim": "adamw_torch", **by_length}

    def train_by(kind: Any, name: str, start: str | None = None, **more: Any) -> Any:
        arguments = transformers.TrainingArguments(str(folder / name), **options | more)
        inputs = {"train_dataset": make_words(24), "eval_dataset": make_words(4, 1), "data_collator": collate_padded}
        trainer = kind(make_llama(seed=rank), arguments, **inputs)  # all ranks take rank 0's values
        trainer.train(resume_from_checkpoint=start and str(folder / start))
        return trainer

    three = hugging_face.sharded(transformers.Trainer, stage=3)
    zero, ddp = train_by(three, "zero"), train_by(transformers.Trainer, "ddp")
    assert_trained_alike(zero, ddp)
    losses = [value for name, value in logged_by(ddp) if name == "eval_loss"]
    best = losses.index(min(losses)) + 1
    assert best < len(losses), losses
    assert [Path(trainer.state.best_model_checkpoint).name for trainer in (zero, ddp)] == [f"checkpoint-{best}"] * 2
    dist.barrier()
    checkpoints = [f"checkpoint-{step}" for step in (best, len(losses))]
    assert names_in(folder / "zero") == names_in(folder / "ddp") == checkpoints
    actual, expected = (trainer.predict(make_words(3, 2)) for trainer in (zero, ddp))  # rank 1 has one row, and pads
    assert actual.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-4)
    assert actual.predictions.shape == expected.predictions.shape
    if not has_transformers(5, 20):
        return  # plain trainers fail to load what they saved on several CPUs
    only = {"save_only_model": True, "load_best_model_at_end": False}
    train_by(three, "resumed", f"ddp/checkpoint-{best}", **only)
    assert not (folder / "resumed/checkpoint-3/run").exists()
    last = load_file(folder / "resumed/checkpoint-3/model.safetensors")
    assert_close(last, load_file(folder / "ddp/checkpoint-3/model.safetensors"), rtol=1e-3, atol=1e-4)


def test_a_trainers_script_trains_as_under_ddp(own_pool: RanksPool, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    own_pool.run(2, train_by_one_script, tmp_path, timeout=LONG)


def make_tokenizer() -> Any:
    """Make a tokenizer with one letter a token, without a download."""
    tokenizers, kinds = library("tokenizers"), library("tokenizers.models")
    letters = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    model = tokenizers.Tokenizer(kinds.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = library("tokenizers.pre_tokenizers").Whitespace()
    return library("transformers").PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_texts(count: int, folder: Path, rank: int) -> Any:
    """Return prompts with a chosen and a rejected answer, from files, which TRL's caches need."""
    datasets, draw = library("datasets"), torch.Generator().manual_seed(3)
    letters = [" ".join(map(chr, 97 + torch.randint(26, (6,), generator=draw))) for _ in range(3 * count)]
    columns = ("prompt", "chosen", "rejected")
    if rank == 0:
        starts = range(0, len(letters), 3)
        rows_of = [dict(zip(columns, letters[start : start + 3], strict=True)) for start in starts]
        datasets.Dataset.from_list(rows_of).save_to_disk(folder)
    dist.barrier()
    return datasets.load_from_disk(folder)


def train_by_trl(rank: int, world_size: int, folder: Path) -> None:
    """Train by SFT on rows of all lengths and on packed rows, by DPO with and without precomputed references."""
    set_environment(rank, world_size)
    trl, peft, sharded_class = library("trl"), library("peft"), library("thunder_zero.hugging_face").sharded
    pairs = make_texts(8, folder / "texts", rank)
    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 2, "logging_steps": 1}
    options |= {"bf16": False, "per_device_train_batch_size": 1, "save_strategy": "no", "learning_rate": 0.1}
    lora = partial(peft.LoraConfig, r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def train_by(kind: Any, settings: Any, data: Any, adapters: bool, more: dict[str, Any], **given: Any) -> Any:
        given = {name: make() for name, make in given.items()} | ({"peft_config": lora()} if adapters else {})
        given |= {"model": make_llama(), "processing_class": make_tokenizer(), "train_dataset": data}
        trainer = kind(args=settings(str(folder / "out"), **options | more), **given)
        trainer.train()
        return trainer

    sentences = pairs.map(lambda row: {"text": row["prompt"] + row["chosen"]}, remove_columns=pairs.column_names)
    uneven = sentences.map(lambda row, index: {"text": row["text"][: 7 + 2 * index]}, with_indices=True)
    packed, before = {"packing": True, "max_length": 24}, {"precompute_ref_log_probs": True}
    sft, dpo = (trl.SFTTrainer, trl.SFTConfig), (trl.DPOTrainer, trl.DPOConfig)
    for (plain_kind, settings), data, adapters, more, inputs in (
        (sft, uneven, False, {"max_steps": 4}, {}),
        (sft, sentences, True, packed, {}),
        (dpo, pairs, False, {}, {"ref_model": make_llama}),
        (dpo, pairs, True, before, {}),
    ):
        kinds = sharded_class(plain_kind, stage=3), plain_kind
        ours, plain = (train_by(kind, settings, data, adapters, more, **inputs) for kind in kinds)
        assert_trained_alike(ours, plain)
        if data is uneven:
            assert len(captured_forward(ours.model_wrapped).kept) <= 2, (
                "the first length's program, and one for all lengths"
            )
    words_of = error_of(partial(train_by, sharded_class(trl.DPOTrainer, stage=3), trl.DPOConfig, pairs, True, {}))
    assert "DPOTrainer called the plain module, whose parameters are sharded" in words_of, words_of
    assert "pass precompute_ref_log_probs=True to DPOConfig" in words_of, words_of


def test_trainers_of_trl_train_as_under_ddp(own_pool: RanksPool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    own_pool.run(2, train_by_trl, tmp_path, timeout=LONG)
