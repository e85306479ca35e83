"""The tiny checkpoint and its processor: every component of a released Qwen3-VL."""

import json
from math import isqrt

from qwen3vl_bridge.registry import family_of
from qwen3vl_bridge.testing.digits import conversation
from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which digit is this?<|im_end|>\n"


@pytest.fixture(scope="module")
def processor(untied_folder):
    return AutoProcessor.from_pretrained(untied_folder)


def test_tiny_qwen3_vl_checkpoint_has_every_component_of_released_models(untied_folder):
    model, loading = Qwen3VLForConditionalGeneration.from_pretrained(untied_folder, output_loading_info=True)
    assert not any(loading.values())
    text, vision = model.config.text_config, model.config.vision_config
    assert len(model.model.visual.deepstack_merger_list) == 3 == len(set(vision.deepstack_visual_indexes))
    assert vision.depth >= 4
    assert max(vision.deepstack_visual_indexes) < vision.depth - 1  # the last block feeds the merger
    assert isqrt(vision.num_position_embeddings) ** 2 == vision.num_position_embeddings
    assert (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size) == (16, 2, 2)
    assert vision.out_hidden_size == text.hidden_size
    assert 1 < text.num_key_value_heads < text.num_attention_heads
    assert text.rope_parameters["mrope_interleaved"]
    assert sum(text.rope_parameters["mrope_section"]) == text.head_dim // 2
    attention = model.model.language_model.layers[0].self_attn
    assert attention.q_norm.weight.shape == attention.k_norm.weight.shape == (text.head_dim,)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is not model.model.language_model.embed_tokens.weight


def test_tiny_checkpoint_norms_and_biases_are_not_constant(untied_folder):
    for name, tensor in load_file(untied_folder / "model.safetensors").items():
        assert tensor.unique().numel() > 1, name


def test_tiny_checkpoint_same_seed_gives_same_files(untied_folder, tmp_path):
    state = torch.get_rng_state()
    again, other = make_checkpoint(tmp_path / "again", seed=1), make_checkpoint(tmp_path / "other", seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    for path in untied_folder.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    assert (other / "model.safetensors").read_bytes() != (untied_folder / "model.safetensors").read_bytes()
    assert (other / "tokenizer.json").read_bytes() == (untied_folder / "tokenizer.json").read_bytes()


def test_tiny_qwen3_5_checkpoint_has_every_component_of_released_models(tmp_path):
    folder = make_checkpoint(tmp_path, family="qwen3_5")
    model, loading = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration" and not any(loading.values())
    text, tokenizer = model.config.text_config, AutoProcessor.from_pretrained(folder).tokenizer
    assert text.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert 1 < text.linear_num_key_heads < text.linear_num_value_heads
    assert 8 * sum(text.rope_parameters["mrope_section"]) == text.head_dim
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    config = json.loads((folder / "config.json").read_text())
    family_of(config).check(config)
    with pytest.raises(ValueError, match="tied or moe only for qwen3_vl"):
        make_checkpoint(tmp_path, family="qwen3_5", moe=True)


# The processor


def test_config_token_ids_match_tokenizer(untied_folder, processor):
    tokenizer, config = processor.tokenizer, AutoConfig.from_pretrained(untied_folder)
    expected = {
        "<|endoftext|>": config.text_config.bos_token_id, "<|im_end|>": config.text_config.eos_token_id,
        "<|image_pad|>": config.image_token_id, "<|video_pad|>": config.video_token_id,
        "<|vision_start|>": config.vision_start_token_id, "<|vision_end|>": config.vision_end_token_id,
    }  # fmt: skip
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in expected} == expected
    assert (processor.image_token_id, processor.video_token_id) == (config.image_token_id, config.video_token_id)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert len(tokenizer) <= config.text_config.vocab_size
    generation = json.loads((untied_folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [expected["<|im_end|>"], expected["<|endoftext|>"]]
    assert generation["do_sample"] is False


def test_chat_template_renders_qwen_turns(processor):
    messages = conversation("7.png", "7")["messages"]
    answer = "<|im_start|>assistant\n7<|im_end|>\n"
    assert processor.apply_chat_template(messages) == PROMPT + answer
    assert processor.apply_chat_template(messages[:1], add_generation_prompt=True) == PROMPT + "<|im_start|>assistant\n"
    video = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "What?"}]},
    ]
    assert processor.apply_chat_template(video) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What?<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("message", "named"),
    [({"role": "robot", "content": "7"}, "role robot"), ({"role": "user", "content": [{"type": "smell"}]}, "smell")],
)
def test_chat_template_raises_if_role_or_content_is_unknown(processor, message, named):
    with pytest.raises(Exception, match=f"{named}, expected"):
        processor.apply_chat_template([message])


def test_processor_image_tokens_are_a_quarter_of_patches(processor):
    assert isinstance(processor, Qwen3VLProcessor)
    for size in ((8, 8), (70, 130), (2000, 1000)):
        inputs = processor(text=[PROMPT], images=[Image.new("RGB", size)], return_tensors="pt")
        patches = int(inputs["image_grid_thw"].prod())
        assert inputs["pixel_values"].shape == (patches, 3 * 2 * 16 * 16)
        assert int((inputs["input_ids"] == processor.image_token_id).sum()) * 4 == patches <= 256
