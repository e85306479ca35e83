"""Tiny Qwen3.5 checkpoints of each kind."""

from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest

from tests.models.qwen3_5.tiny import ROPE, in_released_dtypes, make_checkpoint, with_mtp
from tests.parity.conftest import Pair, make_pair
from tests.parity.test_settings import SCALED

RELEASED = ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT
YARN = ROPE | dict(rope_type="yarn", **SCALED["yarn"])
KINDS = {
    "dense": {"mtp": RELEASED}, "tied": {"tied": True}, "moe": {"moe": True, "mtp": RELEASED},
    "per expert": {"moe": True, "packed": False}, "3.6": {"moe": True, "mtp": ExpertLayout.OUTPUT_MAJOR},
    "yarn": {"moe": True, "mtp": ExpertLayout.OUTPUT_MAJOR, "rope_parameters": YARN},
}  # fmt: skip


@pytest.fixture(scope="session")
def qwen3_5_folders(tmp_path_factory):
    return {
        kind: make_checkpoint(tmp_path_factory.mktemp(kind), seed=seed, **options)
        for seed, (kind, options) in enumerate(KINDS.items())
    }


@pytest.fixture(scope="session")
def released(qwen3_5_folders, tmp_path_factory):
    return in_released_dtypes(qwen3_5_folders["dense"], tmp_path_factory.mktemp("released") / "hf")


@pytest.fixture(scope="session")
def released_3_6(qwen3_5_folders, tmp_path_factory):
    return in_released_dtypes(qwen3_5_folders["dense"], tmp_path_factory.mktemp("released_3_6") / "hf", ())


def pair_with_mtp(folders, kind: str, **settings) -> Pair:
    """Return both models with multi-token prediction; the loss has no balancing term."""
    if kind == "moe":
        settings["moe_aux_loss_coeff"] = 0.0
    pair = make_pair(folders[kind], **settings)
    with_mtp(pair.reference, folders[kind])
    if kind == "moe":
        pair.layout = RELEASED
    return pair
