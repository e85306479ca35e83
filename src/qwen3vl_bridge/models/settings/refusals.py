"""All refusals of a provider: the list of its rules by the time at which they are checked."""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.models.hf_config import check_tower_size
from qwen3vl_bridge.models.settings import encoder_parallel, fixed, kernels, parallelism, recompute
from qwen3vl_bridge.models.settings.activations import name_of, vision_activation
from qwen3vl_bridge.models.settings.rules import Row, Rule, When


def _check_tower(provider: Any) -> None:
    check_tower_size(provider.vision_config.to_dict(), provider.hidden_size)
    vision_activation(provider.vision_config.hidden_act)


def _check_activation(provider: Any) -> None:
    name_of(provider.activation_func)


def _check_rotary(provider: Any) -> None:
    found, turning = provider.mrope_section, int(provider.kv_channels * provider.rotary_percent)
    if 2 * sum(found) != turning:
        raise ValueError(
            f"mrope_section {found} has sum {sum(found)}, expected half the head dimension that rotary_percent turns, "
            f"{turning // 2}"
        )


_WITHOUT_MODULES = When("", lambda provider: provider.encoder_class is None)

# Divisors: before everything else.
SIZES: tuple[Rule, ...] = parallelism.SIZES

# Before megatron-core completes the fields, after `experts.RULES` (for a model with experts) and the family's.
GIVEN: tuple[Rule, ...] = (
    Row(
        "dist_train.use_dist_train",
        False,
        "this family cannot be split into vision and language modules",
        _WITHOUT_MODULES,
    ),
    _check_tower,
    _check_activation,
    *recompute.RULES,
    *kernels.RULES,
    *fixed.PARTS.values(),
)

# After that.
COMPLETED: tuple[Rule, ...] = (*parallelism.RULES, *encoder_parallel.RULES, _check_rotary)

# For a model that is called: whether its attention has a kernel.
CALLED: tuple[Rule, ...] = (kernels.check_float32,)

# For a model that is trained.
TRAINED: tuple[Rule, ...] = (*CALLED, kernels.LOSS, *parallelism.TRAINING)
