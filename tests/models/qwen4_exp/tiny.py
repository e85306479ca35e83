"""Tiny Qwen3.8-Flash-Next checkpoints, made from the weight table, and what its reference needs.

The installed transformers does not know the model, so nothing here imports it.
"""

import json
from pathlib import Path
from typing import Any

from qwen3vl_bridge.config.hf_config import TOKEN_IDS
from qwen3vl_bridge.models.qwen4_exp import FAMILY
from qwen3vl_bridge.testing.tiny_processor import MERGE, PATCH, TEMPORAL_PATCH, make_processor
from qwen3vl_bridge.weights.rows import ExpertLayout, expand

import torch
from safetensors.torch import save_file
from torch import nn

VOCAB, HIDDEN, PARTS = 512, 48, 4
NGRAM_TABLE = ".ngram_embedding.weight"


def make_config(*, mtp: bool = True, **changes: Any) -> dict[str, Any]:
    """Return a `config.json` with token ids of the digits processor and `changes` of the text model.

    The budget of the indexer is shorter than most documents. It has many heads: with few, scores are often tied at 0.
    """
    tokens = make_processor(VOCAB).tokenizer.convert_tokens_to_ids
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    text = dict(
        model_type="qwen4_exp_text", dtype="float32", vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        layer_types=["linear_attention"] * 3 + ["full_attention"], initializer_range=0.05, rms_norm_eps=1e-6,
        rope_parameters=dict(
            rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25, mrope_section=[2, 1, 1],
            mrope_interleaved=True,
        ),
        linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=4,
        linear_num_value_heads=8, output_gate_type="sigmoid",
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=28,
        hc_count=4, hc_lowrank=20, ple_layer_ids=[2], ple_embed_dim=64, ple_conv_kernel_size=4, ngram_size=3,
        heads_per_ngram=2, ngram_vocab_size_base=101, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=PARTS,
        indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4,
        bos_token_id=tokens("<|endoftext|>"), eos_token_id=tokens("<|im_end|>"), mtp_num_hidden_layers=int(mtp),
    ) | changes  # fmt: skip
    vision = dict(
        model_type="qwen4_exp_vision", dtype="float32", depth=3, hidden_size=64, intermediate_size=176, num_heads=4,
        patch_size=PATCH, temporal_patch_size=TEMPORAL_PATCH, spatial_merge_size=MERGE, out_hidden_size=HIDDEN,
        num_position_embeddings=36,
    )  # fmt: skip
    return dict(
        architectures=["Qwen4ExpForConditionalGeneration"], model_type="qwen4_exp", dtype="float32", text_config=text,
        vision_config=vision, tie_word_embeddings=False,
        **{name: tokens(token) for name, token in zip(TOKEN_IDS, names, strict=True)},
    )  # fmt: skip


def random_weights(
    config: dict[str, Any], seed: int, experts: ExpertLayout = ExpertLayout.OUTPUT_MAJOR
) -> dict[str, torch.Tensor]:
    """Return random tensors for all names of a checkpoint, also where a new model has zeros or ones."""
    generator, dimensions = torch.Generator().manual_seed(seed), FAMILY.dimensions(config)
    tensors: dict[str, torch.Tensor] = {}
    for row in expand(FAMILY.rows(experts), dimensions):
        for name, shape in zip(row.hf, row.hf_shapes(dimensions), strict=True):
            if name in tensors:
                continue
            if name.endswith("A_log"):  # slow decays: fast ones multiply rounding errors
                tensors[name] = torch.empty(shape).uniform_(0.02, 0.5, generator=generator).log_()
                continue
            is_vector = len(shape) == 1
            scale = 0.2 if is_vector else 0.3 if ".ple." in name else 0.05 if ".visual." in name else 0.15
            tensors[name] = torch.randn(shape, generator=generator) * scale
            if name.endswith(("linear_attn.norm.weight", "dt_bias")) or (is_vector and name.endswith("norm1.weight")):
                tensors[name] += 1
    return tensors


def make_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    mtp: bool = True,
    experts: ExpertLayout = ExpertLayout.OUTPUT_MAJOR,
    **changes: Any,
) -> Path:
    """Write a Hugging Face folder with random weights and the digits processor."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(mtp=mtp, **changes)
    tensors = random_weights(config, seed, experts)
    tensors |= {name: torch.tensor(values) for name, values in FAMILY.constants(config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    make_processor(VOCAB).save_pretrained(folder)
    return folder


def as_stored(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of transformers' model with the n-gram tables in the parts of a checkpoint."""
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(NGRAM_TABLE)]:
        for number, part in enumerate(stored.pop(name).chunk(PARTS)):
            stored[name.replace(NGRAM_TABLE, f".ngram_embedding.shard_{number}.weight")] = part
    return stored


def freeze_indexers(model: nn.Module) -> nn.Module:
    """Freeze the indexers of transformers' model, to which its choice of blocks passes no gradient."""
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            parameter.requires_grad = False
    return model
