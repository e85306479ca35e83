"""Context parallelism of 1, where all ranks hold the same batch, and of 4 are the same training, padded or packed."""

import itertools
from pathlib import Path

from qwen3vl_bridge.batch import SequenceLayout, TokenBatch

import pytest
import torch
from transformers import AutoConfig

from tests.forked import results_of_ranks
from tests.noise import SEEDS, allowed, check, rounded
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


def step_once(run: Run, batch: TokenBatch) -> dict[str, float]:
    run.stream = itertools.repeat(batch)
    log = train_step(run)
    return {name: log[name] for name in ("loss", "grad_norm")}


def steps_of_sizes(dense: Path, moe: Path) -> dict:
    found = {}
    for size, (family, folder) in itertools.product(SIZES, (("dense", dense), ("MoE", moe))):
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
    return found


@pytest.fixture(scope="module")
def found(untied_folder, moe_folder):
    return results_of_ranks(steps_of_sizes, RANKS, untied_folder, moe_folder)


def check_sizes(found, family, equal):
    """All sizes and kinds of rows give what the first does, but for the noise of that."""

    def errors(case, first):
        return {name: abs(found[case][name] / found[first][name] - 1) for name in ("loss", "grad_norm")}

    # Of both kinds of lengths together: a single number has little noise by chance.
    alone = itertools.product((1,), (family,), (True, False), ("BSHD", "THD"))
    noises = [errors((case, seed), case) for case, seed in itertools.product(alone, SEEDS[:2])]
    for size, rows in itertools.product(SIZES, ("BSHD", "THD")):
        check(errors((size, family, equal, rows), (1, family, equal, "BSHD")), allowed(noises))


@pytest.mark.parametrize("family", ["dense", "MoE"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal lengths", "other lengths"])
def test_one_and_four_ranks_rows_and_packed_agree(found, family, equal):
    first = found[1, family, equal, "BSHD"]
    assert first["loss"] > 5 and first["grad_norm"] > 1
    check_sizes(found, family, equal)


def test_what_is_compared_tells_batches_apart(found):
    values = [found[1, family, equal, "BSHD"] for family, equal in itertools.product(("dense", "MoE"), (True, False))]
    for name in ("loss", "grad_norm"):
        for a, b in itertools.combinations([value[name] for value in values], 2):
            assert abs(a / b - 1) > 1e-3
