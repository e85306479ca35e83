"""Settings of kernels: implementation, precision, fusion and CUDA graphs."""

from __future__ import annotations

import importlib.util
import logging

from qwen3vl_bridge.models.settings.activations import text_activation
from qwen3vl_bridge.models.settings.fields import (
    VisionLanguageFields,
    can_fuse_weight_gradients,
    has_transformer_engine,
)
from qwen3vl_bridge.models.settings.rules import Row, Rule, When, any_of, at_least

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import get_te_version, is_te_min_version

logger = logging.getLogger(__name__)

# First release of Transformer Engine whose attention supports packed rows (which padded rows and images are here, too):
# in its unfused implementation (used for float32), and for each communication type of context parallelism. Earlier
# releases raise an error.
# Source: transformer_engine/pytorch/attention/dot_product_attention of the releases 2.8 to 2.18.
PACKED_UNFUSED, PACKED_CONTEXT = "2.11", {"a2a": "2.10", "all_gather": "2.18"}


def complete_kernels(provider: VisionLanguageFields) -> None:
    """Convert settings to megatron-core's values, and turn off settings without a kernel, with a message in the log.

    Raises:
        ValueError: an attention backend that is not megatron-core's, or an activation that no model here uses.
    """
    if provider.mtp_num_layers == 0:
        provider.mtp_num_layers = None  # megatron-core uses None for a model without such layers
    if isinstance(provider.attention_backend, str):
        if provider.attention_backend not in AttnBackend.__members__:
            known = ", ".join(AttnBackend.__members__)
            raise ValueError(f"attention_backend is {provider.attention_backend!r}, expected one of {known}")
        provider.attention_backend = AttnBackend[provider.attention_backend]
    if provider.transformer_impl == "local" and provider.attention_backend not in (AttnBackend.auto, AttnBackend.local):
        logger.info(
            "attention_backend %s selects one of Transformer Engine's kernels and has no effect with transformer_impl "
            "'local', where torch chooses",
            provider.attention_backend.name,
        )
    if provider.apply_rope_fusion and not _has_rotation_kernel(provider):
        logger.info(
            "apply_rope_fusion is set to False: the kernel is Transformer Engine's, and needs it, a GPU and "
            "transformer_impl 'transformer_engine'"
        )
        provider.apply_rope_fusion = False
    if isinstance(provider.activation_func, str):
        provider.activation_func = text_activation(provider.activation_func.removeprefix("torch.nn.functional."))
    if provider.bias_activation_fusion and provider.activation_func is not F.silu:
        logger.info(
            "bias_activation_fusion is set to False: megatron-core fuses only SiLU, and would compute that in place "
            "of %s",
            provider.activation_func,
        )
        provider.bias_activation_fusion = False
    if provider.gradient_accumulation_fusion and not can_fuse_weight_gradients():
        logger.warning(
            "gradient_accumulation_fusion is True and is set to False: megatron-core's output layer needs Apex's "
            "fused_weight_gradient_mlp_cuda and a GPU for it"
        )
        provider.gradient_accumulation_fusion = False


def complete_precision(provider: VisionLanguageFields) -> None:
    """Turn off settings that are incorrect in the parameters' dtype, with a message in the log.

    Called after megatron-core has completed the fields.
    """
    for precision in ("fp8", "fp4"):
        if getattr(provider, precision):
            logger.info(
                "%s applies to the text model's layers; the vision tower computes in the dtype of its parameters",
                precision,
            )
    if _attends_without_kernel(provider):
        logger.warning(
            "only Transformer Engine keeps all attention scores in float32, transformer_impl='local' does not"
        )
    native = provider.cross_entropy_loss_fusion and provider.cross_entropy_fusion_impl == "native"
    if native and provider.params_dtype != torch.bfloat16:
        logger.info(
            "cross_entropy_loss_fusion is set to False: megatron-core's native fused loss rounds the gradient of %s "
            "logits to bfloat16; cross_entropy_fusion_impl 'te' does not",
            provider.params_dtype,
        )
        provider.cross_entropy_loss_fusion = False


