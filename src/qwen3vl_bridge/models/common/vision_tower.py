"""The vision tower: encodes patches as vision tokens and DeepStack features.

Legend of shapes: N patches, M = N / merge^2 vision tokens, h hidden size of the tower, t DeepStack features.
"""

from __future__ import annotations

from qwen3vl_bridge.config import fields
from qwen3vl_bridge.config.fields import VisionLanguageFields
from qwen3vl_bridge.core.batch import VisionInputs
from qwen3vl_bridge.models.common.attention import packed_seq_params
from qwen3vl_bridge.models.common.layer_specs import backend, vision_block_spec
from qwen3vl_bridge.models.common.rope import vision_rotary

import torch
import torch.nn.functional as F
from megatron.bridge.models.transformer_config import TransformerConfig
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn
from transformers import PretrainedConfig

# Every norm of the tower has this epsilon, without a configuration field. Source: transformers, Qwen3VLVisionModel.
_NORM_EPSILON = 1e-6

# Settings of the text model that apply to the tower too.
_SHARED_FIELDS = (
    *("params_dtype", "bf16", "fp16", "transformer_impl", "apply_rope_fusion", "deterministic_mode"),
    *("use_cpu_initialization", "init_model_with_meta_device", "perform_initialization"),
    "gradient_accumulation_fusion",
)


def vision_transformer_config(provider: VisionLanguageFields) -> TransformerConfig:
    """Return the configuration of the tower's transformer block. With `dist_train` it has its own parallel sizes."""
    vision = provider.vision_config
    config = TransformerConfig(
        num_layers=vision.depth,
        hidden_size=vision.hidden_size,
        num_attention_heads=vision.num_heads,
        num_query_groups=vision.num_heads,
        kv_channels=vision.hidden_size // vision.num_heads,
        ffn_hidden_size=vision.intermediate_size,
        normalization="LayerNorm",
        layernorm_epsilon=_NORM_EPSILON,
        activation_func=fields.vision_activation(vision.hidden_act),
        gated_linear_unit=False,
        add_bias_linear=True,
        add_qkv_bias=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        init_method_std=vision.initializer_range,
        recompute_granularity=provider.vision_recompute_granularity,
        recompute_modules=provider.vision_recompute_modules,
        recompute_method=provider.vision_recompute_method,
        recompute_num_layers=provider.vision_recompute_num_layers,
        tensor_model_parallel_size=fields.vision_tp_size(provider),
        **{name: getattr(provider, name) for name in _SHARED_FIELDS},
    )
    config.finalize()
    return config


