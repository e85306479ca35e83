"""Records of every spelling, mutated at random: what is trained on shows all that is read, or the record is refused.

Never is a placeholder trained on as the letters it is spelt with beside media that nobody reads.
"""

import base64
import io
import re
from pathlib import Path

from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data.schemas.conversations import conversation_of, messages_of

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from PIL import Image

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


def content(number: int) -> bytes:
    """A picture, each of its own size."""
    file = io.BytesIO()
    Image.new("RGB", (64 + 32 * number, 64), (40 * number, 0, 0)).save(file, "PNG")
    return file.getvalue()


MEDIA = {
    "path": lambda n: f"{n}.png",
    "file": lambda n: {"bytes": content(n), "path": None},
    "data": lambda n: "data:image/png;base64," + base64.b64encode(content(n)).decode(),
    "base64": lambda n: base64.b64encode(content(n)).decode(),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("mutated")
    for number in range(1, 5):
        (root / f"{number}.png").write_bytes(content(number))
    return root


def turns_of(spelling: str, said: list[str]) -> dict:
    """Questions and answers in a spelling."""
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
    """A record with up to three pictures, and then up to two mutations of it."""
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
def test_all_that_is_read_is_shown_or_the_record_is_refused(encoder, root, record):
    try:
        conversation = conversation_of(messages_of(record, "here"), "here", root)
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
