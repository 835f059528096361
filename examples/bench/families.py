"""The families of the zoo: small models, called as their users call them, and batches; nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WORDS = 64  # in the vocabulary
SEQUENCES, TOKENS = 2, 12
IMAGE, PATCH = 32, 8  # in pixels
TEXT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = TEXT | {"num_key_value_heads": 2, "use_cache": False}  # no cache while it trains
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
VISION = {name: TEXT[name] for name in TEXT if name.startswith(("hidden", "inter", "num"))} | {
    "image_size": IMAGE,
    "patch_size": PATCH,
}
GPT2 = {"use_cache": False, "vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
T5 = {
    "use_cache": False,
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
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
    "use_cache": False,
}
RESNET: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
LATENT = {  # attention of DeepSeek-V3
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,  # one without experts
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4, "hidden_size": 32}
DETR = {
    "num_queries": 5,
    "encoder_layers": 1,
    "encoder_ffn_dim": 32,
    "encoder_attention_heads": 4,
    "decoder_layers": 1,
    "decoder_ffn_dim": 32,
    "decoder_attention_heads": 4,
    "d_model": 32,
    "num_labels": 5,
    "backbone_config": {"model_type": "resnet", **RESNET, "out_features": ["stage2"]},
}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
    "num_labels": 5,
}
WAV2VEC2 = {name: TEXT[name] for name in TEXT if name != "max_position_embeddings"} | {
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "layerdrop": 0.0,
    "ctc_zero_infinity": True,
}
GEMMA3 = DECODER | {
    "head_dim": 8,
    "num_hidden_layers": 2,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
QWEN2_VL_IMAGE, QWEN2_VL_START, QWEN2_VL_END = 3, 4, 5  # tokens
QWEN2_VL = {
    "text_config": DECODER
    | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
    "vision_config": {
        "depth": 1,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": PATCH,
    },
    "image_token_id": QWEN2_VL_IMAGE,
    "vision_start_token_id": QWEN2_VL_START,
    "vision_end_token_id": QWEN2_VL_END,
}
LITGPT = {"block_size": 64, "padded_vocab_size": WORDS, "n_layer": 1, "n_head": 4, "n_embd": 32, "n_query_groups": 2}

Batch = dict[str, Any]


def words(tokens: int = TOKENS) -> Tensor:
    return torch.randint(6, WORDS - 1, (SEQUENCES, tokens))


def text(tokens: int = TOKENS) -> Batch:
    """Of a causal language model."""
    found = words(tokens)
    return {"input_ids": found, "labels": found}


def padded_text() -> Batch:
    """The second sequence is shorter."""
    mask = torch.ones(SEQUENCES, TOKENS, dtype=torch.long)
    mask[1, TOKENS - 4 :] = 0
    batch = text()
    return {"input_ids": batch["input_ids"] * mask, "labels": torch.where(mask > 0, batch["labels"], -100)} | {
        "attention_mask": mask
    }


def pairs() -> Batch:
    return {"input_ids": words(), "labels": words()}


def pixels() -> Tensor:
    return torch.randn(SEQUENCES, 3, IMAGE, IMAGE)


def images() -> Batch:
    return {"pixel_values": pixels(), "labels": torch.randint(0, 5, (SEQUENCES,))}


def captions() -> Batch:
    return {"input_ids": words(), "pixel_values": pixels(), "return_loss": True}


def segments() -> Batch:
    return {"pixel_values": pixels(), "labels": torch.randint(0, 5, (SEQUENCES, IMAGE, IMAGE))}


def boxes() -> Batch:
    """One object in the first image, two in the second."""
    labels = [
        {"class_labels": torch.randint(0, 5, (count,)), "boxes": 0.2 + 0.3 * torch.rand(count, 4)}
        for count in range(1, SEQUENCES + 1)
    ]
    return {"pixel_values": pixels(), "labels": labels}


def speech() -> Batch:
    return {"input_features": torch.randn(SEQUENCES, 8, 40), "labels": words()}


def waves() -> Batch:
    return {"input_values": torch.randn(SEQUENCES, 800), "labels": words(6)}


def pictured_text() -> Batch:
    """Each sequence begins with an image of 4 by 4 patches, of which 2 by 2 become one token."""
    head = torch.tensor([QWEN2_VL_START, *[QWEN2_VL_IMAGE] * 4, QWEN2_VL_END]).expand(SEQUENCES, -1)
    tokens = torch.cat((head, words()), 1)
    return {
        "input_ids": tokens,
        "labels": torch.where(tokens < 6, -100, tokens),
        "mm_token_type_ids": (tokens == QWEN2_VL_IMAGE).int(),
        "pixel_values": torch.randn(16 * SEQUENCES, 3 * 2 * PATCH * PATCH),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * SEQUENCES),
    }


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
        make: a small model, in training mode, with the dropout that its config has by default.
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


def dora() -> nn.Module:
    """A Llama whose linear layers have adapters of peft's DoRA; all of them train."""
    library = importlib.import_module("peft")
    config = library.LoraConfig(r=4, use_dora=True, target_modules="all-linear", init_lora_weights=False)
    module: nn.Module = library.get_peft_model(hugging_face("LlamaForCausalLM", "LlamaConfig", **DECODER)(), config)
    return module.train()


