"""What is trained on under a template that writes thinking: answers, reasoning behind the last question, no more."""

import copy
from pathlib import Path

from qwen3vl_bridge.data import Conversation, DataError, Encoder
from qwen3vl_bridge.data.media.media_access import FrameList

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..conftest import picture

TEMPLATE = Path(__file__).with_name("thinking_template.jinja").read_text(encoding="utf-8")
END = "<|im_end|>"
EMPTY = "<think>\n\n</think>\n\n"
# Reasoning and answers are trimmed by the template; users may write whatever looks like its own words.
WORDS = ("seven", "é", "🙂", "\n", " ", "assistant\n", "Which digit is this?", "answer-0-marked", "reasoning-0-marked")
CONTROLS = ("<|im_start|>assistant\n", "<think>\n", "\n</think>\n\n", END, f"<|im_start|>assistant\n{EMPTY}")
answers = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)
asked = st.lists(st.sampled_from(WORDS + CONTROLS), max_size=4).map("".join)
# A question and what it shows. An answer: reasoning (None for none), whether it stands inside the content, text; and
# whether a tool is called first.
shown = st.sampled_from(["", "", "image", "video"])
turns = st.tuples(asked, shown, st.one_of(st.none(), answers), st.booleans(), answers, st.booleans())
conversations = st.tuples(st.one_of(st.none(), asked), st.lists(turns, min_size=1, max_size=3), st.booleans())
CALL = {"type": "function", "function": {"name": "look", "arguments": {"where": "left", "times": 2}}}
CALLED = (
    "<tool_call>\n<function=look>\n<parameter=where>\nleft\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
# Two pairs of frames, the times of their middles, and a picture's tokens for each.
FRAMES = "".join(f"<{time} seconds><|vision_start|>{'<|video_pad|>' * 4}<|vision_end|>" for time in ("0.2", "1.2"))
TOOLS = ({"type": "function", "function": {"name": "look", "description": "Looks."}},)


@pytest.fixture(scope="module")
def thinking(processor):
    other = copy.copy(processor)
    other.chat_template = TEMPLATE
    return other


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return picture(tmp_path_factory.mktemp("thinking") / "7.png", 64, 64)


def trained(processor, sample) -> str:
    return processor.tokenizer.decode(sample.labels[sample.loss_mask.bool()])


def answer(reasoning, inside, text) -> dict:
    if reasoning is not None and inside:
        return {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{text}"}
    beside = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": "assistant", "content": text, **beside}


def made(case, image) -> tuple[Conversation, list[tuple[str, str]]]:
    """A conversation, and the reasoning and text of each of its answers as the template has them."""
    system, rounds, with_tools = case
    messages, expected, images, videos = [], [], [], []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for number, (question, shows, reasoning, inside, text, calls) in enumerate(rounds):
        # A question is never empty, and never looks like a tool's answer.
        parts = [{"type": "text", "text": f"{number}: {question}"}]
        if shows:
            parts.insert(0, {"type": shows, shows: ""})
            (images if shows == "image" else videos).append(image if shows == "image" else FrameList((image,) * 4, 2))
        messages.append({"role": "user", "content": parts})
        last = number == len(rounds) - 1
        thought = (reasoning or "").strip() if last else ""
        if calls and with_tools:
            messages.append({**answer(reasoning, False, text), "tool_calls": [CALL]})
            messages.append({"role": "tool", "content": f"{question}."})
            expected.append((thought, f"{text.strip()}\n\n{CALLED}" if text.strip() else CALLED))
        messages.append(answer(reasoning, inside, text))
        expected.append((thought, text.strip()))
    tools = TOOLS if with_tools else None
    return Conversation("train.jsonl:1", tuple(messages), tuple(images), tuple(videos), tools), expected


def block(thought: str, empty: str) -> str:
    return f"{thought}\n</think>\n\n" if thought else empty


def encoder_sees(sample, conversation) -> bool:
    """Whether a sample has the pixels of each picture and each video."""
    grids = [grid for grid in (sample.image_grid_thw, sample.video_grid_thw) if grid is not None]
    return sum(map(len, grids)) == len(conversation.images) + len(conversation.videos)


@given(conversations)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_and_their_reasoning_alone_are_trained_on(thinking, image, case):
    conversation, expected = made(case, image)
    sample = Encoder(thinking)(conversation)
    assert trained(thinking, sample) == "".join(block(thought, "") + text + END for thought, text in expected)
    last = Encoder(thinking, "last")(conversation)
    thought, text = expected[-1]
    assert trained(thinking, last) == block(thought, "") + text + END
    # They are the ends of their turns, and no words alike elsewhere: what is before the last is the prompt for it.
    begin = int(last.loss_mask.argmax()) + 1
    asks = thinking.apply_chat_template(
        copy.deepcopy(list(conversation.messages[:-1])), tools=conversation.tools, tokenize=False,
        add_generation_prompt=True, enable_thinking=bool(thought),
    )  # fmt: skip
    before = thinking.tokenizer.decode(last.input_ids[:begin])
    before = before.replace("<|image_pad|>" * 4, "<|image_pad|>").replace(FRAMES, "<|video_pad|>")
    # transformers 5 leaves the template's start and end of vision around a video's frames.
    assert before == asks.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    assert encoder_sees(last, conversation)


@given(conversations)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_empty_thinking_is_trained_on_where_asked(thinking, image, case):
    conversation, expected = made(case, image)
    sample = Encoder(thinking, "last", empty_thinking="train")(conversation)
    thought, text = expected[-1]
    assert trained(thinking, sample) == block(thought, "\n</think>\n\n") + text + END


ASK = {"role": "user", "content": "Which?"}
SEVEN = {"role": "assistant", "content": "Seven", "reasoning_content": "A bar."}
CONVERSATION = Conversation("train.jsonl:1", (ASK, SEVEN, ASK, {**SEVEN, "content": "Eight"}))


def test_by_hand(thinking):
    sample = Encoder(thinking)(CONVERSATION)
    text = thinking.tokenizer.decode(sample.input_ids)
    assert text == (
        "<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\nSeven<|im_end|>\n"
        "<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n<think>\nA bar.\n</think>\n\nEight<|im_end|>\n"
    )
    assert trained(thinking, sample) == "Seven<|im_end|>A bar.\n</think>\n\nEight<|im_end|>"


@pytest.mark.parametrize(("old", "new", "message"), [
    # Counts the letters of what is before, behind it.
    ("{%- if add_generation", "{{- messages[1].content | length -}}{%- if add_generation", "what follows the answer"),
    # Writes answers twice.
    ("        {{- text -}}", "        {{- text + text -}}", "writes the answer 2 times, expected once"),
    # Shouts.
    ("        {{- text -}}", "        {{- text | upper -}}", "writes the answer 0 times, expected once"),
    ("text = written(m.content) | trim -%}\n    {%- if m.role == 'system'",
     "text = written(m.content) | trim -%}{{- text | length -}}\n    {%- if m.role == 'system'",
     "what precedes the answer"),
    # Asks somebody else.
    ("{{- '<|im_start|>assistant\\n<think>\\n' -}}\n    {%- if enable",
     "{{- '<|im_start|>model\\n<think>\\n' -}}\n    {%- if enable",
     "the prompt to generate it, with enable_thinking False"),
    ("{%- if add_generation_prompt -%}", "{%- if false -%}", "expected the messages as without it"),
    ("{{- called(call) -}}\n        {%- endfor -%}\n        {{- '<|im_end|>\\n' -}}",
     "{%- endfor -%}\n        {{- '\\n' -}}", "expected a token that closes the turn"),
])  # fmt: skip
def test_templates_that_cannot_be_mapped_are_refused(thinking, old, new, message):
    other = copy.copy(thinking)
    assert TEMPLATE.count(old) == 1
    other.chat_template = TEMPLATE.replace(old, new)
    with pytest.raises(DataError, match=f"^train.jsonl:1: message [24]: .*{message}"):
        Encoder(other)(CONVERSATION)


def test_empty_thinking_without_thinking_is_refused(processor, thinking):
    with pytest.raises(ValueError, match="empty_thinking is 'train', but the chat template reads no 'reasoning_cont"):
        Encoder(processor, empty_thinking="train")
    with pytest.raises(ValueError, match="empty_thinking"):
        Encoder(thinking, empty_thinking="all")
    assert Encoder(thinking).fingerprint != Encoder(thinking, empty_thinking="train").fingerprint
