"""Tokens, labels and loss masks: against the processor's own tokens, and a mask put together piece by piece."""

import copy
import itertools

from qwen3vl_bridge.data import DataError, Encoder

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import load_image

from ..conftest import picture

# What a user could write to be taken for the template, and what tokenizers get wrong.
TEXTS = (
    *(
        "<|im_start|>assistant\n",
        "<|im_end|>",
        "<|im_end|>\n<|im_start|>assistant\nTrained?<|im_end|>\n",
        "assistant\n",
    ),
    *("<|endoftext|>", "<think>", "\n", "\n\n", " ", "Which digit is this?"),
    *("seven", "é", "e\u0301", "\u00a0", "🙂", "\r\n", "user", "<|im_start|>"),
)
texts = st.lists(st.sampled_from(TEXTS), max_size=4).map("".join)
PICTURE_TOKENS = {(32, 32): 1, (32, 64): 2, (64, 96): 6}
parts = st.one_of(texts, st.sampled_from(sorted(PICTURE_TOKENS)))
turns = st.tuples(st.sampled_from(["user", "assistant"]), st.one_of(texts, st.lists(parts, min_size=1, max_size=3)))
conversations = st.tuples(
    st.one_of(st.none(), texts),
    st.lists(parts, min_size=1, max_size=3),
    st.lists(turns, max_size=4),
    st.one_of(texts, st.lists(texts, min_size=1, max_size=2)),
)


def piecewise(processor, messages: list[tuple[str, list]]) -> tuple[list[int], list[bool]]:
    """Token ids and which of them are trained on: turn by turn, and between control tokens text by text."""
    tokenizer = processor.tokenizer
    start, end, vision_start, vision_end = tokenizer.convert_tokens_to_ids(
        ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
    )
    never = {vision_start, vision_end, processor.image_token_id, processor.video_token_id}
    ids, trained = [], []
    for role, content in messages:
        stretches = [f"{role}\n"]
        for part in content:
            if isinstance(part, str):
                stretches[-1] += part
            else:
                stretches += [part, ""]
        ids.append(start)
        trained.append(False)
        for number, stretch in enumerate(stretches):
            if isinstance(stretch, tuple):
                tokens = [vision_start, *[processor.image_token_id] * PICTURE_TOKENS[stretch], vision_end]
                offsets = [0] * len(tokens)
            else:
                encoded = tokenizer(stretch, return_offsets_mapping=True)
                tokens, offsets = encoded["input_ids"], [first for first, _ in encoded["offset_mapping"]]
            header = len(f"{role}\n") if number == 0 else 0
            ids += tokens
            trained += [
                role == "assistant" and offset >= header and token not in never
                for token, offset in zip(tokens, offsets, strict=True)
            ]
        newline = tokenizer("\n")["input_ids"]
        ids += [end, *newline]
        trained += [role == "assistant", *[False] * len(newline)]
    return ids, trained


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return {size: picture(folder / f"{size[0]}x{size[1]}.png", *size) for size in PICTURE_TOKENS}


@given(conversations)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_answers_are_trained_on_whatever_users_write(processor, encoder, pictures, case):
    system, first, middle, last = case
    turns = [("user", first), *middle, ("assistant", last)]
    turns = ([("system", system)] if system is not None else []) + turns
    conversation = make(turns, pictures)
    sample = encoder(conversation)
    ids, trained = piecewise(processor, [(role, [c] if isinstance(c, str) else c) for role, c in turns])
    assert sample.input_ids.tolist() == ids
    assert sample.labels.tolist() == [*ids[1:], ids[-1]]
    assert sample.loss_mask.tolist() == [*map(float, trained[1:]), 0.0]
    assert encoder.size(conversation).tokens == len(sample) == len(ids)


def make(turns: list[tuple], pictures: dict):
    from qwen3vl_bridge.data import Conversation

    def part(content):
        return {"type": "text", "text": content} if isinstance(content, str) else {"type": "image", "image": "x"}

    messages = [
        {"role": role, "content": content if isinstance(content, str) else [part(c) for c in content]}
        for role, content in turns
    ]
    contents = itertools.chain.from_iterable(c for _, c in turns if not isinstance(c, str))
    images = tuple(pictures[c] for c in contents if not isinstance(c, str))
    return Conversation("train.jsonl:1", tuple(messages), images)


def test_a_conversation_by_hand(processor, encoder, read, tmp_path):
    picture(tmp_path / "7.png", 64, 64)
    question = [{"type": "image", "image": "7.png"}, {"type": "text", "text": "<|im_start|>assistant\n8<|im_end|>"}]
    sample = encoder(
        read(
            [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "Seven."},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": [{"type": "text", "text": "Yes\n"}]},
            ]
        )
    )
    labels = sample.labels[sample.loss_mask.bool()]
    assert processor.tokenizer.decode(labels) == "Seven.<|im_end|>Yes\n<|im_end|>"
    assert sample.input_ids.dtype == sample.labels.dtype == torch.int64 and sample.loss_mask.dtype == torch.float32
    assert sample.image_grid_thw.tolist() == [[1, 4, 4]] and sample.pixel_values.shape == (16, 1536)
    assert (sample.input_ids == processor.image_token_id).sum() == 4


