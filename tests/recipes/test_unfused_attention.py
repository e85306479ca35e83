"""Warnings about head sizes without a fused attention kernel of Transformer Engine."""

import logging
from importlib.util import find_spec

from qwen3vl_bridge.config import fields

import pytest
import torch
from qwen3vl_recipes import qwen3_vl_4b_sft_config, qwen35_vl_4b_sft_config


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn has kernels for all")
@pytest.mark.parametrize(("major", "expected"), [(8, [128, 256]), (9, []), (10, [256])])
def test_recipe_warns_if_head_size_has_no_fused_attention_kernel(major, expected, monkeypatch, caplog):
    """It depends on the compute capability; torch's attention, used by local layers, has kernels for all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    caplog.set_level(logging.WARNING, "qwen3vl_bridge")
    widths = []
    for recipe in (qwen3_vl_4b_sft_config, qwen35_vl_4b_sft_config):
        model = recipe().model
        for model.transformer_impl in ("transformer_engine", "local"):
            fields.warn_of_unfused_attention(model)
        widths.append(model.kv_channels)
    assert widths == [128, 256]
    lines = [record.getMessage() for record in caplog.records if record.name == fields.__name__]
    for line, width in zip(lines, expected, strict=True):
        assert f"head size {width} on compute capability {major}.0" in line
