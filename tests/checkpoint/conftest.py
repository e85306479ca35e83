"""Models and checkpoints of several kinds on disk."""

import shutil
from pathlib import Path

from qwen3vl_bridge.checkpoint import copy_side_files, import_checkpoint
from qwen3vl_bridge.testing.tiny_checkpoint import make_model
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeConfig

from tests.checkpoint.support import TENSORS
from tests.models.qwen3_5.tiny import make_checkpoint as make_qwen3_5


def _save_again(source: Path, folder: Path, dtype: torch.dtype, **kwargs) -> Path:
    model = Qwen3VLForConditionalGeneration.from_pretrained(source, dtype=dtype)
    model.save_pretrained(folder, **kwargs)
    (folder / "config.json").rename(folder / "saved.json")
    copy_side_files(source, folder)
    (folder / "saved.json").rename(folder / "config.json")
    return folder


@pytest.fixture(scope="session")
def sharded_folder(untied_folder, tmp_path_factory):
    folder = _save_again(untied_folder, tmp_path_factory.mktemp("sharded"), torch.float32, max_shard_size="300KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    return folder


@pytest.fixture(scope="session")
def bf16_folder(untied_folder, tmp_path_factory):
    return _save_again(untied_folder, tmp_path_factory.mktemp("bf16"), torch.bfloat16)


@pytest.fixture(scope="session")
def all_moe_folder(moe_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("all_moe")
    copy_side_files(moe_folder, folder)
    config = Qwen3VLMoeConfig.from_pretrained(moe_folder)
    config.text_config.mlp_only_layers = []
    make_model(config, seed=5).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_5_folder(tmp_path_factory):
    released = ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT
    return make_qwen3_5(tmp_path_factory.mktemp("qwen3_5"), seed=6, moe=True, mtp=released, num_experts=8)


@pytest.fixture(scope="session")
def imported(untied_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported") / "megatron"
    import_checkpoint(untied_folder, folder)
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    dcp.save({**TENSORS, "x": 3.0, "n": None}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")
