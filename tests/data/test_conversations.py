"""Test that records are read, and that each kind of invalid or ambiguous record raises one clear error."""

import base64
import io
import json
import os
import pickle
import re
from pathlib import Path

from qwen3vl_bridge.data import Columns, DataError, JsonLines, open_source
from qwen3vl_bridge.data.conversations import parse_conversation
from qwen3vl_bridge.data.records import convert_record

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.conftest import picture, write

ASK = {"role": "user", "content": "Which?"}
ANSWER = {"role": "assistant", "content": "Seven."}


def test_json_lines_random_access_skips_blank_lines(tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [json.dumps({"messages": [{"role": "user", "content": text}, ANSWER]}) for text in ("één", "zwei", "3")]
    path.write_bytes(f"{lines[0]}\r\n\n  \n{lines[1]}\n{lines[2]}".encode())
    file = pickle.loads(pickle.dumps(JsonLines(path)))
    assert len(file) == 3
    assert file.fingerprint() == JsonLines(path).fingerprint()
    path.write_bytes(path.read_bytes().replace(b"zwei", b"drei"))
    assert file.fingerprint() != JsonLines(path).fingerprint()
    path.write_bytes(path.read_bytes().replace(b"drei", b"zwei"))
    assert [file[i].sample_id for i in range(3)] == ["train.jsonl:1", "train.jsonl:4", "train.jsonl:5"]
    assert [file[i].messages[0]["content"] for i in (2, 0, 1)] == ["3", "één", "zwei"]


def test_media_paths_are_resolved_relative_to_media_root(tmp_path):
    first, second = picture(tmp_path / "media/a/1.png", 8, 8), picture(tmp_path / "media/2.png", 8, 8)
    parts = [
        {"type": "image", "image": "a/1.png"}, {"type": "text", "text": "and"},
        {"type": "image", "image": str(second)}, {"type": "image", "image": "a/../2.png"},
    ]  # fmt: skip
    path = write(tmp_path / "train.jsonl", [{"messages": [{"role": "user", "content": parts}, ANSWER], "id": 7}])
    conversation = JsonLines(path, tmp_path / "media")[0]
    assert conversation.images == (first, second, second)
    assert conversation.messages == ({"role": "user", "content": parts}, ANSWER)


def user(*parts) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


@pytest.mark.parametrize(("line", "message"), [
    (b"{", r"found no valid JSON \(.*\), expected one conversation"),
    (b"[" * 100_000, r"found no valid JSON \(.*more than 50 deep"),
    (b'{"messages": "\xff"}', r"found bytes that are not valid UTF-8"),
    ([], r"found \[\], expected an object with a list of messages"), (7, "found 7, expected an object"),
    ({}, "found None under 'messages', expected an object with a list"),
    ({"messages": []}, r"found \[\] under 'messages'"), ({"messages": "hi"}, "found a value that does not decode"),
    ({"messages": [ASK, ANSWER], "tools": {"a": 1}}, "found {'a': 1} under 'tools', expected a list of objects"),
    ({"messages": [ASK, "hi"]}, "message 2: found 'hi', expected an object with role and content"),
    ({"messages": [{"role": "user"}]}, "message 1: found the keys role, expected role and content"),
    ({"messages": [{**ASK, "calls": []}]}, "message 1: found the keys role, content, calls, expected"),
    ({"messages": [ASK, {**ANSWER, "reasoning_content": ["a"]}]}, r"found \['a'\] under 'reasoning_content', ex"),
    ({"messages": [ASK, {**ANSWER, "tool_calls": "[]"}]}, r"found '\[\]' under 'tool_calls', expected a list"),
    ({"messages": [ASK, {**ANSWER, "tool_calls": ["look"]}]}, "tool call 1: found 'look', expected an object"),
    ({"messages": [{**ASK, "reasoning_content": "a"}]}, "'reasoning_content' on a message of the role 'user'"),
    ({"messages": [{**ASK, "tool_calls": [{}]}]}, "found 'tool_calls' on a message of the role 'user'"),
    (user({"type": "text", "text": "a", "image": "a.png"}), "found the keys type, text, image, expected 'type'"),
    (user({"type": "image", "image": ["a.png"]}), r"found \['a.png'\] under 'image', expected a path"),
    ({"messages": [{"role": "robot", "content": ""}]}, "message 1: found the role 'robot', expected one of system"),
    ({"messages": [{"role": ["user"], "content": ""}]}, r"found the role \['user'\], expected one of system"),
    ({"messages": [ASK]}, "found the roles user, expected an assistant message after at least one other message"),
    ({"messages": [ANSWER, ASK]}, "found the roles assistant, user, expected an assistant message"),
    ({"messages": [{"role": "user", "content": None}]}, "message 1: found the keys role, expected role and content"),
    ({"messages": [{"role": "user", "content": []}]}, r"message 1: found \[\] as content"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "message 1: found {'a': 1} as content"),
    (user("hi"), "message 1, part 1: found 'hi', expected an object of type 'text', 'image' or 'video'"),
    (user({"type": "sound", "sound": "x"}), "part 1: found a part of type 'sound', expected"),
    (user({"type": "text"}), "part 1: found None under 'text', expected a string"),
    (user({"type": "text", "text": 7}), "part 1: found 7 under 'text', expected a string"),
    (user({"type": "image", "image": ""}), "part 1: found '' under 'image', expected a path or bytes"),
    (user({"type": "image", "image": {"path": None}}), "part 1: found {} under 'image', expected a path or"),
    (user({"type": "image", "image": "x", "detail": 1}), "found the detail 1, expected 'auto' or 'high'"),
    (user({"type": "image", "image": "x", "size": 1}), "found the keys type, image, size, expected 'type' and"),
    (user({"type": "image", "image": "https://a.b/c.png"}), "the URL 'https://a.b/c.png', and no download"),
    (user({"type": "image", "image": "data:image/png,AA"}), "found 'data:image/png,AA', expected 'data:...;base64"),
    (user({"type": "image", "image": "data:image/png;base64,é"}), "found contents that are not valid base64"),
    (user({"type": "image", "image": "data:image/png;base64,A!"}), "found contents that are not valid base64"),
    (user({"type": "image", "image": "a\0b"}), "expected the path of a file .*null"),
    (user({"type": "image", "image": "a" * 5000}), "expected the path of a file .*too long"),
    (user({"type": "text", "text": ""}, {"type": "image", "image": "no.png"}),
     "part 2: 'no.png' is .*no.png, which does not exist"),
    (user({"type": "image", "image": "."}), "part 1: '.' is .*root, which is not a file"),
    (user({"type": "image", "image": "../out.png"}), "part 1: '../out.png' is .*: expected a path inside the med"),
    (user({"type": "image", "image": "/etc/passwd"}), "'/etc/passwd' is /etc/passwd: expected a path inside"),
    (user({"type": "image", "image": "link.png"}), "'link.png' is .*out.png: expected a path inside the media"),
])  # fmt: skip
def test_parse_conversation_error_names_line_of_invalid_record(tmp_path, line, message):
    picture(tmp_path / "out.png", 8, 8)
    folder = tmp_path / "root"
    folder.mkdir()
    os.symlink(tmp_path / "out.png", folder / "link.png")
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    (folder / "train.jsonl").write_bytes(json.dumps({"messages": [ASK, ANSWER]}).encode() + b"\n" + line + b"\n")
    file = JsonLines(folder / "train.jsonl")
    assert file[0].messages == (ASK, ANSWER)
    with pytest.raises(DataError, match=f"^train.jsonl:2: .*{message}"):
        file[1]


@pytest.mark.parametrize(("arguments", "message"), [
    (("no.jsonl",), "no.jsonl: the file does not exist, expected JSON lines"),
    (("empty.jsonl",), "empty.jsonl: found no lines, expected one conversation per line"),
    (("train.jsonl", "nowhere"), "nowhere: there is no such folder, expected the folder of images"),
])  # fmt: skip
def test_json_lines_raises_if_file_is_empty_or_path_is_missing(tmp_path, arguments, message):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    write(tmp_path / "train.jsonl", [{"messages": [ASK, ANSWER]}])
    with pytest.raises(DataError, match=message):
        JsonLines(*(tmp_path / argument for argument in arguments))


HUMAN, GPT = {"from": "human", "value": "Which?"}, {"from": "gpt", "value": "Seven."}
GIVES_TURNS = {
    "messages": {"messages": [ASK, ANSWER]}, "conversations": {"conversations": [HUMAN, GPT]},
    "texts": {"texts": [{"user": "Which?", "assistant": "Seven."}]},
    "question": {"question": "Which?", "answer": "Seven."}, "query": {"query": "Which?", "response": "Seven."},
    "prompt": {"prompt": "Which?", "completion": "Seven."},
    "instruction": {"instruction": "Which?", "output": "Seven."},
}  # fmt: skip


def told(record: dict) -> list:
    return convert_record(record, "x.jsonl:1")["messages"]


def asked(words: str, answer: str = "Seven.", **beside) -> list:
    """Return the parts of a prompt, equal in both formats of turns and as a question with its answer."""
    beside |= {"id": 7}
    messages = told({"messages": [{"role": "user", "content": words}, {**ANSWER, "content": answer}], **beside})
    turns = [{"from": "human", "value": words}, {"from": "gpt", "value": answer}]
    assert messages == told({"conversations": turns, **beside}) == told({"question": words, "answer": answer, **beside})
    return messages[0]["content"]


def spelt(content: str | list) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"[{part[part['type']]}]" for part in content)


