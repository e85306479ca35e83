"""Models in several shapes on disk, and ways to look at checkpoints that share no code with the package."""

from __future__ import annotations

from pathlib import Path

from qwen3vl_bridge.checkpoint import copy_side_files, import_checkpoint

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3VLForConditionalGeneration


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder, read by safetensors."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


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
def imported(untied_folder, tmp_path_factory):
    """The untied model as a checkpoint; not to be changed."""
    folder = tmp_path_factory.mktemp("imported") / "megatron"
    import_checkpoint(untied_folder, folder)
    return folder
