"""Run on four ranks: one step with context parallelism of 1, where all hold the same batch, and of 4.

torchrun --nproc_per_node 4 -m tests.parity.split_models.cp_check_on_ranks OUTPUT DENSE_FOLDER MOE_FOLDER
"""

from __future__ import annotations

import itertools
import sys

from qwen3vl_bridge.batch import PackedBatch, SequenceLayout

import torch
from transformers import AutoConfig

from tests.noise import SEEDS, rounded
from tests.ranks import begin, leave
from tests.steps import Run, set_up, train_step

from ..batches import Sample, make_batch, make_samples
from ..on_ranks import configuration
from ..topologies import Topology

SIZES, RANKS = (1, 4), 4
MULTIPLE = 2 * max(SIZES)  # for every size, so that both see the same rows


def documents(config, *, equal: bool) -> list[Sample]:
    """Pictures and videos in one document, in two, and none; of equal lengths without padding, or as they come."""
    samples = make_samples("image and video", config, seed=21) + make_samples("mixed", config, seed=22)
    if not equal:
        return samples
    rng = torch.Generator().manual_seed(23)
    length = -(-max(len(sample.ids) for sample in samples) // MULTIPLE) * MULTIPLE
    longer = []
    for sample in samples:
        more = length - len(sample.ids)
        text = torch.randint(0, config.image_token_id - 16, (more,), generator=rng)
        counts = (torch.rand(more, generator=rng) < 0.7).float()
        longer.append(Sample(torch.cat((sample.ids, text)), torch.cat((sample.loss_mask, counts)), sample.pixels))
    return longer


def layout_of(samples: list[Sample], rows: str) -> SequenceLayout:
    """BSHD: a row for each document. THD: one row of all, and no more padding than each needs."""
    lengths = [len(sample.ids) for sample in samples]
    if rows == "THD":
        return SequenceLayout.packed_row(lengths, multiple=MULTIPLE)
    return SequenceLayout.rows(lengths, -(-max(lengths) // MULTIPLE) * MULTIPLE)


def step_once(run: Run, batch: PackedBatch) -> dict[str, float]:
    """The log of one step over microbatches that are all the same."""
    run.stream = itertools.repeat(batch)
    log = train_step(run)
    return {name: log[name] for name in ("loss", "grad_norm")}


def main(output: str, **folders: str) -> None:
    """Every size, family, kind of lengths and of rows; rank 0 writes losses and gradient norms, also of neighbours."""
    found = {}
    for size, (family, folder) in itertools.product(SIZES, folders.items()):
        cfg = configuration(folder, Topology(RANKS, dict(context_parallel_size=size)))
        cfg.optimizer.lr = cfg.optimizer.min_lr = 0.0  # all steps from the same weights
        run, hf_config = set_up(cfg, data=False), AutoConfig.from_pretrained(folder)
        assert (run.groups.cp.size(), run.groups.dp.size()) == (size, RANKS // size)
        for equal, rows in itertools.product((True, False), ("BSHD", "THD")):
            samples = documents(hf_config, equal=equal)
            batch = make_batch(samples, hf_config, layout=layout_of(samples, rows))
            assert batch.layout.padding_mask().any() == (not equal)
            case = size, family, equal, rows
            found[case] = step_once(run, batch)
            for seed in SEEDS[:2] if size == 1 else ():
                with rounded(run.model[0], seed):
                    found[case, seed] = step_once(run, batch)
        assert step_once(run, batch) == found[size, family, equal, rows]
    leave(found, output)


if __name__ == "__main__":
    begin()
    main(sys.argv[1], dense=sys.argv[2], MoE=sys.argv[3])
