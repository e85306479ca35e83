"""Frameworks call a context-parallel model each in its own way; what comes back is this rank's part of the truth."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.core.vision_inputs import VisionSettings, mrope_positions

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.frameworks import test_areal, test_miles, test_ms_swift, test_verl
from tests.frameworks.support import LOG_PROBS, Truth, groups_of, log_probs_of, packed_row, padded_lengths, thd
from tests.helpers.batches import make_samples
from tests.helpers.forked import results_of_ranks
from tests.helpers.ranks import forget_models
from tests.models.inputs.support import share_of

CP = 2


def whole(share: Tensor, lengths: list[int], groups: Any) -> Tensor:
    """[1, T / cp] of each rank -> [1, T]."""
    row = share.new_zeros(1, sum(lengths))
    row[:, share_of(torch.arange(sum(lengths)), lengths, CP, groups.cp.rank())] = share
    dist.all_reduce(row, group=groups.cp)
    return row


def error(found: Tensor, truth: Truth, lengths: list[int]) -> float:
    rows = zip(found[0].split(lengths), truth.log_probs, strict=False)
    return max((one[: len(wanted)] - wanted).abs().max().item() for one, wanted in rows)


def log_probs(logits: Tensor, truth: Truth, lengths: list[int], groups: Any) -> float:
    """Of logits of a share [1, T / cp, vocabulary]: the largest error of log probabilities."""
    assert logits.shape[:2] == (1, sum(lengths) // CP), logits.shape
    labels = share_of(packed_row([s.ids.roll(-1) for s in truth.samples], lengths), lengths, CP, groups.cp.rank())
    return error(whole(log_probs_of(logits, labels), lengths, groups), truth, lengths)


def verl(folder: Path, truth: Truth) -> Iterator[tuple[str, Callable[[], float]]]:
    """Whole rows and their mask on every rank, offsets of the whole packed row."""
    engine = test_verl.make_engine(folder, overrides={"context_parallel_size": CP})

    def call(some: Truth, bucket: int = 1) -> float:
        lengths = padded_lengths(some.lengths, 2 * CP)
        lengths[-1] += -sum(lengths) % bucket
        with torch.no_grad():
            logits = engine.model(**test_verl.rows_of(some), packed_seq_params=thd(lengths))
        return log_probs(logits, some, lengths, groups_of(engine.model))

    yield "without padding", lambda: call(truth)
    yield "without padding, pad_to_length", lambda: call(truth, 64)
    yield "one sample", lambda: max(call(Truth(truth.reference, [sample])) for sample in truth.samples)


def miles(folder: Path, truth: Truth) -> Iterator[tuple[str, Callable[[], float]]]:
    """Each rank its share of each sample and of the padding, offsets times the ranks, a loss mask and no labels."""
    actor = test_miles.make_actor(folder, context_parallel_size=CP)
    groups = groups_of(actor.model)
    lengths = padded_lengths(truth.lengths, 2 * CP)
    rest = -sum(lengths) % (16 * CP)
    row, labels = (
        F.pad(packed_row(values, lengths), (0, rest))
        for values in ([sample.ids for sample in truth.samples], [sample.labels for sample in truth.samples])
    )
    lengths += [rest] * bool(rest)

    def share() -> float:
        params = thd(lengths, padded=False)
        tokens = share_of(row, lengths, CP, groups.cp.rank())
        with torch.no_grad():
            logits = actor.model(
                input_ids=tokens, position_ids=None, attention_mask=None, labels=None, packed_seq_params=params,
                loss_mask=torch.ones_like(tokens, dtype=torch.int), **truth.pictures,
            )  # fmt: skip
        own = share_of(labels, lengths, CP, groups.cp.rank())
        return error(whole(log_probs_of(logits, own), lengths, groups), truth, lengths)

    yield "a share with a loss mask", share


def ms_swift(folder: Path, truth: Truth) -> Iterator[tuple[str, Callable[[], float]]]:
    """The full row's tokens and images on every rank; labels and positions are sliced."""
    settings = dict(cross_entropy_loss_fusion=False, context_parallel_size=CP)
    trainer = test_ms_swift.make_trainer(folder, torch.float32, **settings)
    groups = groups_of(trainer.model)
    lengths = padded_lengths(truth.lengths, 2 * CP)
    layout = SequenceLayout.packed_row(lengths, multiple=1)
    row = packed_row([sample.ids for sample in truth.samples], lengths)
    labels = packed_row([sample.labels for sample in truth.samples], lengths)
    grids = [truth.pictures.get(name) for name in ("image_grid_thw", "video_grid_thw")]
    positions = mrope_positions(row, layout, *grids, VisionSettings.from_config(truth.config))

    def cut(values: Tensor) -> Tensor:
        return share_of(values, lengths, CP, groups.cp.rank())

    def call(**given: Tensor) -> float:
        with torch.no_grad():
            losses = trainer.model(
                input_ids=row, labels=cut(labels), packed_seq_params=thd(lengths, padded=False), attention_mask=None,
                **given, **truth.pictures,
            )  # fmt: skip
        return error(whole(-losses, lengths, groups), truth, lengths)

    yield "labels are cut", call
    yield "labels and positions are cut", lambda: call(position_ids=cut(positions))


