"""Transformers' modules as plain torch computes them, whichever kernels are installed.

Where flash-linear-attention and causal-conv1d are installed, transformers' Qwen3.5 takes their kernels for the gated
delta rule, the convolution and the gated norm. They may round products to TF32 on a GPU, and then a reference in
float32 would be no more exact than what is compared with it; and they do not run on a CPU. Its layers look the kernels
up in their module when they are made.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

MODULES = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_5", "qwen3_5_moe"))
KERNELS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "FusedRMSNormGated",
)


@contextmanager
def torch_linear_attention() -> Iterator[None]:
    """Have transformers' models that are built in the body compute linear attention by torch alone."""
    with ExitStack() as stack:
        for module in map(importlib.import_module, MODULES):
            for name in KERNELS:
                stack.enter_context(mock.patch.object(module, name, None))
        yield
