"""Test that records of other formats equal our format, or raise one clear error."""

import copy
import json
from pathlib import Path

from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data.conversations import ROLES, Columns, parse_conversation
from qwen3vl_bridge.data.records import SPEAKERS, convert_record, drop_nulls

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
    """Return the record in our format; assert that the original is unchanged."""
    before = copy.deepcopy(record)
    own = convert_record(record, "x.jsonl:1")
    assert record == before and own == convert_record(record, "x.jsonl:1")
    return own


def asked(words: str, **beside) -> list:
    """Return the converted text of a user, equal in both formats."""
    turns = told({"conversations": [{"from": "human", "value": words}, GPT], **beside})
    messages = told({"messages": [{"role": "user", "content": words}, ANSWER], **beside})
    assert turns == messages == {"messages": [messages["messages"][0], ANSWER]}
    return messages["messages"][0]["content"]


def test_convert_record_maps_speakers_human_and_gpt_to_roles():
    turns = [{"from": speaker, "value": speaker} for speaker in (*ROLES, *SPEAKERS)]
    roles = [message["role"] for message in told({"conversations": turns})["messages"]]
    assert roles == [*ROLES, "user", "assistant", "assistant", "system"]


@pytest.mark.parametrize("record", [7, None, [], {}, {"messages": 7}, {"messages": [7, {"content": 7}], "images": []}])
def test_convert_record_leaves_invalid_record_for_parse_conversation_to_reject(record):
    told(record)
    with pytest.raises(DataError, match=r"^x.jsonl:1"):
        parse_conversation(convert_record(record, "x.jsonl:1"), "x.jsonl:1", Path())


def test_placeholders_are_replaced_by_images_and_videos_of_record():
    assert asked("<image>\nWhich?", image="1.png") == [image("1.png"), text("\nWhich?")]
    assert asked("<image>", image={"bytes": b"one", "path": "1.png"}) == [image(b"one")]
    assert asked("<image>", image={"bytes": None, "path": "1.png"}) == [image("1.png")]
    parts = [text("A"), image("1"), image("2"), text(" B "), video("3")]
    assert asked("A<image><image> B <video>", images=["1", "2"], videos=["3"]) == parts
    assert asked("<video>", video=[["1.png", "2.png"]]) == [video(["1.png", "2.png"])]
    messages = [{"role": "user", "content": "<image>"}, ANSWER, {"role": "user", "content": "and <image>?"}, ANSWER]
    own = told({"messages": messages, "image": ["1", "2"], "id": 7})
    assert own["messages"][0]["content"] == [image("1")] and own["messages"][2]["content"][1] == image("2")
    assert own["id"] == 7 and "image" not in own


def test_image_parts_without_path_take_images_of_record_in_order():
    parts = [{"type": "image"}, text("<image>"), {"type": "image", "image": "own.png"}, {"type": "image", "text": None}]
    own = told({"messages": [{"role": "user", "content": parts}, ANSWER], "images": ["1", "2"]})
    # In a list of parts a text is text.
    found = [part.get("image", part.get("text")) for part in own["messages"][0]["content"]]
    assert found == ["1", "<image>", "own.png", "2"]


def test_image_tags_stay_text_with_placeholders_setting_text():
    words = "Write <image> or <video>."
    for record in ({"conversations": [{**HUMAN, "value": words}, GPT]}, {"question": words, "answer": "Seven."}):
        own = convert_record(record, "x", placeholders="text")
        assert own["messages"] == [{"role": "user", "content": words}, ANSWER]
    beside = convert_record(
        {"question": "Is <image> a tag?", "answer": "Seven.", "image": "1"}, "x", placeholders="text"
    )
    assert beside["messages"][0]["content"] == [image("1"), text("Is <image> a tag?")]
    parts = {"messages": [{"role": "user", "content": [text(words)]}, ANSWER]}
    assert told(parts) == parts


def test_system_and_tools_keys_next_to_turns_are_read():
    own = told({"conversations": [HUMAN, GPT], "system": "Be brief.", "tools": '[{"name": "look"}]'})
    assert own["messages"] == [{"role": "system", "content": "Be brief."}, ASK, ANSWER]
    assert own["tools"] == [{"name": "look"}]
    assert own == told({"messages": [ASK, ANSWER], "system": "Be brief.", "tools": [{"name": "look", "at": None}]})
    assert told({"messages": None, "conversations": [HUMAN, GPT]}) == {"messages": [ASK, ANSWER]}
    assert told({"messages": [ASK, ANSWER], "conversations": None})["messages"] == [ASK, ANSWER]
    assert told({"conversations": [HUMAN, GPT], "system": "", "tools": " "}) == {"messages": [ASK, ANSWER]}


