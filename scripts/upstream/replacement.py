"""A pytest plugin for Megatron-Bridge's own tests that replaces the classes they import by this project's classes.

Without Transformer Engine, Megatron-Bridge can be imported only after this project, so this project is always imported.
With `--stock` nothing is replaced, and `sitecustomize.py` prevents this project from registering its bridges.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import qwen3vl_bridge
from qwen3vl_bridge.upstream import cpu

import pytest
import torch
from megatron.core import parallel_state

_QWEN_VL = "megatron.bridge.models.qwen_vl"
_CLASSES = ("Qwen3VLModelProvider", "Qwen3VLMoEModelProvider", "Qwen3VLBridge", "Qwen3VLMoEBridge", "Qwen3VLModel")
# Modules from which tests and Megatron-Bridge's own code import these classes. Qwen3.5's modules are left out, because
# they build upstream's model with other arguments.
_MODULES = (
    "megatron.bridge.models",
    _QWEN_VL,
    f"{_QWEN_VL}.qwen3_vl_bridge",
    f"{_QWEN_VL}.qwen3_vl_provider",
    f"{_QWEN_VL}.modelling_qwen3_vl",
    f"{_QWEN_VL}.modelling_qwen3_vl.model",
    "megatron.bridge.inference.vlm.base",
)
_CONFIG_LOADER = "megatron.bridge.models.hf_pretrained.safe_config_loader"
# The folder of tests that request CUDA and NCCL although they need neither.
_ON_CPU = "modelling_qwen3_vl"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that `upstream_tests.py` passes."""
    parser.addoption("--stock", action="store_true", help="replace nothing")
    parser.addoption("--report", type=Path, help="where to write outcomes, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Replace classes before any test is imported."""
    importlib.import_module("megatron.bridge.models")
    if not config.getoption("--stock"):
        _replace()
    # This module would wait longer and longer for the hub, which is switched off.
    vars(sys.modules[_CONFIG_LOADER])["time"] = types.SimpleNamespace(time=time.time, sleep=lambda _: None)
    config.pluginmanager.register(_Report(config.getoption("--report")))


def _replace() -> None:
    for name in _MODULES:
        module = vars(importlib.import_module(name))
        module.update({cls: getattr(qwen3vl_bridge, cls) for cls in _CLASSES if cls in module})
    importlib.import_module(f"{_QWEN_VL}.modelling_qwen3_vl.rope").get_rope_index = _get_rope_index


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Make tests that name CUDA but do not need it run on the CPU."""
    for module in {item.module for item in items if _ON_CPU in item.nodeid}:
        cpu.adopt(module)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: Any, nextitem: Any) -> None:
    """Destroy process groups after the last test of a file."""
    if nextitem is None or nextitem.path != item.path:
        parallel_state.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _get_rope_index(
    spatial_merge_size: int,
    image_token_id: int,
    video_token_id: int,
    vision_start_token_id: int,
    input_ids: Any,
    image_grid_thw: Any = None,
    video_grid_thw: Any = None,
    attention_mask: Any = None,
    packed_seq_params: Any = None,
) -> tuple[Any, Any]:
    """Replace `get_rope_index`: compute mRoPE positions [3, rows, tokens] and deltas with this project's functions."""
    from qwen3vl_bridge.core.vision_inputs import VisionSettings, mrope_positions
    from qwen3vl_bridge.models.inputs.caller_batches import read_arguments
    from qwen3vl_bridge.models.inputs.caller_layout import OutputConversion, detect_layout

    from megatron.core.packed_seq_params import PackedSeqParams

    if packed_seq_params is not None:  # tests set only the fields that upstream's function reads
        tables = [getattr(packed_seq_params, name, None) for name in ("cu_seqlens_q", "cu_seqlens_q_padded")]
        packed_seq_params = PackedSeqParams("thd", tables[0], tables[0], tables[1], tables[1])
    read = read_arguments(dict(input_ids=input_ids, attention_mask=attention_mask))
    ids = read["input_ids"]
    caller = detect_layout(ids, read["attention_mask"], packed_seq_params, None)
    settings = VisionSettings(image_token_id, video_token_id, spatial_merge_size, num_position_embeddings=1)
    layout = caller.layout
    positions = mrope_positions(caller.arrange(ids), layout, image_grid_thw, video_grid_thw, settings)
    segments = positions.flatten(1).split(layout.padded_lengths, -1)
    deltas = [int(one.max()) + 1 - length for one, length in zip(segments, layout.lengths, strict=True)]
    positions = OutputConversion.to_caller_order(caller, ids).convert(positions.permute(1, 2, 0)).permute(2, 0, 1)
    return positions.to(input_ids.device), input_ids.new_tensor(deltas)[:, None]


class _Report:
    """Plugin that records the outcome of each test (passed, failed or skipped) and its error."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.tests = path, {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a phase of a test. A failure is not overwritten by later phases."""
        known = self.tests.get(report.nodeid, {}).get("outcome")
        if known != "failed" and (report.when == "call" or not report.passed):
            self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that could not be imported or is skipped."""
        if not report.passed:
            self._add(report)

    def _add(self, report: Any) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = "" if report.passed else str(getattr(crash, "message", report.longrepr))
        self.tests[report.nodeid] = {"outcome": report.outcome, "why": why[-2000:]}

    def pytest_sessionfinish(self) -> None:
        """Write all outcomes as JSON."""
        if self.path is not None:
            self.path.write_text(json.dumps(self.tests, indent=1))
