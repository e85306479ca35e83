"""The Megatron Qwen3-VL model: DeepStack, as an addition to the model that all families share.

`DeepStackLayer` adds features of the vision tower to the output of a text layer, one of the first. Pipeline stages
exchange one tensor: the features that later stages need are appended to the hidden states, only for this rank's vision
tokens, and their gradients return the same way. A tower on every stage would cost its parameters and its computation
again.
Legend: s, b local tokens and rows, h hidden size, t features, K vision tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from qwen3vl_bridge.batch.token_batch import ModelInputs
from qwen3vl_bridge.models.layer_specs import decoder_block_spec
from qwen3vl_bridge.models.model import MRopeGPTModel, VisionLanguageModel, check_received
from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.parallel.collectives import sum_gradients_over_sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.utils import make_viewless_tensor
from torch import Tensor


class DeepStackLayer(TransformerLayer):
    """A text layer that adds its DeepStack features to the output of the vision tokens.

    Features come as `context`, which megatron-core passes to every layer, also with recomputation.
    """

    def forward(
        self, *args: Any, context: Tensor | None = None, context_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Like TransformerLayer.forward; adds this layer's features if it is one of the first layers.

        Args:
            context: [t, K, h] features of this rank's vision tokens. On a later pipeline stage, the last t of them.
            context_mask: [K] index of each vision token in the hidden states flattened from [s, b].
        """
        hidden, _ = super().forward(*args, context=None, context_mask=None, **kwargs)
        if context is not None and self.adds_features:
            hidden = self.add_features(hidden, context, context_mask)
        # Recomputation would copy the gradient of what later layers only pass on.
        return hidden, context if self.layer_number < len(self.config.deepstack_layers) else None

    @property
    def adds_features(self) -> bool:
        """Whether it is one of the first layers."""
        return self.layer_number <= len(self.config.deepstack_layers)

    def add_features(self, hidden: Tensor, context: Tensor, context_mask: Tensor) -> Tensor:
        """This layer's output [s, b, h] with its features; arguments as for `forward`."""
        # Stages have the last slices.
        features = context[self.layer_number - 1 - len(self.config.deepstack_layers)].to(hidden.dtype)
        added = hidden.flatten(0, 1).index_add(0, context_mask, features).view_as(hidden)
        # With `distribute_saved_activations` recomputation keeps a part of it on each rank, which is impossible for a
        # view.
        return make_viewless_tensor(added, requires_grad=added.requires_grad, keep_graph=True)


def deepstack_block_spec(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Layer specs of the text decoder for one pipeline stage, whose layers add DeepStack features."""
    block = decoder_block_spec(config, vp_stage, pp_rank)
    for spec in block.layer_specs:
        spec.module = DeepStackLayer
    return block


class Qwen3VLGPTModel(MRopeGPTModel):
    """The text model, whose first layers add DeepStack features."""

    block_spec = staticmethod(deepstack_block_spec)


@dataclass(frozen=True)
class DeepStackStage:
    """Number of DeepStack features that a part of the model receives and passes on, always the last ones."""

    received: int  # t features of this part's layers and those after it; all features on the first part
    sent: int  # t features of the layers after it

    @classmethod
    def of(cls, num_features: int, first_layer: int, layers: int) -> Self:
        """The part with `layers` text layers from `first_layer` on."""
        return cls(received=max(num_features - first_layer, 0), sent=max(num_features - first_layer - layers, 0))

    def check(self, inputs: ModelInputs, config: TransformerConfig) -> None:
        """Refuse features between stages with tensors of a fixed size, which would wait for the missing part.

        Rows may have any length that a caller's schedule knows (its `seq_length`): NeMo-RL pads rows to a length of its
        own, and generation lets them grow. It does not know the size of the features, which depends on the images.
        """
        features = self.sent * len(inputs.deepstack.targets)
        if features and not config.variable_seq_lengths:
            raise ValueError(
                f"variable_seq_lengths is False and {features} DeepStack features go to the next pipeline stage, "
                "expected True, or more layers in this stage: the size of what stages send each other depends on a "
                "row's images"
            )

    def pack(self, hidden: Tensor, features: Tensor) -> Tensor:
        """[s, b, h] and this stage's own features [t, K, h] -> the tensor for the next stage, [s * b + t * K, 1, h].

        Not a view, because the schedules could not free a view after sending it.
        """
        if not self.sent:
            return make_viewless_tensor(hidden, requires_grad=hidden.requires_grad, keep_graph=True)
        sent = features[self.received - self.sent :].to(hidden.dtype)
        return torch.cat([part.reshape(-1, 1, part.size(-1)) for part in (hidden, sent)])

    def unpack(self, received: Tensor, length: int, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Hidden states [s, b, h] and features [t, K, h] of the previous stage's `pack`, for these s, b and K.
        Raises ValueError for a tensor of another size.
        """
        features = self.received * tokens
        check_received(
            received, length * rows + features, f"{length} tokens of {rows} rows and {features} DeepStack features"
        )
        hidden, appended = received.split([len(received) - features, features])
        width = received.size(-1)
        return hidden.view(-1, rows, width), appended.view(self.received, tokens, width)


class Qwen3VLModel(VisionLanguageModel):
    """Qwen3-VL of one pipeline stage; arguments as for `VisionLanguageModel`."""

    language_model_class = Qwen3VLGPTModel

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection, **ends: Any) -> None:
        super().__init__(config, pg_collection, **ends)
        self.stage = DeepStackStage.of(
            num_features=len(config.deepstack_layers),
            first_layer=get_transformer_layer_offset(config, self.vp_stage, pg_collection.pp.rank()),
            layers=len(self.decoder.layers),
        )

    def check_inputs(self, inputs: ModelInputs) -> None:
        """See `DeepStackStage.check`."""
        self.stage.check(inputs, self.config)

    def layer_arguments(self, features: Tensor, inputs: ModelInputs) -> dict[str, Tensor]:
        """DeepStack features [t, K, h] of this rank's vision tokens, and the tokens' indices [K] in hidden states."""
        features = sum_gradients_over_sequence(features, self.config, self.pg_collection)
        return dict(context=features.index_select(1, inputs.deepstack.sources), context_mask=inputs.deepstack.targets)

    def unpack(self, received: Tensor, length: int, inputs: ModelInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Hidden states, and features for the layers from this stage on."""
        positions = inputs.deepstack.targets
        hidden, features = self.stage.unpack(received, length, len(inputs.input_ids), len(positions))
        return hidden, dict(context=features, context_mask=positions)

    def pack(self, hidden: Tensor, layer_arguments: dict[str, Tensor]) -> Tensor:
        """Hidden states, and features for the layers after this stage."""
        return self.stage.pack(hidden, layer_arguments["context"])
