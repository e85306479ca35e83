"""ms-swift with bridge_backend="megatron-bridge": arguments by the provider's field names, packed rows, rows, export.

Sources: swift/megatron/model/utils.py (MegatronBridgeBackend, _get_megatron_bridge_model), swift/megatron/arguments/
megatron_args.py, swift/megatron/trainers/{trainer,utils}.py, swift/megatron/utils/utils.py. ms-swift says itself that
this backend has no multimodal models and no adapters yet, and stops at one; its own, mcore-bridge, does not use
Megatron-Bridge.
"""

import dataclasses
from typing import Any

from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.core.vision_inputs import VisionSettings, mrope_positions
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.frameworks.support import (
    GRADIENT,
    LOG_PROBS,
    Built,
    Truth,
    check_exported,
    gradient_error,
    padded_rows,
    thd,
    worst,
)
from tests.helpers.expert_layouts import relayout

# Every default of MegatronArguments and its bases that is a field of the provider, but None and empty lists, which
# are not copied. Read on 2026-11-28 in commit 3602360a of 2026-08-22. Not as there: grouped experts, which are
# Transformer Engine's and on by default; calculate_per_token_loss is what _set_default makes of None.
ARGUMENTS = dict(
    recompute_granularity="selective", recompute_modules=["core_attn"], masked_softmax_fusion=True,
    bias_dropout_fusion=True, bias_activation_fusion=True, apply_rope_fusion=False,
    gradient_accumulation_fusion=True, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native",
    calculate_per_token_loss=True, attention_backend="flash", perform_initialization=False,
    use_cpu_initialization=False, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
    account_for_embedding_in_pipeline_split=False, account_for_loss_in_pipeline_split=False, overlap_p2p_comm=True,
    sequence_parallel=False, context_parallel_size=1, tp_comm_overlap=False, expert_model_parallel_size=1,
    expert_tensor_parallel_size=1, fp8_recipe="delayed", fp8_amax_history_len=1024, fp8_amax_compute_algo="max",
    fp4_recipe="nvfp4", attention_softmax_in_fp32=True, moe_router_dtype="fp32", moe_token_dispatcher_type="alltoall",
    moe_enable_deepep=False, moe_grouped_gemm=False, moe_permute_fusion=False, moe_aux_loss_coeff=0.0,
    moe_shared_expert_overlap=False, moe_layer_recompute=False, moe_pad_expert_input_to_capacity=False,
    moe_token_drop_policy="probs", mtp_loss_scaling_factor=0.1, dsa_indexer_loss_coeff=0.0,
    dsa_indexer_use_sparse_loss=False,
)  # fmt: skip


def make_trainer(folder, dtype: torch.dtype, **changes: Any) -> Built:
    """As _get_megatron_bridge_model and MegatronBridgeBackend.load_weights."""
    hf_config = AutoConfig.from_pretrained(folder)
    bridge = AutoBridge.from_hf_config(hf_config)
    assert AutoBridge.supports(hf_config)
    provider = bridge.to_megatron_provider(load_weights=False)
    names = {field.name for field in dataclasses.fields(provider)}
    overrides = {name: value for name, value in (ARGUMENTS | changes).items() if name in names}
    provider.apply_overrides_and_finalize(dtype=dtype, overrides=overrides | {"variable_seq_lengths": True})
    provider.swiglu = provider.gated_linear_unit and provider.activation_func is F.silu
    models = provider.provide_distributed_model(
        wrap_with_ddp=False, mixed_precision_wrapper=None, use_cpu_initialization=False
    )
    for model in models:
        model.config.bridge = bridge
    bridge.load_hf_weights(models, hf_path=str(folder))
    return Built(bridge, provider, models)


@pytest.fixture(scope="module")
def trainer(folder) -> Built:
    return make_trainer(folder, torch.float32, cross_entropy_loss_fusion=False)


