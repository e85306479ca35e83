"""Adapters of a model as a folder for the `peft` library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_bridge.checkpoint.formats.megatron import RUN_CONFIG, read_run_config
from qwen3vl_bridge.parallel.collectives import wait_for_all
from qwen3vl_bridge.weights.adapter_rows import HF_PREFIX, Scaled, adapter_config

import torch
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.dora import DoRA
from megatron.core.transformer.module import MegatronModule
from safetensors.torch import save_file

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge


def save_hf_adapter(
    bridge: AutoBridge,
    model: list[MegatronModule],
    path: str | Path,
    peft_config: PEFT,
    base_model_name_or_path: str | None = None,
    show_progress: bool = False,
    exclude_adapter_base_prefixes: Iterable[str] | None = None,
) -> None:
    """Save a model's adapters as a folder that `peft.PeftModel.from_pretrained` loads. Call it on all ranks; rank 0
    writes. `AutoBridge.save_hf_adapter` is this function for our models (`compat/patches.py`).

    Args:
        bridge: of the model.
        model: with adapters, as the list of a rank's virtual stages.
        path: the folder; made if it is not there.
        peft_config: the configuration that inserted the adapters: one of ours, or Megatron-Bridge's LoRA, VLMLoRA, DoRA
            or CanonicalLoRA.
        base_model_name_or_path: name or folder of the base model; None for the bridge's own.
        show_progress: accepted for compatibility with Megatron-Bridge's method; no progress is shown.
        exclude_adapter_base_prefixes: prefixes of Megatron's names of layers whose adapters are not saved.

    Raises:
        ValueError: the model has no adapters.
    """
    conversion, exclude = bridge._model_bridge, tuple(exclude_adapter_base_prefixes or ())
    weights = conversion.adapter_weights(model, exclude)
    if not weights:
        raise ValueError(
            "the model has no adapters to save; expected a model to which Qwen3VLLoRA or another PEFT was applied"
        )
    if base_model_name_or_path is None:
        base_model_name_or_path = str(getattr(bridge.hf_pretrained, "model_name_or_path", None) or "")
    config = adapter_config(
        Scaled(peft_config.dim, peft_config.alpha),
        conversion.hf_targets(model, exclude),
        base_model_name_or_path,
        dora=isinstance(peft_config, DoRA),
        others=conversion.adapted_tensors(model, exclude),
    )
    if torch.distributed.get_rank() == 0:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {f"{HF_PREFIX}{name}": weight for name, weight in weights.items()},
            folder / "adapter_model.safetensors",
        )
        # Last: a folder with this file counts as an adapter.
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    wait_for_all()


def refuse_run_of_dora(peft_checkpoint: str | Path) -> None:
    """Refuse a run's checkpoint whose adapters `AutoBridge.export_adapter_ckpt` would write without their magnitudes.

    Raises:
        ValueError: they are DoRA's.
    """
    folder = Path(peft_checkpoint).expanduser().resolve()
    folder = next((each for each in (folder, folder.parent) if (each / RUN_CONFIG).is_file()), None)
    if folder is None:
        return  # it reports what is missing
    kind = (read_run_config(folder).get("peft") or {}).get("_target_", "")
    if kind.rpartition(".")[2].endswith("DoRA"):
        raise ValueError(
            f"{folder} was saved by a run with {kind}, whose magnitudes export_adapter_ckpt would drop; use `qwen3vl "
            "adapters export`, which writes them"
        )
