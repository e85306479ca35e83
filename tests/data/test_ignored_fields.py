"""Test that fields and text that a chat template drops raise an error."""

import pickle
import re
from pathlib import Path

from qwen3vl_bridge.data import Columns, Conversation, DataError, Encoder, open_source

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import conftest
from tests.data.conftest import assert_refused, picture, with_template, write
from tests.data.released import QWEN3_8

HERE = Path(__file__).parent
ASK, ANSWER = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "1"}}}]}
TOLD = {"role": "tool", "content": "A bar."}
TOOL = {"type": "function", "function": {"name": "look"}}
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
ROLES = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
# Names what it does not read, which no search of its text would tell from reading it.
NAMING = "{# no reasoning_content, tools or tool_calls #}" + PLAIN

# What a template may leave out: a conversation that has it, its tools, and where it is.
HAVE = {
    "tools": ((ASK, ANSWER), (TOOL,), ""),
    "a system prompt": ((SYSTEM, ASK, ANSWER), None, ": message 1"),
    "a system prompt after the first message": ((ASK, ANSWER, SYSTEM, ASK, ANSWER), None, ": message 3"),
    "reasoning_content": ((ASK, {**ANSWER, "reasoning_content": "A bar."}), None, ": message 2"),
    "tool_calls": ((ASK, CALL, ASK, ANSWER), None, ": message 2"),
    "a tool's answer": ((ASK, ANSWER, TOLD, ANSWER), None, ": message 3"),
}


@pytest.fixture(scope="module")
def encoder_with(processor):
    return lambda template, **settings: Encoder(with_template(processor, template), **settings)


def having(what: str) -> Conversation:
    messages, tools, _ = HAVE[what]
    return Conversation("train.jsonl:1", messages, tools=tools)


@pytest.mark.parametrize(("template", "left_out"), [
    (PLAIN, {"tools", "reasoning_content", "tool_calls"}), (NAMING, {"tools", "reasoning_content", "tool_calls"}),
    (ROLES, set(HAVE)), ("released_template.jinja", {"reasoning_content", "a system prompt after the first message"}),
    ("released_thinking_template.jinja", {"a system prompt after the first message"}),
    ("{{ tools | tojson if tools else '' }}" + PLAIN, {"reasoning_content", "tool_calls"}),
])  # fmt: skip
def test_check_fields_raises_if_template_does_not_render_a_field(encoder_with, template, left_out):
    encoder = encoder_with(template)
    for what in HAVE:
        for work in (encoder, encoder.size, pickle.loads(pickle.dumps(encoder)).size):
            if what in left_out:
                with pytest.raises(DataError, match=rf"^train.jsonl:1{HAVE[what][2]}: found {what}, which the chat"):
                    work(having(what))
            else:
                work(having(what))
    # Without it, or with an empty one, nothing is left out.
    bare = ({**SYSTEM, "content": " "}, ASK, {**ANSWER, "reasoning_content": "", "tool_calls": []})
    for messages in ((ASK, ANSWER), bare):
        encoder(Conversation("train.jsonl:1", messages, tools=()))


