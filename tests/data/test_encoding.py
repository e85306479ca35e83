"""Test tokens, labels and loss masks against the processor and a mask built piece by piece."""

import copy
import functools
import itertools

from qwen3vl_bridge.data import Conversation, DataError, Encoder

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import load_image

from tests.data.conftest import WHITE, assert_refused, dialogue, picture, trained, with_template

# What a user could write to be taken for the template, and what tokenizers get wrong.
TEXTS = (
    "<|im_start|>assistant\n", "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\nTrained?<|im_end|>\n", "assistant\n",
    "<|endoftext|>", "<think>", "\n", "\n\n", " ", "Which digit is this?", "seven", "é", "e\u0301", "\u00a0", "🙂",
    "\r\n", "user", "<|im_start|>",
)  # fmt: skip
texts = st.lists(st.sampled_from(TEXTS), max_size=4).map("".join)
PICTURE_TOKENS = {(32, 32): 1, (32, 64): 2, (64, 96): 6}
parts = st.one_of(texts, st.sampled_from(sorted(PICTURE_TOKENS)))
turns = st.tuples(st.sampled_from(["user", "assistant"]), st.one_of(texts, st.lists(parts, min_size=1, max_size=3)))
conversations = st.tuples(
    st.one_of(st.none(), texts), st.lists(parts, min_size=1, max_size=3), st.lists(turns, max_size=4),
    st.one_of(texts, st.lists(texts, min_size=1, max_size=2)),
)  # fmt: skip


def piecewise(processor, messages: list[tuple[str, list]]) -> tuple[list[int], list[bool]]:
    """Return token ids, and which of them are trained on, built turn by turn."""
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
def test_encoder_trains_only_on_assistant_answers(processor, encoder, pictures, case):
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
    def part(content):
        return {"type": "text", "text": content} if isinstance(content, str) else {"type": "image", "image": "x"}

    messages = [
        {"role": role, "content": content if isinstance(content, str) else [part(c) for c in content]}
        for role, content in turns
    ]
    contents = itertools.chain.from_iterable(c for _, c in turns if not isinstance(c, str))
    images = tuple(pictures[c] for c in contents if not isinstance(c, str))
    return Conversation("train.jsonl:1", tuple(messages), images)


def test_encoder_two_turn_conversation_with_image_has_expected_tensors(processor, encoder, read, tmp_path):
    picture(tmp_path / "7.png", 64, 64)
    question = [{"type": "image", "image": "7.png"}, {"type": "text", "text": "<|im_start|>assistant\n8<|im_end|>"}]
    sample = encoder(read(dialogue(question, "Seven.", "Sure?", [{"type": "text", "text": "Yes\n"}])))
    assert trained(processor, sample) == "Seven.<|im_end|>Yes\n<|im_end|>"
    assert sample.input_ids.dtype == sample.labels.dtype == torch.int64 and sample.loss_mask.dtype == torch.float32
    assert sample.image_grid_thw.tolist() == [[1, 4, 4]] and sample.pixel_values.shape == (16, 1536)
    assert (sample.input_ids == processor.image_token_id).sum() == 4


def test_encoder_tokens_and_pixels_match_transformers_processor(processor, encoder, read, tmp_path):
    upright = Image.open(picture(tmp_path / "a.png", 96, 32))
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.save(tmp_path / "a.jpg", exif=exif)
    upright.convert("RGBA").save(tmp_path / "b.png")
    content = [{"type": "image", "image": "a.jpg"}, {"type": "image", "image": "b.png"}, {"type": "text", "text": "?"}]
    conversation = read(dialogue(content, "7"))
    sample = encoder(conversation)
    text = processor.apply_chat_template(copy.deepcopy(list(conversation.messages)), tokenize=False)
    upright = [load_image(str(tmp_path / name)) for name in ("a.jpg", "b.png")]
    expected = processor(text=[text], images=upright, return_tensors="pt")
    assert torch.equal(sample.input_ids, expected["input_ids"][0])
    assert torch.equal(sample.pixel_values, expected["pixel_values"])
    assert sample.image_grid_thw.tolist() == expected["image_grid_thw"].tolist() == [[1, 2, 6], [1, 6, 2]]
    assert encoder.size(conversation).tokens == len(sample)


def test_encoder_text_only_sample_has_no_pixel_values(encoder, read):
    sample = encoder(read(dialogue("Hi", "")))
    assert sample.pixel_values is None and sample.image_grid_thw is None
    assert sample.loss_mask.sum() == 1  # the token that closes the empty answer


