"""Context parallelism of 1 and 4 train equally, with padded and packed rows."""

import itertools
from pathlib import Path

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout

import pytest
import torch
from transformers import AutoConfig

from tests.helpers.batches import Sample, make_batch, make_samples
from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import SEEDS, allowed, check, rounded
from tests.helpers.steps import Run, set_up, train_step
from tests.parity.on_ranks import configuration
from tests.parity.topologies import Topology

SIZES, RANKS = (1, 4), 4
# Equal lengths without padding, lengths as they come, and documents of one to three tokens (most ranks hold padding).
LENGTHS = ("equal", "other", "short")
MULTIPLE = 2 * max(SIZES)  # for every size, so that both see the same rows


def documents(config, lengths: str) -> list[Sample]:
    """Return documents with lengths of one of `LENGTHS`; with images and videos, unless they are short."""
    rng = torch.Generator().manual_seed(23)
    if lengths == "short":
        ids = torch.randint(0, config.image_token_id - 16, (11,), generator=rng)
        return [Sample(one, torch.ones(len(one)), {}) for one in ids.split([2, 1, 3, 1, 2, 2])]
    samples = make_samples("image and video", config, seed=21) + make_samples("mixed", config, seed=22)
    if lengths == "other":
        return samples
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
    return SequenceLayout.padded_rows(lengths, -(-max(lengths) // MULTIPLE) * MULTIPLE)


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
        for lengths, rows in itertools.product(LENGTHS, ("BSHD", "THD")):
            samples = documents(hf_config, lengths)
            batch = make_batch(samples, hf_config, layout=layout_of(samples, rows))
            assert batch.layout.padding_mask().any() == (lengths != "equal")
            case = size, family, lengths, rows
            found[case] = step_once(run, batch)
            for seed in SEEDS[:2] if size == 1 else ():
                with rounded(run.model[0], seed):
                    found[case, seed] = step_once(run, batch)
        assert step_once(run, batch) == found[size, family, lengths, rows]
    return found


@pytest.fixture(scope="module")
def found(untied_folder, moe_folder):
    return results_of_ranks(steps_of_sizes, RANKS, untied_folder, moe_folder)


def check_sizes(found, family, lengths):
    """Check that all sizes and kinds of rows equal the first, within its noise."""

    def errors(case, first):
        return {name: abs(found[case][name] / found[first][name] - 1) for name in ("loss", "grad_norm")}

    # Of both kinds of lengths together: a single number has little noise by chance.
    alone = itertools.product((1,), (family,), LENGTHS, ("BSHD", "THD"))
    noises = [errors((case, seed), case) for case, seed in itertools.product(alone, SEEDS[:2])]
    for size, rows in itertools.product(SIZES, ("BSHD", "THD")):
        check(errors((size, family, lengths, rows), (1, family, lengths, "BSHD")), allowed(noises))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dense", "MoE"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_padded_and_packed_rows_with_context_parallel_4_match_one_rank(found, family, lengths):
    first = found[1, family, lengths, "BSHD"]
    assert first["loss"] > 5 and first["grad_norm"] > 1
    check_sizes(found, family, lengths)


@pytest.mark.slow
def test_losses_and_gradient_norms_of_different_batches_differ(found):
    values = [found[1, family, lengths, "BSHD"] for family, lengths in itertools.product(("dense", "MoE"), LENGTHS)]
    for name in ("loss", "grad_norm"):
        for a, b in itertools.combinations([value[name] for value in values], 2):
            assert abs(a / b - 1) > 1e-3