def test_ms_swift_default_arguments_enable_fused_cross_entropy_in_bfloat16(folder):
    """Fused cross-entropy among them: its gradient is in bfloat16, which is no loss there."""
    trainer = make_trainer(folder, torch.bfloat16)
    assert trainer.provider.cross_entropy_loss_fusion and trainer.model.config.bf16


def prepare_batch(truth: Truth, multiple: int = 8) -> dict[str, Any]:
    """As the template's collator and prepare_batch, with padding_free: labels are rolled, and -100 where none counts.

    Segments are those of text positions, which begin anew with each sample and with the padding.
    """
    pad = -sum(truth.lengths) % multiple
    ids = F.pad(torch.cat([sample.ids for sample in truth.samples]), (0, pad))[None]
    lengths = [*truth.lengths, pad] if pad else truth.lengths
    labels = [torch.where(sample.loss_mask.bool(), sample.labels, -100) for sample in truth.samples]
    packed = thd(lengths, padded=False)
    packed.seq_lens, packed.num_samples = torch.tensor(truth.lengths), len(truth.samples)
    grids = [truth.pictures.get(name) for name in ("image_grid_thw", "video_grid_thw")]
    layout = SequenceLayout.packed_row(lengths, multiple=1)
    return dict(
        input_ids=ids, labels=F.pad(torch.cat(labels), (0, pad), value=-100)[None],
        position_ids=mrope_positions(ids, layout, *grids, VisionSettings.from_config(truth.config)),
        packed_seq_params=packed, attention_mask=None, **truth.pictures,
    )  # fmt: skip


def test_ms_swift_log_probs_of_packed_row_match_transformers(trainer, truth):
    """MegatronTrainer.forward_step and loss_func: labels of -100 have a loss, which the trainer leaves out."""
    batch = prepare_batch(truth)
    model = trainer.model
    model.zero_grad()
    losses = model(**batch)
    assert losses.shape == batch["labels"].shape
    counts = batch["labels"] != -100
    ((losses * counts).sum() / counts.sum()).backward()
    found = losses.detach()[0].split([*truth.lengths, losses.shape[1] - sum(truth.lengths)])[: len(truth.samples)]
    masks = [sample.loss_mask.bool() for sample in truth.samples]
    found = [-one[mask] for one, mask in zip(found, masks, strict=True)]
    assert worst(found, [one[mask] for one, mask in zip(truth.log_probs, masks, strict=True)]) <= LOG_PROBS

    def loss(log_probs):
        return -torch.cat([one[mask] for one, mask in zip(log_probs, masks, strict=True)]).mean()

    expected = relayout(truth.gradients(loss), ExpertLayout.INPUT_MAJOR)
    assert gradient_error(trainer.bridge, model, expected) <= GRADIENT


def test_ms_swift_log_probs_of_padded_rows_match_transformers(trainer, truth):
    """padding_free=False: a causal mask [B, 1, S, S] of each row, True where nothing is seen."""
    ids = padded_rows([sample.ids for sample in truth.samples])
    tokens = ids.shape[1]
    real = padded_rows([torch.ones_like(sample.ids, dtype=torch.bool) for sample in truth.samples])
    mask = ~(torch.ones(tokens, tokens, dtype=torch.bool).tril() & real[:, None, :])[:, None]
    labels = padded_rows([sample.labels for sample in truth.samples], fill=-100)
    with torch.no_grad():
        losses = trainer.model(input_ids=ids, position_ids=None, attention_mask=mask, labels=labels, **truth.pictures)
    found = [-one[: len(sample.ids)] for one, sample in zip(losses, truth.samples, strict=True)]
    assert worst(found, truth.log_probs) <= LOG_PROBS


def test_ms_swift_export_has_expert_layout_of_released_checkpoints(trainer, folder):
    """export_weights: a bridge made from a configuration alone knows no checkpoint, whose layout experts would have."""
    stored = relayout(load_file(folder / "model.safetensors"), ExpertLayout.INPUT_MAJOR)
    exported = trainer.bridge.export_hf_weights(trainer.chunks, cpu=False)
    check_exported({one.param_name: one.weight for one in exported}, stored)