@pytest.mark.parametrize("in_part", [True, False])
@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
def test_encoder_raises_if_text_contains_vision_token(encoder, read, token, in_part):
    text = f"Which {token}?"
    conversation = read(dialogue([{"type": "text", "text": text}] if in_part else text, "7"))
    assert_refused(encoder, r"train.jsonl:1: message 1: found '<\|\w+\|>' in the text, which", conversation)


END = "<|im_end|>"
TEMPLATES = ("released_template", "released_thinking_template", "thinking_template")
# What tokenizers join with the newline before it, and what they do not.
starts = st.lists(st.sampled_from([*WHITE, " ", "\t", "\u00a0"]), max_size=3).map("".join)
spoken = st.tuples(starts, st.sampled_from(["", "Seven.", "7", "{", "é", "中文\n"])).map("".join)


@pytest.fixture(scope="module")
def joining_encoders(joining):
    found = {name: Encoder(with_template(joining, f"{name}.jinja")) for name in TEMPLATES}
    return found | {"train": Encoder(found["thinking_template"].processor, empty_thinking="train")}


def ids(processor, text: str) -> list[int]:
    return processor.tokenizer(text)["input_ids"]


def prompted(processor, messages, behind: str = "", **settings) -> list[int]:
    """Return the tokens of a prompt as at generation."""
    settings = {"tokenize": False, "add_generation_prompt": True, **settings}
    return ids(processor, processor.apply_chat_template(copy.deepcopy(list(messages)), **settings) + behind)


def check_last(processor, sample, prompt: list[int], answer: str) -> None:
    """Assert that a sample is the prompt and the answer, tokenized separately, and trains on the answer alone."""
    own = ids(processor, answer)
    assert sample.input_ids.tolist() == [*prompt, *own, *ids(processor, "\n")]
    assert sample.loss_mask.tolist() == [0] * (len(prompt) - 1) + [1] * len(own) + [0] * 2


@given(spoken, spoken, st.booleans(), st.sampled_from([*TEMPLATES, "train"]))
@settings(max_examples=300, deadline=None)
def test_encoder_tokenizes_last_answer_separately_from_prompt(joining_encoders, text, earlier, in_parts, name):
    encoder = joining_encoders[name]
    ask, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}
    if in_parts:
        answer["content"] = [{"type": "text", "text": text[:1]}, {"type": "text", "text": text[1:]}]
    before = (ask, {"role": "assistant", "content": earlier}, ask)
    conversation = Conversation("train.jsonl:1", (*before, answer), losses={1: False})
    sample, closed = encoder(conversation), "\n</think>\n\n"
    written, behind, settings = {
        "released_template": (text, "", {}),
        "released_thinking_template": (text.lstrip("\n"), closed, {}),  # it cannot be asked not to think
        "thinking_template": (text.strip(), "", {"enable_thinking": False}),
        "train": (closed + text.strip(), "", {"enable_thinking": True}),
    }[name]
    check_last(encoder.processor, sample, prompted(encoder.processor, before, behind, **settings), written + END)
    assert encoder.size(conversation).tokens == len(sample)


