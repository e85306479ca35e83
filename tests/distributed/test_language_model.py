"""The text model alone, split or not: megatron-core embeds and scatters, and nothing is scattered twice.

It is given full rows, as by users without images. It is compared with transformers and with the model of both towers.
"""

from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.models.common.attention import layout_packed_seq_params
from qwen3vl_bridge.models.qwen3_vl.model import Qwen3VLGPTModel

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from tests.helpers.batches import Sample, make_batch, make_samples, run_reference
from tests.helpers.forked import results_of_ranks
from tests.helpers.ranks import largest
from tests.parity.conftest import Pair, make_pair

SP = dict(tensor_model_parallel_size=2, sequence_parallel=True)
SPLITS: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {
        "TP1": {}, "TP2": dict(SP, sequence_parallel=False), "TP2+SP": SP,
        "TP2, loss in chunks": dict(SP, sequence_parallel=False, loss_chunk_tokens=18),
        "TP2+SP, loss in chunks": dict(SP, loss_chunk_tokens=18),
    },
    "MoE": {
        "TP1": {}, "TP2+SP": SP, "TP2+SP+EP2": dict(SP, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
    },
}  # fmt: skip
BALANCE = 0.02


def layout_of(samples: list[Sample], rows: str) -> SequenceLayout:
    """Return a layout with padding after each document, and more at the end of a packed row."""
    lengths = [len(sample.ids) for sample in samples]
    even = [-(-(length + 1) // 4) * 4 for length in lengths]
    if rows == "packed":
        return SequenceLayout.packed_row(lengths, multiple=4, total=sum(even) + 8)
    return SequenceLayout.padded_rows(lengths, max(even))


def forward(model: Qwen3VLGPTModel, batch: TokenBatch) -> Tensor:
    """Return losses [B, S] of full rows, with megatron-core's own arguments."""
    return model(
        batch.input_ids, batch.position_ids, attention_mask=None, labels=batch.labels,
        packed_seq_params=layout_packed_seq_params(batch.layout),
        padding_mask=batch.layout.padding_mask().view(batch.input_ids.shape),
    )  # fmt: skip


def against_transformers(pair: Pair, alone: Qwen3VLGPTModel, samples: list[Sample], batch: TokenBatch) -> dict:
    """Errors of losses and gradients, and how many routers got another padding mask than that of their own tokens."""
    logits, total = run_reference(pair.reference, samples)
    total.backward()
    masks: list[Tensor] = []  # [s, b] each
    for module in alone.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_pre_hook(lambda _, given: masks.append(given[1]))
    losses = forward(alone, batch)
    (losses * batch.loss_mask).sum().backward()
    # As megatron-core does after a step: of norms and routers over ranks that have other tokens or other heads.
    for name, p in pair.megatron.named_parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if getattr(p, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
            dist.all_reduce(p.grad, group=pair.provider._pg_collection.tp)
    labels = torch.cat([sample.labels for sample in samples])
    expected = F.cross_entropy(torch.cat(logits), labels, reduction="none")
    found = losses[~batch.layout.padding_mask().view(losses.shape)]
    own = batch.local(**pair.provider.local_arguments(pair.provider._pg_collection)).padding_mask.T
    assert len(masks) == len(pair.provider.moe_layers)
    return dict(
        loss=(found - expected).abs().max().item(), gradient=max(pair.gradient_errors().values()),
        masks=sum(not torch.equal(mask, own) for mask in masks),
    )  # fmt: skip


def against_both_towers(pair: Pair, alone: Qwen3VLGPTModel, whole: Qwen3VLGPTModel, batch: TokenBatch) -> dict:
    """Differences to the same text model in the one of both towers, with experts balanced, padding left out."""
    config = pair.provider
    inputs = batch.local(**config.local_arguments(config._pg_collection))
    config.moe_aux_loss_coeff = BALANCE * bool(config.moe_layers)
    pair.zero_grad()
    losses = forward(alone, batch)
    (losses * batch.loss_mask).sum().backward()
    pair.megatron.language_model = whole
    inside = pair.megatron(inputs=inputs)
    (inside * inputs.loss_mask).sum().backward()
    config.moe_aux_loss_coeff = 0.0
    gradients = zip(alone.parameters(), whole.parameters(), strict=True)
    return dict(
        inside_loss=(losses - inside).abs().max().item(),
        inside_gradient=max((ours.grad - inner.grad).abs().max().item() for ours, inner in gradients),
    )


def compare(pair: Pair, rows: str) -> dict[str, float]:
    """Compare the language model of a pair, and one that is built alone, on documents without images."""
    config, provider, whole = pair.config, pair.provider, pair.megatron.language_model
    samples = make_samples("mixed", config, seed=3)
    for sample in samples:
        sample.ids[(sample.ids == config.image_token_id) | (sample.ids == config.video_token_id)] = 5
        sample.pixels.clear()
    batch = make_batch(samples, config, layout=layout_of(samples, rows))
    pair.zero_grad()
    alone = Qwen3VLGPTModel(provider, provider._pg_collection, pre_process=True, post_process=True, vp_stage=None)
    alone.load_state_dict(whole.state_dict())
    pair.megatron.language_model = alone.train()
    return against_transformers(pair, alone, samples, batch) | against_both_towers(pair, alone, whole, batch)


def errors_of_ranks(folders: dict[str, Path]) -> dict:
    found = {}
    for family, folder in folders.items():
        for split, fields in SPLITS[family].items():
            pair = make_pair(folder, moe_aux_loss_coeff=0.0, **fields)
            for rows in ("padded", "packed"):
                found[family, split, rows] = largest(compare(pair, rows))
    return found


LOSS = 5e-6  # absolute, measured 9.5e-7 of losses up to 8
GRADIENT = 1e-5  # relative to the largest entry of each gradient, measured 1.3e-6


@pytest.fixture(scope="module")
def found(untied_folder, moe_folder):
    return results_of_ranks(errors_of_ranks, 2, {"dense": untied_folder, "MoE": moe_folder})


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize(("family", "split"), [(family, split) for family in SPLITS for split in SPLITS[family]])
def test_language_model_on_ranks_matches_transformers_and_full_model(found, family, split, rows):
    errors = found[family, split, rows]
    print(family, split, rows, {name: f"{error:.1e}" for name, error in errors.items()})
    assert errors["loss"] <= LOSS and errors["gradient"] <= GRADIENT
    assert errors["masks"] == 0
    assert errors["inside_loss"] == errors["inside_gradient"] == 0.0
