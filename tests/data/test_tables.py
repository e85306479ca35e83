"""Test tables: types of columns, row groups, data sets on the hub, and fingerprints of files."""

import json
import logging
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory

from qwen3vl_bridge.data import Columns, DataError, HubDataset, Parquet, StreamedDataset, open_source, tables

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.conftest import dialogue, write

ASK, ANSWER = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}


def test_tables_read_images_of_datasets_image_columns(folder, tmp_path):
    first, second = ((folder / name).read_bytes() for name in ("a.png", "b.png"))
    parts = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    messages = dialogue(parts, [{"type": "text", "text": "b"}])
    rows = {"messages": [messages], "images": [[{"path": str(folder / "a.png")}, {"bytes": second, "path": "b.png"}]]}
    rows["images"][0][0] |= {"bytes": first, "path": None}
    dataset = datasets.Dataset.from_dict(rows).cast_column("images", datasets.List(datasets.Image()))
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "train.parquet")
    for source in (HubDataset(dataset, "x"), *map(open_source, (tmp_path / "saved", tmp_path / "train.parquet"))):
        assert source[0].images == (first, second)
        assert [part["type"] for part in source[0].messages[0]["content"]] == ["image", "text", "image"]
        assert source[0].messages[1]["content"] == [{"type": "text", "text": "b"}]


@pytest.mark.parametrize("typed", [True, False])
def test_tables_read_messages_and_tools_from_json_columns(folder, tmp_path, typed):
    messages = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, ANSWER]
    tools = [{"name": "look", "default": None}]
    column = pa.array([json.dumps(messages)], pa.json_() if typed else pa.string())
    table = pa.table({"messages": column, "tools": pa.array([json.dumps(tools)], column.type)})
    pq.write_table(table, tmp_path / "train.parquet")
    conversation = Parquet(tmp_path / "train.parquet", folder)[0]
    assert conversation.messages == (messages[0], ANSWER) and conversation.tools == tuple(tools)


