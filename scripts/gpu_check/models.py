"""The models that are timed, with random weights on the device, and one training step of each without its optimizer.

What lives here: ours, transformers' and Megatron-Bridge's own, each behind the same function. What may not: clocks.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.batch import ModelInputs
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.step import to_device

import torch
from megatron.bridge import AutoBridge
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText

from tests.host_waits.upstream import local_layers
from tests.parity.batches import Sample, make_batch

from .random_data import dtype_of
from .results import Place

Step = Callable[[], torch.Tensor]
UPSTREAM = "Megatron-Bridge's own model" + ("" if HAVE_TE else " with local layers and torch's attention")


def ours(place: Place, config: Any, tokens: int) -> nn.Module:
    """Our model, as recipes have it.

    Args:
        place: where.
        config: of transformers.
        tokens: of a row.
    """
    return _built(AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False), place, tokens)


def _built(provider: Any, place: Place, tokens: int) -> nn.Module:
    """A provider's model, for rows of so many tokens."""
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


def our_step(model: nn.Module, parts: list[list[Sample]], config: Any, *, packed: bool) -> Step:
    """Forward and backward of our model; batches are collated before, and moved in each step, as in training.

    Args:
        model: ours.
        parts: samples of each batch; gradients of all are added up.
        config: of transformers.
        packed: one row of all samples, or a padded row for each.
    """

    def loss_of(local: ModelInputs) -> torch.Tensor:
        inputs = to_device(local, model)
        return (model(inputs=inputs) * inputs.loss_mask).sum() / inputs.loss_mask.sum()

    return _step(model, [make_batch(samples, config, packed=packed).local() for samples in parts], loss_of)


def their_step(model: nn.Module, parts: list[list[Sample]], config: Any) -> Step:
    """Forward and backward of transformers' model on padded rows; arguments as for `our_step`."""
    given = [_padded(samples, config, next(model.parameters()).dtype) for samples in parts]
    for one in given:
        one["mm_token_type_ids"] = (one["input_ids"] == config.image_token_id).int()
        one["labels"] = one["input_ids"].masked_fill(one["attention_mask"] == 0, -100)
    return _step(model, given, lambda one: model(**_moved(one, model)).loss)


def _step(model: nn.Module, batches: list[Any], loss_of: Callable[[Any], torch.Tensor]) -> Step:
    """Forward and backward of each batch; gives their mean loss, and leaves no gradients."""

    def step() -> torch.Tensor:
        losses = []
        for batch in batches:
            loss = loss_of(batch)
            loss.backward()
            losses.append(loss.detach())
        model.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    return step


def _moved(batch: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """A batch on the model's device."""
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in batch.items()}


def _padded(samples: list[Sample], config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rows padded on the right, and their pictures if they have any."""
    given = {
        "input_ids": pad_sequence([one.ids for one in samples], batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(one.ids) for one in samples], batch_first=True),
    }
    for name in ("pixel_values", "image_grid_thw"):
        found = [one.pixels[name] for one in samples if name in one.pixels]
        if found:
            given[name] = torch.cat(found)
    if "pixel_values" in given:
        given["pixel_values"] = given["pixel_values"].to(dtype)
    return given


def attentions() -> list[str]:
    """Transformers' attentions that are installed."""
    return ["sdpa", *(["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])]


def upstream(place: Place, config: Any, tokens: int) -> nn.Module:
    """Megatron-Bridge's own model, of the configuration that its own bridge makes; named `UPSTREAM`.

    Its provider takes Transformer Engine's layers in any case. Where that is not installed, megatron-core's local
    ones stand in their place, with torch's attention.
    """
    from megatron.bridge.models.qwen_vl.qwen3_vl_bridge import Qwen3VLBridge

    bridge: Any = Qwen3VLBridge()
    bridge.hf_pretrained, bridge.hf_config = SimpleNamespace(config=config, generation_config=None), config
    provider = bridge.provider_bridge(bridge.hf_pretrained)
    with contextlib.nullcontext() if HAVE_TE else local_layers(provider):
        return _built(provider, place, tokens)


def upstream_step(model: nn.Module, parts: list[list[Sample]], config: Any) -> Step:
    """Forward and backward of Megatron-Bridge's own model on padded rows; arguments as for `our_step`."""

    def loss_of(one: dict[str, torch.Tensor]) -> torch.Tensor:
        moved = _moved(one, model)
        mask = moved["attention_mask"] = moved["attention_mask"].bool()
        found = model(**moved, position_ids=None, labels=moved["input_ids"].roll(-1, 1))
        losses = found[0] if isinstance(found, tuple) else found
        return (losses * mask).sum() / mask.sum()

    return _step(model, [_padded(samples, config, next(model.parameters()).dtype) for samples in parts], loss_of)
