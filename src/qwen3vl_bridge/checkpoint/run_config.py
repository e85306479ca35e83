"""`run_config.yaml`: what Megatron-Bridge's tools read about the run a checkpoint comes from.

What lives here: the one function that says what an imported checkpoint's file holds. What may not: reading it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def run_config(hf_config: Mapping[str, Any], hf_model: str) -> dict[str, Any]:
    """Contents of `run_config.yaml` for a checkpoint imported from a Hugging Face model.

    Megatron-Bridge's loader wants the two parallel sizes as soon as the file is there, its export looks for
    `hf_model_id`.

    Args:
        hf_config: the model's `config.json`.
        hf_model: where it came from: a folder or a hub id.

    Returns:
        Plain values only.
    """
    del hf_config
    return {
        "model": {
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "hf_model_id": hf_model,
        },
        "checkpoint": {
            "ckpt_format": "fsdp_dtensor",
            "save_optim": False,
            "save_rng": False,
            "fully_parallel_save": True,
        },
    }
