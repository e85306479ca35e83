"""Reading conversations, and one clear message for each way in which a file can be wrong."""

import json
import os
import pickle

from qwen3vl_bridge.data import DataError, JsonLines

import pytest

from ..conftest import picture, write

ASK = {"role": "user", "content": "Which?"}
ANSWER = {"role": "assistant", "content": "Seven."}


def test_lines_are_found_by_offset_and_named_by_number(tmp_path):
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


def test_pictures_are_found_below_the_root_in_order(tmp_path):
    first, second = picture(tmp_path / "media/a/1.png", 8, 8), picture(tmp_path / "media/2.png", 8, 8)
    parts = [
        {"type": "image", "image": "a/1.png"},
        {"type": "text", "text": "and"},
        {"type": "image", "image": str(second)},
        {"type": "image", "image": "a/../2.png"},
    ]
    path = write(tmp_path / "train.jsonl", [{"messages": [{"role": "user", "content": parts}, ANSWER], "id": 7}])
    conversation = JsonLines(path, tmp_path / "media")[0]
    assert conversation.images == (first, second, second)
    assert conversation.messages == ({"role": "user", "content": parts}, ANSWER)


def user(*parts) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


@pytest.mark.parametrize(("line", "message"), [
    (b"{", r"train.jsonl:2: found no valid JSON \(.*\), expected one conversation"),
    (b"[" * 100_000, r"train.jsonl:2: found no valid JSON \(.*more than 50 deep"),
    (b'{"messages": "\xff"}', r"train.jsonl:2: found bytes that are not valid UTF-8"),
    ([], "found an empty list, expected an object with a list of messages"),
    (7, "found a number, expected an object"),
    ({}, "found null under 'messages', expected an object with a list"),
    ({"messages": []}, "found an empty list under 'messages'"),
    ({"messages": "hi"}, "found a string under 'messages'"),
    ({"messages": [ASK, ANSWER], "tools": {"a": 1}}, "found an object under 'tools', expected a list of objects"),
    ({"messages": [ASK, "hi"]}, "2: message 2: found a string, expected an object with role and content"),
    ({"messages": [{"role": "user"}]}, "message 1: found the keys role, expected role and content"),
    ({"messages": [{**ASK, "calls": []}]}, "message 1: found the keys role, content, calls, expected"),
    ({"messages": [ASK, {**ANSWER, "reasoning_content": ["a"]}]}, "found a list under 'reasoning_content', ex"),
    ({"messages": [ASK, {**ANSWER, "tool_calls": "[]"}]}, "found a string under 'tool_calls', expected a list"),
    ({"messages": [ASK, {**ANSWER, "tool_calls": ["look"]}]}, "found a list under 'tool_calls', expected a list"),
    ({"messages": [{**ASK, "reasoning_content": "a"}]}, "'reasoning_content' on a message of the role 'user'"),
    ({"messages": [{**ASK, "tool_calls": [{}]}]}, "found 'tool_calls' on a message of the role 'user'"),
    (user({"type": "text", "text": "a", "image": "a.png"}), "found the keys type, text, image, expected 'type'"),
    (user({"type": "image", "image": ["a.png"]}), "found a list under 'image', expected a path"),
    ({"messages": [{"role": "robot", "content": ""}]}, "message 1: found the role 'robot', expected one of system"),
    ({"messages": [{"role": ["user"], "content": ""}]}, r"found the role \['user'\], expected one of system"),
    ({"messages": [ASK]}, "found the roles user, expected an assistant's message after another one"),
    ({"messages": [ANSWER, ASK]}, "found the roles assistant, user, expected an assistant's message"),
    ({"messages": [{"role": "user", "content": None}]}, "message 1: found null as content, expected a string or"),
    ({"messages": [{"role": "user", "content": []}]}, "message 1: found an empty list as content"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "message 1: found an object as content"),
    (user("hi"), "message 1, part 1: found a string, expected an object of type 'text', 'image' or 'video'"),
    (user({"type": "sound", "sound": "x"}), "part 1: found a part of type 'sound', expected"),
    (user({"type": "text"}), "part 1: found null under 'text', expected a string"),
    (user({"type": "text", "text": 7}), "part 1: found a number under 'text', expected a string"),
    (user({"type": "image", "image": ""}), "part 1: found an empty string under 'image', expected a path or bytes"),
    (user({"type": "image", "image": {"path": None}}), "part 1: found null under 'image', expected a path or"),
    (user({"type": "image", "image": "x", "detail": 1}), "found the keys type, image, detail, expected 'type' and"),
    (user({"type": "image", "image": "https://a.b/c.png"}), "the URL 'https://a.b/c.png', and no download"),
    (user({"type": "image", "image": "data:image/png,AA"}), "found 'data:image/png,AA', expected 'data:...;base64"),
    (user({"type": "image", "image": "data:image/png;base64,é"}), "found contents that are not valid base64"),
    (user({"type": "image", "image": "data:image/png;base64,A!"}), "found contents that are not valid base64"),
    (user({"type": "image", "image": "a\0b"}), "expected the path of a file .*null"),
    (user({"type": "image", "image": "a" * 5000}), "expected the path of a file .*too long"),
    (user({"type": "text", "text": ""}, {"type": "image", "image": "no.png"}), "part 2: 'no.png' is .* no such"),
    (user({"type": "image", "image": "."}), "part 1: '.' is .* no such file"),
    (user({"type": "image", "image": "../out.png"}), "part 1: '../out.png' is .*, expected a path inside the med"),
    (user({"type": "image", "image": "/etc/passwd"}), "'/etc/passwd' is /etc/passwd, expected a path inside"),
    (user({"type": "image", "image": "link.png"}), "'link.png' is .*out.png, expected a path inside the media"),
])  # fmt: skip
def test_what_is_no_conversation_is_refused(tmp_path, line, message):
    picture(tmp_path / "out.png", 8, 8)
    folder = tmp_path / "root"
    folder.mkdir()
    os.symlink(tmp_path / "out.png", folder / "link.png")
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    (folder / "train.jsonl").write_bytes(json.dumps({"messages": [ASK, ANSWER]}).encode() + b"\n" + line + b"\n")
    file = JsonLines(folder / "train.jsonl")
    assert file[0].messages == (ASK, ANSWER)
    with pytest.raises(DataError, match=message) as caught:
        file[1]
    assert str(caught.value).startswith("train.jsonl:2: ")


@pytest.mark.parametrize(("arguments", "message"), [
    (("no.jsonl",), "no.jsonl: there is no such file, expected JSON lines"),
    (("empty.jsonl",), "empty.jsonl: found no lines, expected one conversation a line"),
    (("train.jsonl", "nowhere"), "nowhere: there is no such folder, expected the media root"),
])  # fmt: skip
def test_missing_files_are_refused(tmp_path, arguments, message):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    write(tmp_path / "train.jsonl", [{"messages": [ASK, ANSWER]}])
    with pytest.raises(DataError, match=message):
        JsonLines(*(tmp_path / argument for argument in arguments))
