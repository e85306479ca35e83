"""Students and teachers, and what transformers and torch make of them by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.testing.tiny_checkpoint import VOCAB_SIZE, make_config, make_model
from qwen3vl_bridge.testing.tiny_processor import make_processor

import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.models.distillation_provider import convert_to_distillation_provider
from megatron.bridge.training.post_training.distillation import ModelOptDistillConfig
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from tests.helpers.batches import Sample
from tests.parity.on_ranks import configuration
from tests.parity.references import torch_linear_attention
from tests.parity.topologies import Topology

# Settings that a teacher shares with its student.
_SHARED = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel"),
    *("pipeline_dtype", "seq_length", "variable_seq_lengths", "num_layers_in_first_pipeline_stage"),
)


def make_larger(folder: Path) -> Path:
    """A dense teacher, wider and deeper than the student, with other heads."""
    processor = make_processor(VOCAB_SIZE)
    config = make_config(processor.tokenizer)
    sizes = dict(hidden_size=96, intermediate_size=208, num_hidden_layers=5, num_attention_heads=8)
    for name, value in sizes.items():
        setattr(config.text_config, name, value)
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    make_model(config, seed=7).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def distillation(
    student: Path, teacher: Path, topology: Topology, kd: ModelOptDistillConfig, submodule: str | None = None
) -> Any:
    """A run's configuration, made as ModelOpt's `distill.py` makes it, of our recipe."""
    cfg = configuration(student, topology)
    provider = AutoBridge.from_hf_pretrained(str(teacher)).to_megatron_provider(load_weights=True)
    for name in _SHARED:
        setattr(provider, name, getattr(cfg.model, name))
    cfg.model = convert_to_distillation_provider(cfg.model, provider, kd, distill_submodule=submodule)
    return cfg


@dataclass(frozen=True)
class Recipe:
    """What is distilled; fields are those of ModelOpt's configuration."""

    temperature: float = 1.0
    hidden: str | None = None  # "mse" or "cosine" of the states after the final norm
    lm_scale: float | None = None  # scale of distillation beside the language model's own loss, if that counts

    def settings(self, prefix: str) -> ModelOptDistillConfig:
        """ModelOpt's; `prefix` comes before the names of the text model's modules."""
        head, norm = f"{prefix}output_layer", f"{prefix}decoder.final_layernorm"
        return ModelOptDistillConfig(
            logit_layers=(head, head), logit_kl_temperature=self.temperature, skip_lm_loss=self.lm_scale is None,
            kd_loss_scale=self.lm_scale or 1.0,
            intermediate_layer_pairs=[(norm, norm, self.hidden)] if self.hidden else [],
        )  # fmt: skip


def load_reference(folder: Path) -> nn.Module:
    with torch_linear_attention():
        return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()


@contextmanager
def final_states(model: nn.Module) -> Iterator[list[Tensor]]:
    found: list[Tensor] = []
    handle = model.model.language_model.norm.register_forward_hook(lambda _m, _i, output: found.append(output[0]))
    try:
        yield found
    finally:
        handle.remove()


def run(model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor]:
    """Logits [s, v] and states after the final norm [s, h] of a sample alone."""
    ids = sample.ids[None]
    kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
    with final_states(model) as states:
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **sample.pixels).logits[0]
    return logits, states[0]


def distilled_by_hand(
    student: nn.Module, teacher: nn.Module, samples: list[Sample], recipe: Recipe, fit: tuple[Tensor, Tensor] | None
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Sums of losses of a microbatch, each sample run alone, and the student's gradients of the total.

    `fit` are weight and bias with which the student's states are fitted to a teacher's of another width.
    """
    student.zero_grad()
    of_logits = of_states = of_labels = torch.zeros(())
    for sample in samples:
        (logits, states), mask = run(student, sample), sample.loss_mask
        with torch.no_grad():
            wanted, wanted_states = run(teacher, sample)
        p, q = (F.log_softmax(x / recipe.temperature, -1) for x in (logits, wanted))
        of_logits = of_logits + ((q.exp() * (q - p)).sum(-1) * mask).sum()
        of_labels = of_labels + (F.cross_entropy(logits, sample.labels, reduction="none") * mask).sum()
        if fit is not None:
            states = F.linear(states, *fit)
        if recipe.hidden == "mse":
            of_states = of_states + ((states - wanted_states).square().mean(-1) * mask).sum()
        elif recipe.hidden == "cosine":
            of_states = of_states + ((1 - F.cosine_similarity(states, wanted_states)) * mask).sum()
    # ModelOpt weights states as much as logits, and all of it as much as labels.
    total = of_logits
    if recipe.hidden:
        total = total + of_states * (of_logits / of_states).detach()
    if recipe.lm_scale is not None:
        total = of_labels + recipe.lm_scale * total * (of_labels / total).detach()
    total.backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in student.named_parameters(remove_duplicate=False)
    }
    sums = {"total loss": total, "logits distillation loss": of_logits, "intermediate distillation loss": of_states}
    if recipe.lm_scale is not None:
        sums["lm loss"] = of_labels
    return {name: value.item() for name, value in sums.items()}, gradients
