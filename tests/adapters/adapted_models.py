"""Models with trained adapters, and what other libraries make of them once exported."""

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qwen3vl_bridge.training.process_groups import initialize

import torch
from megatron.bridge import AutoBridge
from peft import PeftModel
from transformers import AutoModelForImageTextToText, Qwen3VLForConditionalGeneration

from tests.noise import check, limit
from tests.parity.batches import Sample, make_batch, make_samples, run_reference
from tests.parity.conftest import Pair, make_pair

ALL_PARTS = dict(adapt_vision_model=True, adapt_vision_projection=True)


@dataclass
class Adapted:
    pair: Pair
    peft: object
    samples: list[Sample]
    packed: bool = True

    @property
    def model(self) -> torch.nn.Module:
        return self.pair.megatron

    @property
    def inputs(self):
        return make_batch(self.samples, self.pair.config, packed=self.packed).local()

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def backward(self) -> torch.Tensor:
        inputs = self.inputs
        loss = (self.model(inputs=inputs) * inputs.loss_mask).sum()
        loss.backward()
        return loss.detach()

    def train(self, steps: int = 4) -> list[float]:
        optimizer, losses = torch.optim.AdamW(self.trainable().values(), lr=2e-2), []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(self.backward().item())
            optimizer.step()
        return losses

    def logits(self) -> list[torch.Tensor]:
        """[tokens, vocabulary] of the Megatron model for each sample."""
        layout = make_batch(self.samples, self.pair.config, packed=True).layout
        with torch.no_grad():
            flat = self.model(inputs=self.inputs.without_labels()).flatten(0, 1)
        starts = layout.cu_seqlens_padded[:-1].tolist()
        return [flat[a : a + n] for a, n in zip(starts, layout.lengths, strict=True) if n]


def model_of(folder: Path) -> torch.nn.Module:
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.finalize()
    initialize(provider, seed=0)
    (model,) = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None
    )
    return model


def adapt(folder: Path, peft: object, *, content: str = "mixed", **provider_fields) -> Adapted:
    """A pair from a folder, with `peft` applied to its Megatron model as Megatron-Bridge applies it."""
    torch.manual_seed(0)
    pair = make_pair(folder, **provider_fields)
    peft([pair.megatron], training=True)
    peft.set_params_to_save([pair.megatron])
    return Adapted(pair, peft, make_samples(content, pair.config, seed=9))


def reference_logits(model: Qwen3VLForConditionalGeneration, samples: list[Sample]) -> list[torch.Tensor]:
    """[tokens, vocabulary] of a model of transformers for each sample, run alone."""
    model.eval()
    logits = []
    for sample in samples:
        ids = sample.ids[None]
        kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
        with torch.no_grad():
            logits.append(model(input_ids=ids, mm_token_type_ids=kinds, **sample.pixels).logits[0])
    return logits


def with_adapter(base_folder: Path, adapter_folder: Path) -> PeftModel:
    """Loaded without a warning of keys that `peft` misses or cannot place."""
    base = AutoModelForImageTextToText.from_pretrained(base_folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # `peft` 0.21 honours patterns of parameters, and says that it does not.
        warnings.filterwarnings("default", message="The following (rank|alpha)_pattern keys")
        return PeftModel.from_pretrained(base, adapter_folder)


def reference_gradients(model: PeftModel, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Of the summed loss of samples run alone, of all adapters, by their names in a file without its prefix."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    model.zero_grad()
    run_reference(model.base_model.model, samples)[1].backward()
    return {
        name.removeprefix("base_model.model.").replace(".default", "").replace("_vector.weight", "_vector"): p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def worst_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def check_logits(logits: list[torch.Tensor], other: torch.nn.Module | Adapted, samples: list[Sample]) -> None:
    if isinstance(other, Adapted):
        compute, model = other.logits, other.model
    else:
        compute, model = partial(reference_logits, other, samples), other
    check({"logits": worst_difference(logits, compute())}, {"logits": limit(compute, worst_difference, model)})
