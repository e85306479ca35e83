"""Overlapping the expert all-to-all with compute gives bit-identical losses, gradients and weights.

megatron-core reads the setting anew in each step, and accepts it only for 16 bits. So a model of 32 bits is built
without it, and both schedules train the same model.
"""

from pathlib import Path
from typing import Any
from unittest import mock

from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.peft import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
from megatron.core import tensor_parallel

from tests.helpers.forked import results_of_ranks
from tests.helpers.ranks import of_all_ranks
from tests.helpers.steps import train_step
from tests.models.qwen3_5.tiny import make_checkpoint
from tests.parity.on_ranks import Split
from tests.parity.references import MICROBATCHES, STEPS
from tests.parity.topologies import TOPOLOGIES, Topology

_EP2, _STAGES = TOPOLOGIES["EP2"].fields, TOPOLOGIES["PP2+VPP2"].fields | TOPOLOGIES["EP2"].fields
_ACCEPTED = _EP2 | dict(overlap_moe_expert_parallel_comm=True)  # by megatron-core, for 16 bits
BALANCE = 0.5  # weight of the balancing loss, which sees padding that is routed as tokens are
PADDED, PACKED, TEXT, VIDEO = ("mixed", "padded"), ("mixed", "packed"), ("text", "packed"), ("video", "padded")
_TOWER = {f"model__vision_recompute_{name}": value for name, value in dict(
    granularity="full", method="uniform", num_layers=1
).items()}  # fmt: skip
_SELECTED = dict(model__recompute_granularity="selective", model__recompute_modules=["core_attn", "mlp"])
_MANY = dict(train__global_batch_size=2 * MICROBATCHES)  # so that the first stage too runs both passes at once
# Of each kind: how a model is split, settings of its run, and (content, rows) of the microbatches.
QWEN3_VL: dict[str, tuple[Topology, dict[str, Any], list[tuple[str, str]]]] = {
    "EP2": (TOPOLOGIES["EP2"], {}, [PADDED, PACKED, TEXT, VIDEO]),
    "16 bits": (Topology(2, _ACCEPTED), dict(mixed_precision="bf16_mixed"), [PADDED]),
    "TP2+SP+EP2": (TOPOLOGIES["TP2+SP+EP2"], {}, [PADDED, PACKED]),
    "CP2+EP2": (TOPOLOGIES["CP2+EP2"], {}, [PADDED, PACKED]),
    "PP2+VPP2+EP2": (Topology(4, _STAGES), _MANY, [PADDED, PACKED, TEXT]),
    "DP2+CP2+EP2": (TOPOLOGIES["DP2+CP2+EP2"], {}, [PACKED]),
    "gradients reduced meanwhile": (
        Topology(2, _EP2, distributed_optimizer=True),
        dict(ddp__overlap_grad_reduce=True, ddp__overlap_param_gather=True, ddp__bucket_size=20_000), [PADDED],
    ),
    "recomputed": (Topology(2, _EP2), _TOWER | _SELECTED | dict(model__loss_chunk_tokens=40), [PACKED]),
    "attention released early": (
        Topology(2, _ACCEPTED | dict(ep_overlap_early_attn_memory_release=True)), dict(mixed_precision="bf16_mixed"),
        [PADDED],
    ),
    "mean of microbatches": (
        TOPOLOGIES["EP2"], dict(model__calculate_per_token_loss=False, model__moe_z_loss_coeff=0.1), [PADDED],
    ),
    "frozen tower": (
        TOPOLOGIES["EP2"], dict(model__freeze_vision_model=True, model__freeze_vision_projection=True), [PADDED],
    ),
    "frozen language model": (TOPOLOGIES["EP2"], dict(model__freeze_language_model=True), [PADDED]),
    "LoRA": (TOPOLOGIES["EP2"], dict(peft=Qwen3VLLoRA(dim=4)), [PADDED]),
    "LoRA of experts": (TOPOLOGIES["EP2"], dict(peft=Qwen3VLLoRA(dim=4, adapt_experts=True)), [PADDED]),
    "DoRA": (TOPOLOGIES["EP2"], dict(peft=Qwen3VLDoRA(dim=4)), [PACKED]),
    "LoRA with dropout": (TOPOLOGIES["TP2+SP+EP2"], dict(peft=Qwen3VLLoRA(dim=4, dropout=0.5)), [PACKED]),
}  # fmt: skip
_MTP = dict(model__mtp_loss_scaling_factor=0.3)
QWEN3_5 = {
    "EP2": (TOPOLOGIES["EP2"], _MTP, [PADDED, PACKED]),
    "TP2+SP+EP2": (TOPOLOGIES["TP2+SP+EP2"], _MTP, [PACKED]),
    "PP2+VPP2+EP2": (Topology(4, _STAGES), _MTP | _MANY, [PADDED, PACKED]),
    "frozen": (TOPOLOGIES["EP2"], _MTP | dict(model__freeze_vision_model=True, model__freeze_vision_projection=True),
               [PADDED]),
    "LoRA": (TOPOLOGIES["EP2"], _MTP | dict(peft=Qwen3VLLoRA(dim=4)), [PACKED]),
}  # fmt: skip