LOCAL = When("transformer_impl", lambda provider: provider.transformer_impl == "local")
_NOT_LOCAL = When("transformer_impl", lambda provider: provider.transformer_impl != "local")
_CAPTURED = (
    "rows, images and their positions differ between batches; a replayed layer would add no DeepStack features and "
    "treat padding as tokens"
)
_WITHOUT_GRAPHS = {
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "cuda_graph_modules": [],
    "cuda_graph_scope": [],
    "vision_cuda_graph_impl": "none",
    "vision_cuda_graph_scope": [],
    "max_vision_cuda_graph_seq_length": None,
}

# Megatron-Bridge's recipes set "full", its default, for graphs that are off. Checked for a run before Megatron-Bridge
# validates its configuration, which clears what is to be captured.
GRAPHS: tuple[Row, ...] = tuple(
    Row(name, value, _CAPTURED, also=(None, "full", "") if value == [] else (None,))
    for name, value in _WITHOUT_GRAPHS.items()
    if name in VisionLanguageFields.__dataclass_fields__
)

_CHUNKED = When("loss_chunk_tokens", lambda provider: provider.loss_chunk_tokens)

# Checked before megatron-core completes a provider.
RULES: tuple[Rule, ...] = (
    *GRAPHS,
    Row("loss_chunk_tokens", at_least(0)),
    Row(
        "defer_embedding_wgrad_compute",
        False,
        "the output layer would save its input again when the logits of chunks are recomputed; or set "
        "loss_chunk_tokens=0",
        _CHUNKED,
    ),
    *(Row(name, None, "it would be ignored", LOCAL, also=(False, "")) for name in ("fp8", "fp4")),
    Row("cpu_offloading", False, "Transformer Engine provides it", LOCAL),
    Row(
        "fp32_residual_connection",
        False,
        "its norms leave the dtype as it is, and its linear layers accept only that of their weights",
        When(
            "transformer_impl params_dtype",
            lambda provider: provider.transformer_impl == "local" and provider.params_dtype != torch.float32,
        ),
    ),
    *(
        Row(name, False, "only Transformer Engine's attention does it", LOCAL)
        for name in ("apply_query_key_layer_scaling", "batch_invariant_mode", "log_max_attention_logit")
    ),
    Row(
        "attention_backend",
        any_of(*(backend for backend in AttnBackend if backend is not AttnBackend.local)),
        "Transformer Engine's layers have no attention for it; or use transformer_impl='local'",
        _NOT_LOCAL,
    ),
)

# For a model that is trained.
LOSS = Row(
    "cross_entropy_fusion_impl",
    "native",
    "the other is Transformer Engine's, which is not installed",
    When(
        "cross_entropy_loss_fusion transformer_impl",
        lambda provider: (
            provider.cross_entropy_loss_fusion
            and provider.transformer_impl == "local"
            and importlib.util.find_spec("transformer_engine") is None
        ),
    ),
)


def check_float32(provider: VisionLanguageFields) -> None:
    """Check that Transformer Engine can compute attention in a model's dtype; its fused kernels support only 16 and 8
    bits.

    For float32 it uses its unfused implementation, which stores all attention scores, supports packed rows only from
    `PACKED_UNFUSED` on, and does not support context parallelism. Models that are only loaded, exported or saved need
    no attention.

    Raises:
        ValueError: the first forward pass would fail.
    """
    if not _attends_without_kernel(provider):
        return
    if provider.context_parallel_size > 1 or not is_te_min_version(PACKED_UNFUSED):
        raise ValueError(
            "params_dtype is torch.float32 with transformer_impl 'transformer_engine', expected transformer_impl="
            f"'local' or 16 bits: Transformer Engine {get_te_version()} has no attention in float32 for packed rows on "
            f"{provider.context_parallel_size} context-parallel ranks"
        )


def _has_rotation_kernel(provider: VisionLanguageFields) -> bool:
    return has_transformer_engine() and provider.transformer_impl != "local"


def _attends_without_kernel(provider: VisionLanguageFields) -> bool:
    float32 = provider.params_dtype == torch.float32 and not provider.enable_autocast
    return float32 and provider.transformer_impl != "local"
