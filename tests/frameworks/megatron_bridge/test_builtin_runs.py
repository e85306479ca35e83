"""Megatron-Bridge's own Qwen3-VL and its collator, run beside ours on the same input, on the CPU.

Its layers are Transformer Engine's; megatron-core's local ones with torch's attention stand in their place.
"""

import json
import re

from qwen3vl_bridge.data import Encoder, load_processor, open_source
from qwen3vl_bridge.weights.rows import ExpertLayout

import numpy as np
import pytest
import torch
from megatron.bridge.models.qwen_vl.data.collate_fn import qwen2_5_collate_fn
from megatron.core.transformer.moe.router import TopKRouter
from PIL import Image
from transformers import AutoProcessor

from tests.helpers.batches import make_batch, make_samples
from tests.helpers.expert_layouts import rewrite
from tests.helpers.stock_steps import stock_with_torch_attention
from tests.models.checkpoints.test_torch_dist import make_experts_everywhere
from tests.parity.conftest import make_pair
from tests.parity.test_padding import masks_that_arrive
from tests.parity.test_parity import run_megatron

IDS = torch.tensor([[11, 12, 13, 14, 9, 9], [11, 12, 13, 14, 15, 16]])
KEEP = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])


def test_megatron_bridge_qwen3_vl_differs_from_transformers_only_in_merger_gelu(untied_folder):
    """Megatron-Bridge's own model differs in one point: its mergers use tanh-GELU instead of exact GELU."""
    pair = make_pair(untied_folder)
    samples = make_samples("image and video", pair.config, seed=5)
    expected = pair.reference_results(samples)
    limit = pair.limits(samples, expected)["logits"]
    stock = stock_with_torch_attention(untied_folder)

    def error(logits: list[torch.Tensor]) -> float:
        return max((a - b).abs().max().item() for a, b in zip(logits, expected.logits, strict=True))

    def theirs() -> float:
        with torch.no_grad():
            return error([stock(s.ids[None], position_ids=None, attention_mask=None, **s.pixels)[0] for s in samples])

    assert error(run_megatron(pair, make_batch(samples, pair.config)).logits) <= limit
    assert 5 * limit < theirs() < 1e-3  # measured 3.6e-4
    for merger in (*stock.vision_model.decoder.deepstack_merger_list, stock.vision_model.merger):
        merger.activation_func = torch.nn.functional.gelu
    assert theirs() <= limit


def test_routers_get_padding_mask_unlike_megatron_bridge_routers(moe_folder, tmp_path):
    """The same rows with padding on the right: which tokens every router is told to leave out."""
    folder = rewrite(
        make_experts_everywhere(moe_folder, tmp_path / "all"), tmp_path / "released", ExpertLayout.INPUT_MAJOR
    )
    ours = masks_that_arrive(make_pair(folder), IDS, attention_mask=KEEP)
    assert ours and all(torch.equal(mask, ~KEEP.bool().T) for mask in ours)

    stock, theirs = stock_with_torch_attention(folder), []

    def note(_: torch.nn.Module, given: tuple, named: dict) -> None:
        theirs.append((*given[1:], *named.values()))

    for module in stock.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_pre_hook(note, with_kwargs=True)
    stock(input_ids=IDS, position_ids=None, attention_mask=KEEP)
    assert theirs and all(value is None for given in theirs for value in given)


def test_video_timestamps_span_full_video_unlike_megatron_bridge(untied_folder, tmp_path):
    """46 frames, two a second: 23 seconds."""
    names = [f"{number}.png" for number in range(46)]
    for number, name in enumerate(names):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    processor = AutoProcessor.from_pretrained(untied_folder)

    def turns(video: list[str]) -> list[dict]:
        asked = [{"type": "video", "video": video, "sample_fps": 2}, {"type": "text", "text": "Which?"}]
        answer = [{"type": "text", "text": "Seven."}]
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]

    def times(ids: torch.Tensor) -> list[float]:
        return [float(t) for t in re.findall(r"<([\d.]+) seconds>", processor.tokenizer.decode(ids))]

    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"messages": turns(names)}))
    ours = Encoder(load_processor(str(untied_folder)))(open_source(file)[0])
    assert times(ours.input_ids) == pytest.approx([0.25 + n for n in range(23)], abs=0.06)
    theirs = qwen2_5_collate_fn([{"conversation": turns([str(tmp_path / name) for name in names])}], processor)
    assert times(theirs["input_ids"][0]) == [0.3, 1.6]
