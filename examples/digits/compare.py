"""Compare the trained Megatron model with transformers on its exported weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch


@torch.no_grad()
def logits_difference(megatron_run: Path, hf_folder: Path, data: Path, *, samples: int = 32) -> tuple[float, float]:
    """Compare the logits of the Megatron model and of transformers on held-out conversations.

    Args:
        megatron_run: folder of a run; its newest checkpoint is loaded into the Megatron model.
        hf_folder: the export of that checkpoint, which transformers loads.
        data: JSON-lines file of conversations; image paths are relative to its folder.
        samples: number of conversations to compare.

    Returns:
        The largest absolute difference of logits, and the largest logit of transformers, for scale.
    """
    from qwen3vl_bridge.training.weight_loading import load_model

    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(hf_folder)
    reference = AutoModelForImageTextToText.from_pretrained(hf_folder).eval()
    megatron = load_model(hf_folder, megatron_run)[0].eval()
    worst = scale = 0.0
    for line in data.read_text().splitlines()[:samples]:
        inputs = processor.apply_chat_template(
            _with_paths(json.loads(line)["messages"], data.parent), tokenize=True, return_dict=True, return_tensors="pt"
        )
        expected = reference(**inputs).logits
        ours = megatron(
            inputs["input_ids"], pixel_values=inputs["pixel_values"], image_grid_thw=inputs["image_grid_thw"]
        )
        ours = ours[..., : expected.shape[-1]].float()
        worst = max(worst, (ours - expected).abs().max().item())
        scale = max(scale, expected.abs().max().item())
    return worst, scale


def _with_paths(messages: list[dict], root: Path) -> list[dict]:
    def place(part: dict) -> dict:
        return {**part, "image": str(root / part["image"])} if part["type"] == "image" else part

    return [{**message, "content": [place(part) for part in message["content"]]} for message in messages]