class Tagger(nn.Module):
    """Tags words by a bidirectional LSTM of packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = nn.Embedding(WORDS, 16), nn.Linear(32, 5)
        self.layers = nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(input_ids), lengths, batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.layers(packed)[0], batch_first=True)
        tags: Tensor = self.tags(found)
        return tags


def tagged() -> Batch:
    """The second sequence is longer."""
    labels = torch.randint(0, 5, (SEQUENCES, TOKENS))
    return {"input_ids": words(), "lengths": torch.tensor([TOKENS - 4, TOKENS]), "labels": labels}


def tag_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """The mean loss of the words that are there."""
    tags = model(batch["input_ids"], batch["lengths"])
    are_there = torch.arange(TOKENS) < batch["lengths"][:, None]
    return nn.functional.cross_entropy(tags[are_there], batch["labels"][are_there])


FAMILIES = (
    decoder("Llama", "Llama"),
    decoder("Qwen2", "Qwen2"),
    decoder("Qwen3", "Qwen3", head_dim=8),
    decoder("Mistral", "Mistral"),
    decoder("Gemma 2", "Gemma2", head_dim=8, num_hidden_layers=2, sliding_window=4),  # every other layer has a window
    Family("Gemma 3", hugging_face("Gemma3ForCausalLM", "Gemma3TextConfig", **GEMMA3)),
    decoder("Phi-3", "Phi3"),
    Family("GPT-2", hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2)),
    Family("GPT-NeoX", hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT, use_cache=False)),
    Family("BERT", hugging_face("BertForMaskedLM", "BertConfig", **TEXT), padded_text),
    Family("ViT", hugging_face("ViTForImageClassification", "ViTConfig", **VISION, num_labels=5), images),
    Family("T5", hugging_face("T5ForConditionalGeneration", "T5Config", **T5), pairs),
    Family("CLIP", hugging_face("CLIPModel", "CLIPConfig", text_config=TEXT, vision_config=VISION), captions),
    Family("SigLIP", hugging_face("SiglipModel", "SiglipConfig", text_config=TEXT, vision_config=VISION), captions),
    Family("Whisper", hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), speech),
    Family("wav2vec2", hugging_face("Wav2Vec2ForCTC", "Wav2Vec2Config", **WAV2VEC2), waves),
    decoder("Mixtral", "Mixtral", num_local_experts=4, **EXPERTS),
    decoder("Qwen3-MoE", "Qwen3Moe", head_dim=8, num_experts=4, moe_intermediate_size=16, **EXPERTS),
    decoder("gpt-oss", "GptOss", head_dim=8, num_local_experts=4, num_hidden_layers=2, sliding_window=4, **EXPERTS),
    decoder("DeepSeek-V3", "DeepseekV3", **LATENT, **EXPERTS),
    decoder("Mamba-2", "Mamba2", **MAMBA2),
    Family("Qwen2-VL", hugging_face("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", **QWEN2_VL), pictured_text),
    Family("DETR", hugging_face("DetrForObjectDetection", "DetrConfig", **DETR), boxes),
    Family("Segformer", hugging_face("SegformerForSemanticSegmentation", "SegformerConfig", **SEGFORMER), segments),
    Family("ResNet", hugging_face("ResNetForImageClassification", "ResNetConfig", **RESNET, num_labels=5), images),
    Family("LitGPT", lit_gpt, text, next_word),
    Family("Llama, DoRA of peft", dora),
    Family("LSTM, packed", Tagger, tagged, tag_loss),
)
BY_NAME = {family.name: family for family in FAMILIES}