@pytest.mark.parametrize("first", GIVES_TURNS)
@pytest.mark.parametrize("second", GIVES_TURNS)
def test_convert_record_raises_if_two_keys_contain_turns(first, second):
    if first == second:
        assert told(GIVES_TURNS[first]) == [ASK, ANSWER]
        return
    record = {**GIVES_TURNS[first], **GIVES_TURNS[second]}
    which = r"^x.jsonl:1: found both '.*', which each give the turns, .*columns.ignore=\["
    with pytest.raises(DataError, match=which) as caught:
        told(record)
    left_out = re.search(r"ignore=\[(.*)\]", str(caught.value))[1]
    assert Columns(ignore=tuple(left_out.split(","))).convert_record(record, "x")["messages"] == [ASK, ANSWER]


@pytest.mark.parametrize("key", GIVES_TURNS)
def test_convert_record_raises_if_history_or_input_key_is_unsupported(key):
    history, record = [["a", "b"]], GIVES_TURNS[key]
    if key in ("messages", "conversations", "texts"):
        with pytest.raises(DataError, match=rf"found 'history' next to '{key}', where .*columns.ignore=\[history"):
            told({**record, "history": history})
    else:
        assert len(told({**record, "history": history})) == 4
    if key == "instruction":
        assert told({**record, "input": "a"})[0]["content"] == "Which?\na"
    else:
        with pytest.raises(DataError, match=rf"found 'input' next to '{key}', where .*columns.ignore=\[input\]"):
            told({**record, "input": "a"})
    assert told({**record, "history": [], "input": ""}) == told({**record, "history": None, "input": None})


