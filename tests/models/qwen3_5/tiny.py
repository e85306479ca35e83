"""Tiny Qwen3.5 models: configurations, checkpoints, process groups of one rank, and a reference of MTP.

transformers' models have no multi-token prediction; the reference is built of its modules.
"""

import copy
from pathlib import Path
from typing import Any

from qwen3vl_bridge.testing.tiny_processor import MERGE, PATCH, TEMPORAL_PATCH, make_processor
from qwen3vl_bridge.weights.rows import ExpertLayout

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as with_experts

from tests.helpers.batches import Sample
from tests.helpers.expert_layouts import joined_experts, relayout


class MTPReference(nn.Module):
    def __init__(self, config: Qwen3_5Config | Qwen3_5MoeConfig) -> None:
        super().__init__()
        text = copy.deepcopy(config.text_config)
        text.layer_types, text.num_hidden_layers = ["full_attention"], 1
        text._attn_implementation = "eager"
        moe = isinstance(config, Qwen3_5MoeConfig)
        layer = with_experts.Qwen3_5MoeDecoderLayer if moe else dense.Qwen3_5DecoderLayer
        norm = with_experts.Qwen3_5MoeRMSNorm if moe else dense.Qwen3_5RMSNorm
        width, eps = text.hidden_size, text.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(width, eps=eps), norm(width, eps=eps)
        self.layers = nn.ModuleList([layer(text, 0)])
        self.norm = norm(width, eps=eps)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, angles: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return [1, s, h] for tokens with a next token, from their hidden states and the embeddings of next tokens."""
        joined = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1)
        length = hidden.size(1)
        mask = torch.full((length, length), torch.finfo(hidden.dtype).min).triu(1)[None, None]
        return self.norm(self.layers[0](self.fc(joined), position_embeddings=angles, attention_mask=mask))


def run_with_mtp(model: nn.Module, samples: list[Sample], factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of token losses, and that sum plus `factor` times the sum of MTP losses."""
    seen = {}
    text = model.model.language_model
    hooks = [
        text.register_forward_pre_hook(lambda _, __, given: seen.update(given), with_kwargs=True),
        text.rotary_emb.register_forward_hook(lambda _, __, angles: seen.update(angles=angles)),
        text.register_forward_hook(lambda _, __, output: seen.update(hidden=output.last_hidden_state)),
    ]
    main, predicted = torch.zeros(()), torch.zeros(())
    for sample in samples:
        ids = sample.ids[None]
        kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **sample.pixels).logits[0]
        main = main + (F.cross_entropy(logits, sample.labels, reduction="none") * sample.loss_mask).sum()
        angles = tuple(one[:, :-1] for one in seen["angles"])
        output = model.mtp(seen["hidden"][:, :-1], seen["inputs_embeds"][:, 1:], angles)
        losses = F.cross_entropy(model.lm_head(output)[0], sample.labels[1:], reduction="none")
        predicted = predicted + (losses * sample.loss_mask[1:]).sum()
    for hook in hooks:
        hook.remove()
    return main, main + factor * predicted


HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN, LAYERS, VOCAB = 48, 4, 2, 32, 64, 4, 96
LINEAR = dict(
    linear_num_key_heads=4,  # which four ranks can share out
    linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=4,
)  # fmt: skip
ROPE = dict(
    rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True
)


def hf_text_config(**changes: Any) -> Qwen3_5TextConfig | Qwen3_5MoeTextConfig:
    """Return transformers' text configuration, with experts if `num_experts` is given."""
    with_experts = "num_experts" in changes
    fields = dict(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, vocab_size=VOCAB, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, head_dim=HEAD_DIM, rope_parameters=dict(ROPE), **LINEAR, attn_implementation="eager"
    ) | ({} if with_experts else {"intermediate_size": FFN})  # fmt: skip
    return (Qwen3_5MoeTextConfig if with_experts else Qwen3_5TextConfig)(**fields | changes)


def megatron_config(**changes: Any) -> TransformerConfig:
    fields = dict(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS, num_query_groups=GROUPS,
        kv_channels=HEAD_DIM, normalization="RMSNorm", layernorm_epsilon=1e-6, layernorm_zero_centered_gamma=True,
        qk_layernorm=True, attention_output_gate=True, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, linear_attention_freq=4,
        experimental_attention_variant="gated_delta_net", bias_dropout_fusion=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, params_dtype=torch.float32, pipeline_dtype=torch.float32,
        moe_token_dispatcher_type="alltoall", transformer_impl="local", **LINEAR,
    )  # fmt: skip
    return TransformerConfig(**fields | changes)


