"""The Megatron model of Qwen3.8-Flash-Next: a hybrid model whose hidden states are several residual streams.

The streams begin as copies of the embeddings, and are mixed to one hidden state after the last layer. Multi-token
prediction (MTP) takes the streams before they are mixed: each stream is projected by the same matrix, and the projected
embedding of the next token is added to every stream.

Source: transformers 5.20, Qwen4ExpTextModel; for MTP, which transformers does not compute, the names and shapes of the
released tensors, and public loaders that serve them.

Legend of shapes: b rows, s local sequence length, sp sequence-parallel ranks, n streams, h hidden size.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.core.batch import ModelInputs
from qwen3vl_bridge.models.common.hybrid_model import NEXT, HybridGPTModel, HybridModel
from qwen3vl_bridge.models.common.layer_specs import backend
from qwen3vl_bridge.models.common.model import check_received
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.qwen4_exp.layer import prediction_layer_spec, stream_block_spec
from qwen3vl_bridge.models.qwen4_exp.residual import StreamMixer, initialize_replicated

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn


class PredictionLayer(MegatronModule):
    """MTP layer for residual streams. `forward` takes the arguments of megatron-core's MultiTokenPredictionLayer."""

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection, norm: Any) -> None:
        super().__init__(config=config)
        self.streams, self.tp_group = config.hc_count, pg_collection.tp
        self.layer_number = 1  # among the layers of multi-token prediction; read by Megatron-Bridge
        hidden, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm = norm(config=config, hidden_size=hidden, eps=eps)
        self.hnorm = norm(config=config, hidden_size=self.streams * hidden, eps=eps)
        self.fc_embedding, self.fc_hidden = (
            nn.Linear(hidden, hidden, bias=False, dtype=config.params_dtype) for _ in range(2)
        )
        initialize_replicated(self, config)
        self.mtp_model_layer = build_module(
            prediction_layer_spec(config), config=config, layer_number=1, is_mtp_layer=True, pg_collection=pg_collection
        )
        self.hyper_connection_mixer = StreamMixer(config)

    def forward(self, hidden_states: Tensor, *, embedding: Tensor, **arguments: Any) -> tuple[Tensor]:
        """Return a tuple with hidden states [s / sp, b, h] that predict the token after the next.

        Args:
            hidden_states: [s / sp, b, n * h], the streams after the last layer.
            embedding: [s / sp, b, h], the embedded next tokens.
            arguments: further arguments of the layer, and token and position ids, which are not used.
        """
        for unused in ("input_ids", "position_ids"):
            arguments.pop(unused, None)
        streams = self.fc_hidden(self.hnorm(hidden_states).unflatten(-1, (self.streams, -1)))
        streams = (streams + self.fc_embedding(self.enorm(embedding)).unsqueeze(-2)).flatten(-2)

        def run(streams: Tensor) -> Tensor:
            return self.mtp_model_layer(hidden_states=streams, **arguments)[0]

        if self.config.recompute_granularity == "full" and self.training:
            streams = tensor_parallel.checkpoint(run, False, streams)
        else:
            streams = run(streams)
        return (self.hyper_connection_mixer(streams),)


class PredictionBlock(MegatronModule):
    """The multi-token prediction (MTP) block, with one layer.

    The layer is kept in a list `layers`, so that parameter names match megatron-core's block.
    """

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection, norm: Any) -> None:
        super().__init__(config=config)
        self.layers = nn.ModuleList([PredictionLayer(config, pg_collection, norm)])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the sharded tensors of the layer, with the names of megatron-core's own block."""
        (layer,) = self.layers
        # By default the tensors in a ModuleList are saved as if all ranks had the same ones.
        name = f"{prefix}layers.0."
        sharded = layer.sharded_state_dict(name, sharded_offsets, metadata)
        apply_prefix_mapping(sharded, {f"{name}mtp_model_layer.": f"{name}transformer_layer."})
        return sharded


