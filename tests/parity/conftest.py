"""The reference (transformers) and the Megatron model with the same random weights, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch


@dataclass
class Pair:
    """One model twice. `bridge` translates between them."""

    bridge: object
    provider: object
    megatron: torch.nn.Module
    reference: torch.nn.Module

    @property
    def config(self):
        """The Hugging Face configuration."""
        return self.reference.config

    def megatron_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the Megatron model under Hugging Face names and in Hugging Face layouts.

        They are converted as weights are: the conversion is linear and only moves numbers.
        """
        parameters = list(self.megatron.parameters())
        weights = [p.data for p in parameters]
        for p in parameters:
            p.data = torch.zeros_like(p) if p.grad is None else p.grad
        exported = self.bridge.export_hf_weights([self.megatron], cpu=True, show_progress=False)
        gradients = {name: tensor.clone() for name, tensor in exported}
        for p, weight in zip(parameters, weights, strict=True):
            p.data = weight
        return gradients

    def reference_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the reference; zero for parameters it did not use."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.reference.named_parameters(remove_duplicate=False)
        }

    def zero_grad(self) -> None:
        """Forget both models' gradients."""
        self.megatron.zero_grad()
        self.reference.zero_grad()


def make_pair(folder, **provider_fields) -> Pair:
    """Load a Hugging Face folder on both sides through the public interface."""
    import qwen3vl_bridge  # noqa: F401  (registers)
    from qwen3vl_bridge.training.process_group import initialize

    from megatron.bridge import AutoBridge
    from transformers import Qwen3VLForConditionalGeneration

    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=True)
    for name, value in provider_fields.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    provider.finalize()
    initialize(provider, seed=0)
    (megatron,) = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None
    )
    reference = Qwen3VLForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    return Pair(bridge, provider, megatron.train(), reference.train())


@pytest.fixture(scope="session", params=["untied", "tied"])
def pair(request, untied_folder, tied_folder) -> Pair:
    return make_pair({"untied": untied_folder, "tied": tied_folder}[request.param])
