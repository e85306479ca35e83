"""transformers' model and the Megatron model with the same random weights in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.rows import ExpertLayout, ZeroCentered

import pytest
import torch

from tests.helpers import noise
from tests.helpers.batches import Sample, run_reference
from tests.helpers.expert_layouts import LAYOUTS, relayout
from tests.parity.references import torch_linear_attention


def shifted_names(provider) -> tuple[str, ...]:
    """Return the endings of Hugging Face names of weights that Megatron stores minus one."""
    rows = family(provider.family).rows()
    return tuple(row.hf[0].rpartition("*.")[2] for row in rows if isinstance(row, ZeroCentered))


class Results(NamedTuple):
    """Results of a model: logits [tokens, vocabulary] of each sample, the summed loss, and all gradients."""

    logits: list[torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


@dataclass
class Pair:
    """Both models with the same weights. `bridge` converts between them in the expert layout of the checkpoint."""

    bridge: object
    provider: object
    megatron: torch.nn.Module
    reference: torch.nn.Module
    layout: ExpertLayout = ExpertLayout.OUTPUT_MAJOR

    @property
    def config(self):
        return self.reference.config

    def megatron_gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients of the Megatron model under Hugging Face names. Megatron stores some weights minus one."""
        shifted = shifted_names(self.provider)
        gradients = converted_gradients(self.bridge, [self.megatron], lambda p: p.grad)
        return {name: tensor - int(name.endswith(shifted)) for name, tensor in gradients.items()}

    def reference_gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients of the reference in the same layouts, on the host; zero for unused parameters."""
        gradients = {
            name: torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu().clone()
            for name, p in self.reference.named_parameters(remove_duplicate=False)
        }
        return relayout(gradients, self.layout)

    def reference_results(self, samples: list[Sample]) -> Results:
        """Return the results of the reference for each sample alone. Its gradients stay in its parameters."""
        self.reference.zero_grad()
        logits, loss = run_reference(self.reference, samples)
        loss.backward()
        return Results([one.detach() for one in logits], loss.item(), self.reference_gradients())

    def errors(self, found: Results, expected: Results) -> dict[str, float]:
        """Return absolute errors of logits, the relative error of the loss, and errors of gradients relative to
        their largest entry.
        """
        logits = zip(found.logits, expected.logits, strict=True)
        gradients = self.gradient_errors(found.gradients, expected.gradients)
        return {
            # Ours has more of them where the vocabulary is padded.
            "logits": max((ours[:, : theirs.shape[1]] - theirs).abs().max().item() for ours, theirs in logits),
            "loss": abs(found.loss / expected.loss - 1), "gradients": max(gradients.values()),
        }  # fmt: skip

    def limits(self, samples: list[Sample], expected: Results) -> dict[str, float]:
        """Return the limits of these errors for samples."""
        return noise.limits(lambda: self.reference_results(samples), self.errors, self.reference, expected=expected)

    def gradient_errors(
        self, found: dict[str, torch.Tensor] | None = None, expected: dict[str, torch.Tensor] | None = None
    ) -> dict[str, float]:
        """Return the largest error of each gradient relative to its largest entry."""
        ours = self.megatron_gradients() if found is None else found
        reference = self.reference_gradients() if expected is None else expected
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()  # whose gradient is the embedding's
        assert ours.keys() - tied == reference.keys() - tied
        return noise.relative(ours, reference)

    def zero_grad(self) -> None:
        self.megatron.zero_grad()
        self.reference.zero_grad()


def build(provider, **options) -> torch.nn.Module:
    """Build the model of a provider in this process."""
    from qwen3vl_bridge.training.process_groups import initialize

    provider.finalize()
    initialize(provider, seed=0)
    options = dict(wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None) | options
    (model,) = provider.provide_distributed_model(**options)
    return model


def converted_gradients(bridge, chunks: list[torch.nn.Module], gradient: Callable) -> dict[str, torch.Tensor]:
    """Return gradients of a Megatron model under Hugging Face names: the conversion only moves numbers.

    `gradient` returns the gradient of a parameter, or None.
    """
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    weights = [p.data for p in parameters]
    for p in parameters:
        found = gradient(p)
        p.data = torch.zeros_like(p) if found is None else found.detach().clone()
    exported = bridge.export_hf_weights(chunks, cpu=True, show_progress=False)
    gradients = {name: tensor.clone() for name, tensor in exported if tensor.is_floating_point()}
    for p, weight in zip(parameters, weights, strict=True):
        p.data = weight
    return gradients


def make_pair(folder, reference_folder=None, *, device: str = "cpu", **provider_fields) -> Pair:
    """Load a Hugging Face folder in both models through the public interface."""
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
