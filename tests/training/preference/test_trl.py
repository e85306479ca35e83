"""Losses of preference data and their metrics equal those of TRL 1.16's own trainers, for equal log-probabilities.

Values are recorded. With `trl` in PYTHONPATH (see CONTRIBUTING.md), TRL's function computes them again.
"""

import importlib.util
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from qwen3vl_bridge.training.objective_settings import ObjectiveConfig
from qwen3vl_bridge.training.preference import dpo_losses, dpo_metrics, kto_losses

import pytest
import torch
from torch import Tensor

PAIRS, LENGTH = 5, 12
# Settings here and in TRL. Its mean of chosen tokens is over the batch, so chosen answers are equally long.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": (dict(beta=0.3), dict(beta=0.3, loss_types=["sigmoid"])),
    "robust": (dict(beta=0.3, loss_type="robust", label_smoothing=0.2),
               dict(beta=0.3, loss_types=["robust"], label_smoothing=0.2)),
    "ipo": (dict(beta=0.7, loss_type="ipo"), dict(beta=0.7, loss_types=["ipo"])),
    "sft": (dict(beta=0.3, rpo_alpha=0.6), dict(beta=0.3, loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.6])),
}  # fmt: skip
# Loss and `ObjectiveConfig.metrics`.
RECORDED = {
    "sigmoid": (0.819628175, 0.973392891, 1.04901428, 0.600000024, -0.0756213928, -8.87037105, -9.42258794),
    "robust": (0.844835306, 0.973392891, 1.04901428, 0.600000024, -0.0756213928, -8.87037105, -9.42258794),
    "ipo": (19.6152552, 2.27125008, 2.4477, 0.600000024, -0.176449916, -8.87037105, -9.42258794),
    "sft": (1.70666528, 0.973392891, 1.04901428, 0.600000024, -0.0756213928, -8.87037105, -9.42258794),
}


def token_logps() -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities [2 * PAIRS, LENGTH] of the labels, a mask of answers, and sums of the reference."""
    rng = torch.Generator().manual_seed(5)
    logps = -3 * torch.rand(2 * PAIRS, LENGTH, generator=rng, dtype=torch.float64)
    lengths = torch.cat((torch.full((PAIRS,), 6), torch.randint(1, LENGTH, (PAIRS,), generator=rng)))
    mask = torch.arange(LENGTH) >= LENGTH - lengths[:, None]
    return logps * mask, mask, -10 - 5 * torch.rand(2 * PAIRS, generator=rng, dtype=torch.float64)


def ours(**settings: Any) -> tuple[float, ...]:
    """Return loss and metrics of this package."""
    logps, mask, reference = token_logps()
    policy, before, counts = (x.view(2, -1).T for x in (logps.sum(1), reference, mask.sum(1).double()))
    objective = ObjectiveConfig(kind="dpo", **settings)
    loss = dpo_losses(objective, policy, before, counts).mean()
    return tuple(torch.cat((loss[None], dpo_metrics(objective, policy, before).mean(1))).tolist())


def of_trl(**settings: Any) -> tuple[float, ...]:
    """Return loss and metrics of `DPOTrainer._compute_loss`, with a model that returns the log-probabilities."""
    from trl.trainer.dpo_trainer import DPOTrainer

    logps, mask, reference = token_logps()
    nothing = torch.zeros_like(logps)
    outputs = SimpleNamespace(log_probs=logps, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    same = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    defaults = dict(loss_weights=[1.0], label_smoothing=0.0, beta=0.1)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=same, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False,
        _metrics={"eval": defaultdict(list)}, _total_train_tokens=0, **defaults | settings,
    )  # fmt: skip
    inputs = dict(
        input_ids=torch.zeros(2 * PAIRS, LENGTH + 1, dtype=torch.int64), attention_mask=torch.ones(1),
        completion_mask=torch.cat((torch.zeros(2 * PAIRS, 1), mask), 1).long(),
        ref_chosen_logps=reference[:PAIRS], ref_rejected_logps=reference[PAIRS:],
    )  # fmt: skip
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)
    return (float(loss), *(trainer._metrics["eval"][name][0] for name in ObjectiveConfig(kind="dpo").metrics))


@pytest.mark.parametrize("case", CASES)
def test_dpo_losses_and_metrics_match_recorded_values_of_trl(case):
    assert ours(**CASES[case][0]) == pytest.approx(RECORDED[case], rel=1e-7)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("case", CASES)
def test_recorded_dpo_values_match_trl(case):
    assert of_trl(**CASES[case][1]) == pytest.approx(RECORDED[case], rel=1e-7)


def test_label_smoothing_averages_losses_of_original_and_swapped_pair():
    """As in TRL up to 0.29 for "sigmoid" (cDPO)."""
    logps, mask, reference = token_logps()
    policy, before, counts = (x.view(2, -1).T for x in (logps.sum(1), reference, mask.sum(1).double()))

    def losses(swap: bool, smoothing: float = 0.0) -> Tensor:
        objective = ObjectiveConfig(kind="dpo", beta=0.3, label_smoothing=smoothing)
        return dpo_losses(objective, *((x.flip(1) if swap else x) for x in (policy, before, counts)))

    torch.testing.assert_close(losses(False, 0.2), 0.8 * losses(False) + 0.2 * losses(True))


# Settings of KTO here and in TRL, and the recorded loss and divergence for two scales of the reference.
KTO = dict(beta=0.3, desirable_weight=1.5, undesirable_weight=0.75)
KTO_CASES = {
    ("kto", 1.0): (0.5219300762232683, 3.4967142796835105),
    ("kto", 2.0): (0.4891449972089078, 16.41601650332981),
    ("apo_zero_unpaired", 1.0): (0.4142205857780694, 0.0),
}
LABELS = torch.tensor([True, False, False, True, True])


def kto_inputs(scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of the tokens of (answers, mismatched answers), their sums, and the reference's sums."""
    logps, _, reference = token_logps()
    return logps.view(2, PAIRS, LENGTH), logps.sum(1).view(2, PAIRS), scale * reference.view(2, PAIRS)


