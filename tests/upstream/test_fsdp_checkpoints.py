"""Megatron-Bridge loads checkpoints of Megatron-FSDP by one function of its module."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("fsdp_checkpoints")
MODULE, NAME = "megatron.bridge.training.checkpointing", "load_fsdp_dtensor_checkpoint"


def test_load_fsdp_dtensor_checkpoint_has_expected_parameters():
    CONTRACT.takes(
        MODULE, NAME, "load_dir", "ckpt_cfg", "rank0", "sharded_state_dict", "iteration", "release",
        "checkpoint_path_override", "checkpointing_context", "cfg",
    )  # fmt: skip
    CONTRACT.mentions(MODULE, "_load_base_checkpoint", NAME)