def test_trl_prompt_and_completion_lists_train_only_on_completion():
    """In TRL's format only the completion is trained on; an image without a placeholder comes before the prompt."""
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    record = {"prompt": prompt, "completion": [ANSWER], "image": "1.png"}
    found = convert_record(record, "x")["messages"]
    first = {"role": "user", "content": [image("1.png"), text("a")]}
    assert found == [first, {**prompt[1], "loss": False}, prompt[2], ANSWER]
    nulls = [prompt[0], {**prompt[1], "loss": None, "weight": None}, prompt[2]]  # of a table
    assert convert_record({**record, "prompt": nulls}, "x")["messages"][1]["loss"] is False
    for wrong in ({"prompt": [7]}, {"completion": "d"}, {"prompt": prompt[1:2]}, {"prompt": []}):
        with pytest.raises(DataError, match="expected two texts, or two lists of messages with role and content"):
            convert_record({**record, **wrong}, "x")


def test_image_parts_with_index_take_image_of_that_index():
    parts = [{"type": "image", "index": 1, "text": None}, {"type": "image", "index": 0}, {"type": "image", "index": 1}]
    messages = [{"role": "user", "content": parts}, ANSWER]
    found = convert_record({"messages": messages, "images": ["1.png", "2.png"]}, "x")["messages"][0]["content"]
    assert [part["image"] for part in found] == ["2.png", "1.png", "2.png"] and not any("index" in one for one in found)
    for images, message in (
        (["1.png"], "numbers 1, 2, expected each number from 1 to 1"),
        (["1.png", "2.png", "3.png"], "numbers 1, 2, expected each number from 1 to 3"),
        ([], "found 3 placeholders for images .*index 1.* expected 0"),
    ):
        with pytest.raises(DataError, match=message):
            convert_record({"messages": messages, "images": images}, "x")


