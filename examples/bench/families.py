"""The families of the zoo: small models, called as their users call them, and batches; nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WORDS = 64  # in the vocabulary
SEQUENCES, TOKENS = 2, 12
TEXT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = TEXT | {"num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False}  # no cache while it trains
IMAGES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_labels": 5}
WITHOUT_DROPOUT: dict[str, float] = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "classifier_dropout": 0.0,
}
GPT2 = {"use_cache": False, "vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {
    "use_cache": False,
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
VISION = {name: TEXT[name] for name in TEXT if name not in ("vocab_size", "max_position_embeddings")} | IMAGES
CLIP_TEXT = TEXT | {"max_position_embeddings": 16, "eos_token_id": WORDS - 1, "bos_token_id": 1, "pad_token_id": 0}
WHISPER: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
    "use_cache": False,
}
RESNET: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "num_labels": 5,
}
LITGPT = {"block_size": 64, "padded_vocab_size": WORDS, "n_layer": 1, "n_head": 4, "n_embd": 32, "n_query_groups": 2}


Batch = dict[str, Any]


def words(tokens: int = TOKENS) -> Tensor:
    return torch.randint(3, WORDS - 1, (SEQUENCES, tokens))


def text(tokens: int = TOKENS) -> Batch:
    """Of a causal language model."""
    found = words(tokens)
    return {"input_ids": found, "labels": found}


def masked_text() -> Batch:
    return text() | {"attention_mask": torch.ones(SEQUENCES, TOKENS, dtype=torch.long)}


def pairs() -> Batch:
    return {"input_ids": words(), "labels": words()}


def images() -> Batch:
    return {"pixel_values": torch.randn(SEQUENCES, 3, 32, 32), "labels": torch.randint(0, 5, (SEQUENCES,))}


def captions() -> Batch:
    return {"input_ids": words(), "pixel_values": torch.randn(SEQUENCES, 3, 32, 32), "return_loss": True}


def speech() -> Batch:
    return {"input_features": torch.randn(SEQUENCES, 8, 40), "labels": words()}


def own_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """The loss that a model of Hugging Face returns."""
    found: Tensor = model(**batch).loss
    return found


def next_word(model: Callable[..., Any], batch: Batch) -> Tensor:
    """The loss of a model that returns logits."""
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), batch["labels"][:, 1:].reshape(-1))


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: as the table has it.
        make: a small model, in training mode.
        batch: of one rank, new with each call, of the same shapes.
        loss: of a model and a batch.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch] = text
    loss: Callable[[Callable[..., Any], Batch], Tensor] = own_loss


def hugging_face(model: str, config: str, **arguments: Any) -> Callable[[], nn.Module]:
    """Makes a model by the names of its class and of its config's."""

    def make() -> nn.Module:
        library = importlib.import_module("transformers")
        module: nn.Module = getattr(library, model)(getattr(library, config)(**arguments))
        return module.train()

    return make


def lit_gpt() -> nn.Module:
    library = importlib.import_module("litgpt")
    module: nn.Module = library.GPT(library.Config(**LITGPT))
    return module.train()


def decoder(name: str, of: str, **arguments: Any) -> Family:
    return Family(name, hugging_face(f"{of}ForCausalLM", f"{of}Config", **DECODER | arguments))


FAMILIES = (
    decoder("Llama", "Llama"),
    decoder("Qwen2", "Qwen2"),
    decoder("Mistral", "Mistral"),
    decoder("Gemma 2", "Gemma2", head_dim=8, num_hidden_layers=2),  # every other layer has a window
    decoder("Phi-3", "Phi3"),
    Family("GPT-2", hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2, **GPT2_DROPOUT)),
    Family("GPT-NeoX", hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT, **WITHOUT_DROPOUT, use_cache=False)),
    Family("BERT", hugging_face("BertForMaskedLM", "BertConfig", **TEXT, **WITHOUT_DROPOUT), masked_text),
    Family("ViT", hugging_face("ViTForImageClassification", "ViTConfig", **VISION, **WITHOUT_DROPOUT), images),
    Family("T5", hugging_face("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0), pairs),
    Family("CLIP", hugging_face("CLIPModel", "CLIPConfig", text_config=CLIP_TEXT, vision_config=VISION), captions),
    Family("Whisper", hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), speech),
    decoder("Mixtral", "Mixtral", num_local_experts=4),
    Family("ResNet", hugging_face("ResNetForImageClassification", "ResNetConfig", **RESNET), images),
    Family("LitGPT", lit_gpt, text, next_word),
)
BY_NAME = {family.name: family for family in FAMILIES}