def test_convert_record_with_turns_ignores_lone_prompt_or_answer_key():
    """HuggingFaceH4/ultrachat_200k has `messages` and repeats the first one as `prompt`."""
    assert told({"prompt": "Which?", "prompt_id": "f0e", "messages": [ASK, ANSWER]}) == [ASK, ANSWER]
    assert told({"conversations": [HUMAN, GPT], "answer": "7"}) == [ASK, ANSWER]


def test_parquet_raises_if_turn_columns_are_ambiguous(tmp_path):
    def refused(record: dict, *rows: dict) -> str:
        pq.write_table(pa.Table.from_pylist([record, *rows]), tmp_path / "a.parquet")
        with pytest.raises(DataError) as caught:
            open_source(tmp_path / "a.parquet")[0]
        return str(caught.value)

    assert "found both 'messages' and 'question' with 'answer'" in refused(
        {**GIVES_TURNS["messages"], "question": "a", "answer": "b"}
    )
    assert "found 'input' next to 'messages'" in refused({**GIVES_TURNS["messages"], "input": "a"})
    assert "found 'history' next to 'texts'" in refused({**GIVES_TURNS["texts"], "history": [["a", "b"]]})
    empty = {**GIVES_TURNS["messages"], "input": "", "history": None}
    pq.write_table(pa.Table.from_pylist([empty]), tmp_path / "b.parquet")
    assert open_source(tmp_path / "b.parquet")[0].messages == (ASK, ANSWER)


