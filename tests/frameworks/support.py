"""Batches as RL frameworks make them of samples of different lengths, and what transformers makes of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.model.inputs.support import offsets
from tests.parity.batches import Sample, run_reference

# Of log probabilities down to about -8, absolute; of each gradient, relative to its largest entry. Over all callers.
LOG_PROBS = 1e-5  # measured 3e-6
GRADIENT = 2e-5  # measured 4e-6


class Built(NamedTuple):
    """What a framework holds: the bridge, the provider, and the model's chunks, of which there is one here."""

    bridge: Any
    provider: Any
    chunks: list[nn.Module]

    @property
    def model(self) -> Any:
        """The only chunk."""
        return self.chunks[0]


@dataclass(frozen=True)
class Truth:
    """Samples, and what transformers says of each alone."""

    reference: nn.Module
    samples: list[Sample]

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.reference.config

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [len(sample.ids) for sample in self.samples]

    @property
    def pictures(self) -> dict[str, Tensor]:
        """All samples' pictures, as the processor names them."""
        names = {name for sample in self.samples for name in sample.pixels}
        return {name: torch.cat([s.pixels[name] for s in self.samples if name in s.pixels]) for name in sorted(names)}

    @cached_property
    def logits(self) -> list[Tensor]:
        """Logits [length, vocabulary] of each sample."""
        with torch.no_grad():
            return run_reference(self.reference, self.samples)[0]

    @property
    def log_probs(self) -> list[Tensor]:
        """Log probability of each next token; the last one's is the first, as callers that roll labels have it."""
        pairs = zip(self.logits, self.samples, strict=True)
        return [log_probs_of(logits, sample.labels) for logits, sample in pairs]

    def gradients(self, loss: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
        """Of a loss of all samples' log probabilities, by transformers' names."""
        self.reference.zero_grad()
        logits, _ = run_reference(self.reference, self.samples)
        pairs = zip(logits, self.samples, strict=True)
        loss([log_probs_of(one, sample.labels) for one, sample in pairs]).backward()
        named = self.reference.named_parameters(remove_duplicate=False)
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


def log_probs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """[..., vocabulary] and [...] -> [...]."""
    return logits.float().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def padded_lengths(lengths: list[int], multiple: int) -> list[int]:
    """Each rounded up."""
    return [-(-length // multiple) * multiple for length in lengths]


def padded_rows(values: list[Tensor], length: int | None = None, fill: int = 0) -> Tensor:
    """[B, S] rows padded on the right."""
    length = length or max(map(len, values))
    return torch.stack([nn.functional.pad(one, (0, length - len(one)), value=fill) for one in values])


def packed_row(values: list[Tensor], lengths: list[int], fill: int = 0) -> Tensor:
    """[1, T], each in its length."""
    padded = [nn.functional.pad(one, (0, n - len(one)), value=fill) for one, n in zip(values, lengths, strict=True)]
    return torch.cat(padded)[None]


def thd(lengths: list[int], padded: bool = True) -> PackedSeqParams:
    """Offsets that count padding in, as RL frameworks give them: the padded ones beside them, or not."""
    table = torch.tensor(offsets(lengths), dtype=torch.int32)
    physical = dict(cu_seqlens_q_padded=table, cu_seqlens_kv_padded=table) if padded else {}
    sizes = dict(cu_seqlens_q=table, cu_seqlens_kv=table, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    return PackedSeqParams(qkv_format="thd", **sizes, **physical)


def pass_of(model: list[nn.Module], batch: dict[str, Any], forward_step: Callable) -> Any:
    """Outputs of one pass over whole rows, as generation scripts take it through megatron-core's schedule."""
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([batch]),
        model=model,
        num_microbatches=1,
        forward_only=True,
        seq_length=batch["input_ids"].size(1),
        micro_batch_size=1,
        collect_non_loss_data=True,
    )


def groups_of(model: nn.Module) -> Any:
    """Process groups of a model, wrapped or not."""
    return unwrap_model(model).pg_collection


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference."""
    assert [one.shape for one in found] == [one.shape for one in expected]
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


def unpacked(packed: Tensor, truth: Truth, lengths: list[int]) -> list[Tensor]:
    """The real tokens of each sample in [1, T]."""
    return [one[:n] for one, n in zip(packed[0].split(lengths), truth.lengths, strict=True)]


def check_rows(logits: Tensor, truth: Truth) -> None:
    """Logits of rows padded on the right."""
    rows = zip(logits, truth.samples, strict=True)
    found = [log_probs_of(one[: len(sample.ids)], sample.labels) for one, sample in rows]
    assert worst(found, truth.log_probs) <= LOG_PROBS


def check_packed(logits: Tensor, truth: Truth, lengths: list[int]) -> None:
    """Logits of a packed row in which each sample has such a length."""
    assert logits.shape[:2] == (1, sum(lengths))
    targets = packed_row([sample.labels for sample in truth.samples], lengths)
    assert worst(unpacked(log_probs_of(logits, targets), truth, lengths), truth.log_probs) <= LOG_PROBS


def check_exported(exported: dict[str, Tensor], stored: Path | dict[str, Tensor]) -> None:
    """The tensors of a Hugging Face folder, bit for bit."""
    stored = load_file(stored / "model.safetensors") if isinstance(stored, Path) else stored
    assert exported.keys() == stored.keys() and all(torch.equal(exported[name], stored[name]) for name in stored)


def gradient_error(bridge: Any, model: nn.Module, expected: dict[str, Tensor]) -> float:
    """Of a model's gradients under transformers' names, each relative to its largest entry."""
    parameters = list(model.parameters())
    weights = [p.data for p in parameters]
    for p in parameters:
        grad = getattr(p, "main_grad", None) if p.grad is None else p.grad
        p.data = torch.zeros_like(p) if grad is None else grad.detach().clone()
    found = {name: tensor.clone() for name, tensor in bridge.export_hf_weights([model], cpu=True, show_progress=False)}
    for p, weight in zip(parameters, weights, strict=True):
        p.data = weight
    assert found.keys() == expected.keys()
    scale = {name: expected[name].abs().max().clamp(min=1e-6) for name in found}
    return max(((found[name] - expected[name]).abs().max() / scale[name]).item() for name in found)