@pytest.mark.parametrize(("record", "message"), [
    ({"conversations": []}, r"found \[\] under 'messages', expected an object with a list"),
    ({"texts": [{"user": "a", "answer": "b"}]}, "found .* under 'texts', expected a list of objects with user"),
    ({"texts": [{"user": "a", "assistant": "b", "c": 1}]}, "under 'texts', expected a list of objects with user"),
    ({"texts": "a"}, "found 'a' under 'texts', expected a list"),
    ({"query": "a", "response": 7}, r"'response': found 7, expected a string; .* columns.answer='{response\[0\]}'"),
    ({"query": "a", "label": "b"}, "found the keys query, label, expected 'messages' or .* the setting columns"),
    ({"query": "a", "response": "b", "history": [["c"]]}, r"found \[\['c'\]\] under 'history', expected a list"),
    ({"query": "a", "response": "b", "history": [["c", 7]]}, "message 2: found 7 as content, expected a string"),
    ({"conversations": ["hi"]}, "message 1: found 'hi', expected an object with role and content"),
    ({"conversations": [HUMAN, {**GPT, "note": 0}]}, "message 2: found the keys note, role, content, expected role"),
    ({"conversations": [{"from": "robot", "value": ""}]}, "found the role 'robot', expected one of system, user"),
    ({"conversations": [{"from": ["gpt"], "value": ""}]}, r"found the role \['gpt'\], expected one of"),
    ({"conversations": [{"from": "human", "value": None}]}, "message 1: found the keys role, expected role and cont"),
    ({"conversations": [HUMAN], "system": 7}, "found 7 under 'system', expected a string"),
    ({"conversations": [{"from": "system", "value": ""}], "system": "x"}, "found the key 'system' and a system"),
    ({"messages": [{"role": "system", "content": ""}], "system": "x"}, "found the key 'system' and a system"),
    ({"messages": [ASK], "tools": "{"}, r"'tools': found a string that is not valid JSON \(.*\), expected"),
    ({"messages": [ASK], "tools": "[" * 100_000}, "'tools': found a string that is not valid JSON .*more than 50"),
    ({"messages": [{"role": "user", "content": "<image>Find <ref-object>"}, {"role": "assistant", "content": "<bbox>"}],
      "images": ["1"], "objects": {"ref": ["the circle"], "bbox": [[20, 15, 60, 55]]}},
     "found <ref-object> and <bbox> in a text next to 'objects', but these placeholders are not .* from 0 to 1000 of"),
    ({"messages": [ASK], "image": "1", "images": ["1"]}, "found both 'image' and 'images', expected one"),
    ({"question": "a", "answer": "b", "images": [b"1", 7]}, "part 2: found 7 under 'image', expected a path or"),
    ({"question": "a", "answer": "b", "image": {"url": "1"}}, "part 1: found {'url': '1'} under 'image', exp"),
    ({"question": "a", "answer": "b", "video": [[b"1", None]], "sample_fps": 1},
     "part 1, frame 1: found None under 'video', expected"),
    # LLaVA's collator would put the picture first; a guess.
    ({"conversations": [HUMAN, GPT], "image": "1"}, "found 0 placeholders for images .* expected 1, the number of"),
    ({"conversations": [HUMAN, GPT], "videos": ["1"]}, r"0 placeholders for videos \('<video>' .* expected 1,"),
    ({"messages": [{"role": "user", "content": "<image><image>"}], "image": "1"}, "2 placeholders .* expected 1,"),
    ({"messages": [{"role": "user", "content": "<image><video>"}], "image": "1"}, "1 placeholders for videos .* 0"),
    ({"messages": [{"role": "user", "content": [text("<image>")]}], "image": "1"}, "0 placeholders for images"),
    ({"messages": [{"role": "user", "content": [text("<image>?")]}, ANSWER], "image_path": "1.png"},
     "image_path', wh"),
    ({"messages": [{"role": "user", "content": "<image>"}, ANSWER], "id": 7}, "1 placeholders .* 0, .* messages, id"),
    ({"messages": [ASK, {**ANSWER, "content": "<video>"}], "video": None}, "found 1 placeholders for videos .* 0, "),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "1 placeholders for images .* expected 0"),
    ({"query": "<image>", "response": "a", "history": [["<image>", "b"]], "image": "1"}, "found 2 .* expected 1"),
    ({"texts": [{"user": "<image>", "assistant": "b"}]}, "1 placeholders for images .* expected 0"),
    ({"instruction": "a", "input": "<image>", "output": "b"}, "1 placeholders for images .* expected 0"),
])  # fmt: skip
def test_record_raises_if_values_or_placeholder_counts_are_invalid(record, message):
    with pytest.raises(DataError, match=f"^x.jsonl:1: .*{message}"):
        parse_conversation(told(record), "x.jsonl:1", Path())


def test_bounding_boxes_written_in_text_stay_text():
    for beside in ({"objects": {"bbox": [[20, 15, 60, 55]]}}, {}):
        written = {"role": "assistant", "content": "[200, 150, 600, 550]" if beside else "<bbox>1, 2, 3, 4</bbox>"}
        assert told({"messages": [ASK, written], **beside})["messages"] == [ASK, written]


def keyed(**beside) -> dict:
    return {"conversations": [{"from": "human", "value": "<image> What?"}, GPT], **beside}


@pytest.mark.parametrize("key", ["image_path", "img", "Images", "image_file", "image_url", "pictures", "video_path"])
@pytest.mark.parametrize("value", ["train/1.png", "1", ["1", "2"], {"bytes": b"a", "path": None}, {"url": "1"}])
def test_record_raises_if_name_of_unknown_key_suggests_media(key, value):
    with pytest.raises(DataError, match=rf"1 placeholders .* expected 0, .* {key}.*columns.image"):
        told(keyed(**{key: value}))
    with pytest.raises(DataError, match=rf"x.jsonl:1: found '{key}', which looks .*columns.(image|video)={key},.*ign"):
        told({"messages": [ASK, ANSWER], "id": 7, key: value})


@pytest.mark.parametrize("value", [
    "a/b c.JPG", "clip.mp4", "https://a.b/c.webp?size=7", "data:image/png;base64,AA", b"x", ["1.png", "2.png"],
    {"bytes": b"x", "path": "a"}, [{"bytes": b"x", "path": None}],
])  # fmt: skip
def test_record_raises_if_value_of_unknown_key_looks_like_media(value):
    with pytest.raises(DataError, match=r"found 'foto', which looks like images .* keys are mess"):
        told({"messages": [ASK, ANSWER], "foto": value})
    with pytest.raises(DataError, match="found 'foto', which looks like"):
        told({"question": "a", "answer": "b", "foto": value})


