"""What a step held and which experts its tokens chose: counted here otherwise, and however a model is split."""

from __future__ import annotations

import dataclasses

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch

from tests.forked import run_ranks
from tests.parity.references import MICROBATCHES, step_samples
from tests.parity.topologies import Topology

from .metering_on_ranks import NAMES, measure

ALONE = Topology(1)
RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.fixture(scope="module")
def alone(moe_folder):
    """One process: packed rows, padded ones, and packed ones with every layer computed twice."""
    return {
        "packed": measure(moe_folder, ALONE, "packed"),
        "padded": measure(moe_folder, ALONE, "padded"),
        "recomputed": measure(moe_folder, ALONE, "packed", **RECOMPUTED),
    }


@pytest.fixture(scope="module")
def samples(moe_folder):
    from transformers import AutoConfig

    return [s for batch in step_samples("mixed", AutoConfig.from_pretrained(moe_folder), 0) for s in batch]


def test_amounts_are_those_of_the_samples(alone, samples):
    images = [grid for s in samples for grid in s.pixels.get("image_grid_thw", torch.empty(0, 3)).long().tolist()]
    videos = [grid for s in samples for grid in s.pixels.get("video_grid_thw", torch.empty(0, 3)).long().tolist()]
    frames = [h * w for t, h, w in images + videos for _ in range(t)]
    lengths = [len(s.ids) for s in samples]
    expected = dict(
        tokens=sum(lengths),
        trained_tokens=int(sum(s.loss_mask.sum() for s in samples)),
        token_pairs=sum(n**2 for n in lengths),
        patches=sum(frames),
        patch_pairs=sum(n**2 for n in frames),
        images=len(images),
        video_frames=sum(t for t, _, _ in videos),
    )
    assert expected["images"] and expected["video_frames"]
    for rows, found in alone.items():
        amounts = dataclasses.asdict(found["amounts"])
        slots, count = amounts.pop("slots"), amounts.pop("rows")
        assert amounts == expected, rows
        assert slots > expected["tokens"]
        assert count == (len(samples) if rows == "padded" else MICROBATCHES)


def test_experts_are_chosen_as_transformers_chooses_them(alone, samples, moe_folder):
    """For each sample alone, which has no padding."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(moe_folder, attn_implementation="eager")
    config, text = model.config, model.config.text_config
    expected = 0
    for sample in samples:
        ids = sample.ids[None]
        kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        with torch.no_grad():
            logits = model(
                input_ids=ids, mm_token_type_ids=kinds, **sample.pixels, output_router_logits=True
            ).router_logits
        chosen = torch.stack([layer.topk(text.num_experts_per_tok).indices for layer in logits])  # [layers, tokens, k]
        expected = expected + torch.nn.functional.one_hot(chosen, text.num_experts).sum((1, 2))
    for rows, found in alone.items():
        assert torch.equal(found["counts"], expected), rows


def test_however_it_is_split(alone, moe_folder, tmp_path):
    """Ranks that see the same tokens count them once, those that see others add up."""
    run_ranks("tests.training.metrics.metering_on_ranks", 2, tmp_path / "found", moe_folder)
    split, expected = torch.load(tmp_path / "found", weights_only=False), alone["packed"]
    assert split.keys() == set(NAMES)
    for name, found in split.items():
        # Segments are padded to what the split needs.
        assert dataclasses.replace(found["amounts"], slots=0) == dataclasses.replace(expected["amounts"], slots=0), name
        assert torch.equal(found["counts"], expected["counts"]), name
        ours, theirs = found["figures"], expected["figures"]
        assert ours.keys() == theirs.keys()
        for figure in ("tokens", "images", "video_frames", "trained_tokens", "expert_load_max", "expert_load_mean"):
            assert ours[figure] == theirs[figure], (name, figure)
        assert ours["load_balancing_loss"] == pytest.approx(theirs["load_balancing_loss"], rel=1e-5), name


def test_loads_and_losses_are_what_they_say(alone):
    counts, figures = alone["packed"]["counts"].double(), alone["packed"]["figures"]
    loads = counts.amax(1) / counts.mean(1)
    assert 1 < loads.mean() < loads.max()
    assert figures["expert_load_max"] == pytest.approx(loads.max().item(), rel=0.5)  # of another step
    # 1 where experts are chosen evenly, and 1.09 here; a sum that is not divided by layers or ranks is twice that.
    assert figures["load_balancing_loss"] == pytest.approx(1, rel=0.3)
    assert alone["recomputed"]["figures"]["load_balancing_loss"] == pytest.approx(figures["load_balancing_loss"])