def areal(folder: Path, truth: Truth) -> Iterator[tuple[str, Callable[[], float]]]:
    """Whole rows on every rank, padding of samples taken for tokens, offsets of the whole packed row."""
    engine = test_areal.make_engine(folder, context_parallel_size=CP)

    def call(padded_to: int) -> float:
        arguments, lengths = test_areal.call_of(truth, 2 * CP, padded_to)
        with torch.no_grad():
            logits = engine.model(**arguments)
        some = Truth(truth.reference, truth.samples[: len(lengths)])
        return log_probs(logits, some, lengths, groups_of(engine.model))

    yield "rows with offsets", lambda: call(0)


def errors_of_ranks(dense: Path, moe: Path) -> dict[tuple[str, str, str], float | str]:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=CP)
    model_parallel_cuda_manual_seed(0)
    found: dict[tuple[str, str, str], float | str] = {}
    for family, folder in (("dense", dense), ("MoE", moe)):
        reference = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
        truth = Truth(reference, make_samples("mixed", reference.config, seed=7))
        for caller in (verl, miles, ms_swift, areal):
            forget_models()  # each framework has its own attention backend
            for name, call in caller(folder, truth):
                try:
                    found[caller.__name__, name, family] = call()
                except (ValueError, TypeError) as refused:
                    found[caller.__name__, name, family] = str(refused)
    return found


CALLS = [
    ("verl", "without padding"), ("verl", "without padding, pad_to_length"), ("verl", "one sample"),
    ("miles", "a share with a loss mask"), ("ms_swift", "labels are cut"),
    ("areal", "rows with offsets"),
]  # fmt: skip


@pytest.fixture(scope="module")
def found(untied_folder, moe_folder):
    return results_of_ranks(errors_of_ranks, 2, untied_folder, moe_folder, timeout=500)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("family", ["dense", "MoE"])
@pytest.mark.parametrize(("caller", "call"), CALLS, ids=", ".join)
def test_log_probs_match_transformers_if_frameworks_use_context_parallelism(found, caller, call, family):
    error = found[caller, call, family]
    print(error)
    assert isinstance(error, float), error
    assert error <= LOG_PROBS


@pytest.mark.parametrize("family", ["dense", "MoE"])
def test_forward_raises_if_position_ids_are_sliced_and_input_ids_are_full(found, family):
    """As ms-swift cuts them; the message says that None derives them."""
    said = found["ms_swift", "labels and positions are cut", family]
    assert isinstance(said, str) and "expected [3, 1, 84]" in said and "None to derive positions" in said, said
