"""Test that processors are checked, and that the tokenizer backend equals transformers."""

import copy

from qwen3vl_bridge.data import Conversation, DataError, Encoder, load_processor
from qwen3vl_bridge.data.encoding import check_processor, tokenize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from tests.data.test_encoding import TEXTS


def test_load_processor_raises_if_processor_or_chat_template_is_missing(processor, tmp_path):
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


def test_check_processor_raises_if_image_token_id_or_class_is_wrong(processor):
    other = copy.copy(processor)
    other.image_token_id = None
    with pytest.raises(DataError, match=r"here: image_token '<\|image_pad\|>' has the id None, expected the id"):
        check_processor(other, "here")
    other.image_token_id = processor.video_token_id
    with pytest.raises(DataError, match="has the id"):
        check_processor(other, "here")
    with pytest.raises(DataError, match="here: found Qwen2Tokenizer, expected a Qwen3VLProcessor with a fast"):
        check_processor(processor.tokenizer, "here")


SPECIAL = (
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</think>", "<|im_end", "|>", "<1.5 seconds>", "👩‍👩‍👧", "ﬁ",
    "中文",
)  # fmt: skip
texts = st.lists(st.sampled_from(TEXTS + SPECIAL) | st.text(max_size=8), min_size=1, max_size=12).map("".join)


def check(tokenizer, text: str) -> None:
    whole = copy.deepcopy(tokenizer)(text, return_offsets_mapping=True)  # a call leaves traces, which are not to help
    assert tokenize(copy.deepcopy(tokenizer), text).ids == whole["input_ids"]
    found = tokenize(copy.deepcopy(tokenizer), text, offsets=True)
    assert found.ids == whole["input_ids"] and found.offsets == whole["offset_mapping"]
    middle = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenize(copy.deepcopy(tokenizer), text, begins=False).ids == middle


@pytest.mark.slow
@given(texts.filter(lambda text: text.isprintable() or text.encode("utf-8", "ignore").decode() == text))
@settings(deadline=None, max_examples=300)
def test_tokenize_ids_and_offsets_match_transformers(processor, text):
    check(processor.tokenizer, text)


def shortened(tokenizer):
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=64)


def begun(tokenizer):
    end = tokenizer.eos_token
    template = TemplateProcessing(single=f"{end} $A {end}", special_tokens=[(end, tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template


def split(tokenizer):
    tokenizer.split_special_tokens = True


def split_before(tokenizer):
    tokenizer.backend_tokenizer.encode_special_tokens = True


@pytest.mark.parametrize("change", [shortened, begun, split, split_before])
def test_tokenize_matches_transformers_with_truncation_or_special_tokens(processor, change):
    tokenizer, text = copy.deepcopy(processor.tokenizer), "<|im_start|>user\nWhich digit?<|im_end|>\n"
    change(tokenizer)
    check(tokenizer, text)
    assert tokenize(tokenizer, text).ids == tokenizer(text)["input_ids"]


def test_encoder_adds_bos_token_of_tokenizer_only_once(processor):
    other, begin = copy.copy(processor), "<|endoftext|>"
    other.tokenizer = copy.deepcopy(processor.tokenizer)
    other.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, processor.tokenizer.pad_token_id)]
    )
    turns = ({"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}) * 2
    sample = Encoder(other)(Conversation("train.jsonl:1", turns))
    text = processor.apply_chat_template(list(turns), tokenize=False)
    assert sample.input_ids.tolist() == processor.tokenizer(begin + text)["input_ids"]
