"""The Megatron model, which consists of a vision tower and a text model.

The forward pass encodes images, embeds tokens, replaces placeholders by vision tokens (`embed_tokens`) and decodes.

Legend of shapes: b rows of the batch, s local sequence length, sp sequence-parallel ranks, h hidden size, K vision
tokens of this rank, t DeepStack features.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, NoReturn

from qwen3vl_bridge.config.checks import run_checks
from qwen3vl_bridge.config.fields import attribute_alias
from qwen3vl_bridge.config.model_validation import GATHERED_LOGITS, MODEL_CAN_TRAIN, ON_FORWARD, check_token_count
from qwen3vl_bridge.core.batch import ModelInputs, TokenBatch, VisionPlacement
from qwen3vl_bridge.core.collectives import exchange_vision_tokens, scatter_sequence
from qwen3vl_bridge.models.common.attention import layout_packed_seq_params
from qwen3vl_bridge.models.common.decoding import has_tokens, is_stored, next_positions, step_inputs
from qwen3vl_bridge.models.common.layer_specs import decoder_block_spec
from qwen3vl_bridge.models.common.loss import cross_entropy, loss_processor
from qwen3vl_bridge.models.common.moe import reset_stale_moe_metrics
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.common.rope import InterleavedMRoPE
from qwen3vl_bridge.models.common.schedule import ModelSchedulePlan
from qwen3vl_bridge.models.common.vision_tower import QwenVLVisionModel, vision_transformer_config
from qwen3vl_bridge.models.inputs.caller_batches import as_model_inputs, check_inference
from qwen3vl_bridge.models.inputs.caller_layout import OutputConversion
from qwen3vl_bridge.peft.insertion import map_modules
from qwen3vl_bridge.upstream.gpt_model import OutputGPTModel
from qwen3vl_bridge.upstream.modelopt_layers import WEIGHT_SCALES, is_converted, keeps_output
from qwen3vl_bridge.weights.rows import Component, component_of

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


class MRopeGPTModel(OutputGPTModel):
    """The text model: megatron-core's GPT with an interleaved multimodal rotary embedding."""

    # (config, virtual pipeline stage, pipeline rank) -> layer specs of the stage
    block_spec: ClassVar[Callable[..., TransformerBlockSubmodules]] = staticmethod(decoder_block_spec)
    # Whether all layers store keys, values or states in an inference context, see `decoding.py`.
    keeps_states: ClassVar[bool] = True

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
        self.rotary_pos_emb = InterleavedMRoPE(
            int(config.kv_channels * config.rotary_percent),
            config.rotary_base,
            config.mrope_section,
            torch.float32 if config.apply_rotary_pos_emb_in_fp32 else config.params_dtype,
            config.rope_parameters,
            fused=config.apply_rope_fusion,
        )

    def compute_output(
        self,
        hidden_states: Tensor,
        *,
        labels: Tensor | None,
        output_processor: Callable[..., Any] | None = None,
        **arguments: Any,
    ) -> Any:
        """Return losses if labels are given, else logits. With an `output_processor`, return its result instead."""
        if output_processor is None and labels is not None:
            output_processor = loss_processor
        return super().compute_output(hidden_states, labels=labels, output_processor=output_processor, **arguments)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss of each token [b, s] for labels [b, s] and logits [s, b, padded vocabulary / tp].

        Raises:
            ValueError: logits are gathered over tensor-parallel ranks (`parallel_output` is False).
        """
        if not self.parallel_output and self.pg_collection.tp.size() > 1:
            raise ValueError(
                f"parallel_output is False, expected True to train under tensor parallelism: {GATHERED_LOGITS}"
            )
        if keeps_output(self.output_layer):
            logits = logits.clone()  # ModelOpt reads them after the loss, which may overwrite them
        logits = self.mask_vocabulary_padding(logits)
        if self.config.cross_entropy_loss_fusion and self.config.cross_entropy_fusion_impl == "native":
            return cross_entropy(logits, labels.T, self.pg_collection.tp).T.contiguous()
        return super().compute_language_model_loss(labels, logits)

    @torch.no_grad()
    def mask_vocabulary_padding(self, logits: Tensor) -> Tensor:
        """Set logits [s, b, padded vocabulary / tp] of vocabulary padding to minus infinity, in place.

        The probability of padding and the gradient of its logits are then exactly 0.
        """
        vocab_size, local_size = self.config.vocab_size, logits.size(-1)
        first = self.pg_collection.tp.rank() * local_size
        if first + local_size > vocab_size:
            logits[..., max(vocab_size - first, 0) :] = float("-inf")
        return logits

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Return the sharded state dict, with ModelOpt's scales of gate and up projections sharded like weights.

        ModelOpt 0.47 saves the scales of a rank as consecutive rows of the full tensor. A load with another number of
        ranks would then mix the scales of gate and up projections.
        """
        state = super().sharded_state_dict(*args, **kwargs)
        for name, scale in state.items():
            has_two_halves = isinstance(scale, ShardedTensor) and scale.local_shape[0] % 2 == 0
            if has_two_halves and name.endswith(f"linear_fc1{WEIGHT_SCALES}"):
                state[name] = apply_swiglu_sharded_factory(scale, (), singleton_local_shards=True)
        return state

    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded_state_dict: ShardedStateDict,
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict,
    ) -> None:
        """Add the tied output weight to a sharded state dict, in place.

        On the last of several stages, the weight's replica id contains the rank in `metadata["dp_cp_group"]`. GPTModel
        would take this rank from the global `parallel_state`, which is not initialized if vision ranks are separate.
        """
        if self.pre_process or not self.post_process:
            super().tie_embeddings_and_output_weights_state_dict(
                sharded_state_dict, output_layer_weight_key, first_stage_word_emb_key, metadata
            )
            return
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.shared_embedding_or_output_weight(),
            key=first_stage_word_emb_key,
            replica_id=(1, 0, metadata["dp_cp_group"].rank()),  # a copy of the first stage's weight
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class VisionLanguageModel(MegatronModule):
    """One pipeline stage of the model: the vision tower on the first stage, text layers on every stage.

    A family overrides `layer_arguments`, `pack` and `unpack` if its layers have inputs other than hidden states. The
    provider is also the transformer configuration of the text model. A stage with `pre_process` embeds tokens and
    images, a stage with `post_process` computes logits or the loss.
    """

    language_model_class: ClassVar[type[GPTModel]] = MRopeGPTModel
    # Read by NeMo-RL: this model packs rows that come with packed-sequence parameters, and shards them over ranks.
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
            self.add_vision_tower()
        self.language_model = self.language_model_class(
            config, pg_collection, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
        )
        self.model_type = self.language_model.model_type
        self.received: Tensor | None = None
        # For training (True) and other forward passes (False): the provider and its `changes` at the last check.
        self.checked_settings: dict[bool, tuple[VisionLanguageProvider, int]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. The attributes listed below are set on the text model instead.

        These are `vocab_size`, `output_layer` (which RL frameworks replace by the head of a value or reward model),
        `compute_language_model_loss` (which ModelOpt replaces for distillation), and `decoder` (which Megatron-Bridge's
        inference replaces).

        Raises:
            ValueError: `pg_collection` is set to other process groups than those that the model was built with.
        """
        if name in ("output_layer", "decoder", "vocab_size", "compute_language_model_loss"):
            setattr(self.language_model, name, value)
        elif name == "pg_collection" and getattr(self, name, value) is not value:
            self._reject_process_groups(value)
        else:
            super().__setattr__(name, value)

    def _reject_process_groups(self, groups: ProcessGroupCollection) -> NoReturn:
        """Raise ValueError for new process groups, which Megatron-Bridge's `eval_cp_context` sets in every module."""
        built, given = (torch.distributed.get_process_group_ranks(group) for group in (self.cp_group, groups.cp))
        self.config.context_parallel_size = self.cp_group.size()  # eval_cp_context has already changed it
        raise ValueError(
            f"the model was built for context-parallel ranks {built} and cannot change to ranks {given}. Evaluate "
            "without eval_cp_context, or build a second model with the other context_parallel_size and load the weights"
        )

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss of each token [b, s]; see `MRopeGPTModel.compute_language_model_loss`."""
        return type(self.language_model).compute_language_model_loss(self.language_model, labels, logits)

    # Attributes of Megatron-Bridge's own model that callers read. None of these registers a module under a second name.
    # Groups are read-only: see `_reject_process_groups`.
    image_token_id = attribute_alias("config.image_token_id")
    video_token_id = attribute_alias("config.video_token_id")
    vision_start_token_id = attribute_alias("config.vision_start_token_id")
    decoder = property(attrgetter("language_model.decoder"))
    vocab_size = property(attrgetter("language_model.vocab_size"))
    cp_group = property(attrgetter("pg_collection.cp"))
    pp_group = property(attrgetter("pg_collection.pp"))

    @property
    def encoder_hidden_state(self) -> Tensor | None:
        """Return the tensor passed to `set_input_tensor` on the first stage; None on other stages.

        `forward` ignores the tensor on the first stage.
        """
        return self.received if self.pre_process else None

    def add_vision_tower(self) -> None:
        """Build the vision tower. Called only on a stage with `pre_process`."""
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
        fp32_output: bool = False,
        **images_and_packing: Any,
    ) -> Any:
        """Compute the loss of each token, logits, or the hidden states for the next pipeline stage.

        Args:
            input_ids, position_ids, attention_mask, labels, loss_mask, images_and_packing: a batch in the format of a
                caller, see `as_model_inputs`.
            inputs: the batch from `TokenBatch.local`, instead of the arguments above.
            output_processor: computes the output from hidden states [s, b, h] and labels, as for GPTModel. Its result
                replaces logits or losses.
            output_processor_context: passed to `output_processor`.
            inference_context: a StaticInferenceContext. Keys, values and states of the tokens are stored in it. After
                the caller has increased its `sequence_len_offset` by their number, `input_ids` [rows, 1] continue them.
                Positions are then derived, and `position_ids` and `attention_mask` have no effect.
            runtime_gather_output: return logits of the full vocabulary. None uses the provider's setting.
            fp32_output: an argument of Float16Module, for callers that do not know whether it wraps this model. Outputs
                of this model have the dtype of the parameters.

        Returns:
            Losses [b, s] float32 if there are labels, else logits [b, s, padded vocabulary / tp]; on a pipeline stage
            other than the last, the result of `pack`. If the batch is in the format of a caller, the output is in the
            caller's token order. Under context parallelism the output covers the tokens of this rank. If the caller
            gave a `loss_mask` of the full batch, the result is a tuple (output, this rank's slice of the mask).

        Raises:
            ValueError: the batch is given in both formats, or the model does not support it.
        """
        self.check_settings()
        batch = dict(position_ids=position_ids, attention_mask=attention_mask, labels=labels, loss_mask=loss_mask)
        batch |= dict(input_ids=input_ids, **images_and_packing)
        keeps = self.language_model.keeps_states
        check_inference(inference_context, runtime_gather_output, batch, keeps=keeps)
        if fp32_output and self.config.params_dtype != torch.float32:
            raise ValueError(
                f"fp32_output is True for a model in {self.config.params_dtype} without Float16Module, the wrapper "
                "that converts outputs. Set fp32_output=False, or build the model with "
                "mixed_precision_wrapper=Float16Module"
            )
        conversion: OutputConversion | None = None
        if inputs is None and inference_context is not None and has_tokens(inference_context):
            inputs = step_inputs(input_ids, next_positions(inference_context))
        elif inputs is None:
            stage = self.stage_arguments()
            inputs, conversion = as_model_inputs(self.config, self.pg_collection, stage_arguments=stage, **batch)
        elif given := [name for name, argument in batch.items() if argument is not None]:
            raise ValueError(f"inputs is a complete batch, and {', '.join(given)} is given too. Give only inputs")
        check_token_count(self.config, inputs.input_ids.numel())
        settings: dict[str, Any] = dict(runtime_gather_output=runtime_gather_output)
        if inference_context is not None and keeps:
            stored = is_stored(inference_context, inputs, self.config, self.pg_collection)
            settings["inference_context"] = inference_context if stored else None
        if output_processor is not None:
            conversion = conversion and conversion.for_output_processor()
            settings |= dict(output_processor=output_processor, output_processor_context=output_processor_context)
            settings |= dict(loss_mask=inputs.loss_mask)
        self.check_inputs(inputs)
        if self.pre_process:
            continues = inference_context is not None and has_tokens(inference_context)
            encoded = self.no_vision_tokens(inputs.input_ids.device) if continues else None
            hidden, layer_arguments = self.embed(inputs, encoded)
        else:
            hidden, layer_arguments = self.receive(inputs)
        output = self.decode(inputs, hidden, layer_arguments, **settings)
        if not self.post_process:
            return self.pack(output, layer_arguments)
        return output if conversion is None else conversion.convert(output)

    def check_settings(self) -> None:
        """Check settings that depend on whether the model is trained; see `config/model_validation.py`.

        Settings are checked once for training, once for other forward passes, and again after an assignment to a field
        of the provider.

        Raises:
            ValueError: the model does not support a setting.
        """
        # Frameworks that build models with `provide` or Megatron-Bridge's `get_model` (miles, NeMo-RL) do not state
        # beforehand whether they will train them. A model that is only loaded or evaluated may have the schedule
        # settings of the run that saved it. A new module is in training mode without a call of `train()`.
        trains = self.training and torch.is_grad_enabled()
        config, changes = self.checked_settings.get(trains, (None, 0))
        if config is not self.config or changes != self.config.changes:
            run_checks(MODEL_CAN_TRAIN if trains else ON_FORWARD, self.config)
            self.checked_settings[trains] = self.config, self.config.changes
        if self.training and self.config.num_moe_experts:
            reset_stale_moe_metrics(self.config)

    def build_schedule_plan(self, *, inputs: ModelInputs) -> ModelSchedulePlan:
        """Return the forward pass of `inputs` as nodes of megatron-core's schedule that overlaps two microbatches.

        The output of the last node is the losses [b, s] or, on a pipeline stage other than the last, the result of
        `pack`.
        """
        self.check_settings()
        self.check_inputs(inputs)
        return ModelSchedulePlan(self, inputs)

    def decode(
        self, inputs: ModelInputs, hidden: Tensor | None, layer_arguments: dict[str, Any], **arguments: Any
    ) -> Any:
        """Run the text model on the results of `embed` or `receive`. `arguments` are further arguments of GPTModel."""
        return self.language_model(
            inputs.input_ids,
            inputs.position_ids,
            attention_mask=None,
            decoder_input=hidden,
            labels=inputs.labels,
            packed_seq_params=layout_packed_seq_params(inputs.layout),
            padding_mask=inputs.padding_mask,
            extra_block_kwargs=layer_arguments | self.text_arguments(inputs),
            **arguments,
        )

    def stage_arguments(self) -> dict[str, Any]:
        """Return the arguments of `TokenBatch.local` that depend on the pipeline stage.

        The provider's `local_arguments` returns the others.
        """
        return dict(encode_vision=self.pre_process)

    def select_local(self, batch: TokenBatch, **arguments: Any) -> ModelInputs:
        """Return the inputs of this rank and pipeline stage for a batch, on the host.

        `arguments` are arguments of `TokenBatch.local` that replace those of the run, such as `with_next_tokens`.
        """
        return batch.local(**self.config.local_arguments(self.pg_collection) | self.stage_arguments() | arguments)

    def text_arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        """Return additional inputs of decoder layers that come with the batch. By default, there are none."""
        return {}

    def check_inputs(self, inputs: ModelInputs) -> None:
        """Raise ValueError if this pipeline stage does not support a batch.

        By default every batch is accepted; families override the method.
        """

    def encode(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Return the K vision tokens [K, h] that this rank needs, and their DeepStack features [t, K, h].

        Other ranks may have encoded the images of these tokens. A rank without images encodes a blank image and ignores
        the result.
        """
        encoded = self.vision_model(inputs.vision or self.vision_model.blank_image(inputs.input_ids.device))
        if (exchange := inputs.vision_exchange) is None:
            return encoded
        return exchange_vision_tokens(*encoded, exchange.sources, exchange.sent, exchange.received, self.pg_collection)

    def no_vision_tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return empty vision tokens [0, h] and DeepStack features [t, 0, h], in place of the result of `encode`."""
        like = dict(dtype=self.config.params_dtype, device=device)
        layers, hidden = len(self.vision_model.decoder.deepstack_merger_list), self.config.hidden_size
        return torch.zeros(0, hidden, **like), torch.zeros(layers, 0, hidden, **like)

    def embed(self, inputs: ModelInputs, encoded: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Return hidden states [s / sp, b, h] of tokens and images, and a dict of additional inputs of decoder layers.

        `encoded` is the result of `encode`, for callers that use the images more than once.
        """
        tokens, features = encoded or self.encode(inputs)
        hidden = self.embed_tokens(inputs.input_ids, tokens, inputs.fuse)
        return hidden, self.layer_arguments(features, inputs)

    def embed_tokens(self, input_ids: Tensor, vision_tokens: Tensor, where: VisionPlacement) -> Tensor:
        """Embed token ids [b, s] as hidden states [s / sp, b, h], in which vision tokens replace placeholders.

        `where` tells which of the `vision_tokens` replaces which hidden state.
        """
        embedded = self.language_model.embedding(input_ids, position_ids=None)
        selected = vision_tokens.index_select(0, where.sources).to(embedded.dtype)
        hidden = embedded.flatten(0, 1).index_copy(0, where.targets, selected).view_as(embedded)
        return scatter_sequence(hidden, self.config, self.pg_collection)

    def output_context(self, inputs: ModelInputs, layer_arguments: dict[str, Any]) -> Any:
        """Return the argument `output_processor_context` of the text model, by default None."""
        return None

    def layer_arguments(self, features: Tensor, inputs: ModelInputs) -> dict[str, Any]:
        """Return additional inputs of the decoder layers, made from the DeepStack `features` that `encode` returns.

        There are none unless a family overrides this method.
        """
        return {}

    @property
    def vision_projection(self) -> nn.ModuleList | None:
        """Return the main and the DeepStack mergers, for Megatron-Bridge's VLMLoRA; None without vision tower."""
        tower = self.vision_model
        return None if tower is None else nn.ModuleList([tower.merger, tower.decoder.deepstack_merger_list])

    def map(self, func: Callable[..., Any], leaf_only: bool = False, **where: Any) -> nn.Module:
        """Apply a PEFT function to all modules, as Megatron-Bridge does, with module names that omit wrappers."""
        return map_modules(self, func, leaf_only=leaf_only)

    def freeze(
        self,
        freeze_language_model: bool = False,
        freeze_vision_model: bool = False,
        freeze_vision_projection: bool = False,
    ) -> None:
        """Freeze components. The vision projection is the patch mergers, the vision model is the rest of the tower."""
        frozen = {
            Component.LANGUAGE_MODEL: freeze_language_model,
            Component.VISION_MODEL: freeze_vision_model,
            Component.VISION_PROJECTION: freeze_vision_projection,
        }
        for name, parameter in self.named_parameters():
            if frozen[component_of(name)]:
                parameter.requires_grad = False

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Return the sharded state dict. For a quantized model, vision and text layers use the same naming.

        When ModelOpt saves, it names each layer separately (`hetereogenous_dist_checkpoint`) only in the text model.
        When it loads, it does so in the vision tower too.
        """
        if self.vision_model is not None and is_converted(self):
            names_layers = self.config.hetereogenous_dist_checkpoint
            self.vision_model.decoder.config.hetereogenous_dist_checkpoint |= names_layers
        return super().sharded_state_dict(*args, **kwargs)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Store the tensor received from the previous pipeline stage, for the next call of `forward`."""
        self.received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def receive(self, inputs: ModelInputs) -> tuple[None, dict[str, Any]]:
        """Unpack the tensor of the previous stage, and pass its hidden states to the text model's `set_input_tensor`.

        Return (None, additional inputs of the decoder layers). None stands in the place of the hidden states that
        `embed` returns on the first stage.
        """
        hidden, layer_arguments = self.unpack_received(self.take_received(), inputs)
        self.language_model.set_input_tensor(hidden)
        return None, layer_arguments

    def take_received(self) -> Tensor:
        """Return the tensor received from the previous pipeline stage, and clear it. Raise ValueError if it is None."""
        if self.received is None:
            raise ValueError("this is not the first pipeline stage: call set_input_tensor before forward")
        received, self.received = self.received, None
        return received

    def unpack_received(self, received: Tensor, inputs: ModelInputs) -> tuple[Tensor, dict[str, Any]]:
        """Call `unpack` for a received tensor, with the number of tokens per row on this rank as `length`."""
        sp_size = self.tp_group.size() if self.config.sequence_parallel else 1
        return self.unpack(received, inputs.input_ids.size(1) // sp_size, inputs)

    def unpack(self, received: Tensor, length: int, inputs: ModelInputs) -> tuple[Tensor, dict[str, Any]]:
        """Return hidden states [length, b, h] and a dict of additional layer inputs from a tensor that `pack` has made.

        Raises:
            ValueError: the tensor has the wrong size.
        """
        rows = len(inputs.input_ids)
        check_received(received, length * rows, f"{length} tokens of {rows} rows")
        return received, {}

    def pack(self, hidden: Tensor, layer_arguments: dict[str, Any]) -> Tensor:
        """Return the tensor to send to the next stage: hidden states [s / sp, b, h], and additional layer inputs.

        By default, layers have no additional inputs, so that only hidden states are sent.
        """
        # The schedules could not free a view after sending it.
        return make_viewless_tensor(hidden, requires_grad=hidden.requires_grad, keep_graph=True)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return the embedding on the first stage and the output layer's weight on the last stage.

        Return None if embeddings are untied and the model has multi-token prediction: megatron-core would treat both
        weights as copies of one weight, and add up their gradients over the stages.
        """
        if self.config.mtp_num_layers and not self.share_embeddings_and_output_weights:
            return None
        return self.language_model.shared_embedding_or_output_weight()


def check_received(received: Tensor, expected: int, described: str) -> None:
    """Raise ValueError unless a tensor [..., h] from the previous stage contains `expected` hidden states.

    The message quotes `described`, which explains the expected number.
    """
    sent = received.numel() // received.size(-1)
    if sent != expected:
        raise ValueError(
            f"the previous pipeline stage sent {sent} hidden states, expected {expected} ({described}). Call the "
            "schedule with the length of rows as seq_length and the number of rows as micro_batch_size, or set "
            "variable_seq_lengths=True"
        )
