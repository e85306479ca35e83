"""Checks of a model call: of single arguments, and of settings that only matter once a model is called.

What lives here: refusals, with what was found and what was expected. What may not: the conversion of arguments
(`model_inputs.py`), masks and offsets (`masks.py`), whether images and videos match the tokens (`batch/`).
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.common.settings.refusals import CALLED, TRAINED
from qwen3vl_bridge.models.common.settings.rules import check

import torch
from torch import Tensor

_NO_CACHE = "forward keeps no cache; `qwen3vl_bridge.generate` does"
_FROM_IDS = "it is worked out from the token ids and grids"

# Arguments that transformers, Megatron-Bridge or RL frameworks may pass, with the reason why this model accepts only
# None.
REFUSED = {
    "inputs_embeds": "the model embeds input_ids itself, images and videos included",
    "past_key_values": _NO_CACHE,
    "inference_params": _NO_CACHE,
    "cu_seqlens": "give packed_seq_params",
    "extra_block_kwargs": "they carry DeepStack features, which the model makes itself",
    "second_per_grid_ts": "Qwen3-VL has times in the text",
    "image_input_mask": _FROM_IDS,
    "video_input_mask": _FROM_IDS,
    "cp_img_num": _FROM_IDS,
    "images_padded": _FROM_IDS,
    "return_logprobs_for_linear_ce_fusion": "logits are made and then a loss; NeMo-RL: use_fused_linear_logprobs=false",
    "temperature": "give output_processor, which divides logits by itself as verl's fused kernels do",
}

# Returned by processors, and passed by NeMo-RL with another row length: redundant with the token ids.
_NOT_NEEDED = {"mm_token_type_ids"}


def check_settings(config: VisionLanguageProvider, training: bool) -> None:
    """Refuse settings that the model cannot compute, or cannot train with, before a step computes anything.

    Frameworks that build models with `provide` or Megatron-Bridge's `get_model` (miles, NeMo-RL) do not declare
    beforehand that they will train them; `provide_distributed_model` does. A model that is only loaded, or called in
    evaluation mode or without gradients, may have the schedule settings of the run that saved it.

    Args:
        config: the model's configuration.
        training: whether the model is in training mode.

    Raises:
        ValueError: a rule of `TRAINED` is violated with gradients enabled, or a rule of `CALLED` in any case.
    """
    check(TRAINED if training and torch.is_grad_enabled() else CALLED, config)


def checked_ids(input_ids: Tensor | None) -> Tensor:
    """Return the token ids; refuse anything other than a non-empty integer tensor [rows, tokens]."""
    if input_ids is None or input_ids.dim() != 2 or input_ids.is_floating_point() or not input_ids.numel():
        found = None if input_ids is None else f"{list(input_ids.shape)} {input_ids.dtype}"
        raise ValueError(f"input_ids has shape {found}, expected [rows, tokens] of integers")
    return input_ids


def check_pixels(config: VisionLanguageProvider, **pixels: Tensor | None) -> None:
    """Refuse pixels other than floating point [patches, features], naming the argument."""
    vision = config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    for name, values in pixels.items():
        if values is not None and (values.dim() != 2 or values.shape[1] != width or not values.is_floating_point()):
            raise ValueError(
                f"{name} has shape {list(values.shape)} {values.dtype}, expected [patches, {width}] floating point, as "
                "the processor gives it"
            )


def check_inference(context: Any, gathers: bool | None, labels: Tensor | None) -> None:
    """Refuse arguments of Megatron's inference, except those for a forward pass over whole prompts.

    Args:
        context: megatron-core's inference context, or None.
        gathers: whether logits are gathered at run time; None uses the provider's setting.
        labels: labels of the call.
    """
    if context is not None and getattr(context, "sequence_len_offset", None) != 0:
        raise ValueError(f"inference_context holds tokens already, expected it to hold none: {_NO_CACHE}")
    if gathers and labels is not None:
        raise ValueError("runtime_gather_output is True with labels, expected None: the loss is of logits as they lie")


def check_others(others: dict[str, Any]) -> None:
    """Refuse arguments that the model does not use; None is accepted and means that the argument is not given.

    Raises:
        ValueError: an argument in `REFUSED` is given.
        TypeError: an unknown argument.
    """
    for name in others.keys() - _NOT_NEEDED:
        value = others[name]
        if name not in REFUSED:
            raise TypeError(f"unexpected argument {name!r}; expected those of as_model_inputs")
        if value is not None:
            raise ValueError(f"{name} is given, expected None: {REFUSED[name]}")
