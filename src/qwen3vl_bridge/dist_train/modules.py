"""The vision and the language module that train on separate ranks, and the tensor that they exchange.

The tensor, called payload, has the shape [shards, 1 + rows, (features + 1) * hidden], where hidden is the hidden size
of the text model. Each shard has a header row, a row for each vision token, and rows of zeros up to the longest shard.
The row of a token has its DeepStack features, in the order of their layers, and then its vision token. megatron-core
concatenates shards of several senders, and splits shards for several receivers, along the first dimension, so images
may have any size.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from qwen3vl_bridge.config.fields import trains_vision
from qwen3vl_bridge.core.batch import ModelInputs, VisionRankInputs
from qwen3vl_bridge.core.device_transfer import HostCopy
from qwen3vl_bridge.core.vision_sharding import VisionShard
from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.common.vision_tower import QwenVLVisionModel, vision_transformer_config
from qwen3vl_bridge.models.qwen3_vl.model import Qwen3VLModel

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

# Names of the modules in Megatron-Bridge.
VISION, LANGUAGE = "vision_module", "language_module"

# Four integers. Their bytes are exact in every floating-point dtype of a model.
_HEADER = struct.Struct(">4I")


class Qwen3VLVisionModule(MegatronModule):
    """The vision tower as a separate model, for ranks that train no language model. It has its own process groups."""

    pre_process, post_process, vp_stage = True, False, None
    share_embeddings_and_output_weights = False
    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.vision_model = QwenVLVisionModel(vision_transformer_config(config), config.vision_config, pg_collection)

    def forward(self, inputs: VisionRankInputs) -> dict[str, Tensor]:
        """Return the payload of this rank's images and videos for all of its language replicas.

        A rank without images encodes a blank image.
        """
        images = inputs.vision or self.vision_model.blank_image(next(self.parameters()).device)
        tokens, features = self.vision_model(images)
        return {VISION: pack(tokens, features, inputs.shards, inputs.max_tokens)}

    def set_input_tensor(self, input_tensor: list[dict[str, Tensor]]) -> None:
        """Do nothing, because the tower has no previous stage."""

    def shared_embedding_or_output_weight(self) -> None:
        """Return None, because the tower has no such weight."""

    freeze = VisionLanguageModel.freeze


class Qwen3VLLanguageModule(Qwen3VLModel):
    """Qwen3-VL without its vision tower. The arguments are the same as for `Qwen3VLModel`."""

    def __init__(self, config: VisionLanguageProvider, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.payload: Tensor | None = None
        self.headers = Headers()

    def add_vision_tower(self) -> None:
        """Do nothing, because the tower is on separate ranks."""

    def encode(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Return the received vision tokens [tokens, hidden] and DeepStack features [features, tokens, hidden].

        Raises:
            ValueError: nothing was received, or a payload does not match its microbatch, which may be an earlier one.
        """
        if self.payload is None or inputs.vision_shards is None:
            raise ValueError(
                "this model has no vision tower (dist_train.use_dist_train) and has received no vision tokens. Use "
                "qwen3vl_bridge.forward_step and the schedule that includes the vision ranks"
            )
        payload, self.payload = self.payload, None
        if not trains_vision(self.config):
            payload = payload.detach()  # its gradient is not sent
        tokens, features, header = unpack(payload, inputs.vision_shards, self.stage.received, self.config.hidden_size)
        if self.training:
            self.headers.add(header)
        else:
            header.check()
        return tokens, features

    def set_input_tensor(self, input_tensor: list[dict[str, Any]]) -> None:
        """Store the tensors of vision ranks and of the previous pipeline stage for the next `forward`."""
        received = input_tensor[0] or {}
        self.payload = received.get(VISION)
        super().set_input_tensor(received.get(LANGUAGE))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | dict[str, Tensor]:
        """Call `Qwen3VLModel.forward`. Before the last pipeline stage, return the output in a dict by module name."""
        output = super().forward(*args, **kwargs)
        return output if self.post_process else {LANGUAGE: output}