def one_rank() -> ProcessGroupCollection:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    return ProcessGroupCollection.use_mpu_process_groups()


def perturb(module: nn.Module, seed: int = 0) -> nn.Module:
    """Set random weights, also where they start at zero or one. Decays are slow: fast ones multiply rounding errors."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.05 if ".visual." in name else 0.15, generator=random)
        elif name.endswith("A_log"):
            parameter.data.uniform_(0.02, 0.5, generator=random).log_()
        else:
            parameter.data.add_(torch.randn(parameter.shape, generator=random), alpha=0.2)
    return module


# Megatron-Bridge warms a fused function up, which wants an even width of experts on each of four ranks.
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=28)
_VOCAB = 512


def make_config(*, moe: bool = False, tied: bool = False, **changes: Any) -> Qwen3_5Config | Qwen3_5MoeConfig:
    """Return the configuration of a full model with token ids of the digits processor and `changes` of the text."""
    tokens = make_processor(_VOCAB).tokenizer.convert_tokens_to_ids
    fields = (EXPERTS if moe else {}) | changes
    text = hf_text_config(**fields, vocab_size=_VOCAB, tie_word_embeddings=tied)
    vision = dict(
        depth=3, hidden_size=64, intermediate_size=176, num_heads=4, patch_size=PATCH,
        temporal_patch_size=TEMPORAL_PATCH, spatial_merge_size=MERGE, out_hidden_size=HIDDEN,
        num_position_embeddings=36,
    )  # fmt: skip
    return (Qwen3_5MoeConfig if moe else Qwen3_5Config)(
        text_config=text.to_dict() | {"dtype": "float32", "mtp_num_hidden_layers": 1}, vision_config=vision,
        image_token_id=tokens("<|image_pad|>"), video_token_id=tokens("<|video_pad|>"),
        vision_start_token_id=tokens("<|vision_start|>"), vision_end_token_id=tokens("<|vision_end|>"),
        tie_word_embeddings=tied, dtype="float32",
    )  # fmt: skip


def make_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    moe: bool = False,
    tied: bool = False,
    packed: bool = True,
    mtp: ExpertLayout | None = None,
    **changes: Any,
) -> Path:
    config = make_config(moe=moe, tied=tied, **changes)
    model = (Qwen3_5MoeForConditionalGeneration if moe else Qwen3_5ForConditionalGeneration)(config)
    perturb(model, seed).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = dict(model.state_dict()) if moe and packed else load_file(file)
    if mtp is not None:
        more = perturb(MTPReference(config), seed + 1).state_dict()
        tensors |= relayout({f"mtp.{name}": tensor for name, tensor in more.items()}, mtp)
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    make_processor(_VOCAB).save_pretrained(folder)
    return folder


FLOAT32 = (".linear_attn.A_log", ".linear_attn.norm.weight")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewritten(folder: Path, tensors: dict[str, torch.Tensor], target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":  # references of other tests are folders
            (target / file.name).write_bytes(file.read_bytes())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def in_released_dtypes(folder: Path, target: Path, float32: tuple[str, ...] = FLOAT32) -> Path:
    """Load the model of a folder in the dtypes of released files: bfloat16, and some parameters in float32.

    Norms that a checkpoint stores minus one are exact then, because they are at least one half.
    """
    tensors = {name: one.clamp(min=0.5) if name.endswith(FLOAT32[1]) else one for name, one in weights(folder).items()}
    cast = {name: one if name.endswith(float32) else one.bfloat16() for name, one in tensors.items()}
    config = rewritten(folder, cast, target) / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    return target


def with_mtp(model: nn.Module, folder: Path) -> nn.Module:
    found = {name: one for name, one in load_file(folder / "model.safetensors").items() if name.startswith("mtp.")}
    if found:
        model.mtp = MTPReference(model.config)
        expected = {f"mtp.{name}": one for name, one in model.mtp.state_dict().items()}
        for name, tensor in joined_experts(found, expected).items():
            expected[name].copy_(tensor)
    return model