class Qwen4ExpGPTModel(HybridGPTModel):
    """The text model, in which layers have residual streams. The last stage mixes the streams to one hidden state."""

    block_spec = staticmethod(stream_block_spec)
    keeps_states = False  # neither keys of the indexer nor tokens before an n-gram or a convolution are stored

    def __init__(self, config: VisionLanguageProvider, pg_collection: ProcessGroupCollection, **ends: Any) -> None:
        super().__init__(config, pg_collection, **ends)
        if self.post_process:
            self.hyper_connection_mixer = StreamMixer(config)

    def build_mtp(self, config: VisionLanguageProvider, groups: ProcessGroupCollection) -> nn.Module:
        """Return the module of multi-token prediction, with its layer in `layers`."""
        return PredictionBlock(config, groups, backend(config).layer_norm(rms_norm=True))

    def output_states(self, hidden_states: Tensor) -> Tensor:
        """Mix streams [s / sp, b, n * h] to hidden states [s / sp, b, h]; only on the last stage."""
        return self.hyper_connection_mixer(hidden_states) if self.post_process else hidden_states


class Qwen4ExpModel(HybridModel):
    """One pipeline stage of Qwen3.8-Flash-Next: the vision tower on the first stage, text layers on all stages."""

    language_model_class = Qwen4ExpGPTModel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_ngram_table = any(layer.ple is not None for layer in self.language_model.decoder.layers)

    def forward(self, *args: Any, inputs: ModelInputs | None = None, **kwargs: Any) -> Any:
        """Compute losses, logits or hidden states as VisionLanguageModel does.

        Raises:
            ValueError: the batch is in the format of a caller, expert-parallel ranks share the n-gram tables, and the
                model is trained without `variable_seq_lengths`. If the batches of ranks had different numbers of rows,
                ranks would wait forever.
        """
        ranks = self.pg_collection.tp_ep.size() if self.config.ple_layers else 1
        is_trained = self.training and torch.is_grad_enabled()
        if inputs is None and ranks > 1 and is_trained and not self.config.variable_seq_lengths:
            raise ValueError(
                f"variable_seq_lengths is False, expected True: {ranks} ranks share the n-gram tables, and their "
                "batches may have different numbers of rows"
            )
        return super().forward(*args, inputs=inputs, **kwargs)

    def check_inputs(self, inputs: ModelInputs) -> None:
        """Raise ValueError for a batch without n-gram ids, and in training with MTP for a batch without labels."""
        super().check_inputs(inputs)
        if self.has_ngram_table and inputs.ngram_ids is None:
            raise ValueError(
                "the batch has no ngram_ids, which the n-gram embedding needs: make the batch with "
                "TokenBatch.local(**config.local_arguments(groups))"
            )

    def stage_arguments(self) -> dict[str, Any]:
        """Return arguments of `TokenBatch.local` for this stage. N-grams are hashed only if it has n-gram tables."""
        return super().stage_arguments() | ({} if self.has_ngram_table else dict(ngram_hashes=()))

    def embed(self, inputs: ModelInputs, encoded: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Return the streams [s / sp, b, n * h] of tokens and images, and a dict of additional inputs of layers."""
        hidden, layer_arguments = super().embed(inputs, encoded)
        return hidden.repeat(1, 1, self.config.hc_count), layer_arguments

    def text_arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        """Return the n-gram ids as the `context` of layers, on stages that have n-gram tables."""
        return {} if inputs.ngram_ids is None else {"context": inputs.ngram_ids}

    def pack(self, hidden: Tensor, layer_arguments: dict[str, Any]) -> Tensor:
        """Return the streams [.., n * h] or, with an MTP loss, also the embedded next tokens: [.., (n + 1) * h]."""
        if NEXT not in layer_arguments:
            return super().pack(hidden, layer_arguments)
        embedded = layer_arguments[NEXT].to(hidden.dtype)
        return torch.cat((hidden, embedded), -1)

    def unpack(self, received: Tensor, length: int, inputs: ModelInputs) -> tuple[Tensor, dict[str, Any]]:
        """Return the streams and, if this batch has an MTP loss, the embedded next tokens as a layer argument."""
        rows, width = len(inputs.input_ids), self.config.hc_count * self.config.hidden_size
        check_received(received, length * rows, f"{length} tokens of {rows} rows")
        if not self.predicts(inputs):
            return received, {}
        hidden, embedded = received.split([width, self.config.hidden_size], -1)
        return hidden.contiguous(), {NEXT: embedded.contiguous()}
