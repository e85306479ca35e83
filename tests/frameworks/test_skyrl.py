"""SkyRL's Megatron worker: rows with Transformer Engine's padding mask, routes of the rollout, a fused head, gradients
over several schedules, weights in buckets.

Sources: skyrl/backends/skyrl_train/workers/megatron/{megatron_worker,megatron_model_wrapper}.py, skyrl/backends/
skyrl_train/distributed/megatron/megatron_utils.py, skyrl/backends/skyrl_train/utils/replay_utils.py, skyrl/train/
{config/config,dataset/preprocess}.py. SkyRL itself refuses vision-language models with packing (its
`remove_microbatch_padding`) and under context parallelism.
"""

from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.utils import get_model_config, unwrap_model

from tests.frameworks import support
from tests.frameworks.support import Built, Truth

# Of MegatronConfig, but for grouped experts, which are Transformer Engine's.
SETTINGS = dict(
    **support.ONE_GPU, pipeline_dtype=torch.float32, attention_backend="flash", variable_seq_lengths=True,
    masked_softmax_fusion=True, moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
    moe_aux_loss_coeff=0.0, moe_router_dtype="fp32", moe_grouped_gemm=False, moe_enable_routing_replay=False,
    recompute_granularity="full", recompute_modules=["core_attn"], recompute_method="uniform",
    recompute_num_layers=1, gradient_accumulation_fusion=False, mtp_num_layers=None,
)  # fmt: skip


def make_worker(folder, *, ddp: bool = False, **changes: Any) -> Built:
    """As init_configs and make_megatron_module: weights are loaded by the provider."""
    bridge = AutoBridge.from_hf_pretrained(str(folder), trust_remote_code=True)
    provider = bridge.to_megatron_provider()
    provider.rotary_base = bridge.hf_pretrained.config.text_config.rope_parameters["rope_theta"]
    for name, value in (SETTINGS | changes).items():
        setattr(provider, name, value)
    provider.finalize()
    config = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True)
    return Built(bridge, provider, provider.provide_distributed_model(ddp_config=config, wrap_with_ddp=ddp, bf16=False))


@pytest.fixture(scope="module")
def worker(folder) -> Built:
    return make_worker(folder)


def call_of(truth: Truth, multiple: int = 8) -> dict[str, Any]:
    """As remove_left_padding and to_te_attention_mask: True for padding, [B, 1, 1, S]."""
    (length,) = support.padded_lengths([max(truth.lengths)], multiple)
    ids = [sample.ids for sample in truth.samples]
    mask = support.padded_rows([torch.ones_like(one, dtype=torch.bool) for one in ids], length)
    return dict(
        input_ids=support.padded_rows(ids, length), position_ids=None, packed_seq_params=None,
        attention_mask=(~mask)[:, None, None, :], **truth.pictures,
    )  # fmt: skip


def test_skyrl_log_probs_match_transformers(worker, truth):
    """Divided by the temperature in place, as both its passes and RLinf's do."""
    for some in (truth, Truth(truth.reference, truth.samples[1:2])):
        logits = worker.model(**call_of(some))
        logits.div_(1.0)
        support.check_rows(logits, some)


def test_forward_raises_if_transformer_engine_mask_is_inverted_or_float(worker, truth):
    call = call_of(truth)
    for other in (~call["attention_mask"], call["attention_mask"].float()):
        with pytest.raises(ValueError, match=r"is read as Transformer Engine's: it must contain booleans, True"):
            worker.model(**call | dict(attention_mask=other))


def test_skyrl_fused_lm_head_log_probs_match_transformers(worker, truth):
    """fused_lm_head_logprob: hidden states [B, S, H] come back as they are, and the head's weight beside them."""

    def processor(*, hidden_states, output_layer, output_weight, context, **_):
        context["weight"] = output_layer.weight if output_weight is None else output_weight
        return hidden_states.transpose(0, 1).contiguous()

    context: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        hidden = worker.model(**call_of(truth), output_processor=processor, output_processor_context=context)
    support.check_rows(hidden @ context["weight"].T, truth)