def pack(tokens: Tensor, features: Tensor, shards: Sequence[VisionShard], rows: int) -> Tensor:
    """Pack vision tokens and DeepStack features into a payload [shards, 1 + rows, (features + 1) * hidden].

    Args:
        tokens: vision tokens [tokens, hidden], ordered by shard. Tokens after the last shard, such as those of a blank
            image, are ignored.
        features: DeepStack features [features, tokens, hidden].
        shards: number of tokens and checksum of each shard.
        rows: number of rows for tokens, at least the number of tokens of each shard.
    """
    token_rows = torch.cat((*features, tokens), -1)
    counts = [shard.tokens for shard in shards]
    chunks = token_rows[: sum(counts)].split(counts)
    # Not a view: the schedules could not free a view after sending it.
    padded = torch.stack([F.pad(chunk, (0, 0, 1, rows - len(chunk))) for chunk in chunks])
    headers = [list(_HEADER.pack(*numbers)) for numbers in _header_numbers(shards, len(features), tokens.size(-1))]
    headers = F.pad(torch.tensor(headers), (0, padded.size(-1) - _HEADER.size))
    headers = (headers.pin_memory() if padded.device.type == "cuda" else headers).to(padded, non_blocking=True)
    return padded + F.pad(headers[:, None], (0, 0, 0, rows))


def unpack(
    payload: Tensor, shards: Sequence[VisionShard], deepstack_layers: int, hidden: int
) -> tuple[Tensor, Tensor, Header]:
    """Unpack a payload [shards, 1 + rows, (features + 1) * hidden] with the expected shards, one from each sender.

    Returns:
        Vision tokens [tokens, hidden], DeepStack features [features, tokens, hidden], and the unchecked header.

    Raises:
        ValueError: the payload has an unexpected shape.
    """
    width, most = (deepstack_layers + 1) * hidden, max(shard.tokens for shard in shards)
    if payload.ndim != 3 or len(payload) != len(shards) or payload.size(2) != width or payload.size(1) <= most:
        raise ValueError(
            f"the vision ranks sent a tensor of shape {list(payload.shape)}, expected "
            f"{[len(shards), f'{1 + most} or more', width]}: {len(shards)} shards with up to {most} vision tokens of "
            f"hidden size {hidden}, each with {deepstack_layers} DeepStack features"
        )
    header = Header(HostCopy(payload[:, 0, : _HEADER.size]), _header_numbers(shards, deepstack_layers, hidden))
    rows = torch.cat([rows[1 : 1 + shard.tokens] for rows, shard in zip(payload, shards, strict=True)])
    layers = rows.view(-1, deepstack_layers + 1, hidden).transpose(0, 1)
    return layers[-1], layers[:-1], header


def _header_numbers(shards: Sequence[VisionShard], deepstack_layers: int, hidden: int) -> list[tuple[int, ...]]:
    return [(shard.tokens, shard.checksum, deepstack_layers, hidden) for shard in shards]


class Header(NamedTuple):
    """The header rows of a payload, and their expected contents.

    Attributes:
        received: bytes of each shard's header row, [shards, bytes].
        expected: (tokens, checksum, DeepStack layers, hidden size) of each shard.
    """

    received: HostCopy
    expected: list[tuple[int, ...]]

    def check(self) -> None:
        """Wait for the received header, and raise ValueError if vision ranks have sent other images than expected."""
        received = [_HEADER.unpack(bytes(int(byte) for byte in row)) for row in self.received.tolist()]
        if received != self.expected:
            raise ValueError(
                f"the vision ranks sent shards with (tokens, checksum, features, hidden size) {received}, expected "
                f"{self.expected}: vision and language ranks must read the same batches in the same order with the "
                "same configuration"
            )


class Headers(deque[Header]):
    """Queue of the payload headers of a step. They are checked as they arrive, and at the end of the step.

    The forward pass does not wait for them. At the end of the step weights have changed, but nothing has been saved.
    """

    def add(self, header: Header) -> None:
        """Add a header, and check the earlier headers that have arrived. Raise ValueError as `Header.check` does."""
        while self and self[0].received.is_ready():
            self.popleft().check()
        self.append(header)

    def check_remaining(self) -> None:
        """Wait for all remaining headers and check them. Raise ValueError as `Header.check` does."""
        while self:
            self.popleft().check()
