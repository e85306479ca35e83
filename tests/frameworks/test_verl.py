"""verl's Megatron engine: its settings, its forward passes with and without padding, its losses and weights.

Sources: verl/workers/engine/megatron/transformer_impl.py, verl/models/mcore/{model_forward,model_forward_fused,
util}.py, verl/utils/megatron_utils.py, verl/utils/checkpoint/megatron_checkpoint_manager.py. What stands here is what
verl does with tensors and the provider; the rest of it is not needed. Its adapters are in `test_adapters.py`, its hooks
in `test_freezing.py`.
"""

import inspect
import json
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.utils.config_utils import create_ddp_config
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.utils import get_model_config, unwrap_model
from transformers import AutoConfig

from tests.checkpoint.support import hf_tensors
from tests.frameworks import support
from tests.frameworks.support import Built, Truth

PAD = 0  # the tokenizer's


def make_engine(folder, *, overrides=None, ddp=False) -> Built:
    """As MegatronEngine._build_tf_config, make_megatron_module and _build_megatron_module."""
    bridge = AutoBridge.from_hf_pretrained(str(folder), trust_remote_code=False)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.apply_overrides_and_finalize(dtype=torch.float32, overrides=support.VERL | (overrides or {}))
    ddp_config = create_ddp_config(
        wrap_with_ddp=ddp, use_distributed_optimizer=False, use_megatron_fsdp=False,
        overrides={"grad_reduce_in_fp32": True},
    )  # fmt: skip
    module = provider.provide_distributed_model(
        wrap_with_ddp=ddp, ddp_config=ddp_config, fp16=provider.fp16, bf16=provider.bf16, use_megatron_fsdp=False
    )
    bridge.load_hf_weights(module, str(folder), allowed_mismatched_params=[])
    return Built(bridge, provider, module)


@pytest.fixture(scope="module")
def engine(folder) -> Built:
    return make_engine(folder)


def rows_of(truth: Truth, length: int | None = None) -> dict[str, Any]:
    """use_remove_padding=False."""
    ids = [sample.ids for sample in truth.samples]
    mask = support.padded_rows([torch.ones_like(one, dtype=torch.bool) for one in ids], length)
    return dict(
        input_ids=support.padded_rows(ids, length, fill=PAD), attention_mask=mask, position_ids=None, **truth.pictures
    )


def call_without_padding(truth: Truth, bucket: int | None = None) -> tuple[dict[str, Any], list[int]]:
    """As gptmodel_forward_model_engine: rows and their mask, and the offsets of the row they are packed into.

    Offsets count the padding of each sample in; the mask alone tells it.
    """
    lengths = list(truth.lengths)
    if bucket is not None:
        lengths[-1] += -sum(lengths) % bucket  # pad_to_length
    return rows_of(truth) | dict(packed_seq_params=support.thd(lengths)), lengths


def rolled(truth: Truth, lengths: list[int]) -> torch.Tensor:
    return support.packed_row([sample.ids.roll(-1) for sample in truth.samples], lengths)


@pytest.mark.parametrize("bucket", [None, 64])
def test_verl_log_probs_with_remove_padding_match_transformers(engine, truth, bucket):
    """use_remove_padding, with and without pad_to_length."""
    call, lengths = call_without_padding(truth, bucket)
    with torch.no_grad():
        support.check_packed(engine.model(**call), truth, lengths)


def test_verl_log_probs_with_router_padding_mask_match_transformers(engine, truth):
    """`router_padding_mask` [1, T] beside rows [B, S], which dynamic context parallelism passes for text models."""
    call, lengths = call_without_padding(truth, 64)
    call["padding_mask"] = torch.arange(sum(lengths))[None] >= sum(truth.lengths)
    with torch.no_grad():
        support.check_packed(engine.model(**call), truth, lengths)


def test_verl_log_probs_of_padded_rows_match_transformers(engine, truth):
    with torch.no_grad():
        support.check_rows(engine.model(**rows_of(truth, max(truth.lengths) + 3)), truth)


def test_verl_log_probs_of_single_sample_match_transformers(engine, truth):
    """A microbatch with one sample is one row with one segment."""
    for sample in truth.samples:
        one = Truth(truth.reference, [sample])
        for bucket in (None, 2 * len(sample.ids)):
            call, lengths = call_without_padding(one, bucket)
            with torch.no_grad():
                support.check_packed(engine.model(**call), one, lengths)


def step(engine: Built, loss) -> None:
    """A microbatch through megatron-core's schedule, as MegatronEngine.forward_backward_batch; gradients are made."""
    config = get_model_config(engine.model)
    config.finalize_model_grads_func = finalize_model_grads
    for chunk in engine.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    support.schedule(engine.chunks, [None], loss, seq_length=64, forward_only=False)


def sequence_means(log_probs: list[torch.Tensor]) -> torch.Tensor:
    return -torch.stack([one.mean() for one in log_probs]).mean()


