"""Layer specs of Qwen3-VL's text model, whose first layers add DeepStack features.

What lives here: the layer that adds them, and the spec of its block. What may not: what the layers of all families
share (`models/common/layer_specs.py`).
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.models.common.layer_specs import decoder_block_spec

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor


class DeepStackLayer(TransformerLayer):
    """A text layer that adds its DeepStack features to the output of the vision tokens.

    Features arrive as `context`, which megatron-core passes to every layer, also with recomputation; a decoder without
    cross attention has no other use for it.
    """

    def forward(
        self, *args: Any, context: Tensor | None = None, context_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Like TransformerLayer.forward.

        Args:
            context: [t, K, h] features of this rank's vision tokens, one slice for each of the first text layers. On a
                later pipeline stage, the last t of them.
            context_mask: [K] index of each vision token in the hidden states flattened from [s, b].
        """
        hidden, _ = super().forward(*args, context=None, context_mask=None, **kwargs)
        layer, taps = self.layer_number - 1, len(self.config.tapped_layers)
        if context is not None and layer < taps:
            features = context[layer - taps].to(hidden.dtype)  # stages have the last slices
            added = hidden.flatten(0, 1).index_add(0, context_mask, features).view_as(hidden)
            # With `distribute_saved_activations` recomputation keeps a part of it on each rank, which is impossible for
            # a view.
            hidden = make_viewless_tensor(added, requires_grad=added.requires_grad, keep_graph=True)
        return hidden, context


def text_block_spec(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Layer specs of the text decoder for one pipeline stage, whose layers add DeepStack features."""
    block = decoder_block_spec(config, vp_stage, pp_rank)
    for spec in block.layer_specs:
        spec.module = DeepStackLayer
    return block