@pytest.mark.parametrize(
    "place", ["<img>", "<IMG>", "<ImageHere>", "<Image>", "<image_placeholder>", "<|image|>", "<img></img>"]
)
def test_unnumbered_placeholders_in_any_format_take_images_in_order(place):
    words = f"A {place} and {place}?"
    assert spelt(asked(words, images=["1", "2"])) == "A [1] and [2]?"
    for images in ({}, {"images": ["1"]}, {"images": ["1", "2", "3"]}):
        with pytest.raises(DataError, match=rf"found 2 placeholders for images \({re.escape(repr(place))} in a text"):
            asked(words, **images)
    assert spelt(asked("<VideoHere>?", video="1")) == "[1]?"


@pytest.mark.parametrize("form", ["<image {}>", "<image_{}>", "<image{}>", "<Image-{}>", "<|image_{}|>", "<img {}>"])
def test_numbered_placeholders_in_any_format_select_image_by_number(form):
    one, two, three = (form.format(number) for number in (1, 2, 3))
    assert spelt(asked(f"{two} beside {one}?", images=["a", "b"])) == "[b] beside [a]?"
    # A picture that is named twice is shown twice.
    assert spelt(asked(f"{one}: is {one} or {two} it?", images=["a", "b"])) == "[a]: is [a] or [b] it?"
    for words, most, numbers in ((f"{one} {three}", 2, "1, 3"), (f"{one} {one}", 2, "1"), (form.format(0), 1, "0")):
        with pytest.raises(DataError, match=f"numbers {numbers}, expected each number from 1 to {most}"):
            asked(words, images=["a", "b"][:most])
    with pytest.raises(DataError, match=r"found 1 placeholders for images .* expected 0"):
        asked(one)


def test_img_tag_with_path_takes_image_at_that_path():
    words = "Picture 1: <img>a/1.png</img>\nWhich?"
    assert spelt(asked(words)) == "Picture 1: [a/1.png]\nWhich?"
    assert spelt(asked(words, image="")) == "Picture 1: [a/1.png]\nWhich?"
    with pytest.raises(DataError, match=r"found 0 placeholders for images \('<img>a/1.png</img>' in a .* expected 1,"):
        asked(words, image="a/1.png")


@pytest.mark.parametrize("words", ["<image><img>", "<img><ImageHere>", "<image><image 1>", "<img>1.png</img><image>"])
def test_convert_record_raises_if_placeholders_have_two_formats(words):
    with pytest.raises(DataError, match=r"found both '<.*>' and '<.*>', expected placeholders of one format; .*list"):
        asked(words, images=["a", "b"])
    part = [{"role": "user", "content": [{"type": "image"}]}, ANSWER, {"role": "user", "content": "<img>"}, ANSWER]
    with pytest.raises(DataError, match="found both '<image>' and '<img>', expected"):
        told({"messages": part, "images": ["a", "b"]})


@pytest.mark.parametrize("place", ["<img>", "<image 1>", "<ImageHere>", "<img>1.png</img>"])
def test_convert_record_raises_if_answer_contains_media_placeholder(place):
    for beside in ({"image": "1"}, {}):
        with pytest.raises(DataError, match=rf"message 2: found '{place}' in an answer, which may be a placeholder"):
            asked("Which tag?", f"It is {place}.", **beside)
    text = {"question": "Which tag?", "answer": f"It is {place}.", "image": "1"}
    own = convert_record(text, "x", placeholders="text")["messages"]
    assert spelt(own[0]["content"]) == "[1]Which tag?" and own[1]["content"] == f"It is {place}."
    parts = [ASK, {**ANSWER, "content": [{"type": "text", "text": place}]}]
    assert told({"messages": parts}) == parts


@pytest.mark.parametrize("words", ["<img src=1.png>", "<imagery>", "<image", "image 1", "<|image_pad|>", "<im>"])
def test_text_resembling_placeholder_stays_text(words):
    assert asked(words) == words


@pytest.mark.parametrize("none", ["", None, [], {}, [""], [None], {"bytes": None, "path": None}, [{}]])
@pytest.mark.parametrize("key", ["image", "images", "video", "videos"])
def test_empty_image_or_video_key_is_treated_as_missing(key, none):
    assert asked("Which?", **{key: none}) == "Which?"
    kind = key.rstrip("s")
    with pytest.raises(DataError, match=rf"found 1 placeholders for {kind}s .* expected 0"):
        asked(f"<{kind}>?", **{key: none})
    other = f"{kind}s" if key == kind else kind
    assert spelt(asked(f"<{kind}>?", **{key: none, other: ["1"]})) == "[1]?"