@pytest.mark.parametrize("beside", [
    {"id": "000000033471", "image_id": "139", "image_width": 640, "num_images": 2, "frames": 8, "clip": 0.3},
    {"img": None, "video_path": "", "image_file": [], "pictures": {}},
    {"source": "coco", "caption": "A photo of a .jpg icon, and more.", "score": [0.5, 1.5], "meta": {"path": 7}},
    {"checksum": "iVBORw0KGgo=", "note": "SUkqA and so on, in words that are no base64."},
])  # fmt: skip
def test_unknown_keys_without_media_are_ignored(beside):
    assert told({"messages": [ASK, ANSWER], **beside})["messages"] == [ASK, ANSWER]


@pytest.mark.parametrize("beside", [
    {"id": "1.jpg", "file_name": "1.jpg", "path": "/data/coco/1.jpg", "coco_url": "http://a.b/other.jpg"},
    {"image_url": "http://a.b/other.jpg"}, {"image_url": {"url": "https://a.b/other.jpg"}},
    {"img_urls": ["http://a.b/1.jpg", "http://a.b/2.jpg"]},
    {"vid": "v_00017", "image_name": "0001", "image_list": ["0001"], "image_id": "COCO_1.jpg"},
])  # fmt: skip
def test_record_ignores_metadata_keys_of_image_under_image_key(beside):
    assert told(keyed(image="coco/1.jpg", **beside))["messages"][0]["content"][0] == image("coco/1.jpg")
    stored = {"bytes": b"x", "path": "1.jpg"}
    assert told(keyed(image=stored, **beside))["messages"][0]["content"][0] == image(b"x")


@pytest.mark.parametrize(("record", "key"), [
    *((keyed(image="coco/1.jpg", **{key: value}), key) for key, value in (
        ("file_name", "2.jpg"), ("file_name", "val/1.jpg"), ("video_url", "http://a.b/1.mp4"), ("img", "other"),
        ("image_path", "b/2.jpg"),
    )),
    ({"image": "A/1.png", "after": "B/1.png", "question": "Which?", "answer": "7"}, "after"),
    ({"image_id": "COCO_1.jpg", "question": "Which?", "answer": "7"}, "image_id"),
])  # fmt: skip
def test_record_raises_if_two_keys_name_different_media(record, key):
    with pytest.raises(DataError, match=f"found '{key}', which looks like"):
        told(record)


def test_conversations_with_role_and_messages_with_from_are_read():
    turns = [{"role": "human", "content": "Which?"}, {"role": "assistant", "content": "Seven."}]
    assert told({"conversations": turns}) == told({"messages": [HUMAN, GPT]}) == {"messages": [ASK, ANSWER]}
    parts = [{"role": "user", "content": [{"type": "image"}, text("Which?")]}, ANSWER]
    assert told({"conversations": parts, "image": "1"})["messages"][0]["content"][0] == image("1")
    with pytest.raises(DataError, match="message 1: found the keys role, content, from, expected"):
        parse_conversation(told({"conversations": [{"role": "user", "content": "a", "from": "human"}]}), "x", Path())
    last = [{"from": "human", "value": "Which?\n<image>"}, GPT]
    assert told({"conversations": last, "image": "1"})["messages"][0]["content"] == [text("Which?\n"), image("1")]


def test_query_instruction_and_texts_formats_become_messages():
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    record = {"query": "Which?", "response": "Seven.", "history": [["a", "b"]], "system": "Be brief."}
    assert told(record)["messages"] == [{"role": "system", "content": "Be brief."}, *before, ASK, ANSWER]
    alpaca = {"instruction": "Add.", "input": "3 + 4", "output": "Seven.", "text": "Below is ..."}
    assert told(alpaca)["messages"] == [{"role": "user", "content": "Add.\n3 + 4"}, ANSWER]
    for empty in ("", None):
        assert told({"instruction": "Which?", "input": empty, "output": "Seven."})["messages"] == [ASK, ANSWER]
    pairs = [{"user": "a", "assistant": "b", "source": "x"}, {"user": "Which?", "assistant": "Seven."}]
    assert told({"texts": pairs}) == {"messages": [*before, ASK, ANSWER]}


