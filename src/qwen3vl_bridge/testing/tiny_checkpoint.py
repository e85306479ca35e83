"""A tiny random checkpoint with every component of a family's released models, and its processor."""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.testing.tiny_processor import MERGE, PATCH, TEMPORAL_PATCH, make_processor

import torch
import transformers
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

FAMILIES = ("qwen3_vl", "qwen3_5", "qwen4_exp")
VOCAB_SIZE = 512  # more rows than the tokenizer has tokens, as in the released checkpoints


# One layer is dense, the others have experts. All widths differ, also from the fused width of gate and up.
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}


def make_config(
    tokenizer: PreTrainedTokenizerBase, *, tied: bool = False, moe: bool = False
) -> Qwen3VLConfig | Qwen3VLMoeConfig:
    """Build the tiny config: interleaved mRoPE, qk-norm, grouped queries, SwiGLU, three DeepStack layers.

    Nearly all widths differ, so that a tensor in the wrong place also has the wrong shape.

    Args:
        tokenizer: Tokenizer with the special tokens, whose ids are written to the config.
        tied: Share the input embedding with the output layer, as the released 2B and 4B do.
        moe: Give the layers experts, as in the released 30B-A3B and 235B-A22B.

    Returns:
        A config in float32.
    """
    bos, eos, image, video, vision_start, vision_end = tokenizer.convert_tokens_to_ids(
        ["<|endoftext|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    )
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 80,
        "intermediate_size": 224,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.05,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
        },
        "bos_token_id": bos,
        "eos_token_id": eos,
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **(EXPERTS if moe else {}),
    }
    vision = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_heads": 4,
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL_PATCH,
        "spatial_merge_size": MERGE,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1, 2],
        "initializer_range": 0.05,
        "dtype": "float32",
    }
    return (Qwen3VLMoeConfig if moe else Qwen3VLConfig)(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=vision_start,
        vision_end_token_id=vision_end,
        tie_word_embeddings=tied,
        dtype="float32",
    )


def make_qwen3_5_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3_5Config:
    """Build a tiny dense Qwen3.5-VL config: linear attention in three of four layers, gates, partial rotary embeddings.

    Args:
        tokenizer: Tokenizer with the special tokens, whose ids are written to the config.
    """
    like = make_config(tokenizer)
    text, vision = like.text_config.to_dict(), like.vision_config.to_dict()
    for section in (text, vision):
        del section["model_type"]
    del vision["deepstack_visual_indexes"]
    text |= {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 28,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
    }
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return Qwen3_5Config(
        text_config=text, vision_config=vision, dtype="float32", **{name: getattr(like, name) for name in tokens}
    )


def make_qwen4_exp_config(tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Build a tiny Qwen3.8-Flash-Next config: Qwen3.5's layers, residual streams, n-gram embeddings and an indexer.

    Args:
        tokenizer: Tokenizer with the special tokens, whose ids are written to the config.

    Raises:
        ImportError: If the installed transformers does not know the model, which is in releases from 5.16 on.
    """
    try:
        from transformers import Qwen4ExpConfig, Qwen4ExpForConditionalGeneration
    except ImportError as error:
        raise ImportError(
            f"transformers {transformers.__version__} cannot build a Qwen3.8-Flash-Next model, expected 5.16 or newer"
        ) from error
    like = make_qwen3_5_config(tokenizer)
    text, vision = like.text_config.to_dict(), like.vision_config.to_dict()
    for section in (text, vision):
        del section["model_type"]
    text |= {
        **{name: value for name, value in EXPERTS.items() if name != "mlp_only_layers"},
        "shared_expert_intermediate_size": 56,
        "output_gate_type": "sigmoid",
        "hc_count": 4,
        "hc_lowrank": 24,
        "ple_layer_ids": [2],
        "ple_embed_dim": 64,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 1009,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 8,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    }
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    _MODELS[Qwen4ExpConfig] = Qwen4ExpForConditionalGeneration
    return Qwen4ExpConfig(
        text_config=text, vision_config=vision, dtype="float32", **{name: getattr(like, name) for name in tokens}
    )


def make_model(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Build the model with random weights in float32, in eval mode.

    Args:
        config: The model's config.
        seed: Seed of the weights. The global random state is not changed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _MODELS[type(config)](config)
        with torch.no_grad():
            # Add noise to norms and biases: if all were one or zero, a conversion that swaps two would pass.
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.eval()


_MODELS = {
    Qwen3VLConfig: Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig: Qwen3VLMoeForConditionalGeneration,
    Qwen3_5Config: Qwen3_5ForConditionalGeneration,
}


def make_checkpoint(
    folder: str | Path, *, seed: int = 0, tied: bool = False, moe: bool = False, family: str = "qwen3_vl"
) -> Path:
    """Save a tiny random model and its processor as a Hugging Face folder.

    Args:
        folder: Where to write. It is created if necessary.
        seed: Seed of the weights.
        tied: Share the input embedding with the output layer.
        moe: Give the layers experts.
        family: "qwen3_vl", "qwen3_5" (dense and untied here) or "qwen4_exp" (with experts).

    Returns:
        The folder.

    Raises:
        ValueError: If the family is unknown, or if `tied` or `moe` is set for another family than qwen3_vl.
        ImportError: If the installed transformers does not know the model.
    """
    if family not in FAMILIES or (family != "qwen3_vl" and (tied or moe)):
        raise ValueError(
            f"family is {family!r}, tied is {tied} and moe is {moe}; expected one of {FAMILIES}, and tied or moe "
            "only for qwen3_vl"
        )
    folder = Path(folder)
    processor = make_processor(VOCAB_SIZE)
    if family == "qwen4_exp":
        config = make_qwen4_exp_config(processor.tokenizer)
    elif family == "qwen3_5":
        config = make_qwen3_5_config(processor.tokenizer)
    else:
        config = make_config(processor.tokenizer, tied=tied, moe=moe)
    model = make_model(config, seed=seed)
    bos, eos = config.text_config.bos_token_id, config.text_config.eos_token_id
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=bos, eos_token_id=[eos, bos], pad_token_id=bos
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
