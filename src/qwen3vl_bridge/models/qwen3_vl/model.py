"""The Megatron Qwen3-VL model: DeepStack, in addition to the model that all families share.

`DeepStackLayer` adds features of the vision tower to the output of one of the first text layers. Pipeline stages send
one tensor: features that later stages need are appended to the hidden states, only for the vision tokens of this rank.
Their gradients return the same way. A vision tower on every stage would need its memory and compute again.

Legend of shapes: s local tokens, b rows, h hidden size, t DeepStack features, K vision tokens of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from qwen3vl_bridge.core.batch import ModelInputs
from qwen3vl_bridge.core.collectives import sum_gradients_over_sequence
from qwen3vl_bridge.models.common.layer_specs import decoder_block_spec
from qwen3vl_bridge.models.common.model import MRopeGPTModel, VisionLanguageModel, check_received
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.utils import make_viewless_tensor
from torch import Tensor


class DeepStackLayer(TransformerLayer):
    """A text layer. The first layers add the features of one DeepStack layer each to the outputs of vision tokens.

    Features are the `context` that megatron-core passes to every layer, also under recomputation.
    """

    def forward(
        self, *args: Any, context: Tensor | None = None, context_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer, and add features if it is one of the first layers.

        Return a tuple: hidden states [s, b, h], and `context` if the next layer adds features, else None.

        Args:
            args, kwargs: the other arguments of TransformerLayer.
            context: [t, K, h], features of K vision tokens from t DeepStack layers: all, or on a later pipeline stage
                the last ones.
            context_mask: [K], index of each vision token in the hidden states, flattened from [s, b].
        """
        hidden, _ = super().forward(*args, context=None, context_mask=None, **kwargs)
        if context is not None and self.adds_features:
            hidden = self.add_features(hidden, context, context_mask)
        # Layers that only pass the features on return None: recomputation would copy their gradient.
        return hidden, context if self.layer_number < len(self.config.deepstack_layers) else None

    @property
    def adds_features(self) -> bool:
        """Return whether this layer adds DeepStack features to its output."""
        return self.layer_number <= len(self.config.deepstack_layers)

    def add_features(self, hidden: Tensor, context: Tensor, context_mask: Tensor) -> Tensor:
        """Add features to the output [s, b, h] of the layer. The arguments are the same as for `forward`."""
        # A stage has the last slices of the features, so index from the end.
        features = context[self.layer_number - 1 - len(self.config.deepstack_layers)].to(hidden.dtype)
        added = hidden.flatten(0, 1).index_add(0, context_mask, features).view_as(hidden)
        # With `distribute_saved_activations`, recomputation shards the saved tensor over ranks, which fails for a view.
        return make_viewless_tensor(added, requires_grad=added.requires_grad, keep_graph=True)


def deepstack_block_spec(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Return the layer specs of a pipeline stage of the text decoder, with layers that add DeepStack features."""
    block = decoder_block_spec(config, vp_stage, pp_rank)
    for spec in block.layer_specs:
        spec.module = DeepStackLayer
    return block


class Qwen3VLGPTModel(MRopeGPTModel):
    """The text model with DeepStack features in its first layers."""

    block_spec = staticmethod(deepstack_block_spec)


@dataclass(frozen=True)
class DeepStackStage:
    """Numbers of DeepStack layers whose features a pipeline stage receives and sends: always the last DeepStack layers.

    Attributes:
        received: number of layers whose features this stage or later stages add; on the first stage, all of them.
        sent: number of layers whose features later stages add.
    """

    received: int
    sent: int

    @classmethod
    def from_layers(cls, num_features: int, first_layer: int, layers: int) -> Self:
        """Return the numbers for a stage with `layers` text layers from index `first_layer` on.

        `num_features` is the number of DeepStack layers.
        """
        return cls(received=max(num_features - first_layer, 0), sent=max(num_features - first_layer - layers, 0))

    def check_variable_lengths(self, inputs: ModelInputs, config: TransformerConfig) -> None:
        """Raise ValueError if this stage sends features and stages exchange tensors of a fixed size.

        The next stage would wait forever for the rest of the tensor. The schedule of a caller knows the length of rows
        (`seq_length`), but not the number of features, which depends on the images.
        """
        features = self.sent * len(inputs.deepstack.targets)
        if features and not config.variable_seq_lengths:
            raise ValueError(
                f"variable_seq_lengths is False, but this pipeline stage sends {features} DeepStack features, and "
                "their number depends on the images of a row. Set variable_seq_lengths=True, or give this stage more "
                "layers"
            )

    def pack(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Return the tensor for the next stage, [s * b + sent * K, 1, h].

        Args:
            hidden: hidden states [s, b, h].
            features: [received, K, h], the features of K vision tokens on this stage.
        """
        if not self.sent:  # the schedules could not free a view after sending it
            return make_viewless_tensor(hidden, requires_grad=hidden.requires_grad, keep_graph=True)
        sent = features[self.received - self.sent :].to(hidden.dtype)
        return torch.cat([x.reshape(-1, 1, x.size(-1)) for x in (hidden, sent)])

    def unpack(self, received: Tensor, length: int, rows: int, vision_tokens: int) -> tuple[Tensor, Tensor]:
        """Return hidden states [length, rows, h] and features [received, vision_tokens, h] of a tensor from `pack`.

        Raises:
            ValueError: the tensor has the wrong size.
        """
        features = self.received * vision_tokens
        check_received(
            received, length * rows + features, f"{length} tokens of {rows} rows and {features} DeepStack features"
        )
        hidden, appended = received.split([len(received) - features, features])
        h = received.size(-1)
        return hidden.view(-1, rows, h), appended.view(self.received, vision_tokens, h)


class Qwen3VLModel(VisionLanguageModel):
    """One pipeline stage of Qwen3-VL. The arguments are the same as for `VisionLanguageModel`."""

    language_model_class = Qwen3VLGPTModel

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection, **ends: Any) -> None:
        super().__init__(config, pg_collection, **ends)
        self.stage = DeepStackStage.from_layers(
            num_features=len(config.deepstack_layers),
            first_layer=get_transformer_layer_offset(config, self.vp_stage, pg_collection.pp.rank()),
            layers=len(self.decoder.layers),
        )

    def check_inputs(self, inputs: ModelInputs) -> None:
        """Raise ValueError if this pipeline stage cannot send its DeepStack features to the next stage."""
        self.stage.check_variable_lengths(inputs, self.config)

    def layer_arguments(self, features: Tensor, inputs: ModelInputs) -> dict[str, Tensor]:
        """Return the DeepStack features of this rank's vision tokens, and the indices of the tokens in hidden states.

        Args:
            features: [DeepStack layers, vision tokens, h], from `encode`.
            inputs: the inputs of this rank.
        """
        features = sum_gradients_over_sequence(features, self.config, self.pg_collection)
        return dict(context=features.index_select(1, inputs.deepstack.sources), context_mask=inputs.deepstack.targets)

    def unpack(self, received: Tensor, length: int, inputs: ModelInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return hidden states, and DeepStack features for the layers of this pipeline stage and later stages."""
        positions = inputs.deepstack.targets
        hidden, features = self.stage.unpack(received, length, len(inputs.input_ids), len(positions))
        return hidden, dict(context=features, context_mask=positions)

    def pack(self, hidden: Tensor, layer_arguments: dict[str, Tensor]) -> Tensor:
        """Return one tensor with hidden states, and DeepStack features for the layers of later pipeline stages."""
        return self.stage.pack(hidden, layer_arguments["context"])