@pytest.mark.parametrize("per_token", [False, True])
def test_verl_loss_gradients_match_transformers(folder, truth, per_token):
    """calculate_per_token_loss is True at CP > 1 alone: there a loss comes with the number of its tokens."""
    engine = make_engine(folder, overrides={"calculate_per_token_loss": per_token}, ddp=True)
    call, lengths = call_without_padding(truth)

    def forward_step(_, model):
        def loss_function(output):
            loss = sequence_means(
                support.unpacked(support.log_probs_of(output, rolled(truth, lengths)), truth, lengths)
            )
            if per_token:
                tokens = torch.tensor(sum(truth.lengths), dtype=torch.int)
                return loss * tokens, tokens, {}
            return loss, {}

        return model(**call), loss_function

    step(engine, forward_step)
    model = unwrap_model(engine.model)
    assert support.gradient_error(engine.bridge, model, truth.gradients(sequence_means)) <= support.GRADIENT


@pytest.mark.parametrize("ranks", [1, 2])
def test_verl_per_token_loss_is_on_only_with_context_parallelism(folder, ranks):
    """postprocess_micro_batch_func refuses rows with padding, and means of sequences, where it is by tokens.

    It says that Megatron-Bridge has it so under context parallelism alone.
    """
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.apply_overrides_and_finalize(dtype=torch.float32, overrides={"context_parallel_size": ranks})
    assert provider.calculate_per_token_loss is (ranks > 1)


def fused(*, hidden_states, output_layer, output_weight, labels, context, config, **_):
    """As verl's, with torch for its kernel, linear_cross_entropy of Triton's."""
    weight = output_weight if output_weight is not None else output_layer.weight
    assert not config.sequence_parallel
    logits = (hidden_states @ weight.T / context.temperature).transpose(0, 1)
    assert logits.shape[:2] == labels.shape
    return SimpleNamespace(
        log_probs=support.log_probs_of(logits, labels), entropy=logits.log_softmax(-1).exp().square().sum(-1)
    )


@pytest.mark.parametrize("folder", ["dense", "tied", "MoE"], indirect=True)
@pytest.mark.parametrize("bucket", [None, 64])
def test_verl_fused_kernel_log_probs_match_transformers(engine, truth, bucket):
    """use_fused_kernels: what would be logits goes through verl's function, in the packed row's order."""
    language_model = unwrap_model(engine.model).language_model
    assert isinstance(language_model, GPTModel)
    taken = inspect.signature(language_model.forward).parameters
    assert {"output_processor", "output_processor_context"} <= taken.keys()  # as patch_fused_forward asks
    call, lengths = call_without_padding(truth, bucket)
    call["labels"] = rolled(truth, lengths)

    def hook(temperature: float) -> dict:
        return dict(output_processor=fused, output_processor_context=SimpleNamespace(temperature=temperature))

    with torch.no_grad():
        output = engine.model(**call, **hook(2.0))
    expected = [support.log_probs_of(one / 2.0, s.labels) for one, s in zip(truth.logits, truth.samples, strict=True)]
    assert output.entropy.shape == output.log_probs.shape == (1, sum(lengths))
    assert support.worst(support.unpacked(output.log_probs, truth, lengths), expected) <= support.LOG_PROBS

    gradients = []
    for log_probs in (lambda: engine.model(**call, **hook(1.0)).log_probs, lambda: -engine.model(**call)):
        engine.model.zero_grad()
        torch.cat(support.unpacked(log_probs(), truth, lengths)).sum().backward()
        gradients.append([p.grad.clone() for p in engine.model.parameters()])
    for ours, plain in zip(*gradients, strict=True):
        assert (ours - plain).abs().max() <= 1e-6 * plain.abs().max().clamp(min=1.0)  # measured 0: the same sums


def test_verl_output_processor_raises_only_if_rows_are_left_padded(engine, truth):
    rows = rows_of(truth)
    hook = dict(output_processor=fused, output_processor_context=SimpleNamespace(temperature=1.0))
    call = rows | dict(labels=support.padded_rows([sample.labels for sample in truth.samples]))
    with torch.no_grad():
        found, plain = engine.model(**call, **hook).log_probs, -engine.model(**call)
    real = rows["attention_mask"]
    assert (found[real] - plain[real]).abs().max() <= support.LOG_PROBS
    for name in ("input_ids", "attention_mask", "labels"):  # padding on the left
        call[name] = torch.stack([one.roll(-n) for one, n in zip(call[name], truth.lengths, strict=True)])
    with pytest.raises(ValueError, match="Pad rows on the right, or give packed_seq_params and labels"):
        engine.model(**call, **hook)


@pytest.mark.parametrize(("argument", "advice"), [
    (dict(temperature=1.0), "give an output_processor that divides logits by it"),  # verl's patch of forward
    (dict(return_logprobs_for_linear_ce_fusion=True), "NeMo-RL: use_fused_linear_logprobs=false"),
])  # fmt: skip
def test_forward_raises_with_advice_if_verl_argument_is_unsupported(engine, truth, argument, advice):
    with pytest.raises(ValueError, match=f"is given, expected None: .*{advice}"):
        engine.model(truth.samples[1].ids[None], **argument)


