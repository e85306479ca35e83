"""The Megatron text model of all families: megatron-core's GPT with interleaved multimodal rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from qwen3vl_bridge.models.chunked_loss import loss_processor
from qwen3vl_bridge.models.layer_specs import decoder_block_spec
from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.models.refusals import LOGITS
from qwen3vl_bridge.models.rope import InterleavedMRoPE

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor


class MRopeGPTModel(GPTModel):
    """The text model: megatron-core's GPT with interleaved multimodal rotary embedding.

    Class attributes:
        block_spec: (config, virtual pipeline stage, pipeline rank) -> layers of the stage.
    """

    block_spec: ClassVar[Callable[..., TransformerBlockSubmodules]] = staticmethod(decoder_block_spec)

    def __init__(
        self,
        config: VisionLanguageProvider,
        pg_collection: ProcessGroupCollection,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> None:
        super().__init__(
            config,
            self.block_spec(config, vp_stage, pg_collection.pp.rank()),
            vocab_size=config.padded_vocab_size,
            max_sequence_length=config.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=config.fp16_lm_cross_entropy,
            parallel_output=config.parallel_output,
            share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
            position_embedding_type="mrope",
            rotary_base=config.rotary_base,
            rotary_percent=config.rotary_percent,
            scatter_embedding_sequence_parallel=False,  # images are fused in before
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        turning = int(config.kv_channels * config.rotary_percent)  # rotated dimensions of a head
        precision = torch.float32 if config.apply_rotary_pos_emb_in_fp32 else config.params_dtype
        self.rotary_pos_emb = InterleavedMRoPE(
            turning,
            config.rotary_base,
            config.mrope_section,
            precision,
            config.rope_parameters,
            fused=config.apply_rope_fusion,
        )

    def _postprocess(
        self,
        hidden_states: Tensor,
        *,
        labels: Tensor | None,
        output_processor: Callable[..., Any] | None = None,
        **arguments: Any,
    ) -> Any:
        if output_processor is None and labels is not None:
            output_processor = loss_processor
        return super()._postprocess(hidden_states, labels=labels, output_processor=output_processor, **arguments)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss [b, s] of labels [b, s] under logits [s, b, padded vocabulary / tp]."""
        if not self.parallel_output and self.pg_collection.tp.size() > 1:
            raise ValueError(f"parallel_output is False, expected True to train under tensor parallelism: {LOGITS}")
        return super().compute_language_model_loss(labels, self.without_padding(logits))

    @torch.no_grad()
    def without_padding(self, logits: Tensor) -> Tensor:
        """Write minus infinity to the logits [s, b, padded vocabulary / tp] of rows that pad the vocabulary, in place.

        These rows are not tokens: otherwise each would get a share of the probability. Now it is exactly 0, and so is
        the gradient of these logits; the write is not recorded, because autograd would copy the whole gradient to write
        this 0 again.
        """
        tokens, here = self.config.vocab_size, logits.size(-1)
        first = self.pg_collection.tp.rank() * here
        if first + here > tokens:
            logits[..., max(tokens - first, 0) :] = float("-inf")
        return logits

    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded_state_dict: ShardedStateDict,
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict,
    ) -> None:
        """Like GPTModel's, which uses the data-parallel rank among all processes, which a module of several does not
        have.
        """
        if self.pre_process or not self.post_process:
            super().tie_embeddings_and_output_weights_state_dict(
                sharded_state_dict, output_layer_weight_key, first_stage_word_emb_key, metadata
            )
            return
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.shared_embedding_or_output_weight(),
            key=first_stage_word_emb_key,
            replica_id=(1, 0, metadata["dp_cp_group"].rank()),  # a copy of the first stage's
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