def test_hub_dataset_reads_json_file_loaded_by_datasets_library(folder, tmp_path):
    path = write(tmp_path / "train.jsonl", [{"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}])
    dataset = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    dataset = dataset.add_column("image", ["a.png"])
    assert HubDataset(dataset, "x", folder)[0].images == (folder / "a.png",)


@pytest.mark.parametrize("medium", ["a.png", {"bytes": None, "path": "a.png"}])
def test_tables_raise_if_image_path_has_no_media_root(folder, medium):
    messages = [{"role": "user", "content": "<image>"}, ANSWER]
    dataset = datasets.Dataset.from_list([{"messages": messages, "image": medium}])
    with pytest.raises(DataError, match=r"x\[0\]: message 1, part 1: found the path 'a.png', but media_root is"):
        HubDataset(dataset, "x")[0]
    assert HubDataset(dataset, "x", folder)[0].images == (folder / "a.png",)


def test_parquet_row_group_cache_is_bounded(folder, monkeypatch, caplog):
    source = Parquet(folder / "train.parquet")
    assert not caplog.messages
    assert [source[index].sample_id for index in (0, 19)] == ["train.parquet[0]", "train.parquet[19]"]
    assert list(source._cache) == [0, 6]
    monkeypatch.setattr(tables, "CACHE_GROUPS", 2)
    source[0], source[3], source[0], source[6]
    assert list(source._cache) == [0, 2]
    monkeypatch.setattr(tables, "CACHE_BYTES", 10)
    with caplog.at_level(logging.WARNING):
        Parquet(folder / "train.parquet")
    assert "found a row group of" in caplog.text and "smaller row_group_size" in caplog.text
    source[9]
    assert list(source._cache) == [3] and not pickle.loads(pickle.dumps(source))._cache


@pytest.mark.parametrize("keep", [0, 3, 200, -9])
def test_parquet_raises_if_file_is_truncated(folder, tmp_path, keep):
    (tmp_path / "train.parquet").write_bytes((folder / "train.parquet").read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"^{tmp_path}/train.parquet: found no complete Parquet file"):
        open_source(tmp_path)


def test_parquet_error_names_row_of_damaged_row_group(folder, tmp_path):
    data = bytearray((folder / "train.parquet").read_bytes())
    data[4:400] = b"\xff" * 396
    (tmp_path / "train.parquet").write_bytes(data)
    source = Parquet(tmp_path / "train.parquet", folder)
    with pytest.raises(DataError, match=r"^train.parquet\[1\]: cannot read row group 0"):
        source[1]
    assert source[19].messages == Parquet(folder / "train.parquet", folder)[19].messages


@pytest.mark.parametrize(("column", "message"), [
    (pa.array([[{"role": "user", "content": [{"type": "image", "image": "../x.png"}]}]]), "is .* inside the media"),
    (pa.array([[ASK]]), r"train.parquet\[0\]: found the roles user, expected an assistant message"),
    (pa.array([None], pa.string()), r"train.parquet\[0\]: found None under 'messages'"),
    (pa.array(["[{"]), r"train.parquet\[0\]: found a value that does not decode \(.*\), expected JSON"),
    (pa.array(["[" * 100_000]), r"train.parquet\[0\]: found a value that does not decode \(.*more than 50 deep"),
    (pa.array([b"\xff"]).cast(pa.string(), safe=False), r"train.parquet\[0\]: found bytes that are not valid UTF-8"),
    (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), r"train.parquet\[0\]: found {'a': 1} under 'messages'"),
    (pa.array([7]), r"train.parquet\[0\]: found 7 under 'messages'"),
    (pa.array([], pa.string()), "train.parquet: found no rows, expected one conversation a row"),
])  # fmt: skip
def test_parquet_raises_if_messages_column_has_invalid_values(tmp_path, column, message):
    pq.write_table(pa.table({"messages": column}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=message):
        Parquet(tmp_path / "train.parquet")[0]


def test_parquet_raises_if_messages_are_missing_or_splits_are_mixed(folder, tmp_path):
    pq.write_table(pa.table({"words": ["hi"], "n": [1]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x.parquet: found the columns words, n, expected 'messages' or"):
        Parquet(tmp_path / "x.parquet")
    for name in ("train-0.parquet", "test-0.parquet"):
        (tmp_path / "splits").mkdir(exist_ok=True)
        (tmp_path / "splits" / name).write_bytes((folder / "train.parquet").read_bytes())
    with pytest.raises(DataError, match=r"found files of the splits test, train; .*/NAME-\*.parquet"):
        open_source(tmp_path / "splits")
    assert len(open_source(tmp_path / "splits/train-*.parquet", folder)) == 20


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return local repositories that `datasets` reads by name."""
    configurations = {"ai2d": ("train", "test"), "vqa(x, y)": ("train",)}
    head = ["configs:"]
    for configuration, splits in configurations.items():
        head += [f'- config_name: "{configuration}"', "  data_files:"]
        for split in splits:
            messages = [{"role": "user", "content": f"{configuration} {split}?"}, ANSWER]
            folder = tmp_path / "owner/several" / configuration
            folder.mkdir(parents=True, exist_ok=True)
            table = pa.Table.from_pylist([{"messages": messages}])
            pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")
            head += [f"  - split: {split}", f'    path: "{configuration}/{split}-*"']
    (tmp_path / "owner/several/README.md").write_text("\n".join(["---", *head, "---", ""]))
    (tmp_path / "owner/one").mkdir()
    (tmp_path / "owner/one/train.parquet").write_bytes((folder / "train-00000-of-00001.parquet").read_bytes())
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "called", "asked"), [
    ("owner/several:ai2d#train", "owner/several:ai2d#train", "ai2d train?"),
    ("owner/several:ai2d#test", "owner/several:ai2d#test", "ai2d test?"),
    ("datasets/owner/several:vqa(x, y)", "owner/several:vqa(x, y)#train", "vqa(x, y) train?"),
    ("owner/one", "owner/one#train", "vqa(x, y) train?"),
    ("datasets/owner/one@main#train", "owner/one@main#train", "vqa(x, y) train?"),
    ("datasets/owner/several/ai2d#test", "datasets/owner/several/ai2d#test", "ai2d test?"),
    *((name, f"{name}#train", "ai2d test?")
      for name in (f"datasets/owner/several/ai2d/test-{end}.parquet" for end in ("*", "00000-of-00001"))),
])  # fmt: skip
@pytest.mark.usefixtures("repository")
def test_hub_address_opens_named_configuration_and_split(name, called, asked, streaming):
    source = StreamedDataset.from_hub(f"hf://{name}") if streaming else open_source(f"hf://{name}")
    assert (source[0].sample_id, source[0].messages[0]["content"]) == (f"{called}[0]", asked)
    assert source.fingerprint().startswith(f"{called}, ")


UNLOADED = "found a data set that does not load"


@pytest.mark.parametrize("read", [open_source, StreamedDataset.from_hub])
@pytest.mark.parametrize(("name", "message"), [
    ("owner/several", rf"hf://owner/several: {UNLOADED} .*ai2d.*vqa\(x, y\)"),
    ("owner/several#test", f"hf://owner/several: {UNLOADED} .*ai2d"),
    ("owner/several@main:ocr", f"hf://owner/several@main:ocr: {UNLOADED} .*ai2d"),
    ("owner/one:ai2d", f"hf://owner/one:ai2d: {UNLOADED} .*default"),
    ("datasets/owner/several:ai2d", "ai2d: found the splits train, test; choose one, such as hf://owner/several:ai2d#tr"),
    ("owner/several:ai2d#dev", f'hf://owner/several:ai2d: {UNLOADED} .*"dev"|Bad split: dev'),
    ("datasets/owner/several/no/*.parquet", rf"hf://datasets/owner/several/no/\*.parquet: {UNLOADED}"),
])  # fmt: skip
@pytest.mark.usefixtures("repository")
def test_hub_address_raises_if_configuration_or_split_is_missing(name, message, read):
    with pytest.raises(DataError, match=f"(?s){message}"):
        read(f"hf://{name}")


@pytest.mark.parametrize("name", ["name", "a/b/c", "", "a/../b", "a/b:", "a/b#", "datasets/a"])
def test_open_source_raises_if_hub_address_is_malformed(name):
    with pytest.raises(DataError, match="expected hf://owner/name, hf://owner/name:configuration#split or"):
        open_source(f"hf://{name}")


@pytest.mark.parametrize("revision", ["v1.0", "refs%2Fconvert%2Fparquet"])
@pytest.mark.usefixtures("repository")
def test_hub_address_with_revision_loads_that_revision(monkeypatch, revision):
    asked = []
    load = datasets.load_dataset
    # And for nothing else: no argument lets the library run a loading script.
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *n, revision, split: asked.append(revision) or load(*n, split=split)
    )
    source = open_source(f"hf://owner/one@{revision}#train")
    assert source[0].messages[0]["content"] == "vqa(x, y) train?"
    assert source.fingerprint().startswith(f"owner/one@{revision.replace('%2F', '/')}#train, 1 rows, ")
    assert asked == [revision.replace("%2F", "/")]


def test_saved_dataset_raises_if_split_is_unnamed_damaged_or_empty(tmp_path):
    dataset = datasets.Dataset.from_list([{"messages": [ASK, ANSWER]}])
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"found the splits test, train; choose one with .*saved/SPLIT"):
        open_source(tmp_path / "saved")
    assert len(open_source(tmp_path / "saved/test")) == 1
    next((tmp_path / "saved/test").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match="saved/test: found a data set that does not load"):
        open_source(tmp_path / "saved/test")
    with pytest.raises(DataError, match="x: found the columns words, expected 'messages' or 'conversations'"):
        HubDataset(datasets.Dataset.from_dict({"words": ["hi"]}), "x")
    with pytest.raises(DataError, match="x: found no rows"):
        HubDataset(dataset.select([]), "x")


@pytest.mark.parametrize("streaming", [True, False])
def test_answers_that_look_like_json_stay_text_when_loaded_by_datasets(tmp_path, streaming):
    """`datasets` stores them unquoted in a column of strings and lists."""
    answers = [
        "7", "7 ", "-1.5", "null", "true", "[1, 2]", "[]", "{}", '{"box": [1]}', '[{"type": "box"}]', "seven", "",
    ]  # fmt: skip
    parts = [{"type": "text", "text": "which"}]
    records = [{"messages": dialogue(parts, answer)} for answer in answers]
    path = write(tmp_path / "train.jsonl", records)
    loaded = datasets.load_dataset(
        "json", data_files=str(path), split="train", streaming=streaming, cache_dir=str(tmp_path / "cache")
    )
    if streaming:
        source = StreamedDataset(loaded, "train")
    else:
        loaded.save_to_disk(tmp_path / "saved")
        source = open_source(tmp_path / "saved")
    found = [source[number].messages for number in range(len(answers))]
    assert [messages[1]["content"] for messages in found] == answers
    assert all(messages[0]["content"] == parts for messages in found)


def some_of(**keys):
    return st.fixed_dictionaries({}, optional=keys)


# Nulls among elements are the user's own: tables only pad objects.
names, numbers = st.sampled_from(["", "x", "null"]), st.integers(0, 9)
lists = st.lists(st.one_of(st.none(), names), max_size=3)
inner = some_of(x=numbers, names=lists, deep=st.lists(some_of(name=names, y=numbers), max_size=2))
arguments = some_of(city=names, a=numbers, b=st.floats(-1, 1), tags=lists, where=inner, flag=st.booleans())
schemas = some_of(type=names, enum=lists, default=numbers, properties=some_of(city=inner, a=inner))


def called(values: dict, schema: dict) -> dict:
    """Return a record with a call with these arguments, and a tool with this schema."""
    call = {"type": "function", "function": {"name": "add", "arguments": values}}
    calls = [call, {"name": "f", "arguments": values}]
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [{"role": "tool", "content": "3"}, ANSWER]
    return {"messages": messages, "tools": [{"name": "add", "parameters": schema}]}


@pytest.mark.slow
@given(st.lists(st.tuples(arguments, schemas), min_size=1, max_size=4))
@settings(max_examples=15)
def test_null_keys_of_tool_calls_and_tools_are_removed_in_every_source(cases):
    every = {"x": 1, "names": ["x"], "deep": [{"name": "x", "y": 1}]}
    full = {"city": "x", "a": 1, "b": 0.5, "tags": ["x"], "where": every, "flag": True}
    cases = [(full, {"type": "x", "enum": ["x"], "default": 1, "properties": {"city": every, "a": every}}), *cases]
    dataset = datasets.Dataset.from_list([called(*case) for case in cases])
    with TemporaryDirectory() as folder:
        assert "null" in json.dumps(dataset[1])
        padded = dataset.to_list()
        write(Path(folder, "train.jsonl"), padded)
        Path(folder, "list.json").write_text(json.dumps(padded))
        dataset.to_parquet(f"{folder}/train.parquet")
        dataset.save_to_disk(f"{folder}/saved")
        opened = [open_source(f"{folder}/{name}") for name in ("train.jsonl", "list.json", "train.parquet", "saved")]
        for source in (StreamedDataset(dataset.to_iterable_dataset(), "x"), *opened):
            for number, (values, schema) in enumerate(cases):
                found = source[number]
                first, second = found.messages[1]["tool_calls"]
                assert first == {"type": "function", "function": {"name": "add", "arguments": values}}
                assert second == {"name": "f", "arguments": values}
                assert found.tools == ({"name": "add", "parameters": schema},)
                assert [set(message) for message in found.messages[2:]] == [{"role", "content"}] * 2


def test_nulls_added_by_datasets_to_tool_calls_and_tools_are_removed(tmp_path):
    cases = [({"city": "x"}, {"type": "x"}), ({"a": 1, "b": 2}, {"enum": ["x"]})]
    rows = datasets.Dataset.from_list([called(*case) for case in cases]).to_list()
    mixed = {"messages": [{**ASK, "content": [{"type": "text", "text": "a"}]}, ANSWER]}
    path = write(tmp_path / "train.jsonl", [*rows, mixed])
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert "null" in json.dumps(loaded[1]) and "Json" in str(loaded.features)
    loaded.to_parquet(tmp_path / "train.parquet")
    for source in (HubDataset(loaded, "x"), Parquet(tmp_path / "train.parquet")):
        for number, (values, schema) in enumerate(cases):
            assert source[number].messages[1]["tool_calls"][1] == {"name": "f", "arguments": values}
            assert source[number].tools == ({"name": "add", "parameters": schema},)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_nulls_in_json_strings_of_tools_and_arguments_are_kept(tmp_path, kind):
    tools = [{"name": "add", "parameters": {"city": {"default": None}}}]
    record = called({}, {}) | {"tools": json.dumps(tools)}
    record["messages"][1]["tool_calls"] = [{"name": "add", "arguments": '{"city": null, "in": [{"x": null}]}'}]
    path = tmp_path / f"train.{kind}"
    write(path, [record]) if kind == "jsonl" else pq.write_table(pa.Table.from_pylist([record]), path)
    found = open_source(path)[0]
    assert found.tools == tuple(tools)
    assert found.messages[1]["tool_calls"] == [{"name": "add", "arguments": {"city": None, "in": [{"x": None}]}}]


@pytest.mark.parametrize("column", ["sample_fps", "fps"])
@pytest.mark.parametrize("rates", ["2", 2.0, ["2", "0.5"], [2.0, 0.5]])
def test_tables_sample_fps_column_sets_frame_rate_of_videos(folder, tmp_path, rates, column):
    videos = [["a.png", "b.png"], ["b.png"]]
    record = {"messages": [{**ASK, "content": "<video><video>"}, ANSWER], "videos": videos, column: rates}
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "train.parquet")
    write(tmp_path / "train.jsonl", [record, {"messages": [ASK, ANSWER]}])
    columns = Columns(sample_fps="fps") if column == "fps" else None
    for path in (tmp_path / "train.parquet", tmp_path / "train.jsonl"):
        found = open_source(path, folder, columns=columns)[0].videos
        assert [video.fps for video in found] == ([2, 0.5] if isinstance(rates, list) else [2, 2])
        assert [[frame.name for frame in video.frames] for video in found] == videos
    assert open_source(tmp_path / "train.jsonl", folder, columns=columns)[1].videos == ()  # without the column


ROWS = 60


def table(answer: str = "seven", changed: int = -1, picture: bytes = b"") -> pa.Table:
    """Write rows with texts and image bytes; optionally one has another answer."""
    answers = [answer if row == changed else "seven" for row in range(ROWS)]
    turns = [dialogue(f"{row}?", answers[row]) for row in range(ROWS)]
    pictures = [bytes([row]) * 500 + picture * (row == changed) for row in range(ROWS)]
    return pa.table({"messages": turns, "image": pictures, "other": list(range(ROWS))})


def stored(path: Path, rows: pa.Table, **how) -> Path:
    """Write a file without traces of an edit in names, times or sizes, unless requested."""
    how = {"compression": "none", "use_dictionary": False, "write_statistics": False, "row_group_size": 7, **how}
    pq.write_table(rows, path, **how)
    return path


def fingerprint(path: Path) -> str:
    return Parquet(path).fingerprint()


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("row", [0, 31, ROWS - 1])
def test_parquet_fingerprint_changes_with_one_cell(tmp_path, compression, row):
    before = stored(tmp_path / "a.parquet", table(), compression=compression)
    after = stored(tmp_path / "b.parquet", table("eight", row), compression=compression)
    same = stored(tmp_path / "c.parquet", table(), compression=compression)
    if compression == "none":  # nothing else than the cell tells
        assert before.stat().st_size == after.stat().st_size
        footers = [pq.read_metadata(path) for path in (before, after)]
        assert footers[0].equals(footers[1])
    assert fingerprint(before) == fingerprint(same) != fingerprint(after)


def test_parquet_fingerprint_changes_with_one_byte_of_columns_that_are_read(tmp_path):
    path = stored(tmp_path / "a.parquet", table())
    data, before = path.read_bytes(), fingerprint(path)
    metadata = pq.read_metadata(path)
    noticed = unnoticed = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in range(group.num_columns):
            chunk = group.column(column)
            first, last = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size - 1
            for place in (first, (first + last) // 2, last):
                path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
                if chunk.path_in_schema == "other":  # which nobody reads
                    assert fingerprint(path) == before
                    unnoticed += 1
                else:
                    assert fingerprint(path) != before
                    noticed += 1
    assert (noticed, unnoticed) == (9 * 3 * 3, 9 * 3)


def test_resume_raises_if_parquet_file_was_edited(tmp_path, make_provider):
    path = stored(tmp_path / "train.parquet", table())

    def stream():
        columns = Columns(ignore=["image", "other"])
        return make_provider(train_path=path, window_size=8, columns=columns).stream("train")

    first = stream()
    next(first)
    state = first.state_dict()
    stream().load_state_dict(state)
    data = path.read_bytes()
    path.write_bytes(data[: (at := data.index(b"seven"))] + b"eight" + data[at + 5 :])
    with pytest.raises(ValueError, match=r"^the checkpoint position belongs to other data: found data \w"):
        stream().load_state_dict(state)


def test_parquet_fingerprint_is_independent_of_file_name_and_time(tmp_path):
    path = stored(tmp_path / "a.parquet", table())
    before = fingerprint(path)
    assert fingerprint(path.rename(tmp_path / "b.parquet")) == before
    (tmp_path / "b.parquet").touch()
    assert fingerprint(tmp_path / "b.parquet") == before
    stored(tmp_path / "c.parquet", table("eight", 3))
    both = fingerprint(tmp_path)
    (tmp_path / "b.parquet").rename(tmp_path / "d.parquet")
    assert fingerprint(tmp_path) != both  # in another order


def test_parquet_fingerprint_of_large_file_reads_only_sampled_blocks(tmp_path, monkeypatch):
    """Blocks are spread over all texts; a change between them that alters no size is not detected, as documented."""
    path = stored(tmp_path / "a.parquet", table())
    read, blocks = [], tables._sample_blocks
    for name, value in {"_BLOCK": 64, "_MOST_OF_TEXTS": 10, "_MOST_OF_BYTES": 5}.items():
        monkeypatch.setattr(tables, name, value)

    def counted(*given):
        for block in blocks(*given):
            read.append(len(block))
            yield block

    monkeypatch.setattr(tables, "_sample_blocks", counted)
    before = fingerprint(path)
    assert len(read) == 15 and max(read) <= 64
    found = [fingerprint(stored(tmp_path / "b.parquet", table("eight", row))) != before for row in range(ROWS)]
    assert 0 < sum(found) < ROWS / 2
    longer = [fingerprint(stored(tmp_path / "b.parquet", table("seventy", row))) != before for row in range(ROWS)]
    assert all(longer)  # a column of other size is in the footer
    assert fingerprint(stored(tmp_path / "b.parquet", table(changed=3, picture=b"1"))) != before


def test_parquet_error_names_file_if_fingerprint_cannot_read_it(tmp_path, monkeypatch):
    path = stored(tmp_path / "a.parquet", table())

    def gone(*_):
        raise OSError("stale file handle")

    monkeypatch.setattr(tables, "_sample_blocks", gone)
    with pytest.raises(DataError, match=r"a.parquet: cannot read a file \(stale file handle\)"):
        Parquet(path)


IMAGE = pa.array([b"\x89PNG"], pa.binary())


@pytest.mark.parametrize(("key", "column"), [
    ("photo", pa.array([{"path": "a.png", "width": 32, "height": 32}])),
    ("photo", pa.StructArray.from_arrays([IMAGE, pa.array(["a.png"]), pa.array(["png"])], ["bytes", "path", "mime"])),
    ("photo", pa.array([[{"url": "a.png"}]])), ("photo", pa.array(["a.png"]).dictionary_encode()),
    ("photo", pa.array(["a.png"], pa.string_view())), ("photo", pa.array([["a.png"]], pa.list_(pa.string(), 1))),
    ("extra", pa.array([b"x" * 100], pa.binary(100))), ("extra", pa.array([[b"x"]], pa.list_(pa.large_binary()))),
    ("loss", pa.array([False])), ("tool_calls", pa.array([[{"name": "f"}]])), ("loss_mask", pa.array([[0, 1]])),
    ("rejected", pa.array(["No."]).dictionary_encode()), ("label", pa.array([False])),
])  # fmt: skip
def test_parquet_raises_if_unsupported_column_is_not_ignored(tmp_path, key, column):
    pq.write_table(pa.table({"messages": [[ASK, ANSWER]], key: column}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=f"'{key}'"):
        Parquet(tmp_path / "train.parquet")[0]
    assert Parquet(tmp_path / "train.parquet", schema=Columns(ignore=(key,)))[0].messages == (ASK, ANSWER)


@pytest.mark.parametrize("objects", [{"ref": ["x"], "bbox": [[1, 2]]}, {"bbox": [[1, 2]]}])
def test_parquet_raises_if_text_has_bbox_placeholder_of_ms_swift(tmp_path, objects):
    messages = [{"role": "user", "content": "<bbox>"}, ANSWER]
    pq.write_table(pa.table({"messages": [messages], "objects": [objects]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="found <bbox> in a text next to 'objects'"):
        Parquet(tmp_path / "train.parquet")[0]


def test_parquet_reads_rows_if_rejected_answer_is_null(tmp_path):
    rows = {"messages": [[ASK, ANSWER]] * 2, "rejected": ["No.", None], "texts": [None, None], "label": [None, True]}
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    source = Parquet(tmp_path / "train.parquet")
    assert source[1].messages == (ASK, ANSWER)
    with pytest.raises(DataError, match="found 'rejected'"):
        source[0]


def test_parquet_map_column_is_read_as_object(tmp_path):
    arguments = pa.map_(pa.string(), pa.string())
    message = {"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(
        pa.struct({"name": pa.string(), "arguments": arguments}.items()))}  # fmt: skip
    call = {"name": "f", "arguments": [("city", "Paris")]}
    column = pa.array([[ASK, {**ANSWER, "tool_calls": [call]}]], pa.list_(pa.struct(message.items())))
    pq.write_table(pa.table({"messages": column}), tmp_path / "train.parquet")
    found = Parquet(tmp_path / "train.parquet")[0].messages[1]["tool_calls"]
    assert found == [{"name": "f", "arguments": {"city": "Paris"}}]


def test_columns_to_read_skips_embedding_and_timestamp_columns(tmp_path):
    rows = pa.table({"messages": [[ASK, ANSWER]], "embedding": [[0.5] * 9], "time": pa.array([1], pa.timestamp("ns"))})
    assert tables.columns_to_read(rows.append_column("id", pa.array([7])).schema, "x") == ["messages", "id"]
