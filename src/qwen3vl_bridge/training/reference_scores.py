"""Compute log-probabilities of pairs of answers before training, and check that a run's reference model computed them.

`qwen3vl data score` runs the rows of the first epoch of a run, so that the numbers are those that the run would compute
with the same settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.huggingface import find_in_cache
from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration, is_megatron_checkpoint
from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.collectives import sum_over_ranks
from qwen3vl_bridge.core.files import CheckpointError
from qwen3vl_bridge.data.dataset_provider import SPLITS, Qwen3VLConversationProvider
from qwen3vl_bridge.data.loading import RowDataset
from qwen3vl_bridge.data.mixture import Mixture
from qwen3vl_bridge.data.pairs import reference_model_digest, reference_rules
from qwen3vl_bridge.data.samples import Samples
from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.training.preference import DocumentLosses
from qwen3vl_bridge.training.step import to_device

import torch
from megatron.bridge.utils.common_utils import get_rank_safe
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

_ROWS = 16  # rows that a data-parallel rank runs through the pipeline at a time
_BLOCK, _SMALL_FILE, _DISTANCE = 1 << 16, 1 << 26, 1 << 22  # bytes
_WEIGHTS = (".safetensors", ".distcp", ".bin", ".pt")


def weights_digest(folder: str | Path) -> str:
    """Return a digest of the weights in a model folder of any format: of names, sizes and contents of the files.

    Of files above 64 MiB, only 64 KiB in every 4 MiB are read: training changes all of a tensor.

    Raises:
        CheckpointError: there are no weights in the folder.
    """
    place = Path(folder)
    if not place.is_dir():
        place = find_in_cache(str(folder)) or place
    if place.is_dir() and is_megatron_checkpoint(place):
        place = find_iteration(place)
    files = sorted(path for path in place.rglob("*") if path.suffix in _WEIGHTS and path.is_file())
    if not files:
        raise CheckpointError(
            f"{folder} contains no weights, expected a model of Hugging Face or a Megatron checkpoint"
        )
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(place)} {size} ".encode())
        with path.open("rb") as file:
            for start in range(0, size, _BLOCK if size <= _SMALL_FILE else _DISTANCE):
                file.seek(start)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def check_reference_model(cfg: Any) -> None:
    """Raise ValueError on rank 0 if a run's log-probabilities were not computed by its reference model."""
    objective, dataset = getattr(cfg, "objective", None), cfg.dataset
    if objective is None or objective.reference_logps is None or get_rank_safe() != 0:
        return
    if not isinstance(dataset, Qwen3VLConversationProvider):  # which `run_validation` rejects
        return
    weights = objective.reference_model or cfg.checkpoint.pretrained_checkpoint
    if weights is None:
        raise ValueError(
            "objective.reference_logps is set, but there is no model to compare with: set "
            "checkpoint.pretrained_checkpoint or objective.reference_model"
        )
    expected = weights_digest(weights)
    for split in (split for split in SPLITS if dataset.paths_of(split)):
        needed = split == "train" or cfg.validation.eval_iters
        if needed and (found := reference_model_digest(objective.reference_logps, split)) != expected:
            raise ValueError(
                f"the log-probabilities for {split} in objective.reference_logps, {objective.reference_logps}, were "
                f"computed with another model: digest {found[:12]}, but {weights} has {expected[:12]}. Run `qwen3vl "
                "data score` with this model, or name the model that computed them in objective.reference_model"
            )


def rows_to_score(settings: Qwen3VLConversationProvider, split: str) -> tuple[RowDataset, dict[str, str]]:
    """Return packed rows with all pairs of a split, and the result of `reference_rules` for the split.

    That result describes the settings that the log-probabilities depend on.
    """
    rows = settings.rows(split)
    source = rows.samples.source
    rules = reference_rules(source, rows.samples.sample_filter)
    if isinstance(source, Mixture):  # an epoch of which may leave out records, or repeat them
        every = Samples(Mixture(source.names, source.sources), rows.samples.sample_filter)
        rows = RowDataset(every, rows.settings)
    return rows, rules


@torch.no_grad()
def score_pairs(
    model: Sequence[VisionLanguageModel],
    rows: RowDataset,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> Tensor:
    """Return the log-probabilities of both answers of each pair, a float64 tensor [samples, 2] on all ranks.

    A sample is one pair. The values are NaN for a sample that is in no row or could not be read.

    Args:
        model: the chunks of this rank.
        rows: packed rows of pairs. Data-parallel ranks divide them. If the division leaves some ranks without a last
            row, these ranks repeat the last row, and their result is ignored.
        progress: function that receives the list of groups of rows to loop over, and returns an iterable over it that
            may show progress.
    """
    config, groups = model[0].config, model[0].pg_collection
    assert rows.samples.total is not None  # pairs are not streamed
    found = torch.zeros(rows.samples.total, 3, dtype=torch.float64)  # sums of both log-probabilities, and their number
    size, rank, end = groups.dp.size(), groups.dp.rank(), rows.plan.end_of_epoch()
    # One process adds what all ranks with the same row compute.
    adds = groups.tp.rank() == groups.cp.rank() == 0
    turns = range(-(-end // size))
    schedule = get_forward_backward_func(groups.pp.size(), config.virtual_pipeline_model_parallel_size)
    for chunk in model:
        chunk.eval()
    for group in progress([*batched(turns, _ROWS)]):  # pyright: ignore[reportArgumentType]
        numbers = [turn * size + rank for turn in group]
        batches = [rows.collate_fn([rows[min(number, end - 1)]]) for number in numbers]
        iterators = [iter(batches) for _ in model]
        outputs = schedule(
            forward_step_func=partial(_forward_step, groups),
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=list(model),
            num_microbatches=len(batches),
            seq_length=config.seq_length,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
            p2p_communicator=P2PCommunicator(groups.pp, config),
            pg_collection=groups,
        )
        for number, logps in zip(numbers, outputs, strict=False):  # only the last stage has outputs
            if adds and number < end:
                for sample, pair in zip(rows.plan.row(number), logps.cpu(), strict=True):
                    found[sample, :2] += pair
                    found[sample, 2] += 1
    sums = sum_over_ranks(found).cpu()
    return torch.where(sums[:, 2:] > 0, sums[:, :2] / sums[:, 2:].clamp(min=1), torch.nan)


def _forward_step(groups: Any, batches: Iterator[TokenBatch], model: VisionLanguageModel) -> tuple[Tensor, Callable]:
    """Run a microbatch. Return its output, and a function from losses to log-probabilities [pairs, 2] of answers."""
    batch = next(batches)
    pairs = to_device(DocumentLosses.from_batch(batch, groups), model)

    def scores(losses: Tensor, non_loss_data: bool) -> Tensor:
        # A pair that could not be read has no answers; its sums would be zero.
        return torch.where(pairs.is_counted[:, None] > 0, pairs.logps(losses, groups), torch.nan)

    return model(inputs=to_device(model.select_local(batch), model)), scores
