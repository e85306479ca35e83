"""The layers of both towers: specs with and without Transformer Engine, torch's norms, and the router of experts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from qwen3vl_bridge.models.core_attention import SegmentAttention
from qwen3vl_bridge.models.rope import RotarySelfAttention
from qwen3vl_bridge.parallel.collectives import sum_counts

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup


def _with_config(base: type[nn.Module]) -> type[nn.Module]:
    class Norm(base):
        """torch's norm with megatron-core's constructor; its gradients are reduced under sequence parallelism."""

        def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
            for parameter in self.parameters():
                parameter.sequence_parallel = config.sequence_parallel

    Norm.__name__ = Norm.__qualname__ = base.__name__
    return Norm


RMSNorm = _with_config(nn.RMSNorm)
LayerNorm = _with_config(nn.LayerNorm)


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm times 1 + weight, in float32. Source: transformers, Qwen3_5RMSNorm."""

    def reset_parameters(self) -> None:
        """Initialise for a factor of one."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


def rms_norm_of(config: TransformerConfig) -> type[nn.Module]:
    """The norm class for a configuration."""
    return ZeroCenteredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm


class LocalBackend(LocalSpecProvider):
    """Modules without Transformer Engine: torch norms and our core attention, even if it is installed."""

    def __init__(self, config: TransformerConfig) -> None:
        """Choose the modules for a model."""
        self.config = config

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type[nn.Module]:
        """RMSNorm, zero-centred if the model's are, or LayerNorm."""
        return rms_norm_of(self.config) if rms_norm else LayerNorm

    def core_attention(self) -> type[SegmentAttention]:
        """Attention by torch's kernels."""
        return SegmentAttention


def backend(config: TransformerConfig) -> BackendSpecProvider:
    """The modules that `config.transformer_impl` names.

    Raises:
        ModuleNotFoundError: Transformer Engine is requested and not installed.
        ValueError: an implementation that this model does not have.
    """
    if config.transformer_impl == "local":
        return LocalBackend(config)
    if config.transformer_impl != "transformer_engine":
        raise ValueError(f"transformer_impl is {config.transformer_impl!r}, expected 'transformer_engine' or 'local'")
    if not HAVE_TE:
        raise ModuleNotFoundError("transformer_impl is 'transformer_engine', which is not installed; use 'local'")
    return TESpecProvider()


