"""Run by torchrun: losses and gradients of a model that is split over ranks, beside transformers' on each of them.

torchrun --nproc_per_node N -m tests.parity.on_ranks OUTPUT DENSE_FOLDER MOE_FOLDER
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from qwen3vl_bridge.logs import quiet
from qwen3vl_bridge.parallel import sequence_ranks
from qwen3vl_bridge.sequence import SequenceLayout, token_index

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .batches import Sample, make_batch, make_samples, run_reference
from .conftest import Pair, make_pair

SEEDS = {"mixed": 7, "text only": 9, "many images": 11, "image and video": 13}
_TP2 = dict(tensor_model_parallel_size=2)
_SP = dict(_TP2, sequence_parallel=True)


@dataclass(frozen=True)
class Topology:
    """How a model is split.

    Attributes:
        ranks: how many it needs.
        fields: of the provider.
        families: the models it is for.
    """

    ranks: int
    fields: dict[str, Any] = field(default_factory=dict)
    families: tuple[str, ...] = ("dense", "MoE")


TOPOLOGIES = {
    "TP2": Topology(2, _TP2, families=("dense",)),  # megatron-core trains experts under TP with SP alone
    "TP2+SP": Topology(2, _SP),
    "CP2": Topology(2, dict(context_parallel_size=2)),
    "DP2": Topology(2),
    "DP2+EP2": Topology(2, dict(expert_model_parallel_size=2), families=("MoE",)),
    "CP2+EP2": Topology(2, dict(context_parallel_size=2, expert_model_parallel_size=2), families=("MoE",)),
    "TP2+SP+EP2": Topology(
        2, dict(_SP, expert_model_parallel_size=2, expert_tensor_parallel_size=1), families=("MoE",)
    ),
    "CP4": Topology(4, dict(context_parallel_size=4)),
    "TP2+SP+CP2": Topology(4, dict(_SP, context_parallel_size=2)),
    "DP2+CP2": Topology(4, dict(context_parallel_size=2)),
    "TP2+SP+CP2+EP2": Topology(
        4,
        dict(_SP, context_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        families=("MoE",),
    ),
    "DP2+CP2+EP2": Topology(4, dict(context_parallel_size=2, expert_model_parallel_size=2), families=("MoE",)),
}


def layout_of(samples: list[Sample], *, packed: bool, multiple: int) -> SequenceLayout:
    """Packed with padding behind each document and behind all; or rows, the longest of which is padded too."""
    lengths = [len(sample.ids) for sample in samples]
    if packed:
        even = sum(-(-length // multiple) * multiple for length in lengths)
        return SequenceLayout.packed_row(lengths, multiple=multiple, total=even + multiple)
    return SequenceLayout.rows(lengths, -(-(max(lengths) + 1) // multiple) * multiple)


def compare(pair: Pair, content: str, *, packed: bool) -> dict[str, float]:
    """The largest errors of losses, absolute, and of gradients, relative to the largest entry of each."""
    pair.zero_grad()
    groups = pair.provider._pg_collection
    samples = make_samples(content, pair.config, SEEDS[content])
    logits, loss = run_reference(pair.reference, samples)
    loss.backward()
    own = samples[groups.dp.rank() :: groups.dp.size()]
    expected = [
        F.cross_entropy(one, sample.labels, reduction="none") * sample.loss_mask
        for one, sample in list(zip(logits, samples, strict=True))[groups.dp.rank() :: groups.dp.size()]
    ]
    multiple = 2 * groups.cp.size() * groups.tp.size()
    batch = make_batch(own, pair.config, layout=layout_of(own, packed=packed, multiple=multiple))
    ranks = sequence_ranks(pair.provider, groups)
    inputs = batch.local(**ranks)
    losses = pair.megatron(inputs=inputs) * inputs.loss_mask
    losses.sum().backward()
    whole = torch.zeros(batch.layout.total)
    index = token_index(batch.layout, ranks["cp_size"], ranks["cp_rank"])
    whole[index.T.flatten()] = losses.detach().flatten()
    dist.all_reduce(whole, group=groups.cp)
    found = whole[~batch.layout.padding_mask()]
    return {
        "loss": (found - torch.cat(expected).detach()).abs().max().item(),
        "gradient": gradient_error(pair),
    }


def gradient_error(pair: Pair) -> float:
    """Of gradients added up as megatron-core's `finalize_model_grads` does.

    Over ranks that see different tokens; and norms of single heads over those that have different heads.
    """
    groups = pair.provider._pg_collection
    for name, p in pair.megatron.named_parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if getattr(p, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
            dist.all_reduce(p.grad, group=groups.tp)
        dist.all_reduce(p.grad, group=groups.dp_cp if getattr(p, "allreduce", True) else groups.expt_dp)
    return max(pair.gradient_errors().values())


def main(output: str, dense: str, moe: str) -> None:
    """Every topology of so many ranks; rank 0 writes the largest errors of all ranks."""
    found, world = {}, int(os.environ["WORLD_SIZE"])
    for name, topology in TOPOLOGIES.items():
        if topology.ranks != world:
            continue
        for family, folder in (("dense", dense), ("MoE", moe)):
            if family not in topology.families:
                continue
            pair = make_pair(folder, moe_aux_loss_coeff=0.0, **topology.fields)
            for content in SEEDS:
                for packed in (True, False):
                    errors = compare(pair, content, packed=packed)
                    worst = torch.tensor(list(errors.values()))
                    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
                    found[family, name, content, packed] = dict(zip(errors, worst.tolist(), strict=True))
    if dist.get_rank() == 0:
        torch.save(found, output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    quiet()
    torch.set_num_threads(1)
    main(*sys.argv[1:])