def test_prompt_media_without_placeholder_come_before_first_text():
    record = {"query": "Which?", "response": "Seven.", "history": [["a", "b"]], "system": "x", "images": ["1", "2"]}
    contents = [message["content"] for message in told(record)["messages"]]
    assert contents == ["x", [image("1"), image("2"), text("a")], "b", "Which?", "Seven."]
    assert told({"question": "", "answer": "b", "video": "1"})["messages"][0]["content"] == [video("1")]
    placed = told({"question": "Is <image> it?", "answer": "b", "image": "1", "videos": ["2"]})["messages"]
    assert placed[0]["content"] == [video("2"), text("Is "), image("1"), text(" it?")]
    with pytest.raises(DataError, match=r"found 1 placeholders for images .* expected 2"):
        told({"question": "<image>?", "answer": "b", "images": ["1", "2"]})


def test_part_types_of_openai_and_transformers_become_image_and_video_parts():
    parts = {
        "1.png": {"type": "image_url", "image_url": {"url": "1.png", "detail": "auto"}},
        "data:image/png;base64,AA": {"type": "image_url", "image_url": "data:image/png;base64,AA", "text": None},
        "2.png": {"type": "input_image", "image_url": "2.png"},
        "3.mp4": {"type": "video_url", "video_url": {"url": "3.mp4", "detail": None}},
        "https://a.b/4.png": {"type": "image", "url": "https://a.b/4.png"},
        "5.mp4": {"type": "video", "path": "5.mp4"},
    }
    content = [*parts.values(), {"type": "input_text", "text": "Which?"}]
    own = told({"messages": [{"role": "user", "content": content}, ANSWER]})["messages"][0]["content"]
    assert own == [*((video if "mp4" in name else image)(name) for name in parts), text("Which?")]


@pytest.mark.parametrize(("part", "message"), [
    ({"type": "image_url", "image_url": {"uri": "1"}}, "found {'uri': '1'} under 'image', expected a path or bytes"),
    ({"type": "image_url", "image_url": {"url": "1", "crop": 7}}, "found the keys type, image, crop, expected 'type'"),
    ({"type": "image", "image": "1", "url": "2"}, "found the keys type, image, url, expected 'type' and 'image'"),
    ({"type": "image_url", "image_url": {"url": "1", "detail": "low"}}, "found the detail 'low', expected 'auto'"),
    ({"type": "input_image", "image_url": "1", "detail": "low"}, "found the detail 'low', expected 'auto'"),
    ({"type": "image", "image": "file://host/a.png"}, "'file://host/a.png', a file of 'host', expected file:///"),
    ({"type": "image", "image": "file:///a%FF.png"}, r"'file:///a%FF.png', expected file:///PATH \(.*decode"),
    ({"type": "image", "image": "file:///a?b.png"}, r"expected '\?' and '#' in a path as %3F and %23"),
])  # fmt: skip
def test_record_raises_if_image_part_has_invalid_url_or_keys(part, message):
    record = {"messages": [{"role": "user", "content": [part]}, ANSWER]}
    with pytest.raises(DataError, match=f"^x.jsonl:1: message 1, part 1: .*{message}"):
        parse_conversation(told(record), "x.jsonl:1", Path())


def test_file_urls_are_read_as_paths_inside_media_root(tmp_path):
    root = tmp_path / "my media"
    (root / "a").mkdir(parents=True)
    for place in (root / "a" / "één #1.png", tmp_path / "out.png"):
        place.write_bytes(b"x")
    address, out = (root / "a" / "één #1.png").as_uri(), (tmp_path / "out.png").as_uri()
    assert "%20" in address and "%23" in address
    records = [
        {"messages": [{"role": "user", "content": [image(address)]}, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}, ANSWER]},
        {"messages": [{"role": "user", "content": [image({"bytes": None, "path": address})]}, ANSWER]},
        keyed(image=address.replace("file://", "file://localhost")),
        keyed(images=[{"bytes": None, "path": address}]),
    ]
    for record in records:
        assert parse_conversation(told(record), "x", root).images == (root / "a" / "één #1.png",)
    frames = parse_conversation(told({"question": "a", "answer": "b", "video": address}), "x", root).videos
    assert frames == (root / "a" / "één #1.png",)
    for escape in (out, f"{root.as_uri()}/a/%2E%2E/%2E%2E/out.png"):
        with pytest.raises(DataError, match="expected a path inside the media root"):
            parse_conversation(told(keyed(image=escape)), "x", root)


