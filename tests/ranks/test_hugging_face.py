"""Hugging Face's boundary: folders for ``from_pretrained``, ``generate``, peft's adapters, Trainer and Accelerate.

Nothing is downloaded: models are made from configs. Modules of Hugging Face's libraries are imported where they are
used, after ``thunder_zero``; ``docs/hugging-face.md`` has the code that users copy, and it runs here.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import re
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.checkpoints import adamw, same, stepped
from tests.harness.errors import raised
from tests.harness.models import Small, fresh, sharded
from tests.harness.ranks import RanksPool, run_ranks
from thunder_zero.hugging_face import save_pretrained as writing
from thunder_zero.runtime.state import State

import thunder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]
TOKENS = torch.arange(16).view(2, 8)
KILOBYTES = "2KB"  # most tensors of the Llama below are smaller, its embedding is not


def library(name: str) -> Any:
    return importlib.import_module(name)


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, *, tied: bool = True) -> Any:
    """A Llama whose output layer is tied to its embedding, or not."""
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


def jit(module: nn.Module, policy: tz.Policy | int = 3, **arguments: Any) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(policy, **arguments)])


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by name; each has one file, which the index names if there are several."""
    found: dict[str, Tensor] = {}
    where: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
        where |= dict.fromkeys(tensors, path.name)
    index = folder / "model.safetensors.index.json"
    assert index.exists() is (len(set(where.values())) > 1)
    if index.exists():
        written = json.loads(index.read_text())
        assert written["weight_map"] == where
        assert written["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def dtype_in(config: dict[str, Any]) -> Any:
    """Of a model's config; transformers renamed the key in 4.56."""
    return config["torch_dtype"] if "torch_dtype" in config else config["dtype"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Folders


def through(
    rank: int, world_size: int, source: Path, folder: Path, stage: int, dtype: torch.dtype, copies: int
) -> None:
    """From a folder to a folder, without a step; once more in one file, over the other files."""
    mesh = init_device_mesh("cpu", (copies, world_size // copies)) if copies > 1 else None
    model = jit(llama(seed=1, dtype=dtype), stage, weights=source, mesh=mesh)
    tz.save_pretrained(model, folder, max_shard_size=KILOBYTES)


@pytest.mark.parametrize(
    ("stage", "dtype", "copies"),
    [
        (3, torch.float32, 1),
        (3, torch.bfloat16, 1),
        (0, torch.float32, 1),
        (1, torch.bfloat16, 1),
        (2, torch.float32, 2),
    ],
)
def test_a_folder_comes_out_as_it_went_in(
    ranks_pool: RanksPool, tmp_path: Path, stage: int, dtype: torch.dtype, copies: int
) -> None:
    plain, ours, theirs = llama(dtype=dtype), tmp_path / "ours", tmp_path / "theirs"
    plain.save_pretrained(theirs, max_shard_size=KILOBYTES)
    ranks_pool.run(2, through, theirs, ours, stage, dtype, copies)
    assert names(ours) == names(theirs)
    assert len(list(ours.glob("*.safetensors"))) > 2
    assert "lm_head.weight" not in tensors_of(ours)
    assert same(tensors_of(ours), tensors_of(theirs)) == []
    for name in ("config.json", "generation_config.json"):
        assert (ours / name).read_text() == (theirs / name).read_text()
    back = type(plain).from_pretrained(ours, torch_dtype="auto")
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert torch.equal(back(TOKENS).logits, plain(TOKENS).logits)


def saved_after_training(rank: int, world_size: int, folder: Path) -> tuple[Tensor, Any, int]:
    """Weights that no file had; the logits of the plain module, and the most gathered tensors alive at once."""
    half = tz.MixedPrecision(torch.bfloat16)
    model = jit(llama(), tz.Policy(3, mixed_precision=half))
    stepped(model, adamw(model))
    alive: list[weakref.ref[Tensor]] = []
    most, gather_now = 0, State.gather_now

    def gathered(*args: Any) -> Tensor:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        value = gather_now(*args)
        alive.append(weakref.ref(value))
        return value

    with mock.patch.object(State, "gather_now", gathered):
        tz.save_pretrained(model, folder / "many", max_shard_size=KILOBYTES)
        tz.save_pretrained(model, folder / "one", max_shard_size=KILOBYTES)
        tz.save_pretrained(model, folder / "one")
        tz.save_pretrained(model, folder / "half", dtype=torch.bfloat16)
    with tz.full_parameters(model) as module, torch.no_grad():
        return module(TOKENS).logits, dtype_in(module.config.to_dict()), most


def test_from_pretrained_loads_what_was_trained(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Also over a folder with more files. The dtype is that of the shards or the one asked for, not that of compute."""
    kind, before = type(llama()), dtype_in(llama().config.to_dict())
    for logits, dtype, most in ranks_pool.run(2, saved_after_training, tmp_path):
        for folder in ("many", "one"):
            assert torch.equal(kind.from_pretrained(tmp_path / folder, torch_dtype="auto")(TOKENS).logits, logits)
        assert dtype == before  # saving left the module's config alone
        assert most == 0  # when a tensor is gathered, no other one is there
    assert names(tmp_path / "one") == ["config.json", "generation_config.json", "model.safetensors"]
    for folder, word in {"many": "float32", "one": "float32", "half": "bfloat16"}.items():
        assert dtype_in(json.loads((tmp_path / folder / "config.json").read_text())) == word
    whole = {name: tensor.bfloat16() for name, tensor in tensors_of(tmp_path / "one").items()}
    assert same(tensors_of(tmp_path / "half"), whole) == []


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
ENCODER_AND_DECODER = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "d_model": 8}
FAMILIES: dict[str, dict[str, Any]] = {  # by class; each ties or names its weights in its own way
    "BertForMaskedLM": {**SMALL, "vocab_size": 11},
    "GPT2LMHeadModel": {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "Gemma2ForCausalLM": {**SMALL, "vocab_size": 11, "num_key_value_heads": 1, "head_dim": 4},
    "MixtralForCausalLM": {**SMALL, "vocab_size": 11, "num_key_value_heads": 1, "num_local_experts": 2},
    "ResNetForImageClassification": {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]},
    "T5ForConditionalGeneration": {
        "vocab_size": 11,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 8,
        "num_layers": 1,
        "num_heads": 2,
    },
    "ViTForImageClassification": {**SMALL, "image_size": 4, "patch_size": 2},
    "WhisperForConditionalGeneration": {**ENCODER_AND_DECODER, "decoder_attention_heads": 2, "vocab_size": 11}
    | {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "pad_token_id": 0, "decoder_start_token_id": 1},
}


def written_by_both(rank: int, world_size: int, folder: Path) -> None:
    transformers = library("transformers")
    for name, options in FAMILIES.items():
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        module = kind(kind.config_class(**options))
        if rank == 0:
            module.save_pretrained(folder / name / "theirs")
        dist.barrier()  # its method writes to its config
        tz.save_pretrained(jit(module), folder / name / "ours")


def test_each_family_has_the_files_of_its_own_class(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, written_by_both, tmp_path)
    for name in FAMILIES:
        ours, theirs = tmp_path / name / "ours", tmp_path / name / "theirs"
        assert names(ours) == names(theirs), name
        assert same(tensors_of(ours), tensors_of(theirs)) == [], name
        assert all(
            json.loads(path.read_text()) == json.loads((theirs / path.name).read_text()) for path in ours.glob("*.json")
        )


class Odd(Small):
    """Buffers, one of them not for the state dict, a state of its own, and a parameter for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.arange(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.own = nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


def saved_odd(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Tensor], list[str], list[str]]:
    model = sharded(fresh(Odd), tz.Policy(3, ignored=("own",)))
    stepped(model, adamw(model))
    model.own.data.fill_(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tz.save_pretrained(model, folder)
    again = jit(Odd(), weights=folder)
    right, found = ({**tz.full_state_dict(one), "_extra_state": torch.tensor(3)} for one in (model, again))
    return right, same(found, {**right, "own": torch.zeros(2)}), [str(one.message) for one in caught]


def test_a_module_that_is_not_hugging_faces_gets_its_weights_alone(ranks_pool: RanksPool, tmp_path: Path) -> None:
    (right, different, said), (_, also_different, nothing) = ranks_pool.run(3, saved_odd, tmp_path / "new" / "folder")[
        :2
    ]
    assert names(tmp_path / "new" / "folder") == ["model.safetensors"]
    written = tensors_of(tmp_path / "new" / "folder")
    assert written.keys() == right.keys() - {"head.weight", "_extra_state"}  # embed.weight is the first name
    assert different == also_different == []
    with safe_open(tmp_path / "new/folder/model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["aliases"]) == {"head.weight": "embed.weight"}
    assert said == ["tz.save_pretrained leaves out _extra_state: safetensors files hold tensors alone"]
    assert nothing == []


class Failing(Small):
    """A class whose own method fails, or writes the placeholders."""

    def save_pretrained(self, folder: str, *, state_dict: Any) -> None:
        from safetensors.torch import save_file

        if self.training:
            raise LookupError("no config")
        save_file({"scale": torch.ones(3)}, f"{folder}/model.safetensors")


def refusals(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    model, failing, complex_one = (
        sharded(fresh(Small), 3),
        sharded(fresh(Failing), 3),
        nn.Linear(2, 2).to(torch.complex64),
    )

    def saved(to: Path = folder / "model", of: Any = model, **options: Any) -> str:
        return raised(lambda: tz.save_pretrained(of, to, **options))

    def inside() -> str:
        with tz.full_parameters(model):
            return saved()

    def disk_full() -> str:
        def fails(create: Any, path: Path, *rest: Any) -> None:
            with create(path) as stream:
                stream.write(b"some")
                raise OSError(errno.ENOSPC, "")

        with mock.patch.object(writing, "write_parts", fails):
            return saved()

    (folder / "file").touch()
    found = {
        "first": saved(),
        "no model": saved(of=fresh(Small)),
        "size": saved(max_shard_size="5 bytes" if rank == 1 else 1),
        "zero": saved(max_shard_size=0),
        "dtype": saved(dtype=torch.int8),
        "other folder": saved(folder / f"of {rank}"),
        "no path": saved(3 if rank == 1 else folder),  # type: ignore[arg-type]
        "a file": saved(folder / "file"),
        "inside": inside(),
        "full": disk_full(),
        "own method": saved(of=failing),
        "complex": saved(of=jit(complex_one)),
    }
    failing.eval()
    return {**found, "stand-ins": saved(of=failing)}


def test_refusals_on_every_rank_leave_the_folder_as_it_was(ranks_pool: RanksPool, tmp_path: Path) -> None:
    first, second = ranks_pool.run(2, refusals, tmp_path)
    assert first["first"] == second["first"] == "nothing"
    sentences = {
        "no model": "TypeError: expected a module jitted with ZeroTransform, got Small",
        "zero": "ValueError: max_shard_size is 0; pass a number of bytes, 1 or more, or a text such as '5GB'",
        "dtype": "ValueError: dtype is torch.int8; pass a floating-point dtype",
        "other folder": "RuntimeError: folder differs between ranks",
        "inside": "is inside full_parameters; leave that block first",
    }
    for name, words in sentences.items():
        assert words in first[name], name
        assert words in second[name], name
    assert "rank 1 refused to save" in first["size"]
    assert "max_shard_size is '5 bytes'" in second["size"]
    assert "rank 1 refused to save" in first["no path"]
    assert second["no path"].startswith("TypeError: ")
    of_rank_0 = {
        "a file": f"OSError: cannot write {tmp_path / 'file'}: File exists; existing files are unchanged",
        "full": f"OSError: cannot write {tmp_path / 'model/model.safetensors'}: the disk is full; existing files",
        "own method": "ValueError: Failing.save_pretrained raised: no config; take the plain module: with "
        "tz.full_parameters(model, rank0_only=True)",
        "stand-ins": "ValueError: Failing.save_pretrained does not write the state dict that it is given: 'scale'",
        "complex": "a safetensors file cannot hold weight of torch.complex64",
    }
    for name, words in of_rank_0.items():
        assert words in first[name], name
        assert "rank 0 refused to save, so every rank stops" in second[name], name
        assert words.partition(": ")[2] in second[name], name
    assert names(tmp_path) == ["file", "model"]
    assert names(tmp_path / "model") == ["model.safetensors"]


# The code of docs/hugging-face.md

PAGE = Path(__file__).parents[2] / "docs/hugging-face.md"


def shown(heading: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the code under a heading of the page, with these names; returns all names afterwards."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
        exec(compile(block, f"{PAGE.name}: {heading}", "exec"), names)
    return names


def batches(rank: int, world_size: int) -> list[Tensor]:
    """Three batches of four rows, or this rank's rows of them."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 33, (4, 8), generator=generator).chunk(world_size)[rank] for _ in range(3)]


def train(module: Any, optimizer: torch.optim.Optimizer) -> None:
    """As the page trains, in one process."""
    for batch in batches(0, 1):
        module(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def generated(rank: int, world_size: int, folder: Path) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    names: dict[str, Any] = {
        "start": folder / "start",
        "trained": folder / "trained",
        "batches": batches(rank, world_size),
    }
    shown("From a folder to a folder", names)
    prompts = {prompt: torch.arange(1, 5).view(1, 4) + prompt for prompt in range(2)}
    answers = [shown("Generate", names | {"prompt": prompt})["answer"] for prompt in prompts.values()]
    return answers[0], answers[1], tz.full_state_dict(names["model"])


def test_greedy_generation_after_training_is_the_plain_modules(ranks_pool: RanksPool, tmp_path: Path) -> None:
    plain = llama(tied=False)  # a tied one repeats its last token
    plain.save_pretrained(tmp_path / "start")
    before = plain.generate(torch.arange(1, 5).view(1, 4), max_new_tokens=8, do_sample=False)
    train(plain, adamw(plain, 1e-2))
    right = [plain.generate(torch.arange(1, 5).view(1, 4) + more, max_new_tokens=8, do_sample=False) for more in (0, 1)]
    assert not right[0].equal(before)
    for first, second, weights in ranks_pool.run(2, generated, tmp_path, timeout=110):
        assert first.tolist() == right[0].tolist()
        assert second.tolist() == right[1].tolist()
        torch.testing.assert_close(weights, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
    loaded = type(plain).from_pretrained(tmp_path / "trained")
    assert same(dict(loaded.state_dict()), weights) == []


def with_adapters(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    names = shown("LoRA by peft", {"base": llama(), "batches": batches(rank, world_size), **MODULES, "folder": folder})
    model, optimizer = names["model"], names["optimizer"]
    gathered: list[str] = []
    gather_now = State.gather_now

    def noted(state: State, param: tz.Param, *rest: Any) -> Tensor:
        gathered.append(param.path)
        return gather_now(state, param, *rest)

    with mock.patch.object(State, "gather_now", noted):
        tz.save_pretrained(model, folder / "again")
    with tz.full_parameters(model) as module, torch.no_grad():
        logits = module(TOKENS).logits
    timeline = tz.traces_of(model).timeline
    state = [value for entry in optimizer.state.values() for key, value in entry.items() if key != "step"]
    return {
        "gathered": gathered,
        "reduced": {path for op in timeline.ops if op.kind is tz.Kind.REDUCE for path in op.params},
        "elements of the state": sum(value.numel() for value in state),
        "rows": {name: len(param) for name, param in model.named_parameters()},
        "full": tz.full_state_dict(model),
        "logits": logits,
    }


MODULES = {"torch": torch, "tz": tz, "thunder": thunder}


def test_adapters_of_peft_are_trained_and_saved_alone(ranks_pool: RanksPool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    results = ranks_pool.run(2, with_adapters, tmp_path / "adapter", timeout=110)
    base = llama()
    torch.manual_seed(0)
    plain = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    start = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    trained = [name for name, param in plain.named_parameters() if param.requires_grad]
    train(plain, torch.optim.AdamW([plain.get_parameter(name) for name in trained], lr=1e-2))
    for result in results:
        assert result["reduced"] == set(trained)
        assert sorted(result["gathered"]) == sorted(trained)
        assert result["elements of the state"] == sum(plain.get_parameter(name).numel() for name in trained)
        assert result["rows"]["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"] == 8
        torch.testing.assert_close(result["full"], dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
        assert set(same(result["full"], start)) == set(trained)
    for folder in (tmp_path / "adapter", tmp_path / "adapter/again"):
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(names(folder))
        back = peft.PeftModel.from_pretrained(llama(), folder)
        assert torch.equal(back(TOKENS).logits, results[0]["logits"])
    plain.save_pretrained(tmp_path / "theirs")
    assert load_file(tmp_path / "theirs/adapter_model.safetensors").keys() == tensors_of(tmp_path / "adapter").keys()
    theirs, ours = (tmp_path / name / "adapter_config.json" for name in ("theirs", "adapter"))
    assert set_valued(json.loads(theirs.read_text())) == set_valued(json.loads(ours.read_text()))


def set_valued(config: dict[str, Any]) -> dict[str, Any]:
    """A config of peft without the order of its modules, which is that of a set."""
    return {**config, "target_modules": set(config["target_modules"])}


ADAPTERS: dict[str, dict[str, Any]] = {
    "of transformers": {},
    "LoraConfig": {"target_modules": ["q_proj"], "modules_to_save": ["norm"], "bias": "all", "use_dora": True},
    "IA3Config": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "PromptTuningConfig": {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"},
}


def adapters_written_by_both(rank: int, world_size: int, folder: Path) -> list[str]:
    peft, said = library("peft"), []
    for name, options in ADAPTERS.items():
        adapted = peft.get_peft_model(llama(), getattr(peft, name)(**options)) if options else llama()
        if not options:
            adapted.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
        if name == "LoraConfig":
            adapted.add_adapter("other", peft.LoraConfig(target_modules=["v_proj"]))
        adapted.save_pretrained(folder / name / "theirs")
        said.append(raised(partial(tz.save_pretrained, jit(adapted), folder / name / "ours")))
    return said


def test_each_kind_of_adapter_has_the_files_of_peft(ranks_pool: RanksPool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    ((*written, prompt),) = ranks_pool.run(1, adapters_written_by_both, tmp_path)
    assert written == ["nothing"] * 3
    assert "PeftModelForCausalLM.save_pretrained raised" in prompt  # it computes what it writes
    assert "take the plain module: with tz.full_parameters(model, rank0_only=True)" in prompt
    for name in list(ADAPTERS)[:3]:
        ours, theirs = tmp_path / name / "ours", tmp_path / name / "theirs"
        assert names(ours) == names(theirs)
        for folder in ("", "other") if name == "LoraConfig" else ("",):
            assert same(tensors_of(ours / folder), tensors_of(theirs / folder)) == []


class Regression(nn.Module):
    """What Trainer and Accelerate train here: it takes keywords and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.head.forward(torch.tanh(self.hidden.forward(x)))
        return {"loss": (y - labels).square().mean(), "logits": y}


def rows(count: int) -> list[dict[str, Tensor]]:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(2))
    return [{"x": x, "labels": x.sum().view(1)} for x in inputs]


def as_torchrun_does(rank: int, world_size: int) -> None:
    """What Accelerate reads from the environment; the process group exists."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"WORLD_SIZE": str(world_size), "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": "1"}  # nobody connects to it


def right_step(plain: Any, optimizer: torch.optim.Optimizer, micro_batches: list[Any]) -> None:
    """A step of one process on several batches of one size."""
    for batch in micro_batches:
        (plain(**batch)["loss"] / len(micro_batches)).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def accelerated(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    as_torchrun_does(rank, world_size)
    accelerate, model = library("accelerate"), jit(fresh(Regression))
    loader: Any = torch.utils.data.DataLoader(rows(16), batch_size=2)  # type: ignore[arg-type]
    names = shown("Accelerate", {**MODULES, "model": model, "loader": loader})
    accelerator, other = names["accelerator"], accelerate.Accelerator(device_placement=False)
    model(**next(iter(names["loader"])))["loss"].backward()
    return tz.full_state_dict(model), {
        "prepare": raised(lambda: accelerator.prepare(model)),
        "prepare in place": raised(lambda: other.prepare(model)),
        "clip": raised(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0)),
    }


def test_accelerate_trains_with_a_model_that_it_did_not_prepare() -> None:
    pytest.importorskip("accelerate")
    plain = fresh(Regression)
    optimizer = adamw(plain, 1e-2)
    data = [torch.utils.data.default_collate(rows(16)[start : start + 2]) for start in range(0, 16, 2)]
    for first in (0, 4):
        right_step(plain, optimizer, data[first : first + 4])  # two micro-batches on each of two ranks
    for weights, said in run_ranks(2, accelerated):
        torch.testing.assert_close(weights, dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
        assert "cannot be moved or cast" in said["prepare"]
        assert "DistributedDataParallel was given a Regression that thunder_zero trains" in said["prepare in place"]
        assert "thunder_zero.clip_grad_norm_(model, max_norm)" in said["clip"]


class Noting(list[Any]):
    """Data that notes which rows are asked for."""

    def __init__(self, data: list[Any]) -> None:
        super().__init__(data)
        self.asked: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(index)
        return super().__getitem__(index)


def trained_by_trainer(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Four steps; then the last two of them again, by another model, from the checkpoint."""
    as_torchrun_does(rank, world_size)
    options = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "max_steps": 4, "save_steps": 2}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    options |= {"learning_rate": 1e-2, "weight_decay": 0.5, "lr_scheduler_type": "constant", "disable_tqdm": True}
    data = Noting(rows(32))
    names = {"model": jit(fresh(Regression)), "options": options, "data": data}
    names = shown("Trainer", {**MODULES, **names, "TrainingArguments": library("transformers").TrainingArguments})
    again = jit(Regression())
    resumed = names["ZeroTrainer"](model=again, args=names["arguments"], train_dataset=rows(32))
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    names["trainer"].save_model(f"{folder}/last")
    groups = names["trainer"].optimizer.param_groups
    return {
        "weights": tz.full_state_dict(names["model"]),
        "resumed": tz.full_state_dict(again),
        "asked": data.asked,
        "decay": [(group["weight_decay"], len(group["params"])) for group in groups],
    }


def test_the_trainer_of_the_page_trains_saves_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    results = run_ranks(2, trained_by_trainer, tmp_path, timeout=110)
    plain, data = fresh(Regression), rows(32)
    weights, biases = ([p for n, p in plain.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
    groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(4):
        places = [slice(4 * step + at, 4 * step + at + 2) for at in (0, 2)]
        micro = [[data[index] for index in result["asked"][place]] for place in places for result in results]
        right_step(plain, optimizer, [torch.utils.data.default_collate(examples) for examples in micro])
    for result in results:
        assert result["decay"] == [(0.5, 2), (0.0, 2)]
        torch.testing.assert_close(result["weights"], dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
        assert same(result["resumed"], result["weights"]) == []
    for folder in ("checkpoint-4", "last"):
        assert same(load_file(tmp_path / folder / "model.safetensors"), results[0]["weights"]) == []
