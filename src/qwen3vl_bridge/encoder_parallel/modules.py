"""Qwen3-VL in two modules that train on separate ranks: the vision tower, and the model without it.

What lives here: inputs and outputs of each module in megatron-core's schedule for several modules. What may not: the
payload (`payload.py`), the tower, the model, groups and communicators.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.batch import EncoderInputs, ModelInputs
from qwen3vl_bridge.encoder_parallel.payload import Headers, pack, unpack
from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.common.settings.encoder_parallel import LANGUAGE, VISION, trains_vision
from qwen3vl_bridge.models.common.vision_config import vision_transformer_config
from qwen3vl_bridge.models.common.vision_tower import Qwen3VLVisionModel
from qwen3vl_bridge.models.qwen3_vl.model import Qwen3VLModel

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class Qwen3VLEncoder(MegatronModule):
    """The vision tower as a module.

    Args:
        config: the provider.
        pg_collection: the tower's process groups.
    """

    pre_process, post_process, vp_stage = True, False, None
    share_embeddings_and_output_weights = False
    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.vision_model = Qwen3VLVisionModel(vision_transformer_config(config), config.vision_config, pg_collection)

    def forward(self, inputs: EncoderInputs) -> dict[str, Tensor]:
        """Encode this rank's images and videos, or a blank image, for all language replicas that it serves.

        Returns:
            The payload, under the module's name.
        """
        pictures = inputs.vision or self.vision_model.blank_picture(next(self.parameters()).device)
        tokens, features = self.vision_model(pictures)
        return {VISION: pack(tokens, features, inputs.shards, inputs.rows)}

    def set_input_tensor(self, input_tensor: list[dict[str, Tensor]]) -> None:
        """Does nothing: the tower has no previous stage."""

    def shared_embedding_or_output_weight(self) -> None:
        """Returns None: the tower has no such weight."""

    freeze = VisionLanguageModel.freeze


class Qwen3VLDecoder(Qwen3VLModel):
    """The model without its vision tower; arguments as for `Qwen3VLModel`."""

    def __init__(self, config: VisionLanguageProvider, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.payload: Tensor | None = None
        self.headers = Headers()

    def add_tower(self) -> None:
        """Does nothing: the tower is on separate ranks."""

    def encode(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Vision tokens [M, h] and DeepStack features [t, M, h], as received from the vision ranks.

        Raises:
            ValueError: nothing was received, or the payload is not that of this microbatch, or of an earlier one.
        """
        if self.payload is None or inputs.encoder_shards is None:
            raise ValueError(
                "this model has no vision tower (dist_train.use_dist_train): expected a microbatch of "
                "qwen3vl_bridge.forward_step, in the schedule that includes the vision ranks"
            )
        payload, self.payload = self.payload, None
        if not trains_vision(self.config):
            payload = payload.detach()  # its gradient is not sent
        tokens, features, header = unpack(payload, inputs.encoder_shards, self.stage.received, self.config.hidden_size)
        if self.training:
            self.headers.add(header)
        else:
            header.check()
        return tokens, features

    def set_input_tensor(self, input_tensor: list[dict[str, Any]]) -> None:
        """Store what vision ranks or the previous pipeline stage sent, for the next `forward`."""
        arrived = input_tensor[0] or {}
        self.payload = arrived.get(VISION)
        super().set_input_tensor(arrived.get(LANGUAGE))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | dict[str, Tensor]:
        """Like `Qwen3VLModel.forward`; the output for the next pipeline stage is under the module's name."""
        output = super().forward(*args, **kwargs)
        return output if self.post_process else {LANGUAGE: output}