def test_skyrl_gradients_summed_over_two_schedules_match_transformers(folder, truth):
    """_defer_finalize_model_grads: each request of a batch is a schedule, and gradients are reduced once at its end."""
    worker = make_worker(folder, ddp=True)
    config, deferred = get_model_config(worker.model), []
    config.finalize_model_grads_func = lambda model, num_tokens=None, **_: deferred.append(num_tokens)

    def forward_step(iterator, model):
        half = next(iterator)

        def loss_function(logits):
            rows = zip(logits, half.samples, strict=True)
            parts = [support.log_probs_of(one[: len(sample.ids)], sample.labels) for one, sample in rows]
            return -torch.cat(parts).sum() / sum(truth.lengths), {}

        return model(**call_of(half)), loss_function

    worker.model.train()
    worker.model.zero_grad_buffer()
    for half in (Truth(truth.reference, truth.samples[:2]), Truth(truth.reference, truth.samples[2:])):
        support.schedule(worker.chunks, [half], forward_step, seq_length=64, forward_only=False)
    assert deferred == [None, None]
    finalize_model_grads(worker.chunks, None)
    expected = truth.gradients(lambda log_probs: -torch.cat(log_probs).mean())
    assert support.gradient_error(worker.bridge, unwrap_model(worker.model), expected) <= support.GRADIENT


@pytest.mark.parametrize("folder", ["MoE"], indirect=True)
def test_skyrl_replay_of_recorded_routing_gives_equal_logits(folder, truth):
    """setup_per_microbatch_replay_forward: the rollout has no routes for a row's last tokens. They get any, and routers
    don't count them: `padding_mask` is 1 there too.
    """
    worker = make_worker(folder, moe_enable_routing_replay=True, moe_router_load_balancing_type="aux_loss")
    routers = [module for module in unwrap_model(worker.model).modules() if isinstance(module, TopKRouter)]
    replays = [router.router_replay for router in routers]
    call, masks = call_of(truth), []
    for router in routers:
        router.register_forward_pre_hook(lambda _, given: masks.append(given[1]))
    real = ~call["attention_mask"][:, 0, 0]
    routed = real & real.roll(-1, 1)  # all but the last one
    assert int(routed.sum()) == sum(truth.lengths) - len(truth.samples)

    def forward(action: RouterReplayAction) -> torch.Tensor:
        for replay in replays:
            replay.set_router_replay_action(action)
        with torch.no_grad():
            return worker.model(**call | dict(padding_mask=~routed))

    try:
        recorded = forward(RouterReplayAction.RECORD)
        support.check_rows(recorded, truth)
        for replay in replays:
            replay.set_target_indices(replay.get_recorded_indices())
        assert torch.equal(forward(RouterReplayAction.REPLAY_FORWARD), recorded)
    finally:
        RouterReplay.clear_global_router_replay_instances()
    assert len(masks) == 2 * len(routers) and all(torch.equal(mask.T, ~routed) for mask in masks)


def test_skyrl_export_in_buckets_gives_every_weight_unchanged(worker, folder):
    """_init_param_buckets and extract_weights: packed experts of a layer in one export, the others by size."""
    sizes = worker.bridge.get_conversion_tasks(worker.chunks)
    packed: dict[str, list[int]] = {}
    buckets: list[list[int]] = [[]]
    for index, task in enumerate(sizes):
        if getattr(task.mapping, "is_grouped_export", False):
            packed.setdefault(task.mapping.group_key, []).append(index)
        elif sum(sizes[one].param_weight.numel() for one in buckets[-1]) > 20_000:
            buckets.append([index])
        else:
            buckets[-1].append(index)
    assert len(buckets) > 3 and bool(packed) is (worker.provider.num_moe_experts is not None)
    exported: dict[str, torch.Tensor] = {}
    for bucket in [*packed.values(), *buckets]:
        tasks = worker.bridge.get_conversion_tasks(worker.chunks)  # new ones for each export
        chosen = [tasks[index] for index in bucket]
        exported |= worker.bridge.export_hf_weights(worker.chunks, show_progress=False, conversion_tasks=chosen)
    support.check_exported(exported, folder)
