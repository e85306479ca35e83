"""Records as somebody new may write them: a key that is meant and not read is refused, and metadata are left alone."""

import re

from qwen3vl_bridge.data import Columns, DataError
from qwen3vl_bridge.data.schemas.conversations import conversation_of
from qwen3vl_bridge.data.schemas.spellings import messages_of

import pytest

ASK, ANSWER = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}
SAID = {"messages": [ASK, ANSWER]}
PAIR = {"question": "Which?", "answer": "Seven."}
ALPACA = {"instruction": "Which?", "output": "Seven."}
TOOLS = [{"name": "look"}]


def told(record: dict) -> list:
    return messages_of(record, "x.jsonl:1")["messages"]


@pytest.mark.parametrize(
    ("record", "key", "meant"),
    [
        *((SAID | {key: "Be brief."}, key, "system") for key in ("System", "sytem", "system_prompt", "systemPrompt")),
        (PAIR | {"system-message": "Be brief."}, "system-message", "system"),
        *((SAID | {key: TOOLS}, key, "tools") for key in ("Tools", "tool", "functions")),
        (SAID | {"Functions": '[{"name": "look"}]'}, "Functions", "tools"),
        *((PAIR | {key: [["a", "b"]]}, key, "history") for key in ("History", "histroy", "chat_history")),
        *((ALPACA | {key: "3 and 4"}, key, "input") for key in ("Input", "inputs", "Input_")),
    ],
)
def test_a_key_that_is_ours_in_another_spelling(record, key, meant):
    with pytest.raises(
        DataError, match=rf"x.jsonl:1: found '{key}', which is not read, expected '{meant}': "
    ) as caught:
        told(record)
    for setting in re.findall(r"columns\.(\w+=.*?)\)", str(caught.value)):
        name, _, value = setting.partition("=")
        columns = Columns(ignore=(value.strip("[]"),)) if name == "ignore" else Columns(**{name: value})
        own = columns.messages_of(record, "x")
        assert own["messages"][-2:] == [ASK, ANSWER]
        assert len(own["messages"]) == 2 + (name == "system") and bool(own.get("tools")) == (name == "tools")


@pytest.mark.parametrize(
    ("beside", "where"),
    [
        ({"reasoning_content": "A bar."}, "on an assistant's message"),
        ({"tool_calls": [{"function": {"name": "look"}}]}, "on an assistant's message"),
        ({"loss": False}, "on an assistant's message"),
        ({"weight": 0}, "on an assistant's message"),
        ({"weight": 0.5}, "on an assistant's message"),
        ({"min_pixels": 1024}, "in a part of a content"),
        ({"max_pixels": 1024}, "in a part of a content"),
        ({"sample_fps": 2}, "in a part of a content"),
    ],
)
def test_what_is_said_of_a_message_or_a_picture_beside_them(beside, where):
    for record, words in ((SAID, "messages"), (PAIR, "question")):
        with pytest.raises(
            DataError, match=f"found '{next(iter(beside))}' next to '{words}', where .* expected it {where}"
        ):
            told(record | beside)


@pytest.mark.parametrize(
    "beside",
    [
        {"system_id": "a", "toolset": ["a"], "tool": "none", "story": ["a"], "input_ids": [1], "id": 7, "systems": 3},
        {"weight": 1, "loss": 0.25, "fps": 30, "reasoning": "A bar.", "history_id": "a"},
        {"weight": "3 kg", "loss": True, "min_pixels": None, "tools_used": [], "context": "A page.", "objects": {}},
        {"weight": 70, "system_prompt": "", "Tools": [], "functions": None, "objects": {"ref": ["a"], "bbox": []}},
    ],
)
def test_metadata_are_left_unread(beside):
    assert told(SAID | beside) == told(PAIR | beside) == [ASK, ANSWER]


def test_a_system_prompt_that_is_there_already():
    system = {"role": "system", "content": "Be brief."}
    assert told({"messages": [system, ASK, ANSWER], "system_prompt": "Be brief."}) == [system, ASK, ANSWER]
    with pytest.raises(DataError, match="found 'system_prompt', which is not read"):
        told({"messages": [system, ASK, ANSWER], "system_prompt": "Be long."})
    assert told(SAID | {"system": "Be brief.", "systemPrompt": "Be brief."}) == [system, ASK, ANSWER]


@pytest.mark.parametrize("word", ["<ref-object>", "<bbox>"])
def test_objects_that_ms_swift_writes_into_texts(word):
    objects = {"ref": ["a cat"], "bbox": [[1, 2, 3, 4]]}
    with pytest.raises(DataError, match="found <ref-object> or <bbox> in a text and 'objects' next to it"):
        told({"messages": [{**ASK, "content": f"Find {word}."}, ANSWER], "objects": objects})


