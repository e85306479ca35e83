"""Test that a record gives the same tokens or the same error in every file format."""

import json
import random
from pathlib import Path

from qwen3vl_bridge.data import DataError, Encoder, HubDataset, StreamedDataset, open_source

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.conftest import picture, with_template, write
from tests.data.released import QWEN3_6

pytestmark = pytest.mark.usefixtures("streams_end_at_once")

WORDS = ("a", "seven", "<image>", "<video>", "<bbox>", "<audio>", "Which?", "é", '{"a": null}', "a.png")


@pytest.fixture(scope="module")
def thinker(processor) -> Encoder:
    return Encoder(with_template(processor, QWEN3_6))


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    for number, name in enumerate(("a.png", "b.png")):
        picture(folder / name, 32, 32, seed=number)
    return folder


class Batch:
    """Generate records that fit into one table: each key has one type."""

    def __init__(self, seed: int) -> None:
        self.r = r = random.Random(seed)
        self.as_parts, self.kwargs = r.random() < 0.4, r.random() < 0.3
        self.turns = r.choice(("messages", "messages", "conversations", "query", "question", "texts", "prompt"))
        images = (self.path, lambda: [self.path() for _ in range(r.randint(0, 2))])
        file = lambda: {"bytes": None, "path": self.path()}  # noqa: E731
        sized = lambda: {"path": self.path(), "width": 32, "height": 32}  # noqa: E731
        odd = (*images, sized, lambda: [{"url": self.path()}], lambda: [self.path()] * 2)
        self.extra = {
            r.choice(("image", "images")): r.choice((*images, file, lambda: [file()])),
            r.choice(("img", "photo_info", "pictures", "extra")): r.choice(odd),
            "videos": lambda: [["a.png", "b.png"]],
            "sample_fps": lambda: 2.0,
            "system": lambda: r.choice(("Be brief.", "")),
            "tools": r.choice((lambda: [self.tool()], lambda: json.dumps([self.tool()]))),
            "rejected": lambda: r.choice(("No.", "")),
            "rejected_score": lambda: 0.5,
            "loss": lambda: r.random() < 0.5,
            r.choice(("label", "kto_tag")): r.choice((lambda: r.random() < 0.5, lambda: 1, lambda: ["Seven."])),
            r.choice(("loss_mask", "loss_scale")): lambda: [1, 0],
            "objects": lambda: {"bbox": [[1, 2]], "ref": r.choice((["x"], None))},
            "tool_calls": lambda: [{"name": "f", "arguments": self.arguments()}],
            "audios": lambda: ["a.wav"],
            "Tools": lambda: "x",
            "chat_template_kwargs": self.variables,
            "meta": lambda: {"n": 1, "source": r.choice(("x", None)), "empty": None},
            "id": lambda: r.randint(0, 9),
            "history": lambda: [["Which?", "Seven."]],
            "input": lambda: "3",
        }
        usual = {"id", "meta", "system", "tools", "image", "images", "chat_template_kwargs"}
        self.odds = {key: r.choice((0.1, 0.4) if key in usual else (0, 0, 0, 0.1)) for key in self.extra}

    def path(self) -> str:
        return self.r.choice(("a.png", "b.png"))

    def summary(self) -> str:
        # Mostly plain, so that most records are valid.
        many = self.r.choices(WORDS, weights=(9, 9, 2, 0.5, 0.5, 0.3, 9, 9, 3, 1), k=self.r.randint(1, 3))
        return " ".join(many)

    def arguments(self) -> dict:
        return self.some(city="Paris", n=1, where={"x": 1, "y": None}, tags=["x", None])

    def some(self, **given) -> dict:
        return {key: value for key, value in given.items() if self.r.random() < 0.6}

    def tool(self) -> dict:
        parameters = {"type": "object", "properties": self.some(city={"type": "string"}, n={"default": None})}
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    def variables(self) -> dict:
        own = self.some(enable_thinking=self.r.random() < 0.5, preserve_thinking=self.r.random() < 0.5)
        return own | ({"thinking_budget": 7} if self.r.random() < 0.1 else {})

    def content(self):
        if not self.as_parts:
            return self.summary()
        image = self.r.choice(({"type": "image"}, {"type": "image", "image": self.path()}, {"type": "image"}))
        parts = [{"type": "text", "text": self.summary()}]
        return [image, *parts] if self.r.random() < 0.2 else parts

    def messages(self) -> list[dict]:
        r, found = self.r, []
        if r.random() < 0.15:
            found.append({"role": r.choice(("system", "developer")), "content": self.content()})
        for _ in range(r.randint(1, 2)):
            found.append({"role": r.choice(("user", "user", "user", "human")), "content": self.content()})
            answer = {"role": "assistant", "content": self.content()}
            if r.random() < 0.2:
                answer["reasoning_content"] = r.choice(("Hm.", ""))
            if r.random() < 0.15:
                answer["loss"] = r.random() < 0.5
            if r.random() < 0.15:
                answer["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": self.arguments()}}]
                found += [answer, {"role": "tool", "content": self.content(), "name": "f"}]
                answer = {"role": "assistant", "content": self.content()}
            found.append(answer)
        return found if r.random() < 0.95 else found[:1]

    def record(self) -> dict:
        own = {key: make() for key, make in self.extra.items() if self.r.random() < self.odds[key]}
        messages = self.messages()
        first = next((message for message in messages if message["role"] in ("user", "human")), messages[0])
        if self.turns == "conversations":
            messages = [{"from": one["role"], "value": one["content"]} for one in messages]
        if self.turns in ("messages", "conversations"):
            own[self.turns] = messages
        elif self.turns == "texts":
            own["texts"] = [{"user": self.summary(), "assistant": "Seven.", **self.some(source="x")}]
        elif self.turns == "prompt" and self.as_parts:
            own |= {"prompt": [first], "completion": [{"role": "assistant", "content": self.content()}]}
        else:
            answer = {"query": "response", "question": "answer", "prompt": "completion"}[self.turns]
            own |= {self.turns: self.summary(), answer: "Seven."}
        given = any(key in own for key in ("image", "images"))
        if given and self.r.random() < 0.8 and isinstance(first["content"], str):
            first["content"] = "<image>" + first["content"]
        return ordered(own)


