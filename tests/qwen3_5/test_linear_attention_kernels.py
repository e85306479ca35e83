"""Linear attention on a GPU without flash-linear-attention takes torch functions; with it, the package's kernels."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import SimpleNamespace

from qwen3vl_bridge import registry
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
    replacements = registry.family("qwen3_5").replacements
    registry.load(replacements[f"{_KERNELS}.common"])(common)
    registry.load(replacements[f"{_KERNELS}.gdn"])(gdn)
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


def test_the_import_hook_puts_them_where_megatron_core_calls_them():
    gdn = importlib.import_module(f"{_KERNELS}.gdn")
    common = importlib.import_module(f"{_KERNELS}.common")
    missing = delta_rule.are_missing()
    assert (gdn.chunk_gated_delta_rule is delta_rule.chunk_gated_delta_rule) == missing
    assert (common.l2norm is delta_rule.l2norm) == missing


def test_a_family_that_is_registered_late_replaces_what_is_imported_already(monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    given = []
    monkeypatch.setattr(registry, "note_module", given.append, raising=False)
    late = registry.Family(
        "late",
        {"late_vl": "Late"},
        *["os.path.join"] * 6,
        bridge="os",
        replacements={"megatron.core": "qwen3vl_bridge.registry.note_module", "not.there": "not.there.either"},
    )
    registry.register_family(late)
    registry.register_family(late)
    assert given == [sys.modules["megatron.core"]]
