"""Names of parameters in the unsharded model.

Called: Megatron-Bridge's `_megatron_local_name_to_global`, with which its own conversion numbers the layers of a
pipeline stage and the experts of an expert-parallel rank. Delete this module when the function is public.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.bridge.models.conversion import model_bridge


def global_name(chunks: list[torch.nn.Module], config: Any, name: str, stage: int) -> str:
    """Return the name that a parameter of this rank has in the unsharded model.

    Args:
        chunks: this rank's chunks of the model.
        config: configuration of the model.
        name: name of the parameter in its chunk.
        stage: index of the chunk.
    """
    return model_bridge._megatron_local_name_to_global(chunks, config, name, stage)
