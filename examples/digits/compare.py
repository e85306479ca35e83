"""Compare the trained Megatron model with transformers on its exported weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch


@torch.no_grad()
def logits_difference(megatron_run: Path, hf_folder: Path, data: Path, *, samples: int = 32) -> tuple[float, float]:
    """Largest absolute difference of logits over held-out conversations.

    Args:
        megatron_run: the run whose newest checkpoint is loaded into the Megatron model.
        hf_folder: the export of that checkpoint, loaded by transformers.
        data: JSONL of conversations; images are relative to its folder.
        samples: how many conversations are compared.

    Returns:
        The difference, and the largest logit of transformers, to compare it with.
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
