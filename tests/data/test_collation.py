"""Test that packed and padded batches equal the batches of their single samples."""

from dataclasses import replace
from types import SimpleNamespace

from qwen3vl_bridge.data import DataError, JsonLines, VisionSettings, pad_token_id, read_vision_settings

import pytest
import torch


@pytest.fixture(scope="module")
def samples(train_file, encoder):
    file = JsonLines(train_file)
    return [encoder(file[index]) for index in range(len(file))]


def groups(samples, size):
    return [samples[start : start + size] for start in range(0, len(samples), size)]


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("packed", [True, False])
def test_collator_batch_of_samples_equals_batches_of_single_samples(samples, collator, packed, multiple):
    collator = replace(collator, seq_length=512, multiple=multiple)
    for group in groups(samples, 4):
        batch = collator.collate_packed(group) if packed else collator.collate_padded(group)
        assert batch.input_ids.shape == ((1, 512) if packed else (4, 512))
        assert batch.sample_ids == tuple(sample.sample_id for sample in group)
        real, patches, rows = torch.zeros(batch.layout.total, dtype=torch.bool), 0, 0
        for sample, start in zip(group, batch.layout.cu_seqlens_padded.tolist(), strict=False):
            assert start % multiple == 0
            alone = replace(collator, seq_length=len(sample), multiple=1).collate_padded([sample])
            at = slice(start, start + len(sample))
            real[at] = True
            for name in ("input_ids", "labels", "loss_mask"):
                assert torch.equal(getattr(batch, name).flatten()[at], getattr(alone, name).flatten())
                assert torch.equal(getattr(alone, name).flatten(), getattr(sample, name))
            assert torch.equal(batch.position_ids.flatten(1)[:, at], alone.position_ids.flatten(1))
            slots = torch.where(alone.vision_slot < 0, -1, alone.vision_slot + rows)
            assert torch.equal(batch.vision_slot[at], slots)
            assert ((slots >= 0) == (sample.input_ids == collator.vision.image_token_id)).all()
            if alone.vision is None:
                continue
            held = slice(patches, patches + len(alone.vision.pixel_values))
            for name in ("pixel_values", "position_ids"):
                assert torch.equal(getattr(batch.vision, name)[held], getattr(alone.vision, name))
            for name in ("interpolation_index", "interpolation_weight"):
                assert torch.equal(getattr(batch.vision, name)[:, held], getattr(alone.vision, name))
            assert torch.equal(alone.vision.pixel_values, sample.pixel_values)
            patches, rows = held.stop, rows + len(alone.vision.pixel_values) // 4
        if batch.vision is not None:
            assert sum(batch.vision.lengths) == len(batch.vision.pixel_values) == patches
        assert torch.equal(batch.layout.padding_mask(), ~real)
        assert (batch.input_ids.flatten()[~real] == collator.pad_id).all()
        assert not batch.loss_mask.flatten()[~real].any() and (batch.vision_slot[~real] == -1).all()


def test_collator_pixels_have_requested_dtype(samples, collator):
    collator = replace(collator, seq_length=512, pixel_dtype=torch.bfloat16)
    with_picture = next(sample for sample in samples if sample.pixel_values is not None)
    batch = collator.collate_packed([with_picture])
    assert batch.vision.pixel_values.dtype == torch.bfloat16
    assert torch.equal(batch.vision.pixel_values, with_picture.pixel_values.bfloat16())
    assert batch.vision.interpolation_weight.dtype == torch.float32


def test_collator_raises_if_sample_is_too_long(samples, collator):
    long = max(samples, key=len)
    with pytest.raises(ValueError, match=r"1 segments, padded to multiples of 1, have \d+ tokens: expected at most 8"):
        replace(collator, seq_length=8).collate_packed([long])
    with pytest.raises(ValueError, match=rf"segment 0: {len(long)} tokens do not fit a padded length of 8"):
        replace(collator, seq_length=8).collate_padded([long])


@pytest.mark.parametrize(("seq_length", "multiple"), [(0, 1), (10, 4), (8, 0)])
def test_collator_raises_if_seq_length_is_no_multiple_of_padding_multiple(collator, seq_length, multiple):
    with pytest.raises(ValueError, match=f"seq_length is {seq_length}, expected a multiple of {multiple}"):
        replace(collator, seq_length=seq_length, multiple=multiple)


def test_pad_token_id_falls_back_to_eos_token_id(processor):
    assert processor.tokenizer.decode([pad_token_id(processor.tokenizer)]) == "<|endoftext|>"
    assert pad_token_id(SimpleNamespace(pad_token_id=0, eos_token_id=5)) == 0
    assert pad_token_id(SimpleNamespace(pad_token_id=None, eos_token_id=5)) == 5
    with pytest.raises(DataError, match="pad_token and eos_token are not set"):
        pad_token_id(SimpleNamespace(pad_token_id=None, eos_token_id=None))


@pytest.fixture
def checkpoint(processor, tmp_path):
    from qwen3vl_bridge.testing.tiny_checkpoint import make_config

    config = make_config(processor.tokenizer)
    config.save_pretrained(tmp_path)
    return config, tmp_path


def test_read_vision_settings_matches_config_and_processor(processor, checkpoint):
    settings = read_vision_settings(checkpoint[1], processor)
    assert settings == VisionSettings(processor.image_token_id, processor.video_token_id, 2, 36)


@pytest.mark.parametrize(("part", "name", "message"), [
    (None, "image_token_id", r"the image_token_id is \d+ in the processor, expected 7 as in config.json"),
    (None, "video_token_id", r"the video_token_id is \d+ in the processor, expected 7 as in config.json"),
    ("vision_config", "spatial_merge_size", "the merge size is 2 in the processor, expected 7 as in config.json"),
    ("vision_config", "patch_size", "the patch size is 16 in the processor, expected 7 as in config.json"),
    ("vision_config", "temporal_patch_size", "the temporal patch size is 2 in the processor, expected 7 as in"),
])  # fmt: skip
def test_read_vision_settings_raises_if_config_disagrees_with_processor(processor, checkpoint, part, name, message):
    config, folder = checkpoint
    setattr(getattr(config, part) if part else config, name, 7)
    config.save_pretrained(folder)
    with pytest.raises(DataError, match=message):
        read_vision_settings(folder, processor)


def test_read_vision_settings_raises_if_config_is_missing_or_text_only(processor, checkpoint, tmp_path):
    with pytest.raises(DataError, match="nowhere: found no config"):
        read_vision_settings(tmp_path / "nowhere", processor)
    checkpoint[0].text_config.save_pretrained(tmp_path / "text")
    with pytest.raises(DataError, match="text: the config is of a 'qwen3_vl_text' model, expected a vision"):
        read_vision_settings(tmp_path / "text", processor)
