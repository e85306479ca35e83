"""What a chat template leaves out is refused, found by rendering; what it writes in whatever way is not."""

import copy
import pickle
from pathlib import Path

from qwen3vl_bridge.data import Columns, Conversation, DataError, Encoder, open_source

import pytest

from ..conftest import write

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

HAVE = {
    "tools": ((ASK, ANSWER), (TOOL,)),
    "a system prompt": ((SYSTEM, ASK, ANSWER), None),
    "a system prompt after the first message": ((ASK, ANSWER, SYSTEM, ASK, ANSWER), None),
    "reasoning_content": ((ASK, {**ANSWER, "reasoning_content": "A bar."}), None),
    "tool_calls": ((ASK, CALL, ASK, ANSWER), None),
    "a tool's answer": ((ASK, ANSWER, TOLD, ANSWER), None),
}
WHERE = {
    "tools": "1",
    "a system prompt": "1: message 1",
    "a system prompt after the first message": "1: message 3",
    "reasoning_content": "1: message 2",
    "tool_calls": "1: message 2",
    "a tool's answer": "1: message 3",
}


@pytest.fixture
def encoder_with(processor):
    def make(template: str) -> Encoder:
        other = copy.copy(processor)
        path = HERE / template if template.endswith(".jinja") else None
        other.chat_template = path.read_text(encoding="utf-8") if path else template
        return Encoder(other)

    return make


def having(what: str) -> Conversation:
    messages, tools = HAVE[what]
    return Conversation("train.jsonl:1", messages, tools=tools)


@pytest.mark.parametrize(
    ("template", "left_out"),
    [
        (PLAIN, {"tools", "reasoning_content", "tool_calls"}),
        (NAMING, {"tools", "reasoning_content", "tool_calls"}),
        (ROLES, set(HAVE)),
        ("released_template.jinja", {"reasoning_content", "a system prompt after the first message"}),
        ("released_thinking_template.jinja", {"a system prompt after the first message"}),
        ("{{ tools | tojson if tools else '' }}" + PLAIN, {"reasoning_content", "tool_calls"}),
    ],
)
def test_what_a_template_leaves_out_is_refused(encoder_with, template, left_out):
    encoder = encoder_with(template)
    for what in HAVE:
        for work in (encoder, encoder.size, pickle.loads(pickle.dumps(encoder)).size):
            if what in left_out:
                with pytest.raises(
                    DataError, match=rf"^train.jsonl:{WHERE[what]}: found {what}, which the chat template does not wr"
                ):
                    work(having(what))
            else:
                work(having(what))
    # Without it, or with an empty one, nothing is left out.
    bare = ({**SYSTEM, "content": " "}, ASK, {**ANSWER, "reasoning_content": "", "tool_calls": []})
    for messages in ((ASK, ANSWER), bare):
        encoder(Conversation("train.jsonl:1", messages, tools=()))


def test_a_template_that_refuses_says_so_itself(encoder_with):
    """As the demo's does a role that it does not know."""
    picky = PLAIN.replace(TURN, "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TURN)
    with pytest.raises(DataError, match="the chat template refuses it: no tools"):
        encoder_with(picky)(having("a tool's answer"))


def test_the_remedy_for_tools_works(tmp_path, encoder_with):
    path = write(tmp_path / "train.jsonl", [{"messages": [ASK, ANSWER], "tools": [TOOL]}])
    encoder = encoder_with(PLAIN)
    with pytest.raises(DataError, match=r"found tools, .* leave them out \(columns.ignore=\[tools\]\), or give the"):
        encoder(open_source(path)[0])
    assert encoder(open_source(path, columns=Columns(ignore=("tools",)))[0]).loss_mask.any()


def test_a_template_is_asked_once(encoder_with, monkeypatch):
    """Whatever the number of samples, a kind of thing is rendered once more."""
    encoder, rendered = encoder_with("released_template.jinja"), []
    work = type(encoder.processor).apply_chat_template

    def counted(self, messages, **settings):
        rendered.append(messages)
        return work(self, messages, **settings)

    monkeypatch.setattr(type(encoder.processor), "apply_chat_template", counted)
    for _ in range(3):
        encoder.size(having("tools"))
    assert len(rendered) == 3 + 1
    encoder.size(Conversation("train.jsonl:2", (ASK, ANSWER)))
    assert len(rendered) == 3 + 1 + 1