def trained(split: Split, content: str, rows: str, *, overlap: bool) -> dict[str, torch.Tensor]:
    """Return this rank's losses, norms, gradients of the second step and weights after two steps."""
    run = split.run
    run.cfg.model.overlap_moe_expert_parallel_comm = overlap
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)  # of dropout
    split.begin(split.batches(content, rows, steps=STEPS * run.cfg.train.global_batch_size // MICROBATCHES), rows)
    plan, planned = VisionLanguageModel.build_schedule_plan, []

    def build(model: VisionLanguageModel, **arguments: Any) -> Any:
        planned.append(model)
        return plan(model, **arguments)

    with mock.patch.object(VisionLanguageModel, "build_schedule_plan", build):
        logs = [train_step(run) for _ in range(STEPS)]
    parts = len(run.model) * STEPS * run.cfg.train.global_batch_size // run.cfg.data_parallel_size
    assert len(planned) == (parts if overlap else 0)
    named = [(name, p) for chunk in run.model for name, p in chunk.named_parameters() if p.requires_grad]
    found = {name: torch.tensor([log[name] for log in logs]) for name in ("loss", "grad_norm")}
    found |= {f"gradient of {name}": p.main_grad.clone() for name, p in named}
    return found | {f"weight of {name}": p.detach().clone() for name, p in named}


def differing(split: Split, content: str, rows: str) -> dict[str, float]:
    """Return everything that differs between the schedules, with the largest difference."""
    found, expected = (trained(split, content, rows, overlap=overlap) for overlap in (True, False))
    assert found.keys() == expected.keys()
    assert not [name for name, one in found.items() if not one.isfinite().all()]
    assert any(one.any() for name, one in found.items() if name.startswith("gradient"))
    mine = {
        name: (one - expected[name]).abs().max().item()
        for name, one in found.items()
        if not torch.equal(one, expected[name])
    }
    return {name: error for one in of_all_ranks(mine) for name, error in one.items()}


def differing_of(folder: Path, kind: tuple[Topology, dict[str, Any], list[tuple[str, str]]]) -> dict:
    topology, settings, cases = kind
    if "peft" in settings:  # which has to begin with weights
        settings = settings | dict(checkpoint__pretrained_checkpoint=str(folder))
    split = Split(folder, topology, BALANCE, **settings)
    if "peft" in settings:  # whose second factors begin with zeros
        for p, start in zip(split.parameters, split.start, strict=True):
            start += 0.05 * torch.randn_like(start) * p.requires_grad
    return {case: differing(split, *case) for case in cases}


@pytest.fixture(scope="module")
def qwen3_5_folder(tmp_path_factory):
    released = ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT
    return make_checkpoint(tmp_path_factory.mktemp("qwen3_5"), seed=6, moe=True, mtp=released)


def check(folder: Path, kind: tuple[Topology, dict[str, Any], list[tuple[str, str]]]) -> None:
    found = results_of_ranks(differing_of, kind[0].ranks, folder, kind)
    assert found == {case: {} for case in kind[2]}


_RUN_BY_DEFAULT = ("EP2", "PP2+VPP2+EP2", "frozen tower", "LoRA of experts", "DoRA", "LoRA with dropout")


def _cases(kinds: dict) -> list:
    return [kind if kind in _RUN_BY_DEFAULT else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("kind", _cases(QWEN3_VL))
def test_qwen3_vl_overlapped_expert_all_to_all_trains_bit_identically(moe_folder, kind):
    check(moe_folder, QWEN3_VL[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", _cases(QWEN3_5))
def test_qwen3_5_overlapped_expert_all_to_all_trains_bit_identically(qwen3_5_folder, kind):
    check(qwen3_5_folder, QWEN3_5[kind])