def test_model_and_config_have_attributes_that_verl_reads(engine):
    """gptmodel_forward_model_engine, _get_context_parallel_layout, router replay and _save_transformer_config."""
    model = unwrap_model(engine.model)
    assert model.pre_process and model.post_process and model.vp_stage is None
    config = model.config
    assert config.fp8 is None and not config.sequence_parallel
    assert getattr(config, "experimental_attention_variant", None) is None
    assert model.language_model.decoder in getattr(model, "decoder", model).modules()
    saved = {field.name: getattr(config, field.name) for field in fields(config) if hasattr(config, field.name)}
    assert {"num_layers", "hidden_size", "calculate_per_token_loss", "image_token_id"} <= saved.keys()
    plain = {name: value for name, value in saved.items() if isinstance(value, int | float | str | None | list)}
    json.dumps(plain, default=str)


def test_verl_router_replay_uses_recorded_experts(moe_folder, truth):
    """router_replay.mode R2 and R3: chosen experts are recorded, and taken by a model that would choose others."""
    engine = make_engine(moe_folder, overrides={"moe_enable_routing_replay": True})
    model = unwrap_model(engine.model)
    routers = [module for module in model.decoder.modules() if isinstance(module, TopKRouter)]  # iter_model_routers
    replays = [router.router_replay for router in routers]
    assert len(replays) == 3 and all(router.layer_number for router in routers)
    call, _ = call_without_padding(Truth(truth.reference, truth.samples))

    def forward(action: RouterReplayAction) -> torch.Tensor:
        for replay in replays:
            replay.set_router_replay_action(action)
        with torch.no_grad():
            return engine.model(**call)

    recorded = forward(RouterReplayAction.RECORD)
    chosen = [replay.get_recorded_indices() for replay in replays]
    tokens = call["packed_seq_params"].cu_seqlens_q_padded[-1]
    assert all(indices.shape == (tokens, engine.provider.moe_router_topk) for indices in chosen)
    for replay, indices in zip(replays, chosen, strict=True):
        replay.set_target_indices(indices)
    assert torch.equal(forward(RouterReplayAction.REPLAY_FORWARD), recorded)
    routers[-1].weight.data.neg_()
    assert not torch.equal(forward(RouterReplayAction.RECORD), recorded)
    others = [replay.get_recorded_indices() for replay in replays]
    assert not torch.equal(others[-1].sort().values, chosen[-1].sort().values)
    own = forward(RouterReplayAction.REPLAY_FORWARD)  # the same experts, in shares that the router has now
    assert torch.isfinite(own).all() and not torch.equal(own, recorded)


def test_verl_two_exports_with_same_tasks_give_unchanged_weights(engine, folder):
    """get_per_tensor_param: tasks are made once and used for each export."""
    tasks = engine.bridge.get_conversion_tasks(engine.chunks)
    for _ in range(2):
        support.check_exported(dict(engine.bridge.export_hf_weights(engine.chunks, conversion_tasks=tasks)), folder)


def test_verl_saved_hf_checkpoint_equals_original(engine, folder, tmp_path):
    """MegatronCheckpointManager saves and loads with the bridge where use_dist_checkpointing is off."""
    engine.bridge.save_hf_weights(engine.chunks, str(tmp_path), strict=True)
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path)
    support.check_exported(hf_tensors(tmp_path), folder)
    engine.bridge.load_hf_weights(engine.chunks, str(tmp_path))


def test_verl_megatron_checkpoint_reload_restores_logits(folder, truth, tmp_path):
    """use_dist_checkpointing, as save_dist_checkpointing and load_dist_checkpointing: another model's logits are equal.

    Weights alone: the optimizer's state is megatron-core's, by the same names.
    """

    def state(engine):
        groups = engine.provider._pg_collection
        metadata = dict(distrib_optim_sharding_type="fully_reshardable", dp_cp_group=groups.dp_cp)
        return unwrap_model(engine.model).sharded_state_dict(metadata=metadata), metadata, groups.dp_cp

    def logits(engine):
        with torch.no_grad():
            return engine.model(**call)

    call, _ = call_without_padding(truth)
    engine = make_engine(folder)
    expected = logits(engine)
    sharded, metadata, group = state(engine)
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(backend="torch_dist", version=1), group)
    dist_checkpointing.save(
        {"model": sharded}, tmp_path, sharded_strategy=strategy, async_sharded_save=False,
        validate_access_integrity=True, content_metadata=metadata,
    )  # fmt: skip
    for parameter in engine.model.parameters():
        parameter.data.zero_()
    assert not torch.equal(logits(engine), expected)
    sharded, _, group = state(engine)
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group)
    found = dist_checkpointing.load({"model": sharded}, tmp_path, sharded_strategy=strategy)
    unwrap_model(engine.model).load_state_dict(found["model"])
    assert torch.equal(logits(engine), expected)