class BalancedRouter(TopKRouter):
    """megatron-core's router, with auxiliary losses that weight all real tokens equally, however tokens are split.

    The balancing loss is E / (N^2 k) * sum_e f_e P_e over N real tokens that choose k of E experts each, f_e of them
    expert e, with the sum P_e of their scores. A rank has only the scores of its own tokens, so the sum of the ranks'
    losses is the whole loss. It is averaged over microbatches: weighted by their tokens if losses are divided by the
    tokens of the global batch (`calculate_per_token_loss`), and equally if megatron-core divides by the number of
    microbatches. megatron-core 0.19 weights the first by the rank's own tokens times the ranks; and with a padding mask
    by N times the ranks, because it sums over ranks in place in the tensor that it then uses as the rank's own. Source
    of the loss: Fedus et al., Switch Transformers, equation 4; over all ranks, Qiu et al. (arXiv 2501.11873).
    """

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Like TopKRouter's: balance within a microbatch, over the ranks that share it."""
        if not self.get_aux_loss_coeff("aux_loss"):
            return probs
        selected = sum_counts(routing_map.sum(0), self.tp_cp_group)
        return self._balance(
            "aux_loss", "load_balancing_loss", probs, scores_for_aux_loss, selected, selected, self.tp_cp_group
        )

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Like TopKRouter's: balance over all ranks, and over the microbatches of a step so far."""
        if not self.get_aux_loss_coeff("global_aux_loss"):
            return probs
        selected = sum_counts(routing_map.sum(0), self.tp_dp_cp_group)
        self.global_tokens_per_expert += selected
        self.ga_steps += 1
        mean = self.global_tokens_per_expert / self.ga_steps
        return self._balance(
            "global_aux_loss",
            "global_load_balancing_loss",
            probs,
            scores_for_aux_loss,
            selected,
            mean,
            self.tp_dp_cp_group,
        )

    def _balance(
        self, kind: str, name: str, probs: Tensor, scores: Tensor, selected: Tensor, wanted: Tensor, group: ProcessGroup
    ) -> Tensor:
        """Attach a loss to `probs` [tokens, E]; for a microbatch without real tokens it is 0, and so is its gradient.

        Args:
            kind, name: of the loss, which selects its coefficient, and in the logs.
            scores: [tokens, E] of this rank, zero for padding.
            selected: [E] how often each expert is selected by real tokens of all ranks of `group`.
            wanted: [E] the f_e of the loss.
            group: ranks whose tokens are balanced together.
        """
        coefficient, tokens = self.get_aux_loss_coeff(kind), (selected.sum() / self.topk).clamp(min=1)
        loss = switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=wanted,
            total_num_tokens=tokens,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
            # Transformer Engine's kernel needs the number of tokens on the host (before 2.18), and at least one.
            fused=False,
        )
        # If losses are divided by microbatches, gradients are also divided by data-parallel ranks; over all of them,
        # the sum of the ranks' losses is one whole loss, and not one per rank.
        whole = 1 if self.calculate_per_token_loss else group.size() / self.tp_cp_group.size()
        return self.attach_and_log_load_balancing_loss(
            probs,
            coefficient * whole,  # divisor of the logged value
            loss * whole,
            name,
            group,
            needs_dp_avg=kind == "aux_loss",
            # It multiplies by the ranks that share a microbatch, so that a rank's tokens stand for all of them.
            valid_token_count=tokens / self.tp_cp_group.size(),
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Like TopKRouter's, except that if losses are divided by microbatches it is the mean over all tokens of one.

        megatron-core would take the mean of ranks' means, which depends on where padding is.

        Logits are [tokens, E] of this rank, the mask [tokens] is True for padding.
        """
        coefficient, ranks = self.config.moe_z_loss_coeff, self.tp_cp_group.size()
        learns = coefficient is not None and self.training and torch.is_grad_enabled()
        if not learns or self.calculate_per_token_loss or padding_mask is None or ranks == 1:
            return super().apply_z_loss(logits, padding_mask=padding_mask)
        real = ~padding_mask
        tokens = sum_counts(real.sum(), self.tp_cp_group).clamp(min=1)
        loss = (logits.logsumexp(-1).square() * real).sum() / tokens  # this rank's part of the mean
        row, rows = tracked_row(self), tracked_rows(self.config)
        get_moe_metrics_tracker().record("z_loss", loss * ranks, row + 1, rows, avg_group=self.tp_dp_cp_group)
        return MoEAuxLossAutoScaler.apply(logits, loss * coefficient)


def tracked_rows(config: TransformerConfig) -> int:
    """Values of a loss in megatron-core's tracker: one for each layer, those of multi-token prediction at the end."""
    return config.num_layers + (config.mtp_num_layers or 0)


def tracked_row(router: TopKRouter) -> int:
    """The index of a router's own value."""
    return router.layer_number - 1 + (router.config.num_layers if router.is_mtp_layer else 0)


def forget_other_depths(config: TransformerConfig) -> None:
    """Empty megatron-core's tracker, one for the process, if its values are of a model of another depth.

    Deeper layers of a second model would be outside; and pipeline stages that sum their values need the same rows, also
    those that have recorded nothing. So this is called on all of them, before a microbatch's routers.
    """
    if any(len(entry.values) != tracked_rows(config) for entry in get_moe_metrics_tracker().metrics.values()):
        destroy_moe_metrics_tracker()


def _use_local_modules(spec: ModuleSpec, config: TransformerConfig) -> None:
    modules = LocalBackend(config)
    norm = modules.layer_norm(rms_norm=config.normalization == "RMSNorm")
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention.core_attention = modules.core_attention()
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if _has_experts(layer.mlp):
        # Checkpoints use the names of the Transformer Engine spec, in which the norm before experts is also a separate
        # module. megatron-core's map is for dense layers, in which it is a part of `linear_fc1`.
        layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)


class ReleasingMoELayer(MoELayer):
    """megatron-core's, whose dispatcher keeps what it has routed until its next forward pass.

    Under full recomputation that is the finished graph of each layer, with the layer's input and its gradient.
    """

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """See MoELayer."""
        output = super().postprocess(output, shared_expert_output)
        dispatcher = self.token_dispatcher
        for name, value in vars(dispatcher).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, None)  # autograd has saved what the backward pass needs
        return output


def _has_experts(mlp: Any) -> bool:
    return isinstance(mlp, functools.partial) and mlp.func in (MoELayer, ReleasingMoELayer)


def _adapt(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    spec.submodules.self_attention.module = RotarySelfAttention
    mlp = spec.submodules.mlp
    if _has_experts(mlp):
        modules = dataclasses.replace(mlp.keywords["submodules"], router=BalancedRouter)
        spec.submodules.mlp = functools.partial(ReleasingMoELayer, *mlp.args, **mlp.keywords | dict(submodules=modules))
    if isinstance(backend(config), LocalBackend):
        _use_local_modules(spec, config)
    return spec


def decoder_block_spec(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Layer specs for one pipeline stage of a decoder with full attention in every layer."""
    modules = backend(config)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=not isinstance(modules, LocalBackend),
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    for spec in block.layer_specs:
        _adapt(spec, config)
    block.layer_norm = modules.layer_norm(rms_norm=config.normalization == "RMSNorm")
    return block


def vision_block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The vision tower's layers: full attention within a frame, no final norm (each merger has its own)."""
    if isinstance(backend(config), LocalBackend):
        make_spec = functools.partial(get_gpt_layer_local_spec, normalization=config.normalization)
    else:
        make_spec = get_gpt_layer_with_transformer_engine_spec
    specs = [_adapt(make_spec(qk_layernorm=False), config) for _ in range(config.num_layers)]
    for spec in specs:
        spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=IdentityOp)
