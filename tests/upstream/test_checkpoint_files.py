"""Megatron-Bridge's functions for files of checkpoints."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("checkpoint_files")
CHECKPOINTING = "megatron.bridge.training.checkpointing"


def test_megatron_bridge_checkpoint_functions_have_expected_parameters():
    CONTRACT.takes(CHECKPOINTING, "_get_global_non_persistent_checkpoint_dirs", "load_dir", "ckpt_cfg")
    CONTRACT.takes(
        CHECKPOINTING, "_load_model_weights_from_checkpoint",
        *("checkpoint_path", "model", "fully_parallel_load", "return_state_dict", "dist_ckpt_strictness", "strict"),
    )  # fmt: skip
    CONTRACT.takes(CHECKPOINTING, "_get_filesystem_reader", "checkpoint_dir", "cache_metadata", "async_strategy")


def test_non_persistent_folders_returns_configured_folder(tmp_path):
    CONTRACT.find(CHECKPOINTING, "_get_global_non_persistent_checkpoint_dirs")
    from qwen3vl_bridge.upstream.checkpoint_files import non_persistent_folders, storage_reader

    from megatron.bridge.training.config import CheckpointConfig
    from torch.distributed.checkpoint import FileSystemReader

    settings = CheckpointConfig(non_persistent_global_ckpt_dir="passing")
    assert non_persistent_folders(settings) == ("passing",)
    assert isinstance(storage_reader(tmp_path), FileSystemReader)


def test_megatron_bridge_fsdp_loader_uses_model_as_state_dict_key():
    CONTRACT.mentions(CHECKPOINTING, "load_fsdp_dtensor_checkpoint", "_model")
    CONTRACT.mentions(CHECKPOINTING, "_load_checkpoint_from_path", "_model")