class PatchConv(nn.Conv3d):
    """A convolution with a kernel as large as a patch, computed as a matrix product."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Project patches [N, channels * temporal_patch * patch * patch] to embeddings [N, h]."""
        return F.linear(pixel_values.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class PatchEmbed(nn.Module):
    """Projection of flattened patches, with the parameters of a convolution as in transformers."""

    def __init__(self, vision: PretrainedConfig, dtype: torch.dtype) -> None:
        super().__init__()
        kernel = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        self.proj = PatchConv(vision.in_channels, vision.hidden_size, kernel, stride=kernel, dtype=dtype)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Project patches [N, channels * temporal_patch * patch * patch] to embeddings [N, h]."""
        return self.proj(pixel_values)


class PatchMerger(MegatronModule):
    """Module that merges neighboring patches into one vision token with the hidden size of the text model.

    The main merger normalizes patches, a DeepStack merger normalizes merged patches. Mergers use the exact GELU, unlike
    the layers of the tower. Source: transformers, Qwen3VLVisionPatchMerger.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vision: PretrainedConfig,
        tp_group: torch.distributed.ProcessGroup,
        *,
        norm_after_shuffle: bool,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.merged_size = vision.hidden_size * vision.spatial_merge_size**2
        norm_size = self.merged_size if norm_after_shuffle else vision.hidden_size
        modules = backend(config)
        common = dict(config=config, init_method=config.init_method, bias=True, is_expert=False, tp_group=tp_group)
        self.patch_norm = modules.layer_norm()(config=config, hidden_size=norm_size, eps=config.layernorm_epsilon)
        self.linear_fc1 = modules.column_parallel_linear()(
            self.merged_size, self.merged_size, gather_output=False, skip_bias_add=False, **common
        )
        self.linear_fc2 = modules.row_parallel_linear()(
            self.merged_size, vision.out_hidden_size, input_is_parallel=True, skip_bias_add=False, **common
        )
        self.norm_size = norm_size

    def forward(self, hidden: Tensor) -> Tensor:
        """Merge patches [patches, h], in merge order, to vision tokens [tokens, text hidden size]."""
        tokens = self.patch_norm(hidden.view(-1, self.norm_size)).view(-1, self.merged_size)
        return self.linear_fc2(F.gelu(self.linear_fc1(tokens)[0]))[0]


class VisionBlock(TransformerBlock):
    """The transformer block of the vision tower. It contains the DeepStack mergers, as in checkpoints."""

    def __init__(
        self, config: TransformerConfig, vision: PretrainedConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(
            config,
            vision_block_spec(config),
            pre_process=True,
            post_process=False,
            post_layer_norm=False,
            pg_collection=pg_collection,
        )
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, vision, pg_collection.tp, norm_after_shuffle=True)
            for _ in fields.deepstack_layers_of(vision)
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the sharded state dict. DeepStack mergers are stacked, [mergers, ...], if layers are stacked."""
        mergers, count = f"{prefix}deepstack_merger_list.", len(self.deepstack_merger_list)
        everything = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state = {name: tensor for name, tensor in everything.items() if not name.startswith(mergers)}
        # megatron-core stacks layers depending on many settings; the key of the first layer shows whether it did.
        stacked = not any(tensor.key.startswith(f"{prefix}layers.0.") for tensor in state.values())
        for i, merger in enumerate(self.deepstack_merger_list):
            merger_prefix = f"{mergers}{i}."
            tensors = merger.sharded_state_dict(merger_prefix, ((0, i, count),) if stacked else (), metadata)
            if stacked:
                replace_prefix_for_sharding(tensors, merger_prefix, mergers)
            state.update(tensors)
        return state


class QwenVLVisionModel(MegatronModule):
    """The vision tower, which encodes images and videos as vision tokens and DeepStack features.

    Args:
        config: configuration of the transformer block, from `vision_transformer_config`.
        vision: transformers' configuration of the tower.
        pg_collection: process groups; the tower uses the tensor-parallel group.
    """

    def __init__(
        self, config: TransformerConfig, vision: PretrainedConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.deepstack_layers = fields.deepstack_layers_of(vision)
        self.patches_per_token = vision.spatial_merge_size**2
        self.values_per_patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self.patch_embed = PatchEmbed(vision, config.params_dtype)
        self.pos_embed = nn.Embedding(vision.num_position_embeddings, vision.hidden_size, dtype=config.params_dtype)
        self.decoder = VisionBlock(config, vision, pg_collection)
        self.merger = PatchMerger(config, vision, pg_collection.tp, norm_after_shuffle=False)

    def position_embedding(self, vision: VisionInputs) -> Tensor:
        """Return position embeddings [patches, h], interpolated between four learned positions around each patch."""
        weights = vision.interpolation_weight.to(self.pos_embed.weight.dtype)[:, :, None]
        # Four additions round as in transformers; a sum over the first dimension would round once.
        first, *others = self.pos_embed(vision.interpolation_index).mul_(weights).unbind()
        return sum(others, start=first)

    def forward(self, vision: VisionInputs) -> tuple[Tensor, Tensor]:
        """Encode all images and videos of a batch.

        Returns:
            Vision tokens [tokens, text hidden size], and DeepStack features [DeepStack layers, tokens, text hidden
            size].
        """
        hidden = self.patch_embed(vision.pixel_values) + self.position_embedding(vision)
        encoded = self.decoder(
            hidden[:, None],
            attention_mask=None,
            rotary_pos_emb=vision_rotary(
                vision.position_ids, self.config.kv_channels, fused=self.config.apply_rope_fusion
            ),
            packed_seq_params=packed_seq_params(vision.cu_seqlens, vision.lengths),
            extract_layer_indices=set(self.deepstack_layers),
        )
        hidden, extracted = encoded if self.deepstack_layers else (encoded, ())
        features = [merge(x[:, 0]) for merge, x in zip(self.decoder.deepstack_merger_list, extracted, strict=True)]
        tokens = self.merger(hidden[:, 0])
        return tokens, torch.stack(features) if features else tokens.new_empty(0, *tokens.shape)

    def blank_image(self, device: torch.device) -> VisionInputs:
        """Return the smallest possible image, for a batch without images.

        With it every rank runs the same modules, and every parameter gets a gradient (zero), which sharded training and
        overlapped reductions require.
        """
        n = self.patches_per_token
        indices = torch.zeros(4, n, dtype=torch.long, device=device)
        return VisionInputs(
            pixel_values=torch.zeros(n, self.values_per_patch, device=device),
            position_ids=torch.zeros(n, 2, dtype=torch.long, device=device),
            interpolation_index=indices,
            interpolation_weight=indices.float(),
            cu_seqlens=torch.arange(0, n + 1, n, dtype=torch.int32, device=device),
            lengths=(n,),
        )
