"""Processors: loaded from a checkpoint, and refused where they are of another kind."""

import copy

from qwen3vl_bridge.data import DataError, load_processor
from qwen3vl_bridge.data.encoding import check_processor

import pytest


def test_processors_are_loaded_and_checked(processor, tmp_path):
    processor.save_pretrained(tmp_path / "whole")
    assert load_processor(tmp_path / "whole").image_token_id == processor.image_token_id
    with pytest.raises(DataError, match="nowhere: found no processor"):
        load_processor(tmp_path / "nowhere")
    processor.tokenizer.save_pretrained(tmp_path / "text")
    with pytest.raises(DataError, match="text: found no processor"):
        load_processor(tmp_path / "text")
    other = copy.copy(processor)
    other.chat_template = None
    other.save_pretrained(tmp_path / "silent")
    with pytest.raises(DataError, match="silent: found no chat template"):
        load_processor(tmp_path / "silent")


def test_a_processor_without_an_id_for_pictures_is_refused(processor):
    other = copy.copy(processor)
    other.image_token_id = None
    with pytest.raises(DataError, match=r"here: image_token '<\|image_pad\|>' has the id None, expected one"):
        check_processor(other, "here")
    other.image_token_id = processor.video_token_id
    with pytest.raises(DataError, match="has the id"):
        check_processor(other, "here")
    with pytest.raises(DataError, match="here: found Qwen2Tokenizer, expected a Qwen3VLProcessor with a fast"):
        check_processor(processor.tokenizer, "here")