def test_check_fields_shows_error_that_template_raises(encoder_with):
    picky = PLAIN.replace(TURN, "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TURN)
    with pytest.raises(DataError, match="the chat template fails: no tools"):
        encoder_with(picky)(having("a tool's answer"))


def test_check_fields_accepts_tools_listed_in_columns_ignore(tmp_path, encoder_with):
    path = write(tmp_path / "train.jsonl", [{"messages": [ASK, ANSWER], "tools": [TOOL]}])
    encoder = encoder_with(PLAIN)
    with pytest.raises(DataError, match=r"found tools, .* leave them out \(columns.ignore=\[tools\]\), or give the"):
        encoder(open_source(path)[0])
    assert encoder(open_source(path, columns=Columns(ignore=("tools",)))[0]).loss_mask.any()


def test_check_fields_probes_template_only_once_per_field(encoder_with, monkeypatch):
    encoder, rendered = encoder_with("released_template.jinja"), []
    work = type(encoder.processor).apply_chat_template

    def counted(self, messages, **settings):
        rendered.append(messages)
        return work(self, messages, **settings)

    monkeypatch.setattr(type(encoder.processor), "apply_chat_template", counted)
    for _ in range(3):
        encoder.size(having("tools"))
    assert len(rendered) == 3 + 3
    encoder.size(Conversation("train.jsonl:2", (ASK, ANSWER)))
    assert len(rendered) == 3 + 3 + 1


END, BLOCK = "<|im_end|>", "<think>\n"
SPLITTING = ("released_thinking_template.jinja", "thinking_template.jinja")
STRAY = (
    "Put it inside <think> and </think> tags, then answer.", "Let me see. <think>\nTwo.\n</think>\n\n4",
    "Two.</think>4", "Close it:\n```\n</think>\n```\nDone.", "<think>\nA <think> in it.\n</think>\n\n4",
    "<think>\nTwo.\n</think>\n\nNo </think> here.", "</think>",
)  # fmt: skip


def said(message: dict, at: int = -1, **beside) -> Conversation:
    """Return a conversation with a message between other answers."""
    messages = [ASK, ANSWER, ASK, ANSWER]
    messages[at] = {**message, **beside}
    return Conversation("train.jsonl:1", tuple(messages), losses={1: at == 1, 3: at != 1})


def trained(encoder: Encoder, conversation: Conversation) -> str:
    sample = encoder(conversation)
    assert encoder.size(conversation).tokens == len(sample)
    return conftest.trained(encoder.processor, sample)


@pytest.mark.parametrize("template", SPLITTING)
@pytest.mark.parametrize(
    ("text", "at"), [*((text, 3) for text in STRAY), *((text, 1) for text in STRAY if " <think> in" not in text)]
)
def test_encoder_raises_if_template_drops_answer_text_at_think_tags(encoder_with, template, text, at):
    encoder, problem = (
        encoder_with(template),
        rf"^train.jsonl:1: message {at + 1}: .* writes only .*; put reasoning",
    )
    parts = [{"type": "text", "text": text[:7]}, {"type": "text", "text": text[7:]}]
    call = {"tool_calls": CALL["tool_calls"]}
    for content in (text, parts):
        for message in ({**ANSWER, "content": content}, {**ANSWER, "content": content, **call}):
            assert_refused(encoder, problem, said(message, at))
            whole = trained(encoder, said(message, at, reasoning_content=""))
            assert whole.startswith(text) and whole.endswith(END)
            assert ("<tool_call>" in whole) == ("tool_calls" in message)
    # An answer that is not trained on is what the template makes of it, for training as for generation.
    assert trained(encoder, Conversation("x", (ASK, {**ANSWER, "content": text}, ASK, ANSWER), losses={1: False}))


@pytest.mark.parametrize("text", [*STRAY, "<think>\nTwo.\n</think>\n\n4"])
def test_think_tags_stay_text_if_template_does_not_support_thinking(encoder_with, text):
    for at in (1, 3):
        assert trained(encoder_with("released_template.jinja"), said({**ANSWER, "content": text}, at)) == text + END


@pytest.mark.parametrize("template", SPLITTING)
@pytest.mark.parametrize("text", [
    "<think>\nTwo.\n</think>\n\n4", "<think>Two.</think>4", "\n<think>\n\nTwo.\n\n</think>\n4", "Two.\n</think>\n\n4",
])  # fmt: skip
def test_inline_thinking_is_encoded_like_reasoning_content(encoder_with, template, text):
    encoder, opened = encoder_with(template), "<think>" in text
    assert trained(encoder, said({**ANSWER, "content": text})) == f"Two.\n</think>\n\n4{END}"
    if opened:
        assert trained(encoder, said({**ANSWER, "content": text}, 1)) == f"4{END}"
        beside = {"content": "4", "reasoning_content": "Two."}
        for at in (1, 3):
            inside = encoder(said({**ANSWER, "content": text}, at))
            assert inside.input_ids.tolist() == encoder(said({**ANSWER, **beside}, at)).input_ids.tolist()


@pytest.mark.parametrize("template", SPLITTING)
def test_inline_thinking_in_answer_with_image_is_trained_on(encoder_with, tmp_path, template):
    image, seen = picture(tmp_path / "7.png", 32, 32), {"type": "image", "image": ""}
    for dropped in (False, True):
        first = {"type": "text", "text": "<think>\nTwo.\n</think>\n\n" + "No </think> here. " * dropped + "See "}
        content = [first, seen, {"type": "text", "text": " there."}]
        conversation = Conversation("train.jsonl:1", (ASK, {**ANSWER, "content": content}), (image,))
        if dropped:
            with pytest.raises(DataError, match="message 2: found 'No </think> here"):
                encoder_with(template)(conversation)
        else:
            assert trained(encoder_with(template), conversation) == f"Two.\n</think>\n\nSee  there.{END}"


def test_encoder_raises_if_template_reads_inline_thinking_as_text(encoder_with):
    for empty, before in (("prompt", ""), ("train", "\n</think>\n\n")):
        encoder = encoder_with(QWEN3_8, empty_thinking=empty)
        for at in (1, 3):
            with pytest.raises(DataError, match=rf"message {at + 1}: found '4' in the answer, .* 'reasoning_content'"):
                encoder(said({**ANSWER, "content": "<think>\n\n</think>\n\n4"}, at))
        with pytest.raises(DataError, match=r"message 4: found 'Two\.' in the answer, .*under 'reasoning_content'"):
            encoder(said({**ANSWER, "content": "<think>\nTwo.\n</think>\n\n4"}))
        for text in (text for text in STRAY if not text.startswith("<think>")):
            assert trained(encoder, said({**ANSWER, "content": text})) == before + text + END


@pytest.mark.parametrize("changed", ["m.content.split('</think>')[-1]", "m.content | upper", "m.content[:4]"])
def test_encoder_raises_if_template_changes_answer(encoder_with, changed):
    encoder, text = encoder_with(PLAIN.replace("m.content", changed)), "<think>\nTwo.\n</think>\n\n4"
    with pytest.raises(DataError, match=r"message 4: .*[;:] (exclude it|give the checkpoint ano)"):
        encoder(said({**ANSWER, "content": text}))


pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "\n", "\n\n", " ", "Two.", "<think>\nTwo.\n</think>\n\n"]), max_size=6
)


