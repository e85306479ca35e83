"""The Megatron model of a vision tower and a text model: embed tokens, put vision tokens in the places of their
placeholders (`embed_tokens`), decode.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar

from qwen3vl_bridge.batch.token_batch import ModelInputs, VisionRows
from qwen3vl_bridge.models.chunked_loss import is_distilled, loss_processor
from qwen3vl_bridge.models.core_attention import layout_packed_seq_params
from qwen3vl_bridge.models.cross_entropy import cross_entropy
from qwen3vl_bridge.models.inputs import OutputConversion, as_model_inputs, check_inference
from qwen3vl_bridge.models.layer_specs import decoder_block_spec
from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.models.refusals import LOGITS, ON_FORWARD, ON_TRAIN, check_token_count
from qwen3vl_bridge.models.rope import InterleavedMRoPE
from qwen3vl_bridge.models.router import forget_other_depths
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.models.schedule_plan import ModelSchedulePlan
from qwen3vl_bridge.models.vision_tower import QwenVLVisionModel, vision_transformer_config
from qwen3vl_bridge.parallel.collectives import exchange_encoded, scatter_sequence
from qwen3vl_bridge.peft.insertion import map_modules
from qwen3vl_bridge.weights.rows import Part, part_of

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint, make_viewless_tensor
from torch import Tensor, nn


class MRopeGPTModel(GPTModel):
    """The text model: megatron-core's GPT with interleaved multimodal rotary embedding."""

    # (config, virtual pipeline stage, pipeline rank) -> layers of the stage
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
        if is_distilled(self.output_layer):
            logits = logits.clone()  # the loss may overwrite them
        logits = self.without_padding(logits)
        if self.config.cross_entropy_loss_fusion and self.config.cross_entropy_fusion_impl == "native":
            return cross_entropy(logits, labels.T, self.pg_collection.tp).T.contiguous()
        return super().compute_language_model_loss(labels, logits)

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

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Like GPTModel's, with ModelOpt's scales of each output of gate and up projections divided like their weights.

        ModelOpt 0.47 names them as if ranks had consecutive parts of both: another number of ranks would mix them.
        """
        state = super().sharded_state_dict(*args, **kwargs)
        for name, scale in state.items():
            two_parts = isinstance(scale, ShardedTensor) and scale.local_shape[0] % 2 == 0
            if two_parts and name.endswith("linear_fc1.weight_quantizer._amax"):
                state[name] = apply_swiglu_sharded_factory(scale, (), singleton_local_shards=True)
        return state

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


class VisionLanguageModel(MegatronModule):
    """The part of the model on one pipeline stage: the vision tower on the first stage, text layers on every stage.

    A family whose layers have inputs other than hidden states overrides `layer_arguments`, `pack` and `unpack`. The
    provider is the text model's transformer configuration too. A stage with `pre_process` embeds tokens and images, one
    with `post_process` computes logits or the loss.
    """

    language_model_class: ClassVar[type[GPTModel]] = MRopeGPTModel
    # Read by NeMo-RL: rows with packed-sequence parameters are packed, and divided over ranks, inside this model.
    model_owns_packing = True

    def __init__(
        self,
        config: VisionLanguageProvider,
        pg_collection: ProcessGroupCollection,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config=config)
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = config.share_embeddings_and_output_weights
        self.vision_model: QwenVLVisionModel | None = None
        if pre_process:
            self.add_tower()
        self.language_model = self.language_model_class(
            config, pg_collection, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
        )
        self.model_type = self.language_model.model_type
        self.received: Tensor | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Like nn.Module's. Hooks made for text models set the head of a value or reward model here, and ModelOpt the
        loss of a teacher and its student; they belong to the text model.
        """
        if name in ("output_layer", "compute_language_model_loss"):
            setattr(self.language_model, name, value)
        else:
            super().__setattr__(name, value)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """The text model's."""
        return type(self.language_model).compute_language_model_loss(self.language_model, labels, logits)

    # Attributes that callers read from Megatron-Bridge's own model. None of these registers a module under a second
    # name.
    image_token_id = property(attrgetter("config.image_token_id"))
    video_token_id = property(attrgetter("config.video_token_id"))
    vision_start_token_id = property(attrgetter("config.vision_start_token_id"))
    decoder = property(attrgetter("language_model.decoder"))
    cp_group = property(attrgetter("pg_collection.cp"))
    pp_group = property(attrgetter("pg_collection.pp"))

    @property
    def encoder_hidden_state(self) -> Tensor | None:
        """The input that a schedule has set on the first stage, which does not use it."""
        return self.received if self.pre_process else None

    def add_tower(self) -> None:
        """Build the vision tower, on a stage that embeds."""
        self.vision_model = QwenVLVisionModel(
            vision_transformer_config(self.config), self.config.vision_config, self.pg_collection
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        *,
        inputs: ModelInputs | None = None,
        output_processor: Callable[..., Any] | None = None,
        output_processor_context: Any = None,
        inference_context: BaseInferenceContext | None = None,
        runtime_gather_output: bool | None = None,
        **pictures_and_packing: Any,
    ) -> Any:
        """Per-token loss, logits, or the hidden states of a pipeline stage that is not the last.

        Args:
            input_ids, position_ids, attention_mask, labels, loss_mask, pictures_and_packing: a batch in a caller's own
                convention, see `as_model_inputs`.
            inputs: or the batch from `TokenBatch.local`, which is used as it is.
            output_processor, output_processor_context: computes the output from hidden states [s, b, h] and labels
                instead of logits or losses, and its context; as for GPTModel.
            inference_context: accepted while it holds no tokens, because nothing is stored in it.
            runtime_gather_output: whether logits are of the whole vocabulary; None: as set in the provider.

        Returns:
            [b, s] float32 loss of each token if there are labels, else logits [b, s, padded vocabulary / tp]; from a
            pipeline stage that is not the last, see `pack`. Of a caller's own batch in its token order; under context
            parallelism this rank's part and, if a whole loss_mask was given, in a tuple with that mask's part.

        Raises:
            ValueError: a batch that is given in both ways, or that the family cannot take.
        """
        self.check_settings()
        check_inference(inference_context, runtime_gather_output, labels)
        given = dict(position_ids=position_ids, attention_mask=attention_mask, labels=labels, loss_mask=loss_mask)
        given |= dict(input_ids=input_ids, **pictures_and_packing)
        conversion: OutputConversion | None = None
        if inputs is None:
            inputs, conversion = as_model_inputs(self.config, self.pg_collection, encodes=self.pre_process, **given)
        elif any(argument is not None for argument in given.values()):
            raise ValueError("inputs is a complete batch; expected no other arguments")
        check_token_count(self.config, inputs.input_ids.numel())
        settings = dict(runtime_gather_output=runtime_gather_output)
        if output_processor is not None:
            conversion = conversion and conversion.of_processor()
            settings |= dict(output_processor=output_processor, output_processor_context=output_processor_context)
            settings |= dict(loss_mask=inputs.loss_mask)
        self.check_inputs(inputs)
        hidden, layer_arguments = self.embed(inputs) if self.pre_process else self.receive(inputs)
        output = self.decode(inputs, hidden, layer_arguments, **settings)
        if not self.post_process:
            return self.pack(output, layer_arguments)
        return output if conversion is None else conversion.of(output)

    def check_settings(self) -> None:
        """Check what can only be known when the model is used; see `refusals`."""
        # Frameworks that build models with `provide` or Megatron-Bridge's `get_model` (miles, NeMo-RL) do not declare
        # beforehand that they will train them; a model that is only loaded or evaluated may have the schedule settings
        # of the run that saved it.
        check(ON_TRAIN if self.training and torch.is_grad_enabled() else ON_FORWARD, self.config)
        if self.training and self.config.num_moe_experts:
            forget_other_depths(self.config)

    def build_schedule_plan(self, *, inputs: ModelInputs) -> ModelSchedulePlan:
        """The forward pass of `inputs` as nodes for megatron-core's combined schedule, which ends in the loss [b, s] of
        each token or, on a pipeline stage that is not the last, in the result of `pack`.
        """
        self.check_settings()
        self.check_inputs(inputs)
        return ModelSchedulePlan(self, inputs)

    def decode(
        self, inputs: ModelInputs, hidden: Tensor | None, layer_arguments: dict[str, Any], **arguments: Any
    ) -> Any:
        """Outputs of the text model; arguments are the results of `embed`, and others of GPTModel's."""
        return self.language_model(
            inputs.input_ids,
            inputs.position_ids,
            attention_mask=None,
            decoder_input=hidden,
            labels=inputs.labels,
            packed_seq_params=layout_packed_seq_params(inputs.layout),
            padding_mask=inputs.padding_mask,
            extra_block_kwargs=layer_arguments,
            **arguments,
        )

    def check_inputs(self, inputs: ModelInputs) -> None:
        """Check a family's own conditions on a batch; raises ValueError for one that this stage cannot take."""

    def encode(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Vision tokens [K, h] and DeepStack features [t, K, h] that this rank's tokens use, whichever rank encodes
        them.

        A rank without images encodes a blank one, whose rows are ignored.
        """
        encoded = self.vision_model(inputs.vision or self.vision_model.blank_picture(inputs.input_ids.device))
        if (exchange := inputs.vision_exchange) is None:
            return encoded
        return exchange_encoded(*encoded, exchange.sources, exchange.sent, exchange.received, self.pg_collection)

    def embed(self, inputs: ModelInputs, encoded: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Tokens and images as hidden states [s, b, h], and the additional inputs of the decoder's layers.

        `encoded` is the result of `encode`, if its images are used more than once.
        """
        tokens, features = encoded or self.encode(inputs)
        hidden = self.embed_tokens(inputs.input_ids, tokens, inputs.fuse)
        return hidden, self.layer_arguments(features, inputs)

    def embed_tokens(self, input_ids: Tensor, vision_tokens: Tensor, where: VisionRows) -> Tensor:
        """Token ids [b, s] as hidden states [s / sp, b, h], with placeholders replaced by vision tokens [K, h]."""
        embedded = self.language_model.embedding(input_ids, position_ids=None)
        selected = vision_tokens.index_select(0, where.sources).to(embedded.dtype)
        hidden = embedded.flatten(0, 1).index_copy(0, where.targets, selected).view_as(embedded)
        return scatter_sequence(hidden, self.config, self.pg_collection)

    def output_context(self, inputs: ModelInputs, layer_arguments: dict[str, Any]) -> Any:
        """The `output_processor_context` of the text model, of the results of `embed`; none here."""
        return None

    def layer_arguments(self, features: Tensor, inputs: ModelInputs) -> dict[str, Any]:
        """Additional inputs of the first stage's layers, of features [t, K, h] from `encode`; none here."""
        return {}

    @property
    def vision_projection(self) -> nn.ModuleList | None:
        """The mergers, main and DeepStack; None on a stage without the tower. Read by Megatron-Bridge's VLMLoRA."""
        tower = self.vision_model
        return None if tower is None else nn.ModuleList([tower.merger, tower.decoder.deepstack_merger_list])

    def map(self, func: Callable[..., Any], leaf_only: bool = False, **where: Any) -> nn.Module:
        """Megatron-Bridge's walk over modules, by `map_modules`, whose names do not depend on wrappers."""
        return map_modules(self, func, leaf_only=leaf_only)

    def freeze(
        self,
        freeze_language_model: bool = False,
        freeze_vision_model: bool = False,
        freeze_vision_projection: bool = False,
    ) -> None:
        """Stop training of whole parts. The vision projection is the mergers, the vision model the rest."""
        frozen = {
            Part.LANGUAGE_MODEL: freeze_language_model,
            Part.VISION_MODEL: freeze_vision_model,
            Part.VISION_PROJECTION: freeze_vision_projection,
        }
        for name, parameter in self.named_parameters():
            if frozen[part_of(name)]:
                parameter.requires_grad = False

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Like MegatronModule's. ModelOpt has a quantised model's layers named one by one: when it saves those of the
        text model alone, and when it loads those of the tower too.
        """
        if self.vision_model is not None and hasattr(self, "_modelopt_state"):
            named = self.config.hetereogenous_dist_checkpoint
            self.vision_model.decoder.config.hetereogenous_dist_checkpoint |= named
        return super().sharded_state_dict(*args, **kwargs)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Store what the previous pipeline stage sent, for the next `forward`."""
        self.received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def receive(self, inputs: ModelInputs) -> tuple[None, dict[str, Any]]:
        """Like `embed`, on a later pipeline stage; the hidden states are set in megatron-core's decoder beforehand."""
        hidden, layer_arguments = self.unpack_received(self.take_received(), inputs)
        self.language_model.set_input_tensor(hidden)
        return None, layer_arguments

    def take_received(self) -> Tensor:
        """What the previous pipeline stage sent, once."""
        if self.received is None:
            raise ValueError("this is not the first pipeline stage: call set_input_tensor before forward")
        received, self.received = self.received, None
        return received

    def unpack_received(self, received: Tensor, inputs: ModelInputs) -> tuple[Tensor, dict[str, Any]]:
        """`unpack` for this rank's tokens."""
        tokens, parts = inputs.input_ids.size(1), self.tp_group.size() if self.config.sequence_parallel else 1
        return self.unpack(received, tokens // parts, inputs)

    def unpack(self, received: Tensor, length: int, inputs: ModelInputs) -> tuple[Tensor, dict[str, Any]]:
        """The inverse of the previous stage's `pack`: hidden states [s = length, b, h] and the layers' other inputs.
        Raises ValueError for a tensor of another size.
        """
        rows = len(inputs.input_ids)
        check_received(received, length * rows, f"{length} tokens of {rows} rows")
        return received, {}

    def pack(self, hidden: Tensor, layer_arguments: dict[str, Any]) -> Tensor:
        """The tensor for the next stage, of hidden states [s, b, h] and the layers' other inputs.

        Not a view, because the schedules could not free a view after sending it.
        """
        return make_viewless_tensor(hidden, requires_grad=hidden.requires_grad, keep_graph=True)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The weight that the first and the last stage share if embeddings are tied; None if they are not."""
        if not self.share_embeddings_and_output_weights:
            return None
        return self.language_model.shared_embedding_or_output_weight()


def check_received(received: Tensor, expected: int, described: str) -> None:
    """Check the number of states [..., h] that the previous pipeline stage sent; raises ValueError for another one."""
    sent = received.numel() // received.size(-1)
    if sent != expected:
        raise ValueError(
            f"the previous pipeline stage sent {sent} hidden states, expected {described}, {expected}: give "
            "the schedule the rows' length as seq_length and their number as micro_batch_size, or set "
            "variable_seq_lengths=True"
        )
