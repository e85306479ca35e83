"""miles: arguments copied onto the provider, one packed row with a loss mask and no labels, its division of the loss.

Sources: miles/backends/megatron_utils/{model_provider,model,checkpoint}.py, miles/backends/
megatron_utils/update_weight/hf_weight_iterator_bridge.py, miles/backends/training_utils/{data,loss}.py. Arguments are
those of examples/geo3k_vlm/run_geo3k_vlm.sh and Megatron-LM's defaults.
"""

import dataclasses
from argparse import Namespace
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import DistributedDataParallelConfig
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model

from tests.frameworks import support
from tests.frameworks.support import Built, Truth

ARGS = Namespace(**support.MILES, moe_router_bias_update_rate=1e-3, moe_aux_loss_coeff=0.0)


def make_actor(folder, *, given_groups: bool = True, ddp: bool = False, **changes: Any) -> Built:
    """As get_model_provider_func of megatron_to_hf_mode=bridge, Megatron-LM's get_model and _load_checkpoint_hf."""
    bridge = AutoBridge.from_hf_pretrained(str(folder), trust_remote_code=True)
    provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in (vars(ARGS) | changes).items():  # _apply_bridge_runtime_config
        setattr(provider, name, value)
    provider.finalize()
    if given_groups:
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = provider.provide(pre_process=True, post_process=True, vp_stage=None)
    forward = model.forward

    def logits_only(*args, **kwargs):
        output = forward(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    model.forward = logits_only
    chunks = [model]
    if ddp:
        config = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True)
        chunks = [DistributedDataParallel(config=get_model_config(model), ddp_config=config, module=model)]
    bridge.load_hf_weights(chunks)
    return Built(bridge, provider, chunks)


@pytest.fixture(scope="module")
def actor(folder) -> Built:
    return make_actor(folder)


def get_batch(truth: Truth, multiplier: int = 16) -> dict[str, Any]:
    """qkv_format thd: samples one after the other, and padding of token 0 as a segment of its own.

    The mask is of the logits that count, one place before their tokens; the response is each sample's second half.
    """
    ids = [sample.ids for sample in truth.samples]
    pad = -sum(truth.lengths) % multiplier
    responses = [length // 2 for length in truth.lengths]
    masks = [
        F.pad(torch.ones(response, dtype=torch.int), (length - response - 1, 1))
        for length, response in zip(truth.lengths, responses, strict=True)
    ]
    return dict(
        input_ids=F.pad(torch.cat(ids), (0, pad))[None], position_ids=None, attention_mask=None, labels=None,
        packed_seq_params=support.thd([*truth.lengths, *[pad] * bool(pad)], padded=False),
        loss_mask=F.pad(torch.cat(masks), (0, pad))[None], **truth.pictures,
    )  # fmt: skip


def responses(logits: torch.Tensor, truth: Truth) -> list[torch.Tensor]:
    """As get_log_probs_and_entropy: log probabilities of each sample's response."""
    found = []
    for own, sample in zip(logits[0, : sum(truth.lengths)].split(truth.lengths), truth.samples, strict=True):
        response = len(sample.ids) // 2
        found.append(support.log_probs_of(own[-response - 1 : -1], sample.ids[-response:]))
    return found


@pytest.mark.parametrize("given_groups", [True, False])
def test_miles_log_probs_match_transformers(folder, truth, given_groups):
    """forward_only, of a provider whose groups Megatron-LM's get_model hands on, and of one that finds them."""
    actor = make_actor(folder, given_groups=given_groups)
    with torch.no_grad():
        logits = actor.model(**get_batch(truth))
    expected = [one[len(one) - len(one) // 2 - 1 : -1] for one in truth.log_probs]
    assert support.worst(responses(logits, truth), expected) <= support.LOG_PROBS


def test_miles_log_probs_of_rows_without_mask_match_transformers(actor, truth):
    """qkv_format bshd: rows padded with token 0, and nothing that says so."""
    batch = get_batch(truth) | dict(
        input_ids=support.padded_rows([sample.ids for sample in truth.samples], max(truth.lengths) + 3),
        packed_seq_params=None,
    )
    batch["loss_mask"] = torch.ones_like(batch["input_ids"], dtype=torch.int)
    with torch.no_grad():
        logits = actor.model(**batch)
    support.check_rows(logits, truth)


@pytest.mark.parametrize("per_token", [False, True])
def test_miles_gradients_match_transformers(folder, truth, per_token):
    """train_one_step: GRPO's scripts leave --calculate-per-token-loss out, those of supervised training set it.

    Two microbatches of two samples each, whose loss is summed up and divided as loss_function does.
    """
    actor = make_actor(folder, ddp=True, calculate_per_token_loss=per_token)
    halves = [Truth(truth.reference, truth.samples[:2]), Truth(truth.reference, truth.samples[2:])]
    config = get_model_config(actor.model)
    config.finalize_model_grads_func = finalize_model_grads

    def forward_step(iterator, model):
        half = next(iterator)

        def loss_function(logits):
            parts = responses(logits, half)
            if per_token:
                tokens = sum(map(len, parts))
                return -torch.cat(parts).sum(), torch.tensor(tokens), {}
            loss = -sum(part.mean() for part in parts)
            return loss * len(halves) / len(truth.samples), torch.tensor(1), {}

        return model(**get_batch(half)), loss_function

    actor.model.train()
    actor.model.zero_grad_buffer()
    support.schedule(actor.chunks, halves, forward_step, seq_length=64, forward_only=False)

    def loss(log_probs):
        parts = [one[len(one) - len(one) // 2 - 1 : -1] for one in log_probs]
        return -torch.cat(parts).mean() if per_token else -torch.stack([part.mean() for part in parts]).mean()

    expected = truth.gradients(loss)
    assert support.gradient_error(actor.bridge, unwrap_model(actor.model), expected) <= support.GRADIENT


def test_miles_export_writes_weights_replaced_in_conversion_tasks(actor, folder):
    """HfWeightIteratorBridge: an export whose tasks have other weights, as they are on the host.

    Of its own Megatron-Bridge miles takes a third entry with each weight, Megatron's name.
    """
    tasks = actor.bridge.get_conversion_tasks(actor.chunks)
    replaced: list[Any] = []
    for task in tasks:
        if task is not None and task.param_weight is not None:
            replaced.append(dataclasses.replace(task, param_weight=2 * task.param_weight))
        else:
            replaced.append(task)
    exported = dict(
        actor.bridge.export_hf_weights(actor.chunks, cpu=False, conversion_tasks=replaced, merge_adapter_weights=False)
    )
    support.check_exported({name: one / 2 for name, one in exported.items()}, folder)
