"""Turns, places and media that could be read in two ways: read in the one that is exact, or refused with a way out."""

import base64
import re
from io import BytesIO

from qwen3vl_bridge.data import Columns, DataError, open_source
from qwen3vl_bridge.data.schemas.conversations import messages_of

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

ASK, ANSWER = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}
HUMAN, GPT = {"from": "human", "value": "Which?"}, {"from": "gpt", "value": "Seven."}
GIVES_TURNS = {
    "messages": {"messages": [ASK, ANSWER]},
    "conversations": {"conversations": [HUMAN, GPT]},
    "texts": {"texts": [{"user": "Which?", "assistant": "Seven."}]},
    "question": {"question": "Which?", "answer": "Seven."},
    "query": {"query": "Which?", "response": "Seven."},
    "prompt": {"prompt": "Which?", "completion": "Seven."},
    "instruction": {"instruction": "Which?", "output": "Seven."},
}


def told(record: dict) -> list:
    return messages_of(record, "x.jsonl:1")["messages"]


def asked(words: str, answer: str = "Seven.", **beside) -> list:
    """The parts of a question, the same in both spellings of turns and as a question with its answer."""
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
def test_turns_under_two_keys_are_refused(first, second):
    """Whichever is read, what stands under the other would be dropped."""
    if first == second:
        assert told(GIVES_TURNS[first]) == [ASK, ANSWER]
        return
    record = {**GIVES_TURNS[first], **GIVES_TURNS[second]}
    which = r"^x.jsonl:1: found both '.*', which each give the turns, .*columns.ignore=\["
    with pytest.raises(DataError, match=which) as caught:
        told(record)
    left_out = re.search(r"ignore=\[(.*)\]", str(caught.value))[1]
    assert Columns(ignore=tuple(left_out.split(","))).messages_of(record, "x")["messages"] == [ASK, ANSWER]


@pytest.mark.parametrize("key", GIVES_TURNS)
def test_words_that_are_not_read_with_the_turns_are_refused(key):
    history, record = [["a", "b"]], GIVES_TURNS[key]
    if key in ("messages", "conversations", "texts"):
        with pytest.raises(DataError, match=rf"found 'history' next to '{key}', with which .*columns.ignore=\[history"):
            told({**record, "history": history})
    else:
        assert len(told({**record, "history": history})) == 4
    if key == "instruction":
        assert told({**record, "input": "a"})[0]["content"] == "Which?\na"
    else:
        with pytest.raises(DataError, match=rf"found 'input' next to '{key}', with which .*columns.ignore=\[input\]"):
            told({**record, "input": "a"})
    assert told({**record, "history": [], "input": ""}) == told({**record, "history": None, "input": None})


def test_half_a_pair_is_no_turn():
    """HuggingFaceH4/ultrachat_200k has `messages`, and the first of them again as `prompt`."""
    assert told({"prompt": "Which?", "prompt_id": "f0e", "messages": [ASK, ANSWER]}) == [ASK, ANSWER]
    assert told({"conversations": [HUMAN, GPT], "answer": "7"}) == [ASK, ANSWER]


def test_tables_refuse_what_records_do(tmp_path):
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
def test_other_spellings_of_a_place_take_the_next_picture(place):
    words = f"A {place} and {place}?"
    assert spelt(asked(words, images=["1", "2"])) == "A [1] and [2]?"
    for images in ({}, {"images": ["1"]}, {"images": ["1", "2", "3"]}):
        with pytest.raises(DataError, match=rf"found 2 placeholders for images \({re.escape(repr(place))} in a text"):
            asked(words, **images)
    assert spelt(asked("<VideoHere>?", video="1")) == "[1]?"


@pytest.mark.parametrize("form", ["<image {}>", "<image_{}>", "<image{}>", "<Image-{}>", "<|image_{}|>", "<img {}>"])
def test_numbered_places_are_the_pictures_of_these_numbers(form):
    one, two, three = (form.format(number) for number in (1, 2, 3))
    assert spelt(asked(f"{two} beside {one}?", images=["a", "b"])) == "[b] beside [a]?"
    # A picture that is named twice is shown twice.
    assert spelt(asked(f"{one}: is {one} or {two} it?", images=["a", "b"])) == "[a]: is [a] or [b] it?"
    for words, images, numbers in (
        (f"{one} {three}", ["a", "b"], "1, 3"),
        (f"{one} {one}", ["a", "b"], "1"),
        (form.format(0), ["a"], "0"),
    ):
        with pytest.raises(DataError, match=f"numbers {numbers}, expected each number from 1 to {len(images)}"):
            asked(words, images=images)
    with pytest.raises(DataError, match=r"found 1 placeholders for images .* expected 0"):
        asked(one)


