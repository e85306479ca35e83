"""The models that are timed, with random weights on the device, and one training step of each without its optimizer.

What lives here: ours, transformers' and Megatron-Bridge's own, each behind the same function. What may not: clocks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.step import to_device

import torch
from megatron.bridge import AutoBridge
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText

from tests.parity.batches import Sample, make_batch

from .random_data import dtype_of
from .results import Place

Step = Callable[[], torch.Tensor]


def ours(place: Place, config: Any, tokens: int) -> nn.Module:
    """Our model, as recipes have it.

    Args:
        place: where.
        config: of transformers.
        tokens: of a row.
    """
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    provider.seq_length, provider.params_dtype = tokens, dtype_of(place)
    provider.bf16 = provider.params_dtype == torch.bfloat16
    provider.finalize()
    initialize(provider, 0)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=place.device == "cpu")
    return model.to(place.device).train()


def theirs(place: Place, config: Any, attention: str) -> nn.Module:
    """Transformers' model with one of its attentions."""
    with torch.device(place.device):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype_of(place), attn_implementation=attention)
    return model.train()


def our_step(model: nn.Module, samples: list[Sample], config: Any, *, packed: bool) -> Step:
    """Forward and backward of our model; the batch is collated before, and moved in each step, as in training."""
    local = make_batch(samples, config, packed=packed).local()

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        inputs = to_device(local, model)
        loss = (model(inputs=inputs) * inputs.loss_mask).sum() / inputs.loss_mask.sum()
        loss.backward()
        return loss.detach()

    return step


def their_step(model: nn.Module, samples: list[Sample], config: Any) -> Step:
    """Forward and backward of transformers' model on padded rows of the same samples, moved in each step too."""
    ids = pad_sequence([one.ids for one in samples], batch_first=True)
    mask = pad_sequence([torch.ones_like(one.ids) for one in samples], batch_first=True)
    given = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "labels": ids.masked_fill(mask == 0, -100),
    }
    for name in ("pixel_values", "image_grid_thw"):
        given[name] = torch.cat([one.pixels[name] for one in samples if name in one.pixels])
    parameter = next(model.parameters())
    given["pixel_values"] = given["pixel_values"].to(parameter.dtype)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(**{name: one.to(parameter.device) for name, one in given.items()}).loss
        loss.backward()
        return loss.detach()

    return step


def attentions() -> list[str]:
    """Transformers' attentions that are installed."""
    return ["sdpa", *(["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])]


def upstream(place: Place, config: Any, tokens: int) -> nn.Module:
    """Megatron-Bridge's own model, of the configuration that its own bridge makes.

    Raises:
        ModuleNotFoundError: Transformer Engine is missing, whose layers its provider takes in any case.
    """
    if not HAVE_TE:
        raise ModuleNotFoundError("its provider takes Transformer Engine's layers in any case, which is not installed")
    from megatron.bridge.models.qwen_vl.qwen3_vl_bridge import Qwen3VLBridge

    bridge: Any = Qwen3VLBridge()
    bridge.hf_pretrained, bridge.hf_config = SimpleNamespace(config=config, generation_config=None), config
    provider = bridge.provider_bridge(bridge.hf_pretrained)
    provider.seq_length, provider.params_dtype = tokens, dtype_of(place)
    provider.bf16 = provider.params_dtype == torch.bfloat16
    provider.finalize()
    initialize(provider, 0)
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=place.device == "cpu")
    return model.to(place.device).train()


def upstream_step(model: nn.Module, samples: list[Sample], config: Any) -> Step:
    """Forward and backward of Megatron-Bridge's own model on padded rows of the same samples."""
    ids = pad_sequence([one.ids for one in samples], batch_first=True)
    mask = pad_sequence([torch.ones_like(one.ids, dtype=torch.bool) for one in samples], batch_first=True)
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.roll(-1, 1)}
    for name in ("pixel_values", "image_grid_thw"):
        given[name] = torch.cat([one.pixels[name] for one in samples if name in one.pixels])
    parameter = next(model.parameters())
    given["pixel_values"] = given["pixel_values"].to(parameter.dtype)
    given["position_ids"] = None

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        moved = {name: one if one is None else one.to(parameter.device) for name, one in given.items()}
        found = model(**moved)
        losses = found[0] if isinstance(found, tuple) else found
        loss = (losses * moved["attention_mask"]).sum() / mask.sum()
        loss.backward()
        return loss.detach()

    return step
