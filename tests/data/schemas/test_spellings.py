"""Other spellings of conversations: the same as ours, or one clear message."""

import copy
from pathlib import Path

from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data.schemas.conversations import conversation_of
from qwen3vl_bridge.data.schemas.spellings import SPEAKERS, messages_of

import pytest
from hypothesis import given
from hypothesis import strategies as st

HUMAN, GPT = {"from": "human", "value": "Which?"}, {"from": "gpt", "value": "Seven."}
ASK, ANSWER = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}
# Contents instead of paths, so that no file need be there.
IMAGES, VIDEOS = [b"one", b"two", b"three"], [b"first", b"second"]


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def image(medium) -> dict:
    return {"type": "image", "image": medium}


def video(medium) -> dict:
    return {"type": "video", "video": medium}


def told(record):
    """The record in our spelling, and unharmed."""
    before = copy.deepcopy(record)
    own = messages_of(record, "x.jsonl:1")
    assert record == before and own == messages_of(record, "x.jsonl:1")
    return own


def asked(words: str, **beside) -> list:
    """What becomes of a user's words, in both spellings."""
    turns = told({"conversations": [{"from": "human", "value": words}, GPT], **beside})
    messages = told({"messages": [{"role": "user", "content": words}, ANSWER], **beside})
    assert turns == messages == {"messages": [messages["messages"][0], ANSWER]}
    return messages["messages"][0]["content"]


def test_speakers_are_roles():
    turns = [{"from": speaker, "value": speaker} for speaker in SPEAKERS]
    roles = [message["role"] for message in told({"conversations": turns})["messages"]]
    assert roles == ["system", "user", "user", "assistant", "assistant", "assistant"]


@pytest.mark.parametrize("record", [7, None, [], {}, {"messages": 7}, {"messages": [7, {"content": 7}], "images": []}])
def test_what_is_none_is_left_to_be_refused(record):
    told(record)
    with pytest.raises(DataError, match=r"^x.jsonl:1"):
        conversation_of(messages_of(record, "x.jsonl:1"), "x.jsonl:1", Path())


def test_placeholders_become_the_media_beside_them():
    assert asked("<image>\nWhich?", image="1.png") == [image("1.png"), text("\nWhich?")]
    assert asked("<image>", image={"bytes": b"one", "path": "1.png"}) == [image(b"one")]
    assert asked("<image>", image={"bytes": None, "path": "1.png"}) == [image("1.png")]
    assert asked("A<image><image> B <video>", images=["1", "2"], videos=["3"]) == [
        *(text("A"), image("1"), image("2"), text(" B "), video("3"))
    ]
    assert asked("<video>", video=[["1.png", "2.png"]]) == [video(["1.png", "2.png"])]
    messages = [{"role": "user", "content": "<image>"}, ANSWER, {"role": "user", "content": "and <image>?"}, ANSWER]
    own = told({"messages": messages, "image": ["1", "2"], "id": 7})
    assert own["messages"][0]["content"] == [image("1")] and own["messages"][2]["content"][1] == image("2")
    assert own["id"] == 7 and "image" not in own


def test_parts_without_their_own_take_the_media_beside_them():
    parts = [{"type": "image"}, text("<image>"), {"type": "image", "image": "own.png"}, {"type": "image", "text": None}]
    own = told({"messages": [{"role": "user", "content": parts}, ANSWER], "images": ["1", "2"]})
    # In a list of parts a text is text.
    assert [part.get("image", part.get("text")) for part in own["messages"][0]["content"]] == [
        *("1", "<image>", "own.png", "2")
    ]


def test_without_media_a_placeholder_is_text():
    for beside in ({}, {"images": None}, {"image": None, "videos": None}):
        assert asked("Write <image> or <video>.", **beside) == "Write <image> or <video>."


def test_what_stands_beside_turns():
    own = told({"conversations": [HUMAN, GPT], "system": "Be brief.", "tools": '[{"name": "look"}]'})
    assert own["messages"] == [{"role": "system", "content": "Be brief."}, ASK, ANSWER]
    assert own["tools"] == [{"name": "look"}]
    assert told({"messages": None, "conversations": [HUMAN, GPT]}) == {"messages": [ASK, ANSWER]}
    assert told({"messages": [ASK, ANSWER], "conversations": None})["messages"] == [ASK, ANSWER]
    assert told({"conversations": [HUMAN, GPT], "system": "", "tools": " "}) == {"messages": [ASK, ANSWER]}


