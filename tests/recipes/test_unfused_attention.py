"""Recipes' heads for which Transformer Engine has no kernel on a GPU are named."""

import logging
from importlib.util import find_spec

from qwen3vl_bridge.models import settings

import pytest
import torch
from qwen3vl_recipes import qwen3_vl_4b_sft_config, qwen35_vl_4b_sft_config


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn has kernels for all")
@pytest.mark.parametrize(("major", "expected"), [(8, [128, 256]), (9, []), (10, [256])])
def test_heads_without_a_kernel_are_named(major, expected, monkeypatch, caplog):
    """By compute capability; torch's attention, which local layers take, has kernels for all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    caplog.set_level(logging.WARNING, "qwen3vl_bridge")
    widths = []
    for recipe in (qwen3_vl_4b_sft_config, qwen35_vl_4b_sft_config):
        model = recipe().model
        for model.transformer_impl in ("transformer_engine", "local"):
            settings.warn_of_unfused_attention(model)
        widths.append(model.kv_channels)
    assert widths == [128, 256]
    lines = [record.getMessage() for record in caplog.records if record.name == settings.__name__]
    for line, width in zip(lines, expected, strict=True):
        assert f"heads of {width} on compute capability {major}.0" in line