def ordered(value):
    """Sort the keys of objects, because a table has one order for all rows."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value)}
    return [ordered(item) for item in value] if isinstance(value, list) else value


def sorted_type(kind):
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, sorted_type(field.type)) for field in sorted(kind, key=lambda f: f.name)])
    return pa.list_(sorted_type(kind.value_type)) if pa.types.is_list(kind) else kind


def column_of(values: list, r: random.Random, odd: bool):
    """Generate a table column in a type that fits the values."""
    column = pa.array(values)
    column = pa.array(values, sorted_type(column.type))
    if not odd:
        return column
    if pa.types.is_string(column.type):
        kinds = (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()))
        return column.cast(r.choice(kinds))
    if pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type):
        lengths = {len(value) for value in values if value is not None}
        kinds = [pa.large_list(pa.large_string()), pa.list_(pa.string_view())]
        kinds += [pa.list_(pa.string(), next(iter(lengths)))] if len(lengths) == 1 and 0 not in lengths else []
        return pa.array(values, r.choice(kinds))
    return column


def sources_of(records: list[dict], folder: Path, media: Path, r: random.Random):
    """Write the records in every format."""
    yield "jsonl", open_source(write(folder / "train.jsonl", records), media)
    (folder / "list.json").write_text(json.dumps(records))
    yield "json", open_source(folder / "list.json", media)
    names = sorted({key for record in records for key in record})
    stored = {name: [record.get(name) for record in records] for name in names}
    for name in {"messages", "conversations", "chat_template_kwargs"} & {*names}:
        if r.random() < 0.3:
            stored[name] = [None if value is None else json.dumps(value) for value in stored[name]]
    plain, odd = (pa.table({name: column_of(stored[name], r, odd) for name in names}) for odd in (False, True))
    (folder / "odd").mkdir()
    pq.write_table(odd, folder / "odd/train.parquet", row_group_size=7)
    yield "parquet", open_source(folder / "odd/train.parquet", media)
    dataset = datasets.Dataset(plain)
    dataset.save_to_disk(folder / "saved")
    yield "saved", open_source(folder / "saved", media)
    (folder / "hub").mkdir()
    pq.write_table(plain, folder / "hub/train-00000-of-00001.parquet")
    loaded = {
        streaming: datasets.load_dataset(
            str(folder / "hub"), split="train", streaming=streaming, cache_dir=str(folder / "cache")
        )
        for streaming in (False, True)
    }
    yield "hub", HubDataset(loaded[False], "hub", media)
    yield "stream", StreamedDataset(loaded[True], "hub", media)


def outcome(source, number: int, encoder: Encoder):
    """Return tokens, mask and pixels of a record, or the error without the name of the source."""
    try:
        sample = encoder(source[number])
    except DataError as error:
        return str(error).replace(source.sample_id(number), "PLACE")
    media = [getattr(sample, name) for name in ("pixel_values", "pixel_values_videos")]
    return (
        sample.input_ids.tolist(),
        sample.loss_mask.tolist(),
        [None if one is None else (tuple(one.shape), one.double().sum().item()) for one in media],
    )


def compare_formats(seeds, size: int, folder: Path, media: Path, encoder: Encoder) -> tuple[int, int]:
    """Return the numbers of records that are read and that raise."""
    good = bad = 0
    for seed in seeds:
        batch = Batch(seed)
        records = [batch.record() for _ in range(size)]
        (folder / str(seed)).mkdir()
        sources = dict(sources_of(records, folder / str(seed), media, batch.r))
        for number, record in enumerate(records):
            first, *others = [(name, outcome(source, number, encoder)) for name, source in sources.items()]
            for name, found in others:
                assert found == first[1], f"seed {seed}, record {number}, {name}: {json.dumps(record)}"
            good, bad = good + (not isinstance(first[1], str)), bad + isinstance(first[1], str)
    return good, bad


@pytest.mark.slow
def test_random_record_gives_same_sample_or_error_in_every_file_format(tmp_path, media, thinker):
    good, bad = compare_formats(range(6), 12, tmp_path, media, thinker)
    assert good > 10 and bad > 10


@pytest.mark.slow
def test_ten_thousand_random_records_give_same_sample_or_error_in_every_format(tmp_path, media, thinker):
    good, bad = compare_formats(range(1000, 1100), 100, tmp_path, media, thinker)
    assert good + bad == 10_000 and min(good, bad) > 2000
