"""Test what the README says of Megatron-Bridge's implementation of Qwen3-VL, on its installed code."""

import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

from qwen3vl_bridge.core.vision_sharding import assign_frames
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.data.packing import in_batch
from megatron.bridge.models.qwen_vl import qwen3_vl_provider, qwen3_vl_step
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import transformer_config
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import qwen3vl_cp_split

FREEZE = ("freeze_language_model", "freeze_vision_model", "freeze_vision_projection")


def defaults(provider: type) -> tuple[bool, ...]:
    fields = {field.name: field.default for field in dataclasses.fields(provider)}
    return tuple(fields[name] for name in FREEZE)


def test_megatron_bridge_qwen3_vl_moe_freezes_language_and_vision_by_default():
    assert defaults(qwen3_vl_provider.Qwen3VLMoEModelProvider) == (True, True, False)
    assert defaults(qwen3_vl_provider.Qwen3VLModelProvider) == (False, False, False)
    assert defaults(Qwen3VLMoEModelProvider) == defaults(Qwen3VLModelProvider) == (False, False, False)


def test_megatron_bridge_qwen3_vl_step_pads_packed_samples_to_equal_length():
    """A sample of 3 tokens beside one of 8: both are said to have 16."""
    sizes = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1), cp=SimpleNamespace(size=lambda: 1))
    real = torch.arange(8)[None] < torch.tensor([[3], [8]])
    positions = torch.arange(8).expand(2, 8)
    *_, packed = qwen3_vl_step._pad_and_pack_qwen3_vl_step(
        real.long(), real.long(), real.float(), real, positions, sizes, use_fp8_padding=True
    )
    assert packed.cu_seqlens_q.tolist() == [0, 16, 32]


def test_megatron_bridge_vlm_step_packs_samples_without_padding():
    """The same two samples: 3 and 8."""
    real = torch.arange(8)[None] < torch.tensor([[3], [8]])
    batch = {"input_ids": real.long(), "attention_mask": real, "position_ids": torch.arange(8).expand(2, 8)}
    in_batch.pack_right_padded_sequence_batch_to_mcore_thd(batch)
    assert batch["cu_seqlens_q"].tolist() == [0, 3, 11]


def test_megatron_bridge_sft_recipes_freeze_nothing_and_pack_in_step():
    """Their settings, which are assignments: importing them needs the packages of other models."""
    file = Path(inspect.getfile(AutoBridge)).parents[2] / "recipes/qwen_vl/h100/qwen3_vl.py"
    recipes = [part for part in file.read_text().split("\ndef ") if re.match(r"\w+_sft_\d+gpu_\w+\(", part)]
    assert recipes
    for text in recipes:
        settings = dict(re.findall(r"^    cfg\.(\S+) = (.+)$", text, re.MULTILINE))
        assert [settings[f"model.{one}"] for one in FREEZE] == ["False"] * 3, text
        data = settings["dataset"] if "_make_energon_dataset" in settings.get("dataset", "") else None
        assert data or settings["dataset.defer_in_batch_packing_to_step"] == "True", text
    assert "        defer_in_batch_packing_to_step=True,\n" in file.read_text()  # of _make_energon_dataset


def test_megatron_bridge_splits_images_over_cp_ranks_by_image_count():
    """Two large images and two small ones: 512 and 32 patches; ours 272 each."""
    sides = [16, 16, 4, 4]
    grids = torch.tensor([[1, side, side] for side in sides])
    counts = [side**2 for side in sides]
    _, _, pictures, _ = qwen3vl_cp_split(2, torch.zeros(sum(counts), 3), grids)
    assert list(pictures) == [2, 2] and (sum(counts[:2]), sum(counts[2:])) == (512, 32)
    assert [sum(counts[frame] for frame in rank) for rank in assign_frames(counts, 2)] == [272, 272]
    fields = {one.name: one.default for one in dataclasses.fields(transformer_config.Qwen3VLTransformerConfig)}
    assert fields["vision_dp_when_cp"] is False
