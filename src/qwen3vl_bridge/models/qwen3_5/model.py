"""The Megatron Qwen3.5-VL model: text model with linear and full attention, and vision tower without DeepStack."""

from __future__ import annotations

import copy
from typing import Any

from qwen3vl_bridge.batch.packed_batch import ModelInputs, NextTokens
from qwen3vl_bridge.models.model import MRopeGPTModel, VisionLanguageModel, check_received
from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.models.qwen3_5.linear_attention import full_attention_spec, text_block_spec
from qwen3vl_bridge.models.qwen3_5.multi_token_prediction import mtp_block_spec, with_mtp_loss

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from torch import Tensor

_NEXT = "next_tokens"  # key of the embedded next tokens in the payload between pipeline stages


class Qwen35VLGPTModel(MRopeGPTModel):
    """The text model: megatron-core's GPT with two layer types, partial rotary embeddings, and MTP.

    megatron-core's MTP embeds tokens again on the last stage, with a copy of the embedding, and does not support
    images there. Here the first stage computes both embeddings, so GPTModel is built and run without MTP.
    """

    block_spec = staticmethod(text_block_spec)

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection, **ends: Any) -> None:
        check_gates(config, pg_collection)
        super().__init__(config, pg_collection, **ends)
        if self.post_process and config.mtp_num_layers:
            spec = mtp_block_spec(config, full_attention_spec(config))
            self.mtp = MultiTokenPredictionBlock(config, spec, vp_stage=self.vp_stage, pg_collection=pg_collection)
            # Frozen weights are kept, so that they can be exported.
            self.mtp.requires_grad_(config.trains_mtp)

    def setup_embeddings_and_output_layer(self) -> None:
        """Like LanguageModule's for a model without MTP: no stage holds a copy of the embedding for it."""
        # The layers keep the provider itself, because megatron-core counts MTP layers among those with experts.
        self.config = copy.copy(self.config)
        self.config.mtp_num_layers = None
        super().setup_embeddings_and_output_layer()

    def forward(
        self,
        *args: Any,
        prediction: tuple[Tensor, NextTokens] | None = None,
        output_processor_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Like GPTModel's.

        Args:
            args, output_processor_context, kwargs: as for GPTModel.
            prediction: embedded next tokens [s / sp, b, h] and their `NextTokens`, if MTP is trained.
        """
        return super().forward(*args, output_processor_context=(prediction, output_processor_context), **kwargs)

    def _postprocess(self, hidden_states: Tensor, *, output_processor_context: Any, **arguments: Any) -> Any:
        prediction, context = output_processor_context
        if prediction is not None and self.post_process:
            hidden_states = with_mtp_loss(self, hidden_states, *prediction, arguments)
        return super()._postprocess(hidden_states, output_processor_context=context, **arguments)


def check_gates(config: VisionLanguageProvider, groups: ProcessGroupCollection) -> None:
    """Check that queries and their gates are selected with the same tensor-parallel rank.

    If ranks share a query group, megatron-core 0.19 selects queries by rank in the model's group, and gates by rank in
    the global one.

    Raises:
        ValueError: the two groups differ, so that gates would belong to other heads.
    """
    known = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if groups.tp.size() > config.num_query_groups and known is not groups.tp:
        raise ValueError(
            f"tensor_model_parallel_size is {groups.tp.size()} with {config.num_query_groups} query groups and process "
            "groups of the model's own, expected those of megatron-core's parallel_state, or no more ranks than query "
            "groups: gates would be other heads'"
        )


class Qwen35VLModel(VisionLanguageModel):
    """Qwen3.5-VL of one pipeline stage: the vision tower on the first stage, the text model on all stages."""

    language_model_class = Qwen35VLGPTModel

    def check_inputs(self, inputs: ModelInputs) -> None:
        """Refuse rows without labels if MTP is to be trained, because it would not be."""
        if self.config.trains_mtp and self.training and torch.is_grad_enabled() and inputs.following is None:
            raise ValueError(
                "mtp_loss_scaling_factor is above 0 and the batch has no labels, expected labels, on every pipeline "
                "stage, or mtp_loss_scaling_factor=0, which keeps the weights of multi-token prediction as they are"
            )

    def embed(self, inputs: ModelInputs, encoded: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Like VisionLanguageModel's, with the embedded next tokens as additional payload for the last stage."""
        encoded = encoded or self.encode(inputs)
        hidden, layer_arguments = super().embed(inputs, encoded)
        if self._predicts(inputs):
            following = inputs.following
            layer_arguments = {_NEXT: self.embed_tokens(following.input_ids, encoded[0], following.fuse)}
        return hidden, layer_arguments

    def decode(
        self, inputs: ModelInputs, hidden: Tensor | None, layer_arguments: dict[str, Any], **arguments: Any
    ) -> Any:
        """Like VisionLanguageModel's, with the embedded next tokens."""
        embedded = layer_arguments.get(_NEXT)
        prediction = None if embedded is None else (embedded, inputs.following)
        return super().decode(inputs, hidden, {}, prediction=prediction, **arguments)

    def pack(self, hidden: Tensor, layer_arguments: dict[str, Any]) -> Tensor:
        """Hidden states, and embedded next tokens for the next stage."""
        if _NEXT not in layer_arguments:
            return super().pack(hidden, layer_arguments)
        return torch.cat((hidden, layer_arguments[_NEXT].to(hidden.dtype)))

    def unpack(self, received: Tensor, length: int, inputs: ModelInputs) -> tuple[Tensor, dict[str, Any]]:
        """Hidden states and embedded next tokens."""
        if not self._predicts(inputs):
            return super().unpack(received, length, inputs)
        rows = len(inputs.input_ids)
        check_received(received, 2 * length * rows, f"{length} tokens of {rows} rows and as many next tokens")
        hidden, embedded = received.chunk(2)
        return hidden, {_NEXT: embedded}

    def _predicts(self, inputs: ModelInputs) -> bool:
        """Whether this batch has an MTP loss; not in evaluation, which does not report it."""
        return inputs.following is not None and self.training and torch.is_grad_enabled()
