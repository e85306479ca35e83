"""Run on ranks: what each rank of a split model really holds; rank 0 writes down what all have found.

torchrun --nproc_per_node N -m tests.planning.memory_on_ranks OUTPUT CASES FOLDERS

CASES is a JSON list of [family, topology], FOLDERS a JSON object with the Hugging Face folder of each family.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

from qwen3vl_bridge.weights.model_parts import part_of

import torch.distributed as dist
from megatron.core.utils import unwrap_model

from tests.parity.batches import make_samples
from tests.parity.on_ranks import Split, layout_of, make_batch
from tests.parity.topologies import TOPOLOGIES
from tests.ranks import begin, leave
from tests.steps import forward_backward, train_step

from .measure import described_bytes, gradient_bytes, keeping, optimizer_bytes, slots_of

KINDS = ("fully_reshardable", "dp_reshardable")  # how megatron-core calls state by parameters and by index
MICROBATCHES = 2  # as many as two interleaved stages take


def parameters(split: Split) -> dict[str, int]:
    """By part, experts apart."""
    found: Counter[str] = Counter()
    for chunk in unwrap_model(split.run.model):
        for name, p in chunk.named_parameters():
            found["experts" if ".mlp.experts." in name else part_of(name).value] += p.numel()
    return dict(found)


def one_batch(split: Split):
    """The same rows for all data-parallel ranks, packed or, where all need as many tokens, padded to it."""
    groups = split.run.groups
    samples = [sample for seed in (1, 2) for sample in make_samples("image and video", split.hf_config, seed)]
    multiple = 2 * groups.cp.size() * groups.tp.size()
    return make_batch(
        samples, split.hf_config, layout=layout_of(samples, packed=True, multiple=multiple, tokens=split.tokens)
    )


def activations(split: Split) -> dict[str, float]:
    """Bytes that all microbatches of a step keep, and the work of one of them on this rank."""
    run = split.run
    batch, *others = (one_batch(split) for _ in range(MICROBATCHES))  # of tensors of their own
    split.begin(iter([batch, *others]), "packed")
    with keeping(run.model) as storages:
        forward_backward(run, run.stream, MICROBATCHES)
    local = batch.local(**run.cfg.model.sequence_ranks(run.groups))
    return {
        "kept": sum(storage.nbytes() for storage in storages.values()),
        "tokens": local.input_ids.numel(),
        "patches": 4 if local.vision is None else len(local.vision.pixel_values),
        "vision_tokens": 0 if local.fuse is None else len(local.fuse.positions),
        "slots": slots_of(batch),
    }


def states(split: Split) -> dict[str, int]:
    """Bytes of gradients and of the optimizer after a step of it."""
    mine = split.run.cfg.train.global_batch_size // split.run.groups.dp.size()
    split.begin(iter([one_batch(split)] * mine), "packed")
    train_step(split.run)
    optimizer = split.run.optimizer
    found = {"gradients": gradient_bytes(split.run.model), "optimizer": optimizer_bytes(optimizer)}
    if split.run.cfg.ddp.use_distributed_optimizer:
        found |= {kind: described_bytes(split.run.model, optimizer, kind) for kind in KINDS}
    return found


def main(output: str, cases: list[list[str]], folders: dict[str, str]) -> None:
    """Every case, on every rank."""
    found = []
    for family, name in cases:
        split = Split(folders[family], TOPOLOGIES[name])
        one = {"parameters": parameters(split), **activations(split), **states(split)}
        one |= {"stage": split.run.groups.pp.rank()}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, one)
        found.append(everyone)
    if dist.get_rank() == 0:
        with open(output, "w") as file:
            json.dump(found, file)
    leave()


if __name__ == "__main__":
    begin()
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
