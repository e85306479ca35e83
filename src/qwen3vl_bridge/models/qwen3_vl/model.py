"""The Megatron Qwen3-VL model: DeepStack as an addition to the model that all families share.

What lives here: passing the features from the tower to the text model's first layers. What may not: the layers that add
them (`layer_specs.py`), how stages pass them on (`pipeline_payload.py`), what other families have too
(`models/common/model.py`).
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.batch.packed_batch import ModelInputs, VisionRows
from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.common.text_model import MRopeGPTModel
from qwen3vl_bridge.models.qwen3_vl.layer_specs import text_block_spec
from qwen3vl_bridge.models.qwen3_vl.pipeline_payload import Stage, check_features
from qwen3vl_bridge.parallel.collectives import sum_gradients_over_sequence

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor


class Qwen3VLGPTModel(MRopeGPTModel):
    """The text model, whose first layers add DeepStack features."""

    block_spec = staticmethod(text_block_spec)


class Qwen3VLModel(VisionLanguageModel):
    """Qwen3-VL of one pipeline stage; arguments as for `VisionLanguageModel`."""

    language_model_class = Qwen3VLGPTModel

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection, **ends: Any) -> None:
        super().__init__(config, pg_collection, **ends)
        self.stage = Stage.of(
            taps=len(config.tapped_layers),
            first_layer=get_transformer_layer_offset(config, self.vp_stage, pg_collection.pp.rank()),
            layers=len(self.decoder.layers),
        )

    def check_inputs(self, inputs: ModelInputs) -> None:
        """See `check_features`."""
        check_features(self.stage, inputs, self.config)

    def layer_arguments(self, features: Tensor, inputs: ModelInputs) -> dict[str, Tensor]:
        """DeepStack features [t, K, h] of this rank's vision tokens, and the tokens' indices [K] in hidden states."""
        where = _places(inputs)
        features = sum_gradients_over_sequence(features, self.config, self.pg_collection)
        return dict(context=features[:, where.rows], context_mask=where.positions)

    def unload(self, arrived: Tensor, length: int, inputs: ModelInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Split the tensor received from the previous stage into hidden states, and features for the layers from this
        stage on.
        """
        places = _places(inputs).positions
        hidden, features = self.stage.unload(arrived, length, len(inputs.input_ids), len(places))
        return hidden, dict(context=features, context_mask=places)

    def load(self, hidden: Tensor, beside: dict[str, Tensor]) -> Tensor:
        """Concatenate hidden states, and features for the layers after this stage."""
        return self.stage.load(hidden, beside["context"])


def _places(inputs: ModelInputs) -> VisionRows:
    """Indices of this rank's vision tokens, in the vision output and in its hidden states."""
    return inputs.deepstack or VisionRows.none(inputs.input_ids.device)