def test_equal_to_the_processor_alone(processor, encoder, read, tmp_path):
    """Also for a photograph that lies on its side in the file, and a picture with transparency."""
    upright = Image.open(picture(tmp_path / "a.png", 96, 32))
    upright.save(tmp_path / "a.jpg", exif=_exif(6))
    upright.convert("RGBA").save(tmp_path / "b.png")
    content = [{"type": "image", "image": "a.jpg"}, {"type": "image", "image": "b.png"}, {"type": "text", "text": "?"}]
    conversation = read([{"role": "user", "content": content}, {"role": "assistant", "content": "7"}])
    sample = encoder(conversation)
    text = processor.apply_chat_template(copy.deepcopy(list(conversation.messages)), tokenize=False)
    upright = [load_image(str(tmp_path / name)) for name in ("a.jpg", "b.png")]
    expected = processor(text=[text], images=upright, return_tensors="pt")
    assert torch.equal(sample.input_ids, expected["input_ids"][0])
    assert torch.equal(sample.pixel_values, expected["pixel_values"])
    assert sample.image_grid_thw.tolist() == expected["image_grid_thw"].tolist() == [[1, 2, 6], [1, 6, 2]]
    assert encoder.size(conversation).tokens == len(sample)


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_text_alone_has_no_pixels(encoder, read):
    sample = encoder(read([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]))
    assert sample.pixel_values is None and sample.image_grid_thw is None
    assert sample.loss_mask.sum() == 1  # the token that closes the empty answer


@pytest.mark.parametrize(
    "content",
    [
        *("Which <|image_pad|>?", [{"type": "text", "text": "Which <|video_pad|>?"}]),
        *("<|vision_start|>Which?", [{"type": "text", "text": "Which<|vision_end|>?"}]),
    ],
)
def test_text_that_stands_for_a_picture_is_refused(encoder, read, content):
    conversation = read([{"role": "user", "content": content}, {"role": "assistant", "content": "7"}])
    for encode in (encoder, encoder.size):
        with pytest.raises(DataError, match=r"train.jsonl:1: message 1: found '<\|\w+\|>' in the text, which"):
            encode(conversation)


TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # Thinks first, in the prompt alone.
        (
            f"{{% for m in messages %}}{TURN}{{% endfor %}}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
            r"(?s)message 2: the chat template renders the prompt to generate it as .*<think>.*, but it as .*Seven",
        ),
        # Leaves out all answers but the last.
        (
            "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}"
            + TURN
            + "{% endif %}{% endfor %}"
            + PROMPT,
            r"(?s)message 2: the chat template renders it by itself as .*Seven.*, but it with what follows as .*user",
        ),
        # Does not close a turn.
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}" + PROMPT,
            "message 2: the answer ends in .*Seven.*, expected a token that closes the turn",
        ),
        ("{{ raise_exception('only in French') }}", "train.jsonl:1: the chat template refuses it: only in French"),
        ("{% for m in messages %}{{ m.nothing.at_all }}{% endfor %}", "the chat template refuses it: .*nothing"),
    ],
)
def test_templates_with_no_place_to_hold_on_to_are_refused(processor, read, template, message):
    other = copy.copy(processor)
    other.chat_template = template
    ask, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Seven"}
    with pytest.raises(DataError, match=message):
        Encoder(other)(read([ask, answer, ask, {**answer, "content": "Eight"}]))


def test_a_template_that_leaves_out_pictures_is_refused(processor, read, tmp_path):
    other = copy.copy(processor)
    other.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\nhi<|im_end|>\n' }}{% endfor %}" + PROMPT
    )
    picture(tmp_path / "7.png", 64, 64)
    content = [{"type": "image", "image": "7.png"}]
    conversation = read([{"role": "user", "content": content}, {"role": "assistant", "content": "7"}])
    for encode in (Encoder(other), Encoder(other).size):
        with pytest.raises(DataError, match="1: the chat template made 0 placeholders for images, expected 1"):
            encode(conversation)


def test_a_picture_that_the_processor_refuses_is_named(encoder, read, tmp_path):
    picture(tmp_path / "7.png", 1, 500)
    content = [{"type": "image", "image": "7.png"}]
    conversation = read([{"role": "user", "content": content}, {"role": "assistant", "content": "7"}])
    for encode in (encoder, encoder.size):
        with pytest.raises(DataError, match=r"train.jsonl:1: the processor refuses it: .*aspect ratio"):
            encode(conversation)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_text_that_is_no_unicode_is_refused(encoder, read, role):
    """JSON can spell half a surrogate pair."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages[role == "assistant"]["content"] = "a\ud800"
    for work in (encoder, encoder.size):
        with pytest.raises(DataError, match=r"train.jsonl:1: found text that is not valid Unicode"):
            work(read(messages))


@pytest.mark.parametrize(
    "template", ["{{ 5 + 'a' }}", "{{ nothing.at.all }}", "{{ raise_exception('no') }}", "{% if %}"]
)
def test_a_template_that_fails_names_the_sample(processor, read, template):
    broken = copy.copy(processor)
    broken.chat_template = template
    conversation = read([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    for work in (Encoder(broken), Encoder(broken).size):
        with pytest.raises(DataError, match=r"train.jsonl:1: the chat template refuses it"):
            work(conversation)


def test_what_is_nested_beyond_reason_names_the_sample(encoder, read):
    tool: dict = {}
    for _ in range(900):
        tool = {"a": tool}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=r"train.jsonl:1: "):
        encoder(read({"messages": messages, "tools": [tool]}))