def test_loss_or_weight_key_of_sharegpt_turn_selects_trained_answers():
    turns = [HUMAN, {**GPT, "loss": False}, HUMAN, {**GPT, "weight": 1}]
    assert parse_conversation(told({"conversations": turns}), "here", Path()).losses == {1: False, 3: True}


def test_image_part_with_only_max_pixels_takes_next_image_of_record():
    part = {"type": "image", "max_pixels": 4096}
    record = {"messages": [{"role": "user", "content": [part]}, ANSWER], "images": ["a.png"]}
    assert told(record)["messages"][0]["content"] == [{**part, "image": "a.png"}]


@pytest.mark.parametrize("inside", [True, False])
@given(value=st.dictionaries(st.text(max_size=3), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6,
)), separators=st.sampled_from([None, (",", ":"), (" ,\n", " : ")]), ascii=st.booleans())  # fmt: skip
def test_tool_call_arguments_as_json_string_equal_object(value, separators, ascii, inside):
    text = json.dumps(value, separators=separators, ensure_ascii=ascii)

    def call_of(arguments):
        function = {"name": "look", "arguments": arguments}
        call = {"id": "1", "type": "function", "function": function} if inside else function
        record = {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]}
        conversation = parse_conversation(told(record), "x", Path())
        (found,) = conversation.messages[1]["tool_calls"]
        return found, found["function"] if inside else found

    found, function = call_of(text)
    assert function["arguments"] == value and json.dumps(function["arguments"]) == json.dumps(value)
    assert call_of(drop_nulls(value))[0] == call_of(json.dumps(drop_nulls(value)))[0] == call_of(value)[0]
    assert found.keys() == ({"id", "type", "function"} if inside else {"name", "arguments"})