@given(st.lists(st.tuples(spoken, st.booleans()), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_encoder_tokenizes_each_answer_as_after_generation_prompt(joining_encoders, turns):
    encoder = joining_encoders["released_template"]
    tokenizer_ids = functools.partial(ids, encoder.processor)
    messages, losses, expected = [], {}, []
    for text, trains in turns:
        messages.append({"role": "user", "content": "Hi"})
        if trains:
            expected.append((prompted(encoder.processor, messages), tokenizer_ids(text + END)))
        losses[len(messages)] = trains
        messages.append({"role": "assistant", "content": text})
    conversation = Conversation("train.jsonl:1", tuple(messages), losses=losses)
    if not expected:
        return
    later = [prompt for prompt, _ in expected[1:]]
    if not all(then[: len(head + own)] == head + own for (head, own), then in zip(expected, later, strict=False)):
        assert_refused(
            encoder,
            r"^train.jsonl:1: (in the prompt of a later answer, )?the tokenizer joins the beginning of the answer ",
            conversation,
        )
        return
    sample = encoder(conversation)
    assert encoder.size(conversation).tokens == len(sample)
    mask = [0.0] * len(sample)
    for prompt, own in expected:
        assert sample.input_ids[: len(prompt + own)].tolist() == prompt + own
        mask[len(prompt) - 1 : len(prompt + own) - 1] = [1.0] * len(own)
    assert sample.loss_mask.tolist() == mask
    if not any(text[:1].isspace() and trains for text, trains in turns):
        text = encoder.processor.apply_chat_template(copy.deepcopy(messages), tokenize=False)
        assert sample.input_ids.tolist() == tokenizer_ids(text)


def test_encoder_prompt_ending_in_space_does_not_merge_with_answer(processor):
    ask, answer = dialogue("Hi", "the")
    turns = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>\n' }}{% endfor %}"
    other = with_template(processor, turns + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    assert len(ids(processor, ": the")) < len(ids(processor, ": ")) + len(ids(processor, "the"))
    encoder, conversation = Encoder(other), Conversation("train.jsonl:1", (ask, answer))
    sample = encoder(conversation)
    check_last(other, sample, prompted(other, [ask]), f"the{END}")
    assert encoder.size(conversation).tokens == len(sample)


def test_encoder_raises_if_earlier_trained_answer_has_leading_newlines(joining_encoders):
    encoder = joining_encoders["released_template"]
    ask, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\n\nSeven."}
    messages = (ask, {**answer, "content": "Six."}, ask, answer, ask, {**answer, "content": "Eight."})
    with pytest.raises(DataError, match=r"the answer '\\n\\nSeven\.<\|im_end\|>.*answers='last', or exclude this"):
        encoder(Conversation("train.jsonl:1", messages))
    for remedied in (
        Encoder(encoder.processor, "last")(Conversation("train.jsonl:1", messages)),
        encoder(Conversation("train.jsonl:1", messages, losses={1: False, 3: False})),
    ):
        check_last(encoder.processor, remedied, prompted(encoder.processor, messages[:-1]), f"Eight.{END}")
    sample = encoder(Conversation("train.jsonl:1", messages[:4]))
    assert trained(encoder.processor, sample) == f"Six.{END}\n\nSeven.{END}"


TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize(("template", "message"), [
    # Thinks first, in the prompt alone.
    (f"{{% for m in messages %}}{TURN}{{% endfor %}}"
     "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
     r"message 2: the chat template renders the prompt to generate it, .*<think>.*, but differently in the full conv"),
    # Leaves out all answers but the last.
    ("{% for m in messages %}{% if m.role != 'assistant' or loop.last %}" f"{TURN}{{% endif %}}{{% endfor %}}{PROMPT}",
     "message 2: the chat template writes the answer 0 times, expected once"),
    # Does not close a turn.
    ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}" + PROMPT,
     "message 2: the chat template writes .*im_start.* after the answer, expected a special token"),
])  # fmt: skip
def test_encoder_raises_if_answers_cannot_be_located_in_rendered_template(processor, read, template, message):
    with pytest.raises(DataError, match=message):
        Encoder(with_template(processor, template))(read(dialogue("Hi", "Seven", "Hi", "Eight")))


def test_encoder_raises_if_template_drops_images(processor, read, tmp_path):
    other = with_template(processor, f"{{% for m in messages if m.content is string %}}{TURN}{{% endfor %}}{PROMPT}")
    picture(tmp_path / "7.png", 64, 64)
    conversation = read(dialogue([{"type": "image", "image": "7.png"}], "7"))
    assert_refused(Encoder(other), "1: the chat template made 0 placeholders for images, expected 1", conversation)


def test_encoder_error_names_record_if_processor_rejects_image(encoder, read, tmp_path):
    picture(tmp_path / "7.png", 1, 500)
    conversation = read(dialogue([{"type": "image", "image": "7.png"}], "7"))
    assert_refused(encoder, r"train.jsonl:1: the processor rejects an image or video: .*aspect ratio", conversation)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_encoder_raises_if_text_is_not_valid_unicode(encoder, read, role):
    messages = dialogue("a", "b")
    messages[role == "assistant"]["content"] = "a\ud800"
    assert_refused(encoder, r"train.jsonl:1: found text that is not valid Unicode", read(messages))


@pytest.mark.parametrize("template", ["{{ 5 + 'a' }}", "{{ nothing.at }}", "{{ raise_exception('no') }}", "{% if %}"])
def test_encoder_error_names_record_if_template_fails(processor, read, template):
    broken, conversation = with_template(processor, template), read(dialogue("a", "b"))
    assert_refused(Encoder(broken), r"train.jsonl:1: the chat template fails", conversation)


def test_encoder_error_names_record_if_tool_is_deeply_nested(encoder, read):
    tool: dict = {}
    for _ in range(900):
        tool = {"a": tool}
    with pytest.raises(DataError, match=r"train.jsonl:1: "):
        encoder(read({"messages": dialogue("a", "b"), "tools": [tool]}))
