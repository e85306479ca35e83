"""Batches as RL frameworks make them of samples of different lengths, and what transformers makes of these.

And what frameworks set on a provider, for one GPU, as their sources and example configurations have it.
Legend: B samples, S tokens of the longest, T of the packed row, cp context-parallel ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.helpers.batches import Sample, pictures, run_reference
from tests.helpers.noise import relative
from tests.models.inputs.support import offsets
from tests.parity.conftest import converted_gradients

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
        return self.chunks[0]


@dataclass(frozen=True)
class Truth:
    """Samples, and what transformers says of each alone."""

    reference: nn.Module
    samples: list[Sample]

    @property
    def config(self) -> Any:
        return self.reference.config

    @property
    def lengths(self) -> list[int]:
        return [len(sample.ids) for sample in self.samples]

    @property
    def pictures(self) -> dict[str, Tensor]:
        return pictures(self.samples)

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
    return logits.float().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def padded_lengths(lengths: list[int], multiple: int) -> list[int]:
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


def schedule(chunks: list[nn.Module], batches: Iterable[Any], forward_step: Callable, **settings: Any) -> Any:
    """Microbatches through megatron-core's schedule."""
    batches = list(batches)
    given = dict(data_iterator=iter(batches), model=chunks, num_microbatches=len(batches), micro_batch_size=1)
    return get_forward_backward_func()(forward_step_func=forward_step, **given, **settings)


def pass_of(model: list[nn.Module], batch: dict[str, Any], forward_step: Callable) -> Any:
    """Outputs of one pass over whole rows, as generation scripts take it."""
    length = batch["input_ids"].size(1)
    return schedule(model, [batch], forward_step, forward_only=True, seq_length=length, collect_non_loss_data=True)


def groups_of(model: nn.Module) -> Any:
    return unwrap_model(model).pg_collection


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    assert [one.shape for one in found] == [one.shape for one in expected]
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


def unpacked(packed: Tensor, truth: Truth, lengths: list[int]) -> list[Tensor]:
    return [one[:n] for one, n in zip(packed[0].split(lengths), truth.lengths, strict=True)]


def check_rows(logits: Tensor, truth: Truth) -> None:
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
    found = converted_gradients(bridge, [model], lambda p: getattr(p, "main_grad", None) if p.grad is None else p.grad)
    assert found.keys() == expected.keys()
    return max(relative(found, expected).values())


ONE_GPU = dict(
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
    expert_model_parallel_size=1, expert_tensor_parallel_size=1, sequence_parallel=False,
)  # fmt: skip
# NeMo-RL, examples/configs/grpo_math_1B.yaml, as setup.py applies it to a model's provider; but for the fused
# permutation of experts' tokens: Transformer Engine has that.
NEMO_RL: Mapping[str, Any] = dict(
    **ONE_GPU, num_layers_in_first_pipeline_stage=None, num_layers_in_last_pipeline_stage=None,
    moe_router_dtype="fp64", moe_router_load_balancing_type="none", moe_router_bias_update_rate=0.0,
    moe_enable_deepep=False, moe_token_dispatcher_type="alltoall", moe_shared_expert_overlap=False,
    moe_permute_fusion=False, moe_enable_routing_replay=False, mtp_num_layers=0, mtp_loss_scaling_factor=0.0,
    mtp_use_repeated_layer=False, mtp_detach_heads=False, bf16=True, fp16=False, params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16, parallel_output=True, apply_rope_fusion=True, bias_activation_fusion=True,
    gradient_accumulation_fusion=False, use_fused_weighted_squared_relu=False, cuda_graph_impl="none",
    cuda_graph_modules=[], cuda_graph_warmup_steps=3, fine_grained_activation_offloading=False, offload_modules=[],
    calculate_per_token_loss=True, perform_initialization=True,
)  # fmt: skip
# verl, workers/engine/megatron/transformer_impl.py.
VERL: Mapping[str, Any] = dict(
    **ONE_GPU, virtual_pipeline_model_parallel_size=None, overlap_p2p_comm=False, batch_p2p_comm=False,
    variable_seq_lengths=True, attention_backend=AttnBackend.flash, moe_token_dispatcher_type="alltoall",
    moe_router_load_balancing_type="none",
)  # fmt: skip
# miles, backends/megatron_utils/model_provider.py, as its GRPO scripts' arguments have it.
MILES: Mapping[str, Any] = dict(
    **ONE_GPU, calculate_per_token_loss=False, variable_seq_lengths=True, attention_softmax_in_fp32=True,
    fp32_residual_connection=False, deterministic_mode=False, recompute_granularity="full",
    recompute_method="uniform", recompute_num_layers=1, recompute_modules=None, cpu_offloading_num_layers=0,
    distribute_saved_activations=False, tp_comm_overlap=False, fp8=None, fp8_recipe="delayed",
    attention_backend=AttnBackend.flash, moe_token_dispatcher_type="alltoall",
)  # fmt: skip
