"""The two modules that train on separate ranks, the vision tower and the model without it, and the tensor between them.

A payload is [P, 1 + R, (t + 1) * h]: for each of P shards a header row, then a row for each vision token, then rows of
zeros up to the longest shard. A token's row has its DeepStack features first, in the order of their layers, and its
final embedding last. megatron-core concatenates shards of several senders, and splits those of several receivers, along
the first dimension, so images may have any size.

Legend: t DeepStack features of a token, h the text model's hidden size, M vision tokens.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from qwen3vl_bridge.batch import ModelInputs, VisionRankInputs, VisionShard
from qwen3vl_bridge.batch.device_transfer import HostCopy
from qwen3vl_bridge.models.model import VisionLanguageModel
from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.models.qwen3_vl.model import Qwen3VLModel
from qwen3vl_bridge.models.settings import trains_vision
from qwen3vl_bridge.models.vision_tower import QwenVLVisionModel, vision_transformer_config

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

# The modules' names in Megatron-Bridge's set-up: of grids, and of payloads.
VISION, LANGUAGE = "vision_module", "language_module"

# Of four numbers; each byte is exact in every floating-point dtype that models train in.
_HEADER = struct.Struct(">4I")


class Qwen3VLVisionModule(MegatronModule):
    """The vision tower as a module; the process groups are the tower's."""

    pre_process, post_process, vp_stage = True, False, None
    share_embeddings_and_output_weights = False
    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.vision_model = QwenVLVisionModel(vision_transformer_config(config), config.vision_config, pg_collection)

    def forward(self, inputs: VisionRankInputs) -> dict[str, Tensor]:
        """The payload of this rank's images and videos, or of a blank image, for all language replicas it serves."""
        pictures = inputs.vision or self.vision_model.blank_picture(next(self.parameters()).device)
        tokens, features = self.vision_model(pictures)
        return {VISION: pack(tokens, features, inputs.shards, inputs.most_tokens)}

    def set_input_tensor(self, input_tensor: list[dict[str, Tensor]]) -> None:
        """Does nothing: the tower has no previous stage."""

    def shared_embedding_or_output_weight(self) -> None:
        """Returns None: the tower has no such weight."""

    freeze = VisionLanguageModel.freeze


class Qwen3VLLanguageModule(Qwen3VLModel):
    """The model without its vision tower; arguments as for `Qwen3VLModel`."""

    def __init__(self, config: VisionLanguageProvider, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.payload: Tensor | None = None
        self.headers = Headers()

    def add_tower(self) -> None:
        """Does nothing: the tower is on separate ranks."""

    def encode(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Vision tokens [M, h] and DeepStack features [t, M, h], as received from the vision ranks.

        Raises ValueError if nothing was received, or not the payload of this microbatch, or of an earlier one.
        """
        if self.payload is None or inputs.vision_shards is None:
            raise ValueError(
                "this model has no vision tower (dist_train.use_dist_train): expected a microbatch of "
                "qwen3vl_bridge.forward_step, in the schedule that includes the vision ranks"
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
        """Store what vision ranks or the previous pipeline stage sent, for the next `forward`."""
        received = input_tensor[0] or {}
        self.payload = received.get(VISION)
        super().set_input_tensor(received.get(LANGUAGE))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | dict[str, Tensor]:
        """Like `Qwen3VLModel.forward`; the output for the next pipeline stage is under the module's name."""
        output = super().forward(*args, **kwargs)
        return output if self.post_process else {LANGUAGE: output}


def pack(tokens: Tensor, features: Tensor, shards: Sequence[VisionShard], rows: int) -> Tensor:
    """Pack vision tokens [M, h], ordered by shard, and their DeepStack features [t, M, h] into a payload.

    More tokens may follow, as of a blank image. `rows`, R, is no less than any shard's tokens.

    Returns:
        [P, 1 + R, (t + 1) * h]; not a view, because the schedules could not free a view after sending it.
    """
    each = torch.cat((*features, tokens), -1)
    counts = [shard.tokens for shard in shards]
    parts = each[: sum(counts)].split(counts)
    padded = torch.stack([F.pad(part, (0, 0, 1, rows - len(part))) for part in parts])
    headers = [list(_HEADER.pack(*numbers)) for numbers in _header_numbers(shards, len(features), tokens.size(-1))]
    headers = F.pad(torch.tensor(headers), (0, padded.size(-1) - _HEADER.size))
    headers = (headers.pin_memory() if padded.device.type == "cuda" else headers).to(padded, non_blocking=True)
    return padded + F.pad(headers[:, None], (0, 0, 0, rows))


def unpack(
    payload: Tensor, shards: Sequence[VisionShard], deepstack_layers: int, hidden: int
) -> tuple[Tensor, Tensor, Header]:
    """Unpack a payload [P, 1 + R, (t + 1) * h] of the expected shards, one from each sender.

    Returns:
        Vision tokens [M, h] and DeepStack features [t, M, h]; and the header, to be compared.

    Raises:
        ValueError: a payload of another shape.
    """
    width, most = (deepstack_layers + 1) * hidden, max(shard.tokens for shard in shards)
    if payload.ndim != 3 or len(payload) != len(shards) or payload.size(2) != width or payload.size(1) <= most:
        raise ValueError(
            f"the vision ranks sent {list(payload.shape)}, expected {[len(shards), f'{1 + most} or more', width]}: "
            f"{len(shards)} shards of up to {most} vision tokens, with {deepstack_layers} DeepStack features of width "
            f"{hidden} and their embedding each"
        )
    header = Header(HostCopy(payload[:, 0, : _HEADER.size]), _header_numbers(shards, deepstack_layers, hidden))
    rows = torch.cat([part[1 : 1 + shard.tokens] for part, shard in zip(payload, shards, strict=True)])
    each = rows.view(-1, deepstack_layers + 1, hidden).transpose(0, 1)
    return each[-1], each[:-1], header


def _header_numbers(shards: Sequence[VisionShard], deepstack_layers: int, hidden: int) -> list[tuple[int, ...]]:
    return [(shard.tokens, shard.mark, deepstack_layers, hidden) for shard in shards]


class Header(NamedTuple):
    """The received header, and the expected one."""

    received: HostCopy  # [P, bytes]
    expected: list[tuple[int, ...]]  # (tokens, mark, DeepStack layers, width) of each of the P shards

    def check(self) -> None:
        """Wait for the received header; raises ValueError if the payload is of other images or videos."""
        received = [_HEADER.unpack(bytes(int(byte) for byte in row)) for row in self.received.tolist()]
        if received != self.expected:
            raise ValueError(
                f"the vision ranks sent shards of (tokens, mark, features, width) {received}, expected "
                f"{self.expected}: both sides must read the same batches in the same order with the same configuration"
            )


class Headers(deque[Header]):
    """The headers of a step's payloads, compared without waiting for them: as they arrive, and all at the step's end.

    By then the weights have changed, but nothing has been saved.
    """

    def add(self, header: Header) -> None:
        """Add a header, and compare those that have arrived. Raises as `Header.check`."""
        while self and self[0].received.is_there():
            self.popleft().check()
        self.append(header)

    def check_all(self) -> None:
        """Compare all remaining headers. Raises as `Header.check`."""
        while self:
            self.popleft().check()