@pytest.mark.parametrize("some", [[b"1", ""], [b"1", None], [[], b"1"], [{"bytes": None, "path": None}, b"1"]])
def test_parse_conversation_raises_if_media_list_has_empty_item(some):
    with pytest.raises(DataError, match=r"part \d: found .*"):
        parse_conversation(
            convert_record({"question": "<video><video>", "answer": "a", "videos": some}, "x"), "x", Path()
        )


def content(number: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64 + 32 * number, 64), (40 * number, 0, 0)).save(file, kind)
    return file.getvalue()


def encoded(number: int, kind: str = "PNG") -> str:
    return base64.b64encode(content(number, kind)).decode()


KINDS = [encoded(0, kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")]


@pytest.mark.parametrize("value", [*KINDS, "AAAAIGZ0eXBpc29tAAACAGlzb21pc28y" * 3])
def test_convert_record_raises_if_unknown_key_has_base64_image_or_video(value):
    for content in (value, [value, value], {"bytes": value, "path": None}):
        with pytest.raises(DataError, match=r"found 'payload', which looks like images .*columns.image=payload"):
            asked("Which?", payload=content)
        with pytest.raises(DataError, match=r"found 1 placeholders .* payload, id. If one .* \(columns.image=KEY\)"):
            asked("<image>Which?", image_source="web", payload=content)


# Whatever someone may have meant as a place for a picture; not the code's own pattern.
LETTERS = re.compile(r"<\|?(image|img|Image)[ _-]?(\d|Here|placeholder)*\|?>")
PLACES = {
    "next": lambda n: "<image>", "img": lambda n: "<img>", "here": lambda n: "<ImageHere>",
    "numbered": lambda n: f"<image {n}>", "underscored": lambda n: f"<image_{n}>",
    "barred": lambda n: f"<|image_{n}|>", "path": lambda n: f"<img>{n}.png</img>", "part": None, "none": None,
}  # fmt: skip
TURNS = ("messages", "conversations", "texts", "question", "query", "prompt", "instruction", "history")
# What people call pictures; the last ones are of no name that anybody could guess.
KEYS = ("img", "image_path", "Images", "image_name", "image_list", "pictures", "payload", "x")


MEDIA = {
    "path": lambda n: f"{n}.png",
    "file": lambda n: {"bytes": content(n), "path": None},
    "data": lambda n: f"data:image/png;base64,{encoded(n)}",
    "base64": encoded,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("mutated")
    for number in range(1, 5):
        (root / f"{number}.png").write_bytes(content(number))
    return root


def turns_of(spelling: str, said: list[str]) -> dict:
    pairs = list(zip(said[::2], said[1::2], strict=True))
    if spelling == "messages":
        return {"messages": [{"role": ("user", "assistant")[n % 2], "content": w} for n, w in enumerate(said)]}
    if spelling == "conversations":
        return {"conversations": [{"from": ("human", "gpt")[n % 2], "value": w} for n, w in enumerate(said)]}
    if spelling == "texts":
        return {"texts": [{"user": question, "assistant": answer} for question, answer in pairs]}
    names = {"question": "answer", "query": "response", "prompt": "completion", "instruction": "output"}
    asked = "query" if spelling == "history" else spelling
    before = {"history": [list(pair) for pair in pairs[:-1]]} if pairs[1:] else {}
    return {asked: pairs[-1][0], names[asked]: pairs[-1][1], **before}


@st.composite
def records(draw) -> dict:
    """Generate a record with up to three images, and up to two mutations of it."""
    place, medium = draw(st.sampled_from([*PLACES])), draw(st.sampled_from([*MEDIA]))
    number, turns = draw(st.integers(0, 3)), draw(st.integers(1, 2))
    said = [f"words {turn}" for turn in range(2 * turns)]
    spelling = draw(st.sampled_from(TURNS))
    for one in range(1, number + 1):
        at = 2 * draw(st.integers(0, turns - 1))
        said[at] = f"{PLACES[place](one)}\n{said[at]}" if PLACES[place] else said[at]
    record = {"id": "sample-7", "source": "web", **turns_of(spelling, said)}
    if place == "part" and spelling == "messages":
        parts = [{"type": "image"} for _ in range(number)]
        record["messages"][0]["content"] = [*parts, {"type": "text", "text": said[0]}]
    if number and place != "path":
        pictures = [MEDIA[medium](one) for one in range(1, number + 1)]
        single = number == 1 and draw(st.booleans())
        record["image" if single else "images"] = pictures[0] if single else pictures
    for _ in range(draw(st.integers(0, 2))):
        record = mutated(record, draw)
    return record


def mutated(record: dict, draw) -> dict:
    held = next((key for key in record if key in ("image", "images", *KEYS)), None)
    words = [key for key in ("question", "query", "prompt", "instruction") if isinstance(record.get(key), str)]
    kind = draw(st.sampled_from(["rename", "drop", "duplicate", "answer", "second turns", "empty", "add"]))
    record = dict(record)
    if kind == "rename" and held:
        record[draw(st.sampled_from(KEYS))] = record.pop(held)
    elif kind == "drop" and held:
        media = record.pop(held)
        if isinstance(media, list) and len(media) > 1:
            record[held] = media[1:]
    elif kind == "empty" and held:
        record[held] = draw(st.sampled_from(["", [], None]))
    elif kind == "add" and isinstance(record.get(held), list):
        record[held] = [*record[held], "4.png"]
    elif kind == "second turns":
        record |= turns_of(draw(st.sampled_from(TURNS)), ["other words", "others"])
    elif kind in ("duplicate", "answer"):
        make = draw(st.sampled_from([one for one in PLACES.values() if one]))
        place = make(draw(st.integers(0, 2)))
        if words and kind == "duplicate":
            record[words[0]] += place
        for key in ("messages", "conversations", "texts"):
            if isinstance(record.get(key), list) and record[key]:
                record[key] = [dict(turn) for turn in record[key]]
                turn = record[key][0 if kind == "duplicate" or key == "texts" else 1]
                name = {"messages": "content", "conversations": "value"}.get(key, "user")
                if key == "texts" and kind == "answer":
                    name = "assistant"
                if isinstance(turn.get(name), str):
                    turn[name] += place
    return record


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(record=records())
def test_random_record_is_read_with_all_its_images_and_text_or_raises(encoder, root, record):
    try:
        conversation = parse_conversation(convert_record(record, "here"), "here", root)
        sample = encoder(conversation)
    except DataError as error:
        event("refused")
        assert str(error).startswith("here: ")
        return
    event(f"read, {len(conversation.images)} pictures")
    processor = encoder.processor
    words = processor.tokenizer.decode(sample.input_ids)
    starts = int((sample.input_ids == processor.vision_start_token_id).sum())
    tokens = int((sample.input_ids == processor.image_token_id).sum())
    grids = [] if sample.image_grid_thw is None else sample.image_grid_thw.prod(-1).tolist()
    assert starts == len(conversation.images) == len(grids) and tokens == sum(grids) // 4
    assert not LETTERS.search(words), words
    # Of a record that was not refused, nothing that is a picture is left unread.
    read = {value if isinstance(value, bytes) else value.name for value in conversation.images}
    for key in ("image", "images", *KEYS[:-1]):
        given = record.get(key)
        for item in given if isinstance(given, list) else [given]:
            if item:
                named = item["bytes"] if isinstance(item, dict) else item
                known = named if isinstance(named, bytes) or len(named) < 40 else base64.b64decode(named.split(",")[-1])
                assert known in read, (key, item)
    # And of what is said nothing either.
    assert all((said in words) == (said in str(record)) for said in ("words 0", "words 2", "other words"))


@pytest.mark.parametrize("text", ['{"messages": [{"role": "us', '{"messages": [{"role": "user"', "{"])
def test_json_lines_raises_if_line_is_truncated(tmp_path, text):
    path = tmp_path / "train.jsonl"
    path.write_text(f"{text}\n")
    with pytest.raises(
        DataError, match=r"^train.jsonl:1: found no valid JSON .*: this one is truncated, or on several lines"
    ):
        JsonLines(path)[0]
