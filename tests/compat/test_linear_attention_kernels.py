"""Linear attention on a GPU without flash-linear-attention takes torch functions; with it, the package's kernels."""

from __future__ import annotations

import importlib.util
import logging
from types import SimpleNamespace

from qwen3vl_bridge.compat.linear_attention_kernels import PATCHES
from qwen3vl_bridge.models.qwen3_5 import delta_rule

import pytest
import torch

from tests.qwen3_5.tiny import make_config

_KERNELS = "megatron.core.ssm.gated_delta_net"


@pytest.mark.parametrize(("gpu", "package"), [(True, False), (False, True), (False, False), (True, True)])
def test_ours_stand_in_where_one_of_both_is_missing(gpu, package, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if package and name == "fla" else None)
    common, gdn = SimpleNamespace(HAVE_FLA=package), SimpleNamespace(chunk_gated_delta_rule=None)
    PATCHES[f"{_KERNELS}.common"](common)
    PATCHES[f"{_KERNELS}.gdn"](gdn)
    both = gpu and package
    assert common.HAVE_FLA
    assert (gdn.chunk_gated_delta_rule is delta_rule.chunk_gated_delta_rule) == (not both)


@pytest.mark.parametrize("gpu", [True, False])
def test_a_gpu_without_the_package_is_warned_of(gpu, monkeypatch, caplog):
    from megatron.bridge import AutoBridge

    config = make_config()
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with caplog.at_level(logging.WARNING):
        provider.finalize()
    assert ("flash-linear-attention is not installed" in caplog.text) == gpu