def bare(text: str) -> str:
    """Return a text without the white space that templates change."""
    return re.sub(r"\s*(</?think>)\s*", r"\1", text).strip()


@pytest.mark.slow
@given(pieces.map("".join), st.sampled_from(["released_template.jinja", *SPLITTING, QWEN3_8]), st.sampled_from([1, 3]))
@settings(deadline=None, max_examples=300)
def test_answer_with_random_think_tags_is_trained_on_completely_or_raises(encoder_with, text, template, at):
    encoder, conversation = encoder_with(template), said({**ANSWER, "content": text}, at)
    try:
        found = trained(encoder, conversation)
    except DataError as error:
        assert template != "released_template.jinja" and "</think>" in text and "'reasoning_content'" in str(error)
        with pytest.raises(DataError):
            encoder.size(conversation)
    else:
        reasoning, closed, answer = bare(text).removeprefix("<think>").partition("</think>")
        begins = bare(text).startswith("<think>") and closed
        # Reasoning is written only behind the last question.
        is_part = template in SPLITTING and begins and (at == 1 or not reasoning)
        found, whole = found.removesuffix(END), bare(text)
        assert {bare(found), bare(BLOCK + found)} & ({whole, answer} if is_part else {whole})
    whole = trained(encoder, said({**ANSWER, "content": text}, at, reasoning_content=""))
    assert whole.strip() == f"{text.strip()}{END}" or whole == f"{text}{END}" or whole == text.lstrip("\n") + END