def kto_of_ours(loss_type: str, scale: float) -> tuple[float, float]:
    """Return loss and divergence of this package."""
    _, policy, reference = kto_inputs(scale)
    objective = ObjectiveConfig(kind="kto", loss_type=loss_type, **KTO)
    ones = torch.ones(PAIRS, dtype=torch.float64)
    losses, divergence = kto_losses(objective, policy.T, reference.T, LABELS.double(), ones)
    return losses.mean().item(), divergence.item()


def kto_of_trl(loss_type: str, scale: float) -> tuple[float, float]:
    """Return loss and divergence of `KTOTrainer._compute_loss`, with a model that returns the log-probabilities."""
    from trl.trainer.kto_trainer import KTOTrainer

    tokens, _, reference = kto_inputs(scale)
    outputs = [tokens[1], tokens[0]] if loss_type == "kto" else [tokens[0]]  # mismatched answers come first

    def model(**_: Any) -> SimpleNamespace:
        logps = outputs.pop(0)
        return SimpleNamespace(log_probs=logps, entropy=torch.zeros_like(logps), mean_logits=torch.zeros_like(logps))

    model.training = False
    same = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=model, accelerator=same, aux_loss_enabled=False, precompute_ref_logps=True, loss_type=loss_type,
        calculate_KL=loss_type == "kto", _metrics={"eval": defaultdict(list)}, _total_train_tokens=0, _tp_size=1, **KTO,
    )  # fmt: skip
    trainer._compute_kl_logps = lambda *arguments: KTOTrainer._compute_kl_logps(trainer, *arguments)
    ids, mask = torch.zeros(PAIRS, LENGTH + 1, dtype=torch.int64), torch.ones(PAIRS, LENGTH + 1, dtype=torch.int64)
    inputs = dict(
        input_ids=ids, attention_mask=mask, completion_mask=mask, KL_input_ids=ids, KL_attention_mask=mask,
        KL_completion_mask=mask, label=LABELS, ref_logps=reference[0], ref_KL_logps=reference[1],
    )  # fmt: skip
    loss = KTOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    return float(loss), trainer._metrics["eval"]["kl"][0]


@pytest.mark.parametrize("case", KTO_CASES, ids=str)
def test_kto_losses_match_recorded_values_of_trl(case):
    assert kto_of_ours(*case) == pytest.approx(KTO_CASES[case], rel=1e-7)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("case", KTO_CASES, ids=str)
def test_recorded_kto_values_match_trl(case):
    assert kto_of_trl(*case) == pytest.approx(KTO_CASES[case], rel=1e-7)