@pytest.mark.parametrize("nothing", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " "}, {"arguments": {}}])
def test_tool_call_without_arguments_gets_empty_object(nothing):
    """Inference servers pass an empty object; some templates cannot render a call without arguments."""
    call = {"function": {"name": "look", **nothing}}
    own = told({"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]})
    assert own["messages"][1]["tool_calls"] == [{"function": {"name": "look", "arguments": {}}}]


@pytest.mark.parametrize(("call", "problem"), [
    ({"name": "look", "arguments": "{"}, "found '{' under 'arguments', expected an object, or a string that con"),
    ({"name": "look", "arguments": "[1]"}, r"found \[1\] under 'arguments', expected an object"),
    ({"name": "look", "arguments": "null"}, "found None under 'arguments', expected an object"),
    ({"name": "look", "arguments": '"{}"'}, "found '{}' under 'arguments', expected an object"),
    ({"function": {"name": "look", "arguments": [1]}}, r"found \[1\] under 'arguments', expected an object"),
    ({"function": {"arguments": {}}}, "found {'arguments': {}}, expected an object with a name and arguments"),
    ({"function": "look"}, "found 'look', expected an object with a name and arguments"),
    ({"name": 7}, "found {'name': 7, 'arguments': {}}, expected an object with a name and arguments"),
])  # fmt: skip
def test_record_raises_if_tool_call_is_invalid(call, problem):
    calls = [{"name": "look", "arguments": {}}, call]
    record = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": calls}]}
    with pytest.raises(DataError, match=f"^x: message 2, tool call 2: {problem}"):
        parse_conversation(told(record), "x", Path())


def test_null_values_in_texts_and_images_keys_are_ignored():
    texts = [{"user": "Which?", "assistant": "Seven.", "source": None, "score": None}]
    pictures = [{"bytes": b"one", "path": None, "url": None}, {"bytes": None, "path": None, "url": None}]
    assert told({"texts": texts})["messages"] == [ASK, ANSWER]
    assert asked("<image>", images=pictures[:1]) == asked("<image>", images=[b"one"])
    assert told({"messages": [ASK, ANSWER], "images": pictures[1:]})["messages"] == [ASK, ANSWER]


@pytest.mark.parametrize(("key", "value", "expected"), [
    ("System", "Be brief.", "'system'"), ("Tools", [{"type": "function"}], "'tools'"),
    ("HISTORY", [["a", "b"]], "'history'"), ("sampleFps", 2, "'sample_fps'"),
    *((key, value, f"'{key}' in a message or its content") for key, value in (
        ("loss", False), ("reasoning_content", "So."), ("tool_calls", []), ("min_pixels", 1024),
    )),
])  # fmt: skip
def test_record_raises_if_key_is_misspelled_or_misplaced(read, key, value, expected):
    record = {"messages": [ASK, ANSWER], key: value}
    with pytest.raises(DataError, match=f"found '{key}', which is ignored here, expected {expected}"):
        read(record)
    assert read({**record, key: None}).messages == read(record | {key: None, "source": "web"}).messages


@pytest.mark.parametrize("key", ["label", "kto_tag"])
@pytest.mark.parametrize("turns", [
    {"messages": [ASK, ANSWER]}, {"prompt": "Which?", "completion": "Seven."},
    {"query": "Which?", "response": "Seven."},
])  # fmt: skip
def test_record_raises_if_kto_label_is_false(read, turns, key):
    with pytest.raises(DataError, match=rf"'{key}' is false, .* undesirable .* KTO .*columns.ignore=\[{key}\]"):
        read(turns | {key: False})
    for value in (True, None, 3, ["Seven."], "no"):  # good answers, class numbers and ChartQA's answers
        assert len(read(turns | {key: value}).messages) == 2


def test_record_raises_if_kto_tag_is_zero_or_false(read):
    turns = {"messages": [ASK, ANSWER]}
    assert len(read(turns | {"label": 0}).messages) == 2
    for value in (0, "false", "False"):
        with pytest.raises(DataError, match=r"'kto_tag' is .*undesirable"):
            read({"question": "Which?", "answer": "Seven.", "kto_tag": value})


def test_record_with_renamed_columns_raises_if_kto_label_is_false():
    columns = Columns(question="prompt", answer="completion")
    with pytest.raises(DataError, match="'label' is false"):
        columns.convert_record({"prompt": "Which?", "completion": "Seven.", "label": False}, "here")


def test_label_field_with_value_false_is_ignored_next_to_question_and_answer(read):
    assert len(read({"question": "Is it seven?", "answer": "No.", "label": False}).messages) == 2


@pytest.mark.parametrize("key", ["rejected_images", "reject", "rejected_answer"])
def test_record_raises_if_it_has_rejected_answers_of_preference_data(read, key):
    with pytest.raises(DataError, match=f"found '{key}', a key of preference data"):
        read({"messages": [ASK, ANSWER], key: ["x"]})
    assert read({"messages": [ASK, ANSWER], key: 0.5, "rejection": "x"}).messages == (ASK, ANSWER)  # a score


@pytest.mark.parametrize("key", ["loss_mask", "loss_scale", "completion_mask", "assistant_masks"])
def test_record_raises_if_loss_mask_key_is_next_to_turns(read, key):
    with pytest.raises(DataError, match=f"found '{key}', which is ignored here, expected 'loss' in a message"):
        read({"messages": [ASK, ANSWER], key: [0, 1]})


@pytest.mark.parametrize("key", ["audio", "audios", "audio_path"])
def test_record_error_for_audio_key_says_that_audio_is_not_supported(read, key):
    with pytest.raises(DataError, match=rf"found '{key}': audio is not supported; .*ignore=\[{key}\]") as e:
        read({"messages": [ASK, ANSWER], key: ["a.wav"]})
    assert "columns.image" not in str(e.value)


@pytest.mark.parametrize("text", ["<audio>", "<|audio|>", "Hear <audio_1>."])
def test_record_raises_if_audio_placeholder_is_outside_text_part(read, text):
    ask = {"role": "user", "content": text}
    with pytest.raises(DataError, match=r"message 1: found '<.*audio.*>' in a text: audio is not supported"):
        read([ask, ANSWER])
    part = {"role": "user", "content": [{"type": "text", "text": text}]}
    assert read([part, ANSWER]).messages[0]["content"] == part["content"]


@pytest.mark.parametrize("value", [{"path": "1.png", "width": 2}, [{"url": "1.png"}], {"bytes": b"x", "mime": "a"}])
def test_record_raises_if_unknown_key_has_object_with_media(value):
    with pytest.raises(DataError, match="found 'extra', which looks like images"):
        told({"messages": [ASK, ANSWER], "extra": value})
    same = {"messages": [ASK, ANSWER], "question": None, "image": "a/1.png"}
    same["messages"] = [{"role": "user", "content": "<image>"}, ANSWER]
    assert told(same | {"extra": {"path": "1.png", "width": 2}})["messages"] == told(same)["messages"]


def test_json_lines_messages_as_json_string_are_read(read):
    messages = [{**ASK, "name": None}, ANSWER]
    assert read({"messages": json.dumps(messages)}).messages == (ASK, ANSWER)