def test_a_path_in_the_text_is_the_picture():
    """As Qwen-VL's own data has it."""
    words = "Picture 1: <img>a/1.png</img>\nWhich?"
    assert spelt(asked(words)) == "Picture 1: [a/1.png]\nWhich?"
    assert spelt(asked(words, image="")) == "Picture 1: [a/1.png]\nWhich?"
    with pytest.raises(DataError, match=r"found '<img>a/1.png</img>' in a text, and 1 images next to it, expected one"):
        asked(words, image="a/1.png")


@pytest.mark.parametrize("words", ["<image><img>", "<img><ImageHere>", "<image><image 1>", "<img>1.png</img><image>"])
def test_places_of_several_spellings_are_refused(words):
    with pytest.raises(DataError, match=r"found both '<.*>' and '<.*>', expected placeholders of one spelling; .*list"):
        asked(words, images=["a", "b"])
    part = [{"role": "user", "content": [{"type": "image"}]}, ANSWER, {"role": "user", "content": "<img>"}, ANSWER]
    with pytest.raises(DataError, match="found both a part without its own and '<img>', expected"):
        told({"messages": part, "images": ["a", "b"]})


@pytest.mark.parametrize("place", ["<img>", "<image 1>", "<ImageHere>", "<img>1.png</img>"])
def test_another_spelling_in_an_answer_is_refused(place):
    for beside in ({"image": "1"}, {}):
        with pytest.raises(DataError, match=rf"message 2: found '{place}' in an answer, which may be a placeholder"):
            asked("Which tag?", f"It is {place}.", **beside)
    text = {"question": "Which tag?", "answer": f"It is {place}.", "image": "1"}
    own = messages_of(text, "x", placeholders="text")["messages"]
    assert spelt(own[0]["content"]) == "[1]Which tag?" and own[1]["content"] == f"It is {place}."
    parts = [ASK, {**ANSWER, "content": [{"type": "text", "text": place}]}]
    assert told({"messages": parts}) == parts


@pytest.mark.parametrize("words", ["<img src=1.png>", "<imagery>", "<image", "image 1", "<|image_pad|>", "<im>"])
def test_what_only_begins_like_a_place_is_text(words):
    assert asked(words) == words


@pytest.mark.parametrize("none", ["", None, [], {}, [""], [None], {"bytes": None, "path": None}, [{}]])
@pytest.mark.parametrize("key", ["image", "images", "video", "videos"])
def test_an_empty_key_is_no_picture(key, none):
    assert asked("Which?", **{key: none}) == "Which?"
    kind = key.rstrip("s")
    with pytest.raises(DataError, match=rf"found 1 placeholders for {kind}s .* expected 0"):
        asked(f"<{kind}>?", **{key: none})
    other = f"{kind}s" if key == kind else kind
    assert spelt(asked(f"<{kind}>?", **{key: none, other: ["1"]})) == "[1]?"


@pytest.mark.parametrize("some", [["1", ""], ["1", None], [[]], [{"bytes": None, "path": None}, "1"]])
def test_an_empty_one_among_pictures_is_refused(some):
    with pytest.raises(DataError, match=r"videos \d: found .*, expected a path"):
        asked("<video><video>", videos=some)


def encoded(kind: str) -> str:
    file = BytesIO()
    Image.new("RGB", (64, 64)).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "value", [*map(encoded, ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")), "AAAAIGZ0eXBpc29tAAACAGlzb21pc28y" * 3]
)
def test_base64_under_any_key_is_noticed(value):
    for content in (value, [value, value], {"bytes": value, "path": None}):
        with pytest.raises(DataError, match=r"found 'payload', which looks like images .*columns.image=payload"):
            asked("Which?", payload=content)
        with pytest.raises(DataError, match=r"found 1 placeholders .* payload, id. If one .* \(columns.image=KEY\)"):
            asked("<image>Which?", image_source="web", payload=content)
    assert asked("Which?", checksum="iVBORw0KGgo=", note="SUkqA and so on, in words that are no base64.") == "Which?"


@pytest.mark.parametrize("beside", [
    {"image_url": "http://a.b/other.jpg"}, {"image_url": {"url": "https://a.b/other.jpg"}},
    {"img_urls": ["http://a.b/1.jpg", "http://a.b/2.jpg"]},
    {"vid": "v_00017", "image_name": "0001", "image_list": ["0001"], "image_id": "COCO_1.jpg"},
])  # fmt: skip
def test_metadata_beside_media_that_are_read_are_left_unread(beside):
    assert spelt(asked("<image>Which?", image="coco/1.jpg", **beside)) == "[coco/1.jpg]Which?"


@pytest.mark.parametrize("beside", [{"video_url": "http://a.b/1.mp4"}, {"img": "other"}, {"image_path": "b/2.jpg"}])
def test_media_beside_media_that_are_read_are_refused(beside):
    with pytest.raises(DataError, match=f"found '{next(iter(beside))}', which looks like"):
        asked("<image>Which?", image="coco/1.jpg", **beside)
