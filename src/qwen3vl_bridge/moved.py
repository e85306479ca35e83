"""Modules under their earlier names: they can be imported, with a warning, for one release.

What lives here: the old names, including those in saved configurations (`_target_`), and finding them. What may not:
anything else.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any

MOVED = {
    "qwen3vl_bridge.activations": "qwen3vl_bridge.models.common.settings.activations",
    "qwen3vl_bridge.bridge": "qwen3vl_bridge.models.qwen3_vl.bridge",
    "qwen3vl_bridge.checkpoint.cli": "qwen3vl_bridge.cli.convert",
    "qwen3vl_bridge.checkpoint.dcp_writer": "qwen3vl_bridge.checkpoint.formats.dcp.writer",
    "qwen3vl_bridge.checkpoint.errors": "qwen3vl_bridge.files.errors",
    "qwen3vl_bridge.checkpoint.hf_config": "qwen3vl_bridge.checkpoint.stored_models.hf_config",
    "qwen3vl_bridge.checkpoint.hf_writer": "qwen3vl_bridge.checkpoint.formats.safetensors.writer",
    "qwen3vl_bridge.checkpoint.megatron_folder": "qwen3vl_bridge.checkpoint.formats.megatron.folder",
    "qwen3vl_bridge.checkpoint.pieces": "qwen3vl_bridge.checkpoint.formats.slices",
    "qwen3vl_bridge.checkpoint.plan": "qwen3vl_bridge.checkpoint.planning.plan",
    "qwen3vl_bridge.checkpoint.ranks": "qwen3vl_bridge.checkpoint.engine.ranks",
    "qwen3vl_bridge.checkpoint.sides": "qwen3vl_bridge.checkpoint.formats.layouts",
    "qwen3vl_bridge.checkpoint.storing": "qwen3vl_bridge.checkpoint.stored_models.megatron_writer",
    "qwen3vl_bridge.checkpoint.tensors": "qwen3vl_bridge.checkpoint.formats.tensor_specs",
    "qwen3vl_bridge.checkpoint.topology": "qwen3vl_bridge.checkpoint.planning.topology",
    "qwen3vl_bridge.cost": "qwen3vl_bridge.models.common.flops",
    "qwen3vl_bridge.cpu": "qwen3vl_bridge.compat.cpu",
    "qwen3vl_bridge.data.cli": "qwen3vl_bridge.cli.data",
    "qwen3vl_bridge.data.collate": "qwen3vl_bridge.data.processing.collation",
    "qwen3vl_bridge.data.encode": "qwen3vl_bridge.data.processing.encoding",
    "qwen3vl_bridge.data.energon_provider": "qwen3vl_bridge.data.energon.provider",
    "qwen3vl_bridge.data.hub": "qwen3vl_bridge.data.sources.hub",
    "qwen3vl_bridge.data.order": "qwen3vl_bridge.data.packing.sample_order",
    "qwen3vl_bridge.data.plan": "qwen3vl_bridge.data.packing.row_plan",
    "qwen3vl_bridge.data.rows": "qwen3vl_bridge.data.loading.row_dataset",
    "qwen3vl_bridge.data.sizes": "qwen3vl_bridge.data.packing.sample_sizes",
    "qwen3vl_bridge.dimensions": "qwen3vl_bridge.models.qwen3_vl.config_dimensions",
    "qwen3vl_bridge.dist_train": "qwen3vl_bridge.models.common.settings.encoder_parallel",
    "qwen3vl_bridge.generation": "qwen3vl_bridge.inference.generation",
    "qwen3vl_bridge.hooks": "qwen3vl_bridge.compat.import_hook",
    "qwen3vl_bridge.loading": "qwen3vl_bridge.training.checkpointing.model_loading",
    "qwen3vl_bridge.logs": "qwen3vl_bridge.compat.library_logs",
    "qwen3vl_bridge.mappings": "qwen3vl_bridge.models.qwen3_vl.table",
    "qwen3vl_bridge.model": "qwen3vl_bridge.models",
    "qwen3vl_bridge.model.conventions": "qwen3vl_bridge.models.common.inputs.padding_and_packing",
    "qwen3vl_bridge.model.inputs": "qwen3vl_bridge.models.common.inputs.model_inputs",
    "qwen3vl_bridge.model.masks": "qwen3vl_bridge.models.common.inputs.masks",
    "qwen3vl_bridge.model.qwen3vl": "qwen3vl_bridge.models.qwen3_vl.model",
    "qwen3vl_bridge.model.stages": "qwen3vl_bridge.models.qwen3_vl.pipeline_payload",
    "qwen3vl_bridge.model.wrappers": "qwen3vl_bridge.models.common.wrappers",
    "qwen3vl_bridge.param_mappings": "qwen3vl_bridge.weights.bridge_mappings",
    "qwen3vl_bridge.models.common.provider_flops": "qwen3vl_bridge.models.common.flops",
    "qwen3vl_bridge.models.config_values": "qwen3vl_bridge.models.config.values",
    "qwen3vl_bridge.models.qwen3_vl.saved_providers": "qwen3vl_bridge.models.common.settings.saved_providers",
    "qwen3vl_bridge.models.qwen3_vl.vision_config": "qwen3vl_bridge.models.common.vision_config",
    "qwen3vl_bridge.parsing": "qwen3vl_bridge.files.parsing",
    "qwen3vl_bridge.parts": "qwen3vl_bridge.weights.model_parts",
    "qwen3vl_bridge.peft_export": "qwen3vl_bridge.peft.hf_export",
    "qwen3vl_bridge.planning.cli": "qwen3vl_bridge.cli.plan",
    "qwen3vl_bridge.planning.estimate": "qwen3vl_bridge.planning.memory.estimate",
    "qwen3vl_bridge.planning.printing": "qwen3vl_bridge.planning.reports",
    "qwen3vl_bridge.planning.propose": "qwen3vl_bridge.planning.proposals",
    "qwen3vl_bridge.presets": "qwen3vl_bridge.models.qwen3_vl.presets",
    "qwen3vl_bridge.provider": "qwen3vl_bridge.models.qwen3_vl.provider",
    "qwen3vl_bridge.saved_providers": "qwen3vl_bridge.models.common.settings.saved_providers",
    "qwen3vl_bridge.sequence": "qwen3vl_bridge.batch",
    "qwen3vl_bridge.sequence.batch": "qwen3vl_bridge.batch.packed_batch",
    "qwen3vl_bridge.sequence.layout": "qwen3vl_bridge.batch.token_layout",
    "qwen3vl_bridge.sequence.sharing": "qwen3vl_bridge.batch.vision_sharding",
    "qwen3vl_bridge.sequence.vision": "qwen3vl_bridge.batch.vision_indices",
    "qwen3vl_bridge.training.accuracy": "qwen3vl_bridge.training.monitoring.accuracy",
    "qwen3vl_bridge.training.first_weights": "qwen3vl_bridge.training.checkpointing.initial_weights",
    "qwen3vl_bridge.training.foreign_batch": "qwen3vl_bridge.training.foreign_batches",
    "qwen3vl_bridge.training.guard": "qwen3vl_bridge.training.optimizer.step_guard",
    "qwen3vl_bridge.training.process_group": "qwen3vl_bridge.training.process_groups",
    "qwen3vl_bridge.training.rest": "qwen3vl_bridge.training.optimizer.delayed_unfreezing",
    "qwen3vl_bridge.training.together": "qwen3vl_bridge.training.checkpointing.all_or_none",
    "qwen3vl_bridge.training.towers": "qwen3vl_bridge.training.optimizer.tower_settings",
    "qwen3vl_bridge.upstream_names": "qwen3vl_bridge.models.qwen3_vl.upstream_names",
    "qwen3vl_bridge.vision_config": "qwen3vl_bridge.models.common.vision_config",
    "qwen3vl_bridge.weight_rows": "qwen3vl_bridge.weights.rows",
    "qwen3vl_recipes.qwen3_vl_235b_a22b": "qwen3vl_recipes.qwen3_vl.qwen3_vl_235b_a22b",
    "qwen3vl_recipes.qwen3_vl_2b": "qwen3vl_recipes.qwen3_vl.qwen3_vl_2b",
    "qwen3vl_recipes.qwen3_vl_30b_a3b": "qwen3vl_recipes.qwen3_vl.qwen3_vl_30b_a3b",
    "qwen3vl_recipes.qwen3_vl_32b": "qwen3vl_recipes.qwen3_vl.qwen3_vl_32b",
    "qwen3vl_recipes.qwen3_vl_4b": "qwen3vl_recipes.qwen3_vl.qwen3_vl_4b",
    "qwen3vl_recipes.qwen3_vl_8b": "qwen3vl_recipes.qwen3_vl.qwen3_vl_8b",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An old name gives the same module object as the new one, so that classes are identical."""

    def find_spec(self, fullname, path=None, target=None):
        # A loader for each, because the import hook changes loaders.
        return importlib.machinery.ModuleSpec(fullname, _Finder()) if fullname in MOVED else None

    def create_module(self, spec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} has moved to {new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__  # which importing would remove from a given module
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> Any:
        """The code that `python -m` runs."""
        found = importlib.util.find_spec(MOVED[fullname])
        return found.loader.get_code(found.name)


def install() -> None:
    """Make old names importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def load(package: str, module: str, name: str, new: str | None = None) -> Any:
    """The result of the `__getattr__` of a package that was a module, or in which a name has changed.

    Args:
        package: its name.
        module: the present module of the name.
        name: the requested name.
        new: its present name, if it has changed.

    Raises:
        AttributeError: the module has no such name.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(module), new or name)
    place = module if new is None else f"{module}.{new}"
    warnings.warn(f"{package}.{name} has moved to {place}", DeprecationWarning, stacklevel=3)
    return found
