"""Loads a run's initial weights: from a checkpoint of either Megatron format, or Hugging Face weights.

What lives here: detecting the format, refusing weights of another model, loading them. What may not: how tensors of a
format are read (`fsdp_dtensor.py`, `torch_dist.py`, Megatron-Bridge).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen3vl_bridge.checkpoint.adapters.settings import refuse_adapters_alone
from qwen3vl_bridge.checkpoint.engine.manifest import MANIFEST, read_manifest, tool
from qwen3vl_bridge.checkpoint.formats.megatron.folder import HF_FILES, TORCH_DIST, find_iteration, format_of
from qwen3vl_bridge.checkpoint.formats.safetensors.model_folder import copy_side_files
from qwen3vl_bridge.checkpoint.stored_models.hf_config import ModelConfig
from qwen3vl_bridge.checkpoint.stored_models.hf_model import open_model
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.files.json_files import write_object
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.registry import family, family_of
from qwen3vl_bridge.training.checkpointing import fsdp_dtensor, torch_dist
from qwen3vl_bridge.training.checkpointing.all_or_none import all_or_none
from qwen3vl_bridge.weights.dimensions import vision_sizes

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.utils.checkpoint_utils import is_hf_checkpoint_dir
from megatron.core.process_groups_config import ProcessGroupCollection

# Fields of a provider that determine weights and their shapes.
_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("vocab_size", "share_embeddings_and_output_weights", "moe_layers", "num_moe_experts", "moe_ffn_hidden_size"),
)
_LINEAR = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "moe_shared_expert_intermediate_size"),
)
_WITH_EXPERTS = ("num_moe_experts", "moe_ffn_hidden_size")


@dataclass(frozen=True)
class Pretrained:
    """Initial weights.

    Attributes:
        folder: an iteration's, or of Hugging Face.
        is_hf: whether it is of Hugging Face.
    """

    folder: Path
    is_hf: bool

    @classmethod
    def find(cls, path: str | Path) -> Pretrained:
        """The weights at a path.

        Raises:
            CheckpointError: no weights in a known format.
        """
        if is_hf_checkpoint_dir(str(path)):
            return cls(Path(path), is_hf=True)
        return cls(find_iteration(Path(path)), is_hf=False)

    def check(self, provider: VisionLanguageProvider) -> None:
        """Refuse weights of another model, as far as possible without reading them.

        Raises:
            CheckpointError: sizes that differ; all are listed. Or they are only adapters, without their base weights.
        """
        if not self.is_hf:
            # There all names and shapes are in one file, and compared before weights are read.
            refuse_adapters_alone(self.folder)
            return
        config = ModelConfig(self.folder).raw
        theirs, ours = _sizes(family_of(config).provider_of(config)), _sizes(provider)
        differ = [
            f"{name} is {theirs.get(name)}, expected {ours[name]}" for name in ours if theirs.get(name) != ours[name]
        ]
        if differ:
            raise CheckpointError("\n  ".join([f"{self.folder} holds a different model from the run's:", *differ]))

    def load(self, model: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
        """Fill a model.

        Args:
            model: this rank's chunks, wrapped or not, without adapters.
            groups: process groups.

        Raises:
            CheckpointError: weights that do not fit; all are listed.
        """
        if self.is_hf:
            bridge = AutoBridge.from_hf_pretrained(str(self.folder))
            bridge.load_hf_weights(list(model))
        else:
            _load(self.folder, model, groups)

    def write_export_files(self, folder: Path, provider: VisionLanguageProvider) -> None:
        """Write the files that an export needs: configuration, tokenizer, processor, and a manifest.

        Args:
            folder: the checkpoint's.
            provider: the run's.
        """
        experts = float32_as = None
        if not self.is_hf:
            if (files := self.folder / HF_FILES).exists():
                shutil.copytree(files, folder / HF_FILES)
            before = read_manifest(self.folder)
            experts, float32_as = before.get("expert_layout"), before.get("float32_as")
        else:
            copy_side_files(self.folder, folder / HF_FILES)
            if provider.moe_layers or any(row.float32 for row in family(provider.family).rows()):
                model = open_model(self.folder)
                experts, float32_as = model.experts.name if provider.moe_layers else None, model.float32_as
        manifest = tool() | {"source": str(self.folder), "expert_layout": experts, "float32_as": float32_as}
        if provider.should_pad_vocab:
            manifest["vocab_divisor"] = provider.make_vocab_size_divisible_by
        write_object(folder / MANIFEST, manifest)


def load_weights(folder: str | Path, model: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Fill all weights of a model from a checkpoint of either Megatron format.

    Args:
        folder: the run's or the checkpoint's own.
        model: this rank's chunks, wrapped or not.
        groups: process groups.

    Raises:
        CheckpointError: weights that do not fit; all are listed.
    """
    with all_or_none():
        folder = find_iteration(Path(folder))
    _load(folder, model, groups)


def _load(folder: Path, model: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Load from an iteration's folder of either format."""
    with all_or_none():
        refuse_adapters_alone(folder)
        ckpt_format = format_of(folder)
    read = torch_dist.load if ckpt_format == TORCH_DIST else fsdp_dtensor.load
    read(folder, model, groups)


def _sizes(provider: VisionLanguageProvider) -> dict[str, object]:
    names = [name for name in _SIZES if provider.moe_layers or name not in _WITH_EXPERTS]
    vision = provider.vision_config
    return {
        **{name: getattr(provider, name, None) for name in names},
        **vision_sizes(vision.to_dict()),
        "vision layers": vision.depth,
        "deepstack_visual_indexes": list(provider.tapped_layers),
        "family": provider.family,
        **{name: getattr(provider, name) for name in _LINEAR if hasattr(provider, name)},
    }
