"""The reference (transformers) and the Megatron model with the same random weights, in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.rows import ExpertLayout, ZeroCentered

import pytest
import torch

from tests import noise
from tests.expert_layouts import LAYOUTS, relayout

from .batches import Sample, run_reference
from .references import torch_linear_attention


def shifted_names(provider) -> tuple[str, ...]:
    """How the Hugging Face names of weights end that Megatron has less by one."""
    rows = family(provider.family).rows()
    return tuple(row.hf[0].rpartition("*.")[2] for row in rows if isinstance(row, ZeroCentered))


class Results(NamedTuple):
    """What a model makes of samples: logits [tokens, vocabulary] of each, the summed loss, and all gradients."""

    logits: list[torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


@dataclass
class Pair:
    """One model twice. `bridge` translates between them, in the layout of experts that its checkpoint has."""

    bridge: object
    provider: object
    megatron: torch.nn.Module
    reference: torch.nn.Module
    layout: ExpertLayout = ExpertLayout.OUTPUT_MAJOR

    @property
    def config(self):
        return self.reference.config

    def megatron_gradients(self) -> dict[str, torch.Tensor]:
        """Of the Megatron model, under Hugging Face names; some weights Megatron has less by one."""
        shifted = shifted_names(self.provider)
        gradients = converted_gradients(self.bridge, [self.megatron], lambda p: p.grad)
        return {name: tensor - int(name.endswith(shifted)) for name, tensor in gradients.items()}

    def reference_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the reference in the same layouts, on the host; zero for parameters it did not use."""
        gradients = {
            name: torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu().clone()
            for name, p in self.reference.named_parameters(remove_duplicate=False)
        }
        return relayout(gradients, self.layout)

    def reference_results(self, samples: list[Sample]) -> Results:
        """The reference's, each sample alone. Its gradients stay in its parameters."""
        self.reference.zero_grad()
        logits, loss = run_reference(self.reference, samples)
        loss.backward()
        return Results([one.detach() for one in logits], loss.item(), self.reference_gradients())

    def errors(self, found: Results, expected: Results) -> dict[str, float]:
        """Of logits, absolute; of the loss, relative; of gradients, relative to the largest entry of each."""
        logits = zip(found.logits, expected.logits, strict=True)
        gradients = self.gradient_errors(found.gradients, expected.gradients)
        return {
            # Ours has more of them where the vocabulary is padded.
            "logits": max((ours[:, : theirs.shape[1]] - theirs).abs().max().item() for ours, theirs in logits),
            "loss": abs(found.loss / expected.loss - 1), "gradients": max(gradients.values()),
        }  # fmt: skip

    def limits(self, samples: list[Sample], expected: Results) -> dict[str, float]:
        """Of these errors, for the reference's results of samples."""
        return noise.limits(lambda: self.reference_results(samples), self.errors, self.reference, expected=expected)

    def gradient_errors(
        self, found: dict[str, torch.Tensor] | None = None, expected: dict[str, torch.Tensor] | None = None
    ) -> dict[str, float]:
        """The largest error of each gradient, relative to its largest entry; by default of those that models hold."""
        ours = self.megatron_gradients() if found is None else found
        reference = self.reference_gradients() if expected is None else expected
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()  # whose gradient is the embedding's
        assert ours.keys() - tied == reference.keys() - tied
        return noise.relative(ours, reference)

    def zero_grad(self) -> None:
        self.megatron.zero_grad()
        self.reference.zero_grad()


def build(provider, **options) -> torch.nn.Module:
    """The model of a provider, in this process alone."""
    from qwen3vl_bridge.training.process_groups import initialize

    provider.finalize()
    initialize(provider, seed=0)
    options = dict(wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None) | options
    (model,) = provider.provide_distributed_model(**options)
    return model


def converted_gradients(bridge, chunks: list[torch.nn.Module], gradient: Callable) -> dict[str, torch.Tensor]:
    """Gradients of a Megatron model under Hugging Face names: the conversion is linear and only moves numbers.

    `gradient` gives a parameter's, or None.
    """
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    weights = [p.data for p in parameters]
    for p in parameters:
        found = gradient(p)
        p.data = torch.zeros_like(p) if found is None else found.detach().clone()
    exported = bridge.export_hf_weights(chunks, cpu=True, show_progress=False)
    gradients = {name: tensor.clone() for name, tensor in exported}
    for p, weight in zip(parameters, weights, strict=True):
        p.data = weight
    return gradients


def make_pair(folder, reference_folder=None, *, device: str = "cpu", **provider_fields) -> Pair:
    """Load a Hugging Face folder on both sides through the public interface, onto a device."""
    import qwen3vl_bridge  # noqa: F401  (registers)

    from megatron.bridge import AutoBridge
    from transformers import AutoModelForImageTextToText

    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=True)
    for name, value in provider_fields.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    megatron = build(provider)
    with torch_linear_attention():
        reference = AutoModelForImageTextToText.from_pretrained(reference_folder or folder, attn_implementation="eager")
    return Pair(bridge, provider, megatron.to(device).train(), reference.to(device).train())


MOE = [layout.name for layout in LAYOUTS]


@pytest.fixture(scope="module", params=["untied", "tied", *MOE])
def pair(request) -> Pair:
    if request.param not in MOE:
        return make_pair(request.getfixturevalue(f"{request.param}_folder"))
    layout = ExpertLayout[request.param]
    folder = request.getfixturevalue("moe_folders")[layout]
    # The reference's loss has no balancing term.
    pair = make_pair(folder, request.getfixturevalue("moe_folder"), moe_aux_loss_coeff=0.0)
    pair.layout = layout
    return pair