@pytest.mark.parametrize(
    "within",
    [
        {"image": "a.png"},
        {"path": "a.png"},
        [{"type": "image", "url": "https://a.b/c"}],
        {"media": [{"picture": "0001"}]},
        {"a": {"b": [{"bytes": b"x", "path": None}]}},
        [["a.mp4"]],
        {"frames": ["data:image/png;base64,AAAA"]},
        {"type": "image_url", "image_url": {"url": "https://a.b/c"}},
    ],
)
def test_media_within_a_key_that_nobody_reads(within):
    """Where no medium is read, the sample would be trained on without it."""
    for record in (SAID, PAIR):
        with pytest.raises(DataError, match=r"found 'extra', .*looks like images .*columns.ignore=\[extra\]"):
            told(record | {"extra": within})
    shown = {"messages": [{**ASK, "content": "<image>"}, ANSWER], "image": "b.png"}
    if isinstance(within, dict) and "path" not in within:  # metadata, most likely
        assert len(told(shown | {"extra": within})) == 2
    assert told(SAID | {"extra": {"image": "", "url": "a page", "size": [640, 480], "type": "text"}}) == [ASK, ANSWER]


@pytest.mark.parametrize("key", ["screenshot", "frames", "Screenshot_path", "image_array"])
def test_other_names_of_pictures(key):
    with pytest.raises(DataError, match=f"found '{key}', which looks like images"):
        told(SAID | {key: ["0001"]})


@pytest.mark.parametrize(
    "place", ["<picture>", "< image >", "<images>", "[image]", "[Image 1]", "{image}", "<IMG_TOKEN>"]
)
def test_media_in_front_of_a_question_that_seems_to_say_where(place):
    words = f"What is {place}?"
    with pytest.raises(
        DataError, match=rf"found {re.escape(repr(place))} in a question, which is not a supported .* 1 images"
    ):
        told({"query": words, "response": "Seven.", "images": ["a.png"]})
    assert told({"query": words, "response": "Seven."})[0]["content"] == words
    read = Columns(placeholders="text").messages_of({"query": words, "response": "Seven.", "images": ["a.png"]}, "x")
    assert [part["type"] for part in read["messages"][0]["content"]] == ["image", "text"]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({**ANSWER, "reasoning_content": ["a"]}, "found a list under 'reasoning_content', expected a string"),
        (
            {**ANSWER, "tool_calls": '[{"name": "look"}]'},
            "found a string under 'tool_calls', expected a list of objects",
        ),
        ({**ANSWER, "tool_calls": ["look"]}, "found a list under 'tool_calls', expected a list of objects"),
        (
            {**ASK, "reasoning_content": "a"},
            "found 'reasoning_content' on a message of the role 'user', expected it on",
        ),
        ({**ASK, "tool_calls": [{}]}, "found 'tool_calls' on a message of the role 'user', expected it on"),
        ({**ANSWER, "reasoning": "a"}, "found the keys role, content, reasoning, expected role and content"),
        ({**ANSWER, "content": 7}, "found a number as content, expected a string or a list of parts"),
        ({**ANSWER, "content": None}, "found null as content"),
        ({**ANSWER, "content": []}, "found an empty list as content"),
        ({**ANSWER, "role": "gpt"}, "found the role 'gpt', expected one of system, user"),
        ({**ASK, "images": ["a.png"]}, "found the keys role, content, images, expected role and content"),
        ({**ASK, "content": [["Which?"]]}, "found a list, expected an object of type 'text', 'image' or 'video'"),
        ({**ASK, "content": ["Which?"]}, "found a string, expected an object of type 'text', 'image' or 'video'"),
        ({**ASK, "content": [{"text": "Which?"}]}, "found a part of type None, expected an object of type"),
        ({**ASK, "content": [{"type": "image", "image": ""}]}, "found an empty string under 'image', expected a path"),
        ({**ASK, "content": [{"type": "image", "image": ["a.png"]}]}, "found a list under 'image', expected a path"),
        (
            {**ASK, "content": [{"type": "text", "text": "a", "image": "a.png"}]},
            "found the keys type, text, image, exp",
        ),
    ],
)
def test_messages_that_say_something_else_are_refused(tmp_path, message, problem):
    with pytest.raises(DataError, match=problem):
        conversation_of(messages_of({"messages": [ASK, message, ANSWER]}, "x"), "x", tmp_path)
