"""Make ModelOpt's exporter write the trained vision tower of our models.

Replaced: `GPTModelExporter` of `modelopt.torch.export.unified_export_megatron`, which Megatron-Bridge imports in every
run. It exports the language model and copies the tower from the Hugging Face folder that it is given, so that training
of the tower would be lost. ModelOpt has no rules for the layers of a tower, and no registry of exporters. The subclass
overrides `_get_state_dict` and changes `_layer_state_dicts`. Delete this module when ModelOpt exports vision towers
(0.47 does not).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from qwen3vl_bridge.upstream.auto_bridge import model_bridge
from qwen3vl_bridge.upstream.replacements import When, replace

import torch


def export_towers(module: ModuleType, is_ours: Callable[[Any], bool]) -> None:
    """Replace the exporter by a subclass that also exports the vision tower if `is_ours(model)` is True.

    Args:
        module: `modelopt.torch.export.unified_export_megatron`.
    """

    class GPTModelExporter(module.GPTModelExporter):
        def __init__(
            self, model: torch.nn.Module, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            super().__init__(model, pretrained_model_name_or_path, *args, **kwargs)
            self.tower: dict[str, torch.Tensor] | None = None
            if is_ours(model) and pretrained_model_name_or_path is not None:
                self.tower = _tower_of(model, pretrained_model_name_or_path, self.dtype)
                self.vision_passthrough_prefixes = None
                self.exclude_modules.append("model.visual*")  # as in ModelOpt's export from transformers

        def _get_state_dict(self) -> None:
            super()._get_state_dict()
            if self.tower is not None and self.model.pre_process:
                self._layer_state_dicts[next(iter(self._layer_state_dicts))].update(self.tower)

    replace(module, "GPTModelExporter", GPTModelExporter, When.ALWAYS)


def _tower_of(model: torch.nn.Module, hf_model: str | os.PathLike, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights of the vision tower by Hugging Face name. All ranks of the model must call this together."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(hf_model))
    tasks = [
        task
        for task in model_bridge(bridge).build_conversion_tasks(bridge.hf_pretrained, [model])
        if task is not None and task.global_param_name.startswith("vision_")
    ]
    weights = bridge.export_hf_weights([model], cpu=True, show_progress=False, conversion_tasks=tasks)
    return {name: weight.to(dtype) for name, weight in weights}