BOTH = "found both 'messages' and 'conversations', expected one"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [], "conversations": []}, BOTH),
        ({"conversations": []}, r"found \[\] under 'conversations', expected a list of turns"),
        ({"conversations": {"from": 1}}, "found {'from': 1} under 'conversations', expected a list"),
        ({"conversations": ["hi"]}, "turn 1: found 'hi', expected an object with from and value alone"),
        ({"conversations": [HUMAN, {**GPT, "weight": 0}]}, "turn 2: found the keys from, value, weight, expected an"),
        ({"conversations": [{"from": "robot", "value": ""}]}, "found the speaker 'robot', expected one of system, hum"),
        ({"conversations": [{"from": ["gpt"], "value": ""}]}, r"found the speaker \['gpt'\], expected one of"),
        ({"conversations": [{"from": "human", "value": None}]}, "turn 1: found None as value, expected a string"),
        ({"conversations": [HUMAN], "system": 7}, "found 7 under 'system', expected a string"),
        ({"conversations": [{"from": "system", "value": ""}], "system": "x"}, "found both 'system' and a turn of it"),
        ({"messages": [ASK], "tools": "{"}, r"x.jsonl:1: 'tools': found a string that is no JSON \(.*\), expected a l"),
        ({"messages": [ASK], "tools": "[" * 100_000}, "'tools': found a string that is no JSON .*more than 50 deep"),
        ({"messages": [ASK], "image": "1", "images": ["1"]}, "found both 'image' and 'images', expected one"),
        ({"messages": [ASK], "images": ["1", 7]}, "images 2: found 7, expected a path, or bytes"),
        ({"messages": [ASK], "image": ""}, "image 1: found '', expected a path"),
        ({"messages": [ASK], "image": {}}, "image 1: found {}, expected a path"),
        ({"messages": [ASK], "image": {"bytes": None, "path": None}}, "image 1: found None, expected a path"),
        ({"messages": [ASK], "image": {"url": "1"}}, "image 1: found {'url': '1'}, expected a path"),
        ({"messages": [ASK], "video": [["1", None]]}, "video 1, frame 2: found None, expected a path"),
        # LLaVA's collator would put the picture first; a guess.
        ({"conversations": [HUMAN, GPT], "image": "1"}, "found 0 places for images .* expected 1, as many as stand"),
        ({"conversations": [HUMAN, GPT], "videos": ["1"]}, r"found 0 places for videos \('<video>' .* expected 1,"),
        ({"messages": [{"role": "user", "content": "<image><image>"}], "image": "1"}, "found 2 places .* expected 1,"),
        ({"messages": [{"role": "user", "content": "<image>"}], "images": []}, "found 1 places .* expected 0,"),
        ({"messages": [{"role": "user", "content": "<image><video>"}], "image": "1"}, "found 1 places for videos .* 0"),
        ({"messages": [{"role": "user", "content": [text("<image>")]}], "image": "1"}, "found 0 places for images"),
    ],
)
def test_what_does_not_fit_is_refused(record, message):
    with pytest.raises(DataError, match=message) as caught:
        told(record)
    assert str(caught.value).startswith("x.jsonl:1: ")


pieces = st.one_of(
    st.just("<image>"), st.just("<video>"), st.text(max_size=5), st.sampled_from(["<", "image>", "\n", "<Image>"])
)
texts = st.lists(pieces, max_size=5).map("".join)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3), st.booleans())
def test_a_record_and_its_twin_are_one_conversation(turns, media):
    """In turns and in messages with media beside, and in our own spelling with the media in place."""
    flat = [words for turn in turns for words in turn]
    found = {kind: sum(words.count(f"<{kind}>") for words in flat) for kind in ("image", "video")}
    beside = {f"{kind}s": [f"{kind} {n}".encode() for n in range(number)] for kind, number in found.items()}
    speakers, roles = ("human", "gpt"), ("user", "assistant")
    record = {"conversations": [{"from": speakers[n % 2], "value": words} for n, words in enumerate(flat)]}
    twin = {"messages": [{"role": roles[n % 2], "content": words} for n, words in enumerate(flat)]}
    own = copy.deepcopy(twin)
    if media:
        record, twin = {**record, **beside}, {**twin, **beside}
        rest = {kind: iter(beside[f"{kind}s"]) for kind in found}
        for message in own["messages"]:
            message["content"] = in_parts(message["content"], rest)
    conversations = [conversation_of(told(spelt), "x.jsonl:1", Path()) for spelt in (record, twin, own)]
    assert conversations[0] == conversations[1] == conversations[2]
    assert list(conversations[0].images) == (beside["images"] if media else [])
    assert list(conversations[0].videos) == (beside["videos"] if media else [])


def in_parts(words: str, rest: dict) -> str | list:
    """By hand, a placeholder at a time."""
    parts = []
    while places := sorted((words.find(f"<{kind}>"), kind) for kind in rest if f"<{kind}>" in words):
        at, kind = places[0]
        parts += [text(words[:at])] if at else []
        parts.append({"type": kind, kind: next(rest[kind])})
        words = words[at + len(f"<{kind}>") :]
    return [*parts, *([text(words)] if words else [])] if parts else words


def test_a_system_prompt_beside_messages_is_one_of_them():
    own = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = messages_of({"messages": own, "system": "Be brief."}, "here")
    assert found == {"messages": [{"role": "system", "content": "Be brief."}, *own]}
    with pytest.raises(DataError, match="here: found both 'system' and a turn of it"):
        messages_of({**found, "system": "Be brief."}, "here")
